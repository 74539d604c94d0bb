"""Causal depthwise convolution over time: each channel mixes its last W tokens with weights of its own.

    y_t = act( sum_i w_i x_{t-W+1+i} ),   i = 0 .. W-1     (w's last column weighs the token itself)

Carried state: the last W-1 tokens, (B, W-1, D), in the dtype of x. Letters: B batch, T time, D channels, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import check, full_precision, resolve, triton_unfit

WIDEST = 8
"""The widest convolution that the Triton kernel takes: it holds W tokens in registers."""


def reference(x_BTD: Tensor, w_DW: Tensor, state_BWD: Tensor) -> tuple[Tensor, Tensor]:
    """The law: one token at a time."""
    out = []
    for t in range(x_BTD.shape[1]):
        window_BWD = torch.cat([state_BWD, x_BTD[:, t : t + 1]], 1)
        out.append((window_BWD * w_DW.T).sum(1))
        state_BWD = window_BWD[:, 1:]
    return torch.stack(out, 1), state_BWD


class _Shifted(torch.autograd.Function):
    """The whole sequence, from no history, as W shifted products.

    The value before the activation is made again in the backward pass: cheaper than writing and reading it.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, w_DW: Tensor, activation: str | None) -> Tensor:
        w_WD = w_DW.T.contiguous()  # rows: a strided factor makes each product eight times slower on a CPU
        y_BTD = _convolve(x_BTD, w_WD)
        ctx.save_for_backward(x_BTD, w_WD)
        ctx.activation = activation
        return F.silu(y_BTD, inplace=True) if activation else y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BTD, w_WD = ctx.saved_tensors
        if ctx.activation:
            dy_BTD = torch.ops.aten.silu_backward(dy_BTD, _convolve(x_BTD, w_WD))
        dx_BTD = dy_BTD * w_WD[-1]
        dw_WD = torch.zeros_like(w_WD)
        dw_WD[-1] = (x_BTD * dy_BTD).sum((0, 1))
        for back in range(1, min(w_WD.shape[0], x_BTD.shape[1])):
            dx_BTD[:, :-back].addcmul_(dy_BTD[:, back:], w_WD[-1 - back])
            dw_WD[-1 - back] = (x_BTD[:, :-back] * dy_BTD[:, back:]).sum((0, 1))
        return dx_BTD, dw_WD.T, None


def _convolve(x_BTD: Tensor, w_WD: Tensor) -> Tensor:
    """`x` convolved from no history."""
    y_BTD = x_BTD * w_WD[-1]
    for back in range(1, min(w_WD.shape[0], x_BTD.shape[1])):
        y_BTD[:, back:].addcmul_(x_BTD[:, :-back], w_WD[-1 - back])
    return y_BTD


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
    (B, T, D), width = x_BTD.shape, w_DW.shape[1]
    unfit = triton_unfit(x_BTD, w_DW, state)
    if unfit is None and width > WIDEST:
        unfit = f"takes a width of at most {WIDEST} in its Triton kernel, not {width}"
    impl = resolve(impl, "short_conv", unfit)
    check("short_conv", "w", w_DW, (D, width))
    if activation not in (None, "silu"):
        raise ValueError(f"short_conv: activation={activation!r} should be None or 'silu'")
    if state is not None:
        check("short_conv", "state", state, (B, width - 1, D))
    if impl == "triton":
        from kernels._short_conv import Convolve  # Triton is not everywhere

        y_BTD, last_BWD = Convolve.apply(x_BTD, w_DW, state, activation is not None)
        return y_BTD, last_BWD
    weight = w_DW.to(x_BTD.dtype)
    history = x_BTD.new_zeros(B, width - 1, D) if state is None else state.to(x_BTD.dtype)
    last = torch.cat([history[:, min(T, width - 1) :], x_BTD[:, max(0, T - width + 1) :]], 1)
    if impl == "reference":
        y_BTD, _ = reference(x_BTD, weight, history)
        return (F.silu(y_BTD) if activation else y_BTD), last
    if state is None:
        return _Shifted.apply(x_BTD, weight, activation), last
    # From no history over the longer sequence: the outputs of the history itself are dropped.
    return _Shifted.apply(torch.cat([history, x_BTD], 1), weight, activation)[:, width - 1 :], last


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `short_conv` that together use each of its options."""

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    for activation, start in ((None, False), ("silu", True)):
        state = draw(3, 3, 5) if start else None
        yield {"x_BTD": draw(3, T, 5), "w_DW": draw(5, 4), "activation": activation, "state": state}
