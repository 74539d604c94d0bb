"""DeltaNet: linear attention that first erases what the key reads, so that a key written twice keeps the last value.

Recurrence
    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = RMSNorm( S_t^T q_t / sqrt(K) ), a head
    q, k: SiLU, then length 1; v: SiLU; beta = sigmoid(W x)

Source
    Yang et al. 2024 (arXiv 2406.06484), eq. 3-5; norms, activations and scale as in fla (code).

State
    S: n_heads * head_dim^2; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    No rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.delta_rule import delta_rule
from mechanisms._parts import Base, Projections, RmsNorm, Shape, State, WriteGate, unit_norm

REVISION = 1
STATE = "n_heads*head_dim*head_dim"
CACHE = "3*conv*n_heads*head_dim"
PARAMS = "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model) + n_heads*d_model + head_dim"
LIMITS = ["position != 'rope'"]


class Mixer(Base):
    """DeltaNet. It has no parameters of its own in a spec."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.project = Projections(shape, shape.head_dim, activation="silu")
        self.write = WriteGate(shape)
        self.norm = RmsNorm(shape.head_dim)
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K = self.shape.n_heads, self.shape.head_dim
        S = torch.zeros(batch, H, K, K, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return {"S": S, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        o, S, _ = delta_rule(
            unit_norm(q),
            unit_norm(k),
            None,
            v,
            self.write(x_BTD),
            scale=self.shape.head_dim**-0.5,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        return self.out(self.norm(o).flatten(2)), {"S": S, **carried}
