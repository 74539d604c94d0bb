"""What the delta rule and log-linear attention do alike to every chunk, in Triton: scores, gates and the inverse.

With a, b the erase and the write keys, D_ij = e^{G_i - G_j} for j <= i, * scaling rows:

    L = stril(beta * D * a b^T)    P = tril(D * q b^T)    T = (I + L)^-1

`scores` keeps P, T and the gates. Scratch is laid out by chunk: index = (b * N + n) * H + h;
rows past the end read as zero. Letters as in `delta_rule.py`.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

import triton
import triton.language as tl

from kernels._chunk import G_MIN

_G_MIN = tl.constexpr(G_MIN)


@triton.jit
def load(base, rows, stride, cols, T, D: tl.constexpr):
    """Rows of a matrix with D columns, (len(rows), len(cols)); zero outside."""
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    return tl.load(base + rows[:, None] * stride + cols[None, :], inside, 0.0)


@triton.jit
def tile(base, rows, cols, D: tl.constexpr):
    """Rows of a contiguous scratch matrix with D columns; every row is there."""
    return tl.load(base + rows[:, None] * D + cols[None, :], (cols < D)[None, :], 0.0)


@triton.jit
def place(index, slots, T, H, C: tl.constexpr):
    """Batch, head, first token and end of its sequence, of the chunk `index`."""
    slot = index // H
    if slots is None:
        N = tl.cdiv(T, C)
        return slot // N, index % H, slot % N * C, slot * 0 + T
    else:
        return slot * 0, index % H, tl.load(slots + 2 * slot), tl.load(slots + 2 * slot + 1)


@triton.jit
def _inverse_16(L, PREC: tl.constexpr):
    """(I + L)^-1 of a strictly lower (16, 16) tile: inverts blocks of 2, then doubles them. Exact, no powers of L."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, L, 0.0)
    for level in tl.static_range(1, 4):
        pair = (i >> (level + 1)) == (j >> (level + 1))
        below = tl.where(pair & ((i >> level) != (j >> level)), L, 0.0)
        X -= tl.dot(X, tl.dot(below, X, input_precision=PREC), input_precision=PREC)
    return X


@triton.jit
def _invert(L, Ti, C: tl.constexpr, PREC: tl.constexpr):
    """T = (I + L)^-1 of one chunk, in blocks of 16 from the top: T_rc = -T_rr (sum over c <= m < r of L_rm T_mc)."""
    i = tl.arange(0, 16)
    at = i[:, None] * C + i[None, :]
    inverse = ()
    for r in tl.static_range(C // 16):
        row = ()
        for m in tl.static_range(r):
            row = row + (tl.load(L + (r * C + m) * 16 + at),)  # noqa: RUF005 (the compiler knows no unpacking)
        X = _inverse_16(tl.load(L + r * 16 * (C + 1) + at), PREC)
        for c in tl.static_range(r):
            total = tl.dot(row[c], inverse[c * (c + 3) // 2], input_precision=PREC)
            for m in tl.static_range(c + 1, r):
                total += tl.dot(row[m], inverse[m * (m + 1) // 2 + c], input_precision=PREC)
            below = -tl.dot(X, total, input_precision=PREC)
            inverse = inverse + (below,)  # noqa: RUF005
            tl.store(Ti + (r * C + c) * 16 + at, below)
        inverse = inverse + (X,)  # noqa: RUF005
        tl.store(Ti + (r * C + r) * 16 + at, X)
        for c in tl.static_range(r + 1, C // 16):
            tl.store(Ti + (r * C + c) * 16 + at, tl.zeros([16, 16], tl.float32))


@triton.jit
def gates(g, G, heads, live, i, C: tl.constexpr):
    """Keeps in G, (4, C), e^G of a chunk, its tail, and G itself in two parts; returns these and both ends."""
    g_n = tl.maximum(tl.load(g + heads, live, 0.0), _G_MIN)
    coarse = tl.floor(g_n * 256.0) / 256.0  # sums of these are exact, so that a hard step blurs no step after it
    fine = tl.cumsum(g_n - coarse, 0)
    fine_end = tl.sum(g_n - coarse, 0)
    coarse_end = tl.sum(coarse, 0)
    coarse = tl.cumsum(coarse, 0)
    tl.store(G + i, tl.exp(coarse + fine))
    tl.store(G + C + i, tl.exp((coarse_end - coarse) + (fine_end - fine)))
    tl.store(G + 2 * C + i, coarse)
    tl.store(G + 3 * C + i, fine)
    return coarse, fine, coarse_end, fine_end


@triton.jit
def scores(
    q, a, b, beta, g, L, Ti, P, G,
    slots, T, H, group,
    q_b, q_t, q_h, a_b, a_t, a_h, b_b, b_t, b_h,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """T and P of one chunk of one head; in G its e^G, its tail, and G itself in two parts. L is scratch.

    Keys of several tiles are read twice, for a . b and for q . b: both sums at once would not stay in registers.
    """
    index = tl.program_id(0).to(tl.int64)
    i_b, h, start, end = place(index, slots, T, H, C)
    q += i_b * q_b + h // group * q_h
    a += i_b * a_b + h // group * a_h
    b += i_b * b_b + h // group * b_h
    i = tl.arange(0, C)
    t = start + i
    heads = (i_b * T + t) * H + h
    ab = tl.zeros([C, C], tl.float32)
    qb = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK).to(tl.int64)
        bT = tl.trans(load(b, t, b_t, k, end, K))
        ab += tl.dot(load(a, t, a_t, k, end, K), bT, input_precision=PREC)
        if K <= BK:
            qb += tl.dot(load(q, t, q_t, k, end, K), bT, input_precision=PREC)
    if g is not None:
        coarse, fine, _, _ = gates(g, G + index * 4 * C, heads, t < end, i, C)
        gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        D = tl.exp(tl.where(i[:, None] >= i[None, :], gap, 0.0))
        ab *= D
    if beta is not None:
        ab *= tl.load(beta + heads, t < end, 0.0)[:, None]
    at = index * C * C + i[:, None] * C + i[None, :]
    blocks = (i // 16)[:, None] >= (i // 16)[None, :]  # those that `_invert` reads
    tl.store(L + at, tl.where(i[:, None] > i[None, :], ab, 0.0), blocks)
    if K > BK:
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK).to(tl.int64)
            bT = tl.trans(load(b, t, b_t, k, end, K))
            qb += tl.dot(load(q, t, q_t, k, end, K), bT, input_precision=PREC)
    if g is not None:
        qb *= D
    tl.store(P + at, tl.where(i[:, None] >= i[None, :], qb, 0.0))
    tl.debug_barrier()  # L is read by threads that did not write it
    _invert(L + index * C * C, Ti + index * C * C, C, INVERSE)
