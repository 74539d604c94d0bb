"""Linear attention with Triton kernels, as autograd knows it: what its walks (`_linear_walks.py`) read and write.

At most 3 launches forward and 4 backward; one and one where the sequence is not cut and g needs no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import rows_contiguous
from kernels._linear_walks import Attended, Gradients, Starts, ends_of, prepare, segment_starts, single, walk, walk_back

DEN_MIN = 1e-6


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    scale: float,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> Attended:
    call = prepare(q, k, v, g, cu_seqlens)
    S0, z0 = (None if x is None else x.contiguous() for x in (S0, z0))
    states = None
    if call.n_segments > 1:
        start = None if S0 is None else (S0, z0)
        states = segment_starts(call, call.k, call.v, None, start, reverse=False, normalize=normalize)
    return walk(call, Starts(states, S0, z0), scale, normalize, q.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        S0: Tensor | None,
        z0: Tensor | None,
        scale: float,
        normalize: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        done = _attend(q, k, v, g, S0, z0, scale, normalize, cu_seqlens)
        ctx.save_for_backward(q, k, v, g, S0, z0, cu_seqlens, done.states, done.o if normalize else None, done.den)
        ctx.scale, ctx.normalize = scale, normalize
        ctx.set_materialize_grads(False)
        return done.o, done.S, done.z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, S0, z0, cu_seqlens, states, o, den = ctx.saved_tensors
        normalize = ctx.normalize
        call = prepare(q, k, v, g, cu_seqlens)
        (B, T, H, V), K, N, Hk = v.shape, q.shape[-1], call.n_sequences, q.shape[2]
        do = torch.zeros_like(v) if do is None else rows_contiguous(do)
        dden = None
        if normalize:
            do, dden = _through_normaliser(do, o, den)
        ends = ends_of(call, do, dden, dS, dz, ctx.scale, normalize)
        # A group's heads are summed in fp32: rounding first would lose what the sum keeps
        dq, dk = (v.new_empty(B, T, H, K, dtype=q.dtype if Hk == H else torch.float32) for _ in range(2))
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dg = None
        if g is not None and ctx.needs_input_grad[3]:
            dg = single(v, *((triton.cdiv(K, call.tiles.BK), B, T, H) if g.dim() == 3 else (B, T, H, K)))
        dS0, dz0 = single(v, N, H, K, V), single(v, N, H, K) if normalize else None
        out = Gradients(dq, dk, dv, dg, dS0, dz0)
        walk_back(call, do, dden, Starts(states, S0, z0), ends, out, ctx.scale, normalize)
        if Hk != H:
            dq, dk = (x.unflatten(2, (Hk, H // Hk)).sum(3).to(q.dtype) for x in (dq, dk))
        if dg is not None and dg.dim() == 4 and g.dim() == 3:
            dg = dg[0] if dg.shape[0] == 1 else dg.sum(0)
        has_start = S0 is not None
        return dq, dk, dv, dg, dS0 if has_start else None, dz0 if has_start else None, None, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    start: tuple[Tensor | None, Tensor | None],
    scale: float,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o (B, T, H, V), S (N, H, K, V) and z (N, H, K), None without `normalize`.

    Where no gradient can follow, autograd is not told: that takes longer than a small kernel runs.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, *start)):
        return _Attend.apply(q, k, v, g, *start, scale, normalize, cu_seqlens)
    return _attend(q, k, v, g, *start, scale, normalize, cu_seqlens)[:3]


def _through_normaliser(do: Tensor, o: Tensor, den: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the numerator (in do's dtype) and of the denominator (fp32)."""
    weight = den.clamp(min=DEN_MIN).reciprocal_()
    dden = torch.linalg.vecdot(do.float(), o.float()).mul_(weight).neg_().masked_fill_(den < DEN_MIN, 0.0)
    return (do * weight[..., None]).to(do.dtype), dden
