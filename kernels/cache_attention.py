"""Softmax attention over a bounded, exact cache: the current block so far, `width` chosen earlier tokens, and a sink.

    I_c  = the `width` tokens of largest score m among all tokens before block c       (select "top")
           the `width` latest tokens before block c                                    (select "recent")
    x_ij = sum_k gain_k q_ik k_jk          j in I_c, or in block c with j <= i
    o_i  = sum_j e^{x_ij} v_j / (e^{sink} + sum_j e^{x_ij})

Blocks count from the first token. A token competes for the cache when its block is complete; once evicted it never
returns, so I_c is chosen among I_{c-1} and block c-1. The order is total: one integer per token, the bits of m
(m >= 0) over the position reversed, so that of two equal scores the older wins. The choice carries no gradient.

State, for a token or a sequence to go on from: `CacheState`, of fixed size. Its length may differ within a batch.

Letters: B batch, T time, H heads, J = B * H, N blocks, C block, W width, S = W + C slots, K key width, V value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import accumulator, check, full_precision, resolve

SELECT = ("top", "recent", "none")


class CacheState(NamedTuple):
    """Slots 0..W-1 are the cache, W.. the current block. `position` (int32) is -1 in a free slot."""

    k: Tensor  # (B, S, H, K)
    v: Tensor  # (B, S, H, V)
    m: Tensor  # (B, S, H) fp32
    position: Tensor  # (B, S, H) int32
    length: Tensor  # (B,) int32, tokens seen


def empty_state(
    batch: int, heads: int, K: int, V: int, *, width: int, block: int, device: torch.device, dtype: torch.dtype
) -> CacheState:
    """The state before any token; k and v are kept in `dtype`."""
    size = (batch, width + block, heads)
    return CacheState(
        torch.zeros(*size, K, device=device, dtype=dtype),
        torch.zeros(*size, V, device=device, dtype=dtype),
        torch.zeros(size, device=device),
        torch.full(size, -1, device=device, dtype=torch.int32),
        torch.zeros(batch, device=device, dtype=torch.int32),
    )


def rank_key(m: Tensor, position: Tensor, select: str) -> Tensor:
    """The int64 whose order is the order of admission; -1 for a free slot."""
    if select == "recent":
        return position.long()
    bits = m.detach().float().abs().contiguous().view(torch.int32).long()
    return torch.where(position >= 0, (bits << 32) | (2**31 - 1 - position.long()), -1)


def cache_attention_step(
    state: CacheState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor,
    *,
    width: int,
    block: int,
    gain: Tensor,
    sink: Tensor,
    select: str = "top",
) -> tuple[Tensor, CacheState]:
    """One token, and the law. q, k (B, H, K), v (B, H, V), m (B, H) -> o (B, H, V), next state."""
    slot_B = width + state.length % block
    here_BS1 = (torch.arange(width + block, device=q.device) == slot_B[:, None])[..., None]
    k_all = torch.where(here_BS1[..., None], k[:, None].to(state.k.dtype), state.k)
    v_all = torch.where(here_BS1[..., None], v[:, None].to(state.v.dtype), state.v)
    m_all = torch.where(here_BS1, m.detach().float()[:, None], state.m)
    position = torch.where(here_BS1, state.length[:, None, None], state.position)
    x_BSH = torch.einsum("bhk,bshk->bsh", q * gain, k_all.to(q.dtype)).masked_fill(position < 0, -torch.inf)
    p_BSH = torch.cat([x_BSH, sink.to(x_BSH.dtype).expand(x_BSH.shape[0], 1, -1)], 1).softmax(1)[:, :-1]
    o = torch.einsum("bsh,bshv->bhv", p_BSH, v_all.to(q.dtype))
    state = CacheState(k_all, v_all, m_all, position, state.length + 1)
    return o, _admit(state, width, block, select)


def _admit(state: CacheState, width: int, block: int, select: str) -> CacheState:
    """Where the block is complete: its tokens compete with the cached ones, and it is emptied."""
    keep_BWH = rank_key(state.m, state.position, select).topk(width, 1).indices

    def chosen(x: Tensor, empty: float) -> Tensor:
        tail = x.shape[3:]
        index = keep_BWH.reshape(*keep_BWH.shape, *(1 for _ in tail)).expand(*keep_BWH.shape, *tail)
        cached = x.gather(1, index)
        return torch.cat([cached, torch.full_like(x[:, width:], empty)], 1)

    full_B = state.length % block == 0
    pick = [
        torch.where(full_B.view(-1, *(1 for _ in x.shape[1:])), chosen(x, empty), x)
        for x, empty in zip(state[:4], (0.0, 0.0, 0.0, -1), strict=True)
    ]
    return CacheState(pick[0], pick[1], pick[2], pick[3], state.length)


def reference(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, state: CacheState, **settings: Any
) -> tuple[Tensor, CacheState]:
    """The law over time: (B, T, H, ...) in, o and final state out."""
    out = []
    for t in range(q.shape[1]):
        o, state = cache_attention_step(state, q[:, t], k[:, t], v[:, t], m[:, t], **settings)
        out.append(o)
    return torch.stack(out, 1), state


class _Rows(torch.autograd.Function):
    """x (R, D) at rows `index` (M,). The gradient sums repeated rows in a fixed order, on a GPU too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape)
        if dy.is_cuda:  # index_add is atomic there; this one sorts
            return dx.index_put_((index,), dy, accumulate=True), None
        return dx.index_add_(0, index, dy), None


