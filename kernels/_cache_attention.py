"""Cache attention through Triton: blocks, launches and the autograd function. Imported only where Triton is.

Nothing waits for the card, and all sizes come from shapes, so that the calls can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import _cache_attention_triton as device
from kernels._launch import launch, padded, rows_contiguous

SLOTS = 4
"""Slots of the cache whose uses a program gathers."""


class Tile(NamedTuple):
    """What a program of a kernel that multiplies holds at once, and how."""

    M: int
    """Queries."""
    N: int
    """Keys."""
    warps: int
    stages: int


class Blocks(NamedTuple):
    attend: Tile
    into_queries: Tile
    into_keys: Tile
    precision: str


def blocks(C: int, K: int, V: int, dtype: torch.dtype) -> Blocks:
    """The launch table, a plain function of shapes.

    Measured on an H200, 2026-11-30, bf16, 64 tokens kept beside blocks of 256, ms; the choice comes first.
    (8, 2048, 16, 128), forward: `attend` of 64 queries in 4 warps 0.354, of 128 in 8 warps 0.711; with the backward
    pass: `into_queries` in 4 warps 1.57, in 8 warps 1.78; `into_keys` in 4 warps with 1 stage 1.59, in 8 warps with 2
    1.78. (1, 131072, 16, 64): 3 stages are 2 % better than 2.
    """
    wide, widest, whole = dtype == torch.float32, max(padded(K), padded(V)), padded(C)

    def tile(M: int, N: int, warps: int, stages: int) -> Tile:
        return Tile(min(M, whole), min(N, whole), warps, stages)

    if wide and widest == 128:
        return Blocks(tile(64, 32, 8, 1), tile(64, 32, 8, 1), tile(32, 64, 8, 1), "tf32x3")
    if wide:
        same = tile(64, 64, 4, 1) if widest <= 64 else tile(16, 16, 8, 1)
        return Blocks(same, same, same, "tf32x3")
    if widest <= 64:
        same = tile(64, 64, 4, 2)
        return Blocks(same, same, same, "tf32")
    if widest <= 128:
        return Blocks(tile(64, 64, 4, 2), tile(64, 64, 4, 2), tile(64, 64, 4, 1), "tf32")
    same = tile(32, 32, 8, 1)
    return Blocks(same, same, same, "tf32")


class Pool(NamedTuple):
    """What blocks may read, in the order of rows: the state's slots, if any, then the new tokens."""

    k: Tensor  # (B, P, H, K)
    v: Tensor  # (B, P, H, V)
    m: Tensor  # (B, P, H) fp32, contiguous
    position: Tensor | None  # (B, S, H) int32: of the state's slots
    length: Tensor | None  # (B,) int32: tokens in the state


class _Call(NamedTuple):
    """What the launches of one call share. N: blocks of a sequence, at most, as it may begin inside one."""

    B: int
    T: int
    H: int
    K: int
    V: int
    width: int
    block: int
    N: int
    size: Blocks

    @classmethod
    def of(cls, q: Tensor, v: Tensor, length: Tensor | None, width: int, block: int) -> _Call:
        (B, T, H, K), V = q.shape, v.shape[-1]
        N = triton.cdiv(T + (0 if length is None else block - 1), block)
        return cls(B, T, H, K, V, width, block, N, blocks(block, K, V, q.dtype))

    @property
    def widths(self) -> dict[str, Any]:
        return {"K": self.K, "BK": padded(self.K), "V": self.V, "BV": padded(self.V), "W": self.width, "C": self.block}

    def multiply(self, kernel: Any, tile: Tile, programs: int, args: tuple[Any, ...]) -> None:
        """A kernel of so many `programs` a block."""
        constants = {**self.widths, "BM": tile.M, "BN": tile.N, "PREC": self.size.precision}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        launch(kernel, self.B * self.H * self.N * programs, args, constants, **options)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.stride(i) for x in tensors for i in range(3))


