"""Kimi delta attention (KDA): the gated delta rule with a decay for each key channel.

Recurrence
    S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T
    o_t = RMSNorm( S_t^T q_t / sqrt(K) ) * sigmoid(W_4 W_3 x + b), a head
    alpha = exp( -e^{A_log} softplus(W_2 W_1 x + dt_bias) ), a channel; A_log a head's
    beta = sigmoid(W_b x), a head; q, k: SiLU, then length 1; v: SiLU

Source
    Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), whose recurrence was at hand in third parties' words. Both maps
    through head_dim features, the sigmoid gate with a bias, norms, A ~ U(1, 16): the layer in fla (code).
    Choices: softplus(dt_bias) starts log-uniform in 1e-3..0.1, as in the other gated mechanisms here, and not at 0.69,
    where every channel would forget half of what it holds in a token; no hybrid with softmax layers: that is the
    model's `layers`.

State
    S: n_heads * head_dim * d_v with d_v = expand_v * head_dim; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    No rotary positions (nor in the paper). Plain torch on a card too: no Triton kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.kda import kda
from mechanisms._parts import Base, DecayGate, Projections, RmsNorm, Shape, State, WriteGate, unit_norm

REVISION = 1
STATE = "n_heads*head_dim*head_dim*expand_v"
CACHE = "conv*n_heads*head_dim*(2 + expand_v)"
PARAMS = (
    "n_heads*head_dim*((2 + expand_v)*(d_model + (4 if short_conv else 0)) + head_dim + 1)"
    " + n_heads*head_dim*expand_v*(head_dim + 1 + d_model) + 2*d_model*head_dim + n_heads*(d_model + 1)"
    " + expand_v*head_dim"
)
LIMITS = ["expand_v >= 1", "a_min > 0", "a_max > a_min", "position != 'rope'"]


class ChannelDecay(DecayGate):
    """g = -e^{A_log} softplus(W_2 W_1 x + dt_bias), fp32 (B, T, H, K): A_log a head's, dt_bias a channel's."""

    def __init__(self, shape: Shape, a_max: float, a_min: float) -> None:
        super().__init__(shape, a_max, a_min)
        self.heads, width = shape.n_heads, shape.n_heads * shape.head_dim
        self.proj = low_rank(shape, width, bias=False)
        self.dt_bias = nn.Parameter(torch.full((width,), -4.6))  # as in DecayGate, until drawn

    def log_decay(self, step_BTD: Tensor) -> Tensor:
        return -self.A_log.exp()[:, None] * step_BTD.unflatten(-1, (self.heads, -1))


def low_rank(shape: Shape, width: int, bias: bool) -> nn.Sequential:
    """d_model -> head_dim -> `width` features."""
    return nn.Sequential(
        nn.Linear(shape.d_model, shape.head_dim, bias=False), nn.Linear(shape.head_dim, width, bias=bias)
    )


class Mixer(Base):
    """Kimi delta attention.

    Args:
        expand_v: width of a value as a multiple of head_dim
        a_min: smallest initial decay rate A of a head (log-decay = -A softplus(...))
        a_max: largest initial decay rate A of a head, drawn from a_min to a_max
    """

    def __init__(self, shape: Shape, *, expand_v: int = 1, a_min: float = 1.0, a_max: float = 16.0) -> None:
        super().__init__()
        self.shape, self.d_v = shape, expand_v * shape.head_dim
        self.project = Projections(shape, self.d_v, activation="silu")
        self.write, self.decay = WriteGate(shape), ChannelDecay(shape, a_max, a_min)
        self.gate = low_rank(shape, shape.n_heads * self.d_v, bias=True)
        self.norm = RmsNorm(self.d_v)
        self.out = nn.Linear(shape.n_heads * self.d_v, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.shape.head_dim, self.d_v)
        S = torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return {"S": S, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        o, S = kda(
            unit_norm(q),
            unit_norm(k),
            v,
            self.write(x_BTD),
            self.decay(x_BTD),
            scale=self.shape.head_dim**-0.5,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        return self.out(self.norm(o).flatten(2) * self.gate(x_BTD).sigmoid()), {"S": S, **carried}
