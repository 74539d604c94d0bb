"""The short convolution on a card: a program walks some tokens of one sequence, for BD channels, with W in registers.

With z the value before the activation and dz its gradient, made again from x:

    z_t = sum_i w_i x_{t-W+1+i}     dx_s = sum_j dz_{s+j} w_{W-1-j}     dw_i = sum_t dz_t x_{t-W+1+i}

A walk loads ROWS tokens at a time, so that their loads are under way at once, and holds the last W in a tuple: each
token is read once but for W-1 where two walks meet. Tokens before the first are read from the carried state in place.
All arithmetic is fp32. dw is summed over each walk, and `_sum_kernel` adds the walks in a fixed order.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton reads these functions as a language of its own, which adds tuples but does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(n_walks, D: tl.constexpr, BD: tl.constexpr):
    """Batch and number of this program's walk (int64), and its channels."""
    tiles: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0).to(tl.int64)
    return pid // tiles // n_walks, pid // tiles % n_walks, pid % tiles * BD + tl.arange(0, BD)


@triton.jit
def _within(live, d, D: tl.constexpr, BD: tl.constexpr):
    """The mask of a token that is there, `live`, in channels that are."""
    return live if D % BD == 0 else live & (d < D)


@triton.jit
def _token(x, x_t, state, state_t, t, T, d, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, stateful: tl.constexpr):
    """Token t in fp32, from 1 - W: of the state where t < 0. Zero where there is none."""
    row = tl.load(x + t * x_t + d, mask=_within((t >= 0) & (t < T), d, D, BD), other=0.0).to(tl.float32)
    if stateful:
        row += tl.load(state + (t + (W - 1)) * state_t + d, mask=_within(t < 0, d, D, BD), other=0.0)
    return row


@triton.jit
def _start(
    x, x_t, state, state_t, w, first, T, d, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, stateful: tl.constexpr
):  # fmt: skip
    """The W columns of w, and the W - 1 tokens before token `first`."""
    weights = ()
    for i in tl.static_range(W):
        weights = weights + (tl.load(w + d * W + i, mask=_within(True, d, D, BD), other=0.0).to(tl.float32),)
    window = ()
    for i in tl.static_range(W - 1):
        window = window + (_token(x, x_t, state, state_t, first - (W - 1) + i, T, d, D, BD, W, stateful),)
    return weights, window


@triton.jit
def _mixed(window, weights, W: tl.constexpr):
    """What the convolution gives for the last token of `window`."""
    z = window[0] * weights[0]
    for i in tl.static_range(1, W):
        z += window[i] * weights[i]
    return z


@triton.jit(do_not_specialize=["T", "n_walks"])
def _forward_kernel(
    x, w, state, y, last, x_b, x_t, state_b, state_t, T, n_walks,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    silu: tl.constexpr, stateful: tl.constexpr,
):  # fmt: skip
    """y of TOKENS tokens; the last walk also writes the state to be carried on."""
    b, walk, d = _place(n_walks, D, BD)
    first = walk * TOKENS
    x += b * x_b
    y += b * T * D
    if stateful:
        state += b * state_b
    weights, window = _start(x, x_t, state, state_t, w, first, T, d, D, BD, W, stateful)
    steps = tl.cdiv(tl.minimum(T - first, TOKENS), ROWS)
    for step in range(0, steps):
        t = first + step * ROWS
        rows = ()
        for r in tl.static_range(ROWS):
            rows = rows + (_token(x, x_t, None, 0, t + r, T, d, D, BD, W, False),)
        for r in tl.static_range(ROWS):
            full = window + (rows[r],)
            z = _mixed(full, weights, W)
            if silu:
                z *= tl.sigmoid(z)
            tl.store(y + (t + r) * D + d, z.to(y.dtype.element_ty), mask=_within(t + r < T, d, D, BD))
            window = full[1:]
    if walk == n_walks - 1:
        for i in tl.static_range(W - 1):
            row = _token(x, x_t, state, state_t, walk * 0 + T - (W - 1) + i, T, d, D, BD, W, stateful)
            at = last + (b * (W - 1) + i) * D + d
            tl.store(at, row.to(last.dtype.element_ty), mask=_within(True, d, D, BD))


