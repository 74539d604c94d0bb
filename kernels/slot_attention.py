"""Slot attention: a fixed number of slots, each a running mean of keys and of values, read by softmax over the slots.

    K_t = diag(e^{f_t}) K_{t-1} + s_t k_t^T        V_t = diag(e^{f_t}) V_{t-1} + s_t v_t^T
    p_t = softmax( scale * K_t q_t )               o_t = V_t^T p_t

f_t <= 0 and s_t are a log-gate and a write strength a slot; without s it is 1 - e^{f_t}, so that a slot is a weighted
mean. A slot that holds nothing has logit 0 and takes part in the softmax, unless `mask_empty`. State: (K, V), of
(B, H, M, K) and (B, H, M, V); fp32 or better.

Chunked, with G the cumulative log-gate inside a chunk and E_ijm = e^{G_im - G_jm} (j <= i):

    logit_im = e^{G_im} (K q_i)_m + sum_j (q_i . k_j) E_ijm s_jm         o_i = V^T (e^{G_i} * p_i) + sum_j b_ij v_j
    K' = e^{G_C} * K + (e^{G_C - G} * s)^T k, V' alike                   b_ij = sum_m p_im E_ijm s_jm

No exponent is ever positive. E is summed directly, in chunks of 16, and made again in the backward pass: it is C times
the size of the gate.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, M slots, K key width, V value width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._chunk import G_MIN, chunk_length, from_chunks, repeat_heads, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit

LONGEST = 16
"""Chunk length: work inside a chunk grows with it, work on the states falls; at M = K = V = 64 they meet here."""

TILE = 1 << 20
"""Numbers of E held at once (or one chunk's, if those are more): larger falls out of a CPU's caches."""

MOST = 512
"""Slots, at most, in the Triton kernels: a program holds them all for some of the channels."""

SlotState = tuple[Tensor, Tensor]


def slot_attention_step(
    state: SlotState, q: Tensor, k: Tensor, v: Tensor, f: Tensor, s: Tensor, scale: float, mask_empty: bool = False
) -> tuple[Tensor, SlotState]:
    """One token, and the law. q, k (B, H, K), v (B, H, V), f, s (B, H, M) -> o (B, H, V), next state."""
    written = (s != 0) | _written(state) if mask_empty else None
    keep, s = f.clamp(min=G_MIN).exp()[..., None], s[..., None]
    keys, values = (x * keep + s * new[..., None, :] for x, new in zip(state, (k, v), strict=True))
    x_BHM = torch.einsum("bhmk,bhk->bhm", keys, q) * scale
    p_BHM = _softmax(x_BHM, written)
    return torch.einsum("bhmv,bhm->bhv", values, p_BHM), (keys, values)


def reference(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, s: Tensor, scale: float, mask_empty: bool, state: SlotState
) -> tuple[Tensor, SlotState]:
    """The law over time: (B, T, H, ...) in, o and final state out."""
    out = []
    for t in range(q.shape[1]):
        o, state = slot_attention_step(state, q[:, t], k[:, t], v[:, t], f[:, t], s[:, t], scale, mask_empty)
        out.append(o)
    return torch.stack(out, 1), state


def _written(state: SlotState) -> Tensor:
    """Which slots hold anything, (B, H, M)."""
    return (state[0] != 0).any(-1) | (state[1] != 0).any(-1)


def _softmax(x: Tensor, written: Tensor | None) -> Tensor:
    """Over the slots that are written; all zeros where none is."""
    if written is None:
        return x.softmax(-1)
    return x.masked_fill(~written, -torch.inf).softmax(-1).masked_fill(~written, 0.0)


class _Chunked(torch.autograd.Function):
    """All chunks at once, but for the short serial pass of the states. Everything is (N, J, C, ...) in one dtype.

    S is keys beside values, (J, M, K + V). `written` (N, J, C, M) is None without `mask_empty`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        s: Tensor,
        S0: Tensor,
        written: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        K, G = k.shape[-1], f.cumsum(2)
        Ga, tail = G.exp(), (G[:, :, -1:] - G).exp()
        new = (s * tail).mT @ torch.cat([k, v], -1)
        starts = torch.empty_like(new)
        S = S0
        for n in range(len(new)):
            starts[n] = S
            S = torch.addcmul(new[n], S, Ga[n, :, -1, :, None])
        x, A = (q @ starts[..., :K].mT).mul_(Ga), q @ k.mT
        p, b = torch.empty_like(x), torch.empty_like(A)
        for part in _parts(G):
            w = _tile(G[part]).mul_(s[part].unsqueeze(2))
            x[part] += _over_tokens(A[part], w)
            p[part] = _softmax(x[part] * scale, None if written is None else written[part])
            b[part] = _over_slots(p[part], w)
        o = torch.matmul(p * Ga, starts[..., K:]).add_(b @ v)
        ctx.save_for_backward(q, k, v, s, G, starts, S, x, p, A, b)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, s, G, starts, S_end, x, p, A, b = ctx.saved_tensors
        K, Ga, tail = k.shape[-1], G.exp(), (G[:, :, -1:] - G).exp()
        do = torch.zeros_like(v) if do is None else do
        dp, db = (do @ starts[..., K:].mT).mul_(Ga), do @ v.mT
        dx, dA, ds = torch.empty_like(p), torch.empty_like(A), torch.empty_like(p)
        for part in _parts(G):
            E = _tile(G[part])
            w = E * s[part].unsqueeze(2)
            dp[part] += _over_tokens(db[part], w)
            dx[part] = ctx.scale * p[part] * (dp[part] - torch.linalg.vecdot(p[part], dp[part]).unsqueeze(-1))
            dA[part] = _over_slots(dx[part], w)
            torch.mul(p[part].unsqueeze(3), db[part].unsqueeze(-1), out=w)
            w.addcmul_(dx[part].unsqueeze(3), A[part].unsqueeze(-1))
            ds[part] = w.mul_(E).sum(2)
        dx_in = dx * Ga
        dq = torch.matmul(dx_in, starts[..., :K]).add_(dA @ k)
        read = torch.cat([dx_in.mT @ q, (p * Ga).mT @ do], -1)
        dS_end = torch.empty_like(starts)
        dS = torch.zeros_like(S_end) if dS is None else dS
        for n in reversed(range(len(read))):
            dS_end[n] = dS
            dS = torch.addcmul(read[n], dS, Ga[n, :, -1, :, None])
        dkv = torch.matmul(s * tail, dS_end).add_(torch.cat([dA.mT @ q, b.mT @ do], -1))
        ds.addcmul_(tail, torch.cat([k, v], -1) @ dS_end.mT)
        dG = (x * dx).addcmul_(p, dp).addcmul_(s, ds, value=-1)
        dG[:-1, :, -1] += torch.linalg.vecdot(starts[1:], dS_end[:-1])
        dG[-1, :, -1] += torch.linalg.vecdot(S_end, dS_end[-1])
        df = dG.flip(2).cumsum(2).flip(2)
        return dq, dkv[..., :K], dkv[..., K:], df, ds, dS, None, None


def _parts(G_NJCM: Tensor) -> Iterator[slice]:
    """The chunks, in parts whose E is of a bearable size."""
    N, J, C, M = G_NJCM.shape
    step = max(1, TILE // (J * C * C * M))
    yield from (slice(n, n + step) for n in range(0, N, step))


def _tile(G_NJCM: Tensor) -> Tensor:
    """E (N, J, C, C, M): masked before the exponential, so never inf."""
    C = G_NJCM.shape[2]
    above = torch.ones(C, C, dtype=torch.bool, device=G_NJCM.device).triu_(1).unsqueeze(-1)
    return (G_NJCM.unsqueeze(3) - G_NJCM.unsqueeze(2)).masked_fill_(above, -torch.inf).exp_()


def _over_tokens(A_NJCC: Tensor, w_NJCCM: Tensor) -> Tensor:
    """sum_j A_ij w_ijm, (N, J, C, M)."""
    return (A_NJCC.unsqueeze(-2) @ w_NJCCM).squeeze(-2)


def _over_slots(p_NJCM: Tensor, w_NJCCM: Tensor) -> Tensor:
    """sum_m p_im w_ijm, (N, J, C, C)."""
    return (w_NJCCM @ p_NJCM.unsqueeze(-1)).squeeze(-1)


@full_precision
def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    s: Tensor | None = None,
    *,
    scale: float = 1.0,
    mask_empty: bool = False,
    initial_state: SlotState | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, SlotState]:
    """o (B, T, H, V) in q's dtype, and the final state (K, V).

    q, k (B, T, Hk, K) with H a multiple of Hk; v (B, T, H, V); f (B, T, H, M) <= 0, -inf allowed; s (B, T, H, M).
    `mask_empty`: the softmax leaves out slots that no s has ever written; where none is written o is 0. Packed: B = 1,
    and sequence n is the tokens from `cu_seqlens`[n] to before [n + 1], integers on v's device; a state each.
    """
    _check(q, k, v, f, s, initial_state, cu_seqlens)
    impl = resolve(impl, "slot_attention", unfit(q, k, v, f, s))
    settings: dict[str, Any] = {"scale": scale, "mask_empty": mask_empty}
    if impl == "triton" and (v.shape[1] > 1 or cu_seqlens is not None):
        return _on_card((q, k, v, f, s), initial_state, cu_seqlens, **settings)
    if cu_seqlens is not None:
        return _one_by_one((q, k, v, f, s), initial_state, cu_seqlens, **settings, impl=impl)
    (B, T, H, V), K, M = v.shape, q.shape[-1], f.shape[-1]
    dtype, acc = q.dtype, accumulator(q, v)
    q, k = (repeat_heads(x.to(acc), H) for x in (q, k))
    v, f = v.to(acc), f.to(acc).clamp(min=G_MIN)
    s = -torch.expm1(f) if s is None else s.to(acc)
    if initial_state is None:
        start = (v.new_zeros(B, H, M, K), v.new_zeros(B, H, M, V))
    else:
        start = (initial_state[0].to(acc), initial_state[1].to(acc))
    if impl == "reference" or T == 1:
        o, state = reference(q, k, v, f, s, scale, mask_empty, start)
        return o.to(dtype), state
    C = chunk_length(T, LONGEST)
    cut = [to_chunks(x, C) for x in (q, k, v, f, s)]
    written = None
    if mask_empty:
        ever = (s != 0).cummax(1).values | _written(start).unsqueeze(1)
        written = to_chunks(ever, C)
    o, S = _Chunked.apply(*cut, torch.cat(start, -1).flatten(0, 1), written, scale)
    S = S.unflatten(0, (B, H))
    return from_chunks(o, B, T).to(dtype), (S[..., :K], S[..., K:])


def unfit(q: Tensor, k: Tensor, v: Tensor, f: Tensor, s: Tensor | None = None, **_: Any) -> str | None:
    """Why the Triton kernels cannot take these inputs, to be read after the op's name; None: they can."""
    if f.shape[-1] > MOST:
        return f"takes at most {MOST} slots in its Triton kernel, not {f.shape[-1]}"
    return triton_unfit(q, k, v, f, s, heads=(q.shape[-1], v.shape[-1]))


def _on_card(
    inputs: tuple[Tensor | None, ...],
    state: SlotState | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
    mask_empty: bool,
) -> tuple[Tensor, SlotState]:
    from kernels._slot_attention import attend  # Triton is not everywhere

    q, k, v, f, s = inputs
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)  # type: ignore[union-attr]
    q, k, v = (x.to(common) for x in (q, k, v))  # type: ignore[union-attr]
    start = (None, None) if state is None else (state[0].float(), state[1].float())
    o, keys, values = attend(q, k, v, f, s, start, scale, mask_empty, cu_seqlens)  # type: ignore[arg-type]
    return o.to(inputs[0].dtype), (keys, values)  # type: ignore[union-attr]


