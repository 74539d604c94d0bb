"""Softmax attention: every token reads every earlier one, exactly.

Recurrence
    o_t = sum_{s<=t} softmax_s( q_t . k_s / sqrt(K) ) v_s
    with `position: rope`, q and k are turned by their position first (theta 1e4).

Source
    Vaswani et al. 2017 (arXiv 1706.03762); rotary positions Su et al. 2021 (2104.09864).
    Where the model is not causal, the sum is over all s.
    Choice: a short convolution of width 4, without activation, before q, k and v, as every mixer here has by default.

State
    All keys and values: 2 * seq_len * n_heads * head_dim, growing by a token at each step; and 3 tokens of q, k, v.

Cost
    T^2 in compute, T in memory.

Limits
    Rotary positions need an even head_dim. The short convolution looks back alone, so there is none in a model that is
    not causal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mechanisms._parts import Base, Projections, Shape, State, rotate

REVISION = 1
STATE = "0"
CACHE = "2*seq_len*n_heads*head_dim + 3*conv*n_heads*head_dim"
PARAMS = "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model)"
LIMITS = ["position != 'rope' or head_dim % 2 == 0", "causal or not short_conv"]


def reference(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool = True) -> Tensor:
    """The law: each query alone. The last query is at the last key."""
    n_past = k_BSHK.shape[1] - q_BTHK.shape[1]
    out = []
    for t in range(q_BTHK.shape[1]):
        seen = slice(0, n_past + t + 1 if causal else None)
        x_BSH = (q_BTHK[:, t : t + 1] * k_BSHK[:, seen]).sum(-1) * q_BTHK.shape[-1] ** -0.5
        out.append((x_BSH.softmax(1)[..., None] * v_BSHK[:, seen]).sum(1))
    return torch.stack(out, 1)


class Mixer(Base):
    """Softmax attention. It has no parameters of its own in a spec."""

    sees_all = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.n_heads * shape.head_dim
        self.project = Projections(shape, shape.head_dim)
        self.out = nn.Linear(width, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        empty = torch.zeros(batch, 0, self.shape.n_heads, self.shape.head_dim, device=device, dtype=dtype)
        return {"k": empty, "v": empty, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        n_past = state["k"].shape[1] if state else 0
        T = q.shape[1]
        if self.shape.position == "rope":
            position = torch.arange(n_past, n_past + T, device=q.device)[None]
            q, k = rotate(q, position), rotate(k, position)
        if state:
            k, v = torch.cat([state["k"], k], 1), torch.cat([state["v"], v], 1)
        causal = self.shape.causal
        o = reference(q, k, v, causal) if self.shape.impl == "reference" else self._attend(q, k, v, causal)
        return self.out(o.flatten(2)), {"k": k, "v": v, **carried}

    @staticmethod
    def _attend(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
        T, S = q_BTHK.shape[1], k_BSHK.shape[1]
        q, k, v = (t.transpose(1, 2) for t in (q_BTHK, k_BSHK, v_BSHK))
        if T == S or not causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
        mask_TS = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS).transpose(1, 2)
