"""Linear attention on a card: one walk over the chunks of a sequence, which is the forward pass and every gradient.

With do the gradient of the output, each gradient is linear attention again, of other tensors (OPS: the recurrence read
forwards or, `reverse`, backwards in time):

    o  = attend(q, k, v)              dq = attend(do, v, k)
    dv = attend_reverse(k, q, do)     dk = attend_reverse(v, do, q)

so one body, `_walk`, is written once: it reads with rows `q`, is addressed by `k` and carries `v`. A program walks one
segment of one head, for one tile of the channels of `v`, with the state (BD, BW) in fp32 registers:

    out = read * (Q S) + P V       S <- kept * S + K^T (write * V)       P = D * Q K^T, D_ij = e^{G_i - G_j}

G is the cumulative log-decay in the chunk; read, write and kept are e to a power <= 0. Decay "token": one number a
token; "key", "value": one a channel of `k` or of `v`, then P or its product with `V` is made of halves of halves.
(Gradients turn "key" into "value" and back, as they swap the tensors.)

The normaliser: `norm` "out" divides by den = rowsum P + read * (Q z); its gradient dden adds a rank-one term to the
scores, from "row" (dq) or "column" (dk), and a row of the state. The gradient of g takes two walks: dq's, which
"record"s the states and q.dq, and dk's, which "finish"es it.

Products run in bf16 for bf16 inputs; fp16 has the mantissa of TF32 but not its range, so it runs in TF32; fp32 in three
TF32 products. States, gates and sums are fp32. On Hopper, compilers have miscompiled the transpose of a product as the
left operand of another: nothing here transposes a product.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl

from kernels._decays import channel_product, channel_scores, decays, factor
from kernels._segments import segment
from kernels._tiles import G_MIN, load_rows, sequence, store_rows


@triton.jit
def _absorb(
    S, z, k, v, side, write, kept, decay: tl.constexpr, norm: tl.constexpr, product: tl.constexpr, prec: tl.constexpr
):
    """The state after a chunk: S <- kept * S + K^T (write * V), and z, its extra column ("out", "in") or row."""
    if norm != "none":
        of_k: tl.constexpr = norm == "out" or norm == "in"
        weighted = (k if of_k else v).to(tl.float32)
        if norm == "column" or norm == "in":
            weighted *= side[:, None]
        if decay == "token":
            weighted *= write[:, None]
        elif decay != "none":
            weighted *= write
        z = tl.sum(weighted, 0) + (z if decay == "none" else z * kept)
    if decay == "token":
        S, v = S * kept, factor(v * write[:, None], product, prec)
    if decay == "key":
        S, k = S * kept[:, None], factor(k * write, product, prec)
    if decay == "value":
        S, v = S * kept[None, :], factor(v * write, product, prec)
    return tl.dot(tl.trans(k), v, acc=S, input_precision=prec), z


@triton.jit(do_not_specialize=["T", "n_segments", "g_b", "g_t", "g_h"])
def _scan_kernel(
    k, v, g, side, states, totals, cu_seqlens,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T, H, heads_a_k, heads_a_v, n_segments,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    decay: tl.constexpr, norm: tl.constexpr, reverse: tl.constexpr, packed: tl.constexpr,
    product: tl.constexpr, prec: tl.constexpr,
):  # fmt: skip
    """What one segment of one head adds to the state, (K, BV), from nothing; and its total log-decay."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    tile, h = pid % tiles, pid // tiles % H
    s, n = pid // tiles // H % (n_segments - 1), pid // tiles // H // (n_segments - 1)
    s = s + 1 if reverse else s  # what the last in order builds is not asked for
    start, length = sequence(cu_seqlens, n, T, packed)
    b = 0 if packed else n
    first, count = segment(length, s, n_segments, C)
    kh = h // heads_a_k
    k += b * k_b + start * k_t + kh * k_h
    v += b * v_b + start * v_t + h // heads_a_v * v_h
    if decay != "none":
        g += b * g_b + start * g_t + h * g_h
    if norm == "in":
        side += (b * T + start) * H + h
    d, w = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    S, z = tl.zeros([BK, BV], tl.float32), tl.zeros([BK], tl.float32)
    total = tl.zeros([BK], tl.float32) if decay == "key" else 0.0
    for i in range(0, count):
        c = first + (count - 1 - i if reverse else i)
        t = c * C + tl.arange(0, C)
        live = t < length
        k_i = load_rows(k, t, k_t, live, d, K, K == BK)
        k_i = k_i if decay == "key" else k_i.to(product)
        v_i = load_rows(v, t, v_t, live, w, V, V % BV == 0).to(product)
        side_i, write, kept = 0.0, 0.0, 0.0
        if norm == "in":
            side_i = tl.load(side + t * H, mask=live, other=0.0)
        if decay != "none":
            _, _, _, write, kept, end = decays(
                g, g_t, t, live, d, K, K == BK, C, decay == "key", reverse, product == tl.float32
            )
            total += end
        S, z = _absorb(S, z, k_i, v_i, side_i, write, kept, decay, norm, product, prec)
    size: tl.constexpr = K * V if norm == "none" else K * V + K
    at = (n * H + h) * n_segments + s
    tl.store(states + at * size + d[:, None] * V + w[None, :], S, mask=(d < K)[:, None] & (w < V)[None, :])
    if tile == 0:
        if norm != "none":
            tl.store(states + at * size + K * V + d, z, mask=d < K)
        if decay == "token":
            tl.store(totals + at, total)
        if decay == "key":
            tl.store(totals + at * K + d, total, mask=d < K)


