"""Log-linear attention: the past in blocks of doubling length, each a state of its own with a weight of its own.

    level(t, s) = bit_length(t xor s), at most L - 1: level 0 is the token itself, level l >= 1 an aligned block of
                  2^{l-1} tokens; at time t those are alive whose bit is set in t
    S_l <- e^{g_t} (I - beta_t k_t k_t^T) S_l,  l >= 1          without beta: e^{g_t} S_l
    S_0 <- beta_t k_t v_t^T                                     without beta: k_t v_t^T
    o_t = scale * sum_l lam_tl S_l^T q_t

Before token t the levels below m = 1 + (trailing zeros of t) are full and move into level m, as a binary counter
carries. With L weights the top level, L - 1, never empties, so that any length fits L states. With equal weights o is
that of linear attention or the delta rule, since blocks only cut the same sum.

State: S (B, H, L, K, V), fp32 or better, and the number of tokens so far (B,), int32.

Chunked (C a power of two), with D, G, B^ as in the delta rule and T = (I + L)^-1; without beta T = I and W = 0:

    E = tril(D * Q K^T) T beta     F = B^^T T beta     q^ = e^G Q - E (e^G K)
    O = (E * Lam) V + sum over the set bits b of the chunk's index, lowest first, of lam^{log2 C + b + 1} * (q^ H_b),
        and after each q^ <- q^ Phi_b
    (H, Phi) of a chunk = (F V, e^{G_C} I - F (e^G K)); of two neighbours (Phi_r H_l + H_r, Phi_r Phi_l)

So no pass over time is serial: log2(T / C) products build the blocks, and as many read them. A call that continues from
a state goes token by token: its blocks begin where the tensor of positions says.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, K key width, V value width, L levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._chunk import G_MIN, LONGEST, decay_tile, from_chunks, repeat_heads, to_chunks
from kernels._launch import accumulator, check, full_precision, resolve, triton_unfit


class LogLinearState(NamedTuple):
    """What is carried: the levels as they were at the last token, and how many tokens there were."""

    S: Tensor
    length: Tensor


def n_levels(length: int) -> int:
    """How many levels `length` tokens need, that of the token itself included."""
    return 1 + (length - 1).bit_length()


def carries(length_B: Tensor, T: int, L: int) -> Tensor:
    """(B, T, L, L): what each of the next T tokens does to the levels before it: row m adds up what moves into m."""
    t_BT = length_B[:, None] + torch.arange(T, device=length_B.device)
    zeros_BT = (t_BT[..., None] % (1 << torch.arange(1, max(L - 1, 1), device=length_B.device)) == 0).sum(-1)
    into_BT11 = (1 + zeros_BT).clamp(max=L - 1)[..., None, None]
    level = torch.arange(L, device=length_B.device)
    return torch.maximum(level, into_BT11) == level[:, None]


def log_linear_attention_step(
    S: Tensor,
    carry: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lam: Tensor,
    beta: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One token, and the law. S (B, H, L, K, V), `carry` (B, L, L) of `carries`, q, k (B, H, K), v (B, H, V), g, beta
    (B, H), lam (B, H, L) -> o (B, H, V), next S."""
    carry = carry[:, None] * g.clamp(min=G_MIN).exp()[..., None, None]
    S = (carry @ S.flatten(3)).view_as(S)
    write = k if beta is None else k * beta[..., None]
    if beta is not None:
        S = S - write[:, :, None, :, None] * (k[:, :, None, None] @ S)
    S = torch.cat([S[:, :, :1] + (write[..., None] * v[..., None, :])[:, :, None], S[:, :, 1:]], 2)
    read = (lam[:, :, None] @ S.flatten(3)).view_as(S[:, :, 0])
    return (q[:, :, None] @ read).squeeze(2) * scale, S


def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, beta: Tensor | None, scale: float, state: LogLinearState
) -> tuple[Tensor, LogLinearState]:
    """The law over time: (B, T, H, ...) in, o and final state out."""
    T, out, S = q.shape[1], [], state.S
    carry_BTLL = carries(state.length, T, lam.shape[-1]).to(S.dtype)
    for t in range(T):
        beta_t = None if beta is None else beta[:, t]
        now = carry_BTLL[:, t], q[:, t], k[:, t], v[:, t], g[:, t], lam[:, t]
        o, S = log_linear_attention_step(S, *now, beta_t, scale)
        out.append(o)
    return torch.stack(out, 1), LogLinearState(S, state.length + T)


