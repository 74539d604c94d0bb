"""The layers of the model: what joins a mixer and an mlp to the stream, and zoology's BaseConv as a mixer.

Letters: B rows, T time, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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


class Layer(nn.Module):
    """A mixer and, unless there is none, an mlp, each with its norm."""

    def __init__(self, d_model: int, mixer: Any, mlp: nn.Module | None, norm: str) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.mixer_norm, self.mixer = nn.LayerNorm(d_model), mixer
        self.mlp = mlp
        self.mlp_norm = nn.LayerNorm(d_model) if mlp is not None else None

    def _mlp(self, x: Tensor) -> Tensor:
        if self.mlp is None:
            return x
        assert self.mlp_norm is not None
        return x + self.mlp(self.mlp_norm(x)) if self.pre else self.mlp_norm(x + self.mlp(x))

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if self.pre:
            y_BTD, state = self.mixer(self.mixer_norm(x_BTD), state)
            return self._mlp(x_BTD + y_BTD), state
        y_BTD, state = self.mixer(x_BTD, state)
        return self._mlp(self.mixer_norm(x_BTD + y_BTD)), state

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        if self.pre:
            y_BD, state = self.mixer.step(self.mixer_norm(x_BD), state)
            return self._mlp(x_BD + y_BD), state
        y_BD, state = self.mixer.step(x_BD, state)
        return self._mlp(self.mixer_norm(x_BD + y_BD)), state
