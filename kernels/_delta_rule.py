"""The delta rule through Triton: blocks, launches and the autograd function. Imported only where Triton is."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import _delta_rule_triton as device
from kernels._erase_triton import scores
from kernels._launch import launch, multiprocessors, padded, rows_contiguous


class Blocks(NamedTuple):
    """Tile sizes, and warps and pipeline stages of each kernel."""

    C: int
    """Tokens in a chunk."""
    K: int
    """Key columns, padded to a power of two."""
    V: int
    """Value columns of one program of the state passes."""
    V_scan: int
    """The same, where segments are scanned: over V + K columns."""
    K_tile: int
    V_tile: int
    """Columns that `gradients` and `prepare` hold at once."""
    warps: int
    stages: int
    """Of the state passes."""
    score_warps: int
    tile_warps: int
    """Of `gradients`."""
    precision: str


def blocks(T: int, K: int, V: int, dtype: torch.dtype) -> Blocks:
    """The launch table, a plain function of shapes.

    Measured on an H200, 2026-11-30, bf16, no gate, forward and backward in a CUDA graph, ms; the choice comes first.
    (64, 256, 2, 64): 3 stages 0.059, 2 0.073, 1 0.071. (1, 131072, 16, 64): 4 warps 4.2, 8 5.3; 4 tile warps 3.6,
    8 4.4; 128 columns a scan 3.6, 64 3.7; 64 value columns 4.2, 32 4.6. (8, 2048, 16, 128): 1 stage 1.00, 2 1.03;
    4 warps 1.19, 8 1.30; 8 tile warps 1.00, 4 1.23; 128 columns a V tile 1.19, 64 1.22; 64 columns a K tile 1.19,
    32 1.35. Forward alone by warps of `scores`: (1, 131072, 16, 64) 1 1.29, 2 1.45, 4 1.54, and 1.42 with an inverse of
    its own; (8, 2048, 16, 128) 2 0.279, 1 0.285, 4 0.38, of its own 0.283.
    """
    padded_K, padded_V = padded(K), padded(V)
    wide = dtype == torch.float32
    C = min(64, padded(T))
    if (wide and padded_K > 64) or padded_K > 128:
        C = min(C, 32)
    V_pass = min(padded_V, 64 if padded_K <= 128 and not wide else 32)
    return Blocks(
        C,
        padded_K,
        V_pass,
        128 if padded_K <= 64 and not wide else V_pass,
        min(padded_K, 32 if wide else 64),
        min(padded_V, 32 if wide else 128),
        8 if padded_K > 128 or (wide and padded_K > 64) else 4,
        1 if wide or padded_K > 64 else 3,
        1 if padded_K <= 64 and not wide else 2,
        4 if padded_K <= 64 else 8,
        "tf32x3" if wide else "tf32",
    )


def n_segments(n_chunks: int, n_programs: int, K: int, n_processors: int) -> int:
    """Into how many segments the state pass of a sequence is cut: 1 where chunks are few or heads enough.

    `n_programs` is that of the pass uncut. As many as run at once: a segment later starts by chaining those before it,
    one product each, so more would only wait. A power of two, so that few kernels differ. H200, 2026-11-30, bf16, ms
    forward for (stages, segments): (1, 131072, 16, 64) (3, 8) 1.42, (3, 16) 1.40, (2, 8) 1.76, (2, 16) 1.45, (1, 16)
    1.69, (1, 32) 1.80, with the backward pass 3.54, 3.57, 4.25, 3.62, 4.10, 4.37; (1, 65536, 16, 128) (1, 8) 1.85,
    (1, 16) 2.15, (1, 4) 2.29, (2, 4) 1.89.
    """
    at_once = n_processors * (1 if K <= 64 else 2)  # by the shared memory of a program
    if K > 128 or n_chunks < 64 or at_once < 2 * n_programs:
        return 1
    wanted = min(at_once // n_programs, 32, n_chunks // 8)
    return 1 << (wanted.bit_length() - 1)


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


class Packing(NamedTuple):
    """Where the chunks of packed sequences lie: made on the card, nothing waits for it."""

    cu_seqlens: Tensor
    first_slots: Tensor
    """(N + 1) int64: chunks before each sequence."""
    slots: Tensor
    """(chunks, 2) int64: the first token of a chunk and the end of its sequence; zeros where there is no chunk."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, T: int, C: int) -> Packing:
        n_sequences = cu_seqlens.shape[0] - 1
        ends = cu_seqlens.long()
        first_slots = F.pad((ends.diff() + (C - 1)).div(C, rounding_mode="floor").cumsum(0), (1, 0))
        slot = torch.arange(triton.cdiv(T, C) + n_sequences, device=ends.device)
        n = torch.searchsorted(first_slots[1:], slot, right=True)
        used = n < n_sequences
        n = n.clamp(max=n_sequences - 1)
        slots = torch.stack([ends[n] + (slot - first_slots[n]) * C, ends[n + 1]], 1)
        return cls(cu_seqlens, first_slots, slots * used[:, None])