def _levels(C: int, L: int, device: torch.device) -> Tensor:
    """(C, L, C): 1 where level(i, m) = l, at most L - 1, for m <= i."""
    place = torch.arange(C, device=device)
    apart = place[:, None] ^ place
    level = (
        (apart[..., None] >= (1 << torch.arange(max(C.bit_length() - 1, 1), device=device))).sum(-1).clamp(max=L - 1)
    )
    return (level[:, None] == torch.arange(L, device=device)[:, None]) & (place[:, None, None] >= place)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, beta: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """All (N, J, C, ...), N and C powers of two -> o without scale, the levels (J, L, K, V) after `length` tokens."""
    C, L = lam.shape[2:]
    G = g.squeeze(-1).cumsum(2)
    D, Ga, tail, total = decay_tile(G), G.exp().unsqueeze(-1), (G[:, :, -1:] - G).exp(), G[:, :, -1, None, None].exp()
    EF = torch.cat([(q @ k.mT) * D, (k * tail.unsqueeze(-1)).mT], 2)
    q_in, Phi, k_in = q * Ga, total, k * Ga
    if beta is not None:
        system = beta * (k @ k.mT) * D
        EF = torch.linalg.solve_triangular(system, EF, upper=False, left=False, unitriangular=True) * beta.mT
        q_in = q_in - EF[:, :, :C] @ k_in
        Phi = total * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - EF[:, :, C:] @ k_in
    E, F_end = EF[:, :, :C], EF[:, :, C:]
    table = _levels(C, L, q.device).to(q.dtype)
    o = (E * torch.einsum("njil,ilm->njim", lam, table)) @ v
    tree = _tree(F_end @ v, Phi)
    o = _read(o, q_in, lam, tree)
    last, row = divmod(length - 1, C)
    S = (F_end[last, :, None] * table[row, :, None]) @ v[last, :, None]
    return o, _end(S, tree, last, C)


def _times(Phi: Tensor, x: Tensor) -> Tensor:
    """Phi x, where Phi may be one number a head."""
    return Phi * x if Phi.shape[-1] == 1 else Phi @ x


