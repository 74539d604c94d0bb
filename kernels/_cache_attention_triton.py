"""Cache attention's Triton kernels. `_cache_attention.py` launches them; the equations are `cache_attention.py`'s.

The choice is made by keys, integers whose order is the order of admission (`_key`); no two tokens have the same, and a
place with no token has one below zero. Nothing is sorted: a token's rank is how many keys are larger.

    rank      every block at once: its keys, in order
    choose    one program a head walks the blocks: those that keep a place among the `width` largest stay in their slot,
              the new ones take the slots that fall free; at the end, the state to go on from

So a token has one slot for life, in one run of blocks. What it is given there is summed down the slot's column:

    attend        o and the log of the softmax's sum, each block's queries over its own keys, then over the cache
    into_queries  dq, del = do.o, and each program's part of the gradients of gain and sink
    into_keys     dk, dv of a block's own keys; of a cached key what this block adds, to `uses`
    gather_uses   a slot's column from its newest block to its oldest: a token's uses, added to its dk and dv

P = e^{x - lse}, dx = P * (do V^T - del). On Hopper a product kept in registers was seen to go wrong as the left factor
of the next: here left factors come from memory, so scores are made as each kernel needs them lying, (keys, queries) or
(queries, keys), and results come out transposed (channels, tokens).

Rows: a token's place in k and v, which hold the state's S = W + C slots before the new tokens, if there is a state.
"Place" p counts tokens from the start of the first block, `offset` of which are in the state. `idx` (B * H, N, W) is
the row in each slot for each block, -1 in an empty one. Letters as in `cache_attention.py`.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)
NONE = tl.constexpr(-(2**62))
"""Below every key, and every missing token's."""


