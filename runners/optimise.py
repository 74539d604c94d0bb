"""Adam over one flat buffer, with a guard that stops at the first number that is not finite.

A small model has dozens of small parameters, and an optimiser that visits them one by one spends more time between
them than in them. Here all decayed parameters are views of one tensor, all others of a second; gradients likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    ) -> None:
        named = dict(model.named_parameters())
        decayed = [p for name, p in named.items() if name not in no_decay]
        plain = [p for name, p in named.items() if name in no_decay]
        self.clip = clip
        self.flats = [_flatten(parameters) for parameters in (decayed, plain) if parameters]
        decay = [weight_decay, 0.0] if decayed else [0.0]
        groups = [{"params": [flat], "weight_decay": wd} for flat, wd in zip(self.flats, decay, strict=False)]
        kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
        device = self.flats[0].device
        # On a card the rate is read there: an update that is recorded as a CUDA graph finds the newest.
        self.rate: Tensor | float = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        self.inner = kind(groups, lr=self.rate, betas=betas, eps=eps, fused=True, capturable=device.type == "cuda")
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
        """One update from the gradients there are, which are then zeroed. Returns their norm before clipping."""
        grads = [flat.grad for flat in self.flats if flat.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        self.bad.copy_(torch.maximum(self.bad, (~torch.isfinite(norm + loss)).float()))
        if self.clip is not None:
            torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.inner.step()
        torch._foreach_zero_(grads)
        return norm

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


def _flatten(parameters: list[nn.Parameter]) -> nn.Parameter:
    """One parameter that holds them all; they, and their gradients, become views of it."""
    starts, total = [], 0
    for parameter in parameters:
        starts.append(total)
        total += -(-parameter.numel() // ALIGN) * ALIGN
    flat = nn.Parameter(parameters[0].new_zeros(total))
    flat.grad = torch.zeros_like(flat)
    for parameter, start in zip(parameters, starts, strict=True):
        stop = start + parameter.numel()
        with torch.no_grad():
            flat[start:stop] = parameter.flatten()
            parameter.data = flat.data[start:stop].view_as(parameter)
        parameter.grad = flat.grad[start:stop].view_as(parameter)
    return flat
