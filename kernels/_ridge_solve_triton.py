"""The ridge solve's Triton kernels. `_ridge_solve.py` launches them.

M_t and alpha_t are those of `ridge_solve.py`. A sequence is cut into stretches of R tokens:

    sums      S_n = sum of u u^T over stretch n                                      every stretch at once
    prefix    M_n = M_0 + S_0 + ... + S_{n-1}, M before stretch n, in fp64           every number of M at once
    invert    A_n = M_n^-1, in fp64, then rounded to fp32                            every stretch at once
    walk      p = A u    A <- A - p p^T / (1 + u.p)    alpha = A x                   token by token, stretches at once

So the law itself runs in every stretch, in fp32, and starts from an inverse that no stretch before it has blurred. A
chunk form, with products of matrices and a Cholesky factor in each chunk, would need three TF32 products where this
needs one fp32 product on plain cores, and as long a chain of dependent steps in its factor.

Backward: y_t = M_t^-1 dalpha_t is `walk` again. The rest is linear attention's (`_linear_walks.py`).

Letters as in `ridge_solve.py`. Scratch is laid out by stretch: index = (b * N + n) * H + h.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl

from kernels._delta_rule_triton import _load, _place, _sequence

SHORTEST = tl.constexpr(1e-30)
"""As in `ridge_solve.py`: a vector is never divided by less than this."""


@triton.jit
def _square(base, k, K: tl.constexpr):
    """A (K, K) matrix of scratch; zero outside."""
    inside = (k < K)[:, None] & (k < K)[None, :]
    return tl.load(base + k[:, None] * K + k[None, :], inside, 0.0)


@triton.jit
def _store_square(base, k, K: tl.constexpr, x):
    """The inverse of `_square`."""
    tl.store(base + k[:, None] * K + k[None, :], x, (k < K)[:, None] & (k < K)[None, :])


@triton.jit
def sums(
    u, total, slots, T, H, u_b, u_t, u_h,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The sum of u u^T over one stretch of one head, (K, K) fp32, C tokens a product."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = _place(index, slots, T, H, R)
    u += i_b * u_b + h * u_h
    k = tl.arange(0, BK)
    x = tl.zeros([BK, BK], tl.float32)
    for n in range(R // C):
        u_n = _load(u, start + n * C + tl.arange(0, C), u_t, k, end, K)
        x += tl.dot(tl.trans(u_n), u_n, input_precision=PREC)
    _store_square(total + index * K * K, k, K, x)


@triton.jit
def prefix(
    M, total, borders, end, cu_seqlens, first_slots, T, H,
    K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of one head's M through its whole sequence: before each stretch, in fp64; and what came on top."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // tl.cdiv(K * K, BLOCK)
    at = pid % tl.cdiv(K * K, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    live = at < K * K
    _, _, _, slot, N = _sequence(head // H, cu_seqlens, first_slots, T, R)
    M_0 = tl.load(M + head * K * K + at, live, 0.0).to(tl.float64)
    carried = tl.zeros([BLOCK], tl.float64)
    for first in range(0, N, ROWS):
        n = first + tl.arange(0, ROWS)
        place = ((slot + n) * H + head % H)[:, None] * (K * K) + at[None, :]
        inside = (n < N)[:, None] & live[None, :]
        x = tl.load(total + place, inside, 0.0).to(tl.float64)
        before = tl.cumsum(x, 0) - x
        tl.store(borders + place, (M_0 + carried)[None, :] + before, inside)
        carried += tl.sum(x, 0)
    tl.store(end + head * K * K + at, carried, live)


@triton.jit
def invert(borders, A, K: tl.constexpr, BK: tl.constexpr):
    """A = M^-1 of one border of one head, by Gauss and Jordan, without pivots: M is positive definite.

    Step n exchanges variable n: with r row n and d = r_n, the rest becomes M - r r^T / d, row and column n become r / d
    and their corner -1 / d; after K steps M is -M^-1. All of it is M - s s^T / d with s = r - e_n, but for 2 too much
    in the corner. Rows and columns are scaled to a diagonal of 1 before, so that no d is above 1 and nothing cancels.
    """
    index = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    diagonal = k[:, None] == k[None, :]
    M = _square(borders + index * K * K, k, K)
    size = tl.sum(tl.where(diagonal, M, 0.0), 0)
    scale = 1.0 / tl.sqrt(tl.where(k < K, size, 1.0))
    M *= scale[:, None] * scale[None, :]
    for n in range(K):
        e = (k == n).to(tl.float64)
        row = tl.sum(M * e[:, None], 0)
        d = tl.sum(row * e, 0)
        s = row - e
        M -= s[:, None] * (s * (1.0 / d))[None, :]
    inverse = tl.where(diagonal, 2.0 - M, -M) * (scale[:, None] * scale[None, :])
    _store_square(A + index * K * K, k, K, inverse.to(tl.float32))


@triton.jit
def walk(
    A, u, x, unit, norm, out, weighted, slots, T, H,
    u_b, u_t, u_h, x_b, x_t, x_h,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One stretch of one head: `out` = M_t^-1 x_t.

    With `norm`, forward (`weighted` None): `out` is scaled to length 1, and its length goes to `norm`. Backward: x is
    the gradient of `unit`, what forward scaled; `out` is that of the solve's x, and `weighted` is `out` times `norm`.
    """
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = _place(index, slots, T, H, R)
    end = tl.minimum(end, start + R)
    k = tl.arange(0, BK)
    live = k < K
    u += i_b * u_b + h * u_h + k
    x += i_b * x_b + h * x_h + k
    row = (i_b * T * H + h) * K + k
    u_next = tl.load(u + start * u_t, live, 0.0)  # a token ahead: its way from memory takes as long as a step
    x_next = tl.load(x + start * x_t, live, 0.0)
    if weighted is not None:
        unit_next = tl.load(unit + row + start * H * K, live, 0.0)
        norm_next = tl.load(norm + (i_b * T + start) * H + h)
    A_t = _square(A + index * K * K, k, K)
    for t in range(start, end):
        u_now = u_next.to(tl.float32)
        x_now = x_next.to(tl.float32)
        after = tl.minimum(t + 1, end - 1)
        u_next = tl.load(u + after * u_t, live, 0.0)
        x_next = tl.load(x + after * x_t, live, 0.0)
        if weighted is not None:
            unit_now = unit_next.to(tl.float32)
            norm_now = norm_next
            unit_next = tl.load(unit + row + after * H * K, live, 0.0)
            norm_next = tl.load(norm + (i_b * T + after) * H + h)
            x_now = (x_now - unit_now * tl.sum(unit_now * x_now, 0)) / tl.maximum(norm_now, SHORTEST)
        p = tl.sum(A_t * u_now[:, None], 0)  # A is symmetric
        y = tl.sum(A_t * x_now[:, None], 0)
        q = p / (1.0 + tl.sum(u_now * p, 0))
        y -= q * tl.sum(p * x_now, 0)
        A_t -= p[:, None] * q[None, :]
        if weighted is not None:
            tl.store(weighted + row + t * H * K, (y * norm_now).to(weighted.dtype.element_ty), live)
        elif norm is not None:
            length = tl.sqrt(tl.sum(y * y, 0))
            tl.store(norm + (i_b * T + t) * H + h, length)
            y = y / tl.maximum(length, SHORTEST)
        tl.store(out + row + t * H * K, y.to(out.dtype.element_ty), live)
