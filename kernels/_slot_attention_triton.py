"""Slot attention on a card: the walk that gives the logits, and what happens slot by slot.

All the rest is walks of linear attention (`_linear_attention_triton.py`), with the slots as channels of the key: the
values' state is theirs as it stands, the keys' state is theirs with the keys as values. The logits are what there is
the gradient to the query, with our query in the place of the output's gradient.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl

from kernels._linear_attention_triton import _place, _walk
from kernels._tiles import G_MIN


@triton.jit(do_not_specialize=["T", "n_segments", "f_b", "f_t", "f_h", "S_step"])
def _logits_kernel(
    q, k, s, f, out, S_start, S_end, cu_seqlens,
    q_b, q_t, q_h, k_b, k_t, k_h, s_b, s_t, s_h, f_b, f_t, f_h,
    T, H, heads_a_k, n_segments, S_step,
    K: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    decay: tl.constexpr, has_start: tl.constexpr, packed: tl.constexpr, product: tl.constexpr, prec: tl.constexpr,
):  # fmt: skip
    """Logits (B, T, H, K) before the scale, and the keys (N, H, V, K) at the end. As linear attention has it: K slots,
    BK of them a program; V the width of a key; S_start (K, V)."""
    n, h, kh, segment, tile, b, start, length, first, count, _ = _place(
        cu_seqlens, H, heads_a_k, T, n_segments, (K + BK - 1) // BK, packed, C
    )
    head, row = n * H + h, (b * T + start) * H + h
    if has_start:
        S_start += (head * n_segments + segment) * S_step
    _walk(
        q + b * q_b + start * q_t + kh * q_h, q_t,
        k + b * k_b + start * k_t + kh * k_h, k_t,
        s + b * s_b + start * s_t + h * s_h, s_t,
        f + b * f_b + start * f_t + h * f_h, f_t, None, 0, out + row * K, H * K,
        S_start, None, 1, V, S_end + head * (K * V), None, None, 0, None, 0, None, None, 0,
        None, first, count, length, tile * BK, 1.0, 1.0, 1.0, segment == n_segments - 1,
        V, K, PV, BK, C, "value", "none", "none", False,
        has_start, "S", "none", product, prec,
    )  # fmt: skip


@triton.jit
def _expm1(x):
    """e^x - 1 for x <= 0, to the last digits also near 0."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1.0)


@triton.jit
def _rows(H, T, n_rows, ROWS: tl.constexpr):
    """The rows of this program as numbers of (batch, token, head), which of them there are, and each of the three."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return r, r < n_rows, r // (H * T), r // H % T, r % H


@triton.jit(do_not_specialize=["T", "n_rows", "f_b", "f_t", "f_h"])
def _write_kernel(
    f, s, f_b, f_t, f_h, T, H, n_rows, M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """s = 1 - e^f."""
    r, live, b, t, h = _rows(H, T, n_rows, ROWS)
    m = tl.arange(0, BLOCK)
    mask = live[:, None] & (m < M)[None, :]
    x = tl.load(f + (b * f_b + t * f_t + h * f_h)[:, None] + m[None, :], mask=mask, other=0.0).to(tl.float32)
    x = -_expm1(tl.where(x < G_MIN, G_MIN, x))
    tl.store(s + r[:, None] * M + m[None, :], x.to(s.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "n_rows"])
def _softmax_kernel(
    logits, p, first, sequence_of, T, H, n_rows, scale,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, masked: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale * logits) over the slots; `masked`: those whose `first` (N, H, M) token is not behind."""
    r, live, b, t, h = _rows(H, T, n_rows, ROWS)
    m = tl.arange(0, BLOCK)
    mask = live[:, None] & (m < M)[None, :]
    x = tl.load(logits + r[:, None] * M + m[None, :], mask=mask, other=float("-inf")) * scale
    if masked:
        n = tl.load(sequence_of + t, mask=live, other=0).to(tl.int64) if packed else b
        since = tl.load(first + ((n * H + h) * M)[:, None] + m[None, :], mask=mask, other=0)
        x = tl.where(since <= t[:, None], x, float("-inf"))
    largest = tl.max(x, 1)
    e = tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = tl.sum(e, 1)
    e /= tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(p + r[:, None] * M + m[None, :], e.to(p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_gradient_kernel(
    p, dp, dx, n_rows, scale, M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """dx = scale p (dp - p.dp)."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, BLOCK)
    mask = (r < n_rows)[:, None] & (m < M)[None, :]
    at = r[:, None] * M + m[None, :]
    x, dx_x = tl.load(p + at, mask=mask, other=0.0).to(tl.float32), tl.load(dp + at, mask=mask, other=0.0)
    dx_x = scale * x * (dx_x - tl.sum(x * dx_x, 1)[:, None])
    tl.store(dx + at, dx_x.to(dx.dtype.element_ty), mask=mask)
