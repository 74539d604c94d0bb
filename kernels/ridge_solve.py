"""Ridge solve: the inverse of a growing sum of outer products, applied to one vector a token.

    M_t     = diag(lam) + M_0 + sum_{i <= t} u_i u_i^T
    alpha_t = M_t^-1 x_t,    scaled to length 1 with `unit`

State: M_0 + sum u u^T, without lam: (B, H, K, K), fp32 or better, symmetric (of a given one the symmetric part counts).

The law carries A_t = M_t^-1 and changes it by Sherman and Morrison, one token at a time. Chunked: M at a chunk's border
is a prefix sum, so chunks do not wait for each other. With U, X (C, K) of one chunk and A at its border

    P = U A    R = chol(I + P U^T)    Y = R^-1 P    alpha = X A - tril(X Y^T) Y    A' = A - Y^T Y

because the first t rows of R belong to the first t tokens. At every eighth border M is inverted afresh, from sums in
fp64 (16384 nearly equal u of 32 in fp32: alpha off by 7e-6, not 2e-5); the seven borders between follow from it.

On a card the law itself runs, in many stretches at once (`_ridge_solve_triton.py`).

Backward: y_t = M_t^-1 dalpha_t is the same solve; then dx = y, dlam = -sum_t y_t alpha_t, and with
N_i = sum_{t >= i} (y_t alpha_t^T + alpha_t y_t^T), two linear attentions in reversed time, du_i = -N_i u_i.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, K width of u and x.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._chunk import chunk_length, from_chunks, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit

AFRESH = 8
"""Chunks from one inversion to the next: at 16 no loss was measured (T 16384, K 64)."""

WIDEST = 128
"""Numbers in a head, at most, in the Triton kernels: a wider inverse does not fit the registers of a program."""

SHORTEST = 1e-30
"""A vector is never divided by less than this: a zero x gives a zero alpha."""


def ridge_solve_step(A: Tensor, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One token, and the law. A (B, H, K, K) the inverse so far, u, x (B, H, K) -> alpha (B, H, K), next inverse."""
    p = torch.einsum("bhij,bhj->bhi", A, u)
    A = A - p[..., None] * (p / (1 + (u * p).sum(-1, keepdim=True)))[..., None, :]
    return torch.einsum("bhij,bhj->bhi", A, x), A


def reference(u: Tensor, x: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """The law over time: u, x (B, T, H, K), M (B, H, K, K) before any token -> alpha, sum of u u^T."""
    A, total, out = _inverse(M), torch.zeros_like(M), []
    for t in range(u.shape[1]):
        alpha, A = ridge_solve_step(A, u[:, t], x[:, t])
        total = total + u[:, t, :, :, None] * u[:, t, :, None]
        out.append(alpha)
    return torch.stack(out, 1), total


def _inverse(M: Tensor) -> Tensor:
    """M^-1 of symmetric positive definite M, symmetric to the bit; nothing waits for the device to check M."""
    factor, _ = torch.linalg.cholesky_ex(M)
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)
    root = torch.linalg.solve_triangular(factor, identity, upper=False)
    return root.mT @ root


