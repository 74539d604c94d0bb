"""Launches the Triton kernels of the short convolution: one forward, two backward.

Nothing waits for the card, and all sizes come from shapes, so that the calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import launch, multiprocessors, rows_contiguous
from kernels._short_conv_triton import _forward_kernel, _gradient_kernel, _sum_kernel

BD = 128
"""Channels of a program: four a thread of one warp."""

LONGEST, SHORTEST = 128, 16
"""Tokens that a program walks over; where two walks meet, W - 1 are read twice."""


def walk_length(rows: int, T: int, multiprocessors: int) -> int:
    """Tokens a program walks over, where `rows` programs stand side by side: 16 programs for each multiprocessor."""
    tokens = LONGEST
    while tokens > SHORTEST and rows * triton.cdiv(T, tokens) < 16 * multiprocessors:
        tokens //= 2
    return tokens


class _Call(NamedTuple):
    """What the forward and the backward launches of one call share."""

    x: Tensor
    w: Tensor
    state: Tensor | None
    tokens: int
    constants: dict[str, Any]  # compile-time values that both walks take

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.x.stride()[:2], *((0, 0) if self.state is None else self.state.stride()[:2]))

    def walks(self, own: int) -> int:
        """How many walks a sequence takes, each making `own` tokens. One at least: it carries the state on."""
        return max(1, triton.cdiv(self.x.shape[1], own))

    def launch(self, kernel: Any, n_walks: int, args: tuple[Any, ...], **constants: Any) -> None:
        B, T, D = self.x.shape
        constants = {**constants, **self.constants}
        launch(kernel, B * n_walks * triton.cdiv(D, BD), (*args, T, n_walks), constants, num_warps=1, num_stages=1)


def _call(x: Tensor, w: Tensor, state: Tensor | None, silu: bool) -> _Call:
    (B, T, D), W = x.shape, w.shape[1]
    state = None if state is None or W == 1 else rows_contiguous(state)
    tokens = walk_length(B * triton.cdiv(D, BD), T, multiprocessors(x))
    constants = {"D": D, "W": W, "BD": BD, "TOKENS": tokens, "silu": silu, "stateful": state is not None}
    return _Call(rows_contiguous(x), w.contiguous(), state, tokens, constants)


class Convolve(torch.autograd.Function):
    """y (B, T, D) and the last W - 1 tokens (B, W - 1, D), both in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, state: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
        call = _call(x, w, state, silu)
        (B, T, D), W = x.shape, w.shape[1]
        y, last = x.new_empty(B, T, D), x.new_empty(B, W - 1, D)
        args = (call.x, call.w, call.state, y, last, *call.strides)
        call.launch(_forward_kernel, call.walks(call.tokens), args, ROWS=8)
        ctx.save_for_backward(x, w, state)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        x, w, state = ctx.saved_tensors
        call = _call(x, w, state, ctx.silu)
        (B, T, D), W = x.shape, w.shape[1]
        dy = x.new_zeros(B, T, D) if dy is None else rows_contiguous(dy)
        dlast = None if dlast is None or W == 1 else rows_contiguous(dlast)
        n_walks = call.walks(call.tokens - (W - 1))
        dx, dw = x.new_empty(B, T, D), w.new_empty(D, W)
        dstate = None if state is None else state.new_empty(B, W - 1, D)
        sums = torch.empty(B * n_walks, W, D, dtype=torch.float32, device=x.device)
        strides = (*call.strides, *dy.stride()[:2], *((0, 0) if dlast is None else dlast.stride()[:2]))
        args = (call.x, call.w, call.state, dy, dlast, dx, dstate, sums, *strides)
        call.launch(_gradient_kernel, n_walks, args, ROWS=4, has_dlast=dlast is not None)
        constants = {"D": D, "W": W, "BD": 64, "ROWS": 32}
        launch(_sum_kernel, W * triton.cdiv(D, 64), (sums, dw, B * n_walks), constants, num_warps=4, num_stages=1)
        return dx, dw, dstate, None
