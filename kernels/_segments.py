"""Cutting a long sequence into segments that run at once, and joining what they leave behind.

A state that decays by a diagonal obeys, over a segment s, S_{s+1} = e^{L_s} S_s + H_s, with H_s the state the segment
builds from nothing and L_s its total log-decay. So every segment is summed alone, and `join` makes the states that
the segments start from.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import launch

MOST = 32
"""Segments, at most: joining is serial in them."""


def n_segments(programs: int, n_chunks: int, multiprocessors: int) -> int:
    """How many segments to cut a sequence of `n_chunks` into, where `programs` would run without cutting.

    A power of two that gives each multiprocessor two programs; one (no cut, one launch instead of three) where there is
    a program for each already, or the sequence is short. H200, 2026-11-30, linear attention in bf16, ms forward for 8,
    16, 32 segments: (1, 8192, 16, 64) 0.044, 0.044, 0.052; (1, 131072, 16, 64) 0.444, 0.406, 0.426; for 1, 2, 4:
    (8, 2048, 16, 128) 0.103, 0.141, 0.171.
    """
    if programs >= multiprocessors or n_chunks < 32:
        return 1
    wanted = min(MOST, n_chunks // 4, -(-2 * multiprocessors // programs))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def segment(length, s, n_segments, C: tl.constexpr):
    """First chunk and number of chunks (int32) of segment `s` of a sequence of `length` tokens; may be empty."""
    n_chunks = tl.cdiv(length, C)
    each = tl.cdiv(n_chunks, n_segments)
    first = tl.minimum(s * each, n_chunks)
    return first, (tl.minimum(first + each, n_chunks) - first).to(tl.int32)


@triton.jit(do_not_specialize=["n_segments"])
def _join_kernel(
    states,
    totals,
    start,
    start_z,
    n_segments,
    start_scale,
    K: tl.constexpr,
    V: tl.constexpr,
    decay: tl.constexpr,
    has_start: tl.constexpr,
    has_z: tl.constexpr,
    reverse: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK numbers of one head's state, through all its segments."""
    size: tl.constexpr = K * V + K if has_z else K * V
    pid = tl.program_id(0).to(tl.int64)
    head = pid // tl.cdiv(size, BLOCK)
    at = (pid % tl.cdiv(size, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    live, in_z = at < size, at >= K * V
    row = tl.where(in_z, at - K * V, at // V)
    x = tl.zeros([BLOCK], tl.float32)
    zeros = tl.zeros([BLOCK], tl.int32)  # makes a block of a number: the interpreter takes no mask of one condition
    if has_start:
        x = tl.load(start + head * (K * V) + at, mask=live & (at < K * V), other=0.0) * start_scale
        if has_z:
            x += tl.load(start_z + head * K + row, mask=live & in_z, other=0.0) * start_scale
    for i in range(0, n_segments):
        s = head * n_segments + (n_segments - 1 - i if reverse else i)
        built = tl.load(states + s * size + at, mask=live & (zeros + i < n_segments - 1), other=0.0)
        tl.store(states + s * size + at, x, mask=live)
        if decay == "token":
            x = x * tl.exp(tl.load(totals + s))
        if decay == "key":
            x = x * tl.exp(tl.load(totals + s * K + row, mask=live, other=0.0))
        x += built


def join(
    states: Tensor,
    totals: Tensor | None,
    start: tuple[Tensor, Tensor | None] | None,
    *,
    K: int,
    V: int,
    reverse: bool,
    start_scale: float = 1.0,
) -> None:
    """In place: what each segment builds from nothing becomes what it starts from.

    states (N, H, segments, K * V), or with the normaliser's K numbers behind them; what the last segment builds is not
    read. totals: log-decays (N, H, segments) or (N, H, segments, K), None: no decay. start: the whole sequence's state
    (N, H, K, V), and z (N, H, K), times `start_scale`; None: zero. `reverse`: from the last segment to the first.
    """
    N, H, S, size = states.shape
    block = min(1024, triton.next_power_of_2(size))
    S0, z0 = start if start is not None else (None, None)
    constants = {
        "K": K,
        "V": V,
        "decay": "none" if totals is None else "token" if totals.dim() == 3 else "key",
        "has_start": start is not None,
        "has_z": size > K * V,
        "reverse": reverse,
        "BLOCK": block,
    }
    args = (states, totals, S0, z0, S, start_scale)
    launch(_join_kernel, N * H * triton.cdiv(size, block), args, constants, num_warps=4)
