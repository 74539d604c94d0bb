"""MesaNet: answers each query with the ridge regression of all values on all keys so far, solved anew for every token.

Recurrence
    H_t = gamma_t H_{t-1} + beta_t k_t k_t^T        R_t = gamma_t R_{t-1} + beta_t k_t v_t^T
    o_t = RMSNorm( R_t^T (H_t + diag(lambda))^-1 q_t ), a head
    beta = sigmoid(W_b x + b), gamma = sigmoid(W_a x + c), a head; q, k: SiLU, then length 1; v: as projected
    lambda = softplus(l) + lambda_min, a key channel, 1 at first

Source
    von Oswald et al. 2025 (arXiv 2506.05233), the Mesa layer with forgetting; at hand in third parties' words. Gates
    with biases, lambda and its bound of 0.25, the norm, no output gate, no convolution on v: the layer in fla (code).
    Choices: the solve is exact, a Cholesky factor a token (`kernels/mesa_solve.py`), where the paper and fla take up to
    30 steps of conjugate gradients, and gradients are those of the exact solution. `keep` shifts c, so that gamma can
    start higher than the 0.5 of that code, where half of what is held is gone after one token.

State
    H and R: 2 * n_heads * head_dim^2; 3 tokens of q and k.

Cost
    T * head_dim^3 in compute, constant in memory when decoding.

Limits
    No rotary positions. Plain torch on a card too: no Triton kernel for the solve.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.linear_attention import linear_attention
from kernels.mesa_solve import mesa_solve
from mechanisms._parts import CONV_WIDTH, Base, RmsNorm, Shape, ShortConv, State, unit_norm

REVISION = 1
STATE = "2*n_heads*head_dim*head_dim"
CACHE = "2*conv*n_heads*head_dim"
PARAMS = "n_heads*head_dim*(4*d_model + (8 if short_conv else 0) + 1) + 2*n_heads*(d_model + 1) + head_dim"
LIMITS = ["lambda_min > 0", "lambda_min < 1", "keep > 0", "keep < 1", "position != 'rope'"]


class Mixer(Base):
    """MesaNet.

    Args:
        lambda_min: what lambda, the ridge of each key channel, is never below
        keep: the initial gamma, the share of H and R that a token keeps
    """

    def __init__(self, shape: Shape, *, lambda_min: float = 0.25, keep: float = 0.5) -> None:
        super().__init__()
        self.shape, self.lambda_min, self.shift = shape, lambda_min, math.log(keep / (1 - keep))
        H, K = shape.n_heads, shape.head_dim
        self.qk = nn.Linear(shape.d_model, 2 * H * K, bias=False)
        self.conv = ShortConv(2 * H * K, "silu", shape.impl) if shape.short_conv else None
        self.v = nn.Linear(shape.d_model, H * K, bias=False)
        self.gates = nn.Linear(shape.d_model, 2 * H)
        self.ridge = nn.Parameter(torch.full((H, K), math.log(math.expm1(1 - lambda_min))))
        self.norm = RmsNorm(K)
        self.out = nn.Linear(H * K, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K = self.shape.n_heads, self.shape.head_dim
        zero = torch.zeros(batch, H, K, K, device=device, dtype=torch.promote_types(dtype, torch.float32))
        state = {"H": zero, "R": zero.clone()}
        if self.conv is not None:
            state["conv"] = torch.zeros(batch, CONV_WIDTH - 1, 2 * H * K, device=device, dtype=dtype)
        return state

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, carried = self._keys(x_BTD, state)
        v = self.v(x_BTD).unflatten(-1, (self.shape.n_heads, -1))
        beta, g = self._gates(x_BTD)
        start, impl = state or {}, self.shape.impl
        lam = F.softplus(self.ridge) + self.lambda_min
        y, H = mesa_solve(q, k, beta, g, lam, initial_state=start.get("H"), impl=impl)
        o, R = linear_attention(y, beta[..., None] * k, v, g, initial_state=start.get("R"), impl=impl)
        assert isinstance(R, Tensor)  # the pair comes with a normaliser alone
        return self.out(self.norm(o).flatten(2)), {"H": H, "R": R, **carried}

    def _keys(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor, State]:
        """q and k (B, T, H, K) of length 1, and the convolution's state."""
        qk, carried = self.qk(x_BTD), {}
        if self.conv is None:
            qk = F.silu(qk)
        else:
            qk, carried["conv"] = self.conv(qk, state["conv"] if state else None)
        qk = qk.to(accumulator(qk)).unflatten(-1, (2, self.shape.n_heads, -1))
        q, k = unit_norm(qk).unbind(2)
        return q, k, carried

    def _gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """beta and log gamma, fp32 (B, T, H)."""
        raw = self.gates(x_BTD)
        write, keep = raw.to(accumulator(raw)).chunk(2, -1)
        return write.sigmoid(), F.logsigmoid(keep + self.shift)