class _Pool(NamedTuple):
    """Every token a block may read, head-major: W slots of the state (if any), then N whole blocks of C."""

    kv: Tensor  # (J, P, K + V)
    key: Tensor  # (J, P) int64
    m: Tensor  # (J, P)
    position: Tensor  # (J, P)
    offset_J: Tensor | None  # where in the blocks the first new token stands; None: at 0
    n_cached: int


def _pool(k: Tensor, v: Tensor, m: Tensor, state: CacheState | None, width: int, block: int, select: str) -> _Pool:
    B, T, H, _ = v.shape
    kv = torch.cat([k, v], -1).transpose(1, 2).flatten(0, 1)
    m = m.detach().transpose(1, 2).flatten(0, 1)
    if state is None:
        extra = -T % block
        position = torch.arange(T, device=k.device).expand(B * H, T)
        kv, m, position = F.pad(kv, (0, 0, 0, extra)), F.pad(m, (0, extra)), F.pad(position, (0, extra), value=-1)
        return _Pool(kv, rank_key(m, position, select), m, position, None, 0)
    length_J = state.length.long().repeat_interleave(H)
    offset_J = length_J % block
    size = -(-(T + block - 1) // block) * block
    old = [x.transpose(1, 2).flatten(0, 1) for x in (torch.cat([state.k, state.v], -1), state.m, state.position)]
    kv_old, m_old, position_old = old[0].to(kv.dtype), old[1].to(m.dtype), old[2].long()
    new_T = torch.arange(T, device=k.device)
    at_JT = width + offset_J[:, None] + new_T
    longer = size - block
    kv = F.pad(kv_old, (0, 0, 0, longer)).scatter(1, at_JT[..., None].expand(-1, -1, kv.shape[-1]), kv)
    m = F.pad(m_old, (0, longer)).scatter(1, at_JT, m)
    position = F.pad(position_old, (0, longer), value=-1).scatter(1, at_JT, length_J[:, None] + new_T)
    return _Pool(kv, rank_key(m, position, select), m, position, offset_J, width)


def _choices(pool: _Pool, width: int, block: int) -> tuple[Tensor, Tensor]:
    """What block c reads, c = 0..N (N: what a next block would): rows of the pool and their keys, (J, N + 1, W)."""
    J, P = pool.key.shape
    row_JP = torch.arange(P, device=pool.key.device).expand(J, P)
    key, row = pool.key[:, : pool.n_cached], row_JP[:, : pool.n_cached]
    if not pool.n_cached:
        key, row = pool.key.new_full((J, width), -1), row_JP.new_zeros(J, width)
    keys, rows = [key], [row]
    for start in range(pool.n_cached, P, block):
        now = slice(start, start + block)
        key, best = torch.cat([key, pool.key[:, now]], 1).topk(width, 1)
        row = torch.cat([row, row_JP[:, now]], 1).gather(1, best)
        keys.append(key)
        rows.append(row)
    return torch.stack(rows, 1), torch.stack(keys, 1)


def _rows(x_JPD: Tensor, row_JM: Tensor) -> Tensor:
    """(J, M, D): the rows of each head's pool."""
    J, P, D = x_JPD.shape
    flat = (row_JM + torch.arange(J, device=row_JM.device)[:, None] * P).flatten()
    out: Tensor = _Rows.apply(x_JPD.reshape(J * P, D), flat)
    return out.view(J, row_JM.shape[1], D)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor,
    state: CacheState | None,
    *,
    width: int,
    block: int,
    gain: Tensor,
    sink: Tensor,
    select: str,
) -> tuple[Tensor, CacheState]:
    B, T, H, K = q.shape
    pool = _pool(k, v, m, state, width, block, select)
    J, P = pool.key.shape
    N = (P - pool.n_cached) // block
    row_JNW, key_JNW = _choices(pool, width, block)
    own = pool.kv[:, pool.n_cached :].view(J, N, block, pool.kv.shape[2])
    cached = _rows(pool.kv, row_JNW[:, :N].flatten(1)).view(J, N, width, pool.kv.shape[2])
    kv_JNSD = torch.cat([cached, own], 2)
    q_JTK = (q * gain).transpose(1, 2).flatten(0, 1)
    if pool.offset_J is None:
        q_JPK = F.pad(q_JTK, (0, 0, 0, N * block - T))
    else:
        at_JT1 = (pool.offset_J[:, None] + torch.arange(T, device=q.device))[..., None]
        q_JPK = q_JTK.new_zeros(J, N * block, K).scatter(1, at_JT1.expand(-1, -1, K), q_JTK)
    x_JNCS = q_JPK.view(J, N, block, K) @ kv_JNSD[..., :K].mT
    hidden_CC = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1)
    hidden = torch.cat([(key_JNW[:, :N, None] < 0).expand(-1, -1, block, -1), hidden_CC.expand(J, N, -1, -1)], 3)
    x_JNCS = x_JNCS.masked_fill(hidden, -torch.inf)
    sink_J = sink.to(x_JNCS.dtype).repeat(B).view(J, 1, 1, 1).expand(-1, N, block, -1)
    p_JNCS = torch.cat([x_JNCS, sink_J], 3).softmax(3)[..., :-1]
    o_JPV = (p_JNCS @ kv_JNSD[..., K:]).flatten(1, 2)
    o_JTV = o_JPV[:, :T] if pool.offset_J is None else o_JPV.gather(1, at_JT1.expand(-1, -1, v.shape[-1]))
    final = _final(pool, row_JNW, key_JNW, state, B, T, K, width, block)
    return o_JTV.unflatten(0, (B, H)).transpose(1, 2), final


