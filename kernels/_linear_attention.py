"""Launches the Triton kernels of linear attention: sizes, memory, and what the backward pass needs.

At most 3 launches forward and 4 backward; one and one where the sequence is not cut and g needs no gradient. Nothing
waits for the card, and all sizes come from shapes, so that the calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import interpreted, launch, multiprocessors, padded, rows_contiguous
from kernels._linear_attention_triton import _forward_kernel, _gradient_kernel, _scan_kernel
from kernels._segments import join, n_segments

DEN_MIN = 1e-6


class Plan(NamedTuple):
    """Tiles and warps of one call."""

    C: int  # tokens in a chunk
    BK: int  # channels of k in a tile of dq and dk
    BV: int  # channels of v in a tile of o and dv
    warps: int
    stages: int


def plan(T: int, K: int, V: int, dtype: torch.dtype, by_channel: bool) -> Plan:
    """Tiles that keep the state and the chunk of a program in registers and shared memory."""
    wide, exact = max(padded(K), padded(V)), dtype != torch.bfloat16
    C = 16 if by_channel else min(64, padded(T))
    if exact and wide > 64:
        C = min(C, 32)
    tile = 64 if wide <= 128 or not exact else 32
    stages = 3 if wide <= 64 and not exact else 2 if wide <= 128 else 1
    return Plan(C, min(tile, padded(K)), min(tile, padded(V)), 4 if wide <= 128 else 8, stages)


class _Call(NamedTuple):
    """What the forward and the backward launches of one call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    cu_seqlens: Tensor | None
    n_sequences: int
    n_segments: int
    tiles: Plan
    constants: dict[str, Any]  # compile-time values that every kernel takes

    def launch(self, kernel: Any, tiles: int, segments: int, args: tuple[Any, ...], **constants: Any) -> None:
        programs = self.n_sequences * self.v.shape[2] * segments * tiles
        options = {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages}
        launch(kernel, programs, args, {**constants, **self.constants}, **options)

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *_strides(self.g))


