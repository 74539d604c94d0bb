"""Log-linear attention: a state for each of log T blocks of the past, read with weights that the token chooses.

Recurrence
    level(t, s) = bit_length(t xor s), at most `levels` - 1: 0 is the token, l >= 1 an aligned block of 2^{l-1} tokens
    S^l_t = alpha_t (I - beta_t k_t k_t^T) S^l_{t-1}, S^0_t = beta_t k_t v_t^T      base gated_deltanet
    S^l_t = e^{-A dt_t} S^l_{t-1},                    S^0_t = dt_t b_t x_t^T        base mamba2 (q, k: c, b)
    y_t   = sum_l lambda^l_t S^l_t^T q_t; blocks merge as a binary counter carries; what surrounds it is the base's
    d = W x, `levels` numbers a head; lambda by `lam`:
    constant    softplus(b)               linear      softplus(L * d)       linear_one  softplus(L * d + b)
    mlp         softplus(W2 gelu(W1 d + b1) + b2)     softmax     softmax(W2 gelu(W1 d + b1) + b2) over the levels

Source
    Log-linear: Guo et al. 2025 (arXiv 2506.04761), both bases; lambda linear with L = 1 at the start, 0.69 where d = 0
    (code). Adaptive memory decay: arXiv 2605.06946, of which the abstract was at hand: lambda by an MLP of 64 features
    that the heads share, W2 = 0 and b2 = 0.54 at the start, softmax as its ablation with b2 = 0 (code).
    Choices: b2 = ln(e - 1) = 0.5413, so that lambda starts as 1 and the mixer as its base (0.54 gives 0.9992); W1 drawn
    as every matrix here (code: xavier). Controls of ours: constant and linear_one, both 1 at the start (b = ln(e - 1),
    L = 0): without linear_one an effect of the MLP cannot be told from one of the initial value, for "fixed lambda" of
    both codes is linear. Blocks are those of `mamba2` (one group) and `gated_deltanet`, with the same initial values.

State
    levels = 1 + ceil(log2(max_len or seq_len)) times the base's state, allocated whole; at token t 1 + popcount(t) of
    them hold something. The number of tokens; 3 tokens of what the base's convolution sees.

Cost
    T log T in compute; decoding costs and holds log(max_len), whatever T.

Limits
    Tokens further back than the top level share its state and weight, so any length runs. With max_len unset the levels
    are those of the training length, and all are trained; levels that only longer texts reach stay as drawn.
    A sequence that continues from a state goes token by token. No rotary positions.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.log_linear_attention import LogLinearState, log_linear_attention, n_levels
from mechanisms._parts import (
    Base,
    DecayGate,
    GatedOutput,
    Mamba2Block,
    Projections,
    Shape,
    State,
    WriteGate,
    unit_norm,
)

REVISION = 1
STATE = (
    "(1 + log(2*(max_len if max_len is not None else seq_len) - 1)//log(2))*n_heads*head_dim"
    "*(expand*d_state if base == 'mamba2' else head_dim*expand_v) + 1"
)
CACHE = "conv*(expand*n_heads*head_dim + 2*d_state if base == 'mamba2' else n_heads*head_dim*(2 + expand_v))"
PARAMS = (
    "(expand*n_heads*head_dim*(2*d_model + 1) + (expand*n_heads*head_dim + 2*d_state)*(d_model"
    " + (4 if short_conv else 0)) + expand*n_heads*(d_model + 3) if base == 'mamba2' else"
    " n_heads*head_dim*((2 + expand_v)*(d_model + (4 if short_conv else 0)) + 2*expand_v*d_model)"
    " + n_heads*(2*d_model + 2) + expand_v*head_dim)"
    " + (1 + log(2*(max_len if max_len is not None else seq_len) - 1)//log(2))"
    "*(n_heads*(expand if base == 'mamba2' else 1)*(1 if lam == 'constant' else d_model + 1 if lam == 'linear' else"
    " d_model + 2 if lam == 'linear_one' else d_model) + (129 if lam == 'mlp' or lam == 'softmax' else 0))"
    " + (64 if lam == 'mlp' or lam == 'softmax' else 0)"
)
LIMITS = [
    "max_len is None or max_len >= 1",
    "expand >= 1",
    "d_state >= 1",
    "expand_v >= 1",
    "a_min is None or a_min > 0",
    "a_max > (a_min if a_min is not None else 1 if base == 'mamba2' else 1e-4)",
    "position != 'rope'",
]
INERT = {
    "expand": "base == 'gated_deltanet'",
    "d_state": "base == 'gated_deltanet'",
    "expand_v": "base == 'mamba2'",
}

ONE = 0.541324854612918
"""ln(e - 1): softplus(ONE) = 1."""

HIDDEN = 64


class LevelWeights(nn.Module):
    """lambda (B, T, H, levels) >= 0, fp32: see the file's docstring."""

    def __init__(self, d_model: int, n_heads: int, levels: int, kind: str) -> None:
        super().__init__()
        self.n_heads, self.kind = n_heads, kind
        self.proj = nn.Linear(d_model, n_heads * levels, bias=False) if kind != "constant" else None
        if kind in ("linear", "linear_one"):
            self.L = nn.Parameter(torch.full((n_heads, levels), float(kind == "linear")))
        if kind in ("constant", "linear_one"):
            self.b = nn.Parameter(torch.full((n_heads, levels), ONE))
        if kind in ("mlp", "softmax"):
            self.up = nn.Linear(levels, HIDDEN)
            self.W2 = nn.Parameter(torch.zeros(HIDDEN, levels))
            self.b2 = nn.Parameter(torch.full((levels,), ONE if kind == "mlp" else 0.0))

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.proj is None:
            return F.softplus(self.b).expand(*x_BTD.shape[:2], -1, -1)
        d = self.proj(x_BTD).unflatten(-1, (self.n_heads, -1))
        with torch.autocast(x_BTD.device.type, enabled=False):
            d = d.to(accumulator(d))
            if self.kind == "linear":
                return F.softplus(self.L * d)
            if self.kind == "linear_one":
                return F.softplus(self.L * d + self.b)
            logits = F.gelu(self.up(d)) @ self.W2 + self.b2
            return F.softplus(logits) if self.kind == "mlp" else logits.softmax(-1)


