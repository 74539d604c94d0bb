"""The ridge solve through Triton: sizes, launches and the autograd function. Imported only where Triton is.

Four launches forward; two backward, four where the sequence is cut for linear attention, and a sum. Nothing waits for
the card, and all sizes come from shapes, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import _ridge_solve_triton as device
from kernels._delta_rule import Packing
from kernels._launch import launch, multiprocessors, padded, rows_contiguous
from kernels._linear_attention import attend
from kernels._linear_walks import Gradients, Starts, ends_of, prepare, walk_back


class Blocks(NamedTuple):
    """Sizes and warps of each kernel."""

    R: int
    """Tokens in a stretch: from one inversion to the next."""
    K: int
    """K padded to a power of two."""
    C: int
    """Tokens in a product of `sums`."""
    sum_warps: int
    invert_warps: int
    walk_warps: int
    precision: str


def blocks(T: int, heads: int, K: int, dtype: torch.dtype, n_processors: int) -> Blocks:
    """The launch table, a plain function of shapes. `heads`: of all sequences.

    A stretch is a chain of R dependent steps and costs an inversion, of about K steps: so it is as long as leaves
    eight stretches a multiprocessor. At most 512: what rounding blurs adds up from one inversion to the next (3000
    nearly equal u of 32, alpha in fp32: off by 1.1e-6 with stretches of 128, 3.5e-6 of 512; chunked torch 2.5e-6).
    `sums` in fp32 takes no TF32 products: they cut their sums off, which nearly equal u would add up. Not tuned yet.
    """
    wanted = triton.cdiv(T * heads, 8 * n_processors)
    R = min(512, max(64, triton.next_power_of_2(wanted)))
    wide = dtype == torch.float32
    BK = padded(K)
    warps = {16: 1, 32: 2, 64: 4, 128: 8}[BK]
    walk_warps = 4 if BK == 128 else 1  # as few as hold A: each more repeats what is done once a token, and waits
    return Blocks(R, BK, 16 if wide else 64, warps, 16 if BK == 128 else warps, walk_warps, "ieee" if wide else "tf32")


class _Call(NamedTuple):
    """What the launches of one call share."""

    size: Blocks
    shape: tuple[int, int, int, int]
    stretches: int
    cu_seqlens: Tensor | None
    first_slots: Tensor | None
    slots: Tensor | None

    @classmethod
    def of(cls, u: Tensor, N: int, cu_seqlens: Tensor | None) -> _Call:
        B, T, H, K = u.shape
        size = blocks(T, B * H, K, u.dtype, multiprocessors(u))
        if cu_seqlens is None:
            return cls(size, (B, T, H, K), B * triton.cdiv(T, size.R), None, None, None)
        packing = Packing.of(cu_seqlens, T, size.R)
        return cls(size, (B, T, H, K), packing.slots.shape[0], *packing)


def _scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with nothing in it, on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _inverses(call: _Call, u: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """M^-1 before each stretch (stretches, H, K, K), and the sum of u u^T of each sequence (N, H, K, K)."""
    (_, T, H, K), size, (N, *_) = call.shape, call.size, M.shape
    total, A = (_scratch(u, call.stretches, H, K, K) for _ in range(2))
    borders, end = _scratch(u, call.stretches, H, K, K, dtype=torch.float64), _scratch(u, N, H, K, K)
    programs, args = call.stretches * H, (u, total, call.slots, T, H, *u.stride()[:3])
    tile = {"K": K, "BK": size.K, "R": size.R, "C": size.C, "PREC": size.precision}
    launch(device.sums, programs, args, tile, num_warps=size.sum_warps)
    args = (M.contiguous(), total, borders, end, call.cu_seqlens, call.first_slots, T, H)
    tile = {"K": K, "R": size.R, "ROWS": 16, "BLOCK": 128}
    launch(device.prefix, N * H * triton.cdiv(K * K, 128), args, tile, num_warps=4)
    launch(device.invert, programs, (borders, A), {"K": K, "BK": size.K}, num_warps=size.invert_warps)
    return A, end


def _walk(
    call: _Call, A: Tensor, u: Tensor, x: Tensor, unit: Tensor | None, norm: Tensor | None, weighted: Tensor | None
) -> Tensor:
    """M_t^-1 x_t (B, T, H, K), in u's dtype; see the kernel."""
    (B, T, H, K), size = call.shape, call.size
    out = _scratch(u, B, T, H, K, dtype=u.dtype)
    args = (A, u, x, unit, norm, out, weighted, call.slots, T, H, *u.stride()[:3], *x.stride()[:3])
    launch(device.walk, call.stretches * H, args, {"K": K, "BK": size.K, "R": size.R}, num_warps=size.walk_warps)
    return out


