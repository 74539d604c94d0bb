"""Raven: slots of which each token writes only those that a learned router picks.

Recurrence
    m_t = sigmoid( W_r x_t + Gumbel noise in training )         one a slot
    r_t = the top_k largest of m_t, 0 elsewhere, over alpha times their sum + 1e-9
    f_t = -e^{A_log} softplus(w x_t + dt_bias) r_t              0 in a slot not picked: it keeps what it has
    K_t = diag(e^{f_t}) K_{t-1} + (1 - e^{f_t}) k_t^T           V_t = diag(e^{f_t}) V_{t-1} + (1 - e^{f_t}) v_t^T
    o_t = V_t^T softmax( K_t q_t )                              y = W_o ( RMSNorm(silu(o)), a head, times silu(W_g x) )
    q, k: SiLU, then RMSNorm a head with a gain; v: SiLU

Source
    "Raven" (paper, and its public code goombalab/raven): recurrence, 256 slots, top_k 32, sigmoid, noise, norms, output
    gate (paper). alpha is 1 at 400M and 4 at 800M parameters (paper; no code has it). The paper's main table holds the
    numbers of its model with top_k 128. Code: logit scale 1; without the output gate one RMSNorm over all heads;
    softmax scores are not divided by their sum; the mlp router is W gelu(W x + b); rates A from U(0, 16), here from
    U(1e-4, a_max) as in fla. An empty slot has logit 0 and takes part in the softmax, unless `mask_empty` (paper: no
    difference). No short convolution in the paper: `short_conv: false`.
    Choices: 1 - e^f in fp32 as -expm1(f), where the code's bf16 writes exactly 0 for every f above -0.002; routing in
    fp32 under autocast, of equal scores the slot of lower number; alpha divides softmax scores too; the noise below.

    The noise is a hash of a number drawn with the weights, of how often the router's weights have changed, and of the
    token's position, head and slot: see `Noise`. The rows of a batch share it.

State
    A key and a value a slot, and the position: 2 * n_heads * slots * head_dim + 1; 3 tokens of q, k, v.

Cost
    T * slots in compute (all slots are touched, picked or not), constant in memory when decoding.

Limits
    No rotary positions: a slot mixes keys of many positions. No grouped keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.slot_attention import slot_attention
from mechanisms._parts import Base, DecayGate, GatedOutput, Projections, RmsNorm, Shape, State

REVISION = 1
STATE = "2*n_heads*slots*head_dim + 1"
CACHE = "3*conv*n_heads*head_dim"
PARAMS = (
    "n_heads*(head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model) + slots*d_model + d_model + 2)"
    " + (d_model*d_model + d_model if router == 'mlp' else 0) + (2*head_dim if qk_norm else 0)"
    " + (n_heads*head_dim*d_model + head_dim if output_gate else n_heads*head_dim)"
)
LIMITS = ["slots >= 1", "top_k >= 1", "top_k <= slots", "alpha > 0", "a_max > 1e-4", "position != 'rope'"]


def top(score_BTHM: Tensor, k: int) -> Tensor:
    """Which slots are the `k` of largest score, of equal ones those of lower number: bool (B, T, H, M)."""
    M = score_BTHM.shape[-1]
    if k >= M:
        return torch.ones_like(score_BTHM, dtype=torch.bool)
    bits = score_BTHM.detach().float().contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats, negative ones too
    tie = torch.arange(M - 1, -1, -1, device=bits.device)
    picked = ((ordered.long() << 32) | tie).topk(k, -1).indices
    return torch.zeros_like(score_BTHM, dtype=torch.bool).scatter_(-1, picked, True)


def _mix(x: Tensor) -> Tensor:
    """A permutation of 32 bits, in place, that scatters neighbours: two rounds of multiply and xor-shift."""
    x ^= (x >> 16) & 0xFFFF  # masked: torch's shift keeps the sign
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


class Noise(nn.Module):
    """Standard Gumbel noise as a function of stream, update, position, head and slot, in place of a random generator.

    It is new with each update, and the same in a resumed run, in a recorded update, in a pass that is computed again
    and in a batch in parts: a pass belongs to the next update if the weights are not those of the pass before. All of
    it happens on the device. Rows get the same noise: in a batch in parts, a row does not know its number.
    """

    stream: Tensor
    update: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("stream", "update", "seen"):  # the last: the bits of the weights, summed
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def draw(self, generator: torch.Generator) -> None:
        self.stream.random_(generator=generator)

    @torch.no_grad()
    def forward(self, weight: Tensor, position_BT: Tensor, n_heads: int, slots: int) -> Tensor:
        """(B, T, H, M) in the dtype of `weight`, for the update to which a pass with this `weight` belongs."""
        bits = weight.view(torch.int32).sum()
        self.update += bits != self.seen
        self.seen.copy_(bits)
        low, high = self.stream.to(torch.int32), (self.stream >> 32).to(torch.int32)
        place = torch.arange(n_heads * slots, device=weight.device, dtype=torch.int32).view(n_heads, slots)
        x = position_BT.to(torch.int32)[..., None, None] * (n_heads * slots) + place
        x = _mix(_mix(_mix(x ^ low) ^ self.update.to(torch.int32)) ^ high)
        u = (((x >> 9) & 0x7FFFFF).to(weight.dtype) + 0.5) * 2.0**-23  # inside (0, 1), exactly
        return -(-u.log()).log()


class Mixer(Base):
    """Raven.

    Args:
        slots: how many keys and values a head keeps (slots)
        top_k: how many slots a token writes (slots)
        alpha: divides how strongly a token forgets and writes in the slots it picks
        router: one matrix, or two with a GELU between
        score: what the router's outputs go through before the largest are taken
        noise: Gumbel noise on the router's outputs in training
        qk_norm: RMSNorm of q and k, with a gain
        output_gate: gated RMSNorm a head; otherwise one RMSNorm over all heads
        mask_empty: leave slots that were never written out of the softmax
        a_max: largest initial decay rate A of a head, drawn from 1e-4 to a_max (log-decay = -A softplus(...))
    """

    def __init__(
        self,
        shape: Shape,
        *,
        slots: int = 256,
        top_k: int = 32,
        alpha: float = 1.0,
        router: Literal["linear", "mlp"] = "linear",
        score: Literal["sigmoid", "softmax"] = "sigmoid",
        noise: bool = True,
        qk_norm: bool = True,
        output_gate: bool = True,
        mask_empty: bool = False,
        a_max: float = 16.0,
    ) -> None:
        super().__init__()
        self.shape, self.slots, self.top_k, self.alpha = shape, slots, top_k, alpha
        self.score, self.mask_empty = score, mask_empty
        H, K, D = shape.n_heads, shape.head_dim, shape.d_model
        self.project = Projections(shape, K, activation="silu")
        self.decay = DecayGate(shape, a_max)
        self.hidden = nn.Linear(D, D) if router == "mlp" else None
        self.router = nn.Linear(D, H * slots, bias=False)
        if self.hidden is not None:
            nn.init.zeros_(self.hidden.bias)
        self.noise = Noise() if noise else None
        self.norm_q, self.norm_k = (RmsNorm(K) if qk_norm else nn.Identity() for _ in range(2))
        self.read = GatedOutput(shape, K) if output_gate else None
        self.norm = None if output_gate else RmsNorm(H * K)
        self.out = None if output_gate else nn.Linear(H * K, D, bias=False)

    def init_special(self, generator: Callable[[str], torch.Generator]) -> None:
        super().init_special(generator)
        if self.noise is not None:
            self.noise.draw(generator("noise.stream"))

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size, acc = (batch, self.shape.n_heads, self.slots), torch.promote_types(dtype, torch.float32)
        slots = {n: torch.zeros(*size, self.shape.head_dim, device=device, dtype=acc) for n in ("keys", "values")}
        start = torch.zeros(batch, device=device, dtype=torch.int32)
        return {**slots, "t": start, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        B, T = x_BTD.shape[:2]
        position_BT = torch.arange(T, device=q.device, dtype=torch.int32)[None]
        if state:
            position_BT = position_BT + state["t"][:, None]
        o, (keys, values) = slot_attention(
            self.norm_q(q).to(v.dtype),
            self.norm_k(k).to(v.dtype),
            v,
            self.decay(x_BTD)[..., None] * self.route(x_BTD, position_BT),
            mask_empty=self.mask_empty,
            initial_state=(state["keys"], state["values"]) if state else None,
            impl=self.shape.impl,
        )
        t_B = (position_BT[:, -1] + 1).expand(B)
        return self._output(F.silu(o), x_BTD), {"keys": keys, "values": values, "t": t_B, **carried}

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """How evenly all that was written went to the slots, a head."""
        position_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device, dtype=torch.int32)[None]
        return {"effective/slots": self.route(x_BTD, position_BT).sum(1)}

    def route(self, x_BTD: Tensor, position_BT: Tensor) -> Tensor:
        """r (B, T, H, M), fp32 or better, and zero but for top_k slots."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            x = x_BTD.to(accumulator(x_BTD))
            if self.hidden is not None:
                x = F.gelu(self.hidden(x))
            logit_BTHM = self.router(x).unflatten(-1, (-1, self.slots))
            if self.noise is not None and self.training:
                logit_BTHM = logit_BTHM + self.noise(self.router.weight, position_BT, *logit_BTHM.shape[2:])
            picked = top(logit_BTHM, self.top_k)
            if self.score == "softmax":
                return logit_BTHM.softmax(-1).masked_fill(~picked, 0.0) / self.alpha
            m_BTHM = logit_BTHM.sigmoid().masked_fill(~picked, 0.0)
            return m_BTHM / (self.alpha * m_BTHM.sum(-1, keepdim=True) + 1e-9)

    def _output(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        if self.read is not None:
            return self.read(o_BTHV, x_BTD)
        assert self.norm is not None
        assert self.out is not None
        return self.out(self.norm(o_BTHV.flatten(2)))
