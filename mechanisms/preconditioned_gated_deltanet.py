"""Preconditioned Gated DeltaNet: a delta rule that writes less along the channels its keys have used most.

Recurrence
    A_t = e^{c_t} A_{t-1} + b_t k_t^2                       a running sum of squared keys, a channel
    M_t = x^{-s},  s = r / (1 + |r|),  r = log(A_t + 1e-6) - center_h          between 1/x and x
    S_t = alpha_t (I - beta_t (M_t k_t) k_t^T) S_{t-1} + beta_t (M_t k_t) v_t^T
    o_t = RMSNorm( S_t^T q_t / sqrt(K) ) * silu(W_g x), a head
    alpha and beta as in Gated DeltaNet; e^c and b are a second pair of the same gates

Source
    Tumma, Loo & Rus 2026, "Preconditioned DeltaNet" (arXiv 2604.21100); of the paper only the abstract was at hand: the
    diagonal of the Hessian of the online least squares stands for its inverse. Recurrence, gates, x = 1.5, 1e-6, the
    center at -0.2, norms and initial values: the layer in fla (code). x is at most 2 there, so that no eigenvalue of a
    step is below -1. Choice: A ~ U(1e-4, a_max) for both decays, as in Gated DeltaNet here.

State
    S: n_heads * head_dim * d_v with d_v = expand_v * head_dim; A: n_heads * head_dim; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    No rotary positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernels.delta_rule import delta_rule
from kernels.linear_attention import linear_attention
from mechanisms._parts import Base, DecayGate, GatedOutput, Projections, Shape, State, WriteGate, unit_norm

REVISION = 1
STATE = "n_heads*head_dim*(head_dim*expand_v + 1)"
CACHE = "conv*n_heads*head_dim*(2 + expand_v)"
PARAMS = (
    "n_heads*head_dim*((2 + expand_v)*(d_model + (4 if short_conv else 0)) + 2*expand_v*d_model)"
    " + n_heads*(4*d_model + 5) + expand_v*head_dim"
)
LIMITS = ["expand_v >= 1", "a_max > 1e-4", "squash >= 1", "squash <= 2", "position != 'rope'"]
SAME_AS = {"gated_deltanet": "squash == 1"}

CENTER = -0.2
SMALLEST = 1e-6
"""Added to A, whose logarithm is taken."""


class Mixer(Base):
    """Preconditioned Gated DeltaNet.

    Args:
        expand_v: width of a value as a multiple of head_dim
        a_max: largest initial decay rate of a head, of S and of A, drawn from 1e-4 to a_max
        squash: how far a channel's writes may be scaled, down to 1 / squash and up to squash; 1 is Gated DeltaNet
    """

    def __init__(self, shape: Shape, *, expand_v: int = 1, a_max: float = 16.0, squash: float = 1.5) -> None:
        super().__init__()
        self.shape, self.d_v, self.log_squash = shape, expand_v * shape.head_dim, math.log(squash)
        self.project = Projections(shape, self.d_v, activation="silu")
        self.write, self.decay = WriteGate(shape), DecayGate(shape, a_max)
        self.curvature_write, self.curvature_decay = WriteGate(shape), DecayGate(shape, a_max)
        self.center = nn.Parameter(torch.full((shape.n_heads, 1), CENTER))
        self.read = GatedOutput(shape, self.d_v)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K, acc = self.shape.n_heads, self.shape.head_dim, torch.promote_types(dtype, torch.float32)
        S, A = (torch.zeros(batch, H, *size, device=device, dtype=acc) for size in ((K, self.d_v), (1, K)))
        return {"S": S, "A": A, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        k = unit_norm(k)
        written, A = self._precondition(k, x_BTD, state)
        o, S, _ = delta_rule(
            unit_norm(q),
            k,
            written,
            v,
            self.write(x_BTD),
            self.decay(x_BTD),
            scale=self.shape.head_dim**-0.5,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        return self.read(o, x_BTD), {"S": S, "A": A, **carried}

    def _precondition(self, k_BTHK: Tensor, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor]:
        """M_t k_t, and the last A: a linear attention with one key channel, whose values are the squared keys."""
        weight = self.curvature_write(x_BTD)[..., None]
        A_BTHK, end = linear_attention(
            torch.ones_like(weight),
            weight,
            k_BTHK.to(weight.dtype).square(),
            self.curvature_decay(x_BTD),
            initial_state=state["A"] if state else None,
            impl=self.shape.impl,
        )
        assert isinstance(end, Tensor)  # the pair comes with a normaliser alone
        with torch.autocast(x_BTD.device.type, enabled=False):
            r = (A_BTHK + SMALLEST).log() - self.center
            squash = torch.exp(r / (1 + r.abs()) * -self.log_squash)
            return (k_BTHK * squash).to(k_BTHK.dtype), end