@triton.jit
def _walk(
    q, q_t, k, k_t, v, v_t, g, g_t, side, side_t, out, out_t,
    S_start, z_start, S_d, S_w, S_end, z_end,
    partner, partner_t, product_sums, sums_t, chunk_states, chunk_z, chunk_step, dg,
    first, count, length, w0, scale, start_scale, end_scale, ends,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    decay: tl.constexpr, norm: tl.constexpr, gate: tl.constexpr, reverse: tl.constexpr,
    has_start: tl.constexpr, keeps: tl.constexpr, more: tl.constexpr, product: tl.constexpr, prec: tl.constexpr,
):  # fmt: skip
    """One segment of one head for the channels w0 .. w0 + BW of `v`. Pointers stand at the head's first token.

    `more` "add": adds to what `out` and `dg` hold; "gate": that, and `out` is the gradient of 1 - e^g, which goes into
    dg and is not kept. `ends` (with `keeps` "S" or "z"): this is the last segment in order, which stores the final
    state.
    """
    exact: tl.constexpr = product == tl.float32
    r, d, w = tl.arange(0, C), tl.arange(0, BD), w0 + tl.arange(0, BW)
    within = (d < D)[:, None] & (w < W)[None, :]
    z_width: tl.constexpr = D if norm == "out" else W
    z_at = d if norm == "out" else w
    S = tl.zeros([BD, BW], tl.float32)
    z = tl.zeros([BD if norm == "out" else BW], tl.float32)
    if has_start:
        S = tl.load(S_start + d[:, None] * S_d + w[None, :] * S_w, mask=within, other=0.0) * start_scale
        if norm != "none":
            z = tl.load(z_start + z_at, mask=z_at < z_width, other=0.0) * start_scale
    seen = r[:, None] <= r[None, :] if reverse else r[:, None] >= r[None, :]
    for i in range(0, count):
        c = first + (count - 1 - i if reverse else i)
        t = c * C + r
        live = t < length
        q_i = load_rows(q, t, q_t, live, d, D, D == BD)
        k_i = load_rows(k, t, k_t, live, d, D, D == BD)
        v_i = load_rows(v, t, v_t, live, w, W, W % BW == 0)
        # What decays by channel is rounded once, after it: slots come in fp32
        if decay != "key":
            q_i, k_i = q_i.to(product), k_i.to(product)
        if decay != "value":
            v_i = v_i.to(product)
        G, fine, read, write, kept, side_i = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        if decay == "key":
            G, fine, read, write, kept, _ = decays(g, g_t, t, live, d, D, D == BD, C, True, reverse, exact)
        elif decay != "none":
            G, fine, read, write, kept, _ = decays(
                g, g_t, t, live, w, W, W % BW == 0, C, decay == "value", reverse, exact
            )
        if norm == "row" or norm == "column":
            side_i = tl.load(side + t * side_t, mask=live, other=0.0)
        # The scores
        if decay == "key":
            P = channel_scores(q_i, k_i, G, live, C, reverse, product, prec)
        else:
            P = tl.dot(q_i, tl.trans(k_i), input_precision=prec)
            if norm == "row":
                P += side_i[:, None]
            if norm == "column":
                P += side_i[None, :]
            if decay == "token":
                passed = G[:, None] - G[None, :]
                if exact:
                    passed += fine[:, None] - fine[None, :]
                passed = -passed if reverse else passed
                P *= tl.exp(tl.where(seen, tl.minimum(passed, 0.0), float("-inf")))
            else:
                P = tl.where(seen, P, 0.0)
        # What the tokens before the chunk give, and those inside it
        if decay == "key":
            before = tl.dot(factor(q_i * read, product, prec), factor(S, product, prec), input_precision=prec)
        else:
            before = tl.dot(q_i, factor(S, product, prec), input_precision=prec)
        if norm == "row":
            before += side_i[:, None] * z[None, :]
        if norm == "column":
            before += z[None, :]
        if decay == "token":
            before *= read[:, None]
        if decay == "value":
            before *= read
        inside = tl.zeros([C, BW], tl.float32) if gate == "finish" else before
        if decay == "value":
            inside += channel_product(P, v_i, G, live, C, reverse, product, prec)
        else:
            inside = tl.dot(factor(P, product, prec), v_i, acc=inside, input_precision=prec)
        if gate == "record":
            # The states stand as (token's chunk, W, D): as this walk holds them
            at = chunk_states + c * chunk_step * (D * W) + d[:, None] * W + w[None, :]
            tl.store(at, S.to(chunk_states.dtype.element_ty), mask=within)
            if norm != "none":
                tl.store(chunk_z + c * chunk_step * W + w, z, mask=w < W)
            p_i = load_rows(partner, t, partner_t, live, w, W, W % BW == 0).to(tl.float32) * inside * scale
            if decay == "token":
                tl.store(product_sums + t * sums_t, tl.sum(p_i, 1), mask=live)
            else:
                store_rows(product_sums, t, sums_t, live, w, W, W % BW == 0, p_i)
        if gate == "finish":
            p_i = load_rows(partner, t, partner_t, live, w, W, W % BW == 0).to(tl.float32) * scale
            at = chunk_states + c * chunk_step * (D * W) + d[:, None] * W + w[None, :]
            S_c = tl.load(at, mask=within, other=0.0).to(tl.float32)
            if decay == "token":
                far = tl.sum(tl.sum(S_c * S, 1), 0)
                if norm != "none":
                    far += tl.sum(tl.load(chunk_z + c * chunk_step * W + w, mask=w < W, other=0.0) * z, 0)
                near = tl.load(product_sums + t * sums_t, mask=live, other=0.0) - tl.sum(p_i * inside, 1)
                written = tl.sum(p_i * before, 1)
                slope = tl.cumsum(near, 0, reverse=True) + tl.cumsum(written, 0) - written + far * kept * scale
                g_i = tl.load(g + t * g_t, mask=live, other=0.0).to(tl.float32)
                tl.store(dg + t * sums_t, tl.where(g_i < G_MIN, 0.0, slope), mask=live)
            else:
                far = tl.sum(S_c * S, 0)
                if norm != "none":
                    far += tl.load(chunk_z + c * chunk_step * W + w, mask=w < W, other=0.0) * z
                near = load_rows(product_sums, t, sums_t, live, w, W, W % BW == 0) - p_i * inside
                written = p_i * before
                slope = tl.cumsum(near, 0, reverse=True) + tl.cumsum(written, 0) - written
                slope += (far * kept * scale)[None, :]
            inside += before
        if norm == "out":
            den = tl.sum(P, 1)
            if decay == "key":
                den += tl.sum(q_i * read * z[None, :], 1)
            elif decay == "token":
                den += tl.sum(q_i.to(tl.float32) * z[None, :], 1) * read
            else:
                den += tl.sum(q_i.to(tl.float32) * z[None, :], 1)
            inside = inside / tl.where(den < 1e-6, 1e-6, den)[:, None]
            if w0 == 0:
                tl.store(side + t * side_t, den, mask=live)
        made = inside * scale
        if more != "none":
            made += load_rows(out, t, out_t, live, w, W, W % BW == 0)
        if gate == "finish" and decay == "value":
            g_i = load_rows(g, t, g_t, live, w, W, W % BW == 0).to(tl.float32)
            if more != "none":
                slope += load_rows(dg, t, sums_t, live, w, W, W % BW == 0)
            if more == "gate":
                slope -= tl.exp(g_i) * made
            store_rows(dg, t, sums_t, live, w, W, W % BW == 0, tl.where(g_i < G_MIN, 0.0, slope))
        if out is not None and more != "gate":
            store_rows(out, t, out_t, live, w, W, W % BW == 0, made)
        S, z = _absorb(S, z, k_i, v_i, side_i, write, kept, decay, norm, product, prec)
    if ends:
        if keeps == "S" or keeps == "Sz":
            tl.store(S_end + d[:, None] * W + w[None, :], S * end_scale, mask=within)
        if keeps == "z" or (keeps == "Sz" and w0 == 0):
            tl.store(z_end + z_at, z * end_scale, mask=z_at < z_width)