@triton.jit
def _load(ptr, row, stride, here, d, D: tl.constexpr):
    """Rows of a tensor and channels `d` of one head, (rows, channels); zero where there is none."""
    return tl.load(ptr + (row[:, None] * stride + d[None, :]), here[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def _begun(length, b, C: tl.constexpr):
    """How many tokens of its first block batch entry `b` has in the state."""
    return tl.load(length + b).to(tl.int64) % C if length is not None else b * 0


@triton.jit
def _row(p, offset, length, W: tl.constexpr, C: tl.constexpr):
    """The row of the token at place `p`: the state keeps a begun block behind its W slots."""
    return tl.where(p < offset, W + p, W + C + p - offset) if length is not None else p


@triton.jit
def _key(m, row, position, b, h, H, P, here, select: tl.constexpr):
    """The order of admission: by score, and of equals the older first; or the later first. -1 where not `here`."""
    if select == "recent":
        return tl.where(here, position, -1)
    bits = tl.load(m + (b * P + row) * H + h, here, 0.0).to(tl.int32, bitcast=True) & LAST
    return tl.where(here, (bits.to(tl.int64) << 32) | (position ^ LAST), -1)


@triton.jit(do_not_specialize=["T", "N"])
def rank(
    m, length, ranked, T, H, N,
    W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, select: tl.constexpr,
):  # fmt: skip
    """BI of a block's keys, each to its place among the R = min(W, C) largest of the block, if it is one of those."""
    tiles: tl.constexpr = (C + BI - 1) // BI
    pid = tl.program_id(0).to(tl.int64)
    c, bh = pid // tiles % N, pid // tiles // N
    b, h = bh // H, bh % H
    offset = _begun(length, b, C)
    start, P = 0, T
    if length is not None:
        start, P = tl.load(length + b).to(tl.int64) - offset, W + C + T
    i = pid % tiles * BI + tl.arange(0, BI)
    p = c * C + i
    key_i = _key(m, _row(p, offset, length, W, C), start + p, b, h, H, P, (i < C) & (p < offset + T), select)
    key_i = tl.where(key_i < 0, -1 - i, key_i)
    larger = tl.zeros([BI], tl.int32)
    for j0 in range(0, C, BJ):
        j = j0 + tl.arange(0, BJ)
        at = c * C + j
        key_j = _key(m, _row(at, offset, length, W, C), start + at, b, h, H, P, (j < C) & (at < offset + T), select)
        key_j = tl.where(key_j < 0, tl.where(j < C, -1 - j.to(tl.int64), NONE), key_j)
        larger += tl.sum((key_j[None, :] > key_i[:, None]).to(tl.int32), 1)
    tl.store(ranked + ((bh * N + c) * R + larger), key_i, (i < C) & (larger < R))


@triton.jit
def _position(key, select: tl.constexpr):
    """The position of the token with this key."""
    return key if select == "recent" else (key & LAST) ^ LAST


@triton.jit
def _save(
    k, v, m, k_end, v_end, m_end, position_end, rows_end, row, slot, position, here, inside, b, h, H, P,
    k_t, v_t, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The tokens at `row` into `slot` of the state to go on from, zeros and -1 where not `here`."""
    at = (b * S + slot) * H + h
    tl.store(position_end + at, tl.where(here, position, -1).to(tl.int32), inside)
    tl.store(rows_end + at, tl.where(here, row, -1), inside)
    tl.store(m_end + at, tl.load(m + (b * P + row) * H + h, here, 0.0), inside)
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    to_k, to_v = k_end + (at[:, None] * K + d[None, :]), v_end + (at[:, None] * V + e[None, :])
    tl.store(to_k, _load(k, row, k_t, here, d, K).to(k_end.dtype.element_ty), inside[:, None] & (d < K)[None, :])
    tl.store(to_v, _load(v, row, v_t, here, e, V).to(v_end.dtype.element_ty), inside[:, None] & (e < V)[None, :])


@triton.jit(do_not_specialize=["T", "N"])
def choose(
    k, v, m, position, length, ranked, idx, k_end, v_end, m_end, position_end, rows_end, T, H, N,
    k_b, k_t, k_h, v_b, v_t, v_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, select: tl.constexpr,
):  # fmt: skip
    """What each block of one head reads of the tokens before it, and the state behind the last token."""
    S: tl.constexpr = W + C
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    offset = _begun(length, b, C)
    start, P = b * 0, b * 0 + T
    if length is not None:
        start, P = tl.load(length + b).to(tl.int64) - offset, b * 0 + S + T
    done = (offset + T) // C
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    if W > 0:
        w = tl.arange(0, BW)
        key, row = tl.zeros([BW], tl.int64) - 1, tl.zeros([BW], tl.int64) - 1
        if length is not None:
            at = tl.load(position + (b * S + w) * H + h, w < W, -1).to(tl.int64)
            key = _key(m, w.to(tl.int64), at, b, h, H, P, at >= 0, select)
            row = tl.where(at >= 0, w.to(tl.int64), -1)
        best = bh * N * R + w
        soon = tl.load(ranked + best, w < tl.minimum(done, 1) * R, -1)
        for c in range(0, done):
            tl.store(idx + (bh * N + c) * W + w, row.to(tl.int32), w < W)
            new, ahead = soon, tl.where(c + 1 < done, R, 0)
            soon = tl.load(ranked + (best + R), w < ahead, -1)  # early: the wait for it is the longest of a step
            larger = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
            larger += tl.sum((new[None, :] > key[:, None]).to(tl.int32), 1)
            stays = (key >= 0) & (larger < W)
            larger = w + tl.sum((key[:, None] > new[None, :]).to(tl.int32), 0)
            n_enter = tl.sum(((new >= 0) & (larger < W)).to(tl.int32), 0)  # the first of `new`, as those are in order
            free = (w < W) & ~stays
            nth = tl.cumsum(free.to(tl.int32), 0) - 1
            takes = free & (nth < n_enter)
            new = tl.load(ranked + (best - w + nth), takes, -1)
            key = tl.where(stays, key, new)
            row_new = _row(_position(new, select) - start, offset, length, W, C)
            row = tl.where(stays, row, tl.where(takes, row_new, -1))
            best += R
        if done < N:
            tl.store(idx + (bh * N + done) * W + w, row.to(tl.int32), w < W)
        here, empty = key >= 0, (key < 0) & (w < W)
        slot = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)  # by rank, as the other forms leave it
        slot = tl.where(here, slot, tl.sum(here.to(tl.int32), 0) + tl.cumsum(empty.to(tl.int32), 0) - 1)
        slot = tl.where(w * 0 + done > 0, slot, w)
        _save(
            k, v, m, k_end, v_end, m_end, position_end, rows_end, row, slot, _position(key, select), here, w < W,
            b, h, H, P, k_t, v_t, K, BK, V, BV, S,
        )  # fmt: skip
    for i0 in range(0, C, BC):
        i = i0 + tl.arange(0, BC)
        p = done * C + i
        _save(
            k, v, m, k_end, v_end, m_end, position_end, rows_end, _row(p, offset, length, W, C), W + i, start + p,
            (i < C) & (p < offset + T), i < C, b, h, H, P, k_t, v_t, K, BK, V, BV, S,
        )  # fmt: skip


@triton.jit
def _own(c, j0, offset, T, length, W: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    """A tile of a block's own keys: their place in the block, their rows, and which are there."""
    j = j0 + tl.arange(0, BN)
    p = c * C + j
    return j, _row(p, offset, length, W, C), (j < C) & (p < offset + T)


@triton.jit
def _cached(c, w0, offset, T, idx, W: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    """A tile of cached keys, as `_own`; before every place in the block. A block of no token has none."""
    w = w0 + tl.arange(0, BN).to(tl.int64)
    reach = (c * C < offset + T).to(tl.int64) * W
    row = tl.load(idx + w, w < reach, -1).to(tl.int64)
    return w * 0 - 1, row, row >= 0


@triton.jit
def _absorb(
    qT, k, v, row, here, j, i, k_t, v_t, d, e, outT, top, total, K: tl.constexpr, V: tl.constexpr, PREC: tl.constexpr
):
    """The softmax of queries `i` over one more tile of keys: sums under e^{x - top}, all transposed."""
    x = tl.dot(_load(k, row, k_t, here, d, K), qT, input_precision=PREC)
    x = tl.where(here[:, None] & (j[:, None] <= i[None, :]), x, float("-inf"))
    new_top = tl.maximum(top, tl.max(x, 0))
    p, shrink = tl.exp(x - new_top[None, :]), tl.exp(top - new_top)
    v_n = _load(v, row, v_t, here, e, V)
    outT = outT * shrink[None, :] + tl.dot(tl.trans(v_n), p.to(v_n.dtype), input_precision=PREC)
    return outT, new_top, total * shrink + tl.sum(p, 0)


@triton.jit(do_not_specialize=["T", "N"])
def attend(
    q, k, v, gain, sink, length, idx, o, lse, T, H, N,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BM queries of one block of one head."""
    tiles: tl.constexpr = (C + BM - 1) // BM
    pid = tl.program_id(0).to(tl.int64)
    c, bh = pid // tiles % N, pid // tiles // N
    b, h = bh // H, bh % H
    offset = _begun(length, b, C)
    i = pid % tiles * BM + tl.arange(0, BM)
    t = c * C + i - offset
    live = (i < C) & (t >= 0) & (t < T)
    heads = (b * T + t) * H + h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    gain_n = tl.load(gain + d, d < K, 0.0)
    q_n = _load(q + b * q_b + h * q_h, t, q_t, live, d, K)
    qT = tl.trans((q_n.to(tl.float32) * gain_n[None, :]).to(q_n.dtype))
    top = tl.zeros([BM], tl.float32) + tl.load(sink + h)
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    outT = tl.zeros([BV, BM], tl.float32)
    behind = tl.minimum(tl.minimum(pid % tiles * BM + BM, C), offset + T - c * C).to(tl.int32)
    for j0 in range(0, behind, BN):  # first: a query always reads itself, so that `top` is a number
        j, row, here = _own(c, j0, offset, T, length, W, C, BN)
        outT, top, total = _absorb(qT, k, v, row, here, j, i, k_t, v_t, d, e, outT, top, total, K, V, PREC)
    if W > 0:
        for w0 in range(0, W, BN):
            j, row, here = _cached(c, w0, offset, T, idx + (bh * N + c) * W, W, C, BN)
            outT, top, total = _absorb(qT, k, v, row, here, j, i, k_t, v_t, d, e, outT, top, total, K, V, PREC)
    at = o + (heads[None, :] * V + e[:, None])
    tl.store(at, (outT / total[None, :]).to(o.dtype.element_ty), live[None, :] & (e < V)[:, None])
    tl.store(lse + heads, top + tl.log(total), live)


@triton.jit
def _draw_back(
    qT, doT, k, v, row, here, j, i, k_t, v_t, d, e, lse, de, dqT, K: tl.constexpr, V: tl.constexpr, PREC: tl.constexpr
):
    """What one tile of keys adds to the gradient of queries `i` after gain, transposed."""
    k_n = _load(k, row, k_t, here, d, K)
    x = tl.dot(k_n, qT, input_precision=PREC) - lse[None, :]
    p = tl.exp(tl.where(here[:, None] & (j[:, None] <= i[None, :]), x, float("-inf")))
    dx = p * (tl.dot(_load(v, row, v_t, here, e, V), doT, input_precision=PREC) - de[None, :])
    return dqT + tl.dot(tl.trans(k_n), dx.to(k_n.dtype), input_precision=PREC)


@triton.jit(do_not_specialize=["T", "N"])
def into_queries(
    q, k, v, gain, sink, length, idx, o, lse, do, dq, de, dgain, dsink, T, H, N,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq and del of BM queries of one block of one head, and what they add to the gradients of gain and sink."""
    tiles: tl.constexpr = (C + BM - 1) // BM
    pid = tl.program_id(0).to(tl.int64)
    c, bh = pid // tiles % N, pid // tiles // N
    b, h = bh // H, bh % H
    offset = _begun(length, b, C)
    i = pid % tiles * BM + tl.arange(0, BM)
    t = c * C + i - offset
    live = (i < C) & (t >= 0) & (t < T)
    heads = (b * T + t) * H + h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    gain_n = tl.load(gain + d, d < K, 0.0)
    q_n = _load(q + b * q_b + h * q_h, t, q_t, live, d, K)
    qT = tl.trans((q_n.to(tl.float32) * gain_n[None, :]).to(q_n.dtype))
    do_n = _load(do + b * do_b + h * do_h, t, do_t, live, e, V)
    de_n = tl.sum(do_n.to(tl.float32) * _load(o + b * T * H * V + h * V, t, H * V, live, e, V).to(tl.float32), 1)
    lse_n = tl.load(lse + heads, live, 0.0)
    tl.store(de + heads, de_n, live)
    to_sink = tl.exp(tl.load(sink + h) - lse_n) * de_n
    tl.store(dsink + pid, -tl.sum(tl.where(live, to_sink, 0.0), 0))
    doT = tl.trans(do_n)
    dqT = tl.zeros([BK, BM], tl.float32)
    behind = tl.minimum(tl.minimum(pid % tiles * BM + BM, C), offset + T - c * C).to(tl.int32)
    for j0 in range(0, behind, BN):
        j, row, here = _own(c, j0, offset, T, length, W, C, BN)
        dqT = _draw_back(qT, doT, k, v, row, here, j, i, k_t, v_t, d, e, lse_n, de_n, dqT, K, V, PREC)
    if W > 0:
        for w0 in range(0, W, BN):
            j, row, here = _cached(c, w0, offset, T, idx + (bh * N + c) * W, W, C, BN)
            dqT = _draw_back(qT, doT, k, v, row, here, j, i, k_t, v_t, d, e, lse_n, de_n, dqT, K, V, PREC)
    at = dq + (heads[None, :] * K + d[:, None])
    tl.store(at, (dqT * gain_n[:, None]).to(dq.dtype.element_ty), live[None, :] & (d < K)[:, None])
    q_n = _load(q + b * q_b + h * q_h, t, q_t, live, d, K)
    tl.store(dgain + pid * K + d, tl.sum(tl.trans(q_n).to(tl.float32) * dqT, 1), d < K)


@triton.jit(do_not_specialize=["T", "N"])
def into_keys(
    q, k, v, gain, length, idx, lse, do, de, dk, dv, uses, T, H, N,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What the queries of one block of one head add to BN keys: of its own, dk and dv; or of the cache, to `uses`."""
    own: tl.constexpr = (C + BN - 1) // BN
    tiles: tl.constexpr = own + (W + BN - 1) // BN
    pid = tl.program_id(0).to(tl.int64)
    n, c, bh = pid % tiles, pid // tiles % N, pid // tiles // N
    b, h = bh // H, bh % H
    offset = _begun(length, b, C)
    if W == 0:  # noqa: SIM114 (decided when compiled, the next line when it runs)
        j, row, here = _own(c, n * BN, offset, T, length, W, C, BN)
    elif n < own:
        j, row, here = _own(c, n * BN, offset, T, length, W, C, BN)
    else:
        j, row, here = _cached(c, (n - own) * BN, offset, T, idx + (bh * N + c) * W, W, C, BN)
    q += b * q_b + h * q_h
    do += b * do_b + h * do_h
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    gain_n = tl.load(gain + d, d < K, 0.0)
    k_n = _load(k + b * k_b + h * k_h, row, k_t, here, d, K)
    kT = tl.trans((k_n.to(tl.float32) * gain_n[None, :]).to(k_n.dtype))
    vT = tl.trans(_load(v + b * v_b + h * v_h, row, v_t, here, e, V))
    dkT, dvT = tl.zeros([BK, BN], tl.float32), tl.zeros([BV, BN], tl.float32)
    first = tl.where(n < own, n * BN // BM * BM, 0).to(tl.int32)
    behind = tl.minimum(offset + T - c * C, C).to(tl.int32)
    for i0 in range(first, behind, BM):
        i = i0 + tl.arange(0, BM)
        t = c * C + i - offset
        live = (i < C) & (t >= 0) & (t < T)
        heads = (b * T + t) * H + h
        q_n, do_n = _load(q, t, q_t, live, d, K), _load(do, t, do_t, live, e, V)
        x = tl.dot(q_n, kT, input_precision=PREC) - tl.load(lse + heads, live, 0.0)[:, None]
        p = tl.exp(tl.where(here[None, :] & (j[None, :] <= i[:, None]), x, float("-inf")))
        dp = tl.dot(do_n, vT, input_precision=PREC)
        dx = p * (dp - tl.load(de + heads, live, 0.0)[:, None])
        dvT += tl.dot(tl.trans(do_n), p.to(do_n.dtype), input_precision=PREC)
        dkT += tl.dot(tl.trans(q_n), dx.to(q_n.dtype), input_precision=PREC)
    dkT *= gain_n[:, None]
    if n < own:
        at = (b * (T if length is None else W + C + T) + row) * H + h
        to_k, to_v = at[None, :] * K + d[:, None], at[None, :] * V + e[:, None]
        tl.store(dk + to_k, dkT.to(dk.dtype.element_ty), here[None, :] & (d < K)[:, None])
        tl.store(dv + to_v, dvT.to(dv.dtype.element_ty), here[None, :] & (e < V)[:, None])
    elif W > 0:
        at = ((bh * N + c) * W + (n - own) * BN + tl.arange(0, BN)) * (K + V)
        tl.store(uses + (at[None, :] + d[:, None]), dkT, here[None, :] & (d < K)[:, None])
        tl.store(uses + (at[None, :] + (e[:, None] + K)), dvT, here[None, :] & (e < V)[:, None])


@triton.jit
def _add(dx, at, sums, where, d, D: tl.constexpr):
    """Adds to the rows `at` of one head's gradient, which no other program touches."""
    inside = where[:, None] & (d < D)[None, :]
    ptr = dx + (at[:, None] * D + d[None, :])
    tl.store(ptr, (tl.load(ptr, inside, 0.0).to(tl.float32) + sums).to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["T", "N"])
def gather_uses(
    length, idx, uses, dk, dv, T, H, N,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """BS slots of one head, from the last block to the first: a token's sum is whole when an older one turns up."""
    tiles: tl.constexpr = (W + BS - 1) // BS
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // tiles
    b, h = bh // H, bh % H
    offset = _begun(length, b, C)
    P = T if length is None else W + C + T
    w = pid % tiles * BS + tl.arange(0, BS)
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    token = tl.zeros([BS], tl.int64) - 1
    sum_k, sum_v = tl.zeros([BS, BK], tl.float32), tl.zeros([BS, BV], tl.float32)
    blocks = tl.cdiv(offset + T, C)
    for step in range(0, blocks):
        at = (bh * N + blocks - 1 - step) * W + w
        row = tl.load(idx + at, w < W, -1).to(tl.int64)
        whole = (token >= 0) & (row != token)
        _add(dk, (b * P + token) * H + h, sum_k, whole, d, K)
        _add(dv, (b * P + token) * H + h, sum_v, whole, e, V)
        same = (row == token)[:, None]
        sum_k = tl.where(same, sum_k, 0.0) + _load(uses, at, K + V, row >= 0, d, K)
        sum_v = tl.where(same, sum_v, 0.0) + _load(uses + K, at, K + V, row >= 0, e, V)
        token = row
    _add(dk, (b * P + token) * H + h, sum_k, token >= 0, d, K)
    _add(dv, (b * P + token) * H + h, sum_v, token >= 0, e, V)
