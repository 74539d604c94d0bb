"""The pieces every Triton kernel here is made of: loading a tile of tokens, finding a sequence, its gates.

Tiles are (C, D): C tokens, D channels padded to a power of two. Offsets are 64-bit, so a tensor may hold more than
2^31 numbers. A token behind the end, or a channel behind the last, reads as zero.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl

G_MIN = tl.constexpr(-40.0)
"""As in `_chunk.py`: a log-decay below this is taken as this."""


@triton.jit
def load_rows(ptr, t, stride_t, live, d, D: tl.constexpr, full: tl.constexpr):
    """Tokens `t` (int64, C) and channels `d` of one head; `full`: no channel of `d` lies behind the last, D - 1."""
    mask = live[:, None] if full else live[:, None] & (d < D)[None, :]
    return tl.load(ptr + (t[:, None] * stride_t + d[None, :]), mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, t, stride_t, live, d, D: tl.constexpr, full: tl.constexpr, x):
    """The inverse of `load_rows`: rounds to the dtype of `ptr`."""
    mask = live[:, None] if full else live[:, None] & (d < D)[None, :]
    tl.store(ptr + (t[:, None] * stride_t + d[None, :]), x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sequence(cu_seqlens, n, T, packed: tl.constexpr):
    """The first token and the length (int64) of sequence `n`: of T tokens each, or between two of `cu_seqlens`."""
    if packed:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        return first, tl.load(cu_seqlens + n + 1).to(tl.int64) - first
    else:
        return n * 0, n * 0 + T