Outputs = tuple[Tensor, Tensor, Tensor | None]
"""o (B, T, H, V), the final state (N, H, K, V) fp32, and the residual: None, its norm or itself, fp32."""


def _forward(
    q: Tensor,
    a: Tensor,
    b: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    residual: str | None,
    keep: bool,
) -> tuple[Outputs, tuple[Tensor | None, ...], int]:
    """The outputs; what the backward pass reads, if `keep`; and how many segments a sequence was cut into."""
    (B, T, H, V), K = v.shape, q.shape[-1]
    size = blocks(T, K, V, q.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    packing = None if cu_seqlens is None else Packing.of(cu_seqlens, T, size.C)
    chunks = B * triton.cdiv(T, size.C) if packing is None else packing.slots.shape[0]
    columns = triton.cdiv(V, size.V)
    segments = n_segments(triton.cdiv(B * T, N * size.C), N * H * columns, K, multiprocessors(q))
    q, a, v = (rows_contiguous(x) for x in (q, a, v))
    b = None if b is None else rows_contiguous(b)
    beta, g, start = (None if x is None else x.contiguous() for x in (beta, g, start))
    L = _scratch(q, chunks, H, size.C, size.C)
    P, Ti = (_scratch(q, *L.shape, dtype=q.dtype) for _ in range(2))
    G = None if g is None else _scratch(q, chunks, H, 4, size.C)
    o, end = _scratch(q, B, T, H, V, dtype=q.dtype), _scratch(q, N, H, K, V)
    U = S = m = built = Phi = None
    if keep or residual == "full":
        U = _scratch(q, chunks, H, size.C, V, dtype=torch.float32 if residual == "full" else q.dtype)
    if keep:
        S = _scratch(q, chunks, H, K, V, dtype=q.dtype)
    if residual == "norm":
        m = _scratch(q, columns, B, T, H)

    group = H // q.shape[2]
    qab = (*_strides(q), *_strides(a), *_strides(a if b is None else b))
    cu, first_slots, slots = packing or (None, None, None)
    args: tuple[Any, ...] = (q, a, a if b is None else b, beta, g, L, Ti, P, G, slots, T, H, group, *qab)
    tile = {"K": K, "BK": size.K_tile, "C": size.C, "PREC": size.precision}
    tile["INVERSE"] = "tf32x3" if q.dtype == torch.float32 else "tf32"
    launch(scores, chunks * H, args, tile, num_warps=size.score_warps, num_stages=1)
    settings = {"K": K, "BK": size.K, "V": V, "BV": size.V, "C": size.C, "PREC": size.precision}
    options = {"num_warps": size.warps, "num_stages": size.stages}
    if segments > 1:
        built, Phi = _scratch(q, N, H, segments, K, V), _scratch(q, N, H, segments, K, K)
        wide = triton.cdiv(V + K, size.V_scan)
        args = (None, a, b, v, beta, G, Ti, None, None, None, None, None, None, None, built, Phi)
        args += (cu, first_slots, scale, T, H, group, segments, wide, *qab, *_strides(v))
        scan = {**settings, "BV": size.V_scan, "SCAN": True}
        launch(device.forward, N * H * segments * wide, args, scan, **options)
    args = (q, a, b, v, beta, G, Ti, P, start, o, end, U, S, m, built, Phi)
    args += (cu, first_slots, scale, T, H, group, segments, columns, *qab, *_strides(v))
    launch(device.forward, N * H * segments * columns, args, {**settings, "SCAN": False}, **options)
    extra = None
    if residual == "full":
        assert U is not None
        extra = _by_token(U, slots, B, T)
    elif m is not None:
        extra = m[0] if columns == 1 else torch.linalg.vector_norm(m, dim=0)
    return (o, end, extra), (q, a, b, v, beta, g, G, Ti, P, U, S, Phi, cu, first_slots, slots), segments


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        a: Tensor,
        b: Tensor | None,
        v: Tensor,
        beta: Tensor | None,
        g: Tensor | None,
        start: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        residual: str | None,
    ) -> Outputs:
        outputs, saved, ctx.segments = _forward(q, a, b, v, beta, g, start, cu_seqlens, scale, residual, keep=True)
        ctx.save_for_backward(*saved)
        ctx.scale, ctx.residual, ctx.has_start = scale, residual, start is not None
        ctx.set_materialize_grads(False)
        if residual == "norm":
            ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dend: Tensor | None, dextra: Tensor | None) -> tuple[Tensor | None, ...]:
        q, a, b, v, beta, g, G, Ti, P, U, S, Phi, cu, first_slots, slots = ctx.saved_tensors
        (B, T, H, V), (K, Hk) = v.shape, (q.shape[-1], q.shape[2])
        size, segments = blocks(T, K, V, q.dtype), ctx.segments
        N, chunks, columns = B if cu is None else cu.shape[0] - 1, Ti.shape[0], triton.cdiv(V, size.V)
        do = torch.zeros_like(v) if do is None else rows_contiguous(do)
        dend = None if dend is None else dend.contiguous()
        dux = dextra.contiguous() if ctx.residual == "full" and dextra is not None else None
        R, dS = _scratch(q, chunks, H, size.C, V, dtype=q.dtype), _scratch(q, chunks, H, K, V, dtype=q.dtype)
        dstart = _scratch(q, N, H, K, V) if ctx.has_start else None
        group = H // Hk
        per_head = q.dtype if group == 1 else torch.float32
        dq, da = (_scratch(q, B, T, H, K, dtype=per_head) for _ in range(2))
        db = None if b is None else _scratch(q, B, T, H, K, dtype=per_head)
        dv = _scratch(q, B, T, H, V, dtype=q.dtype)
        dbeta, dg = (None if x is None else _scratch(q, B, T, H) for x in (beta, g))

        qab = (*_strides(q), *_strides(a), *_strides(a if b is None else b))
        shape = (cu, first_slots, ctx.scale, T, H, group, segments, columns, *qab, *_strides(do))
        settings = {"K": K, "BK": size.K, "V": V, "BV": size.V, "C": size.C, "PREC": size.precision}
        options = {"num_warps": size.warps, "num_stages": size.stages}
        programs, built = N * H * segments * columns, None
        if segments > 1:
            built = _scratch(q, N, H, segments, K, V)
            scan = (q, a, b, do, dux, beta, G, Ti, P, None, None, None, None, built, None, *shape)
            launch(device.reverse, programs, scan, {**settings, "SCAN": True}, **options)
        args: tuple[Any, ...] = (q, a, b, do, dux, beta, G, Ti, P, dend, R, dS, dstart, built, Phi, *shape)
        launch(device.reverse, programs, args, {**settings, "SCAN": False}, **options)
        args = (q, a, b, v, do, beta, g, G, U, S, R, dS, dq, da, db, dv, dbeta, dg)
        args += (slots, ctx.scale, T, H, group, *qab, *_strides(v), *_strides(do))
        settings |= {"BK": size.K_tile, "BV": size.V_tile}
        launch(device.gradients, chunks * H, args, settings, num_warps=size.tile_warps, num_stages=1)

        def summed(x: Tensor | None) -> Tensor | None:
            """Heads that share a key are summed in fp32, in a fixed order."""
            return x if x is None or group == 1 else x.unflatten(2, (Hk, group)).sum(3).to(q.dtype)

        return (summed(dq), summed(da), summed(db), dv, dbeta, dg, dstart, *[None] * 3)


