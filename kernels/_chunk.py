"""Cutting time into chunks, and the triangular pieces that live inside one. Shared by the chunked torch forms.

Letters: B batch, T time, H heads, J = B * H, N chunks, C chunk length, D a feature dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST = 64
"""Tokens in a chunk, at most: at K = V = 64 the work inside a chunk is then no more than the work on the state."""

G_MIN = -40.0
"""A log-decay below this is taken as this: e^-40 is under fp32 rounding, and -inf becomes legal."""


def chunk_length(T: int, longest: int = LONGEST) -> int:
    """The chunk length that cuts T into the fewest chunks with the least padding."""
    n_chunks = -(-T // longest)
    return -(-T // n_chunks)


def to_chunks(x_BTHD: Tensor, C: int) -> Tensor:
    """(B, T, H, D) -> (N, J, C, D), zeros behind the end."""
    B, T, H, D = x_BTHD.shape
    N = -(-T // C)
    if T % C:
        x_BTHD = F.pad(x_BTHD, (0, 0, 0, 0, 0, N * C - T))
    return x_BTHD.reshape(B, N, C, H, D).permute(1, 0, 3, 2, 4).reshape(N, B * H, C, D)


def from_chunks(x_NJCD: Tensor, B: int, T: int) -> Tensor:
    """The inverse of `to_chunks`, as a view where it can be."""
    N, J, C, D = x_NJCD.shape
    return x_NJCD.reshape(N, B, J // B, C, D).permute(1, 0, 3, 2, 4).reshape(B, N * C, J // B, D)[:, :T]


def repeat_heads(x_BTHD: Tensor, n_heads: int) -> Tensor:
    """Grouped heads made explicit: head h reads group h // (n_heads / groups)."""
    repeats = n_heads // x_BTHD.shape[2]
    return x_BTHD if repeats == 1 else x_BTHD.repeat_interleave(repeats, 2)


def decay_tile(G_NJC: Tensor) -> Tensor:
    """e^{G_i - G_j} for j <= i and 0 above, from cumulative log-decays: masked before the exponential, so never inf."""
    above = torch.ones(G_NJC.shape[-1], G_NJC.shape[-1], dtype=torch.bool, device=G_NJC.device).triu(1)
    return (G_NJC.unsqueeze(-1) - G_NJC.unsqueeze(-2)).masked_fill_(above, -torch.inf).exp_()


def channel_scores(q_NJCK: Tensor, k_NJCK: Tensor, G_NJCK: Tensor) -> Tensor:
    """sum_c q_ic k_jc e^{G_ic - G_jc} for j <= i and 0 above, (N, J, C, C), C a power of two. q may be stacked.

    With a decay for each channel the sum is no product of two matrices, but what the later half of a chunk reads of the
    earlier is: through the border b between them, G_i - G_b and G_b - G_j, neither of them positive. So it is made of
    blocks around the diagonal, doubled each round.
    """
    P = (q_NJCK * k_NJCK).sum(-1)[..., None, None]  # (N, J, blocks, size, size)
    while (size := P.shape[-1]) < q_NJCK.shape[-2]:
        q, k, G = (x.unflatten(-2, (-1, 2, size)) for x in (q_NJCK, k_NJCK, G_NJCK))
        (earlier_G, later_G), (earlier_P, later_P) = G.unbind(-3), P.unflatten(-3, (-1, 2)).unbind(-3)
        border = earlier_G[..., -1:, :]
        later_q, earlier_k = q[..., 1, :, :] * (later_G - border).exp(), k[..., 0, :, :] * (border - earlier_G).exp()
        above = F.pad(earlier_P, (0, size))
        P = torch.cat([above, torch.cat([later_q @ earlier_k.mT, later_P], -1)], -2)
    return P[..., 0, :, :]
