"""What every mechanism shares: the shape it is given, its surface, projections, norms, rotary positions.

The surface. A mechanism file defines one class `Mixer(Base)`:

    Mixer(shape, *, <YAML parameters>)
    forward(x_BTD, state=None) -> y_BTD, state      the whole sequence, continuing from `state` if given
    step(x_BD, state)          -> y_BD, state       one token
    initial_state(batch, device, dtype) -> state    before any token; `dtype` is the activations'
    packed(x_1TD, cu_seqlens, longest) -> y_1TD     sequences one behind the other, each from its own start
    probe(x_BTD, state)        -> {name: tensor}    what may be told of a sequence and its last state; nothing is fine

A state is a flat dict of tensors, batch first. Module-level literals are read without importing the file:
REVISION, STATE and CACHE (elements carried after `seq_len` tokens, per layer and sequence: STATE in fp32 or int32,
CACHE in the activations' dtype), PARAMS (parameters of one mixer), LIMITS, INERT, CAPS, SAME_AS.

Initial weights. The model draws the weight of every `nn.Linear` inside a mixer, and zeroes its bias. Then it calls
`mixer.init_special(generator)`, where `generator(name)` gives the generator for the parameter of that name inside the
mixer: this draws all other random parameters (convolution weights, decay rates). Everything else (gains 1, sinks 0,
gate logits) is set by the constructor and must be left as it is. So no weight depends on the order of construction.

Precision. Parameters are fp32. Activations may be bf16 (autocast); gates, scores and states are fp32 (fp64 if the
activations are).

Letters: B batch, T time, D model width, H heads, K key width, V value width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.short_conv import short_conv

State = dict[str, Tensor]

CONV_WIDTH = 4
"""Tokens the short convolution sees, itself included; so it carries three."""


@dataclass(frozen=True)
class Shape:
    """What the model gives every mixer. `seq_len` is the longest sequence it is trained on (tokens).

    Not `causal`: each token may read the whole sequence, which is then given whole. A mixer that says `sees_all` does
    so by itself; the model runs any other both ways. `grid`: of an image, rows and columns of its patches.
    """

    d_model: int
    n_heads: int
    head_dim: int
    seq_len: int
    short_conv: bool = True
    position: str = "none"
    impl: str = "auto"
    causal: bool = True
    grid: tuple[int, int] | None = None


class Base(nn.Module):
    """The part of a mixer's surface that does not differ between mechanisms."""

    sees_all = False
    """Whether the mixer heeds `Shape.causal`."""

    def init_special(self, generator: Callable[[str], torch.Generator]) -> None:
        """Draws the parameters that are neither weights of `nn.Linear` nor constants. See the file's docstring."""
        for name, module in self.named_modules():
            if isinstance(module, ShortConv | DecayGate):
                module.draw(functools.partial(_named, generator, name))

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """What can be told of a sequence from its start and the state after it; see `runners/probes.py`."""
        return {}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """One token. A mechanism whose `forward` costs nothing extra at T = 1 inherits this."""
        y_BTD, state = self(x_BD[:, None], state)
        return y_BTD[:, 0], state

    def packed(self, x_1TD: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Sequences one behind the other in a batch of 1, each from a start of its own: positions, blocks and windows
        count from there. Sequence n is the tokens from `cu_seqlens`[n] to [n + 1], (N + 1) integers where x is, from 0
        to T; none has more than `longest` tokens. Computed as N padded rows, which no causal mixer notices, so that
        nothing waits for the card: cost and memory are those of N * longest tokens.
        """
        first_N, step_L = cu_seqlens[:-1], torch.arange(longest, device=x_1TD.device)
        at_NL = (first_N[:, None] + step_L).clamp(max=x_1TD.shape[1] - 1)
        there_NL = step_L < cu_seqlens.diff()[:, None]
        y_NLD, _ = self(torch.where(there_NL[..., None], x_1TD[0, at_NL], 0.0))
        t_T = torch.arange(x_1TD.shape[1], device=x_1TD.device)
        n_T = torch.searchsorted(cu_seqlens, t_T, right=True) - 1
        return y_NLD[n_T, t_T - cu_seqlens[n_T]][None]


def _named(generator: Callable[[str], torch.Generator], module: str, parameter: str) -> torch.Generator:
    return generator(f"{module}.{parameter}")


class ShortConv(nn.Module):
    """Causal depthwise convolution of width 4 over the channels of q, k and v together. Carries 3 tokens."""

    def __init__(self, channels: int, activation: str | None, impl: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, CONV_WIDTH))
        self.activation, self.impl = activation, impl
        with torch.no_grad():  # usable before `init_special`: passes the token itself
            self.weight[:, -1] = 1.0

    @torch.no_grad()
    def draw(self, generator: Callable[[str], torch.Generator]) -> None:
        """Uniform within 1 / sqrt(width), as torch draws a convolution of one channel."""
        bound = self.weight.shape[1] ** -0.5
        self.weight.uniform_(-bound, bound, generator=generator("weight"))

    def forward(self, x_BTD: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return short_conv(x_BTD, self.weight, self.activation, state, impl=self.impl)


class Projections(nn.Module):
    """x -> q, k (heads of `d_k`; None: `head_dim`) and v (heads of `d_v`), by one matrix; then the short convolution.

    `activation` ("silu" or None) follows the convolution, and is there without it too.
    """

    def __init__(self, shape: Shape, d_v: int, activation: str | None = None, d_k: int | None = None) -> None:
        super().__init__()
        self.sizes = [shape.n_heads * (d_k or shape.head_dim)] * 2 + [shape.n_heads * d_v]
        self.n_heads, self.activation = shape.n_heads, activation
        self.qkv = nn.Linear(shape.d_model, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), activation, shape.impl) if shape.short_conv else None

    def forward(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor, Tensor, State]:
        """q_BTHK, k_BTHK, v_BTHV and the convolution's state (empty without one)."""
        qkv, carried = self.qkv(x_BTD), {}
        if self.conv is not None:
            qkv, carried["conv"] = self.conv(qkv, state["conv"] if state else None)
        elif self.activation:
            qkv = nn.functional.silu(qkv)
        q, k, v = qkv.split(self.sizes, -1)
        return *(t.unflatten(-1, (self.n_heads, -1)) for t in (q, k, v)), carried

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        if self.conv is None:
            return {}
        return {"conv": torch.zeros(batch, CONV_WIDTH - 1, sum(self.sizes), device=device, dtype=dtype)}


class DecayGate(nn.Module):
    """The log-decay of Mamba-2 and the gated delta rule, a head and token: g = -e^{A_log} softplus(W x + dt_bias), fp32
    (B, T, H).

    `a_min`, `a_max` bound the rates A that heads start with. With many heads some always start slow; with one or two
    heads a fast draw forgets faster than a short training can mend.
    """

    def __init__(self, shape: Shape, a_max: float, a_min: float = 1e-4) -> None:
        super().__init__()
        self.a_min, self.a_max = a_min, a_max
        self.proj: nn.Module = nn.Linear(shape.d_model, shape.n_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.n_heads))
        self.dt_bias = nn.Parameter(torch.full((shape.n_heads,), -4.6))  # softplus(-4.6) = 0.01

    @torch.no_grad()
    def draw(self, generator: Callable[[str], torch.Generator]) -> None:
        """A ~ U(a_min, a_max), a_min over 0 whose log is -inf; softplus(dt_bias) log-uniform in 1e-3..0.1 (code)."""
        self.A_log.uniform_(self.a_min, self.a_max, generator=generator("A_log")).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1), generator=generator("dt_bias")).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def step_size(self, x_BTD: Tensor) -> Tensor:
        """softplus(W x + dt_bias), which Mamba-2 also scales what it writes by; fp32 (B, T, H)."""
        raw_BTH = self.proj(x_BTD)
        with torch.autocast(x_BTD.device.type, enabled=False):
            return nn.functional.softplus(raw_BTH.to(accumulator(raw_BTH)) + self.dt_bias)

    def log_decay(self, step_BTH: Tensor) -> Tensor:
        return -self.A_log.exp() * step_BTH

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.log_decay(self.step_size(x_BTD))


