"""Exact linear attention: kernels with a finite feature map, so that the past is one matrix without approximation.

Recurrence
    o_t = sum_{s<=t} w(q_t, k_s) v_s / sum_{s<=t} w(q_t, k_s)
    hadamard_exp        w = sum_d e^{q_d + k_d}                        features e^q; e^k
    sum_squared         w = |q + k|^2                                  q, |q|^2, 1; 2k, 1, |k|^2
    difference_squared  w = |q - k|^2                                  q, |q|^2, 1; -2k, 1, |k|^2
    modulated_dot       w = (q . k + 1)(|q|^2 + 1)(|k|^2 + 1)          (|q|^2 + 1)[q, 1]; (|k|^2 + 1)[k, 1]
    S_t = S_{t-1} + f(k_t) v_t^T        z_t = z_{t-1} + f(k_t)         o_t = S_t^T f(q_t) / z_t . f(q_t)

Source
    "Exact Linear Attention" (arXiv 2605.18848v1): the kernels and the causal sums (paper). Sums run over time; the
    released code runs them over the heads, so that its attention mixes no tokens (code), and is not followed.
    Choices: q and k are normalised (`qk_norm`), by RMSNorm, or for modulated_dot to x / sqrt(1 + |x|^2): inside the
    unit ball no weight is negative, where the paper's sum of weights may come near 0. Hadamard_exp is summed with a
    running maximum a channel, e^{k - mu_t} with mu_t = max_{s<=t} k_s, which is a decay of the state by
    mu_{t-1} - mu_t: it cancels in o, and the normaliser is never below 1, however large q and k are. The sums of the
    other kernels are not taken below 1e-6 (1e-8 in the code). No rotary positions. The short convolution of all mixers.
    The paper's Memory Lobe, Hyper-Link and mixture of experts belong to the model. Where that is not causal, sums run
    over all tokens (paper), and the state is the last one of the causal sums.

State
    n_heads * F * (head_dim + 1), F = head_dim for hadamard_exp (and as many maxima), head_dim + 2 for the squared
    kernels, head_dim + 1 for modulated_dot; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    modulated_dot needs qk_norm. The short convolution looks back alone, so there is none in a model that is not causal.
    difference_squared is sum_squared with the sign of q turned, so with learnt projections
    the two are one class of models: sweep one. No kernel is sharp at unit scale: of 256 random keys of 64 channels, the
    equal one gets 0.008 of the weight under hadamard_exp, where softmax gives it 0.62.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.linear_attention import DEN_MIN, linear_attention
from mechanisms._parts import Base, Projections, RmsNorm, Shape, State, unit_norm

REVISION = 1
STATE = (
    "n_heads*(head_dim + (0 if kernel == 'hadamard_exp' else 1 if kernel == 'modulated_dot' else 2))*(head_dim + 1)"
    " + (n_heads*head_dim if kernel == 'hadamard_exp' else 0)"
)
CACHE = "3*conv*n_heads*head_dim"
PARAMS = (
    "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model)"
    " + (2*head_dim if qk_norm and kernel != 'modulated_dot' else 0)"
)
LIMITS = ["qk_norm or kernel != 'modulated_dot'", "position != 'rope'", "causal or not short_conv"]

EXTRA = {"hadamard_exp": 0, "sum_squared": 2, "difference_squared": 2, "modulated_dot": 1}
"""Features beyond head_dim."""


def squared_features(q: Tensor, k: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Of w = |q + sign k|^2, (..., K) -> (..., K + 2)."""
    q_size, k_size = (x.square().sum(-1, keepdim=True) for x in (q, k))
    one = torch.ones_like(q_size)
    return torch.cat([q, q_size, one], -1), torch.cat([2 * sign * k, one, k_size], -1)


def modulated_features(x: Tensor) -> Tensor:
    """Of w = (q . k + 1)(|q|^2 + 1)(|k|^2 + 1), for q and k alike, (..., K) -> (..., K + 1)."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1) * (x.square().sum(-1, keepdim=True) + 1)


def exp_features(q: Tensor, k: Tensor, mu_BHK: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e^q and e^k, each scaled to at most 1; the log-decay of what came before; the running maximum to go on from.

    Query t reads channel d of a state that is scaled by e^{-mu_td}: it brings e^{q_td + mu_td}, over the largest d. The
    result does not depend on mu, so no gradient goes through it.
    """
    with torch.no_grad():
        mu = k.cummax(1).values
        if mu_BHK is not None:
            mu = torch.maximum(mu, mu_BHK[:, None])
        before = mu[:, :1] if mu_BHK is None else mu_BHK[:, None]
        g = torch.cat([before, mu[:, :-1]], 1) - mu
        top = (q + mu).amax(-1, keepdim=True)
    return (q + mu - top).exp(), (k - mu).exp(), g, mu[:, -1]


