"""Gated linear attention: every key channel of the state decays at a rate of its own, which the token chooses.

Recurrence
    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T,   g_t = log sigmoid(W_2 W_1 x_t + b) / temperature, a key channel
    o_t = RMSNorm( S_t^T q_t / sqrt(K) ) * silu(W_g x_t), a head

Source
    Yang et al. 2023 (arXiv 2312.06635), eq. 3-5 and section 4.4: temperature 16, rank 16, keys half as wide as values,
    the output gate. RMSNorm in place of the paper's LayerNorm, and b = 0 at first, as in fla (code).
    Choice: a short convolution before q, k and v, without activation; the paper has none.

State
    S: n_heads * d_k * d_v with d_k = expand_k * head_dim and d_v = expand_v * head_dim; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    d_k and d_v are whole numbers. No rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.linear_attention import linear_attention
from mechanisms._parts import Base, GatedOutput, Projections, Shape, State

REVISION = 1
STATE = "n_heads * (head_dim*expand_k) * (head_dim*expand_v)"
CACHE = "conv*n_heads*head_dim*(2*expand_k + expand_v)"
PARAMS = (
    "n_heads*head_dim*((2*expand_k + expand_v)*(d_model + (4 if short_conv else 0)) + 2*expand_v*d_model)"
    " + gate_rank*(d_model + n_heads*head_dim*expand_k) + n_heads*head_dim*expand_k + head_dim*expand_v"
)
LIMITS = [
    "expand_k > 0",
    "expand_v > 0",
    "(head_dim*expand_k) % 1 == 0",
    "(head_dim*expand_v) % 1 == 0",
    "gate_rank >= 1",
    "temperature > 0",
    "position != 'rope'",
]


class Mixer(Base):
    """Gated linear attention.

    Args:
        expand_k: width of a key as a multiple of head_dim
        expand_v: width of a value as a multiple of head_dim
        gate_rank: features between the two matrices of the decay gate
        temperature: divides the gate's log sigmoid; at 16 a gate of 1/2 keeps 0.96 of a channel
    """

    def __init__(
        self,
        shape: Shape,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        temperature: float = 16.0,
    ) -> None:
        super().__init__()
        self.shape, self.temperature = shape, temperature
        self.d_k, self.d_v = round(expand_k * shape.head_dim), round(expand_v * shape.head_dim)
        self.project = Projections(shape, self.d_v, d_k=self.d_k)
        self.gate_down = nn.Linear(shape.d_model, gate_rank, bias=False)
        self.gate_up = nn.Linear(gate_rank, shape.n_heads * self.d_k)
        self.read = GatedOutput(shape, self.d_v)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.d_k, self.d_v)
        S = torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return {"S": S, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        o, S = linear_attention(
            q,
            k,
            v,
            self._log_decay(x_BTD),
            scale=self.d_k**-0.5,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        return self.read(o, x_BTD), {"S": S, **carried}

    def _log_decay(self, x_BTD: Tensor) -> Tensor:
        """g, fp32 (B, T, H, K)."""
        raw = self.gate_up(self.gate_down(x_BTD))
        with torch.autocast(x_BTD.device.type, enabled=False):
            g = nn.functional.logsigmoid(raw.to(accumulator(raw))) / self.temperature
        return g.unflatten(-1, (self.shape.n_heads, self.d_k))
