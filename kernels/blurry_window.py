"""A window of tokens kept in fewer slots: writes that move around a ring of slots by less than a slot a token.

With R tokens to a slot (the resolution, a whole number a head) and M slots, the window is M R tokens:

    x_tj = j - t / R, modulo M            r_tj = D_M(x_tj), the Dirichlet kernel; sum_j r_tj = 1, D_M(0) = 1
    K_t[j] = (1 - r_tj) K_{t-1}[j] + r_tj k_t        V_t[j] = (1 - r_tj) V_{t-1}[j] + r_tj v_t
    p_t = softmax( scale * K_t q_t ), over the slots that the write has come near: t > (j - 1) R
    o_t = V_t^T p_t

At R = 1 r is 1 in slot t mod M and 0 elsewhere: a ring buffer, so softmax attention over the last M tokens. At any R a
slot is emptied (r = 1) once in M R tokens; so token t is read by the M R - t mod R tokens from itself on, then gone.
In between r is as low as -0.22 (with few slots -1/3) and 1 - r more than 1, so there are no log-gates; products of
1 - r reach 3 at R = 8 and 10 at R = 16.

Chunked, with w_ijm = r_jm prod_{j<u<=i} (1 - r_um), a table that depends on no data and that all rows share:

    logit_im = w'_im (K q_i)_m + sum_j (q_i . k_j) w_ijm      o_i = V^T (w'_i * p_i) + sum_j (sum_m p_im w_ijm) v_j

with w' the product of 1 - r from the chunk's start. Autograd's own backward pass: the tables carry no gradient. On a
card it is slot attention with log-gates log(1 - r), of either sign, and writes r.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, M slots, K key width, V value width; G heads
after which the resolutions repeat, P phases (1 where all rows begin at 0, else B), Q = J / (P G) rows of one table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels._chunk import chunk_length, from_chunks, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit

MOST = 512
"""Slots, at most, in the Triton kernels: a program holds them all for some of the channels."""

LONGEST = 16
"""Chunk length: a table has C numbers a token, head and slot."""


class BlurryState(NamedTuple):
    """Slots, and where on the ring the next token is written. Lengths may differ within a batch."""

    keys: Tensor  # (B, H, M, K) fp32 or better
    values: Tensor  # (B, H, M, V)
    length: Tensor  # (B,) int32, tokens seen


def write_weights(position: Tensor, slots: int, resolution: Sequence[int]) -> Tensor:
    """r of the tokens at `position` (any shape), (..., H, M) fp64: exactly 1 and 0 where t / R is whole."""
    j = torch.arange(slots, device=position.device)
    known = {}
    for R in set(resolution):
        ring = slots * R
        lag = (j * R - position.long().unsqueeze(-1) + ring // 2) % ring - ring // 2
        angle = lag.double() * (math.pi / ring)
        below = slots * (angle.sin() if slots % 2 else angle.tan())
        known[R] = torch.where(lag % R == 0, (lag == 0).double(), (angle * slots).sin() / below)
    return torch.stack([known[R] for R in resolution], -2)


def near(position: Tensor, slots: int, resolution: Sequence[int]) -> Tensor:
    """Which slots the write has come near to, (..., H, M) bool: all of them after the first time round."""
    j = torch.arange(slots, device=position.device)
    return torch.stack([position.unsqueeze(-1) > (j - 1) * R for R in resolution], -2)


def blurry_window_step(
    state: BlurryState, q: Tensor, k: Tensor, v: Tensor, resolution: Sequence[int], scale: float
) -> tuple[Tensor, BlurryState]:
    """One token, and the law. q, k (B, H, K), v (B, H, V) -> o (B, H, V), next state."""
    slots = state.keys.shape[2]
    r = write_weights(state.length, slots, resolution).to(q.dtype)[..., None]
    keys = (1 - r) * state.keys + r * k[..., None, :]
    values = (1 - r) * state.values + r * v[..., None, :]
    x_BHM = torch.einsum("bhmk,bhk->bhm", keys, q) * scale
    p_BHM = x_BHM.masked_fill(~near(state.length, slots, resolution), -torch.inf).softmax(-1)
    return torch.einsum("bhmv,bhm->bhv", values, p_BHM), BlurryState(keys, values, state.length + 1)


def reference(
    q: Tensor, k: Tensor, v: Tensor, state: BlurryState, resolution: Sequence[int], scale: float
) -> tuple[Tensor, BlurryState]:
    """The law over time: (B, T, H, ...) in, o and final state out."""
    out = []
    for t in range(q.shape[1]):
        o, state = blurry_window_step(state, q[:, t], k[:, t], v[:, t], resolution, scale)
        out.append(o)
    return torch.stack(out, 1), state


def _tables(
    position_PT: Tensor, C: int, slots: int, resolution: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """w (N, P, G, C, C, M), w' (N, P, G, C, M), and which slots are read, (N, P, G, C, M)."""
    P, G = position_PT.shape[0], len(resolution)
    r = to_chunks(write_weights(position_PT, slots, resolution), C).unflatten(1, (P, G))
    w = r.new_zeros(*r.shape[:3], C, C, slots)
    for i in range(C):  # behind the end r is 0: nothing is written
        w[:, :, :, i, i] = r[:, :, :, i]
        if i:
            torch.mul(w[:, :, :, i - 1, :i], 1 - r[:, :, :, i, None], out=w[:, :, :, i, :i])
    read = to_chunks(near(position_PT, slots, resolution), C).unflatten(1, (P, G))
    read = read | (r == 0).all(-1, keepdim=True)  # padding, where no softmax may be empty
    return w.to(dtype), (1 - r).cumprod(3).to(dtype), read


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, state: BlurryState | None, slots: int, resolution: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """o (B, T, H, V) and the final slots, keys beside values (B, H, M, K + V)."""
    (B, T, H, _), K = v.shape, k.shape[-1]
    position_PT = torch.arange(T, device=q.device)[None]
    if state is not None:
        position_PT = position_PT + state.length.long()[:, None]
    C, P = chunk_length(T, LONGEST), position_PT.shape[0]
    G = next(n for n in range(1, H + 1) if H % n == 0 and tuple(resolution) == tuple(resolution[:n]) * (H // n))
    w, first, read = _tables(position_PT, C, slots, resolution[:G], q.dtype)
    q, k, v = (to_chunks(x, C).unflatten(1, (P, -1, G)) for x in (q, k, v))  # (N, P, Q, G, C, ...)
    first, read = first.unsqueeze(2), read.unsqueeze(2)
    new = w[:, :, None, :, -1].mT @ torch.cat([k, v], -1)
    S = new.new_zeros(new.shape[1:])
    if state is not None:
        S = torch.cat([state.keys, state.values], -1).view_as(S)
    kept, starts = first[:, :, :, :, -1, :, None], []
    for n in range(len(new)):
        starts.append(S)
        S = torch.addcmul(new[n], S, kept[n])
    before = torch.stack(starts)
    x = (q @ before[..., :K].mT) * first + _over_tokens(q @ k.mT, w)
    p = (x * scale).masked_fill(~read, -torch.inf).softmax(-1)
    o = (p * first) @ before[..., K:] + _over_slots(p, w) @ v
    return from_chunks(o.flatten(1, 3), B, T), S.reshape(B, H, slots, -1)


def _over_tokens(A: Tensor, w: Tensor) -> Tensor:
    """sum_j A_ij w_ijm: (N, P, Q, G, C, C) and (N, P, G, C, C, M) -> (N, P, Q, G, C, M), Q rows a product."""
    return (A.movedim(2, 4) @ w).movedim(4, 2)


def _over_slots(p: Tensor, w: Tensor) -> Tensor:
    """sum_m p_im w_ijm: (N, P, Q, G, C, M) and (N, P, G, C, C, M) -> (N, P, Q, G, C, C)."""
    return (p.movedim(2, 4) @ w.mT).movedim(4, 2)


@full_precision
def blurry_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slots: int,
    resolution: Sequence[int],
    scale: float = 1.0,
    initial_state: BlurryState | None = None,
    impl: str = "auto",
) -> tuple[Tensor, BlurryState]:
    """o (B, T, H, V) in q's dtype, and the final state.

    q, k (B, T, H, K), v (B, T, H, V). `slots`: M, at least 1. `resolution`: R of each head, whole and at least 1.
    The chunked form holds T * C * M numbers a distinct resolution; times B where a batch starts from a state.
    """
    (B, T, H, V), K = v.shape, q.shape[-1]
    _check(q, k, v, slots, resolution, initial_state)
    impl = resolve(impl, "blurry_window", unfit(q, k, v, slots))
    if impl == "triton" and T > 1:
        return _on_card(q, k, v, initial_state, slots, resolution, scale)
    dtype, acc = q.dtype, accumulator(q, v)
    q, k, v = q.to(acc), k.to(acc), v.to(acc)
    if initial_state is not None:
        initial_state = BlurryState(initial_state.keys.to(acc), initial_state.values.to(acc), initial_state.length)
    if impl == "reference" or T == 1:
        size = (B, H, slots)
        start = initial_state or BlurryState(
            v.new_zeros(*size, K), v.new_zeros(*size, V), torch.zeros(B, dtype=torch.int32, device=v.device)
        )
        o, state = reference(q, k, v, start, resolution, scale)
        return o.to(dtype), state
    o, S = _chunked(q, k, v, initial_state, slots, resolution, scale)
    seen = torch.zeros(B, dtype=torch.int32, device=v.device) if initial_state is None else initial_state.length
    return o.to(dtype), BlurryState(S[..., :K], S[..., K:], seen + T)


def unfit(q: Tensor, k: Tensor, v: Tensor, slots: int, **_: Any) -> str | None:
    """Why the Triton kernels cannot take these inputs, to be read after the op's name; None: they can."""
    if slots > MOST:
        return f"takes at most {MOST} slots in its Triton kernel, not {slots}"
    return triton_unfit(q, k, v, heads=(q.shape[-1], v.shape[-1]))


def _on_card(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: BlurryState | None,
    slots: int,
    resolution: Sequence[int],
    scale: float,
) -> tuple[Tensor, BlurryState]:
    from kernels._slot_attention import attend  # Triton is not everywhere

    B, T, H, _ = v.shape
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    seen = torch.zeros(B, dtype=torch.int32, device=v.device) if state is None else state.length
    position = torch.arange(T, device=v.device)[None]
    if state is not None:
        position = position + seen.long()[:, None]
    alike = len(set(resolution)) == 1
    r = write_weights(position, slots, resolution[:1] if alike else resolution)  # (1 or B, T, 1 or H, M)
    s = r.float()  # in bf16, it would be rounded twice: decayed, it is a factor of products
    f, s = ((x.expand(B, T, H, slots)) for x in (torch.log1p(-r).float(), s))
    j = torch.arange(slots, dtype=torch.int32, device=v.device)
    R = torch.stack([(j - 1) * R + 1 for R in resolution])  # the first position at which a slot is near, (H, M)
    start = (None, None) if state is None else (state.keys.float(), state.values.float())
    first = (R - seen[:, None, None]).to(torch.int32)
    o, keys, values = attend(q.to(common), k.to(common), v.to(common), f, s, start, scale, first, None)
    return o.to(q.dtype), BlurryState(keys, values, seen + T)


def _check(q: Tensor, k: Tensor, v: Tensor, slots: int, resolution: Sequence[int], state: BlurryState | None) -> None:
    (B, T, H, V), K = v.shape, q.shape[-1]
    check("blurry_window", "q", q, (B, T, H, K))
    check("blurry_window", "k", k, (B, T, H, K))
    if slots < 1:
        raise ValueError(f"blurry_window: {slots} slots: should be at least 1")
    if len(resolution) != H or any(R < 1 or int(R) != R for R in resolution):
        raise ValueError(f"blurry_window: resolution={tuple(resolution)}: should be {H} whole numbers of at least 1")
    if state is not None:
        check("blurry_window", "initial_state.keys", state.keys, (B, H, slots, K))
        check("blurry_window", "initial_state.values", state.values, (B, H, slots, V))
        check("blurry_window", "initial_state.length", state.length, (B,))


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `blurry_window`: odd and even slots, resolutions apart, repeated and alike, rows at other phases."""
    B, H, K, V = 2, 4, 5, 7

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    for slots, resolution, start in (
        (6, (1, 2, 1, 2), False),
        (5, (8, 1, 3, 2), True),
        (33, (8, 8, 8, 8), False),
    ):
        state = None
        if start:
            length = torch.tensor([3, 50], dtype=torch.int32)
            state = BlurryState(draw(B, H, slots, K), draw(B, H, slots, V), length)
        inputs = {"q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, H, V)}
        yield {**inputs, "slots": slots, "resolution": resolution, "scale": 0.7, "initial_state": state}
