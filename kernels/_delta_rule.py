"""The delta rule through Triton: blocks, launches and the autograd function. Imported only where Triton is."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import _delta_rule_triton as device
from kernels._launch import multiprocessors, padded, rows_contiguous


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
    tile_warps: int
    """Of `gradients` and `scores`."""
    precision: str


def blocks(T: int, K: int, V: int, dtype: torch.dtype) -> Blocks:
    """The launch table, a plain function of shapes."""
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
        1 if wide or padded_K > 128 else 3 if padded_K <= 64 else 2,
        4 if padded_K <= 64 else 8,
        "tf32x3" if wide else "tf32",
    )


def n_segments(n_chunks: int, n_programs: int, K: int, n_processors: int) -> int:
    """Into how many segments the state pass of a sequence is cut: 1 where chunks are few or heads enough.

    `n_programs` is that of the pass uncut. A power of two, so that few kernels differ.
    """
    if n_programs >= 2 * n_processors or n_chunks < 64 or K > 128:
        return 1
    wanted = min(max(2, -(-2 * n_processors // n_programs)), 32, n_chunks // 8)
    return 1 << (wanted.bit_length() - 1)


def _on(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


class DeltaRule(torch.autograd.Function):
    """o (B, T, H, V), the final state (B, H, K, V) fp32, and the residual: None, its norm or itself, fp32."""

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
        scale: float,
        residual: str | None,
        keep: bool,
        segments: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        B, T, H, V = v.shape
        K = q.shape[-1]
        size = blocks(T, K, V, q.dtype)
        N, columns = triton.cdiv(T, size.C), triton.cdiv(V, size.V)
        if segments is None:
            segments = n_segments(N, B * H * columns, K, multiprocessors(q))
        segments = min(segments, N)
        q, a, v = (rows_contiguous(x) for x in (q, a, v))
        b = None if b is None else rows_contiguous(b)
        beta, g, start = (None if x is None else x.contiguous() for x in (beta, g, start))

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        group = H // q.shape[2]
        qab = (*_strides(q), *_strides(a), *_strides(a if b is None else b))
        L, P = scratch(B, N, H, size.C, size.C), scratch(B, N, H, size.C, size.C, dtype=q.dtype)
        Ti = L if q.dtype == torch.float32 else torch.empty_like(P)
        G = None if g is None else scratch(B, N, H, size.C)
        o, end = scratch(B, T, H, V, dtype=q.dtype), scratch(B, H, K, V)
        U = S = m = None
        if keep or residual == "full":
            U = scratch(B, N, H, size.C, V, dtype=torch.float32 if residual == "full" else q.dtype)
        if keep:
            S = scratch(B, N, H, K, V, dtype=q.dtype)
        if residual == "norm":
            m = scratch(columns, B, T, H)
        Phi = None
        with _on(q):
            device.scores[(B * N * H,)](
                q, a, a if b is None else b, beta, g, L, P, G, T, H, group, *qab,
                K=K, BK=size.K_tile, C=size.C, PREC=size.precision, num_warps=size.tile_warps, num_stages=1,
            )  # fmt: skip
            inverse = "tf32x3" if q.dtype == torch.float32 else "tf32"
            device.invert[(B * N * H,)](L, Ti, C=size.C, PREC=inverse, num_warps=1, num_stages=1)
            shape: dict[str, Any] = {"K": K, "BK": size.K, "V": V, "C": size.C, "PREC": size.precision}
            launch: dict[str, Any] = {"num_warps": size.warps, "num_stages": size.stages}
            built = Phi = None
            if segments > 1:
                built, Phi = scratch(B, H, segments, K, V), scratch(B, H, segments, K, K)
                wide = triton.cdiv(V + K, size.V_scan)
                device.forward[(B * H * segments * wide,)](
                    None, a, b, v, beta, G, Ti, None, None, None, None, None, None, None, built, Phi,
                    scale, T, H, group, segments, wide, *qab, *_strides(v),
                    **shape, BV=size.V_scan, **launch, SCAN=True,
                )  # fmt: skip
            device.forward[(B * H * segments * columns,)](
                q, a, b, v, beta, G, Ti, P, start, o, end, U, S, m, built, Phi,
                scale, T, H, group, segments, columns, *qab, *_strides(v), **shape, BV=size.V, **launch, SCAN=False,
            )  # fmt: skip
        ctx.save_for_backward(q, a, b, v, beta, g, G, Ti, P, U, S, Phi)
        ctx.scale, ctx.segments, ctx.has_start = scale, segments, start is not None
        ctx.set_materialize_grads(False)
        extra = None
        if residual == "full":
            assert U is not None
            extra = U.transpose(2, 3).reshape(B, N * size.C, H, V)[:, :T]
        elif m is not None:
            extra = m[0] if columns == 1 else torch.linalg.vector_norm(m, dim=0)
            ctx.mark_non_differentiable(extra)
        return o, end, extra

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dend: Tensor | None, dextra: Tensor | None) -> tuple[Tensor | None, ...]:
        q, a, b, v, beta, g, G, Ti, P, U, S, Phi = ctx.saved_tensors
        B, T, H, V = v.shape
        K, Hk = q.shape[-1], q.shape[2]
        size, segments = blocks(T, K, V, q.dtype), ctx.segments
        N, columns = triton.cdiv(T, size.C), triton.cdiv(V, size.V)
        do = torch.zeros_like(v) if do is None else rows_contiguous(do)
        dend = None if dend is None else dend.contiguous()
        dux = None if dextra is None or U.dtype != torch.float32 else dextra.float().contiguous()

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        group = H // Hk
        qab = (*_strides(q), *_strides(a), *_strides(a if b is None else b))
        R = scratch(B, N, H, size.C, V, dtype=q.dtype)
        dS = scratch(B, N, H, K, V, dtype=q.dtype)
        dstart = scratch(B, H, K, V) if ctx.has_start else None
        per_head = q.dtype if group == 1 else torch.float32
        dq, da = (scratch(B, T, H, K, dtype=per_head) for _ in range(2))
        db = None if b is None else scratch(B, T, H, K, dtype=per_head)
        dv = scratch(B, T, H, V, dtype=q.dtype)
        dbeta, dg = (None if x is None else scratch(B, T, H) for x in (beta, g))
        with _on(q):
            settings: dict[str, Any] = {
                **{"K": K, "BK": size.K, "V": V, "BV": size.V, "C": size.C, "PREC": size.precision},
                **{"num_warps": size.warps, "num_stages": size.stages},
            }
            sizes = (ctx.scale, T, H, group, segments, columns, *qab, *_strides(do))
            built = None
            if segments > 1:
                built = scratch(B, H, segments, K, V)
                device.reverse[(B * H * segments * columns,)](
                    q, a, b, do, dux, beta, G, Ti, P, None, None, None, None, built, None,
                    *sizes, **settings, SCAN=True,
                )  # fmt: skip
            device.reverse[(B * H * segments * columns,)](
                q, a, b, do, dux, beta, G, Ti, P, dend, R, dS, dstart, built, Phi, *sizes, **settings, SCAN=False
            )
            device.gradients[(B * N * H,)](
                q, a, b, v, do, beta, g, G, U, S, R, dS, dq, da, db, dv, dbeta, dg,
                ctx.scale, T, H, group, *qab, *_strides(v), *_strides(do),
                K=K, BK=size.K_tile, V=V, BV=size.V_tile, C=size.C,
                PREC=size.precision, num_warps=size.tile_warps, num_stages=1,
            )  # fmt: skip

        def summed(x: Tensor | None) -> Tensor | None:
            """Heads that share a key are summed in fp32, in a fixed order."""
            return x if x is None or group == 1 else x.unflatten(2, (Hk, group)).sum(3).to(q.dtype)

        return (summed(dq), summed(da), summed(db), dv, dbeta, dg, dstart, *[None] * 4)


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
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `kernels.delta_rule.delta_rule`, which checked the shapes. `segments` None: chosen by shape and card."""
    given = (q, a, b, v, beta, g, start)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (q, a, b, v) if x is not None])
    q, a, v = q.to(dtype), a.to(dtype), v.to(dtype)
    b = None if b is None else b.to(dtype)
    beta, g, start = (None if x is None else x.float() for x in (beta, g, start))
    return DeltaRule.apply(q, a, b, v, beta, g, start, float(scale), residual, keep, segments)