def _scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with nothing in it, on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _choose(call: _Call, pool: Pool, select: str, cache_dtype: torch.dtype) -> tuple[Tensor | None, list[Tensor]]:
    """The row in each slot for each block, (B * H, N, W); the state's k, v, m and position, and whose rows they are."""
    B, T, H, N, W, C = call.B, call.T, call.H, call.N, call.width, call.block
    S, R = W + C, min(W, C)
    k, v, m, position, length = pool
    ranked = idx = None
    if W:
        ranked, idx = _scratch(k, B * H, N, R, dtype=torch.int64), _scratch(k, B * H, N, W, dtype=torch.int32)
        tile = {"W": W, "C": C, "R": R, "BI": min(256, padded(C)), "BJ": min(32, padded(C)), "select": select}
        programs = B * H * N * triton.cdiv(C, tile["BI"])
        launch(device.rank, programs, (m, length, ranked, T, H, N), tile, num_warps=4, num_stages=1)
    end = [_scratch(k, B, S, H, D, dtype=cache_dtype) for D in (call.K, call.V)]
    end += [_scratch(k, B, S, H, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64)]
    args = (k, v, m, position, length, ranked, idx, *end, T, H, N, *_strides(k, v))
    constants = {**call.widths, "BW": padded(W), "R": R, "BC": min(32, padded(C)), "select": select}
    warps = 4 if W <= 64 else 8 if W <= 128 else 16  # two widths are compared in registers
    launch(device.choose, B * H, args, constants, num_warps=warps, num_stages=1)
    return idx, end


class Saved(NamedTuple):
    """What the backward pass reads; k and v of the pool."""

    q: Tensor
    k: Tensor
    v: Tensor
    length: Tensor | None
    gain: Tensor
    sink: Tensor
    idx: Tensor | None
    o: Tensor
    lse: Tensor
    rows_end: Tensor


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""o (B, T, H, V), and the state's k, v, m and position."""


def _forward(
    q: Tensor,
    pool: Pool,
    gain: Tensor,
    sink: Tensor,
    width: int,
    block: int,
    select: str,
    cache_dtype: torch.dtype,
) -> tuple[Outputs, Saved]:
    call = _Call.of(q, pool.v, pool.length, width, block)
    q, pool = rows_contiguous(q), pool._replace(k=rows_contiguous(pool.k), v=rows_contiguous(pool.v))
    idx, (k_end, v_end, m_end, position_end, rows_end) = _choose(call, pool, select, cache_dtype)
    o, lse = _scratch(q, *q.shape[:3], call.V, dtype=q.dtype), _scratch(q, *q.shape[:3])
    strides = _strides(q, pool.k, pool.v)
    args = (q, pool.k, pool.v, gain, sink, pool.length, idx, o, lse, call.T, call.H, call.N, *strides)
    call.multiply(device.attend, call.size.attend, triton.cdiv(block, call.size.attend.M), args)
    saved = Saved(q, pool.k, pool.v, pool.length, gain, sink, idx, o, lse, rows_end)
    return (o, k_end, v_end, m_end, position_end), saved


