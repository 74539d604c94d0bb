"""The delta rule's Triton kernels. `_delta_rule.py` launches them.

The equations are those of `delta_rule.py`. One chunk of C tokens, * scaling rows, T = (I + L)^-1, E = V - Ga * A S:

    forward    U = T (beta * E)    O = scale (Ga * Q S + P U)    S' = e^{G_C} S + B^T (tail * U),  tail = e^{G_C - G}
    backward   dU = scale P^T dO + tail * B dS'      R = T^T dU      dV = beta * R
               dS = e^{G_C} dS' + Q^T (scale Ga * dO) - A^T (beta Ga * R)
               N = -stril(D * R U^T)      Z = scale tril(D * dO U^T)
               dA = beta * dA1,  dA1 = N B - Ga * R S^T      dbeta_i = R_i.V_i + A_i.dA1_i     (beta may be 0)
               dQ = Z B + scale Ga * dO S^T      dB = (beta * N)^T A + Z^T Q + tail * U dS'^T
               dG_i = q_i.dq_i + a_i.da_i - b_i.db_i,  dG_C += <S', dS'>      dg = reverse cumulative sum of dG

`scores` of `_erase_triton.py` (every chunk at once) keeps P, G and T; `forward` walks the chunks of one head and one
tile of value columns; `reverse` walks them back and keeps R and dS'; `gradients` (every chunk at once) does the rest. A
long sequence is cut into segments: `forward` and `reverse` first run on all of them from nothing (SCAN), forward also
on the columns of the identity, which gives each segment's transition Phi; the pass proper chains those before it.

On Hopper a product kept in registers was seen to go wrong as the left factor of the next: here every left factor
comes from memory. That is why P and T are stored and why `gradients` computes the transposed gradients. The one
exception is the inverse: its products are of 16 x 16, for which the card has no asynchronous one.

Scratch is laid out by chunk: index = (b * N + n) * H + h. Letters as in `delta_rule.py`; rows past T read as zero.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

import triton
import triton.language as tl

from kernels._chunk import G_MIN
from kernels._erase_triton import load as _load
from kernels._erase_triton import place as _place
from kernels._erase_triton import tile as _tile

_G_MIN = tl.constexpr(G_MIN)


@triton.jit
def _sequence(n, cu_seqlens, first_slots, T, C: tl.constexpr):
    """Batch, first token, end, first chunk and number of chunks of sequence `n`."""
    if cu_seqlens is None:
        N = tl.cdiv(T, C)
        return n, n * 0, n * 0 + T, n * N, n * 0 + N
    else:
        slot = tl.load(first_slots + n)
        start, end = tl.load(cu_seqlens + n).to(tl.int64), tl.load(cu_seqlens + n + 1).to(tl.int64)
        return n * 0, start, end, slot, tl.load(first_slots + n + 1) - slot


@triton.jit
def forward(
    q, a, b, v, beta, G, Ti, P, start, o, end, U, S, m, built, Phi,
    cu_seqlens, first_slots, scale, T, H, group, n_segments, n_columns,
    q_b, q_t, q_h, a_b, a_t, a_h, b_b, b_t, b_h, v_b, v_t, v_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """One segment of one head, a tile of value columns: o, and the last state. Outputs that are None are not written.

    SCAN: the state that the segment builds from nothing, and behind the V columns its transition Phi, from the
    identity. Without, those of the segments before give the state to start from.
    """
    pid = tl.program_id(0).to(tl.int64)
    column = pid % n_columns
    segment = (pid // n_columns) % n_segments
    bh = pid // n_columns // n_segments
    h = bh % H
    i_b, first, behind, slot, N = _sequence(bh // H, cu_seqlens, first_slots, T, C)
    per = tl.cdiv(N, n_segments)
    if not SCAN:
        q += i_b * q_b + h // group * q_h
    a += i_b * a_b + h // group * a_h
    v += i_b * v_b + h * v_h
    if b is not None:
        b += i_b * b_b + h // group * b_h
    dtype = a.dtype.element_ty
    i = tl.arange(0, C)
    k = tl.arange(0, BK)
    j = column * BV + tl.arange(0, BV)
    inside = (k < K)[:, None] & (j < V)[None, :]
    at = k[:, None] * V + j[None, :]
    square = k[:, None] * K + k[None, :]
    x = tl.zeros([BK, BV], tl.float32)
    if SCAN:
        x = tl.where(k[:, None] == j[None, :] - V, 1.0, 0.0)
    elif start is not None:
        x = tl.load(start + bh * K * V + at, inside, 0.0)
    if (not SCAN) and (built is not None):
        for s in range(bh * n_segments, bh * n_segments + segment):
            phi = tl.load(Phi + s * K * K + square, (k < K)[:, None] & (k < K)[None, :], 0.0)
            added = tl.load(built + s * K * V + at, inside, 0.0)
            x = added + tl.dot(phi, x, input_precision="tf32x3")
    for n in range(segment * per, tl.minimum(N, segment * per + per)):
        index = (slot + n) * H + h
        t = first + n * C + i
        a_n = _load(a, t, a_t, k, behind, K)
        bT = tl.trans(a_n if b is None else _load(b, t, b_t, k, behind, K))
        e = _load(v, t, v_t, j, behind, V).to(tl.float32)
        x_n = x.to(dtype)
        read = tl.dot(a_n, x_n, input_precision=PREC)
        if G is not None:
            Ga = tl.load(G + index * 4 * C + i)
            read *= Ga[:, None]
        e -= read
        if beta is not None:
            e *= tl.load(beta + (i_b * T + t) * H + h, t < behind, 0.0)[:, None]
        u = tl.dot(_tile(Ti + index * C * C, i, i, C), e.to(dtype), input_precision=PREC)
        if not SCAN:
            out = tl.dot(_load(q, t, q_t, k, behind, K), x_n, input_precision=PREC)
            if G is not None:
                out *= Ga[:, None]
            out += tl.dot(_tile(P + index * C * C, i, i, C), u.to(dtype), input_precision=PREC)
            rows = ((i_b * T + t) * H + h)[:, None] * V
            tl.store(o + rows + j[None, :], out * scale, (t < behind)[:, None] & (j < V)[None, :])
            if U is not None:
                tl.store(U + index * C * V + i[:, None] * V + j[None, :], u, (j < V)[None, :])
            if S is not None:
                tl.store(S + index * K * V + at, x_n, inside)
            if m is not None:
                norm = tl.sqrt(tl.sum(u * u, 1))
                B = 1
                if cu_seqlens is None:
                    B = tl.num_programs(0) // (n_columns * n_segments * H)
                tl.store(m + ((column * B + i_b) * T + t) * H + h, norm, t < behind)
        if G is not None:
            u *= tl.load(G + index * 4 * C + C + i)[:, None]
            x *= tl.load(G + index * 4 * C + C - 1)
        x += tl.dot(bT, u.to(dtype), input_precision=PREC)
    if SCAN:
        tl.store(built + (bh * n_segments + segment) * K * V + at, x, inside)
        inside = (k < K)[:, None] & ((j >= V) & (j < V + K))[None, :]
        tl.store(Phi + (bh * n_segments + segment) * K * K + k[:, None] * K + (j - V)[None, :], x, inside)
    elif segment == n_segments - 1:
        tl.store(end + bh * K * V + at, x, inside)


@triton.jit
def reverse(
    q, a, b, do, dux, beta, G, Ti, P, end, R, dS, dstart, built, Phi,
    cu_seqlens, first_slots, scale, T, H, group, n_segments, n_columns,
    q_b, q_t, q_h, a_b, a_t, a_h, b_b, b_t, b_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """One segment of one head, a tile of value columns, from its last chunk to its first: R, and the state's gradient
    at each chunk's end and before the first chunk.

    SCAN: the gradient at the segment's start, from nothing. Without, those of the segments behind give what to start
    from.
    """
    pid = tl.program_id(0).to(tl.int64)
    segment = (pid // n_columns) % n_segments
    bh = pid // n_columns // n_segments
    h = bh % H
    i_b, first, behind, slot, N = _sequence(bh // H, cu_seqlens, first_slots, T, C)
    per = tl.cdiv(N, n_segments)
    q += i_b * q_b + h // group * q_h
    a += i_b * a_b + h // group * a_h
    do += i_b * do_b + h * do_h
    if b is not None:
        b += i_b * b_b + h // group * b_h
    dtype = a.dtype.element_ty
    i = tl.arange(0, C)
    k = tl.arange(0, BK)
    j = pid % n_columns * BV + tl.arange(0, BV)
    inside = (k < K)[:, None] & (j < V)[None, :]
    at = k[:, None] * V + j[None, :]
    x = tl.zeros([BK, BV], tl.float32)
    if (not SCAN) and (end is not None):
        x = tl.load(end + bh * K * V + at, inside, 0.0)
    if (not SCAN) and (built is not None):
        square = k[:, None] * K + k[None, :]
        for step in range(n_segments - 1 - segment):
            s = bh * n_segments + n_segments - 1 - step
            phi = tl.load(Phi + s * K * K + square, (k < K)[:, None] & (k < K)[None, :], 0.0)
            added = tl.load(built + s * K * V + at, inside, 0.0)
            x = added + tl.dot(tl.trans(phi), x, input_precision="tf32x3")
    last = tl.minimum(N, segment * per + per) - 1
    for step in range(last - segment * per + 1):
        n = last - step
        index = (slot + n) * H + h
        t = first + n * C + i
        x_n = x.to(dtype)
        a_n = _load(a, t, a_t, k, behind, K)
        du = tl.dot(a_n if b is None else _load(b, t, b_t, k, behind, K), x_n, input_precision=PREC)
        if G is not None:
            Ga = tl.load(G + index * 4 * C + i)
            du *= tl.load(G + index * 4 * C + C + i)[:, None]
        do_n = _load(do, t, do_t, j, behind, V)
        du += scale * tl.dot(tl.trans(_tile(P + index * C * C, i, i, C)), do_n, input_precision=PREC)
        if dux is not None:
            rows = ((i_b * T + t) * H + h)[:, None] * V
            du += tl.load(dux + rows + j[None, :], (t < behind)[:, None] & (j < V)[None, :], 0.0)
        r = tl.dot(tl.trans(_tile(Ti + index * C * C, i, i, C)), du.to(dtype), input_precision=PREC)
        if not SCAN:
            tl.store(R + index * C * V + i[:, None] * V + j[None, :], r, (j < V)[None, :])
            tl.store(dS + index * K * V + at, x_n, inside)
        if beta is not None:
            r *= tl.load(beta + (i_b * T + t) * H + h, t < behind, 0.0)[:, None]
        into = do_n.to(tl.float32) * scale
        if G is not None:
            r *= Ga[:, None]
            into *= Ga[:, None]
            x *= tl.load(G + index * 4 * C + C - 1)
        x += tl.dot(tl.trans(_load(q, t, q_t, k, behind, K)), into.to(dtype), input_precision=PREC)
        x -= tl.dot(tl.trans(a_n), r.to(dtype), input_precision=PREC)
    if SCAN:
        tl.store(built + (bh * n_segments + segment) * K * V + at, x, inside)
    elif dstart is not None:  # noqa: SIM102 (decided when compiled, the next line when it runs)
        if segment == 0:
            tl.store(dstart + bh * K * V + at, x, inside)


@triton.jit
def gradients(
    q, a, b, v, do, beta, g, G, U, S, R, dS, dq, da, db, dv, dbeta, dg,
    slots, scale, T, H, group,
    q_b, q_t, q_h, a_b, a_t, a_h, b_b, b_t, b_h, v_b, v_t, v_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Every gradient of one chunk of one head, from the chunk's U, S, R and dS'. Suffix T: transposed."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = _place(index, slots, T, H, C)
    q += i_b * q_b + h // group * q_h
    a += i_b * a_b + h // group * a_h
    if b is not None:
        b += i_b * b_b + h // group * b_h
    v += i_b * v_b + h * v_h
    do += i_b * do_b + h * do_h
    U += index * C * V
    R += index * C * V
    S += index * K * V
    dS += index * K * V
    dtype = a.dtype.element_ty
    i = tl.arange(0, C)
    t = start + i
    heads = (i_b * T + t) * H + h
    lower = i[:, None] > i[None, :]
    upper = i[:, None] < i[None, :]
    diagonal = i[:, None] == i[None, :]
    beta_n = tl.full([C], 1.0, tl.float32)
    if beta is not None:
        beta_n = tl.load(beta + heads, t < end, 0.0)
    k = tl.arange(0, BK).to(tl.int64)
    a_k = _load(a, t, a_t, k, end, K)  # early: the first products then hide the wait
    q_k = _load(q, t, q_t, k, end, K)
    b_k = a_k if b is None else _load(b, t, b_t, k, end, K)
    S_n = _load(S, k, V, tl.arange(0, BV), K, V)
    dS_n = _load(dS, k, V, tl.arange(0, BV), K, V)
    ru = tl.zeros([C, C], tl.float32)
    ruT = tl.zeros([C, C], tl.float32)
    ou = tl.zeros([C, C], tl.float32)
    ouT = tl.zeros([C, C], tl.float32)
    dbeta_n = tl.zeros([C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        j = v0 + tl.arange(0, BV)
        r = _tile(R, i, j, V)
        u = _tile(U, i, j, V).to(dtype)
        do_n = _load(do, t, do_t, j, end, V)
        ru += tl.dot(r, tl.trans(u), input_precision=PREC)
        ruT += tl.dot(u, tl.trans(r), input_precision=PREC)
        ou += tl.dot(do_n, tl.trans(u), input_precision=PREC)
        ouT += tl.dot(u, tl.trans(do_n), input_precision=PREC)
        r_wide = r.to(tl.float32)
        if beta is not None:
            dbeta_n += tl.sum(r_wide * _load(v, t, v_t, j, end, V).to(tl.float32), 1)
        tl.store(dv + heads[:, None] * V + j[None, :], beta_n[:, None] * r_wide, (t < end)[:, None] & (j < V)[None, :])
    if G is not None:
        G += index * 4 * C
        Ga, tail, whole = tl.load(G + i), tl.load(G + C + i), tl.load(G + C - 1)
        coarse, fine = tl.load(G + 2 * C + i), tl.load(G + 3 * C + i)
        gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        D = tl.exp(tl.where(lower, gap, 0.0))
        DT = tl.exp(tl.where(upper, -gap, 0.0))
        ru *= D
        ou *= D
        ruT *= DT
        ouT *= DT
    Nb = tl.where(lower, -beta_n[:, None] * ru, 0.0).to(dtype)
    NT = tl.where(upper, -ruT, 0.0).to(dtype)
    Z = tl.where(lower | diagonal, scale * ou, 0.0).to(dtype)
    ZT = tl.where(upper | diagonal, scale * ouT, 0.0).to(dtype)
    dG = tl.zeros([C], tl.float32)
    at_end = 0.0
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK).to(tl.int64)
        a_n, q_n = tl.trans(a_k), tl.trans(q_k)
        b_n = a_n if b is None else tl.trans(b_k)
        a_k = _load(a, t, a_t, k + BK, end, K)
        q_k = _load(q, t, q_t, k + BK, end, K)
        b_k = a_k if b is None else _load(b, t, b_t, k + BK, end, K)
        q_in = tl.zeros([BK, C], tl.float32)
        a_in = tl.zeros([BK, C], tl.float32)
        b_in = tl.zeros([BK, C], tl.float32)
        for v0 in tl.static_range(0, V, BV):
            j = v0 + tl.arange(0, BV)
            if V > BV:
                S_n = _load(S, k, V, j, K, V)
                dS_n = _load(dS, k, V, j, K, V)
                r = _tile(R, i, j, V)
                u = _tile(U, i, j, V).to(dtype)
                do_n = _load(do, t, do_t, j, end, V)
            q_in += tl.dot(S_n, tl.trans(do_n), input_precision=PREC)
            a_in += tl.dot(S_n, tl.trans(r), input_precision=PREC)
            b_in += tl.dot(dS_n, tl.trans(u), input_precision=PREC)
            if G is not None:
                at_end += whole * tl.sum(S_n.to(tl.float32) * dS_n.to(tl.float32))
        if V <= BV:
            S_n = _load(S, k + BK, V, tl.arange(0, BV), K, V)
            dS_n = _load(dS, k + BK, V, tl.arange(0, BV), K, V)
        q_in *= scale
        if G is not None:
            q_in *= Ga[None, :]
            a_in *= Ga[None, :]
            b_in *= tail[None, :]
            at_end += tl.sum(b_in * b_n.to(tl.float32))
        dqT = q_in + tl.dot(b_n, ZT, input_precision=PREC)
        da1 = tl.dot(b_n, NT, input_precision=PREC) - a_in
        dbT = b_in + tl.dot(a_n, Nb, input_precision=PREC) + tl.dot(q_n, Z, input_precision=PREC)
        daT = da1 * beta_n[None, :]
        a_wide = a_n.to(tl.float32)
        if beta is not None:
            dbeta_n += tl.sum(a_wide * da1, 0)
        if G is not None:
            dG += tl.sum(q_n.to(tl.float32) * dqT + a_wide * daT - b_n.to(tl.float32) * dbT, 0)
        inside = (k < K)[:, None] & (t < end)[None, :]
        at = heads[None, :] * K + k[:, None]
        tl.store(dq + at, dqT, inside)
        if b is None:
            daT += dbT
        else:
            tl.store(db + at, dbT, inside)
        tl.store(da + at, daT, inside)
    if beta is not None:
        tl.store(dbeta + heads, dbeta_n, t < end)
    if G is not None:
        dG += tl.where(i == C - 1, at_end, 0.0)
        held = tl.load(g + heads, t < end, 0.0) < _G_MIN  # taken as the floor: no gradient
        tl.store(dg + heads, tl.where(held, 0.0, tl.cumsum(dG, 0, reverse=True)), t < end)
