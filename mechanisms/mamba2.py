"""Mamba-2: a linear recurrence with a step size that the token chooses: the longer, the more is forgotten and written.

Recurrence
    S_t = e^{-A dt_t} S_{t-1} + dt_t b_t x_t^T        y_t = S_t^T c_t + D x_t          a head; b, c shared by its group
    o_t = RMSNorm( y_t * silu(W_z u_t) ), over all heads of a group
    dt = softplus(W_dt u + dt_bias), A = e^{A_log}; x, b, c = SiLU(conv(W u)); u the mixer's input

Source
    Dao & Gu 2024 (arXiv 2405.21060), section 7 and eq. 16 (SSD); initial values, the norm behind the gate, expand 2,
    state 128 and one group as in mamba_ssm (code): A ~ U(a_min, a_max), dt log-uniform in 1e-3..0.1, D = 1.
    Choices: heads are as wide as the model's (64 in the paper), so there are expand * n_heads of them; no bias in the
    convolution, as nowhere here; SiLU stays where the convolution is off.

State
    S: expand * n_heads * head_dim * d_state; 3 tokens of x, b, c.

Cost
    T in compute, constant in memory when decoding.

Limits
    Groups divide the heads. No rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear_attention import linear_attention
from mechanisms._parts import Mamba2Block, Shape, State

REVISION = 1
STATE = "expand*n_heads*head_dim*d_state"
CACHE = "conv*(expand*n_heads*head_dim + 2*groups*d_state)"
PARAMS = (
    "expand*n_heads*head_dim*(2*d_model + 1) + (expand*n_heads*head_dim + 2*groups*d_state)*(d_model"
    " + (4 if short_conv else 0)) + expand*n_heads*(d_model + 3)"
)
LIMITS = [
    "expand >= 1",
    "d_state >= 1",
    "groups >= 1",
    "(expand*n_heads) % max(groups, 1) == 0",
    "a_min > 0",
    "a_max > a_min",
    "position != 'rope'",
]


class Mixer(Mamba2Block):
    """Mamba-2.

    Args:
        expand: width of all heads together as a multiple of d_model
        d_state: width of b and c, the keys and queries of this recurrence (features)
        groups: how many b and c there are for all heads (count)
        a_min: smallest initial decay rate A of a head (log-decay = -A dt)
        a_max: largest initial decay rate A of a head, drawn from a_min to a_max
    """

    def __init__(
        self,
        shape: Shape,
        *,
        expand: int = 2,
        d_state: int = 128,
        groups: int = 1,
        a_min: float = 1.0,
        a_max: float = 16.0,
    ) -> None:
        super().__init__(shape, expand, d_state, groups, a_min, a_max)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.d_state, self.shape.head_dim)
        state = {"S": torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))}
        return {**state, **self.empty_conv(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        c_BTGN, b_BTGN, x_BTHP, dt_BTH, carried = self.inputs(x_BTD, state)
        y, S = linear_attention(
            c_BTGN,
            b_BTGN,
            (x_BTHP * dt_BTH[..., None]).to(x_BTHP.dtype),
            self.decay.log_decay(dt_BTH),
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        assert isinstance(S, Tensor)
        return self.read(y, x_BTHP, x_BTD), {"S": S, **carried}
