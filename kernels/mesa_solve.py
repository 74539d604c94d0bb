"""Mesa solve: the inverse of a decaying sum of outer products, applied to one vector a token.

    H_t = e^{g_t} H_{t-1} + beta_t k_t k_t^T
    y_t = (H_t + diag(lam))^-1 q_t

State: H (B, H, K, K), fp32 or better, symmetric (of a given one the symmetric part counts). Without decay it is
`ridge_solve` with u = sqrt(beta) k; with it, lam stays while H fades, so that no low-rank change leads from one token's
inverse to the next. The solve is exact: a Cholesky factor a token. 30 steps of conjugate gradients, which stand for it
elsewhere, take half to a third of its time on a CPU (K 64 and 128, fp32) and are 1e-3 off, not 5e-7. Nothing of size
T K^2 is kept: chunks are solved in parts, from the H at their borders, and once more in the backward pass.

Backward, with the cumulative log-decay G inside a chunk and D_tj = e^{G_t - G_j} (j <= t): w_t = (H_t + lam)^-1 dy_t is
the same solve. Then dq = w, dlam = -sum_t w_t y_t, E_t = -(w_t y_t^T + y_t w_t^T) / 2 is the gradient of H_t, and with
X_j = sum_{t >= j} D_tj E_t + e^{G_C - G_j} dH

    dk_j = 2 beta_j X_j k_j      dbeta_j = k_j^T X_j k_j      dG_t = <E_t, H_t> - beta_t dbeta_t
    <E_t, H_t> = -w_t . (q_t - lam y_t)

Not here: a Triton kernel, packed sequences, grouped heads.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, K width of q and k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._chunk import G_MIN, chunk_length, decay_tile, from_chunks, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve

LONGEST = 16
"""Chunk length: making H_t from a chunk's start costs C K^2 a token, as much as its factor at C = K / 3."""

TILE = 1 << 20
"""Numbers of the H_t held at once (or one chunk's, if those are more): larger falls out of a CPU's caches."""


def mesa_solve_step(H: Tensor, q: Tensor, k: Tensor, beta: Tensor, g: Tensor, lam_HK: Tensor) -> tuple[Tensor, Tensor]:
    """One token, and the law. q, k (B, H, K), beta, g (B, H), H (B, H, K, K) -> y (B, H, K), next H."""
    H = H * g.exp()[..., None, None] + beta[..., None, None] * k[..., :, None] * k[..., None, :]
    y, _ = torch.linalg.solve_ex(H + torch.diag_embed(lam_HK), q[..., None])
    return y[..., 0], H