@triton.jit(do_not_specialize=["T", "n_walks"])
def _gradient_kernel(
    x, w, state, dy, dlast, dx, dstate, sums, x_b, x_t, state_b, state_t, dy_b, dy_t, dlast_b, dlast_t, T, n_walks,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    silu: tl.constexpr, stateful: tl.constexpr, has_dlast: tl.constexpr,
):  # fmt: skip
    """dx of TOKENS - (W - 1) tokens, and what they add to dw: the walk goes on over the W - 1 that they reach.

    The first walk begins W - 1 tokens early in dx: those are the gradient of the state.
    """
    b, walk, d = _place(n_walks, D, BD)
    OWN: tl.constexpr = TOKENS - (W - 1)
    first = walk * OWN
    x += b * x_b
    dy += b * dy_b
    dx += b * T * D
    if stateful:
        state += b * state_b
        dstate += b * ((W - 1) * D)
    if has_dlast:
        dlast += b * dlast_b
    weights, window = _start(x, x_t, state, state_t, w, first, T, d, D, BD, W, stateful)
    dzs = ()
    for _ in tl.static_range(W - 1):
        dzs = dzs + (tl.zeros([BD], tl.float32),)
    dw = ()
    for _ in tl.static_range(W):
        dw = dw + (tl.zeros([BD], tl.float32),)
    steps = tl.cdiv(tl.minimum(T + (W - 1) - first, TOKENS), ROWS)
    for step in range(0, steps):
        t = first + step * ROWS
        rows = ()
        dys = ()
        for r in tl.static_range(ROWS):
            rows = rows + (_token(x, x_t, None, 0, t + r, T, d, D, BD, W, False),)
            dys = dys + (_token(dy, dy_t, None, 0, t + r, T, d, D, BD, W, False),)
        for r in tl.static_range(ROWS):
            full = window + (rows[r],)
            dz = dys[r]
            if silu:
                z = _mixed(full, weights, W)
                s = tl.sigmoid(z)
                dz = tl.where(t + r < T, dz * (s * (1.0 + z * (1.0 - s))), 0.0)
            owned = tl.where(t + r < first + OWN, dz, 0.0)
            added = ()
            for i in tl.static_range(W):
                added = added + (dw[i] + owned * full[i],)
            dw = added
            reached = dzs + (dz,)
            s_t = t + r - (W - 1)  # the token whose last effect is on token t + r
            dx_s = reached[0] * weights[W - 1]
            for j in tl.static_range(1, W):
                dx_s += reached[j] * weights[W - 1 - j]
            if has_dlast:
                kept = s_t - T + (W - 1)  # its row in the state that the forward pass left
                dx_s += tl.load(
                    dlast + kept * dlast_t + d, mask=_within((kept >= 0) & (kept < W - 1), d, D, BD), other=0.0
                ).to(tl.float32)
            tl.store(dx + s_t * D + d, dx_s.to(dx.dtype.element_ty), mask=_within((s_t >= first) & (s_t < T), d, D, BD))
            if stateful:
                at = dstate + (s_t + (W - 1)) * D + d
                tl.store(at, dx_s.to(dstate.dtype.element_ty), mask=_within((s_t < 0) & (s_t < T), d, D, BD))
            window = full[1:]
            dzs = reached[1:]
    for i in tl.static_range(W):
        at = sums + ((b * n_walks + walk) * W + i) * D + d
        tl.store(at, dw[i], mask=_within(True, d, D, BD))


@triton.jit(do_not_specialize=["n"])
def _sum_kernel(sums, dw, n, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """dw (D, W) from what each of `n` walks adds, (n, W, D): BD channels of one column."""
    pid = tl.program_id(0).to(tl.int64)
    i, d = pid % W, pid // W * BD + tl.arange(0, BD)
    total = tl.zeros([ROWS, BD], tl.float32)
    for first in range(0, n, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < n)[:, None] & (d < D)[None, :]
        total += tl.load(sums + (row * W + i)[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(dw + d * W + i, tl.sum(total, 0).to(dw.dtype.element_ty), mask=d < D)
