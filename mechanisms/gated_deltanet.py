"""Gated DeltaNet: the delta rule with a decay that the token chooses.

Recurrence
    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = RMSNorm( S_t^T q_t / sqrt(K) ) * silu(W_g x), a head
    alpha = exp( -e^{A_log} softplus(W_a x + dt_bias) ), beta = sigmoid(W_b x); q, k: SiLU, then length 1; v: SiLU

Source
    Yang et al. 2024 (arXiv 2412.06464), eq. 10; gates, norms and initial values as in fla (code), but A drawn from
    U(1e-4, a_max) with a_max = 16 and not from 0.

State
    S: n_heads * head_dim * d_v with d_v = expand_v * head_dim; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    No rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.delta_rule import delta_rule
from mechanisms._parts import Base, DecayGate, GatedOutput, Projections, Shape, State, WriteGate, unit_norm

REVISION = 1
STATE = "n_heads*head_dim*head_dim*expand_v"
CACHE = "conv*n_heads*head_dim*(2 + expand_v)"
PARAMS = (
    "n_heads*head_dim*((2 + expand_v)*(d_model + (4 if short_conv else 0)) + 2*expand_v*d_model)"
    " + n_heads*(2*d_model + 2) + expand_v*head_dim"
)
LIMITS = ["expand_v >= 1", "a_max > 1e-4", "position != 'rope'"]


class Mixer(Base):
    """Gated DeltaNet.

    Args:
        expand_v: width of a value as a multiple of head_dim
        a_max: largest initial decay rate A of a head, drawn from 1e-4 to a_max (log-decay = -A softplus(...))
    """

    def __init__(self, shape: Shape, *, expand_v: int = 1, a_max: float = 16.0) -> None:
        super().__init__()
        self.shape, self.d_v = shape, expand_v * shape.head_dim
        self.project = Projections(shape, self.d_v, activation="silu")
        self.write, self.decay = WriteGate(shape), DecayGate(shape, a_max)
        self.read = GatedOutput(shape, self.d_v)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.shape.head_dim, self.d_v)
        S = torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return {"S": S, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        o, S, _ = delta_rule(
            unit_norm(q),
            unit_norm(k),
            None,
            v,
            self.write(x_BTD),
            self.decay(x_BTD),
            scale=self.shape.head_dim**-0.5,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        return self.read(o, x_BTD), {"S": S, **carried}