@triton.jit
def _place(cu_seqlens, H, heads_a_k, T, n_segments, tiles: tl.constexpr, packed: tl.constexpr, C: tl.constexpr):
    """Where this program works: sequence, head, head of k, segment, tile; batch, first token, length; chunks; slot.

    Tiles of one head stand next to each other, then heads: together they read whole rows. Chunk c of the sequence has
    slot `slot + c` in tensors with a row for each chunk.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile, h = pid % tiles, pid // tiles % H
    s, n = pid // tiles // H % n_segments, pid // tiles // H // n_segments
    start, length = sequence(cu_seqlens, n, T, packed)
    first, count = segment(length, s, n_segments, C)
    if packed:
        return n, h, h // heads_a_k, s, tile, n * 0, start, length, first, count, start // C + n
    else:
        return n, h, h // heads_a_k, s, tile, n, start, length, first, count, n * tl.cdiv(length, C)


@triton.jit(do_not_specialize=["T", "n_segments", "g_b", "g_t", "g_h", "S_step", "z_step"])
def _forward_kernel(
    q, k, v, g, den, out, S_start, z_start, S_end, z_end, cu_seqlens,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T, H, heads_a_k, heads_a_v, n_segments, S_step, z_step, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    decay: tl.constexpr, normalize: tl.constexpr, has_start: tl.constexpr, packed: tl.constexpr,
    product: tl.constexpr, prec: tl.constexpr,
):  # fmt: skip
    n, h, kh, s, tile, b, start, length, first, count, _ = _place(
        cu_seqlens, H, heads_a_k, T, n_segments, (V + BV - 1) // BV, packed, C
    )
    at, head, row = (n * H + h) * n_segments + s, n * H + h, (b * T + start) * H + h
    if decay != "none":
        g += b * g_b + start * g_t + h * g_h
    if normalize:
        den += row
        z_end += head * K
    if has_start:
        S_start += at * S_step
        if normalize:
            z_start += at * z_step
    _walk(
        q + b * q_b + start * q_t + kh * q_h, q_t,
        k + b * k_b + start * k_t + kh * k_h, k_t,
        v + b * v_b + start * v_t + h // heads_a_v * v_h, v_t,
        g, g_t, den, H, out + row * V, H * V,
        S_start, z_start, V, 1, S_end + head * (K * V), z_end, None, 0, None, 0, None, None, 0,
        None, first, count, length, tile * BV, scale, 1.0, 1.0, s == n_segments - 1,
        K, V, BK, BV, C, decay, "out" if normalize else "none", "none", False,
        has_start, "Sz" if normalize else "S", "none", product, prec,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "n_segments", "g_b", "g_t", "g_h", "S_step", "z_step", "dS_step", "dz_step"])
def _gradient_kernel(
    q, k, v, g, do, dden, dq, dk, dv, dg, S_start, z_start, dS_start, dz_start, dS_end, dz_end,
    product_sums, chunk_states, chunk_z, cu_seqlens,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H, heads_a_k, heads_a_v, n_segments, rows, S_step, z_step, dS_step, dz_step, scale, dS_scale,
    K: tl.constexpr, V: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, decay: tl.constexpr, normalize: tl.constexpr, gate: tl.constexpr, roles: tl.constexpr,
    has_start: tl.constexpr, has_dS: tl.constexpr, more: tl.constexpr, packed: tl.constexpr,
    product: tl.constexpr, prec: tl.constexpr,
):  # fmt: skip
    """`roles` "all", or "q" and then "kv" where g has a gradient: each program makes a tile of dq, of dk or of dv."""
    k_tiles: tl.constexpr = (K + BK - 1) // BK
    v_tiles: tl.constexpr = (V + BV - 1) // BV
    tiles: tl.constexpr = k_tiles if roles == "q" else k_tiles + v_tiles if roles == "kv" else 2 * k_tiles + v_tiles
    n, h, kh, s, job, b, start, length, first, count, slot = _place(
        cu_seqlens, H, heads_a_k, T, n_segments, tiles, packed, C
    )
    at, head, row = (n * H + h) * n_segments + s, n * H + h, (b * T + start) * H + h
    q += b * q_b + start * q_t + kh * q_h
    k += b * k_b + start * k_t + kh * k_h
    v += b * v_b + start * v_t + h // heads_a_v * v_h
    do += b * do_b + start * do_t + h // heads_a_v * do_h
    if decay != "none":
        g += b * g_b + start * g_t + h * g_h
    if normalize:
        dden += row
        dz_end += head * K
    if has_start:
        S_start += at * S_step
        if normalize:
            z_start += at * z_step
    if has_dS:
        dS_start += at * dS_step
        if normalize:
            dz_start += at * dz_step
    of_k: tl.constexpr = "value" if decay == "key" else decay
    sums_t = H
    if gate:
        chunk_states += (slot * H + h) * (K * V)
        if normalize:
            chunk_z += (slot * H + h) * K
        if decay == "token":
            product_sums += (job % k_tiles) * rows + row
            dg += (job % k_tiles) * rows + row
        else:
            product_sums += row * K
            dg += row * K
            sums_t = H * K
    if roles != "kv":
        if job < k_tiles:
            _walk(
                do, do_t, v, v_t, k, k_t, g, g_t, dden, H, None if dq is None else dq + row * K, H * K,
                S_start, z_start, 1, V, None, None, q, q_t, product_sums, sums_t, chunk_states, chunk_z, H,
                None, first, count, length, job * BK, scale, 1.0, 1.0, False,
                V, K, PV, BK, C, of_k, "row" if normalize else "none", "record" if gate else "none", False,
                has_start, "none", "none", product, prec,
            )  # fmt: skip
        job -= k_tiles
    if roles != "q":
        if (job >= 0) & (job < k_tiles):
            _walk(
                v, v_t, do, do_t, q, q_t, g, g_t, dden, H, dk + row * K, H * K,
                dS_start, dz_start, 1, V, None, dz_end, k, k_t, product_sums, sums_t, chunk_states, chunk_z, H,
                dg, first, count, length, job * BK, scale, dS_scale, scale, s == 0,
                V, K, PV, BK, C, of_k, "column" if normalize else "none", "finish" if gate else "none", True,
                has_dS, "z" if normalize else "none", more, product, prec,
            )  # fmt: skip
        if job >= k_tiles:
            _walk(
                k, k_t, q, q_t, do, do_t, g, g_t, None, 0, dv + row * V, H * V,
                dS_start, None, V, 1, dS_end + head * (K * V), None, None, 0, None, 0, None, None, 0,
                None, first, count, length, (job - k_tiles) * BV, scale, dS_scale, scale, s == 0,
                K, V, PK, BV, C, decay, "none", "none", True,
                has_dS, "S", "none", product, prec,
            )  # fmt: skip
