"""Where in a model a number first stopped being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def find(model: nn.Module, loss_of: Callable[[], Tensor]) -> dict[str, Any]:
    """`{"where", "what"}` of the first value that is not finite when `loss_of` runs the model forward and backward.

    `what` is weight, output (the first innermost module to give one), loss, or gradient (the parameter nearest the
    loss that has one). A step that cannot be repeated, on a device that is not deterministic, gives where "?".
    Gradients are zeroed. Waits for the device: meant for once, after the fact.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return {"where": name, "what": "weight"}
    found: list[str] = []
    handles = [module.register_forward_hook(_watch(name, found)) for name, module in model.named_modules() if name]
    try:
        loss = loss_of()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return {"where": found[0], "what": "output"}
    if not _finite(loss):
        return {"where": "loss", "what": "loss"}
    loss.backward()
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    return {"where": bad[-1], "what": "gradient"} if bad else {"where": "?", "what": "not found again"}


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _watch(name: str, found: list[str]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if any(isinstance(value, Tensor) and value.is_floating_point() and not _finite(value) for value in outputs):
            found.append(name)

    return hook
