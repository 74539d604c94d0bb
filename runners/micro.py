"""One update in parts, for a batch that does not fit into memory: the same loss and gradient, fewer rows at once.

The loss is the mean over the labels of the whole batch. Each part adds the sum over its own labels, divided by the
number of labels in the batch, so parts of different sizes, or with labels unevenly spread, weigh what they should; a
mean of means would not. Only the order of the sums differs from the batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from runners import diagnose, evaluate
from runners.batch import Batch

NO_LABEL = -100
"""A target that counts for nothing: the default of `torch.nn.functional.cross_entropy`."""


def losses(model: nn.Module, batch: Batch, dtype: str, rows: int | None) -> Iterator[Callable[[], Tensor]]:
    """The parts of the batch's loss, `rows` rows each (None = all at once); their sum is the loss."""
    n = len(batch.target_BQ)
    if rows is None or rows >= n:
        yield lambda: F.cross_entropy(*_flat(model, batch, dtype))
        return
    n_labels = (batch.target_BQ != NO_LABEL).sum()
    for first in range(0, n, rows):
        part = batch[first : first + rows]
        yield lambda part=part: F.cross_entropy(*_flat(model, part, dtype), reduction="sum") / n_labels  # type: ignore[misc]


def backward(model: nn.Module, batch: Batch, dtype: str, rows: int | None) -> Tensor:
    """The loss of the batch, detached; its gradient is added to the parameters'. Waits for no device."""
    total: Tensor | None = None
    for loss_of in losses(model, batch, dtype, rows):
        loss = loss_of()
        loss.backward()  # frees the part's activations before the next one is run
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def diagnose_parts(model: nn.Module, batch: Batch, dtype: str, rows: int | None) -> dict[str, Any]:
    """`diagnose.find` on the first part with a value that is not finite."""
    found: dict[str, Any] = {}
    for loss_of in losses(model, batch, dtype, rows):
        found = diagnose.find(model, loss_of)
        if found["where"] != "?":
            break
    return found


def _flat(model: nn.Module, batch: Batch, dtype: str) -> tuple[Tensor, Tensor]:
    return evaluate.forward(model, batch, dtype).flatten(0, 1), batch.target_BQ.flatten()
