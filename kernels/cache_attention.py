"""Softmax attention over a bounded, exact cache: the current block so far, `width` chosen earlier tokens, and a sink.

    I_c  = the `width` tokens of largest score m among all tokens before block c       (select "top")
           the `width` latest tokens before block c                                    (select "recent")
    x_ij = sum_k gain_k q_ik k_jk          j in I_c, or in block c with j <= i
    o_i  = sum_j e^{x_ij} v_j / (e^{sink} + sum_j e^{x_ij})

Blocks count from the first token. A token competes for the cache when its block is complete; once evicted it never
returns, so I_c is chosen among I_{c-1} and block c-1. The order is total: one integer per token, the bits of m
(m >= 0) over the position reversed, so that of two equal scores the older wins. The choice carries no gradient.

State, for a token or a sequence to go on from: `CacheState`, of fixed size. Its length may differ within a batch. The
Triton kernels leave the cache in the same order as the other forms, by rank; one token by itself is a step.

Letters: B batch, T time, H heads, J = B * H, N blocks, C block, W width, S = W + C slots, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit

SELECT = ("top", "recent", "none")

DENSE = 4
"""Up to this many times what a query may read, all tokens are multiplied and the rest masked: few large products beat
many small ones and the gathering. Longer pools are gathered."""


WIDEST = 256
"""The widest cache that the Triton kernels take: they hold a product of two widths in registers, to rank."""


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
    position = torch.where(here_BS1, state.length[:, None, None], state.position)
    free = (position < 0)[..., None]
    k_all = torch.where(here_BS1[..., None], k[:, None].to(state.k.dtype), state.k).masked_fill(free, 0.0)
    v_all = torch.where(here_BS1[..., None], v[:, None].to(state.v.dtype), state.v).masked_fill(free, 0.0)
    m_all = torch.where(here_BS1, m.float()[:, None], state.m).detach()
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


class _Read(torch.autograd.Function):
    """Each block's queries (J, N, C, K) over the rows `row` (J, N, S) of k (J, P, K) and v (J, P, V), and a sink (J,).

    `row` None: over all rows, S = P. `hidden` (J, N, C, S) is what a query may not read. The gradient sums a row's uses
    in a fixed order, on a GPU too.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, row: Tensor | None, hidden: Tensor) -> Tensor:
        k_JNSK, v_JNSV = _take(k, row), _take(v, row)
        x = (q @ k_JNSK.mT).masked_fill_(hidden, -torch.inf)
        sink_J111 = sink[:, None, None, None]
        top = torch.maximum(x.amax(-1, keepdim=True), sink_J111)
        p, p_sink = x.sub_(top).exp_(), (sink_J111 - top).exp_()
        total = p.sum(-1, keepdim=True) + p_sink
        p.div_(total)
        out = p @ v_JNSV
        ctx.save_for_backward(q, k_JNSK, v_JNSV, p, p_sink.div_(total), out, row)
        ctx.n_pool = k.shape[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k_JNSK, v_JNSV, p, p_sink, out, row = ctx.saved_tensors
        delta = torch.linalg.vecdot(do, out).unsqueeze(-1)
        dx = (do @ v_JNSV.mT).sub_(delta).mul_(p)
        dsink = -(p_sink * delta).sum((1, 2, 3))
        dk, dv = (_give(rows, row, ctx.n_pool) for rows in (dx.mT @ q, p.mT @ do))
        return dx @ k_JNSK, dk, dv, dsink, None, None


def _flat(row_JNS: Tensor, n_pool: int) -> Tensor:
    heads = torch.arange(row_JNS.shape[0], device=row_JNS.device) * n_pool
    return (row_JNS + heads[:, None, None]).flatten()


def _take(x_JPD: Tensor, row_JNS: Tensor | None) -> Tensor:
    """The rows of each head's pool, (J, N, S, D)."""
    if row_JNS is None:
        return x_JPD.unsqueeze(1)
    J, P, D = x_JPD.shape
    return x_JPD.reshape(J * P, D).index_select(0, _flat(row_JNS, P)).view(*row_JNS.shape, D)


def _give(dy_JNSD: Tensor, row_JNS: Tensor | None, n_pool: int) -> Tensor:
    """The transpose of `_take`: (J, P, D)."""
    if row_JNS is None:
        return dy_JNSD.sum(1) if dy_JNSD.shape[1] > 1 else dy_JNSD[:, 0]
    J, D = dy_JNSD.shape[0], dy_JNSD.shape[-1]
    dx, flat, dy = dy_JNSD.new_zeros(J * n_pool, D), _flat(row_JNS, n_pool), dy_JNSD.reshape(-1, D)
    if dy.is_cuda:  # index_add is atomic there; this one sorts
        dx.index_put_((flat,), dy, accumulate=True)
    else:
        dx.index_add_(0, flat, dy)
    return dx.view(J, n_pool, D)


class _Pool(NamedTuple):
    """Every token a block may read, head-major: W slots of the state (if any), then N whole blocks of C."""

    k: Tensor  # (J, P, K)
    v: Tensor  # (J, P, V)
    key: Tensor  # (J, P) int64
    m: Tensor  # (J, P)
    position: Tensor  # (J, P)
    offset_J: Tensor | None  # where in the blocks the first new token stands; None: at 0
    n_cached: int


def _pool(k: Tensor, v: Tensor, m: Tensor, state: CacheState | None, width: int, block: int, select: str) -> _Pool:
    B, T, H, _ = v.shape
    k, v, m = (x.transpose(1, 2).flatten(0, 1) for x in (k, v, m.detach()))
    if state is None:
        extra = -T % block
        position = torch.arange(T, device=k.device).expand(B * H, T)
        if extra:
            k, v = (F.pad(x, (0, 0, 0, extra)) for x in (k, v))
            m, position = F.pad(m, (0, extra)), F.pad(position, (0, extra), value=-1)
        return _Pool(k, v, rank_key(m, position, select), m, position, None, 0)
    length_J = state.length.long().repeat_interleave(H)
    offset_J = length_J % block
    longer = -(-(T + block - 1) // block) * block - block
    new_T = torch.arange(T, device=k.device)
    at_JT = width + offset_J[:, None] + new_T

    def joined(old: Tensor, new: Tensor) -> Tensor:
        old = old.to(new.dtype).transpose(1, 2).flatten(0, 1)
        old = F.pad(old, (0, 0) * (old.dim() - 2) + (0, longer))
        index = at_JT if new.dim() == 2 else at_JT[..., None].expand_as(new)
        return old.scatter(1, index, new)

    position = joined(state.position + 1, length_J[:, None] + new_T + 1) - 1  # the padding is -1
    m = joined(state.m.detach(), m)
    key = rank_key(m, position, select)
    return _Pool(joined(state.k, k), joined(state.v, v), key, m, position, offset_J, width)


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


def _look_rows(pool: _Pool, row_JNW: Tensor, empty_JNW: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """What each block reads, cache then block: rows (J, N, S), and what is hidden of them (J, N, C, S)."""
    J, N, W = row_JNW.shape
    own_NC = torch.arange(pool.n_cached, pool.n_cached + N * block, device=row_JNW.device).view(N, block)
    row_JNS = torch.cat([row_JNW, own_NC.expand(J, N, block)], 2)
    later_CC = torch.ones(block, block, dtype=torch.bool, device=row_JNW.device).triu(1)
    hidden = [empty_JNW[:, :, None].expand(J, N, block, W), later_CC.expand(J, N, block, block)]
    return row_JNS, torch.cat(hidden, 3)


def _look_dense(pool: _Pool, row_JNW: Tensor, empty_JNW: Tensor, block: int) -> tuple[None, Tensor]:
    """The same as one mask over the whole pool, (J, 1, N * C, P)."""
    J, N, _ = row_JNW.shape
    P, device = pool.key.shape[1], row_JNW.device
    cached_JNP = torch.zeros(J, N, P + 1, dtype=torch.bool, device=device)
    cached_JNP.scatter_(2, torch.where(empty_JNW, P, row_JNW), True)  # an empty slot falls behind the end
    own = torch.arange(N * block, device=device)
    block_of = own // block
    seen = (block_of[:, None] == block_of) & (own[:, None] >= own)
    seen = F.pad(seen, (pool.n_cached, 0))
    cached = cached_JNP[..., :P].repeat_interleave(block, 1)
    return None, (cached | seen).logical_not_().unsqueeze(1)


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
    dense = DENSE * (width + block) >= P
    look = _look_dense if dense else _look_rows
    row_JNS, hidden = look(pool, row_JNW[:, :N], key_JNW[:, :N] < 0, block)
    q_JTK = (q * gain).transpose(1, 2).flatten(0, 1)
    if pool.offset_J is None:
        q_JPK = F.pad(q_JTK, (0, 0, 0, N * block - T)) if T % block else q_JTK
    else:
        at_JT1 = (pool.offset_J[:, None] + torch.arange(T, device=q.device))[..., None]
        q_JPK = q_JTK.new_zeros(J, N * block, K).scatter(1, at_JT1.expand(-1, -1, K), q_JTK)
    sink_J = sink.to(q.dtype).repeat(B)
    q_JNCK = q_JPK.view(J, 1, N * block, K) if dense else q_JPK.view(J, N, block, K)
    o_JPV = _Read.apply(q_JNCK, pool.k, pool.v, sink_J, row_JNS, hidden).flatten(1, 2)
    o_JTV = o_JPV[:, :T] if pool.offset_J is None else o_JPV.gather(1, at_JT1.expand(-1, -1, v.shape[-1]))
    final = _final(pool, row_JNW, key_JNW, state, B, T, width, block)
    return o_JTV.unflatten(0, (B, H)).transpose(1, 2), final


def _final(
    pool: _Pool,
    row_JNW: Tensor,
    key_JNW: Tensor,
    state: CacheState | None,
    B: int,
    T: int,
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
    kept = torch.where(there, row_JS, 0)[..., None]
    k, v = (x.gather(1, kept.expand(-1, -1, x.shape[-1])) * there[..., None] for x in (pool.k, pool.v))
    m = pool.m.gather(1, row_JS).float() * there
    position = torch.where(there, pool.position.gather(1, row_JS), -1).int()
    seen = torch.full((B,), T, device=m.device, dtype=torch.int32)
    k, v, m, position = (x.unflatten(0, (B, x.shape[0] // B)).transpose(1, 2) for x in (k, v, m, position))
    return CacheState(k, v, m, position, seen if state is None else state.length + seen)


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
    _check(q, k, v, m, width, block, gain, sink, select, initial_state)
    (B, T, H, K), V = q.shape, v.shape[-1]
    unfit = triton_unfit(q, k, v, m, gain, sink, *(initial_state or ())[:3], heads=(K, V))
    if unfit is None and width > WIDEST:
        unfit = f"takes a width of at most {WIDEST} in its Triton kernel, not {width}"
    impl = resolve(impl, "cache_attention", unfit)
    dtype, cache_dtype, acc = q.dtype, k.dtype, accumulator(q, v)
    if impl == "triton" and T != 1:
        from kernels import _cache_attention  # Triton is not everywhere

        fixed: dict[str, Any] = {"width": width, "block": block, "gain": gain, "sink": sink, "select": select}
        o, end = _cache_attention.cache_attention(q, k, v, m, initial_state, **fixed)
        return o.to(dtype), CacheState(*end)
    q, k, v, gain = q.to(acc), k.to(acc), v.to(acc), gain.to(acc)
    settings: dict[str, Any] = {"width": width, "block": block, "gain": gain, "sink": sink, "select": select}
    if impl in ("reference", "triton"):  # one token: a step
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


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `cache_attention` that use each of its options: ties, sequences at different places, no sink."""
    B, H, K, V = 2, 2, 5, 7

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    def unit(*size: int) -> Tensor:
        return F.normalize(draw(*size), dim=-1)

    for width, block, select, start in (
        (5, 16, "top", False),
        (3, 4, "top", True),
        (7, 1, "recent", True),
        (5, 16, "recent", False),
        (0, 8, "none", True),
        (200, 32, "top", False),
    ):
        state = empty_state(B, H, K, V, width=width, block=block, device=torch.device("cpu"), dtype=dtype)
        for _ in range(19 if start else 0):  # the second sequence is five tokens behind the first
            inputs = (unit(B, H, K), unit(B, H, K), draw(B, H, V), draw(B, H).abs())
            gain, sink = torch.ones(K, dtype=dtype), torch.zeros(H)
            settings: dict[str, Any] = {"width": width, "block": block, "gain": gain, "sink": sink, "select": select}
            _, after = cache_attention_step(state, *inputs, **settings)
            late_B = torch.tensor([True, int(state.length[0]) >= 5])
            late = [late_B.view(B, *(1 for _ in x.shape[1:])) for x in after]
            pick = [torch.where(*one) for one in zip(late, after, state, strict=True)]
            state = CacheState(*pick)
        yield {
            "q": unit(B, T, H, K),
            "k": unit(B, T, H, K),
            "v": draw(B, T, H, V),
            "m": (3 * draw(B, T, H).abs()).round(),
            "width": width,
            "block": block,
            "gain": 2 + draw(K),
            "sink": draw(H) if start else torch.full((H,), -torch.inf, dtype=dtype),
            "select": select,
            "initial_state": state if start else None,
        }
