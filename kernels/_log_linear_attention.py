"""Log-linear attention through Triton: the forward launches and the autograd function. Imported only where Triton is.

In all 3 + log2(T / C) launches with beta, where joining blocks takes one a level; the backward pass is
`_log_linear_back.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import _log_linear_attention_triton as device
from kernels import _log_linear_tree_triton as tree
from kernels._erase_triton import scores
from kernels._launch import launch, rows_contiguous
from kernels._log_linear_back import backward
from kernels._log_linear_call import DEPTH, Blocks, Call, Saved, blocks


def _summarise(call: Call) -> Saved:
    """Every chunk, then every block."""
    q, k, v, g, beta, size = call.q, call.k, call.v, call.g, call.beta, call.size
    K, V, C = q.shape[-1], v.shape[-1], size.C
    G, X = call.in_chunks(4, C), call.in_blocks(K, call.width, half=True)
    phi = Ti = P = UW = A = q_in = None
    if beta is None:
        phi = call.in_blocks()
    else:
        Ti, P = _solve(call, G)
        UW, A, q_in = (call.in_chunks(C, columns, half=True) for columns in (V + K, C, K))
    args = (k, v, q, beta, g, G, Ti, P, UW, A, q_in, X, phi, *call.heads, *call.strides(q, k, v))
    call.launch(device.leaves, call.n_chunks, args)
    if beta is None:
        for level in range(0, call.n_bits - 1, DEPTH):
            call.join_numbers(tree.merge_numbers, level, (X, phi))
    else:
        for level in range(1, call.n_bits):
            call.join(tree.merge, level, triton.cdiv(call.width, size.V), (X,))
    return Saved(G, X, phi, Ti, P, UW, A, q_in)


def _solve(call: Call, G: Tensor) -> tuple[Tensor, Tensor]:
    """T and P of every chunk; the gates go to `G`."""
    q, k, C, single = call.q, call.k, call.size.C, call.q.dtype == torch.float32
    L, P = call.in_chunks(C, C), call.in_chunks(C, C, half=True)
    Ti = L if single else call.in_chunks(C, C, half=True)
    args = (q, k, k, call.beta, call.g, L, Ti, P, G, None, *call.heads, *call.strides(q, k, k))
    tile = {"K": q.shape[-1], "BK": min(call.size.K, 32 if single else 64), "C": C, "PREC": call.size.precision}
    tile["INVERSE"] = call.size.precision
    programs = L.shape[0] * L.shape[1] * L.shape[2]
    launch(scores, programs, args, tile, num_warps=call.size.score_warps, num_stages=1)
    return Ti, P


def _forward(call: Call) -> tuple[Tensor, Tensor, Saved]:
    """o (B, T, H, V), S (B, H, L, K, V) fp32, and what the backward pass reads."""
    q, k, v, (B, _, H, V), L = call.q, call.k, call.v, call.v.shape, call.lam.shape[-1]
    saved = _summarise(call)
    o, S = call.empty(*v.shape, half=True), call.empty(B, H, L, q.shape[-1], V)
    columns = triton.cdiv(V, call.size.V_out)
    args: tuple[Any, ...] = (q, k, v, call.lam, call.beta, saved.G, saved.A, saved.q_in, saved.X, saved.phi, o)
    args += (call.scale, *call.heads, L, *call.strides(q, k, v))
    call.launch(device.output, call.n_chunks * columns, args, LOG_C=call.log_C, BV=call.size.V_out)
    columns = triton.cdiv(V, call.size.V)
    args = (k, v, call.beta, saved.G, saved.Ti, saved.X, saved.phi, S, *call.heads, L, call.n_bits)
    call.launch(tree.end, L * columns, (*args, *call.strides(k, v)), LOG_C=call.log_C)
    return o, S, saved


class _LogLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        lam: Tensor,
        beta: Tensor | None,
        scale: float,
        size: Blocks,
    ) -> tuple[Tensor, Tensor]:
        o, S, saved = _forward(Call(q, k, v, g, lam, beta, scale, size))
        ctx.save_for_backward(q, k, v, g, lam, beta, *saved)
        ctx.scale, ctx.size = scale, size
        ctx.set_materialize_grads(False)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, lam, beta, *saved = ctx.saved_tensors
        call = Call(q, k, v, g, lam, beta, ctx.scale, ctx.size)
        do = torch.zeros_like(v) if do is None else rows_contiguous(do)
        return (*backward(call, Saved(*saved), do, dS), None, None)


def log_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, beta: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """o and the levels S of the state: as `kernels.log_linear_attention.log_linear_attention`, which checked shapes.

    Where no gradient can follow, autograd is not told: that takes longer than a small kernel runs.
    """
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, lam, beta))
    dtype = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    q, k, v = (rows_contiguous(x.to(dtype)) for x in (q, k, v))
    g, lam = g.float().contiguous(), lam.float().contiguous()
    beta = None if beta is None else beta.float().contiguous()
    size = blocks(v.shape[1], q.shape[-1], v.shape[-1], dtype)
    if keep:
        return _LogLinear.apply(q, k, v, g, lam, beta, float(scale), size)
    return _forward(Call(q, k, v, g, lam, beta, float(scale), size))[:2]
