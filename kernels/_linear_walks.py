"""Launches the walks of linear attention (`_linear_attention_triton.py`): sizes, memory, where segments start.

For every op that is made of such walks. Nothing waits for the card, and all sizes come from shapes, so that the calls
can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import interpreted, launch, multiprocessors, padded, rows_contiguous
from kernels._linear_attention_triton import _forward_kernel, _gradient_kernel, _scan_kernel
from kernels._segments import join, n_segments


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
    C = min(64, padded(T))
    if by_channel:
        C = min(C, 32 if wide <= 128 else 16)
    if exact and wide > 64:
        C = min(C, 32)
    tile = 64 if wide <= (128 if exact else 256) else 32
    stages = 3 if wide <= 64 and not exact else 2 if wide <= 128 else 1
    return Plan(C, min(tile, padded(K)), min(tile, padded(V)), 4 if wide <= 128 else 8, stages)


class Call(NamedTuple):
    """What the forward and the backward launches of one call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    cu_seqlens: Tensor | None
    n_sequences: int
    n_segments: int
    heads_a_v: int  # heads that read one head of v
    tiles: Plan
    constants: dict[str, Any]  # compile-time values that every kernel takes

    def launch(
        self, kernel: Any, tiles: int, segments: int, args: tuple[Any, ...], fuse: bool = True, **constants: Any
    ) -> None:
        """`fuse`: a product and the sum it goes into are rounded once."""
        programs = self.n_sequences * self.n_heads * segments * tiles
        options = {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages, "enable_fp_fusion": fuse}
        launch(kernel, programs, args, {**constants, **self.constants}, **options)

    @property
    def n_heads(self) -> int:
        return self.v.shape[2] * self.heads_a_v

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *_strides(self.g))


class Starts(NamedTuple):
    """What segments start from: `states` (N, H, segments, K * V, and K with z), or the sequence's own where uncut."""

    states: Tensor | None
    S: Tensor | None  # (N, H, K, V)
    z: Tensor | None  # (N, H, K)

    @property
    def given(self) -> bool:
        return self.states is not None or self.S is not None

    def places(self, size: int) -> tuple[Tensor | None, Tensor | None]:
        """Where S and z of the first segment lie; `size`: numbers of S."""
        if self.states is None:
            return self.S, self.z
        return self.states, self.states.view(-1)[size:] if self.states.shape[-1] > size else None

    def steps(self, K: int, V: int) -> tuple[int, int]:
        """From one segment's S to the next one's, and z."""
        return (K * V, K) if self.states is None else (self.states.shape[-1], self.states.shape[-1])


class Gradients(NamedTuple):
    """Of a call: written by `walk_back`."""

    q: Tensor | None  # (B, T, H, K), also where heads share one; None: not asked for
    k: Tensor
    v: Tensor  # (B, T, H, V)
    g: Tensor | None  # fp32 (B, T, H, K); for one decay a token (tiles of k, B, T, H), to be summed
    S: Tensor  # fp32 (N, H, K, V)
    z: Tensor | None


def single(like: Tensor, *shape: int) -> Tensor:
    """An fp32 tensor with nothing in it."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _precision(dtype: torch.dtype, width: int) -> str:
    """Of products of fp32. Tensor cores cut off what they add, not round it: over 512 channels that is 3e-6 of the sum,
    more than all else together."""
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if width <= 256 else "ieee"


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, heads_a_v: int = 1) -> Call:
    """Sizes and layouts. The dtype of v decides how products are rounded; q and k may have a wider one."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    (B, T, H, V), K = v.shape, q.shape[-1]
    H *= heads_a_v
    by_channel = g is not None and g.dim() == 4
    if g is not None and by_channel:
        g = rows_contiguous(g)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tiles = plan(T, K, V, v.dtype, by_channel)
    n_chunks = triton.cdiv(T * B, tiles.C * max(N, 1))
    S = n_segments(N * H * triton.cdiv(V, tiles.BV), n_chunks, multiprocessors(v))
    constants = {
        "K": K,
        "V": V,
        "BV": tiles.BV,
        "C": tiles.C,
        "decay": "none" if g is None else "key" if by_channel else "token",
        "packed": cu_seqlens is not None,
        "product": tl.bfloat16 if v.dtype == torch.bfloat16 and not interpreted() else tl.float32,
        "prec": _precision(v.dtype, max(K, V)),
    }
    return Call(q, k, v, g, cu_seqlens, N, S, heads_a_v, tiles, constants)


def segment_starts(
    call: Call, k: Tensor, v: Tensor, side: Tensor | None, start: tuple[Tensor, Tensor | None] | None, **settings: Any
) -> Tensor:
    """The states (N, H, segments, K * V, and K with the normaliser) that segments start from, in order of `reverse`."""
    (_, T, _, V), H, K, S = call.v.shape, call.n_heads, call.q.shape[-1], call.n_segments
    reverse, normalize = settings["reverse"], settings["normalize"]
    size = K * V + K if normalize else K * V
    states = single(v, call.n_sequences, H, S, size)
    totals = None
    if call.g is not None:
        totals = single(v, call.n_sequences, H, S, *(() if call.g.dim() == 3 else (K,)))
    args = (
        k, v, call.g, side, states, totals, call.cu_seqlens,
        *k.stride()[:3], *v.stride()[:3], *_strides(call.g), T, H, H // call.q.shape[2], call.heads_a_v, S,
    )  # fmt: skip
    norm = ("in" if reverse else "out") if normalize else "none"
    call.launch(_scan_kernel, triton.cdiv(V, call.tiles.BV), S - 1, args, BK=padded(K), norm=norm, reverse=reverse)
    scale = settings.get("start_scale", 1.0)
    join(states, totals, start, K=K, V=V, reverse=reverse, start_scale=scale)
    return states


