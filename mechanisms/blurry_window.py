"""Blurry Window Attention, a reconstruction: a sliding window kept in fewer slots than it has tokens.

Recurrence
    r_tj = D( j - t / R )                            D: Dirichlet kernel of period `slots`, sum_j r_tj = 1
    K_t[j] = (1 - r_tj) K_{t-1}[j] + r_tj k_t        V_t[j] = (1 - r_tj) V_{t-1}[j] + r_tj v_t
    o_t = V_t^T softmax( K_t q_t / sqrt(K) ), over the slots that the write has come near: t > (j - 1) R
    R is the resolution of a head; the write goes once around the slots in slots * R tokens, and what is older is gone

Source
    A RECONSTRUCTION. All we could read of "Blurry Window Attention" (arXiv 2606.09862) is its abstract (paper): a
    blurry history of keys and values, interpolated with Dirichlet kernels; a sliding window as a special case, by the
    kernels' resolution; itself a special case of Gated Slot Attention, the decay made of Dirichlet kernels; on recall 8
    times fewer bytes than a sliding window. All else is choice: the recurrence, R whole, the scale, the mask (so that
    R = 1 is `sliding_window` from the first token on), no norm of q and k (for the same reason), one R for all heads.
    Do not read its numbers as the paper's.

State
    A key and a value a slot, and the position: 2 * n_heads * slots * head_dim + 1; 3 tokens of q, k, v.

Cost
    T * slots in compute, constant in memory when decoding.

Limits
    No rotary positions: a slot mixes keys of neighbouring positions. A resolution above 8 is noisy: between two passes
    of the write old slots are scaled by up to 3 (at 8) or 10 (at 16).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kernels.blurry_window import BlurryState, blurry_window
from mechanisms._parts import Base, Projections, RmsNorm, Shape, State

REVISION = 1
STATE = "2*n_heads*slots*head_dim + 1"
CACHE = "3*conv*n_heads*head_dim"
PARAMS = "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model) + (2*head_dim if qk_norm else 0)"
LIMITS = ["slots >= 1", "resolution >= 1", "position != 'rope'"]
INERT = {"spread": "resolution == 1 or n_heads == 1"}


def resolutions(resolution: int, n_heads: int, spread: str) -> tuple[int, ...]:
    """R of each head; "halving" with 8: 8, 4, 2, 1, and again from 8."""
    series = [resolution]
    while spread == "halving" and series[-1] > 1:
        series.append(series[-1] // 2)
    return tuple(series[head % len(series)] for head in range(n_heads))


class Mixer(Base):
    """Blurry Window Attention (a reconstruction).

    Args:
        slots: how many keys and values a head keeps (slots)
        resolution: how many tokens share a slot; 1 is a sliding window of `slots` tokens (tokens a slot)
        spread: the resolution in every head, or half of it in each next head, down to 1 and again
        qk_norm: RMSNorm of q and k, with a gain
    """

    def __init__(
        self,
        shape: Shape,
        *,
        slots: int = 64,
        resolution: int = 8,
        spread: Literal["same", "halving"] = "same",
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.slots = shape, slots
        self.resolution = resolutions(resolution, shape.n_heads, spread)
        K = shape.head_dim
        self.project = Projections(shape, K)
        self.norm_q, self.norm_k = (RmsNorm(K) if qk_norm else nn.Identity() for _ in range(2))
        self.out = nn.Linear(shape.n_heads * K, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size, acc = (batch, self.shape.n_heads, self.slots), torch.promote_types(dtype, torch.float32)
        slots = {n: torch.zeros(*size, self.shape.head_dim, device=device, dtype=acc) for n in ("keys", "values")}
        start = torch.zeros(batch, device=device, dtype=torch.int32)
        return {**slots, "length": start, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        o, end = blurry_window(
            self.norm_q(q),
            self.norm_k(k),
            v,
            slots=self.slots,
            resolution=self.resolution,
            scale=self.shape.head_dim**-0.5,
            initial_state=BlurryState(*(state[name] for name in BlurryState._fields)) if state else None,
            impl=self.shape.impl,
        )
        return self.out(o.flatten(2)), {**end._asdict(), **carried}
