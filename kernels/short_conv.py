"""Causal depthwise convolution over time: each channel mixes its last W tokens with weights of its own.

    y_t = act( sum_i w_i x_{t-W+1+i} ),   i = 0 .. W-1     (w's last column weighs the token itself)

Carried state: the last W-1 tokens, (B, W-1, D), in the dtype of x. Letters: B batch, T time, D channels, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._launch import check, full_precision, resolve


def reference(x_BTD: Tensor, w_DW: Tensor, state_BWD: Tensor) -> tuple[Tensor, Tensor]:
    """The law: one token at a time."""
    out = []
    for t in range(x_BTD.shape[1]):
        window_BWD = torch.cat([state_BWD, x_BTD[:, t : t + 1]], 1)
        out.append((window_BWD * w_DW.T).sum(1))
        state_BWD = window_BWD[:, 1:]
    return torch.stack(out, 1), state_BWD


class _Shifted(torch.autograd.Function):
    """The whole sequence as W shifted products; `past` is x with W-1 earlier tokens in front, (B, W-1+T, D)."""

    @staticmethod
    def forward(ctx: Any, past: Tensor, w_DW: Tensor) -> Tensor:
        width = w_DW.shape[1]
        T = past.shape[1] - width + 1
        y_BTD = past[:, width - 1 :] * w_DW[:, width - 1]
        for i in range(width - 1):
            y_BTD.addcmul_(past[:, i : i + T], w_DW[:, i])
        ctx.save_for_backward(past, w_DW)
        return y_BTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy_BTD,) = grads
        past, w_DW = ctx.saved_tensors
        width, T = w_DW.shape[1], dy_BTD.shape[1]
        dpast = F.pad(dy_BTD * w_DW[:, width - 1], (0, 0, width - 1, 0))
        for i in range(width - 1):
            dpast[:, i : i + T].addcmul_(dy_BTD, w_DW[:, i])
        dw_DW = torch.stack([(past[:, i : i + T] * dy_BTD).sum((0, 1)) for i in range(width)], 1)
        return dpast, dw_DW


@full_precision
def short_conv(
    x_BTD: Tensor,
    w_DW: Tensor,
    activation: str | None = None,
    state: Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`x` convolved causally with `w`, and the last W-1 tokens. `activation`: None or "silu"."""
    impl = resolve(impl, "short_conv")
    (B, T, D), width = x_BTD.shape, w_DW.shape[1]
    check("short_conv", "w", w_DW, (D, width))
    if activation not in (None, "silu"):
        raise ValueError(f"short_conv: activation={activation!r} should be None or 'silu'")
    if state is None:
        past = F.pad(x_BTD, (0, 0, width - 1, 0))
    else:
        check("short_conv", "state", state, (B, width - 1, D))
        past = torch.cat([state.to(x_BTD.dtype), x_BTD], 1)
    weight = w_DW.to(x_BTD.dtype)
    if impl == "reference":
        y_BTD, _ = reference(x_BTD, weight, past[:, : width - 1])
    else:
        y_BTD = _Shifted.apply(past, weight)
    return (F.silu(y_BTD) if activation else y_BTD), past[:, T:]


def short_conv_step(x_BD: Tensor, w_DW: Tensor, activation: str | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: (B, D) and the state in, (B, D) and the next state out."""
    y_BTD, state = short_conv(x_BD[:, None], w_DW, activation, state)
    return y_BTD[:, 0], state