class GatedDeltaBlock(nn.Module):
    """What surrounds the recurrence of `gated_deltanet`."""

    def __init__(self, shape: Shape, expand_v: int, a_min: float, a_max: float) -> None:
        super().__init__()
        d_v = expand_v * shape.head_dim
        self.project = Projections(shape, d_v, activation="silu")
        self.write, self.decay = WriteGate(shape), DecayGate(shape, a_max, a_min)
        self.read = GatedOutput(shape, d_v)


class Mixer(Base):
    """Log-linear attention.

    Args:
        base: the recurrence inside a block, and all around it
        lam: where a level's weight comes from
        max_len: length that levels are allotted for (tokens); none = the training length
        expand: of mamba2, width of all heads together as a multiple of d_model
        d_state: of mamba2, width of b and c (features)
        expand_v: of gated_deltanet, width of a value as a multiple of head_dim
        a_min: smallest initial decay rate A of a head; none = as the base, 1 in mamba2 and 1e-4 in gated_deltanet
        a_max: largest initial decay rate A of a head, drawn from a_min to a_max
    """

    def __init__(
        self,
        shape: Shape,
        *,
        base: Literal["mamba2", "gated_deltanet"] = "mamba2",
        lam: Literal["linear", "constant", "linear_one", "mlp", "softmax"] = "linear",
        max_len: int | None = None,
        expand: int = 2,
        d_state: int = 128,
        expand_v: int = 1,
        a_min: float | None = None,
        a_max: float = 16.0,
    ) -> None:
        super().__init__()
        self.shape, self.levels = shape, n_levels(max_len or shape.seq_len)
        self.block: Mamba2Block | GatedDeltaBlock
        if base == "mamba2":
            self.block = Mamba2Block(shape, expand, d_state, 1, 1.0 if a_min is None else a_min, a_max)
            self.size = (expand * shape.n_heads, self.levels, d_state, shape.head_dim)
        else:
            self.block = GatedDeltaBlock(shape, expand_v, 1e-4 if a_min is None else a_min, a_max)
            self.size = (shape.n_heads, self.levels, shape.head_dim, expand_v * shape.head_dim)
        self.weights = LevelWeights(shape.d_model, self.size[0], self.levels, lam)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        S = torch.zeros(batch, *self.size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        length = torch.zeros(batch, device=device, dtype=torch.int32)
        block = self.block
        conv = block.empty_conv if isinstance(block, Mamba2Block) else block.project.initial_state
        return {"S": S, "length": length, **conv(batch, device, dtype)}

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """The weight of each level."""
        return {f"lambda/{level}": lam for level, lam in enumerate(self.weights(x_BTD).unbind(-1))}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        start = LogLinearState(state["S"], state["length"]) if state else None
        lam, block, impl = self.weights(x_BTD), self.block, self.shape.impl
        if isinstance(block, Mamba2Block):
            q, k, x, dt, carried = block.inputs(x_BTD, state)
            v, g = (x * dt[..., None]).to(x.dtype), block.decay.log_decay(dt)
            o, end = log_linear_attention(q, k, v, g, lam, initial_state=start, impl=impl)
            return block.read(o, x, x_BTD), {**end._asdict(), **carried}
        q, k, v, carried = block.project(x_BTD, state)
        g, beta, scale = block.decay(x_BTD), block.write(x_BTD), self.shape.head_dim**-0.5
        q, k = unit_norm(q), unit_norm(k)
        o, end = log_linear_attention(q, k, v, g, lam, beta, scale=scale, initial_state=start, impl=impl)
        return block.read(o, x_BTD), {**end._asdict(), **carried}
