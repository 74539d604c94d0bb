"""Back through log-linear attention: the launches, and what a gradient of the last state adds.

Readers give to the blocks that they read, blocks to their halves, and each chunk's share of that to its tokens. In all
6 + log2(T / C) launches, one more for long sequences; the last state's gradient goes through the same equations in
torch, of the last chunk and of one block for each bit of its index: training seldom asks for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels import _log_linear_back_triton as device
from kernels import _log_linear_tree_triton as tree
from kernels._chunk import G_MIN, decay_tile, repeat_heads
from kernels._launch import launch
from kernels._log_linear_call import BITS, DEPTH, PART, Call, Saved


class _Back(NamedTuple):
    """The names are those of `_log_linear_attention_triton.py`."""

    dlam: Tensor
    """Of each level that there is, the last ones apart."""
    dbeta: Tensor | None
    dE: Tensor
    EL: Tensor
    dq_in: Tensor
    dX: Tensor
    merged: Tensor | None
    """Parts of <dH, Phi_r H_l> of each block, where Phi is a number."""
    crossing: Tensor | None
    """For each bit and chunk: the sum of lam dlam of the bits above. Where Phi is a number."""


def backward(call: Call, saved: Saved, do: Tensor, dS: Tensor | None) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dg, dlam, dbeta."""
    back = _read(call, saved, do)
    last = [] if dS is None else _through_end(call, saved, back, dS)
    if call.beta is None:
        for level in reversed(range(0, call.n_bits - 1, DEPTH)):
            call.join_numbers(tree.spread_numbers, level, (saved.X, back.dX, saved.phi, back.merged))
    else:
        columns = triton.cdiv(call.width, call.size.V) + triton.cdiv(call.q.shape[-1], call.size.V)
        for level in reversed(range(1, call.n_bits)):
            call.join(tree.spread, level, columns, (saved.X, back.dX))
    dq, dk, dv, dg = _tokens(call, saved, back, do)
    t = (call.n_chunks - 1) * call.size.C
    for x, added in zip((dk, dv, dg, back.dbeta), last, strict=False):
        assert x is not None
        x[:, t:] += added
    return dq, dk, dv, dg, _at_most(back.dlam, call.lam.shape[-1]), back.dbeta