class _Chunked(torch.autograd.Function):
    """u, x (N, J, C, K), M (J, K, K) before any token -> alpha (N, J, C, K), sum of u u^T (J, K, K)."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, x: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.stack([part.sum(0) for part in (u.mT @ u).split(AFRESH)]).double().cumsum(0)
        A, Y = _factors(u, M, sums)
        alpha = _solve(x, A, Y)
        ctx.save_for_backward(u, alpha, A, Y)
        ctx.set_materialize_grads(False)
        return alpha, sums[-1].to(u.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dalpha: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        u, alpha, A, Y = ctx.saved_tensors
        if dalpha is None:
            return None if dtotal is None else u @ (dtotal + dtotal.mT), None, None
        y = _solve(dalpha, A, Y)
        part = y.mT @ alpha
        from_here = (part + part.mT).flip(0).cumsum(0).flip(0)
        later = torch.cat([from_here[1:], torch.zeros_like(from_here[:1])])
        if dtotal is not None:
            later = later - (dtotal + dtotal.mT)
        du = (u @ later).add_((u @ alpha.mT).triu_() @ y).add_((u @ y.mT).triu_() @ alpha).neg_()
        return du, y, -0.5 * from_here[0]


def _factors(u: Tensor, M: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """A (N, J, K, K) at each chunk's start, and Y (N, J, C, K). `sums`: of u u^T to each eighth chunk's end."""
    N, J, C, K = u.shape
    borders = M.double().repeat(len(sums), 1, 1, 1)
    borders[1:] += sums[:-1]
    A_now = _inverse(borders).to(u.dtype)
    A, Y = u.new_empty(N, J, K, K), torch.empty_like(u)
    identity = torch.eye(C, dtype=u.dtype, device=u.device)
    for i in range(min(AFRESH, N)):  # chunk i behind each inversion, all at once
        U = u[i::AFRESH]
        A_now = A_now[: U.shape[0]]
        P = U @ A_now
        R, _ = torch.linalg.cholesky_ex((P @ U.mT).add_(identity))
        Y_now = torch.linalg.solve_triangular(R, P, upper=False)
        A[i::AFRESH], Y[i::AFRESH] = A_now, Y_now
        if i + 1 < AFRESH:
            A_now = A_now - Y_now.mT @ Y_now
    return A, Y


def _solve(x: Tensor, A: Tensor, Y: Tensor) -> Tensor:
    """M_t^-1 x_t of every token, from the factors of its chunk."""
    return (x @ A).sub_((x @ Y.mT).tril_() @ Y)


@full_precision
def ridge_solve(
    u: Tensor,
    x: Tensor,
    lam: float | Tensor,
    *,
    unit: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """alpha (B, T, H, K) in x's dtype and the final state (B, H, K, K).

    u, x (B, T, H, K). lam > 0: a number, (H,) or (H, K). Packed: B = 1, and sequence n is the tokens from
    `cu_seqlens`[n] to before [n + 1], integers on the device of x; a state each.
    """
    _check(u, x, lam, initial_state, cu_seqlens)
    B, T, H, K = x.shape
    impl = resolve(impl, "ridge_solve", triton_unfit(u, x, initial_state, heads=(K,), widest=WIDEST))
    if cu_seqlens is not None and impl != "triton":
        return _one_by_one(u, x, lam, initial_state, cu_seqlens, unit=unit, impl=impl)
    dtype, acc, N = x.dtype, accumulator(u, x), B if cu_seqlens is None else len(cu_seqlens) - 1
    start = x.new_zeros(N, H, K, K, dtype=acc) if initial_state is None else initial_state.to(acc)
    start = (start + start.mT) / 2
    if isinstance(lam, Tensor):
        M = start + torch.diag_embed((lam.to(acc) if lam.dim() == 2 else lam.to(acc)[:, None]).expand(H, K))
    else:
        M = start + lam * torch.eye(K, dtype=acc, device=x.device)
    if impl == "triton":
        from kernels import _ridge_solve  # Triton is not everywhere

        alpha, total = _ridge_solve.ridge_solve(u, x, M, unit, cu_seqlens)
        return alpha.to(dtype), start + total
    u, x = u.to(acc), x.to(acc)
    if impl == "reference":
        alpha, total = reference(u, x, M)
    else:
        C = chunk_length(T)
        alpha, total = _Chunked.apply(to_chunks(u, C), to_chunks(x, C), M.flatten(0, 1))
        alpha, total = from_chunks(alpha, B, T), total.unflatten(0, (B, H))
    if unit:
        alpha = F.normalize(alpha, dim=-1, eps=SHORTEST)
    return alpha.to(dtype), start + total


def _one_by_one(
    u: Tensor, x: Tensor, lam: float | Tensor, state: Tensor | None, cu_seqlens: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """What packing means: each sequence by itself. An empty one leaves of its state what counts: the symmetric part."""
    _, _, H, K = x.shape
    out, ends = [x[:, :0]], []
    for n, (first, behind) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        end = x.new_zeros(1, H, K, K, dtype=accumulator(u, x)) if state is None else state[n : n + 1]
        if first < behind:
            part = slice(first, behind)
            alpha, end = ridge_solve(u[:, part], x[:, part], lam, initial_state=end, **settings)
            out.append(alpha)
        ends.append((end + end.mT) / 2)
    return torch.cat(out, 1), torch.cat(ends)


def _check(u: Tensor, x: Tensor, lam: float | Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    B, _, H, K = x.shape
    check("ridge_solve", "u", u, tuple(x.shape))
    if isinstance(lam, Tensor):
        check("ridge_solve", "lam", lam, (H,) if lam.dim() == 1 else (H, K))
    elif not lam > 0:
        raise ValueError(f"ridge_solve: lam={lam!r} should be above 0: without it M_t has no inverse before token K")
    N = B
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.device != x.device:
            raise ValueError(
                "ridge_solve: cu_seqlens packs sequences into a batch of 1; it is a line of integers on the device of x"
            )
    if initial_state is not None:
        check("ridge_solve", "initial_state", initial_state, (N, H, K, K))


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `ridge_solve` that use each of its options: every kind of lam, an odd K, equal u, a state."""
    B, H, K = 2, 3, 5

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    lams = {"number": 0.5, "head": draw(H).exp(), "channel": draw(H, K).exp()}
    for i, lam in enumerate(lams.values()):
        for unit in (False, True):
            u = F.normalize(draw(B, T, H, K), dim=-1) * K**-0.5
            if i == 2:
                u[:, 1::2] = u[:, :1]
            root = draw(B, H, K, K)
            start = root @ root.mT / K if unit == (i != 1) else None
            yield {"u": u, "x": draw(B, T, H, K), "lam": lam, "unit": unit, "initial_state": start}
