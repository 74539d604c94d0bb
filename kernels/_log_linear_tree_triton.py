"""The tree of log-linear attention, in Triton: chunks joined to blocks, and gradients brought down again.

A block is the map S -> Phi S + H that its tokens are to a state, kept as X = [H | Phi], (K, V + K); without beta Phi
is a number, kept apart, and X = H. Of two neighbours l, r, and for their gradients:

    X = Phi_r X_l + [H_r | 0]          dX_l += Phi_r^T dX      dH_r = dH     dPhi_r = dX X_l^T

Left blocks are what chunks read: `gather` sums what their readers give, in pieces where there are many of them. Where
blocks lie: `_log_linear_attention_triton.py`. A level's blocks are those that end before the last chunk.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

import triton
import triton.language as tl

from kernels._erase_triton import load
from kernels._log_linear_attention_triton import block_read


@triton.jit
def _family(pid, N, H, level):
    """Where a block of 2^level chunks and its halves lie: number `pid` of those of every head."""
    parents = (N - 1) >> level
    i = pid % parents
    bh = pid // parents
    one = i * 0 + 1
    parent = (2 * i + 1) * (one << level) - 1
    half = one << (level - 1)
    base = bh // H * (2 * N - 1) * H + bh % H
    return base + parent * H, base + (parent - half) * H, base + (parent + half) * H


@triton.jit(do_not_specialize=["level"])
def merge(
    X, N, H, level,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One block of 2^level chunks from its halves, a tile of columns."""
    width: tl.constexpr = V + K
    columns: tl.constexpr = (width + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    parent, left, right = _family(pid // columns, N, H, level)
    c = tl.arange(0, BK).to(tl.int64)
    j = pid % columns * BV + tl.arange(0, BV)
    Phi = load(X + right * K * width + V, c, width, c, K, K)
    X_l = load(X + left * K * width, c, width, j, K, width)
    x = load(X + right * K * width, c, width, j, K, V).to(tl.float32)
    x += tl.dot(Phi, X_l, input_precision=PREC)
    tl.store(X + parent * K * width + c[:, None] * width + j[None, :], x, (c < K)[:, None] & (j < width)[None, :])


@triton.jit
def _block(bh, i, level, N, H, size):
    """Where block `i` of 2^level chunks of a head lies, whether it is there, and `size` if it is, else 0."""
    one = i * 0 + 1
    at = (bh // H * (2 * N - 1) + (2 * i + 1) * (one << level) - 1) * H + bh % H
    there = ((i + 1) << level) < N
    return at, there, size * there.to(tl.int32)


@triton.jit(do_not_specialize=["level", "groups"])
def merge_numbers(X, phi, N, H, level, groups, size: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Where Phi is a number: DEPTH levels above the blocks of 2^level chunks, BLOCK of the `size` numbers of H."""
    parts: tl.constexpr = (size + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    group, bh = (pid // parts) % groups, pid // parts // groups
    number = pid % parts * BLOCK + tl.arange(0, BLOCK)
    x, factor = (), ()
    for s in tl.static_range(1 << DEPTH):
        at, there, limit = _block(bh, (group << DEPTH) + s, level, N, H, size)
        x = x + (tl.load(X + at * size + number, number < limit, 0.0).to(tl.float32),)  # noqa: RUF005
        factor = factor + (tl.load(phi + at, there, 0.0),)  # noqa: RUF005
    for up in tl.static_range(1, DEPTH + 1):
        joined, through = (), ()
        for s in tl.static_range(1 << (DEPTH - up)):
            at, there, limit = _block(bh, (group << (DEPTH - up)) + s, level + up, N, H, size)
            y = factor[2 * s + 1] * x[2 * s] + x[2 * s + 1]
            both = factor[2 * s + 1] * factor[2 * s]
            tl.store(X + at * size + number, y, number < limit)
            if pid % parts == 0:
                tl.store(phi + at, both, there)
            joined = joined + (y,)  # noqa: RUF005
            through = through + (both,)  # noqa: RUF005
        x, factor = joined, through


@triton.jit
def gather(
    q, do, lam, G, Qs, Ps, reach, dX, pieces,
    scale, T, H, group, L, n_bits, n_groups,
    q_b, q_t, q_h, do_b, do_t, do_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PREC: tl.constexpr, BITS: tl.constexpr, ERASE: tl.constexpr, LOG_S: tl.constexpr,
):  # fmt: skip
    """dX of the left blocks of one level, as far as 2^LOG_S chunks read them: a tile of columns."""
    width: tl.constexpr = V + K if ERASE else V
    of_H: tl.constexpr = (V + BV - 1) // BV
    columns: tl.constexpr = of_H + (K + BV - 1) // BV if ERASE else of_H
    pid = tl.program_id(0).to(tl.int64)
    column = pid % columns
    group_n = (pid // columns) % n_groups
    bit = ((pid // columns // n_groups) % n_bits).to(tl.int32)
    bh = pid // columns // n_groups // n_bits
    i_b, h = bh // H, bh % H
    N = tl.cdiv(T, C)
    q += i_b * q_b + h // group * q_h
    do += i_b * do_b + h * do_h
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    of_Phi = column >= of_H
    j = (column - of_H if of_Phi else column) * BV + tl.arange(0, BV)
    dtype = do.dtype.element_ty
    one = group_n * 0 + 1
    first = group_n << LOG_S
    length = one << tl.minimum(bit, LOG_S)
    runs = (one << LOG_S) >> (bit + 1)
    if bit >= LOG_S:
        runs = (first >> bit) & 1
    else:
        first += length
    for run in range(runs):
        start = first + 2 * run * length
        x = tl.zeros([BK, BV], tl.float32)
        for n in range(start, tl.minimum(start + length, N)):
            t = n * C + i
            heads = (i_b * T + t) * H + h
            index = (i_b * N + n) * H + h
            rank = (((n >> (bit + 1)) << bit) + (n - ((n >> bit) << bit))) * H + h
            slot = ((i_b * n_bits + bit) * (N // 2) * H + rank) * C * K
            q_n = load(Qs + slot, i, K, c, C, K) if ERASE else load(q, t, q_t, c, T, K)
            if of_Phi:
                given = load(Ps + slot, i, K, j, C, K)
            else:
                weight = scale * tl.load(lam + (heads * L + tl.minimum(bit + LOG_C + 1, L - 1)), t < T, 0.0)
                if not ERASE:
                    weight *= tl.load(G + index * 4 * C + i) * tl.load(reach + (index * BITS + bit))
                given = (weight[:, None] * load(do, t, do_t, j, T, V).to(tl.float32)).to(dtype)
            x += tl.dot(tl.trans(q_n), given, input_precision=PREC)
        if start < N:
            within, to = V, c[:, None] * width + j[None, :]
            if of_Phi:
                within = K
                to += V
            inside = (c < K)[:, None] & (j < within)[None, :]
            if bit > LOG_S:  # in fp32, whatever X is in
                piece = (i_b * (n_bits - LOG_S - 1) + bit - LOG_S - 1) * n_groups + group_n
                tl.store(pieces + ((piece * H + h) * K * width + to), x, inside)
            else:
                at = (i_b * (2 * N - 1) + 2 * start - length - 1) * H + h
                tl.store(dX + (at * K * width + to), x, inside)


@triton.jit
def add_up(
    pieces, dX, N, H, n_bits, n_groups, n_blocks,
    size: tl.constexpr, BLOCK: tl.constexpr, LOG_S: tl.constexpr,
):  # fmt: skip
    """dX of the left blocks of more than 2^LOG_S chunks, from the pieces: BLOCK of its `size` numbers."""
    parts: tl.constexpr = (size + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    at = pid % parts * BLOCK + tl.arange(0, BLOCK)
    n_big = n_bits - LOG_S - 1
    big = (pid // parts // n_blocks) % n_big
    bh = pid // parts // n_blocks // n_big
    i_b, h = bh // H, bh % H
    length = (bh * 0 + 2 << LOG_S) << big
    start = (2 * (pid // parts % n_blocks) + 1) * length
    if start < N:
        x = tl.zeros([BLOCK], tl.float32)
        for n in range(start >> LOG_S, tl.cdiv(tl.minimum(start + length, N), 1 << LOG_S)):
            piece = ((i_b * n_big + big) * n_groups + n) * H + h
            x += tl.load(pieces + piece * size + at, at < size, 0.0)
        tl.store(dX + ((i_b * (2 * N - 1) + 2 * start - length - 1) * H + h) * size + at, x, at < size)


@triton.jit(do_not_specialize=["level"])
def spread(
    X, dX, N, H, level,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """From dX of a block of 2^level chunks to its halves: a tile of columns of the left, or of Phi of the right."""
    width: tl.constexpr = V + K
    columns: tl.constexpr = (width + BV - 1) // BV
    of_Phi: tl.constexpr = (K + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    parent, left, right = _family(pid // (columns + of_Phi), N, H, level)
    column = pid % (columns + of_Phi)
    c = tl.arange(0, BK).to(tl.int64)
    if column < columns:
        j = column * BV + tl.arange(0, BV)
        dX_n = load(dX + parent * K * width, c, width, j, K, width)
        Phi = load(X + right * K * width + V, c, width, c, K, K)
        at = c[:, None] * width + j[None, :]
        inside = (c < K)[:, None] & (j < width)[None, :]
        x = tl.load(dX + left * K * width + at, inside, 0.0).to(tl.float32)
        x += tl.dot(tl.trans(Phi), dX_n, input_precision=PREC)
        tl.store(dX + left * K * width + at, x, inside)
        tl.store(dX + right * K * width + at, dX_n, (c < K)[:, None] & (j < V)[None, :])
    else:
        row = (column - columns) * BV + tl.arange(0, BV)
        x = tl.zeros([BK, BV], tl.float32)
        for w0 in range(0, width, BV):
            w = w0 + tl.arange(0, BV).to(tl.int64)
            dX_n = load(dX + parent * K * width, c, width, w, K, width)
            X_l = load(X + left * K * width, row, width, w, K, width)
            x += tl.dot(dX_n, tl.trans(X_l), input_precision=PREC)
        at = V + c[:, None] * width + row[None, :]
        tl.store(dX + right * K * width + at, x, (c < K)[:, None] & (row < K)[None, :])


@triton.jit(do_not_specialize=["level", "groups"])
def spread_numbers(
    X, dX, phi, merged, N, H, level, groups, size: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):
    """Where Phi is a number: DEPTH levels, down to the blocks of 2^level chunks. In `merged` a part of <dH, Phi_r H_l>
    of each joint, the gradient of that number's logarithm."""
    parts: tl.constexpr = (size + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    part, group, bh = pid % parts, (pid // parts) % groups, pid // parts // groups
    number = part * BLOCK + tl.arange(0, BLOCK)
    at, there, limit = _block(bh, group, level + DEPTH, N, H, size)
    x = (tl.load(dX + at * size + number, number < limit, 0.0).to(tl.float32),)
    for down in tl.static_range(DEPTH):
        lower = ()
        for s in tl.static_range(1 << down):
            i = (group << down) + s
            at, there, limit = _block(bh, i, level + DEPTH - down, N, H, size)
            left, _, left_limit = _block(bh, 2 * i, level + DEPTH - down - 1, N, H, size)
            right, _, _ = _block(bh, 2 * i + 1, level + DEPTH - down - 1, N, H, size)
            through = x[s] * tl.load(phi + right, there, 0.0)
            H_l = tl.load(X + left * size + number, number < limit, 0.0).to(tl.float32)
            tl.store(merged + at * parts + part, tl.sum(through * H_l), there)
            through += tl.load(dX + left * size + number, number < left_limit, 0.0).to(tl.float32)
            tl.store(dX + left * size + number, through, number < limit)
            tl.store(dX + right * size + number, x[s], number < limit)
            lower = lower + (through, x[s])  # noqa: RUF005
        x = lower


@triton.jit
def end(
    k, v, beta, G, Ti, X, phi, S, T, H, group, L, n_bits, k_b, k_t, k_h, v_b, v_t, v_h,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One level of the state behind the last token, a tile of value columns: blocks from the largest, each brought
    through those behind it, and last what the last chunk's own tokens of that level wrote."""
    width: tl.constexpr = V if beta is None else V + K
    columns: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    level = ((pid // columns) % L).to(tl.int32)
    bh = pid // columns // L
    i_b, h = bh // H, bh % H
    N = tl.cdiv(T, C)
    n = bh * 0 + N - 1
    base = i_b * (2 * N - 1) * H + h
    i = tl.arange(0, C)
    c = tl.arange(0, BK).to(tl.int64)
    j = pid % columns * BV + tl.arange(0, BV)
    t = n * C + i
    dtype = v.dtype.element_ty
    x = tl.zeros([BK, BV], tl.float32)
    for step in range(n_bits + 1):
        bit = n_bits - 1 - step  # -1: the last chunk itself
        at = base + 2 * n * H
        if bit >= 0:
            at = base + block_read(n, tl.maximum(bit, 0)) * H
        if (((2 * n + 1) >> (bit + 1)) & 1) == 1:
            if beta is None:
                x *= tl.load(phi + at)
            else:
                Phi = load(X + at * K * width + V, c, width, c, K, K)
                x = tl.dot(Phi, x.to(dtype), input_precision=PREC)
            if bit >= 0:  # noqa: SIM102 (the compiler knows no `and` of what is there when it runs)
                if tl.minimum(bit + LOG_C + 1, L - 1) == level:
                    x += load(X + at * K * width, c, width, j, K, V).to(tl.float32)
    apart = (T - 1 - n * C).to(tl.int32) ^ i
    low = tl.minimum(level, 1)
    high = low
    if level == L - 1:
        high = 1 << 30
    apart = apart >> tl.maximum(level - 1, 0)
    written = load(v + i_b * v_b + h * v_h, t, v_t, j, T, V).to(tl.float32)
    written = tl.where(((apart >= low) & (apart <= high))[:, None], written, 0.0)
    index = (i_b * N + n) * H + h
    if beta is not None:
        written *= tl.load(beta + (i_b * T + t) * H + h, t < T, 0.0)[:, None]
        Ti_n = load(Ti + index * C * C, i, C, i, C, C)
        written = tl.dot(Ti_n, written.to(dtype), input_precision=PREC)
    written *= tl.load(G + (index * 4 * C + C) + i)[:, None]
    k_n = load(k + i_b * k_b + h // group * k_h, t, k_t, c, T, K)
    x += tl.dot(tl.trans(k_n), written.to(dtype), input_precision=PREC)
    tl.store(S + (bh * L + level) * K * V + c[:, None] * V + j[None, :], x, (c < K)[:, None] & (j < V)[None, :])