def reference(q: Tensor, k: Tensor, beta: Tensor, g: Tensor, lam_HK: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """The law over time: (B, T, H, ...) in, y and the last H out."""
    out = []
    for t in range(q.shape[1]):
        y, H = mesa_solve_step(H, q[:, t], k[:, t], beta[:, t], g[:, t], lam_HK)
        out.append(y)
    return torch.stack(out, 1), H


class _Chunked(torch.autograd.Function):
    """q, k (N, J, C, K), beta, g (N, J, C, 1), lam (J, 1, K), H before any token (J, K, K) -> y, the last H."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, beta: Tensor, g: Tensor, lam: Tensor, H: Tensor
    ) -> tuple[Tensor, Tensor]:
        G = g.cumsum(2)
        new = (k * beta * (G[:, :, -1:] - G).exp()).mT @ k
        starts, kept = torch.empty_like(new), G[:, :, -1:].exp()
        for n in range(len(new)):
            starts[n] = H
            H = torch.addcmul(new[n], H, kept[n])
        y = _solve(q, k, beta, G, lam, starts)
        ctx.save_for_backward(q, k, beta, G, lam, starts, H, y)
        ctx.set_materialize_grads(False)
        return y, H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dH: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, beta, G, lam, starts, H, y = ctx.saved_tensors
        w = torch.zeros_like(q) if dy is None else _solve(dy, k, beta, G, lam, starts)
        kept, tail = G.exp(), (G[:, :, -1:] - G).exp()
        read = (w * kept).mT @ y
        read = (read + read.mT).mul_(-0.5)
        dH = torch.zeros_like(H) if dH is None else (dH + dH.mT) / 2
        dH_end = torch.empty_like(starts)
        for n in reversed(range(len(read))):
            dH_end[n] = dH
            dH = torch.addcmul(read[n], dH, kept[n, :, -1:])
        D = decay_tile(G.squeeze(-1))
        Xk = (D * (y @ k.mT)).mT @ w
        Xk = Xk.add_((D * (w @ k.mT)).mT @ y).mul_(-0.5).addcmul_(tail, k @ dH_end)
        dbeta = torch.linalg.vecdot(k, Xk).unsqueeze(-1)
        dlam = -w * y
        dG = torch.linalg.vecdot(dlam, -lam).unsqueeze(-1) - torch.linalg.vecdot(w, q).unsqueeze(-1) - beta * dbeta
        ends = torch.cat([starts[1:], H[None]])
        dG[:, :, -1, 0] += (ends * dH_end).sum((-2, -1))
        dg = dG.flip(2).cumsum(2).flip(2)
        return w, 2 * beta * Xk, dbeta, dg, dlam.sum((0, 2)).unsqueeze(1), dH


def _solve(x: Tensor, k: Tensor, beta: Tensor, G: Tensor, lam: Tensor, starts: Tensor) -> Tensor:
    """(H_t + diag(lam))^-1 x_t of every token, from the H at each chunk's start."""
    N, J, C, K = k.shape
    out, step = torch.empty_like(x), max(1, TILE // (J * C * K * K))
    for n in range(0, N, step):
        part = slice(n, n + step)
        outer = (beta[part] * k[part]).unsqueeze(-1) * k[part].unsqueeze(-2)
        M = (decay_tile(G[part].squeeze(-1)) @ outer.flatten(-2)).unflatten(-1, (K, K))
        M.addcmul_(G[part].exp().unsqueeze(-1), starts[part].unsqueeze(2))
        M.diagonal(dim1=-2, dim2=-1).add_(lam)
        factor, _ = torch.linalg.cholesky_ex(M)
        half = torch.linalg.solve_triangular(factor, x[part].unsqueeze(-1), upper=False)
        out[part] = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)
    return out


@full_precision
def mesa_solve(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor,
    lam: Tensor,
    *,
    initial_state: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y (B, T, H, K) in q's dtype, and the last H (B, H, K, K).

    q, k (B, T, H, K); beta >= 0 and g <= 0 (B, T, H), g may be -inf; lam > 0, (H, K).
    """
    B, T, H, K = q.shape
    impl = resolve(impl, "mesa_solve")
    check("mesa_solve", "k", k, (B, T, H, K))
    check("mesa_solve", "beta", beta, (B, T, H))
    check("mesa_solve", "g", g, (B, T, H))
    check("mesa_solve", "lam", lam, (H, K))
    if initial_state is not None:
        check("mesa_solve", "initial_state", initial_state, (B, H, K, K))
    dtype, acc = q.dtype, accumulator(q, k)
    q, k, beta, g, lam = (x.to(acc) for x in (q, k, beta, g, lam))
    g = g.clamp(min=G_MIN)
    start = q.new_zeros(B, H, K, K) if initial_state is None else initial_state.to(acc)
    start = (start + start.mT) / 2
    if impl == "reference":
        y, end = reference(q, k, beta, g, lam, start)
        return y.to(dtype), end
    C = chunk_length(T, LONGEST)
    cut = [to_chunks(x, C) for x in (q, k, beta[..., None], g[..., None])]
    y, end = _Chunked.apply(*cut, lam.repeat(B, 1)[:, None], start.flatten(0, 1))
    return from_chunks(y, B, T).to(dtype), end.unflatten(0, (B, H))


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `mesa_solve`: an odd K, beta 0 and 1, no decay, mild and hard decay, with a state and without."""
    B, H, K = 2, 3, 5

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    for decay in ("none", "mild", "hard"):
        q, k = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
        beta = (draw(B, T, H).sigmoid() * 1.5 - 0.25).clamp(0, 1)
        g = -draw(B, T, H).abs() * {"none": 0.0, "mild": 0.1, "hard": 1.0}[decay]
        if decay == "hard":
            g[torch.rand(g.shape, generator=generator) < 0.1] = -1e3
            g[torch.rand(g.shape, generator=generator) < 0.1] = -torch.inf
        root = draw(B, H, K, K)
        start = None if decay == "none" else root @ root.mT / K
        yield {"q": q, "k": k, "beta": beta, "g": g, "lam": 0.25 + draw(H, K).exp(), "initial_state": start}