def _single(like: Tensor, *shape: int) -> Tensor:
    """An fp32 tensor with nothing in it."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _call(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> _Call:
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    (B, T, H, V), K = v.shape, q.shape[-1]
    by_channel = g is not None and g.dim() == 4
    if g is not None and by_channel:
        g = rows_contiguous(g)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tiles = plan(T, K, V, q.dtype, by_channel)
    n_chunks = triton.cdiv(T * B, tiles.C * max(N, 1))
    S = n_segments(N * H * triton.cdiv(V, tiles.BV), n_chunks, multiprocessors(v))
    constants = {
        "K": K,
        "V": V,
        "BV": tiles.BV,
        "C": tiles.C,
        "decay": "none" if g is None else "key" if by_channel else "token",
        "packed": cu_seqlens is not None,
        "product": tl.bfloat16 if q.dtype == torch.bfloat16 and not interpreted() else tl.float32,
        "prec": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }
    return _Call(q, k, v, g, cu_seqlens, N, S, tiles, constants)


def _segment_starts(
    call: _Call, k: Tensor, v: Tensor, side: Tensor | None, start: tuple[Tensor, Tensor | None] | None, **settings: Any
) -> Tensor:
    """The states (N, H, segments, K * V, and K with the normaliser) that segments start from, in order of `reverse`."""
    (_, T, H, V), K, S = call.v.shape, call.q.shape[-1], call.n_segments
    reverse, normalize = settings["reverse"], settings["normalize"]
    size = K * V + K if normalize else K * V
    states = _single(v, call.n_sequences, H, S, size)
    totals = None
    if call.g is not None:
        totals = _single(v, call.n_sequences, H, S, *(() if call.g.dim() == 3 else (K,)))
    args = (
        k, v, call.g, side, states, totals, call.cu_seqlens,
        *k.stride()[:3], *v.stride()[:3], *_strides(call.g), T, H, H // call.q.shape[2], S,
    )  # fmt: skip
    norm = ("in" if reverse else "out") if normalize else "none"
    call.launch(_scan_kernel, triton.cdiv(V, call.tiles.BV), S - 1, args, BK=padded(K), norm=norm, reverse=reverse)
    scale = settings.get("start_scale", 1.0)
    join(states, totals, start, K=K, V=V, reverse=reverse, start_scale=scale)
    return states


class _Attended(NamedTuple):
    o: Tensor  # (B, T, H, V)
    S: Tensor  # (N, H, K, V)
    z: Tensor | None  # (N, H, K); None without `normalize`
    states: Tensor | None  # where segments start
    den: Tensor | None  # (B, T, H)


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
) -> _Attended:
    call = _call(q, k, v, g, cu_seqlens)
    (B, T, H, V), K = v.shape, q.shape[-1]
    S0, z0 = (None if x is None else x.contiguous() for x in (S0, z0))
    o = torch.empty((B, T, H, V), dtype=q.dtype, device=q.device)
    den = _single(v, B, T, H) if normalize else None
    S, z = _single(v, call.n_sequences, H, K, V), _single(v, call.n_sequences, H, K) if normalize else None
    states = None
    if call.n_segments > 1:
        start = None if S0 is None else (S0, z0)
        states = _segment_starts(call, call.k, call.v, None, start, reverse=False, normalize=normalize)
    args = (
        call.q, call.k, call.v, call.g, den, o, *_starts(states, S0, z0, K * V), S, z, call.cu_seqlens,
        *call.strides, T, H, H // q.shape[2], call.n_segments, *_steps(states, K, V), scale,
    )  # fmt: skip
    call.launch(
        _forward_kernel, triton.cdiv(V, call.tiles.BV), call.n_segments, args,
        BK=padded(K), normalize=normalize, has_start=states is not None or S0 is not None,
    )  # fmt: skip
    return _Attended(o, S, z, states, den)


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
        call = _call(q, k, v, g, cu_seqlens)
        (B, T, H, V), K, N, Hk = v.shape, q.shape[-1], call.n_sequences, q.shape[2]
        do = torch.zeros_like(v) if do is None else rows_contiguous(do)
        dden = None
        if normalize:
            do, dden = _through_normaliser(do, o, den)
        end = None
        if dS is not None or dz is not None:
            dS = _single(v, N, H, K, V).zero_() if dS is None else dS.contiguous()
            if normalize:
                dz = _single(v, N, H, K).zero_() if dz is None else dz.contiguous()
            end = (dS, dz if normalize else None)
        later = None
        if call.n_segments > 1:
            later = _segment_starts(
                call, call.q, do, dden, end, reverse=True, normalize=normalize, start_scale=1 / ctx.scale
            )
        # A group's heads are summed in fp32: rounding first would lose what the sum keeps
        by_head = q.dtype if Hk == H else torch.float32
        dq, dk = (v.new_empty(B, T, H, K, dtype=by_head) for _ in range(2))
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dS0, dz0 = _single(v, N, H, K, V), _single(v, N, H, K) if normalize else None
        gate = g is not None and ctx.needs_input_grad[3]
        dg, scratch = _decay_scratch(call, normalize) if gate else (None, (None, None, None))
        tiles_k, tiles_v = triton.cdiv(K, call.tiles.BK), triton.cdiv(V, call.tiles.BV)
        roles = {"q": tiles_k, "kv": tiles_k + tiles_v} if gate else {"all": 2 * tiles_k + tiles_v}
        dS1, dz1 = end if end is not None else (None, None)
        for role, n_tiles in roles.items():
            args = (
                call.q, call.k, call.v, call.g, do, dden, dq, dk, dv, dg,
                *_starts(states, S0, z0, K * V), *_starts(later, dS1, dz1, K * V), dS0, dz0, *scratch, cu_seqlens,
                *call.strides, *do.stride()[:3], T, H, H // Hk, call.n_segments, B * T * H,
                *_steps(states, K, V), *_steps(later, K, V), ctx.scale, 1.0 if later is not None else 1 / ctx.scale,
            )  # fmt: skip
            call.launch(
                _gradient_kernel, n_tiles, call.n_segments, args,
                PK=padded(K), PV=padded(V), BK=call.tiles.BK, normalize=normalize, gate=gate, roles=role,
                has_start=states is not None or S0 is not None, has_dS=later is not None or end is not None,
            )  # fmt: skip
        if Hk != H:
            dq, dk = (x.unflatten(2, (Hk, H // Hk)).sum(3).to(q.dtype) for x in (dq, dk))
        if dg is not None and dg.dim() == 4 and g.dim() == 3:
            dg = dg[0] if dg.shape[0] == 1 else dg.sum(0)
        needs_start = S0 is not None
        return (
            dq,
            dk,
            dv,
            dg,
            dS0 if needs_start else None,
            dz0 if needs_start and normalize else None,
            None,
            None,
            None,
        )


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


def _starts(states: Tensor | None, S0: Tensor | None, z0: Tensor | None, size: int) -> tuple[Tensor | None, ...]:
    """Where the states of the segments begin, and their z: behind S, or a tensor of its own where nothing is cut."""
    return (S0, z0) if states is None else (states, states.view(-1)[size:] if states.shape[-1] > size else None)


def _steps(states: Tensor | None, K: int, V: int) -> tuple[int, int]:
    return (K * V, K) if states is None else (states.shape[-1], states.shape[-1])


def _through_normaliser(do: Tensor, o: Tensor, den: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the numerator (in do's dtype) and of the denominator (fp32)."""
    weight = den.clamp(min=DEN_MIN).reciprocal_()
    dden = torch.linalg.vecdot(do.float(), o.float()).mul_(weight).neg_().masked_fill_(den < DEN_MIN, 0.0)
    return (do * weight[..., None]).to(do.dtype), dden


def _decay_scratch(call: _Call, normalize: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """dg, a tile of channels at a time where it is one number a token; sums q.dq; the states at each chunk's start."""
    assert call.g is not None
    (B, T, H, V), K = call.v.shape, call.q.shape[-1]
    shape = (triton.cdiv(K, call.tiles.BK), B, T, H) if call.g.dim() == 3 else (B, T, H, K)
    dg, sums = _single(call.v, *shape), _single(call.v, *shape)
    slots = triton.cdiv(T, call.tiles.C) * B + (0 if call.cu_seqlens is None else call.n_sequences)
    kept = call.q.dtype if call.q.dtype != torch.float16 else torch.float32
    states = call.v.new_empty(slots, H, V, K, dtype=kept)
    return dg, (sums, states, _single(call.v, slots, H, K) if normalize else None)