def _one_by_one(
    inputs: tuple[Tensor | None, ...], state: SlotState | None, cu_seqlens: Tensor, **settings: Any
) -> tuple[Tensor, SlotState]:
    """What packing means: each sequence by itself. An empty one leaves its state as it is."""
    q, _, v, f, _ = inputs
    assert q is not None
    assert v is not None
    assert f is not None
    size, acc = (1, v.shape[2], f.shape[-1]), accumulator(q, v)
    out, ends = [v.new_empty(1, 0, *v.shape[2:], dtype=q.dtype)], []
    for n, (first, behind) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        end = (v.new_zeros(*size, q.shape[-1], dtype=acc), v.new_zeros(*size, v.shape[-1], dtype=acc))
        if state is not None:
            end = (state[0][n : n + 1].to(acc), state[1][n : n + 1].to(acc))
        if first < behind:
            part = [None if x is None else x[:, first:behind] for x in inputs]
            o, end = slot_attention(*part, initial_state=end, **settings)  # type: ignore[arg-type]
            out.append(o)
        ends.append(end)
    return torch.cat(out, 1), (torch.cat([keys for keys, _ in ends]), torch.cat([values for _, values in ends]))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    s: Tensor | None,
    state: SlotState | None,
    cu_seqlens: Tensor | None,
) -> None:
    B, T, H, V = v.shape
    Hk, K, M = q.shape[-2], q.shape[-1], f.shape[-1]
    if H % Hk:
        raise ValueError(f"slot_attention: v has {H} heads, q {Hk}: the first should be a multiple of the second")
    check("slot_attention", "q", q, (B, T, Hk, K))
    check("slot_attention", "k", k, (B, T, Hk, K))
    check("slot_attention", "f", f, (B, T, H, M))
    if s is not None:
        check("slot_attention", "s", s, (B, T, H, M))
    N = B
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.device != v.device:
            raise ValueError("slot_attention: cu_seqlens packs sequences into a batch of 1; integers where v is")
    if state is not None:
        check("slot_attention", "keys of initial_state", state[0], (N, H, M, K))
        check("slot_attention", "values of initial_state", state[1], (N, H, M, V))


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `slot_attention` that use each of its options: Hk < H, odd sizes, hard gates, empty slots."""
    B, H, K, V, M = 2, 4, 5, 7, 6

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    for sparse in (False, True):
        for apart in (False, True):
            start = sparse == apart
            Hk = H // 2 if start else H
            f = -draw(B, T, H, M).abs()
            s = draw(B, T, H, M) if apart else None
            if sparse:  # most slots untouched, and the last of them ever
                rest = torch.rand(f.shape, generator=generator) < 0.7
                rest[..., -1] = True
                f = f.masked_fill(rest, 0.0)
                s = None if s is None else s.masked_fill(rest, 0.0)
            else:
                f[torch.rand(f.shape, generator=generator) < 0.1] = -1e3
                f[torch.rand(f.shape, generator=generator) < 0.1] = -torch.inf
            state = (draw(B, H, M, K), draw(B, H, M, V)) if start else None
            if state is not None and sparse:
                state = tuple(x.index_fill(2, torch.tensor([M - 1]), 0.0) for x in state)  # type: ignore[assignment]
            inputs = {"q": draw(B, T, Hk, K), "k": draw(B, T, Hk, K), "v": draw(B, T, H, V), "f": f, "s": s}
            yield {**inputs, "scale": 0.7, "mask_empty": sparse, "initial_state": state}