def _tree(H: Tensor, Phi: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(H, Phi) of blocks of 1, 2, 4, ... chunks."""
    tree = [(H, Phi)]
    while H.shape[0] > 1:
        H, Phi = _times(Phi[1::2], H[0::2]) + H[1::2], _times(Phi[1::2], Phi[0::2])
        tree.append((H, Phi))
    return tree


def _read(o: Tensor, q: Tensor, lam: Tensor, tree: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`o` plus what each chunk reads from the blocks before it: the right half of a pair reads the left."""
    C, L = lam.shape[2:]
    for bit, (H, Phi) in enumerate(tree[:-1]):
        halves = [x.unflatten(0, (-1, 2, 1 << bit)).unbind(1) for x in (o, q, lam)]
        (o_left, o_right), (q_left, q_right), (_, lam_right) = halves
        level = min(C.bit_length() + bit, L - 1)
        o_right = o_right + lam_right[..., level, None] * (q_right @ H[0::2, None])
        q_right = q_right * Phi[0::2, None] if Phi.shape[-1] == 1 else q_right @ Phi[0::2, None]
        o, q = (torch.stack(x, 1).flatten(0, 2) for x in ((o_left, o_right), (q_left, q_right)))
    return o


def _end(S: Tensor, tree: list[tuple[Tensor, Tensor]], chunk: int, C: int) -> Tensor:
    """The levels (J, L, K, V) at the end: those inside the last chunk, S, and the blocks of the chunks before it."""
    levels = list(S.unbind(1))
    Phi, left = tree[0][1][chunk], chunk
    for bit, (H_bit, Phi_bit) in enumerate(tree):
        if left >> bit & 1:
            node, level = (left >> bit) - 1, min(C.bit_length() + bit, len(levels) - 1)
            levels[level] = levels[level] + _times(Phi, H_bit[node])
            Phi = _times(Phi, Phi_bit[node])
            left -= 1 << bit
    return torch.stack(levels, 1)


@full_precision
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lam: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: LogLinearState | None = None,
    impl: str = "auto",
) -> tuple[Tensor, LogLinearState]:
    """o (B, T, H, V) in q's dtype and the final state.

    q, k (B, T, Hk, K) with H a multiple of Hk; v (B, T, H, V). g (B, T, H) <= 0, -inf allowed. lam (B, T, H, L) >= 0.
    beta (B, T, H): the delta rule's, None: nothing is erased. Sequences are not packed here.

    On a card by Triton kernels, for keys of at most 128 and calls that continue from no state. They keep the whole
    tree in the dtype of q: of each 64 tokens and head 2 K V numbers, with beta 2 K (V + K). The backward pass makes as
    many, and with beta K log2(T / 64) for each token and head.
    """
    B, T, H, V = v.shape
    K, L = q.shape[-1], lam.shape[-1]
    _check(q, k, v, g, lam, beta, initial_state)
    impl = resolve(impl, "log_linear_attention", unfit(q, k, v, g, lam, beta))
    if impl == "triton" and initial_state is None:
        from kernels import _log_linear_attention  # Triton is not everywhere

        o, S = _log_linear_attention.log_linear_attention(q, k, v, g, lam, beta, scale)
        return o, LogLinearState(S, torch.full((B,), T, device=v.device, dtype=torch.int32))
    dtype, acc = q.dtype, accumulator(q, v)
    q, k = (repeat_heads(x.to(acc), H) for x in (q, k))
    v, g, lam = v.to(acc), g.to(acc).clamp(min=G_MIN), lam.to(acc)
    beta = None if beta is None else beta.to(acc)
    if impl == "reference" or initial_state is not None:
        if initial_state is None:
            start = v.new_zeros(B, H, L, K, V), torch.zeros(B, device=v.device, dtype=torch.int32)
        else:
            start = initial_state[0].to(acc), initial_state[1]
        o, state = reference(q, k, v, g, lam, beta, scale, LogLinearState(*start))
        return o.to(dtype), state
    C = min(LONGEST, 1 << (T - 1).bit_length())
    longer = C << (-(-T // C) - 1).bit_length()

    def cut(x: Tensor) -> Tensor:
        return to_chunks(F.pad(x if x.dim() == 4 else x[..., None], (0, 0, 0, 0, 0, longer - T)), C)

    o, S = _chunked(cut(q), cut(k), cut(v), cut(g), cut(lam), None if beta is None else cut(beta), T)
    length = torch.full((B,), T, device=v.device, dtype=torch.int32)
    return (from_chunks(o, B, T) * scale).to(dtype), LogLinearState(S.unflatten(0, (B, H)), length)


WIDEST_KEY = 128
"""Numbers in a key, at most, in the Triton kernels: a chunk's queries, and what they pass through, are held whole."""


def unfit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lam: Tensor,
    beta: Tensor | None = None,
    initial_state: LogLinearState | None = None,
    **_: Any,
) -> str | None:
    """Why the Triton kernels do not run a call, to be read after the op's name; None: they do."""
    if initial_state is not None:
        return "goes token by token from a state"
    if q.shape[-1] > WIDEST_KEY:
        return f"takes keys of at most {WIDEST_KEY} in its Triton kernels, not {q.shape[-1]}"
    return triton_unfit(q, k, v, g, lam, beta, heads=(q.shape[-1], v.shape[-1]))


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, beta: Tensor | None, state: LogLinearState | None
) -> None:
    B, T, H, V = v.shape
    _, _, Hk, K = q.shape
    if H % Hk:
        raise ValueError(f"log_linear_attention: v has {H} heads, q {Hk}: the first should be a multiple of the second")
    given = {"q": (q, (B, T, Hk, K)), "k": (k, (B, T, Hk, K)), "g": (g, (B, T, H))}
    given["lam"] = (lam, (B, T, H, lam.shape[-1]))
    if beta is not None:
        given["beta"] = (beta, (B, T, H))
    if state is not None:
        given["S of initial_state"] = (state[0], (B, H, lam.shape[-1], K, V))
        given["length of initial_state"] = (state[1], (B,))
    for name, (x, expected) in given.items():
        check("log_linear_attention", name, x, expected)


def examples(T: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Arguments of `log_linear_attention` that use each option: both bases, too few levels and too many, a state."""
    B, H, K, V = 2, 4, 5, 7

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, generator=generator)

    for gated, L, start in ((False, 9, False), (False, 2, False), (False, 4, True), (True, 9, False), (True, 3, False)):
        Hk = H if gated else H // 2
        g = -draw(B, T, H).abs() * 0.3
        if L < 9:
            g[torch.rand(g.shape, generator=generator) < 0.1] = -torch.inf
        k, beta = F.normalize(draw(B, T, Hk, K), dim=-1), draw(B, T, H).sigmoid() if gated else None
        inputs = {"q": draw(B, T, Hk, K), "k": k, "v": draw(B, T, H, V), "g": g, "beta": beta}
        length = torch.tensor([0, 5], dtype=torch.int32)
        S = draw(B, H, L, K, V) * (length > 0)[:, None, None, None, None]
        state = LogLinearState(S, length) if start else None
        yield {**inputs, "lam": draw(B, T, H, L).abs(), "scale": 0.3, "initial_state": state}