def _read(call: Call, saved: Saved, do: Tensor) -> _Back:
    """Back through what chunks read: to their tokens, and to the blocks that they read."""
    q, k, v, lam, beta, size = call.q, call.k, call.v, call.lam, call.beta, call.size
    (B, T, H, V), K, C, bits, log_C = v.shape, q.shape[-1], size.C, call.n_bits, call.log_C
    dlam = call.empty(B, T, H, log_C + 1 + bits)
    dE, EL, dq_in = (call.in_chunks(C, columns, half=True) for columns in (C, C, K))
    dbeta = reach = crossing = merged = None
    if beta is None:
        reach, crossing = call.in_chunks(BITS), call.empty(B, H, bits, call.n_chunks)
        merged = call.in_blocks(triton.cdiv(K * V, PART))
        Qs = Ps = do  # what is not read is still compiled
    else:
        dbeta = call.empty(B, T, H)
        Qs, Ps = (call.empty(B, bits, call.n_chunks // 2, H, C, K, half=True) for _ in range(2))
    shape = (call.scale, *call.heads, lam.shape[-1], bits)
    args: tuple[Any, ...] = (q, k, v, do, lam, beta, saved.G, saved.A, dlam, dbeta, dE, EL, *shape)
    call.launch(device.within, call.n_chunks, (*args, *call.strides(q, k, v, do)), size.back_warps, LOG_C=log_C)
    args = (q, do, lam, beta, saved.G, saved.q_in, saved.X, saved.phi, dlam, dq_in, Qs, Ps, reach, crossing, *shape)
    args += call.strides(q, do)
    call.launch(device.reads, call.n_chunks, args, size.back_warps, LOG_C=log_C, BITS=BITS)
    dX = call.in_blocks(K, call.width, half=True)
    _gather(call, (q, do, lam, saved.G, Qs, Ps, reach), dX, shape, call.strides(q, do))
    return _Back(dlam, dbeta, dE, EL, dq_in, dX, merged, crossing)


def _gather(
    call: Call, given: tuple[Tensor | None, ...], dX: Tensor, shape: tuple[Any, ...], strides: tuple[int, ...]
) -> None:
    """dX of the blocks that are read, and zero for the last chunk, which is not."""
    (B, _, H, V), K, bits, size, N = call.v.shape, call.q.shape[-1], call.n_bits, call.size, call.n_chunks
    dX[:, -1].zero_()
    groups, big = triton.cdiv(N, 1 << size.span), max(bits - size.span - 1, 0)
    pieces = call.empty(B, big, groups, H, K, call.width) if big else dX
    columns = triton.cdiv(V, size.V) + (0 if call.beta is None else triton.cdiv(K, size.V))
    more = {"LOG_C": call.log_C, "BITS": BITS, "ERASE": call.beta is not None, "LOG_S": size.span}
    args = (*given, dX, pieces, *shape, groups, *strides)
    call.launch(tree.gather, bits * groups * columns, args, **more)
    if big:
        n_blocks, numbers = triton.cdiv(groups, 4), K * call.width
        parts = {"size": numbers, "BLOCK": PART, "LOG_S": size.span}
        programs = B * H * big * n_blocks * triton.cdiv(numbers, PART)
        launch(tree.add_up, programs, (pieces, dX, N, H, bits, groups, n_blocks), parts, num_warps=4)


def _tokens(call: Call, saved: Saved, back: _Back, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg; what dbeta lacks is added to it."""
    q, k, v, beta, C, size = call.q, call.k, call.v, call.beta, call.size.C, call.size
    (B, T, H, V), (Hk, K) = v.shape, q.shape[2:]
    dB = Nk = None
    Z = back.dE
    if beta is not None:
        dB, Nk, Z = (call.in_chunks(C, columns, half=True) for columns in (K, C, C))
        args: tuple[Any, ...] = (k, saved.G, saved.Ti, saved.P, saved.UW, back.dE, back.dq_in, back.dX, dB, Nk, Z)
        call.launch(device.systems, call.n_chunks, (*args, *call.heads, *call.strides(k)))
    dq, dk = (call.empty(B, T, H, K, half=Hk == H) for _ in range(2))
    dv, dg = call.empty(B, T, H, V, half=True), call.empty(B, T, H)
    args = (q, k, v, do, beta, call.g, saved.G, saved.Ti, saved.P, back.EL, back.dq_in, saved.X, back.dX, dB, Nk, Z)
    args += (back.merged, back.crossing, dq, dk, dv, back.dbeta, dg, call.scale, *call.heads)
    args += (triton.cdiv(K * V, PART), call.n_bits, *call.strides(q, k, v, do))
    call.launch(device.gradients, call.n_chunks, args, size.back_warps)
    if Hk != H:  # heads that share a key are summed in fp32, in a fixed order
        dq, dk = (x.unflatten(2, (Hk, H // Hk)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg


def _at_most(dlam: Tensor, L: int) -> Tensor:
    """From every level to `L` of them: the top one is all above it."""
    if dlam.shape[-1] > L:
        return torch.cat([dlam[..., : L - 1], dlam[..., L - 1 :].sum(-1, keepdim=True)], -1)
    return F.pad(dlam, (0, L - dlam.shape[-1])) if dlam.shape[-1] < L else dlam


class Last(NamedTuple):
    """Of the last chunk's tokens."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None


def _last(call: Call) -> Last:
    t = (call.n_chunks - 1) * call.size.C
    beta = None if call.beta is None else call.beta[:, t:]
    return Last(call.k[:, t:].float(), call.v[:, t:].float(), call.g[:, t:], beta)


def _read_at_end(call: Call) -> dict[int, int]:
    """By the set bits of the last chunk's index, lowest first: where the block lies that holds what is before."""
    n = call.n_chunks - 1
    return {bit: 2 * (n >> bit << bit) - (1 << bit) - 1 for bit in range(call.n_bits) if n >> bit & 1}


def _end(call: Call, last: Last, before: list[tuple[Tensor, Tensor]]) -> Tensor:
    """S (B, H, L, K, V) after the last token; `before`: H and Phi (B, H, K, ...) of the blocks of `_read_at_end`."""
    H, L, V = call.v.shape[2], call.lam.shape[-1], call.v.shape[-1]
    k, v = (repeat_heads(x, H).transpose(1, 2) for x in (last.k, last.v))
    G = last.g.clamp(min=G_MIN).transpose(1, 2).cumsum(-1)
    total = G[..., -1, None, None].exp()
    write, Phi = (k * (G[..., -1:] - G).exp().unsqueeze(-1)).mT, total
    if last.beta is not None:
        beta = last.beta.transpose(1, 2).unsqueeze(-1)
        system = beta * (k @ k.mT) * decay_tile(G)
        write = torch.linalg.solve_triangular(system, write, upper=False, left=False, unitriangular=True) * beta.mT
        eye = torch.eye(k.shape[-1], device=k.device)
        Phi = total * eye - write @ (k * G.exp().unsqueeze(-1))
    row = k.shape[2] - 1
    of = [min((row ^ m).bit_length(), L - 1) for m in range(row + 1)]
    levels = [k.new_zeros(*k.shape[:2], k.shape[-1], V) for _ in range(L)]
    for level in set(of):
        first, behind = of.index(level), len(of) - of[::-1].index(level)  # the tokens of a level lie side by side
        levels[level] = write[..., first:behind] @ v[:, :, first:behind]
    for bit, (H_n, Phi_n) in zip(_read_at_end(call), before, strict=True):
        level = min(call.size.C.bit_length() + bit, L - 1)
        matrices = last.beta is not None
        levels[level] = levels[level] + (Phi @ H_n if matrices else Phi * H_n)
        Phi = Phi @ Phi_n if matrices else Phi * Phi_n
    return torch.stack(levels, 2)


def _before(call: Call, saved: Saved) -> list[tuple[Tensor, Tensor]]:
    V, at = call.v.shape[-1], _read_at_end(call).values()
    if saved.phi is None:
        return [(saved.X[:, i, ..., :V].float(), saved.X[:, i, ..., V:].float()) for i in at]
    return [(saved.X[:, i].float(), saved.phi[:, i, :, None, None]) for i in at]


def _through_end(call: Call, saved: Saved, back: _Back, dS: Tensor) -> list[Tensor]:
    """From dS: the gradients of k, v, g, beta of the last chunk; those of the blocks before it are added to `back`."""
    with torch.enable_grad():
        k, v, g, beta = (None if x is None else x.detach().requires_grad_() for x in _last(call))
        assert k is not None
        assert v is not None
        assert g is not None
        last = Last(k, v, g, beta)
        before = [(H_n.detach().requires_grad_(), Phi.detach().requires_grad_()) for H_n, Phi in _before(call, saved)]
        S = _end(call, last, before)
        wanted = [*(x for x in last if x is not None), *(x for pair in before for x in pair)]
        grads = list(torch.autograd.grad(S, wanted, dS, allow_unused=True, materialize_grads=True))
    n_last, V = len(wanted) - 2 * len(before), call.v.shape[-1]
    for i, (bit, at) in enumerate(_read_at_end(call).items()):
        dH, dPhi = grads[n_last + 2 * i : n_last + 2 * i + 2]
        back.dX[:, at, ..., :V] += dH
        if back.crossing is None:
            back.dX[:, at, ..., V:] += dPhi
        else:
            reader = call.n_chunks - 1 >> bit << bit
            back.crossing[:, :, bit, reader] += (dPhi * before[i][1].detach())[..., 0, 0]
    return grads[:n_last]