def _final(
    pool: _Pool,
    row_JNW: Tensor,
    key_JNW: Tensor,
    state: CacheState | None,
    B: int,
    T: int,
    K: int,
    width: int,
    block: int,
) -> CacheState:
    """The state after the last token: what the next block would read, and the block that is not complete."""
    J = row_JNW.shape[0]
    offset_J = row_JNW.new_zeros(J) if pool.offset_J is None else pool.offset_J
    done_J = (offset_J + T) // block
    pick = done_J[:, None, None].expand(-1, 1, width)
    row_JW, key_JW = row_JNW.gather(1, pick)[:, 0], key_JNW.gather(1, pick)[:, 0]
    begun_JC = pool.n_cached + done_J[:, None] * block + torch.arange(block, device=row_JNW.device)
    inside = begun_JC < pool.key.shape[1]  # after a whole last block, the next is not in the pool
    row_JS = torch.cat([row_JW, torch.where(inside, begun_JC, 0)], 1)
    there = torch.cat([key_JW >= 0, inside & (pool.position.gather(1, row_JS[:, width:]) >= 0)], 1)
    kv = _rows(pool.kv, row_JS) * there[..., None]
    m = pool.m.gather(1, row_JS).float() * there
    position = torch.where(there, pool.position.gather(1, row_JS), -1).int()
    seen = torch.full((B,), T, device=m.device, dtype=torch.int32)
    kv, m, position = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (kv, m, position))
    return CacheState(kv[..., :K], kv[..., K:], m, position, seen if state is None else state.length + seen)


@full_precision
def cache_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor,
    *,
    width: int,
    block: int,
    gain: Tensor,
    sink: Tensor,
    select: str = "top",
    initial_state: CacheState | None = None,
    impl: str = "auto",
) -> tuple[Tensor, CacheState]:
    """o (B, T, H, V) in q's dtype, and the final state (k and v in k's dtype).

    q, k (B, T, H, K) of unit norm; v (B, T, H, V); m (B, T, H) >= 0, read for select "top" alone, without gradient;
    gain (K,); sink (H,), -inf for none. `width` is 0 with select "none".
    """
    impl = resolve(impl, "cache_attention")
    _check(q, k, v, m, width, block, gain, sink, select, initial_state)
    (B, _, H, K), V = q.shape, v.shape[-1]
    dtype, cache_dtype, acc = q.dtype, k.dtype, accumulator(q, v)
    q, k, v, gain = q.to(acc), k.to(acc), v.to(acc), gain.to(acc)
    settings: dict[str, Any] = {"width": width, "block": block, "gain": gain, "sink": sink, "select": select}
    if impl == "reference":
        zero = empty_state(B, H, K, V, width=width, block=block, device=q.device, dtype=acc)
        o, state = reference(q, k, v, m, zero if initial_state is None else initial_state, **settings)
    else:
        o, state = _chunked(q, k, v, m, initial_state, **settings)
    return o.to(dtype), state._replace(k=state.k.to(cache_dtype), v=state.v.to(cache_dtype))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor,
    width: int,
    block: int,
    gain: Tensor,
    sink: Tensor,
    select: str,
    state: CacheState | None,
) -> None:
    (B, T, H, K), V = q.shape, v.shape[-1]
    if select not in SELECT:
        raise ValueError(f"cache_attention: select={select!r} should be one of {', '.join(SELECT)}")
    if block < 1 or width < 0 or (select == "none" and width):
        raise ValueError(
            f"cache_attention: width={width}, block={block}: block >= 1, width >= 0, and 0 with select 'none'"
        )
    shapes = {
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, H, V)),
        "m": (m, (B, T, H)),
        "gain": (gain, (K,)),
        "sink": (sink, (H,)),
    }
    if state is not None:
        S = width + block
        shapes["initial_state.k"] = (state.k, (B, S, H, K))
        shapes["initial_state.v"] = (state.v, (B, S, H, V))
        shapes["initial_state.m"] = (state.m, (B, S, H))
        shapes["initial_state.position"] = (state.position, (B, S, H))
        shapes["initial_state.length"] = (state.length, (B,))
    for name, (x, shape) in shapes.items():
        check("cache_attention", name, x, shape)