def _forward(
    u: Tensor, x: Tensor, M: Tensor, unit: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...], _Call]:
    """alpha, the sum of u u^T, what the backward pass reads, and how it was launched."""
    u, x = rows_contiguous(u), rows_contiguous(x)
    call = _Call.of(u, M.shape[0], cu_seqlens)
    A, total = _inverses(call, u, M)
    norm = _scratch(u, *x.shape[:3]) if unit else None
    alpha = _walk(call, A, u, x, None, norm, None)
    return alpha, total, (u, alpha, norm, A), call


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, x: Tensor, M: Tensor, unit: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        alpha, total, saved, call = _forward(u, x, M, unit, cu_seqlens)
        ctx.save_for_backward(*saved, *call[3:])
        ctx.sizes = call[:3]
        ctx.set_materialize_grads(False)
        return alpha, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dalpha: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        u, alpha, norm, A, *packing = ctx.saved_tensors
        call = _Call(*ctx.sizes, *packing)
        dalpha = torch.zeros_like(alpha) if dalpha is None else rows_contiguous(dalpha)
        weighted = None if norm is None else _scratch(u, *alpha.shape, dtype=alpha.dtype)
        y = _walk(call, A, u, dalpha, alpha, norm, weighted)
        du, dM = _reads(u, alpha, y if weighted is None else weighted, dtotal, call.cu_seqlens)
        return du, y, (dM + dM.mT) / 2 if ctx.needs_input_grad[2] else None, None, None


def _reads(
    u: Tensor, alpha: Tensor, y: Tensor, dtotal: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """du, and minus the sum of alpha_t y_t^T over all tokens of each sequence (N, H, K, K).

    du_i = -sum_{t >= i} [ y_t (alpha_t . u_i) + alpha_t (y_t . u_i) ] is what keys and values get as gradients in a
    linear attention of scale -1, whose keys and values are u, whose queries are alpha, and y that of its output.
    """
    call = prepare(alpha, u, u, None, cu_seqlens)
    dk, dv = (_scratch(u, *u.shape, dtype=u.dtype) for _ in range(2))
    total = _scratch(u, call.n_sequences, *u.shape[2:], u.shape[3])
    ends = ends_of(call, y, None, None, None, -1.0, normalize=False)
    walk_back(call, y, None, Starts(None, None, None), ends, Gradients(None, dk, dv, None, total, None), -1.0)
    du = dk.add_(dv)
    if dtotal is not None:  # each token reads it alike, as a state to which nothing is added
        nothing = torch.zeros_like(u[:1, :1, :1]).expand_as(u)
        du += attend(u, nothing, nothing, None, (dtotal + dtotal.mT, None), 1.0, False, cu_seqlens)[0]
    return du, total


def ridge_solve(u: Tensor, x: Tensor, M: Tensor, unit: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """alpha (B, T, H, K) and the sum of u u^T (N, H, K, K), fp32. M (N, H, K, K), fp32: before any token, with lam.

    Where no gradient can follow, autograd is not told: that takes longer than a small kernel runs.
    """
    dtype = torch.promote_types(u.dtype, x.dtype)
    u, x = u.to(dtype), x.to(dtype)
    if torch.is_grad_enabled() and any(given.requires_grad for given in (u, x, M)):
        return _Solve.apply(u, x, M, unit, cu_seqlens)
    return _forward(u, x, M, unit, cu_seqlens)[:2]
