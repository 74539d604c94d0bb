"""What a model's memory is like after some tokens: one number a layer and reading, whatever the mechanism.

Of every state that is a matrix a head (kept in fp32: caches of keys and values are none):

    norm/NAME   Frobenius norm
    rank/NAME   effective rank (Roy and Vetterli 2007): e to the entropy of the shares of the singular values

and what a mechanism tells itself (`Base.probe`): a tensor of readings, of which the mean is shown; for a name that
begins with `effective/` it holds weights over its last dimension, and their effective number is shown, e to the entropy
of their shares. All are means over rows, heads and tokens. Metrics are called probe/LAYER/NAME; what is not finite is
left out.

Probing reruns parts of a forward pass on a few rows. It changes no training, and costs nothing where it is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mechanisms._parts import Base
from runners import evaluate
from runners.model import Model

ROWS = 8
"""Rows of the validation set that are looked at: the first of its last (longest) group."""


@torch.inference_mode()
def read(model: Model, task: Any, device: torch.device, dtype: str) -> dict[str, float]:
    """Every reading of every layer that holds a mechanism."""
    rows = task.groups("valid")[-1]
    batch = task.batch("valid", torch.arange(rows.start, min(rows.start + ROWS, rows.stop)), 0, device)
    seen: dict[int, tuple[Base, Tensor, dict[str, Tensor]]] = {}

    def watch(number: int, mixer: Base) -> Any:
        def take(_module: Any, given: tuple[Any, ...], result: Any) -> None:
            seen[number] = mixer, given[0], result[1]

        return mixer.register_forward_hook(take)

    mixers = [(number, layer.mixer) for number, layer in enumerate(model.layers)]
    was_training = model.training
    model.eval()
    handles = [watch(number, mixer) for number, mixer in mixers if isinstance(mixer, Base)]
    try:
        evaluate.forward(model, batch, dtype)
    finally:
        for handle in handles:
            handle.remove()
    found = {f"probe/{number}/{name}": value for number, one in seen.items() for name, value in readings(*one)}
    model.train(was_training)
    values = torch.stack(list(found.values())).tolist() if found else []
    return {name: value for name, value in zip(found, values, strict=True) if math.isfinite(value)}


def readings(mixer: Any, x_BTD: Tensor, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and scalars of one mixer that was given `x_BTD` from the start and ended with `state`."""
    start = mixer.initial_state(1, torch.device("cpu"), torch.bfloat16)
    for name, x in state.items():
        if start[name].dtype == torch.float32 and x.dim() >= 4:
            yield f"norm/{name}", torch.linalg.matrix_norm(x).double().mean()
            yield f"rank/{name}", effective_number(torch.linalg.svdvals(x)).mean()
    own = next(mixer.parameters()).dtype
    for name, x in mixer.probe(x_BTD.to(own), state).items():
        yield name, (effective_number(x) if name.startswith("effective/") else x.double()).mean()


def effective_number(weight: Tensor) -> Tensor:
    """e to the entropy of the shares of `weight` (..., n), over the last dimension; 0 where all are 0."""
    total = weight.double().sum(-1, keepdim=True)
    share = weight / total.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(total[..., 0] > 0, (-torch.xlogy(share, share).sum(-1)).exp(), 0.0)