def _scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with nothing in it, on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _by_token(U: Tensor, slots: Tensor | None, B: int, T: int) -> Tensor:
    """From chunks (chunks, H, C, V) to tokens (B, T, H, V)."""
    chunks, H, C, V = U.shape
    if slots is None:
        return U.view(B, chunks // B, H, C, V).transpose(2, 3).reshape(B, -1, H, V)[:, :T]
    t = slots[:, :1] + torch.arange(C, device=U.device)
    t = torch.where(t < slots[:, 1:], t, T)  # T: a row that is dropped
    out = _scratch(U, T + 1, H, V)
    return out.index_copy_(0, t.flatten(), U.transpose(1, 2).flatten(0, 1))[None, :T]


def delta_rule(
    q: Tensor,
    a: Tensor,
    b: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    start: Tensor | None,
    scale: float,
    residual: str | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `kernels.delta_rule.delta_rule`, which checked the shapes.

    Where no gradient can follow, autograd is not told: that takes longer than a small kernel runs.
    """
    given = (q, a, b, v, beta, g, start)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (q, a, b, v) if x is not None])
    q, a, v = q.to(dtype), a.to(dtype), v.to(dtype)
    b = None if b is None else b.to(dtype)
    beta, g, start = (None if x is None else x.float() for x in (beta, g, start))
    inputs = (q, a, b, v, beta, g, start, cu_seqlens, float(scale), residual)
    return _DeltaRule.apply(*inputs) if keep else _forward(*inputs, keep=False)[0]
