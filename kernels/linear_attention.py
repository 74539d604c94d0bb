"""Linear attention: an additive key-value matrix, with or without decay.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T          g: none, one number a head, one a token, or one a key channel
    z_t = diag(e^{g_t}) z_{t-1} + k_t                only with `normalize`
    o_t = scale * S_t^T q_t                          or, with `normalize`, S_t^T q_t / max(z_t . q_t, 1e-6)

State: S (B, H, K, V), with `normalize` the pair (S, z), z (B, H, K); fp32 or better.

Chunked, with G the cumulative log-decay inside a chunk and P_ij = sum_k q_ik k_jk e^{G_ik - G_jk} (j <= i):

    O = (e^G * Q) S + P V       S' = e^{G_C} S + (e^{G_C - G} * K)^T V

No exponent is ever positive: with a decay for each channel P is made of halves of halves (`channel_scores`).

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, K key width, V value width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels._chunk import G_MIN, channel_scores, chunk_length, decay_tile, from_chunks, repeat_heads, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit

DEN_MIN = 1e-6
"""The normaliser is never taken smaller than this."""

LinearState = Tensor | tuple[Tensor, Tensor]


def linear_attention_step(
    state: LinearState, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float
) -> tuple[Tensor, LinearState]:
    """One token, and the law. q, k (B, H, K), v (B, H, V), g None, (B, H) or (B, H, K) -> o (B, H, V), next state."""
    S, z = state if isinstance(state, tuple) else (state, None)
    if g is not None:
        decay = g.clamp(min=G_MIN).exp()
        decay = decay if decay.dim() == 3 else decay[..., None]
        S = S * decay[..., None]
        z = None if z is None else z * decay
    S = S + k[..., None] * v[..., None, :]
    o = torch.einsum("bhkv,bhk->bhv", S, q)
    if z is None:
        return o * scale, S
    z = z + k
    return o / (z * q).sum(-1, keepdim=True).clamp(min=DEN_MIN), (S, z)


def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, state: LinearState
) -> tuple[Tensor, LinearState]:
    """The law over time: (B, T, H, ...) in, o and final state out."""
    out = []
    for t in range(q.shape[1]):
        o, state = linear_attention_step(state, q[:, t], k[:, t], v[:, t], None if g is None else g[:, t], scale)
        out.append(o)
    return torch.stack(out, 1), state


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: LinearState | None, normalize: bool
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Numerator (B, T, H, V), denominator (B, T, H, 1) and final state. g (B, T, H, 1) or (B, T, H, K)."""
    B, T, H, _ = v.shape
    by_channel = g is not None and g.shape[-1] > 1
    C = chunk_length(T)
    C = 1 << (C - 1).bit_length() if by_channel else C
    q, k, v = (to_chunks(x, C) for x in (q, k, v))
    S, z = state if isinstance(state, tuple) else (state, None)
    S, z = (None if x is None else x.flatten(0, 1) for x in (S, z))
    q_in, k_end, kept = q, k, None
    if g is None:
        P = (q @ k.mT).tril()
    else:
        G = to_chunks(g, C).cumsum(2)
        q_in, k_end, kept = q * G.exp(), k * (G[:, :, -1:] - G).exp(), G[:, :, -1].exp()
        P = channel_scores(q, k, G) if by_channel else (q @ k.mT) * decay_tile(G.squeeze(-1))
    num, den = P @ v, P.sum(-1, keepdim=True) if normalize else None
    new_S, new_z = k_end.mT @ v, k_end.sum(2) if normalize else None
    starts, S = _carry(S, new_S, None if kept is None else kept[..., None])
    num = _add_read(num, starts, q_in)
    if den is not None and new_z is not None:
        starts_z, z = _carry(z, new_z, kept)
        den = from_chunks(_add_read(den, [s if s is None else s[..., None] for s in starts_z], q_in), B, T)
        return from_chunks(num, B, T), den, (S.unflatten(0, (B, H)), z.unflatten(0, (B, H)))
    return from_chunks(num, B, T), None, S.unflatten(0, (B, H))


def _carry(start: Tensor | None, new: Tensor, kept: Tensor | None) -> tuple[list[Tensor | None], Tensor]:
    """What each chunk starts from (None: nothing), and the final value of x <- kept * x + new."""
    starts: list[Tensor | None] = []
    for n in range(new.shape[0]):
        starts.append(start)
        carried = start if start is None or kept is None else start * kept[n]
        start = new[n] if carried is None else carried + new[n]
    assert start is not None
    return starts, start


def _add_read(out: Tensor, starts: list[Tensor | None], q_in: Tensor) -> Tensor:
    """`out` plus what each chunk's queries read from the state the chunk starts from."""
    first = int(starts[0] is None)
    read = [s for s in starts if s is not None]
    if not read:
        return out
    return torch.cat(
        [
            out[:first],
            torch.baddbmm(*(x.flatten(0, 1) for x in (out[first:], q_in[first:], torch.stack(read)))).unflatten(
                0, (len(read), -1)
            ),
        ]
    )


