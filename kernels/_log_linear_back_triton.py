"""Back through log-linear attention's chunks, in Triton, each kernel for every chunk at once. The equations are in
`_log_linear_attention_triton.py`.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

import triton
import triton.language as tl

from kernels._chunk import G_MIN
from kernels._erase_triton import load, place, tile
from kernels._log_linear_attention_triton import block_read, is_level

_G_MIN = tl.constexpr(G_MIN)


@triton.jit
def _decays(G, i, C: tl.constexpr):
    """D (C, C) of one chunk: e^{G_i - G_j} for j <= i, 1 above."""
    coarse, fine = tl.load(G + 2 * C + i), tl.load(G + 3 * C + i)
    gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp(tl.where(i[:, None] >= i[None, :], gap, 0.0))


@triton.jit
def within(
    q, k, v, do, lam, beta, G, A, dlam, dbeta, dE, EL,
    scale, T, H, group, L, n_bits,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Back through what one chunk reads of itself: dlam of these levels, E Lam; dE beta^T and dbeta's part, or Z."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = place(index, None, T, H, C)
    v += i_b * v_b + h * v_h
    do += i_b * do_b + h * do_h
    i = tl.arange(0, C)
    t = start + i
    heads = (i_b * T + t) * H + h
    weights = heads * L
    levels = heads * (LOG_C + 1 + n_bits)
    square = index * C * C + i[:, None] * C + i[None, :]
    x = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        j = v0 + tl.arange(0, BV)
        x += tl.dot(load(do, t, do_t, j, end, V), tl.trans(load(v, t, v_t, j, end, V)), input_precision=PREC)
    x = tl.where(i[:, None] >= i[None, :], x * scale, 0.0)
    if beta is None:
        c = tl.arange(0, BK).to(tl.int64)
        kT = tl.trans(load(k + i_b * k_b + h // group * k_h, t, k_t, c, end, K))
        q_n = load(q + i_b * q_b + h // group * q_h, t, q_t, c, end, K)
        D = tl.where(i[:, None] >= i[None, :], _decays(G + index * 4 * C, i, C), 0.0)
        E = tl.dot(q_n, kT, input_precision=PREC) * D
    else:
        beta_n = tl.load(beta + heads, t < end, 0.0)
        E = tl.load(A + square).to(tl.float32)  # what makes it E, beta of its columns, comes behind
    apart = i[:, None] ^ i[None, :]
    weight = tl.zeros([C, C], tl.float32)
    xE = x * E
    if beta is not None:
        xE *= beta_n[None, :]
    for level in range(LOG_C + 1):
        lam_l = tl.load(lam + (weights + tl.minimum(level, L - 1)), t < end, 0.0)
        this = is_level(apart, level)
        weight = tl.where(this, lam_l[:, None], weight)
        tl.store(dlam + (levels + level), tl.sum(tl.where(this, xE, 0.0), 1), t < end)
    x *= weight
    weight *= E
    if beta is None:
        tl.store(dE + square, x * D)
    else:
        tl.store(dbeta + heads, tl.sum(x * E, 0), t < end)
        tl.store(dE + square, x * beta_n[None, :])
        weight *= beta_n[None, :]
    tl.store(EL + square, weight)


@triton.jit
def reads(
    q, do, lam, beta, G, q_in, X, phi, dlam, dq_in, Qs, Ps, reach, crossing,
    scale, T, H, group, L, n_bits,
    q_b, q_t, q_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PREC: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Back through what one chunk reads of the blocks before it: dq^ and dlam, a level for each bit. With beta q^ and p
    at each set bit; without, what is left of q^ there, and the sum of lam dlam of the bits above."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = place(index, None, T, H, C)
    N = tl.cdiv(T, C)
    n = start // C
    width: tl.constexpr = V if beta is None else V + K
    X += (i_b * (2 * N - 1) * H + h) * K * width
    do += i_b * do_b + h * do_h
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    t = start + i
    heads = (i_b * T + t) * H + h
    weights = heads * L
    levels = heads * (LOG_C + 1 + n_bits)
    dtype = do.dtype.element_ty
    tokens = i.to(tl.int64)[None, :] * K + c[:, None]
    if beta is None:
        qT = tl.trans(load(q + i_b * q_b + h // group * q_h, t, q_t, c, end, K))
        Ga = tl.load(G + index * 4 * C + i)
    else:
        qT = tl.trans(tile(q_in + index * C * K, i, c, K))
    dqT = tl.zeros([BK, C], tl.float32)
    left = 1.0
    bits = tl.arange(0, BITS)
    product = tl.zeros([BITS], tl.float32)
    seen = tl.zeros([BITS], tl.float32)
    for bit in range(n_bits):
        dlam_l = tl.zeros([C], tl.float32)
        if ((n >> bit) & 1) == 1:
            at = block_read(n, bit) * H
            block = X + at * K * width
            lam_l = tl.load(lam + (weights + tl.minimum(bit + LOG_C + 1, L - 1)), t < end, 0.0)
            yT = tl.zeros([BK, C], tl.float32)
            for v0 in tl.static_range(0, V, BV):
                j = v0 + tl.arange(0, BV).to(tl.int64)
                inside = (c < K)[:, None] & (j < V)[None, :]
                H_n = tl.load(block + c[:, None] * width + j[None, :], inside, 0.0)
                yT += tl.dot(H_n, tl.trans(load(do, t, do_t, j, end, V)), input_precision=PREC)
            dlam_l = scale * tl.sum(qT.to(tl.float32) * yT, 0)
            if beta is None:
                dlam_l *= Ga * left
                dqT += (scale * left * lam_l)[None, :] * yT
                product = tl.where(bits == bit, left, product)
                seen = tl.where(bits == bit, tl.sum(lam_l * dlam_l), seen)
                left *= tl.load(phi + i_b * (2 * N - 1) * H + h + at)
            else:
                rank = (((n >> (bit + 1)) << bit) + (n - ((n >> bit) << bit))) * H + h
                slot = ((i_b * n_bits + bit) * (N // 2) * H + rank) * C * K
                tl.store(Qs + (slot + tokens), qT, (c < K)[:, None])
                inside = (c < K)[:, None] & (c < K)[None, :]
                Phi = tl.load(block + V + c[:, None] * width + c[None, :], inside, 0.0)
                qT = tl.dot(tl.trans(Phi), qT, input_precision=PREC).to(dtype)
        tl.store(dlam + (levels + LOG_C + 1 + bit), dlam_l, t < end)
    if beta is None:
        tl.store(reach + index * BITS + bits, product)
        above = tl.sum(tl.where(bits[None, :] > bits[:, None], seen[None, :], 0.0), 1)
        tl.store(crossing + (((i_b * H + h) * n_bits + bits) * N + n), above, bits < n_bits)
    else:
        for step in range(n_bits):
            bit = n_bits - 1 - step
            if ((n >> bit) & 1) == 1:
                block = X + block_read(n, bit) * H * K * width
                lam_l = tl.load(lam + (weights + tl.minimum(bit + LOG_C + 1, L - 1)), t < end, 0.0)
                rank = (((n >> (bit + 1)) << bit) + (n - ((n >> bit) << bit))) * H + h
                slot = ((i_b * n_bits + bit) * (N // 2) * H + rank) * C * K
                tl.store(Ps + (slot + tokens), dqT, (c < K)[:, None])
                yT = tl.zeros([BK, C], tl.float32)
                for v0 in tl.static_range(0, V, BV):
                    j = v0 + tl.arange(0, BV).to(tl.int64)
                    inside = (c < K)[:, None] & (j < V)[None, :]
                    H_n = tl.load(block + c[:, None] * width + j[None, :], inside, 0.0)
                    yT += tl.dot(H_n, tl.trans(load(do, t, do_t, j, end, V)), input_precision=PREC)
                inside = (c < K)[:, None] & (c < K)[None, :]
                Phi = tl.load(block + V + c[:, None] * width + c[None, :], inside, 0.0)
                through = tl.dot(Phi, dqT.to(dtype), input_precision=PREC)
                dqT = (scale * lam_l)[None, :] * yT + through
    tl.store(dq_in + (index * C * K + tokens), dqT, (c < K)[:, None])


@triton.jit
def systems(
    k, G, Ti, P, UW, dE, dq_in, dX, dB, Nk, Z,
    T, H, group, k_b, k_t, k_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """N, Z and dB of one chunk."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = place(index, None, T, H, C)
    N = tl.cdiv(T, C)
    width: tl.constexpr = V + K
    at = (i_b * (2 * N - 1) + 2 * (start // C)) * H + h
    dX += at * K * width
    UW += index * C * width
    G += index * 4 * C
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    t = start + i
    dtype = k.dtype.element_ty
    square = index * C * C
    at = square + i[:, None] * C + i[None, :]
    Ti_n = tile(Ti + square, i, i, C)
    dP = tl.dot(tile(dE + square, i, i, C), tl.trans(Ti_n), input_precision=PREC)
    w = load(UW + V, i, width, c, C, K)
    dP += tl.dot(tile(dq_in + index * C * K, i, c, K), tl.trans(w), input_precision=PREC)
    dBT = tl.zeros([BK, C], tl.float32)
    for j0 in range(0, width, BV):
        j = j0 + tl.arange(0, BV).to(tl.int64)
        dX_n = load(dX, c, width, j, K, width)
        dBT += tl.dot(dX_n, tl.trans(load(UW, i, width, j, C, width)), input_precision=PREC)
    tl.store(dB + index * C * K + i[None, :] * K + c[:, None], dBT, (c < K)[:, None])
    s = tl.dot(load(k + i_b * k_b + h // group * k_h, t, k_t, c, end, K), dBT.to(dtype), input_precision=PREC)
    s *= tl.load(G + C + i)[:, None]
    s += tl.dot(tl.trans(tile(P + square, i, i, C)), dP.to(dtype), input_precision=PREC)
    dL = -tl.dot(tl.trans(Ti_n), s.to(dtype), input_precision=PREC)
    D = _decays(G, i, C)
    tl.store(Nk + at, tl.where(i[:, None] > i[None, :], dL * D, 0.0))
    tl.store(Z + at, tl.where(i[:, None] >= i[None, :], dP * D, 0.0))


@triton.jit
def _crosses(merged, crossing, n, N, H, n_parts, n_bits):
    """Of Phi of chunk `n` without beta: the gradient of its logarithm. `merged` and `crossing` of this head."""
    total = 0.0
    part = tl.arange(0, 128)
    for bit in range(n_bits):
        i = n >> bit
        first = (i + 1) << bit  # the chunk behind this block of the chunk's
        if first <= N - 1:
            if (i & 1) == 0:
                for m0 in range(first, tl.minimum(first + (first - (i << bit)), N), 128):
                    m = m0 + part
                    live = m < tl.minimum(first + (first - (i << bit)), N)
                    total += tl.sum(tl.load(crossing + (bit * N + m), live, 0.0))
            else:
                at = (((i >> 1) * 2 + 1) << (bit + 1)) - 1
                total += tl.sum(tl.load(merged + at * H * n_parts + part, part < n_parts, 0.0))
    return total


@triton.jit
def gradients(
    q, k, v, do, beta, g, G, Ti, P, EL, dq_in, X, dX, dB, Nk, Z, merged, crossing, dq, dk, dv, dbeta, dg,
    scale, T, H, group, n_parts, n_bits,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The other gradients of one chunk of one head; `dbeta` holds the part of `reads`, and is added to."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = place(index, None, T, H, C)
    N = tl.cdiv(T, C)
    n = start // C
    width: tl.constexpr = V if beta is None else V + K
    at = (i_b * (2 * N - 1) + 2 * n) * H + h
    X += at * K * width
    dX += at * K * width
    v += i_b * v_b + h * v_h
    do += i_b * do_b + h * do_h
    G += index * 4 * C
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    t = start + i
    heads = (i_b * T + t) * H + h
    dtype = k.dtype.element_ty
    square = index * C * C
    Ga, tail = tl.load(G + i), tl.load(G + C + i)
    k_n = load(k + i_b * k_b + h // group * k_h, t, k_t, c, end, K)
    q_n = load(q + i_b * q_b + h // group * q_h, t, q_t, c, end, K)
    k_wide = k_n.to(tl.float32)
    ELT = tl.trans(tile(EL + square, i, i, C))
    at_end = 0.0
    dbT = tl.zeros([C, BK], tl.float32)
    if beta is not None:
        beta_n = tl.load(beta + heads, t < end, 0.0)
        dbeta_n = tl.load(dbeta + heads, t < end, 0.0)
        TiT = tl.trans(tile(Ti + square, i, i, C))
    for v0 in tl.static_range(0, V, BV):
        j = v0 + tl.arange(0, BV)
        dX_n = load(dX, c, width, j, K, V)
        at_end += tl.sum(load(X, c, width, j, K, V).to(tl.float32) * dX_n.to(tl.float32))
        r = tail[:, None] * tl.dot(k_n, dX_n, input_precision=PREC)
        v_n = load(v, t, v_t, j, end, V)
        if beta is None:
            dbT += tl.dot(v_n, tl.trans(dX_n), input_precision=PREC)
        else:
            r = tl.dot(TiT, r.to(dtype), input_precision=PREC)
            dbeta_n += tl.sum(r * v_n.to(tl.float32), 1)
            r *= beta_n[:, None]
        r += scale * tl.dot(ELT, load(do, t, do_t, j, end, V), input_precision=PREC)
        tl.store(dv + heads[:, None] * V + j[None, :], r, (t < end)[:, None] & (j < V)[None, :])
    dq_up = tile(dq_in + index * C * K, i, c, K)
    Z_n = tile(Z + square, i, i, C)
    dq_n = tl.dot(Z_n, k_n, input_precision=PREC) + Ga[:, None] * dq_up.to(tl.float32)
    dk_n = tl.dot(tl.trans(Z_n), q_n, input_precision=PREC)
    if beta is None:
        dk_n += tail[:, None] * dbT
        dG = tl.sum(q_n.to(tl.float32) * dq_n - k_wide * dk_n, 1)
        merged += (i_b * (2 * N - 1) * H + h) * n_parts
        at_end += _crosses(merged, crossing + (i_b * H + h) * n_bits * N, n, N, H, n_parts, n_bits)
    else:
        dX_n = load(dX + V, c, width, c, K, K)
        at_end += tl.sum(load(X + V, c, width, c, K, K).to(tl.float32) * dX_n.to(tl.float32))
        r = tail[:, None] * tl.dot(k_n, dX_n, input_precision=PREC)
        r += tl.dot(tl.trans(tile(P + square, i, i, C)), dq_up, input_precision=PREC)
        r = tl.dot(TiT, r.to(dtype), input_precision=PREC)
        N_n = tile(Nk + square, i, i, C)
        da1 = tl.dot(N_n, k_n, input_precision=PREC) - Ga[:, None] * r
        dk_n += tl.dot(tl.trans(N_n), (beta_n[:, None] * k_wide).to(dtype), input_precision=PREC)
        dk_n += tail[:, None] * tile(dB + index * C * K, i, c, K).to(tl.float32)
        dbeta_n += tl.sum(k_wide * da1, 1)
        da1 *= beta_n[:, None]
        dG = tl.sum(q_n.to(tl.float32) * dq_n + k_wide * (da1 - dk_n), 1)
        dk_n += da1
        tl.store(dbeta + heads, dbeta_n, t < end)
    inside = (t < end)[:, None] & (c < K)[None, :]
    tl.store(dq + heads[:, None] * K + c[None, :], dq_n, inside)
    tl.store(dk + heads[:, None] * K + c[None, :], dk_n, inside)
    dG += tl.where(i == C - 1, at_end, 0.0)
    held = tl.load(g + heads, t < end, 0.0) < _G_MIN  # taken as the floor: no gradient
    tl.store(dg + heads, tl.where(held, 0.0, tl.cumsum(dG, 0, reverse=True)), t < end)
