"""Sliding-window attention: softmax attention that forgets by age.

Recurrence
    o_t = sum_{t-window<s<=t} softmax_s( q_t . k_s / sqrt(K) ) v_s
    with `position: rope`, q and k are turned by their position first (theta 1e4).

Source
    Longformer (Beltagy et al. 2020, arXiv 2004.05150), causal. The window counts the token itself (code: fla passes
    window - 1 to the left). Choice: short convolution as in softmax.

State
    The last `window` keys (turned already) and values: 2 * window * n_heads * head_dim; the position; 3 tokens of
    q, k, v.

Cost
    T * window in compute and memory.

Limits
    Rotary positions need an even head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._launch import resolve
from mechanisms._parts import Base, Projections, Shape, State, rotate

REVISION = 1
STATE = "1"
CACHE = "2*min(window, seq_len)*n_heads*head_dim + 3*conv*n_heads*head_dim"
PARAMS = "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model)"
LIMITS = ["window >= 1", "position != 'rope' or head_dim % 2 == 0"]
SAME_AS = {"softmax": "window >= seq_len"}


MOST_SCORES = 4_194_304
"""Numbers that the mask of a whole row may have. Longer rows are cut into bands, which no mask outgrows."""


def reference(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, window: int) -> Tensor:
    """The law: each query alone. The last query is at the last key."""
    n_past = k_BSHK.shape[1] - q_BTHK.shape[1]
    out = []
    for t in range(q_BTHK.shape[1]):
        seen = slice(max(0, n_past + t + 1 - window), n_past + t + 1)
        x_BSH = (q_BTHK[:, t : t + 1] * k_BSHK[:, seen]).sum(-1) * q_BTHK.shape[-1] ** -0.5
        out.append((x_BSH.softmax(1)[..., None] * v_BSHK[:, seen]).sum(1))
    return torch.stack(out, 1)


class Mixer(Base):
    """Sliding-window attention.

    Args:
        window: how far a token reads, itself included (tokens)
    """

    def __init__(self, shape: Shape, *, window: int = 16) -> None:
        super().__init__()
        self.shape, self.window, self.impl = shape, window, resolve(shape.impl, "sliding_window")
        self.project = Projections(shape, shape.head_dim)
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        empty = torch.zeros(batch, 0, self.shape.n_heads, self.shape.head_dim, device=device, dtype=dtype)
        start = torch.zeros(batch, dtype=torch.int32, device=device)
        return {"k": empty, "v": empty, "t": start, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        B, T = x_BTD.shape[:2]
        t_B = state["t"] if state else torch.zeros(B, dtype=torch.int32, device=q.device)
        if self.shape.position == "rope":
            position = t_B[:, None] + torch.arange(T, device=q.device)
            q, k = rotate(q, position), rotate(k, position)
        if state:
            k, v = torch.cat([state["k"], k], 1), torch.cat([state["v"], v], 1)
        o = reference(q, k, v, self.window) if self.impl == "reference" else self._attend(q, k, v)
        last = slice(max(0, k.shape[1] - self.window), None)
        return self.out(o.flatten(2)), {"k": k[:, last], "v": v[:, last], "t": t_B + T, **carried}

    def _attend(self, q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
        T, S, W = q_BTHK.shape[1], k_BSHK.shape[1], self.window
        if T == S <= W:
            return _attend(q_BTHK, k_BSHK, v_BSHK)
        if T * S > MOST_SCORES and T > 2 * W:
            first = self._attend(q_BTHK[:, :W], k_BSHK[:, : S - T + W], v_BSHK[:, : S - T + W])
            rest = _bands(q_BTHK[:, W:], k_BSHK[:, S - T :], v_BSHK[:, S - T :], W)
            return torch.cat([first, rest], 1)
        mask_TS = torch.ones(T, S, dtype=torch.bool, device=q_BTHK.device).tril(S - T).triu(S - T - W + 1)
        return _attend(q_BTHK, k_BSHK, v_BSHK, mask_TS)


def _attend(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, mask_TS: Tensor | None = None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q_BTHK, k_BSHK, v_BSHK))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, is_causal=mask_TS is None)
    return o.transpose(1, 2)


def _bands(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, window: int) -> Tensor:
    """Each `window` of queries reads the keys of its own place and of the window before. S = window + T."""
    B, T, W = *q_BTHK.shape[:2], window
    more = (0, 0, 0, 0, 0, -T % W)
    q_NWHK = F.pad(q_BTHK, more).unflatten(1, (-1, W)).flatten(0, 1)
    k_NSHK, v_NSHV = (F.pad(x, more).unfold(1, 2 * W, W).flatten(0, 1).permute(0, 3, 1, 2) for x in (k_BSHK, v_BSHK))
    ahead_WS = torch.arange(2 * W, device=q_BTHK.device) - torch.arange(W, device=q_BTHK.device)[:, None]
    o_NWHV = _attend(q_NWHK, k_NSHK, v_NSHV, (ahead_WS >= 1) & (ahead_WS <= W))
    return o_NWHV.unflatten(0, (B, -1)).flatten(1, 2)[:, :T]