@full_precision
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    normalize: bool = False,
    initial_state: LinearState | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, LinearState]:
    """o (B, T, H, V) in q's dtype and the final state.

    q, k (B, T, Hk, K) with H a multiple of Hk; v (B, T, H, V). g None, (H,), (B, T, H) or (B, T, H, K), <= 0, -inf
    allowed. `scale` has no effect with `normalize`. Packed: B = 1, and sequence n is the tokens from `cu_seqlens`[n] to
    [n + 1], (N + 1) integers on the device of v, from 0 to T; states are then (N, ...).
    """
    B, T, H, V = v.shape
    K = q.shape[-1]
    impl = resolve(impl, "linear_attention", triton_unfit(q, k, v, g, heads=(K, V)))
    _check(q, k, v, g, normalize, initial_state, cu_seqlens)
    if impl == "triton":
        return _on_card(q, k, v, g, scale, normalize, initial_state, cu_seqlens)
    if cu_seqlens is not None:
        return _one_by_one(q, k, v, g, initial_state, cu_seqlens, scale=scale, normalize=normalize, impl=impl)
    dtype, acc = q.dtype, accumulator(q, v)
    q, k = (repeat_heads(x.to(acc), H) for x in (q, k))
    v = v.to(acc)
    if g is not None:
        g = g.to(acc).clamp(min=G_MIN)
        g = g.expand(B, T, H) if g.dim() == 1 else g
        g = g[..., None] if g.dim() == 3 else g
    if isinstance(initial_state, tuple):
        initial_state = (initial_state[0].to(acc), initial_state[1].to(acc))
    elif initial_state is not None:
        initial_state = initial_state.to(acc)
    if impl == "reference":
        zero = v.new_zeros(B, H, K, V)
        start = initial_state if initial_state is not None else (zero, zero[..., 0]) if normalize else zero
        o, state = reference(q, k, v, g, scale, start)
        return o.to(dtype), state
    num, den, state = _chunked(q, k, v, g, initial_state, normalize)
    return (num * scale if den is None else num / den.clamp(min=DEN_MIN)).to(dtype), state


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: LinearState | None,
    cu_seqlens: Tensor,
    *,
    normalize: bool,
    **settings: Any,
) -> tuple[Tensor, LinearState]:
    """What packing means: each sequence by itself. An empty one leaves its state as it is."""
    H, K, V = v.shape[2], q.shape[3], v.shape[3]
    zero = v.new_zeros(1, H, K, V, dtype=accumulator(q, v))
    out, ends = [], []
    for n, (first, behind) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        start: Any = (zero, zero[..., 0]) if normalize else zero
        if state is not None:
            start = tuple(x[n : n + 1] for x in state) if isinstance(state, tuple) else state[n : n + 1]
        end = start
        if first < behind:
            part = slice(first, behind)
            g_n = g if g is None or g.dim() == 1 else g[:, part]
            o, end = linear_attention(
                q[:, part], k[:, part], v[:, part], g_n, normalize=normalize, initial_state=start, **settings
            )
            out.append(o)
        ends.append(end)
    o = torch.cat(out, 1) if out else v.new_empty(v.shape, dtype=q.dtype)
    if normalize:
        S, z = zip(*ends, strict=True)
        return o, (torch.cat(S).to(zero.dtype), torch.cat(z).to(zero.dtype))
    return o, torch.cat(ends).to(zero.dtype)


def _on_card(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    normalize: bool,
    state: LinearState | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, LinearState]:
    from kernels._linear_attention import attend  # Triton is not everywhere

    if q.dtype != k.dtype or q.dtype != v.dtype:
        common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(common), k.to(common), v.to(common)
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    S, z = state if isinstance(state, tuple) else (state, None)
    S, z = (None if x is None else x.float() for x in (S, z))
    o, S, z = attend(q, k, v, g, (S, z), 1.0 if normalize else float(scale), normalize, cu_seqlens)
    return o, S if z is None else (S, z)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    normalize: bool,
    state: LinearState | None,
    cu_seqlens: Tensor | None,
) -> None:
    B, T, H, V = v.shape
    _, _, Hk, K = q.shape
    if H % Hk:
        raise ValueError(f"linear_attention: v has {H} heads, q {Hk}: the first should be a multiple of the second")
    check("linear_attention", "q", q, (B, T, Hk, K))
    check("linear_attention", "k", k, (B, T, Hk, K))
    if g is not None:
        check("linear_attention", "g", g, {1: (H,), 3: (B, T, H)}.get(g.dim(), (B, T, H, K)))
    N = B
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.device != v.device:
            raise ValueError(
                "linear_attention: cu_seqlens packs sequences into a batch of 1, and is a line of integers where v is"
            )
    if state is None:
        return
    if isinstance(state, tuple) != normalize:
        raise ValueError(
            "linear_attention: initial_state should be the pair (S, z) with normalize, and S alone without"
        )
    S, z = state if isinstance(state, tuple) else (state, None)
    check("linear_attention", "S of initial_state", S, (N, H, K, V))
    if z is not None:
        check("linear_attention", "z of initial_state", z, (N, H, K))


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `linear_attention` that together use each of its options: Hk < H, K != V and odd, every decay."""
    B, Hk, H, K, V = 2, 2, 4, 5, 7

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    decays = {"none": None, "head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}
    for decay, size in decays.items():
        for normalize in (False, True):
            start = normalize == (decay in ("none", "channel"))
            g = None if size is None else -draw(*size).abs()
            if g is not None and g.dim() > 1:
                g[torch.rand(g.shape, generator=generator) < 0.1] = -1e3
                g[torch.rand(g.shape, generator=generator) < 0.1] = -torch.inf
            q, k = (draw(B, T, Hk, K).exp() if normalize else draw(B, T, Hk, K) for _ in range(2))
            S, z = draw(B, H, K, V), draw(B, H, K).exp()
            state = ((S, z) if normalize else S) if start else None
            settings = {"scale": 0.3, "normalize": normalize, "initial_state": state}
            yield {"q": q, "k": k, "v": draw(B, T, H, V), "g": g, **settings}
