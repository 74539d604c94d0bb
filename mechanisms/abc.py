"""Attention with Bounded-memory Control: each slot is a softmax over the past, with one score a token and slot.

Recurrence
    c_t = W_c x, one a slot            w_t = e^{c_t} / sum_{s<=t} e^{c_s}
    K_t = diag(1 - w_t) K_{t-1} + w_t k_t^T        V_t = diag(1 - w_t) V_{t-1} + w_t v_t^T
    o_t = V_t^T softmax( K_t q_t / sqrt(K) )       y = W_o ( RMSNorm(o), a head, times silu(W_g x) )
    so that a slot's key is sum_s softmax_{s<=t}(c_s) k_s: nothing decays, but what comes later weighs less and less

Source
    Peng et al. 2021 (arXiv 2110.02488): control by e^{c}, normalised over the past (paper, its "MLP" control; here c is
    linear in x, as in fla). Scores held within +-32, 64 slots, logit scale 1 / sqrt(K), gated RMSNorm a head (code:
    fla). Choices: no rotary positions (fla's layer has them by default), head_dim for both keys and values (fla: keys
    half as wide).

State
    A key, a value and the sum of e^c a slot: n_heads * slots * (2 * head_dim + 1); 3 tokens of q, k, v.

Cost
    T * slots in compute, constant in memory when decoding.

Limits
    No rotary positions: a slot mixes keys of many positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.slot_attention import slot_attention
from mechanisms._parts import Base, GatedOutput, Projections, Shape, State

REVISION = 1
STATE = "n_heads*slots*(2*head_dim + 1)"
CACHE = "3*conv*n_heads*head_dim"
PARAMS = "n_heads*(head_dim*(3*(d_model + (4 if short_conv else 0)) + 2*d_model) + slots*d_model) + head_dim"
LIMITS = ["slots >= 1", "position != 'rope'"]

LARGEST = 32.0
"""Scores are held within this, so that their exponentials and their sums over any past are finite in fp32."""

TINY = 1e-30
"""Added to a sum that may be empty: far below e^-32."""


class Mixer(Base):
    """Attention with Bounded-memory Control.

    Args:
        slots: how many keys and values a head keeps (slots)
    """

    def __init__(self, shape: Shape, *, slots: int = 64) -> None:
        super().__init__()
        self.shape, self.slots = shape, slots
        self.project = Projections(shape, shape.head_dim)
        self.control = nn.Linear(shape.d_model, shape.n_heads * slots, bias=False)
        self.read = GatedOutput(shape, shape.head_dim)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size, acc = (batch, self.shape.n_heads, self.slots), torch.promote_types(dtype, torch.float32)
        slots = {n: torch.zeros(*size, self.shape.head_dim, device=device, dtype=acc) for n in ("keys", "values")}
        total = torch.zeros(size, device=device, dtype=acc)
        return {**slots, "total": total, **self.project.initial_state(batch, device, dtype)}

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """How evenly the slots are filled, by the size of their keys."""
        return {"effective/slots": state["keys"].norm(dim=-1)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        f, total = self._gate(x_BTD, state["total"] if state else None)
        o, (keys, values) = slot_attention(
            q,
            k,
            v,
            f,
            scale=self.shape.head_dim**-0.5,
            initial_state=(state["keys"], state["values"]) if state else None,
            impl=self.shape.impl,
        )
        return self.read(o, x_BTD), {"keys": keys, "values": values, "total": total, **carried}

    def _gate(self, x_BTD: Tensor, total_BHM: Tensor | None) -> tuple[Tensor, Tensor]:
        """log(1 - w) (B, T, H, M), and the sum of e^c after the last token.

        As log-sigmoid of (log of the sum before) - c: exact to rounding also where w is near 0, and -37 or less (as
        good as -inf) where nothing came before.
        """
        raw_BTHM = self.control(x_BTD).unflatten(-1, (-1, self.slots))
        c_BTHM = raw_BTHM.to(accumulator(raw_BTHM)).clamp(-LARGEST, LARGEST)
        sums = c_BTHM.exp()
        if total_BHM is not None:
            sums = torch.cat([sums[:, :1] + total_BHM[:, None], sums[:, 1:]], 1)
        after = sums.cumsum(1)
        first = torch.zeros_like(after[:, :1]) if total_BHM is None else total_BHM[:, None]
        before = torch.cat([first, after[:, :-1]], 1)
        return F.logsigmoid((before + TINY).log() - c_BTHM), after[:, -1]