class Attended(NamedTuple):
    o: Tensor  # (B, T, H, V)
    S: Tensor  # (N, H, K, V)
    z: Tensor | None  # (N, H, K); None without `normalize`
    states: Tensor | None  # where segments start
    den: Tensor | None  # (B, T, H)


def walk(call: Call, starts: Starts, scale: float, normalize: bool, dtype: torch.dtype) -> Attended:
    """The forward pass, from `starts`."""
    (B, T, _, V), H, K, N = call.v.shape, call.n_heads, call.q.shape[-1], call.n_sequences
    o = torch.empty((B, T, H, V), dtype=dtype, device=call.v.device)
    den = single(o, B, T, H) if normalize else None
    S, z = single(o, N, H, K, V), single(o, N, H, K) if normalize else None
    args = (
        call.q, call.k, call.v, call.g, den, o, *starts.places(K * V), S, z, call.cu_seqlens,
        *call.strides, T, H, H // call.q.shape[2], call.heads_a_v, call.n_segments, *starts.steps(K, V), scale,
    )  # fmt: skip
    tiles = triton.cdiv(V, call.tiles.BV)
    constants = {"BK": padded(K), "normalize": normalize, "has_start": starts.given}
    # Two threads make the same sum over the channels of z, each from a product of its own and the other's: fused, they
    # would differ in the last bit, and both write it to one place.
    call.launch(_forward_kernel, tiles, call.n_segments, args, fuse=not normalize, **constants)
    return Attended(o, S, z, starts.states, den)


def ends_of(
    call: Call, do: Tensor, dden: Tensor | None, dS: Tensor | None, dz: Tensor | None, scale: float, normalize: bool
) -> Starts:
    """The gradients of the states that segments end with; dS, dz: of the final state, None: zero."""
    (_, _, _, V), H, K, N = call.v.shape, call.n_heads, call.q.shape[-1], call.n_sequences
    end = None
    if dS is not None or dz is not None:
        dS = single(call.v, N, H, K, V).zero_() if dS is None else dS.contiguous()
        if normalize:
            dz = single(call.v, N, H, K).zero_() if dz is None else dz.contiguous()
        end = (dS, dz if normalize else None)
    if call.n_segments == 1:
        return Starts(None, *(end or (None, None)))
    settings = {"reverse": True, "normalize": normalize, "start_scale": 1 / scale}
    return Starts(segment_starts(call, call.q, do, dden, end, **settings), None, None)


def walk_back(
    call: Call,
    do: Tensor,
    dden: Tensor | None,
    starts: Starts,
    ends: Starts,
    out: Gradients,
    scale: float = 1.0,
    normalize: bool = False,
    more: str = "none",
) -> None:
    """Writes `out`. do lies as v does; `starts` as in the forward pass, `ends` of `ends_of`.

    `more` "add": adds to `out.k` and `out.g`; "gate": that, and k is 1 - e^g, whose gradient goes into `out.g` alone.
    """
    (B, T, _, V), H, K = call.v.shape, call.n_heads, call.q.shape[-1]
    gate = out.g is not None
    scratch = _decay_scratch(call, normalize) if gate else (None, None, None)
    tiles_k, tiles_v = triton.cdiv(K, call.tiles.BK), triton.cdiv(V, call.tiles.BV)
    roles = {"kv": tiles_k + tiles_v}
    if gate:
        roles = {"q": tiles_k, **roles}
    elif out.q is not None:
        roles = {"all": 2 * tiles_k + tiles_v}
    for role, n_tiles in roles.items():
        args = (
            call.q, call.k, call.v, call.g, do, dden, out.q, out.k, out.v, out.g,
            *starts.places(K * V), *ends.places(K * V), out.S, out.z, *scratch, call.cu_seqlens,
            *call.strides, *do.stride()[:3], T, H, H // call.q.shape[2], call.heads_a_v, call.n_segments, B * T * H,
            *starts.steps(K, V), *ends.steps(K, V), scale, 1.0 if ends.states is not None else 1 / scale,
        )  # fmt: skip
        call.launch(
            _gradient_kernel, n_tiles, call.n_segments, args,
            PK=padded(K), PV=padded(V), BK=call.tiles.BK, normalize=normalize, gate=gate, roles=role,
            has_start=starts.given, has_dS=ends.given, more="none" if role == "q" else more,
        )  # fmt: skip


def _decay_scratch(call: Call, normalize: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums q.dq, a tile of channels at a time where g is one number a token; the states at each chunk's start."""
    assert call.g is not None
    (B, T, _, V), H, K = call.v.shape, call.n_heads, call.q.shape[-1]
    sums = single(call.v, *((triton.cdiv(K, call.tiles.BK), B, T, H) if call.g.dim() == 3 else (B, T, H, K)))
    slots = triton.cdiv(T, call.tiles.C) * B + (0 if call.cu_seqlens is None else call.n_sequences)
    kept = call.v.dtype if call.v.dtype != torch.float16 else torch.float32
    states = call.v.new_empty(slots, H, V, K, dtype=kept)
    return sums, states, single(call.v, slots, H, K) if normalize else None
