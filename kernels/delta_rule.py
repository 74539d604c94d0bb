"""The delta rule: a key-value matrix that first erases what a key reads, then writes, and may forget.

    S   = e^{g_t} S_{t-1}
    u_t = beta_t (v_t - S^T a_t)          the committed residual
    S_t = S + b_t u_t^T
    o_t = scale * S_t^T q_t

`a` erases, `b` writes (b = a: DeltaNet and its kin). State: (B, H, K, V), fp32 or better.

Chunked, with G the cumulative log-decay inside a chunk, D_ij = e^{G_i - G_j} (j <= i), Ga = e^G, B^ = e^{G_C - G} b:

    M0 = stril(D * A B^T)    P = tril(D * Q B^T)    L = beta * M0    U = (I + L)^-1 beta (V - Ga * A S)
    O = Ga * (Q S) + P U     S' = e^{G_C} S + B^^T U

The system is solved, never inverted by powers of L: with equal keys and beta = 1 those reach 1e18.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, K key width, V value width; x stacks a over q.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._chunk import G_MIN, chunk_length, decay_tile, from_chunks, repeat_heads, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit


def delta_rule_step(
    state: Tensor,
    q: Tensor,
    a: Tensor,
    b: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token, and the law. q, a, b (B, H, K), v (B, H, V), beta, g (B, H) -> o, next state, u (B, H, V)."""
    if g is not None:
        state = state * g.clamp(min=G_MIN).exp()[..., None, None]
    u = v - torch.einsum("bhkv,bhk->bhv", state, a)
    if beta is not None:
        u = u * beta[..., None]
    state = state + (a if b is None else b)[..., None] * u[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q) * scale, state, u


def reference(
    q: Tensor,
    a: Tensor,
    b: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The law over time: (B, T, H, ...) in, o, final state and u out."""
    out, committed = [], []
    for t in range(q.shape[1]):
        now = [None if x is None else x[:, t] for x in (b, beta, g)]
        o, state, u = delta_rule_step(state, q[:, t], a[:, t], now[0], v[:, t], now[1], now[2], scale)
        out.append(o)
        committed.append(u)
    return torch.stack(out, 1), state, torch.stack(committed, 1)


class _Chunked(torch.autograd.Function):
    """All chunks at once, but for the short serial pass of the state. Everything is (N, J, C, ...) in one dtype.

    Without an initial state the first chunk reads none: `first` is then 1, the first chunk that does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        a: Tensor,
        b: Tensor | None,
        v: Tensor,
        beta: Tensor | None,
        g: Tensor | None,
        S0: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        C, first = q.shape[2], int(S0 is None)
        write = a if b is None else b
        x = torch.cat([a, q * scale], 2)
        M = x @ write.mT
        D, Ga, tail = _decays(g)
        _mask_scores(M, D)
        L = M[:, :, :C] if beta is None else M[:, :, :C] * beta
        write_end = write if tail is None else write * tail
        rhs = v if beta is None else v * beta
        U = torch.linalg.solve_triangular(L, rhs, upper=False, unitriangular=True)
        x_in = W = x[first:]
        if x_in.shape[0]:
            x_in = x_in if Ga is None else x_in * Ga[first:].repeat(1, 1, 2, 1)
            W = x_in[:, :, :C] if beta is None else x_in[:, :, :C] * beta[first:]
            W = torch.linalg.solve_triangular(L[first:], W, upper=False, unitriangular=True)
        S, end = S0, []
        for n in range(q.shape[0]):
            if S is not None:
                U[n].baddbmm_(W[n - first], S, alpha=-1)
                kept = S if Ga is None else S * Ga[n, :, -1:]
                S = torch.baddbmm(kept, write_end[n].mT, U[n])
            else:
                S = write_end[n].mT @ U[n]
            end.append(S)
        starts = torch.stack(([] if S0 is None else [S0]) + end[:-1]) if x_in.shape[0] else None
        out = M[:, :, C:] @ U
        if starts is not None:
            out[first:] += x_in[:, :, C:] @ starts
        ctx.save_for_backward(x, b, v, beta, M, L, D, Ga, tail, U, W, x_in, starts, end[-1])
        ctx.scale, ctx.first = scale, first
        ctx.set_materialize_grads(False)
        return out, end[-1], U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor | None, dS: Tensor | None, dUx: Tensor | None) -> tuple[Tensor | None, ...]:
        x, b, v, beta, M, L, D, Ga, tail, U, W, x_in, starts, S_end = ctx.saved_tensors
        C, first = v.shape[2], ctx.first
        a = x[:, :, :C]
        write = a if b is None else b
        dO = torch.zeros_like(v) if dO is None else dO
        dU = M[:, :, C:].mT @ dO
        if dUx is not None:
            dU = dU + dUx
        write_end = write if tail is None else write * tail
        dS_end, dS = _reverse_pass(dU, dO, dS, x_in, W, write_end, Ga, first)
        R = torch.linalg.solve_triangular(L.mT, dU, upper=True, unitriangular=True)
        Rb = R if beta is None else R * beta
        dbeta = None
        if beta is not None:  # R . e, never R . u / beta: beta may be 0
            e = v - M[:, :, :C] @ U
            if starts is not None:
                e[first:] -= x_in[:, :, :C] @ starts
            dbeta = torch.linalg.vecdot(R, e).unsqueeze(-1)
        dx_out = torch.cat([-Rb, dO], 2)
        dM = dx_out @ U.mT
        _mask_scores(dM, D)
        dx, dwrite = dM @ write, dM.mT @ x
        if starts is not None:
            into = dx_out[first:] if Ga is None else dx_out[first:] * Ga[first:].repeat(1, 1, 2, 1)
            dx[first:] += into @ starts.mT
        for n, dS_n in enumerate(dS_end):
            if dS_n is not None:
                part = U[n] @ dS_n.mT
                dwrite[n] += part if tail is None else part * tail[n]
        dg = None if Ga is None else _decay_grad(x, dx, write, dwrite, starts, S_end, dS_end, first)
        da, dq = dx[:, :, :C], dx[:, :, C:] * ctx.scale
        if b is None:
            return dq, da + dwrite, None, Rb, dbeta, dg, dS, None
        return dq, da, dwrite, Rb, dbeta, dg, dS, None