class WriteGate(nn.Module):
    """How much of a token is written, a head and token: sigmoid(W x), fp32 (B, T, H)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.proj = nn.Linear(shape.d_model, shape.n_heads, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        raw_BTH = self.proj(x_BTD)
        return raw_BTH.to(accumulator(raw_BTH)).sigmoid()


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = x.to(accumulator(x))
        inverse = torch.linalg.vecdot(wide, wide).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, inverse)
        return (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        y, dy = x * inverse, grads[0].to(inverse.dtype)
        return (dy - y * torch.linalg.vecdot(dy, y).unsqueeze(-1)).mul_(inverse).to(x.dtype), None


def unit_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) along the last dimension, computed in fp32 or better and returned as x is: an op whose keys
    were wider than its values would run in the wider of the two. A zero vector stays zero."""
    with torch.autocast(x.device.type, enabled=False):
        return _UnitNorm.apply(x, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,) = grads
        unit, inverse, weight = ctx.saved_tensors
        dunit = dy * weight
        dweight = (dy * unit).sum(tuple(range(dy.dim() - 1)))
        mean = torch.linalg.vecdot(dunit, unit).div_(dy.shape[-1]).unsqueeze(-1)
        return dunit.sub_(unit * mean).mul_(inverse), dweight, None


class RmsNorm(nn.Module):
    """x / rms(x) * weight along the last dimension, in fp32 or better; `weight` (width,) starts at 1. With `groups`,
    each of so many parts of the dimension has an rms of its own."""

    def __init__(self, width: int, eps: float = 1e-5, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(accumulator(x))
            weight = self.weight.to(x.dtype)
            if self.groups == 1:
                return _RmsNorm.apply(x, weight, self.eps)
            parts = x.unflatten(-1, (self.groups, -1))
            return _RmsNorm.apply(parts, x.new_ones(parts.shape[-1]), self.eps).flatten(-2) * weight


class GatedOutput(nn.Module):
    """What leaves a gated delta rule: RMSNorm a head, times silu(W x), then the output projection."""

    def __init__(self, shape: Shape, d_v: int) -> None:
        super().__init__()
        self.norm = RmsNorm(d_v)
        self.gate = nn.Linear(shape.d_model, shape.n_heads * d_v, bias=False)
        self.out = nn.Linear(shape.n_heads * d_v, shape.d_model, bias=False)

    def forward(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate(x_BTD))
        return self.out(self.norm(o_BTHV).flatten(2) * gate)


class Mamba2Block(Base):
    """What surrounds Mamba-2's recurrence, in any form of it: see `mamba2`. Its `shape` has expand * n_heads heads.

    Letters: P width of a head, G groups, N width of b and c.
    """

    def __init__(self, shape: Shape, expand: int, d_state: int, groups: int, a_min: float, a_max: float) -> None:
        super().__init__()
        self.shape = dataclasses.replace(shape, n_heads=expand * shape.n_heads)
        self.d_state, self.groups = d_state, groups
        inner = self.shape.n_heads * shape.head_dim
        self.sizes = [inner, groups * d_state, groups * d_state]
        self.xbc = nn.Linear(shape.d_model, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), "silu", shape.impl) if shape.short_conv else None
        self.decay = DecayGate(self.shape, a_max, a_min)
        self.D = nn.Parameter(torch.ones(self.shape.n_heads))
        self.gate = nn.Linear(shape.d_model, inner, bias=False)
        self.norm = RmsNorm(inner, groups=groups)
        self.out = nn.Linear(inner, shape.d_model, bias=False)

    def empty_conv(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        if self.conv is None:
            return {}
        return {"conv": torch.zeros(batch, CONV_WIDTH - 1, sum(self.sizes), device=device, dtype=dtype)}

    def inputs(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        """c_BTGN, b_BTGN (a recurrence's q and k), x_BTHP, the step size dt_BTH, and the convolution's state."""
        xbc, carried = self.xbc(x_BTD), {}
        if self.conv is None:
            xbc = nn.functional.silu(xbc)
        else:
            xbc, carried["conv"] = self.conv(xbc, state["conv"] if state else None)
        x, b, c = xbc.split(self.sizes, -1)
        b, c = (t.unflatten(-1, (self.groups, -1)) for t in (b, c))
        return c, b, x.unflatten(-1, (self.shape.n_heads, -1)), self.decay.step_size(x_BTD), carried

    def read(self, y_BTHP: Tensor, x_BTHP: Tensor, x_BTD: Tensor) -> Tensor:
        """The skip, the gate, the norm of a group's heads together, the output projection."""
        gate = nn.functional.silu(self.gate(x_BTD))
        with torch.autocast(x_BTD.device.type, enabled=False):
            acc = accumulator(y_BTHP)
            y = (y_BTHP.to(acc) + self.D[:, None] * x_BTHP).flatten(2) * gate
            y = self.norm(y)
        return self.out(y)


def rotate(x_BTHK: Tensor, position_BT: Tensor, theta: float = 1e4) -> Tensor:
    """Rotary position embedding (RoFormer): the pair (i, i + K/2) turns by position * theta^(-2i/K)."""
    half = x_BTHK.shape[-1] // 2
    rate_K = theta ** (-torch.arange(half, device=x_BTHK.device, dtype=torch.float64) / half)
    angle = (position_BT.double()[..., None] * rate_K)[:, :, None]
    cos, sin = angle.cos().to(x_BTHK.dtype), angle.sin().to(x_BTHK.dtype)
    a, b = x_BTHK.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
