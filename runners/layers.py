"""The layers of the model: what joins a mixer and an mlp to the stream, and zoology's BaseConv as a mixer.

`Layer` is the plain residual; `HyperLink` and the Memory Lobe are those of "Exact Linear Attention" (arXiv
2605.18848v1).

Letters: B rows, T time, D model width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import mechanisms
from mechanisms._parts import RmsNorm, Shape

State = dict[str, Any]


class BaseConv(nn.Module):
    """Zoology's BaseConv: y = conv(u) * (W u) + u, with a causal depthwise convolution over three tokens.

    Source: zoology `mixers/base_conv.py`. Carries the last two inputs: 2 d_model elements.
    """

    WIDTH = 3

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.project = nn.Linear(d_model, d_model)
        self.taps = nn.Parameter(torch.zeros(self.WIDTH, d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def init_special(self, generator: Any) -> None:
        bound = self.WIDTH**-0.5
        with torch.no_grad():
            self.taps.uniform_(-bound, bound, generator=generator("taps"))

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"past": torch.zeros(batch, self.WIDTH - 1, self.bias.shape[0], device=device, dtype=dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        past = self.initial_state(len(x_BTD), x_BTD.device, x_BTD.dtype)["past"] if state is None else state["past"]
        seen = torch.cat([past, x_BTD], dim=1)
        n = x_BTD.shape[1]
        mixed_BTD = self.bias + sum(self.taps[lag] * seen[:, lag : lag + n] for lag in range(self.WIDTH))
        return mixed_BTD * self.project(x_BTD) + x_BTD, {"past": seen[:, n:]}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BTD, state = self(x_BD[:, None], state)
        return y_BTD[:, 0], state


def make_norm(norm_type: str, d_model: int) -> nn.Module:
    return nn.LayerNorm(d_model) if norm_type == "layer" else RmsNorm(d_model)


def sequence(mixer: Any, x_BTD: Tensor, state: State | None, both_ways: bool) -> tuple[Tensor, State]:
    """The mixer over a sequence; `both_ways` adds what it makes of the reversed one, so that a token sees what comes
    before it and what comes after. The sum as in Vision Mamba (Zhu et al. 2024, arXiv 2401.09417), but for the weights,
    which are the same both ways (the simplest of the forms that Hydra compares, Hwang et al. 2024, arXiv 2407.09941):
    so a model has as many parameters as its causal twin."""
    y_BTD, after = mixer(x_BTD, state)
    return (y_BTD + mixer(x_BTD.flip(1))[0].flip(1) if both_ways else y_BTD), after


class Layer(nn.Module):
    """A mixer and, unless there is none, an mlp, each with its norm."""

    def __init__(
        self, d_model: int, mixer: Any, mlp: nn.Module | None, norm: str, norm_type: str, both_ways: bool = False
    ) -> None:
        super().__init__()
        self.pre, self.both_ways = norm == "pre", both_ways
        self.mixer_norm, self.mixer = make_norm(norm_type, d_model), mixer
        self.mlp = mlp
        self.mlp_norm = make_norm(norm_type, d_model) if mlp is not None else None

    def _mlp(self, x: Tensor) -> Tensor:
        if self.mlp is None:
            return x
        assert self.mlp_norm is not None
        return x + self.mlp(self.mlp_norm(x)) if self.pre else self.mlp_norm(x + self.mlp(x))

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if self.pre:
            y_BTD, state = sequence(self.mixer, self.mixer_norm(x_BTD), state, self.both_ways)
            return self._mlp(x_BTD + y_BTD), state
        y_BTD, state = sequence(self.mixer, x_BTD, state, self.both_ways)
        return self._mlp(self.mixer_norm(x_BTD + y_BTD)), state

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        if self.pre:
            y_BD, state = self.mixer.step(self.mixer_norm(x_BD), state)
            return self._mlp(x_BD + y_BD), state
        y_BD, state = self.mixer.step(x_BD, state)
        return self._mlp(self.mixer_norm(x_BD + y_BD)), state


class HyperLink(nn.Module):
    """A whole layer as one block: flow = a + mlp(a), a = mixer(norm(x)); y = x + flow, with a lobe + lobe(flow).

    One RMSNorm a layer, and nothing around the mixer alone (paper). That the mlp adds its own input is how the released
    mixture of experts does it (code); here every mlp does (choice), so that with and without experts differ in nothing
    else. The model's last norm stays: the paper's small experiments leave it out and advise against that at scale.
    """

    def __init__(self, d_model: int, mixer: Any, mlp: nn.Module | None, lobe: Any, both_ways: bool = False) -> None:
        super().__init__()
        self.mixer_norm, self.both_ways = RmsNorm(d_model), both_ways
        self.mixer, self.mlp, self.lobe = mixer, mlp, lobe

    def _flow(self, a: Tensor) -> Tensor:
        return a if self.mlp is None else a + self.mlp(a)

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        before = state or {"mixer": None, "lobe": None}
        a_BTD, own = sequence(self.mixer, self.mixer_norm(x_BTD), before["mixer"], self.both_ways)
        flow_BTD = self._flow(a_BTD)
        if self.lobe is None:
            return x_BTD + flow_BTD, {"mixer": own, "lobe": None}
        recalled_BTD, lobe = self.lobe(flow_BTD, before["lobe"])
        return x_BTD + flow_BTD + recalled_BTD, {"mixer": own, "lobe": lobe}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        a_BD, own = self.mixer.step(self.mixer_norm(x_BD), state["mixer"])
        flow_BD = self._flow(a_BD)
        if self.lobe is None:
            return x_BD + flow_BD, {"mixer": own, "lobe": None}
        recalled_BD, lobe = self.lobe.step(flow_BD, state["lobe"])
        return x_BD + flow_BD + recalled_BD, {"mixer": own, "lobe": lobe}


def memory_lobe(shape: Shape, causal: bool) -> nn.Module:
    """The Memory Lobe: exact linear attention of one head as wide as the model over a layer's flow, by Hadamard-exp.

    Three D x D matrices and no output projection (paper; its counts of parameters agree). Not `causal` are the paper's
    sums over the whole sequence: in a language model each position then reads what it is to predict, hence the
    abrupt drop of the paper's loss, which is gone when the lobe is causal (paper). Choice: q and k are not normalised,
    for the paper names no norm there; the running maximum keeps the powers in range. Carries D (D + 2) elements, fp32.
    """
    whole = dataclasses.replace(
        shape, n_heads=1, head_dim=shape.d_model, short_conv=False, position="none", causal=causal
    )
    lobe = mechanisms.get("ela")(whole, qk_norm=False)
    lobe.out = nn.Identity()
    return lobe