def _reverse_pass(
    dU: Tensor,
    dO: Tensor,
    dS: Tensor | None,
    x_in: Tensor,
    W: Tensor,
    write_end: Tensor,
    Ga: Tensor | None,
    first: int,
) -> tuple[list[Tensor | None], Tensor | None]:
    """The state's gradient at each chunk's end (None: nothing reads it) and at the start; adds its part to dU."""
    N, _, C, _ = dU.shape
    dS_end: list[Tensor | None] = [None] * N
    for n in reversed(range(N)):
        dS_end[n] = dS
        if dS is not None:
            dU[n].baddbmm_(write_end[n], dS)
        if n < first:
            return dS_end, None
        before = torch.baddbmm(x_in[n - first, :, C:].mT @ dO[n], W[n - first].mT, dU[n], alpha=-1)
        if dS is not None:
            before += dS if Ga is None else dS * Ga[n, :, -1:]
        dS = before
    return dS_end, dS


def _decays(g: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """From g (N, J, C, 1): the tile D (N, J, C, C), e^G and e^{G_C - G} (N, J, C, 1); None without decay."""
    if g is None:
        return None, None, None
    G = g.cumsum(2)
    return decay_tile(G.squeeze(-1)), G.exp(), (G[:, :, -1:] - G).exp()


def _mask_scores(M: Tensor, D: Tensor | None) -> None:
    """In place: the first C rows of M (those of a) strictly lower triangular, the next (of q) lower; both * D."""
    N, J, _, C = M.shape
    halves = M.view(N, J, 2, C, C)
    if D is None:
        keep = torch.ones(2, C, C, dtype=M.dtype, device=M.device)
        keep[0].tril_(-1)
        keep[1].tril_()
        halves.mul_(keep)
    else:
        halves.mul_(D.unsqueeze(2))
        halves[:, :, 0].diagonal(dim1=-2, dim2=-1).zero_()


def _decay_grad(
    x: Tensor,
    dx: Tensor,
    write: Tensor,
    dwrite: Tensor,
    starts: Tensor | None,
    S_end: Tensor,
    dS_end: list[Tensor | None],
    first: int,
) -> Tensor:
    """dg from dG_i = q.dq + a.da - b.db, dG_C += <S_C, dS_C>. Exact only with values that were not rounded to bf16."""
    N, J, C, _ = write.shape
    dG = torch.linalg.vecdot(x, dx).view(N, J, 2, C).sum(2) - torch.linalg.vecdot(write, dwrite)
    for n, dS_n in enumerate(dS_end):
        if dS_n is not None:
            end = S_end if n == N - 1 else starts[n + 1 - first]  # type: ignore[index]
            dG[n, :, -1] += (end * dS_n).sum((-2, -1))
    return dG.flip(2).cumsum(2).flip(2).unsqueeze(-1)


@full_precision
def delta_rule(
    q: Tensor,
    a: Tensor,
    b: Tensor | None,
    v: Tensor,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    *,
    scale: float,
    residual: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o (B, T, H, V) in q's dtype, the final state (B, H, K, V), and the residual if asked for.

    q, a, b (B, T, Hk, K) with H a multiple of Hk; b None: b = a. v (B, T, H, V). beta, g (B, T, H); None: 1 and 0.
    g <= 0, -inf allowed. `residual`: "norm" gives |u|_2 (B, T, H), not differentiable; "full" gives u itself. Packed:
    B = 1, and sequence n is the tokens from `cu_seqlens`[n] to before [n + 1], integers on v's device; a state each.
    """
    B, T, H, V = v.shape
    _check(q, a, b, v, beta, g, residual, initial_state, cu_seqlens)
    heads = (q.shape[-1], V)
    impl = resolve(impl, "delta_rule", triton_unfit(q, a, b, v, beta, g, initial_state, heads=heads))
    if impl == "triton":
        from kernels import _delta_rule  # Triton is not everywhere

        o, S, extra = _delta_rule.delta_rule(q, a, b, v, beta, g, initial_state, scale, residual, cu_seqlens)
        return o.to(q.dtype), S, extra
    if cu_seqlens is not None:
        inputs = (q, a, b, v, beta, g)
        return _one_by_one(inputs, initial_state, cu_seqlens, residual=residual, scale=scale, impl=impl)
    dtype, acc = q.dtype, accumulator(q, v)
    q, a = (repeat_heads(x.to(acc), H) for x in (q, a))
    b = None if b is None else repeat_heads(b.to(acc), H)
    v = v.to(acc)
    beta = None if beta is None else beta.to(acc)
    g = None if g is None else g.to(acc).clamp(min=G_MIN)
    S0 = None if initial_state is None else initial_state.to(acc)
    if impl == "reference":
        zero = v.new_zeros(B, H, q.shape[-1], V) if S0 is None else S0
        o, S, u = reference(q, a, b, v, beta, g, scale, zero)
    else:
        C = chunk_length(T)
        cut = [None if x is None else to_chunks(x, C) for x in (q, a, b, v)]
        gates = [None if x is None else to_chunks(x.unsqueeze(-1), C) for x in (beta, g)]
        flat = None if S0 is None else S0.flatten(0, 1)
        o, S, u = _Chunked.apply(*cut, *gates, flat, scale)
        o, u, S = from_chunks(o, B, T), from_chunks(u, B, T), S.unflatten(0, (B, H))
    if residual == "norm":
        return o.to(dtype), S, torch.linalg.vector_norm(u.detach(), dim=-1)
    return o.to(dtype), S, (u if residual == "full" else None)


def _one_by_one(
    inputs: tuple[Tensor | None, ...],
    state: Tensor | None,
    cu_seqlens: Tensor,
    *,
    residual: str | None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What packing means: each sequence by itself. An empty one leaves its state as it is."""
    q, v = inputs[0], inputs[3]
    assert q is not None
    assert v is not None
    _, _, H, V = v.shape
    acc = accumulator(q, v)
    out, ends, extras = [v.new_empty(1, 0, H, V, dtype=q.dtype)], [], [v.new_empty(1, 0, H, V, dtype=acc)]
    if residual == "norm":
        extras = [extras[0][..., 0]]
    for n, (first, behind) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        end = v.new_zeros(1, H, q.shape[-1], V, dtype=acc) if state is None else state[n : n + 1].to(acc)
        if first < behind:
            part = [None if x is None else x[:, first:behind] for x in inputs]
            o, end, extra = delta_rule(*part, residual=residual, initial_state=end, **settings)  # type: ignore[arg-type]
            out.append(o)
            extras += [] if extra is None else [extra]
        ends.append(end)
    return torch.cat(out, 1), torch.cat(ends), None if residual is None else torch.cat(extras, 1)


def _check(
    q: Tensor,
    a: Tensor,
    b: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    residual: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    B, T, H, V = v.shape
    _, _, Hk, K = q.shape
    if H % Hk:
        raise ValueError(f"delta_rule: v has {H} heads, q {Hk}: the first should be a multiple of the second")
    check("delta_rule", "q", q, (B, T, Hk, K))
    for name, x in (("a", a), ("b", b)):
        if x is not None:
            check("delta_rule", name, x, (B, T, Hk, K))
    for name, x in (("beta", beta), ("g", g)):
        if x is not None:
            check("delta_rule", name, x, (B, T, H))
    N = B
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.device != v.device:
            raise ValueError(
                "delta_rule: cu_seqlens packs sequences into a batch of 1; it is a line of integers on the device of v"
            )
    if state is not None:
        check("delta_rule", "initial_state", state, (N, H, K, V))
    if residual not in (None, "norm", "full"):
        raise ValueError(f"delta_rule: residual={residual!r} should be None, 'norm' or 'full'")


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `delta_rule` that use each of its options: Hk < H, K != V and odd, beta 0 and 1, hard decay."""
    B, H, K, V = 2, 4, 5, 7

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    def unit(*size: int) -> Tensor:
        return torch.nn.functional.normalize(draw(*size), dim=-1)

    for gated in (False, True):
        for apart in (False, True):
            for start in (False, True):
                Hk = H if start == apart else H // 2
                beta = (draw(B, T, H).sigmoid() * 1.5 - 0.25).clamp(0, 1) if gated or start else None
                g = -draw(B, T, H).abs() if gated else None
                if g is not None and start:
                    g[torch.rand(g.shape, generator=generator) < 0.1] = -1e3
                    g[torch.rand(g.shape, generator=generator) < 0.1] = -torch.inf
                a, b = unit(B, T, Hk, K), unit(B, T, Hk, K) if apart else None
                inputs = {"q": draw(B, T, Hk, K), "a": a, "b": b, "v": draw(B, T, H, V), "beta": beta, "g": g}
                state = draw(B, H, K, V) if start else None
                residual = ("full", "norm", None)[(gated + apart + start) % 3]
                yield {**inputs, "scale": 0.3, "residual": residual, "initial_state": state}
