"""Retention: linear attention in which each head forgets at its own fixed rate, with rotary positions.

Recurrence
    S_t = gamma_h S_{t-1} + k~_t v_t^T        gamma_h = 1 - 2^{-5-h}, h = 0 .. n_heads - 1
    o_t = GroupNorm( S_t^T q~_t / sqrt(K) ) * silu(W_g x_t), a group a head
    q~, k~: q and k turned by their position, so that q~_t . k~_s depends on t - s alone

Source
    Sun et al. 2023 (arXiv 2307.08621), eq. 5-8: gammas, swish gate, values twice as wide as keys. The group norm has no
    gain, as in torchscale (code). Its other scalings of the scores cancel in the norm, but for rounding, and are left
    out. Rotary rates 10000^{-2i/K} as everywhere here (choice; torchscale spaces them a little differently).
    Choice: a short convolution before q, k and v, without activation; the paper has none.

State
    S: n_heads * head_dim * d_v with d_v = expand_v * head_dim; the position of the next token; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    An even head_dim. It has its own rotary positions, so the model's are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.linear_attention import linear_attention
from mechanisms._parts import Base, Projections, Shape, State, rotate

REVISION = 1
STATE = "n_heads*head_dim*head_dim*expand_v + 1"
CACHE = "conv*n_heads*head_dim*(2 + expand_v)"
PARAMS = "n_heads*head_dim*((2 + expand_v)*(d_model + (4 if short_conv else 0)) + 2*expand_v*d_model)"
LIMITS = ["expand_v >= 1", "head_dim % 2 == 0", "position != 'rope'"]


class Mixer(Base):
    """Retention.

    Args:
        expand_v: width of a value as a multiple of head_dim
    """

    loss_H: Tensor

    def __init__(self, shape: Shape, *, expand_v: int = 2) -> None:
        super().__init__()
        self.shape, self.d_v = shape, expand_v * shape.head_dim
        self.project = Projections(shape, self.d_v)
        # 1 - gamma, powers of two and so exact in any precision: head h forgets half in about 22 * 2^h tokens
        self.register_buffer("loss_H", 2.0 ** -(5.0 + torch.arange(shape.n_heads)), persistent=False)
        self.gate = nn.Linear(shape.d_model, shape.n_heads * self.d_v, bias=False)
        self.out = nn.Linear(shape.n_heads * self.d_v, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.shape.head_dim, self.d_v)
        S = torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        length = torch.zeros(batch, device=device, dtype=torch.int32)
        return {"S": S, "length": length, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        B, T, _ = x_BTD.shape
        start_B = state["length"] if state else torch.zeros(B, device=x_BTD.device, dtype=torch.int32)
        position_BT = start_B[:, None] + torch.arange(T, device=x_BTD.device, dtype=torch.int32)
        o, S = linear_attention(
            rotate(q, position_BT),
            rotate(k, position_BT),
            v,
            torch.log1p(-self.loss_H.to(accumulator(v))),
            scale=self.shape.head_dim**-0.5,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        return self._read(o, x_BTD), {"S": S, "length": start_B + T, **carried}

    def _read(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate(x_BTD))
        with torch.autocast(x_BTD.device.type, enabled=False):
            o = nn.functional.layer_norm(o_BTHV.to(accumulator(o_BTHV)), (self.d_v,)).flatten(2)
        return self.out(o * gate)