def exp_features_of_all(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for queries that read every token: the maximum is that of the whole sequence, and nothing decays."""
    with torch.no_grad():
        mu = k.amax(1, keepdim=True)
        top = (q + mu).amax(-1, keepdim=True)
    return (q + mu - top).exp(), (k - mu).exp(), mu[:, 0]


def read_all(q_BTHF: Tensor, k_BTHF: Tensor, v_BTHV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What every query reads of all tokens, in the dtype of v; the sums S and z that it reads, in fp32 or better."""
    with torch.autocast(q_BTHF.device.type, enabled=False):
        q, k, v = (x.to(accumulator(x)) for x in (q_BTHF, k_BTHF, v_BTHV))
        S_BHFV, z_BHF = torch.einsum("bthf,bthv->bhfv", k, v), k.sum(1)
        weight = torch.einsum("bthf,bhf->bth", q, z_BHF).clamp(min=DEN_MIN)
        o_BTHV = torch.einsum("bthf,bhfv->bthv", q, S_BHFV) / weight[..., None]
        return o_BTHV.to(v_BTHV.dtype), S_BHFV, z_BHF


class Mixer(Base):
    """Exact linear attention.

    Args:
        kernel: what weighs a token: e^q times e^k a channel, a squared distance, or a modulated dot product
        qk_norm: q and k are normalised a head, by RMSNorm, or for modulated_dot into the unit ball
    """

    sees_all = True

    def __init__(
        self,
        shape: Shape,
        *,
        kernel: Literal["hadamard_exp", "sum_squared", "difference_squared", "modulated_dot"] = "hadamard_exp",
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        self.shape, self.kernel = shape, kernel
        self.project = Projections(shape, shape.head_dim)
        has_norm = qk_norm and kernel != "modulated_dot"
        self.q_norm = RmsNorm(shape.head_dim) if has_norm else None
        self.k_norm = RmsNorm(shape.head_dim) if has_norm else None
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K = self.shape.n_heads, self.shape.head_dim
        acc = torch.promote_types(dtype, torch.float32)
        S = torch.zeros(batch, H, K + EXTRA[self.kernel], K, device=device, dtype=acc)
        state = {"S": S, "z": torch.zeros_like(S[..., 0])}
        if self.kernel == "hadamard_exp":
            state["mu"] = torch.full((batch, H, K), -torch.inf, device=device, dtype=acc)
        return {**state, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        q, k, g, ends = self._features(q, k, state)
        if not self.shape.causal:
            o, S, z = read_all(q, k, v)
            return self.out(o.flatten(2)), {"S": S, "z": z, **ends, **carried}
        o, (S, z) = linear_attention(
            q,
            k,
            v,
            g,
            normalize=True,
            initial_state=(state["S"], state["z"]) if state else None,
            impl=self.shape.impl,
        )
        return self.out(o.flatten(2)), {"S": S, "z": z, **ends, **carried}

    def _features(self, q: Tensor, k: Tensor, state: State | None) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Features of q and k; the log-decay, if any; what else the state holds.

        Powers of e are at most 1 and keep the activations' dtype. Of squares only differences count: fp32 or better.
        """
        dtype = q.dtype
        with torch.autocast(q.device.type, enabled=False):
            q, k = self._normalised(q, k)
            if self.kernel == "hadamard_exp" and not self.shape.causal:
                q, k, mu = exp_features_of_all(q, k)
                return q.to(dtype), k.to(dtype), None, {"mu": mu}
            if self.kernel == "hadamard_exp":
                q, k, g, mu = exp_features(q, k, state["mu"] if state else None)
                return q.to(dtype), k.to(dtype), g, {"mu": mu}
            if self.kernel == "modulated_dot":
                return modulated_features(q), modulated_features(k), None, {}
            return *squared_features(q, k, 1.0 if self.kernel == "sum_squared" else -1.0), None, {}

    def _normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernel == "modulated_dot":
            return unit_norm(q.to(accumulator(q)), 1.0), unit_norm(k.to(accumulator(k)), 1.0)
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        return q.to(accumulator(q)), k.to(accumulator(k))
