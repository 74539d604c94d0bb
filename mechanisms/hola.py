"""HOLA: a gated delta rule with a small exact cache of the tokens it had to write most.

Recurrence
    S_t = alpha_t S_{t-1} + beta_t k_t e_t^T,   e_t = v_t - alpha_t S_{t-1}^T k_t          (Gated DeltaNet)
    m_t = beta_t |e_t|                                                                      = the size of the write
    A   = the `cache` tokens of largest m before the current block
    o_t = S_t^T q_t / sqrt(K) + lambda_h sum_j p_j v_j,   p = softmax( k~_j . q~_t / sqrt(K) ) over A, the tokens of the
          current block up to t, and a sink of value 0
    read "rms": q~ = RMSNorm(q) gamma_q, k~ = RMSNorm(k) gamma_k;   read "l2": the logit is q . k of unit q and k
    lambda_h = sigmoid(gate_h), one number a head

Source
    "A Hippocampus for Linear Attention" (arXiv 2607.02303), eq. 3-9 and appendix (paper): score, cache, block, lambda
    at -4, gammas shared by the heads. Choices, where it is silent: the sigmoid; a sink of value 0 and logit 0; scores a
    head; of equal scores the older token; the two reads added before the output norm; for "l2" no gamma and
    temperature 1. `admission` other than residual is the paper's ablations: recency (the latest tokens), error (|e|),
    value (beta |v|), and two controls of ours: random (a fixed hash of position and head), none (the block alone).

State
    S: n_heads * head_dim^2; score and position of each slot, and the length; keys and values of cache + block slots;
    3 tokens of q, k, v.

Cost
    T * (cache + block) in compute, constant in memory when decoding.

Limits
    Admission none needs a cache of 0. No rotary positions. What a token reads depends on where blocks begin: they count
    from the first token. A block as long as the sequence never reads the cache.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kernels.cache_attention import CacheState, cache_attention, empty_state
from kernels.delta_rule import delta_rule
from mechanisms._parts import Base, DecayGate, GatedOutput, Projections, Shape, State, WriteGate, unit_norm

REVISION = 1
STATE = "n_heads*head_dim*head_dim + 2*n_heads*(cache + block) + 1"
CACHE = "2*n_heads*head_dim*(cache + block) + 3*conv*n_heads*head_dim"
PARAMS = (
    "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + 2*d_model) + n_heads*(2*d_model + 4)"
    " + head_dim*(3 if read == 'rms' else 1)"
)
LIMITS = ["block >= 1", "cache >= 0", "a_max > 1e-4", "admission != 'none' or cache == 0", "position != 'rope'"]
CAPS = {"block": "seq_len", "cache": "((seq_len - 1) // block) * block"}
INERT = {"admission": "cache == 0 or cache >= ((seq_len - 1) // block) * block"}


def position_hash(position_BT: Tensor, n_heads: int) -> Tensor:
    """A number in [0, 1) a position and head, (B, T, H) fp32: the finaliser of MurmurHash3 on 32 bits."""
    word = (1 << 32) - 1
    x = (position_BT.long()[..., None] * n_heads + torch.arange(n_heads, device=position_BT.device)) & word
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & word
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & word
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24


class Mixer(Base):
    """HOLA.

    Args:
        cache: how many earlier tokens are kept exactly (tokens a head)
        block: length of a block, which is read exactly (tokens)
        admission: what a token is kept for: its residual, recency, error, value, at random, or none is kept
        read: how keys and queries are scaled in the exact read
        a_max: largest initial decay rate A of a head, drawn from 1e-4 to a_max (log-decay = -A softplus(...))
    """

    def __init__(
        self,
        shape: Shape,
        *,
        cache: int = 64,
        block: int = 256,
        admission: Literal["residual", "recency", "error", "value", "random", "none"] = "residual",
        read: Literal["rms", "l2"] = "rms",
        a_max: float = 16.0,
    ) -> None:
        super().__init__()
        self.shape, self.cache, self.block, self.admission = shape, cache, block, admission
        self.select = "none" if cache == 0 else "recent" if admission == "recency" else "top"
        H, K = shape.n_heads, shape.head_dim
        self.project = Projections(shape, K, activation="silu")
        self.write, self.decay = WriteGate(shape), DecayGate(shape, a_max)
        self.gamma_q = nn.Parameter(torch.ones(K)) if read == "rms" else None
        self.gamma_k = nn.Parameter(torch.ones(K)) if read == "rms" else None
        self.sink = nn.Parameter(torch.zeros(H))
        self.gate = nn.Parameter(torch.full((H,), -4.0))
        self.read = GatedOutput(shape, K)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K = self.shape.n_heads, self.shape.head_dim
        S = torch.zeros(batch, H, K, K, device=device, dtype=torch.promote_types(dtype, torch.float32))
        exact = empty_state(batch, H, K, K, width=self.cache, block=self.block, device=device, dtype=dtype)
        return {"S": S, **exact._asdict(), **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        dtype, q, k, beta = v.dtype, unit_norm(q), unit_norm(k), self.write(x_BTD)
        o, S, m = delta_rule(
            q,
            k,
            None,
            v,
            beta,
            self.decay(x_BTD),
            scale=self.shape.head_dim**-0.5,
            residual="norm",
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        assert m is not None
        exact = CacheState(*(state[name] for name in CacheState._fields)) if state else None
        o_cache, end = cache_attention(
            q,
            k,
            v,
            self._score(m, beta, v, exact),
            width=self.cache,
            block=self.block,
            gain=self._gain(q),
            sink=self.sink,
            select=self.select,
            initial_state=exact,
            impl=self.shape.impl,
        )
        o = torch.addcmul(o, self._weight()[:, None], o_cache)
        end = end._replace(k=end.k.to(dtype), v=end.v.to(dtype))
        return self.read(o, x_BTD), {"S": S, **end._asdict(), **carried}

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """Which share of what is kept comes from each quarter of the past, from the newest; and the read's weight."""
        position = state["position"][:, : self.cache]
        age = state["length"][:, None, None] - 1 - position
        quarter = (4 * age) // state["length"][:, None, None].clamp(min=1)
        kept = (position >= 0).sum().clamp(min=1)
        shares = {f"age/{n}": ((quarter == n) & (position >= 0)).sum() / kept for n in range(4)}
        return {**shares, "weight": self._weight()}

    def _weight(self) -> Tensor:
        """lambda, (H,)."""
        return self.gate.sigmoid()

    def _gain(self, q: Tensor) -> Tensor:
        """(K,): RMSNorm of a unit vector is sqrt(K) times it, so both norms, gains and 1 / sqrt(K) are one factor."""
        if self.gamma_q is None or self.gamma_k is None:
            return q.new_ones(q.shape[-1])
        return self.gamma_q * self.gamma_k * q.shape[-1] ** 0.5

    @torch.no_grad()
    def _score(self, m_BTH: Tensor, beta_BTH: Tensor, v_BTHV: Tensor, exact: CacheState | None) -> Tensor:
        """What a token is kept for, (B, T, H) >= 0. Not read by recency and none."""
        if self.admission == "error":
            return m_BTH / beta_BTH.clamp(min=torch.finfo(beta_BTH.dtype).tiny)
        if self.admission == "value":
            return beta_BTH * torch.linalg.vector_norm(v_BTHV.to(beta_BTH.dtype), dim=-1)
        if self.admission == "random":
            position_BT = torch.arange(m_BTH.shape[1], device=m_BTH.device).expand(m_BTH.shape[:2])
            if exact is not None:
                position_BT = position_BT + exact.length[:, None]
            return position_hash(position_BT, m_BTH.shape[2])
        return m_BTH