def _query_gradients(call: _Call, x: Saved, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, del (B, T, H), and the gradients of gain (K,) and sink (H,)."""
    B, T, H, N, tile = call.B, call.T, call.H, call.N, call.size.into_queries
    programs = triton.cdiv(call.block, tile.M)
    dq, de = _scratch(x.q, B, T, H, call.K, dtype=x.q.dtype), _scratch(x.q, B, T, H)
    dgain, dsink = _scratch(x.q, B * H * N * programs, call.K), _scratch(x.q, B, H, N * programs)
    args = (x.q, x.k, x.v, x.gain, x.sink, x.length, x.idx, x.o, x.lse, do, dq, de, dgain, dsink, T, H, N)
    call.multiply(device.into_queries, tile, programs, (*args, *_strides(x.q, x.k, x.v, do)))
    return dq, de, dgain.sum(0), dsink.sum((0, 2))


def _key_gradients(call: _Call, x: Saved, do: Tensor, de: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv of the pool."""
    B, T, H, N, W, tile = call.B, call.T, call.H, call.N, call.width, call.size.into_keys
    dk, dv = (_scratch(x.q, *of.shape, dtype=x.q.dtype) for of in (x.k, x.v))
    if x.length is not None:  # some of the state's slots no block reads
        dk.zero_()
        dv.zero_()
    uses = _scratch(x.q, B * H, N, W, call.K + call.V) if W else None
    args = (x.q, x.k, x.v, x.gain, x.length, x.idx, x.lse, do, de, dk, dv, uses, T, H, N)
    programs = triton.cdiv(call.block, tile.N) + triton.cdiv(W, tile.N)
    call.multiply(device.into_keys, tile, programs, (*args, *_strides(x.q, x.k, x.v, do)))
    if W:
        constants, slots = {**call.widths, "BS": SLOTS}, triton.cdiv(W, SLOTS)
        launch(device.gather_uses, B * H * slots, (x.length, x.idx, uses, dk, dv, T, H, N), constants, num_warps=4)
    return dk, dv


def _with_kept(dx: Tensor, dend: Tensor | None, rows_end: Tensor) -> Tensor:
    """`dx` (B, P, H, D) and the gradient of the state's slots (B, S, H, D), at their rows; -1: an empty slot."""
    if dend is None:
        return dx
    B, P, H, D = dx.shape
    index = rows_end.masked_fill(rows_end < 0, P)[..., None].expand(-1, -1, -1, D)  # a row that is dropped
    return dx + dx.new_zeros(B, P + 1, H, D).scatter_(1, index, dend.to(dx.dtype))[:, :P]


class _CacheAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        m: Tensor,
        position: Tensor | None,
        length: Tensor | None,
        gain: Tensor,
        sink: Tensor,
        *settings: Any,
    ) -> Outputs:
        outputs, saved = _forward(q, Pool(k, v, m, position, length), gain, sink, *settings)
        ctx.save_for_backward(*saved)
        ctx.width, ctx.block = settings[:2]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[3:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do: Tensor | None, dk_end: Tensor | None, dv_end: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x = Saved(*ctx.saved_tensors)
        call = _Call.of(x.q, x.v, x.length, ctx.width, ctx.block)
        do = torch.zeros_like(x.o) if do is None else rows_contiguous(do)
        dq, de, dgain, dsink = _query_gradients(call, x, do)
        dk, dv = _key_gradients(call, x, do, de)
        dk, dv = _with_kept(dk, dk_end, x.rows_end), _with_kept(dv, dv_end, x.rows_end)
        return dq, dk, dv, None, None, None, dgain, dsink, *[None] * 4


def cache_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor,
    state: tuple[Tensor, ...] | None,
    *,
    width: int,
    block: int,
    gain: Tensor,
    sink: Tensor,
    select: str,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As `kernels.cache_attention.cache_attention`, which checked the shapes; the state as the fields of CacheState.

    Where no gradient can follow, autograd is not told: that takes longer than a small kernel runs.
    """
    cache_dtype, (B, T) = k.dtype, q.shape[:2]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (q, k, v)])
    q, k, v, m = q.to(dtype), k.to(dtype), v.to(dtype), m.detach().float()
    position = length = None
    if state is not None:
        old_k, old_v, old_m, position, length = state
        k, v = torch.cat([old_k.to(dtype), k], 1), torch.cat([old_v.to(dtype), v], 1)
        m, position = torch.cat([old_m.detach().float(), m], 1), position.contiguous()
        length = length.contiguous()
    pool, gain, sink = (
        Pool(k, v, m.contiguous(), position, length),
        gain.float().contiguous(),
        sink.float().contiguous(),
    )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, gain, sink)):
        o, *end = _CacheAttention.apply(q, *pool, gain, sink, width, block, select, cache_dtype)
    else:
        (o, *end), _ = _forward(q, pool, gain, sink, width, block, select, cache_dtype)
    seen = torch.full((B,), T, device=q.device, dtype=torch.int32) if length is None else length + T
    return o, (*end, seen)
