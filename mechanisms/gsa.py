"""Gated Slot Attention: a fixed number of slots that each forget as the token says, read by softmax over the slots.

Recurrence
    K_t = diag(a_t) K_{t-1} + (1 - a_t) k_t^T        V_t = diag(a_t) V_{t-1} + (1 - a_t) v_t^T
    o_t = V_t^T softmax( K_t q_t )                   y = W_o RMSNorm( silu(o) )
    a_t = sigmoid(W_a x)^{1 / damping}, one a slot; q, k and v: SiLU

Source
    Zhang et al. 2024 (arXiv 2409.07146): recurrence, damping 8, 64 slots (paper). Logit scale 1, without 1 / sqrt(K);
    SiLU before an RMSNorm over all heads together; no norm of q and k (code: fla). Empty slots take part in the
    softmax (code); after the first token none is empty, as every gate is inside (0, 1).

State
    A key and a value a slot: 2 * n_heads * slots * head_dim; 3 tokens of q, k, v.

Cost
    T * slots in compute, constant in memory when decoding.

Limits
    No rotary positions: a slot mixes keys of many positions. No grouped keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.slot_attention import slot_attention
from mechanisms._parts import Base, Projections, RmsNorm, Shape, State

REVISION = 1
STATE = "2*n_heads*slots*head_dim"
CACHE = "3*conv*n_heads*head_dim"
PARAMS = "n_heads*(head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model + 1) + slots*d_model)"
LIMITS = ["slots >= 1", "damping > 0", "position != 'rope'"]


class Mixer(Base):
    """Gated Slot Attention.

    Args:
        slots: how many keys and values a head keeps (slots)
        damping: root taken of the forget gate; larger forgets more slowly
    """

    def __init__(self, shape: Shape, *, slots: int = 64, damping: float = 8.0) -> None:
        super().__init__()
        self.shape, self.slots, self.damping = shape, slots, damping
        width = shape.n_heads * shape.head_dim
        self.project = Projections(shape, shape.head_dim, activation="silu")
        self.forget = nn.Linear(shape.d_model, shape.n_heads * slots, bias=False)
        self.norm = RmsNorm(width)
        self.out = nn.Linear(width, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.slots, self.shape.head_dim)
        acc = torch.promote_types(dtype, torch.float32)
        slots = {name: torch.zeros(size, device=device, dtype=acc) for name in ("keys", "values")}
        return {**slots, **self.project.initial_state(batch, device, dtype)}

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """How evenly the slots are filled, by the size of their keys."""
        return {"effective/slots": state["keys"].norm(dim=-1)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        raw_BTHM = self.forget(x_BTD).unflatten(-1, (-1, self.slots))
        o, (keys, values) = slot_attention(
            q,
            k,
            v,
            F.logsigmoid(raw_BTHM.to(accumulator(raw_BTHM))) / self.damping,
            initial_state=(state["keys"], state["values"]) if state else None,
            impl=self.shape.impl,
        )
        y = self.out(self.norm(F.silu(o).flatten(2)))
        return y, {"keys": keys, "values": values, **carried}
