"""Decay inside a chunk of linear attention: one number a token, or one a token and channel.

P_ij = sum_c q_ic k_jc e^{G_ic - G_jc} for tokens j <= i of a chunk (`reverse`: j >= i, and G_jc - G_ic), with G the
cumulative log-decay. Tiles are (C, D): C tokens, D channels. `product` is the dtype of factors, `prec` the precision of
products of fp32.
"""
# mypy: ignore-errors
# Triton reads these functions as a language of its own.

from __future__ import annotations

import triton
import triton.language as tl

from kernels._tiles import G_MIN, load_rows


@triton.jit
def factor(x, product: tl.constexpr, prec: tl.constexpr):
    """`x` (fp32) as a factor of a product. Rounded to TF32 where the tensor cores would cut it off: half the error."""
    if product == tl.float32 and prec == "tf32":
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        return tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)
    return x.to(product)


@triton.jit
def decays(
    g, stride, t, live, d, D: tl.constexpr, full: tl.constexpr, C: tl.constexpr,
    vector: tl.constexpr, reverse: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """G as a sum of two, the factors read, write (C or C, D) and kept (scalar or D), and the total log-decay.

    `vector`: g itself in the place of G, and 0.

    After a hard decay G is large, and small differences drown in its rounding. So where products are `exact`, what of
    each g is a multiple of 2^-10 is summed apart: that sum is exact, and so is each of its differences.
    """
    if vector:
        x = load_rows(g, t, stride, live, d, D, full).to(tl.float32)
    else:
        x = tl.load(g + t * stride, mask=live, other=0.0).to(tl.float32)
    x = tl.where(x < G_MIN, G_MIN, x)
    last = tl.arange(0, C) == C - 1
    last = last[:, None] if vector else last
    G, fine = x, 0.0
    if exact:
        G = tl.floor(x * 1024.0) * (1.0 / 1024.0)
        fine = tl.cumsum(x - G, 0)
    G = tl.cumsum(G, 0)
    # The last of the sum, not a sum of its own: what both rounded alike then leaves the difference
    end, end_fine = tl.sum(tl.where(last, G, 0.0), 0), 0.0
    if exact:
        end_fine = tl.sum(tl.where(last, fine, 0.0), 0)
    since_start = tl.exp(G + fine)
    if vector:
        to_end = tl.exp(end[None, :] - G + (end_fine[None, :] - fine if exact else 0.0))
    else:
        to_end = tl.exp(tl.minimum(end - G + (end_fine - fine), 0.0))
    end += end_fine
    if vector:
        G, fine = x, 0.0
    if reverse:
        return G, fine, to_end, since_start, tl.exp(end), end
    else:
        return G, fine, since_start, to_end, tl.exp(end), end


@triton.jit
def _sums(which, g, product: tl.constexpr, prec: tl.constexpr):
    """Sums (C, D) of the g of those tokens that `which` (C, C) has 1 for. In bf16 of 16 bits of g, in two parts."""
    if product == tl.bfloat16:
        high = g.to(tl.bfloat16)
        low = (g - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(which.to(tl.bfloat16), low, acc=tl.dot(which.to(tl.bfloat16), high))
    else:
        return tl.dot(which, factor(g, tl.float32, prec), input_precision=prec)


@triton.jit
def _halves(
    g, live, size: tl.constexpr, C: tl.constexpr, reverse: tl.constexpr, product: tl.constexpr, prec: tl.constexpr
):
    """Of pairs of neighbouring halves of `size` tokens: which pairs of tokens (C, C) meet through the border between
    two, and what each (C, D) keeps on its own side of it. g: log-decays.

    Sums of g itself, not differences of sums: nothing cancels, and where no g is positive no exponent is. `live` takes
    out zeros alone, but without it the compiler makes all masks before the walk, and has no registers left for it.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    in_later = (i // size) % 2 == 1
    if size == 1:
        passed = tl.where(in_later, g, 0.0)
    else:
        own = (i // size == j // size) & tl.where(in_later, j <= i, j > i) & live[None, :]
        passed = _sums(tl.where(own, 1.0, 0.0), g, product, prec)
    pair = i // (2 * size) == j // (2 * size)
    meet = pair & (i // size < j // size) if reverse else pair & (i // size > j // size)
    return meet, tl.exp(passed)


@triton.jit
def channel_scores(
    q, k, g, live, C: tl.constexpr, reverse: tl.constexpr, product: tl.constexpr, prec: tl.constexpr
):  # fmt: skip
    """P (C, C), where each channel of `k` decays by itself.

    The sum over channels is no product of two matrices, but what one half of some tokens reads of the other is, through
    the border between them: so of blocks of 2 tokens around the diagonal, then of 4, up to the chunk.
    """
    r = tl.arange(0, C)
    q, k = q.to(tl.float32), k.to(tl.float32)
    P = tl.dot(factor(q, product, prec), tl.trans(factor(k, product, prec)), input_precision=prec)
    P = tl.where(r[:, None] == r[None, :], P, 0.0)
    levels: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6
    for level in tl.static_range(levels):
        meet, kept = _halves(g, live, 1 << level, C, reverse, product, prec)
        x = tl.dot(factor(q * kept, product, prec), tl.trans(factor(k * kept, product, prec)), input_precision=prec)
        P += tl.where(meet, x, 0.0)
    return P


@triton.jit
def channel_product(
    P, v, g, live, C: tl.constexpr, reverse: tl.constexpr, product: tl.constexpr, prec: tl.constexpr
):  # fmt: skip
    """P V (C, BW), where each channel of `v` decays by itself: in halves, as `channel_scores`."""
    r = tl.arange(0, C)
    v = v.to(tl.float32)
    out = tl.sum(tl.where(r[:, None] == r[None, :], P, 0.0), 1)[:, None] * v
    levels: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6
    for level in tl.static_range(levels):
        meet, kept = _halves(g, live, 1 << level, C, reverse, product, prec)
        x = factor(tl.where(meet, P, 0.0), product, prec)
        out += kept * tl.dot(x, factor(v * kept, product, prec), input_precision=prec)
    return out
