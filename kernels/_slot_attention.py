"""Slot attention with Triton kernels: two linear attentions with a softmax between them.

With w = s, the values' half is linear attention of (p, w, v) as it stands. The keys' half is linear attention of
(dx, w, k), dx the gradient of the logits: what it puts out is dq; and the logits are its gradient to dx, with q in
the place of the output's gradient. So

    x = keys.dx(q)    p = softmax(scale x)    o = values.o
    dp, dw, dv = values.backward(do)    dx = scale p (dp - p.dp)    dq = keys.o    dw, dk = keys.backward(q)

and what the two halves say of f and s is added up in place. Forward 3 launches, backward 6, and one each where s is
1 - e^f; 2 more a half where sequences are cut into segments. Letters: M slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._launch import launch, padded, rows_contiguous
from kernels._linear_walks import Call, Gradients, Starts, ends_of, prepare, segment_starts, single, walk, walk_back
from kernels._slot_attention_triton import (
    _logits_kernel,
    _softmax_gradient_kernel,
    _softmax_kernel,
    _write_kernel,
)

TILE = 4096
"""Numbers that a program has of a tensor with M numbers a row."""


def _by_row(kernel: Any, like: Tensor, args: tuple[Any, ...], **constants: bool) -> None:
    """A launch of `kernel` for the rows of `like` (B, T, H, M)."""
    M = like.shape[-1]
    block = triton.next_power_of_2(M)
    rows = max(1, TILE // block)
    sizes: dict[str, Any] = {"M": M, "BLOCK": block, "ROWS": rows}
    launch(kernel, triton.cdiv(like.numel() // M, rows), args, {**sizes, **constants}, num_warps=4)


def _writes(f: Tensor, s: Tensor | None) -> Tensor:
    """s (B, T, H, M) as a factor of products, in fp32 unless it was given in bf16: decayed, it is rounded once more."""
    if s is not None:
        return s if s.dtype == torch.bfloat16 else s.float()
    B, T, H, _ = f.shape
    s = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    _by_row(_write_kernel, s, (f, s, *f.stride()[:3], T, H, B * T * H))
    return s


def _starts(call: Call, state: Tensor | None) -> Starts:
    """What the segments of one half start from; `state` (N, H, M, width of a key or of a value)."""
    state = None if state is None else state.contiguous()
    if call.n_segments == 1:
        return Starts(None, state, None)
    start = None if state is None else (state, None)
    return Starts(segment_starts(call, call.k, call.v, None, start, reverse=False, normalize=False), None, None)


def _logits(call: Call, q: Tensor, starts: Starts) -> tuple[Tensor, Tensor]:
    """x (B, T, H, M), without the scale, and the keys at the end (N, H, M, K), lying the other way round."""
    (B, T, _, K), H, M = call.v.shape, call.n_heads, call.k.shape[-1]
    x, end = single(q, B, T, H, M), single(q, call.n_sequences, H, K, M)
    args = (
        q, call.v, call.k, call.g, x, starts.places(M * K)[0], end, call.cu_seqlens,
        *q.stride()[:3], *call.v.stride()[:3], *call.k.stride()[:3], *call.g.stride()[:3],  # type: ignore[union-attr]
        T, H, call.heads_a_v, call.n_segments, starts.steps(M, K)[0],
    )  # fmt: skip
    tiles = triton.cdiv(M, call.tiles.BK)
    call.launch(_logits_kernel, tiles, call.n_segments, args, PV=padded(K), BK=call.tiles.BK, has_start=starts.given)
    return x, end.mT


def _first_writes(s: Tensor, state: tuple[Tensor | None, ...], cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
    """For each slot (N, H, M) the first token of the row that writes to it, 0 if it starts with something.

    And the sequence of each token (T,), None where every row is one.
    """
    T = s.shape[1]
    token = torch.arange(T, dtype=torch.int32, device=s.device)
    times = torch.where(s != 0, token[:, None, None], T)
    sequence_of = None
    if cu_seqlens is None:
        first = times.amin(1)
    else:
        sequence_of = torch.searchsorted(cu_seqlens, token, right=True) - 1
        first = times.new_full((cu_seqlens.shape[0] - 1, *s.shape[2:]), T)
        first.scatter_reduce_(0, sequence_of[:, None, None].expand(times.shape[1:]), times[0], "amin")
    for part in state:
        first = first if part is None else first.masked_fill((part != 0).any(-1), 0)
    return first, sequence_of


class _Attended:
    """The forward pass, and of it what the backward pass needs."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        s: Tensor | None,
        state: tuple[Tensor | None, Tensor | None],
        scale: float,
        mask: bool | Tensor,
        cu_seqlens: Tensor | None,
    ) -> None:
        B, T, H, _ = v.shape
        w = _writes(f, s)
        keys = prepare(w, w, k, f, cu_seqlens, H // q.shape[2])
        self.key_starts = _starts(keys, state[0])
        x, self.keys = _logits(keys, q, self.key_starts)
        first, sequence_of = (mask, None) if isinstance(mask, Tensor) else (None, None)
        if mask is True:
            first, sequence_of = _first_writes(w, state, cu_seqlens)
        self.p = torch.empty_like(w, memory_format=torch.contiguous_format)
        args = (x, self.p, first, sequence_of, T, H, B * T * H, float(scale))
        _by_row(_softmax_kernel, x, args, masked=first is not None, packed=cu_seqlens is not None)
        values = prepare(self.p, w, v, f, cu_seqlens)
        self.value_starts = _starts(values, state[1])
        done = walk(values, self.value_starts, 1.0, False, q.dtype)
        self.o, self.values = done.o, done.S


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        s: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        scale: float,
        mask: bool | Tensor,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        done = _Attended(q, k, v, f, s, (keys, values), scale, mask, cu_seqlens)
        ctx.save_for_backward(q, k, v, f, s, done.p, cu_seqlens, *done.key_starts, *done.value_starts)
        ctx.scale, ctx.has_start = scale, keys is not None
        ctx.set_materialize_grads(False)
        return done.o, done.keys, done.values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dK: Tensor | None, dV: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, f, s, p, cu_seqlens, *starts = ctx.saved_tensors
        (B, T, Hk, K), (H, V), M = q.shape, v.shape[2:], f.shape[-1]
        w = _writes(f, s)
        do = torch.zeros_like(v) if do is None else rows_contiguous(do)
        gate = ctx.needs_input_grad[3]

        def by_slot() -> Tensor:
            return single(v, B, T, H, M)

        values = prepare(p, w, v, f, cu_seqlens)
        N = values.n_sequences
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        of_values = Gradients(by_slot(), by_slot(), dv, by_slot() if gate else None, single(v, N, H, M, V), None)
        ends = ends_of(values, do, None, dV, None, 1.0, False)
        walk_back(values, do, None, Starts(*starts[3:]), ends, of_values)
        dx = torch.empty_like(p)
        _by_row(_softmax_gradient_kernel, p, (p, of_values.q, dx, B * T * H, float(ctx.scale)))
        keys = prepare(dx, w, k, f, cu_seqlens, H // Hk)
        # A group's heads are summed in fp32: rounding first would lose what the sum keeps
        by_head = q.dtype if Hk == H else torch.float32
        dq = walk(keys, Starts(*starts[:3]), 1.0, False, by_head).o
        dk = v.new_empty(B, T, H, K, dtype=by_head)
        of_keys = Gradients(None, of_values.k, dk, of_values.g, single(v, N, H, M, K), None)
        q = rows_contiguous(q)
        ends = ends_of(keys, q, None, dK, None, 1.0, False)
        more = "gate" if s is None and gate else "add"
        walk_back(keys, q, None, Starts(*starts[:3]), ends, of_keys, more=more)
        if Hk != H:
            dq, dk = (x.unflatten(2, (Hk, H // Hk)).sum(3).to(q.dtype) for x in (dq, dk))
        states = (of_keys.S, of_values.S) if ctx.has_start else (None, None)
        return dq, dk, dv, of_values.g, None if s is None else of_values.k, *states, None, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    s: Tensor | None,
    state: tuple[Tensor | None, Tensor | None],
    scale: float,
    mask: bool | Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B, T, H, V) and the keys (N, H, M, K) and values (N, H, M, V) at the end.

    `mask`: leave out slots that no s has written, or those of which the given first token (B, H, M) is still to come.
    """
    q, f = rows_contiguous(q), rows_contiguous(f)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, f, s, *state)):
        return _Attend.apply(q, k, v, f, s, *state, scale, mask, cu_seqlens)
    done = _Attended(q, k, v, f, s, state, scale, mask, cu_seqlens)
    return done.o, done.keys, done.values
