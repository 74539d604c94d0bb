"""Kimi delta attention: the delta rule with a decay for each key channel.

    S   = diag(e^{g_t}) S_{t-1}
    u_t = beta_t (v_t - S^T k_t)
    S_t = S + k_t u_t^T
    o_t = scale * S_t^T q_t

State: (B, H, K, V), fp32 or better. With equal g in all channels it is `delta_rule` with b = a = k.

Chunked, with G the cumulative log-decay inside a chunk, M_ij = sum_c k_ic k_jc e^{G_ic - G_jc} (j < i), P alike of q
and k (j <= i), and L = beta * M:

    U = (I + L)^-1 beta (V - (e^G * K) S)      O = (e^G * Q) S + P U      S' = e^{G_C} * S + (e^{G_C - G} * K)^T U

No exponent is ever positive (`channel_scores`), and gradients are autograd's. Not here: a Triton kernel, packed
sequences, grouped heads.

Letters: B batch, T time, H heads, N chunks, C chunk length, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels._chunk import G_MIN, channel_scores, chunk_length, from_chunks, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve


def kda_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token, and the law. q, k, g (B, H, K), v (B, H, V), beta (B, H) -> o (B, H, V), next state."""
    state = state * g.exp()[..., None]
    u = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * u[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q) * scale, state


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The law over time: (B, T, H, ...) in, o and final state out."""
    out = []
    for t in range(q.shape[1]):
        o, state = kda_step(state, q[:, t], k[:, t], v[:, t], beta[:, t], g[:, t], scale)
        out.append(o)
    return torch.stack(out, 1), state


def _chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, S: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `reference` gives for scale 1. Without S the first chunk reads none."""
    B, T, H, V = v.shape
    C = 1 << (chunk_length(T) - 1).bit_length()
    q, k, v, beta, g = (to_chunks(x, C) for x in (q, k, v, beta[..., None], g))
    G = g.cumsum(2)
    kept, k_in, k_end = G.exp(), k * G.exp(), k * (G[:, :, -1:] - G).exp()
    M, P = channel_scores(torch.stack([k, q]), k, G)
    U, W = torch.linalg.solve_triangular(  # reads L below its diagonal alone
        beta * M, beta * torch.cat([v, k_in], -1), upper=False, unitriangular=True
    ).split([V, k.shape[-1]], -1)
    q_in, out = q * kept, []
    for n in range(q.shape[0]):
        if S is None:
            out.append(P[n] @ U[n])
            S = k_end[n].mT @ U[n]
            continue
        u = torch.baddbmm(U[n], W[n], S, alpha=-1)
        out.append(torch.baddbmm(P[n] @ u, q_in[n], S))
        S = torch.baddbmm(S * kept[n, :, -1, :, None], k_end[n].mT, u)
    assert S is not None
    return from_chunks(torch.stack(out), B, T), S.unflatten(0, (B, H))


@full_precision
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """o (B, T, H, V) in q's dtype, and the final state (B, H, K, V).

    q, k (B, T, H, K), v (B, T, H, V), beta (B, T, H), g (B, T, H, K) <= 0, -inf allowed.
    """
    (B, T, H, V), K = v.shape, q.shape[-1]
    impl = resolve(impl, "kda")
    for name, x in (("q", q), ("k", k), ("g", g)):
        check("kda", name, x, (B, T, H, K))
    check("kda", "beta", beta, (B, T, H))
    if initial_state is not None:
        check("kda", "initial_state", initial_state, (B, H, K, V))
    dtype, acc = q.dtype, accumulator(q, v)
    q, k, v, beta, g = (x.to(acc) for x in (q, k, v, beta, g))
    g = g.clamp(min=G_MIN)
    start = None if initial_state is None else initial_state.to(acc)
    if impl == "reference":
        o, S = reference(q, k, v, beta, g, scale, v.new_zeros(B, H, K, V) if start is None else start)
    else:
        o, S = _chunked(q * scale, k, v, beta, g, None if start is None else start.flatten(0, 1))
    return o.to(dtype), S


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `kda`: K != V and odd, beta 0 and 1, mild and hard decay, with a state and without."""
    B, H, K, V = 2, 3, 5, 7

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    for hard in (False, True):
        for start in (False, True):
            k = torch.nn.functional.normalize(draw(B, T, H, K), dim=-1)
            beta = (draw(B, T, H).sigmoid() * 1.5 - 0.25).clamp(0, 1)
            g = -draw(B, T, H, K).abs() * (1 if hard else 0.1)
            if hard:
                g[torch.rand(g.shape, generator=generator) < 0.1] = -1e3
                g[torch.rand(g.shape, generator=generator) < 0.1] = -torch.inf
            inputs = {"q": draw(B, T, H, K), "k": k, "v": draw(B, T, H, V), "beta": beta, "g": g}
            yield {**inputs, "scale": 0.3, "initial_state": draw(B, H, K, V) if start else None}
