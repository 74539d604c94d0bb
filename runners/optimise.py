"""Adam over one flat buffer, with a guard that stops at the first number that is not finite.

A small model has dozens of small parameters, and an optimiser that visits them one by one spends more time between
them than in them. Here all decayed parameters are views of one tensor, all others of a second; gradients likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from runners.team import ALONE, Team

P = TypeVar("P", bound=Tensor)
ALIGN = 64
"""Each parameter starts at a multiple of this many elements, so that vector loads stay aligned."""


class FlatAdam:
    """Adam or AdamW on the parameters of a model, clipped by their common norm.

    After the first gradient or loss that is not finite no update changes anything (`bad` stays 1): the weights are
    then those before that step. Nothing here waits for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        no_decay: set[str],
        *,
        optimizer: str,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip: float | None,
        team: Team = ALONE,
    ) -> None:
        named = dict(model.named_parameters())
        decayed = [p for name, p in named.items() if name not in no_decay]
        plain = [p for name, p in named.items() if name in no_decay]
        self._team = team
        groups_of = [parameters for parameters in (decayed, plain) if parameters]
        # All gradients in a row, and the loss behind them: a team adds them up at once.
        self._sums = groups_of[0][0].new_zeros(sum(map(room, groups_of)) + 1)
        self.flats: list[nn.Parameter] = []
        for parameters in groups_of:
            first = sum(flat.numel() for flat in self.flats)
            self.flats.append(_flatten(parameters, self._sums[first : first + room(parameters)]))
        groups = [[flat] for flat in self.flats]
        self._begin(groups, bool(decayed), optimizer, betas, eps, weight_decay, clip)

    def _begin(
        self,
        groups: list[list[nn.Parameter]],
        has_decayed: bool,
        optimizer: str,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip: float | None,
    ) -> None:
        """Sets up the updates of `groups`: the decayed, if there are such, and the others."""
        self.clip, self.flats = clip, [flat for group in groups for flat in group]
        decay = [weight_decay, 0.0] if has_decayed else [0.0]
        given = [{"params": group, "weight_decay": wd} for group, wd in zip(groups, decay, strict=False)]
        kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
        device = self.flats[0].device
        # On a card the rate is read there: an update that is recorded as a CUDA graph finds the newest.
        self.rate: Tensor | float = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        self.inner = kind(given, lr=self.rate, betas=betas, eps=eps, fused=True, capturable=device.type == "cuda")
        self.bad = torch.zeros((), device=device)
        self.inner.found_inf = self.bad  # what a gradient scaler sets: 1 skips the update

    def set_rate(self, lr: float) -> None:
        """The learning rate of the updates to come."""
        if isinstance(self.rate, Tensor):
            self.rate.fill_(lr)
            return
        for group in self.inner.param_groups:
            group["lr"] = lr

    def step(self, loss: Tensor) -> Tensor:
        """One update from the gradients there are, which are then zeroed. Returns their norm before clipping.

        In a team gradients and `loss` are this process's part: `loss` becomes that of the whole batch, in place.
        """
        grads, norm = self._add_up(loss)
        self.bad.copy_(torch.maximum(self.bad, (~torch.isfinite(norm + loss)).float()))
        if self.clip is not None:
            torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.inner.step()
        torch._foreach_zero_(grads)
        return norm

    def _add_up(self, loss: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradients of the whole batch and their norm; `loss` becomes its loss, in place."""
        if self._team.size > 1:
            self._sums[-1] = loss
            loss.copy_(self._team.add(self._sums)[-1])
        grads = [flat.grad for flat in self.flats if flat.grad is not None]
        return grads, torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))

    def tensors(self) -> dict[str, Tensor]:
        """Moments and counts, by group."""
        found = {}
        for number, flat in enumerate(self.flats):
            for name, value in self.inner.state[flat].items():
                found[f"{number}.{name}"] = value
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes what `tensors` gave."""
        for number, flat in enumerate(self.flats):
            mine = {n.split(".", 1)[1]: t for n, t in tensors.items() if n.startswith(f"{number}.")}
            self.inner.state[flat] = {name: value.to(flat.device).clone() for name, value in mine.items()}


def places(parameters: Sequence[P]) -> Iterator[tuple[P, int, int]]:
    """Each parameter with where it starts and stops in the flat one."""
    start = 0
    for parameter in parameters:
        yield parameter, start, start + parameter.numel()
        start += -(-parameter.numel() // ALIGN) * ALIGN


def room(parameters: Sequence[Tensor]) -> int:
    """Elements of the flat parameter."""
    return sum(-(-parameter.numel() // ALIGN) * ALIGN for parameter in parameters)


def _flatten(parameters: list[nn.Parameter], grad: Tensor) -> nn.Parameter:
    """One parameter that holds them all, with the gradient `grad`; they, and their gradients, become views of it."""
    flat = nn.Parameter(parameters[0].new_zeros(len(grad)))
    flat.grad = grad
    for parameter, start, stop in places(parameters):
        with torch.no_grad():
            flat[start:stop] = parameter.flatten()
            parameter.data = flat.data[start:stop].view_as(parameter)
        parameter.grad = flat.grad[start:stop].view_as(parameter)
    return flat
