"""Forward through log-linear attention's chunks, in Triton, each kernel for every chunk at once; and the equations of
all its kernels: `_log_linear_tree_triton.py` joins chunks to blocks, `_log_linear_back_triton.py` goes back.

T = (I + L)^-1, P and the gates are of `_erase_triton.py`; * scales rows or numbers, tail = e^{G_C - G}, Lam_ij is
lam_i^{level(i, j)}. Without beta nothing is erased: T = I, W = 0.

    leaf       [U | W] = T [beta * V | -beta Ga * K]    q^ = Ga * Q + P W    A = P T    E = A * beta^T
               X = [H | Phi] = [0 | e^{G_C} I] + K^T (tail * [U | W])
    output     O = scale ((E * Lam) V + sum over the set bits of the chunk's index of lam * (q^ H)), then q^ <- q^ Phi
    within     x = scale dO V^T    dlam_i^l = sum of (x * E)_ij over level(i, j) = l    dE = x * Lam
    reads      for each bit y = scale dO H^T, dlam = q^.y; from the highest p <- lam * y + p Phi^T, which ends as dq^
    gather     dX of a block is the sum over its readers of q^^T [lam * scale dO | p]
    systems    dP = (dE * beta^T) T^T + dq^ W^T    dB = [U | W] dX^T
               N = -stril(D * T^T (tail * K dB^T + P^T dP))    Z = tril(D * dP)         without beta Z = tril(D * dE)
    gradients  R = T^T (tail * (K dX) + [0 | P^T dq^])    dV = beta * R_V + (E * Lam)^T scale dO
               dA = N K - Ga * R_W    dQ = Z K + Ga * dq^    dB' = N^T (beta * K) + Z^T Q + tail * dB
               dK = beta * dA + dB'    dbeta_i = R_Vi.V_i + k_i.dA_i + sum over r of (dE * A)_ri
               dG_i = q_i.dq_i + beta_i k_i.da_i - k_i.db'_i    dG_C += <X, dX>    dg = reverse cumulative sum of dG

Without beta Phi is a number. The gradient of its logarithm, part of dG_C, is the sum of lam dlam over the reads that
cross the chunk, and of <dH, Phi_r H_l> over the joints that it lies right of.

As in `_delta_rule_triton.py` no product is the left factor of the next: what would be is kept in memory, or the
transposed equation is computed (suffix T). Scratch is laid out by chunk: index = (b * N + n) * H + h; blocks in the
order in which a walk over the tree meets them: block i of 2^b chunks at (2 i + 1) 2^b - 1, so that chunk n reads, for
each set bit b, the block at 2 m - 2^b - 1, with m = n without the bits below b.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

import triton
import triton.language as tl

from kernels._erase_triton import gates, load, place, tile


@triton.jit
def block_read(n, bit):
    """Where the block lies that chunk `n` reads for its set bit `bit`."""
    one = n * 0 + 1
    return 2 * ((n >> bit) << bit) - (one << bit) - 1


@triton.jit
def _decaysT(G, i, C: tl.constexpr):
    coarse, fine = tl.load(G + 2 * C + i), tl.load(G + 3 * C + i)
    gap = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
    return tl.exp(tl.where(i[None, :] >= i[:, None], gap, 0.0))


@triton.jit
def is_level(apart, level):
    """Whether bit_length(apart) is `level`."""
    return (apart >> tl.maximum(level - 1, 0)) == tl.minimum(level, 1)


@triton.jit
def leaves(
    k, v, q, beta, g, G, Ti, P, UW, A, q_in, X, phi,
    T, H, group,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """X of one chunk; with beta U, W, A and q^ too, without it the gates, and Phi's number in `phi`."""
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = place(index, None, T, H, C)
    N = tl.cdiv(T, C)
    at = (i_b * (2 * N - 1) + 2 * (start // C)) * H + h
    k += i_b * k_b + h // group * k_h
    v += i_b * v_b + h * v_h
    G += index * 4 * C
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    t = start + i
    heads = (i_b * T + t) * H + h
    dtype = k.dtype.element_ty
    k_n = load(k, t, k_t, c, end, K)
    kT = tl.trans(k_n)
    width: tl.constexpr = V if beta is None else V + K
    X += at * K * width + c[:, None] * width
    if beta is None:
        coarse, fine, coarse_end, fine_end = gates(g, G, heads, t < end, i, C)
        tail = tl.exp((coarse_end - coarse) + (fine_end - fine))
        tl.store(phi + at, tl.exp(coarse_end + fine_end))
    else:
        tail = tl.load(G + C + i)
        beta_n = tl.load(beta + heads, t < end, 0.0)
        Ti_n = tile(Ti + index * C * C, i, i, C)
        UW += index * C * width + i[:, None] * width
    for v0 in tl.static_range(0, V, BV):
        j = v0 + tl.arange(0, BV)
        u = load(v, t, v_t, j, end, V).to(tl.float32)
        if beta is not None:
            u = tl.dot(Ti_n, (beta_n[:, None] * u).to(dtype), input_precision=PREC)
            tl.store(UW + j[None, :], u, (j < V)[None, :])
        x = tl.dot(kT, (tail[:, None] * u).to(dtype), input_precision=PREC)
        tl.store(X + j[None, :], x, (c < K)[:, None] & (j < V)[None, :])
    if beta is not None:
        Ga, whole = tl.load(G + i), tl.load(G + C - 1)
        w = tl.dot(Ti_n, ((-beta_n * Ga)[:, None] * k_n.to(tl.float32)).to(dtype), input_precision=PREC)
        tl.store(UW + V + c[None, :], w, (c < K)[None, :])
        x = tl.dot(kT, (tail[:, None] * w).to(dtype), input_precision=PREC)
        x += tl.where(c[:, None] == c[None, :], whole, 0.0)
        tl.store(X + V + c[None, :], x, (c < K)[:, None] & (c < K)[None, :])
        P_n = tile(P + index * C * C, i, i, C)
        q_n = load(q + i_b * q_b + h // group * q_h, t, q_t, c, end, K).to(tl.float32)
        read = Ga[:, None] * q_n + tl.dot(P_n, w.to(dtype), input_precision=PREC)
        tl.store(q_in + index * C * K + i[:, None] * K + c[None, :], read, (c < K)[None, :])
        tl.store(A + index * C * C + i[:, None] * C + i[None, :], tl.dot(P_n, Ti_n, input_precision=PREC))


@triton.jit
def output(
    q, k, v, lam, beta, G, A, q_in, X, phi, o,
    scale, T, H, group, L,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """o of one chunk, a tile of value columns: what it reads inside, and from the blocks before it."""
    columns: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    index = pid // columns
    i_b, h, start, end = place(index, None, T, H, C)
    N = tl.cdiv(T, C)
    n = start // C
    width: tl.constexpr = V if beta is None else V + K
    X += (i_b * (2 * N - 1) * H + h) * K * width
    v += i_b * v_b + h * v_h
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    j = pid % columns * BV + tl.arange(0, BV)
    t = start + i
    heads = (i_b * T + t) * H + h
    weights = heads * L
    dtype = v.dtype.element_ty
    if beta is None:
        G += index * 4 * C
        qT = tl.trans(load(q + i_b * q_b + h // group * q_h, t, q_t, c, end, K))
        k_n = load(k + i_b * k_b + h // group * k_h, t, k_t, c, end, K)
        ET = tl.dot(k_n, qT, input_precision=PREC) * _decaysT(G, i, C)
        left = tl.load(G + i)  # of what was before the chunk
    else:
        qT = tl.trans(tile(q_in + index * C * K, i, c, K))
        beta_n = tl.load(beta + heads, t < end, 0.0)
        ET = tl.trans(tile(A + index * C * C, i, i, C)).to(tl.float32) * beta_n[:, None]
    apart = i[:, None] ^ i[None, :]
    weight = tl.zeros([C, C], tl.float32)
    for level in range(LOG_C + 1):
        lam_l = tl.load(lam + (weights + tl.minimum(level, L - 1)), t < end, 0.0)
        weight = tl.where(is_level(apart, level), lam_l[None, :], weight)
    ET = tl.where(i[:, None] <= i[None, :], ET * weight, 0.0)
    oT = tl.dot(tl.trans(load(v, t, v_t, j, end, V)), ET.to(dtype), input_precision=PREC)
    bit = 0
    while (n >> bit) > 0:
        if ((n >> bit) & 1) == 1:
            at = block_read(n, bit) * H
            block = X + at * K * width
            lam_l = tl.load(lam + (weights + tl.minimum(bit + LOG_C + 1, L - 1)), t < end, 0.0)
            inside = (c < K)[:, None] & (j < V)[None, :]
            if beta is None:
                lam_l *= left
                left *= tl.load(phi + i_b * (2 * N - 1) * H + h + at)
            H_n = tl.load(block + c[:, None] * width + j[None, :], inside, 0.0)
            oT += lam_l[None, :] * tl.dot(tl.trans(H_n), qT, input_precision=PREC)
            if beta is not None:
                inside = (c < K)[:, None] & (c < K)[None, :]
                Phi = tl.load(block + V + c[:, None] * width + c[None, :], inside, 0.0)
                qT = tl.dot(tl.trans(Phi), qT, input_precision=PREC).to(dtype)
        bit += 1
    tl.store(o + heads[None, :] * V + j[:, None], oT * scale, (t < end)[None, :] & (j < V)[:, None])
