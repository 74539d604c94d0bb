"""One update in parts, for a batch that does not fit into memory: the same loss and gradient, fewer rows at once.

The loss is the mean over the labels of the whole batch. Each part adds the sum over its own labels, divided by the
number of labels in the batch, so parts of different sizes, or with labels unevenly spread, weigh what they should; a
mean of means would not. What a model adds to the loss (balanced experts) is a mean over rows. Only the order of the
sums differs from the batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from runners import diagnose, evaluate
from runners.batch import Batch
from runners.model import Model
from runners.team import ALONE, Team


class Part(NamedTuple):
    """What a part of a batch gives: the loss at its labels, and what the model adds to that (None = nothing)."""

    loss: Tensor
    side: Tensor | None

    @property
    def total(self) -> Tensor:
        return self.loss if self.side is None else self.loss + self.side


def losses(
    model: Model, batch: Batch, dtype: str, rows: int | None, team: Team = ALONE
) -> Iterator[Callable[[], Part]]:
    """The parts of the batch's loss, `rows` rows each (None = all at once); their sum, over the team, is the loss."""
    n = len(batch.target_BQ)
    if team.size == 1 and (rows is None or rows >= n):
        yield lambda: Part(batch.mean_loss(evaluate.forward(model, batch, dtype)), _side(model, n))
        return
    n_labels = batch.n_labels()

    def part_of(part: Batch, weight: float) -> Part:
        loss, side = part.loss(evaluate.forward(model, part, dtype)) / n_labels, _side(model, n)
        return Part(loss, side) if weight else Part(0 * loss, None if side is None else 0 * side)

    for part, weight in team.parts(batch, rows):
        yield partial(part_of, part, weight)


def backward(model: Model, batch: Batch, dtype: str, rows: int | None, team: Team = ALONE) -> Tensor:
    """The loss at the labels, detached; the gradient, of what the model adds too, is added to the parameters'. Waits
    for no device. Both are this process's part of the team's."""
    total: Tensor | None = None
    for part_of in losses(model, batch, dtype, rows, team):
        part = part_of()
        part.total.backward()  # frees the part's activations before the next one is run
        total = part.loss.detach() if total is None else total + part.loss.detach()
    assert total is not None
    return total


def diagnose_parts(model: Model, batch: Batch, dtype: str, rows: int | None) -> dict[str, Any]:
    """`diagnose.find` on the first part with a value that is not finite."""
    found: dict[str, Any] = {}
    for part_of in losses(model, batch, dtype, rows):
        found = diagnose.find(model, lambda part_of=part_of: part_of().total)  # type: ignore[misc]
        if found["where"] != "?":
            break
    return found


def _side(model: Model, n_rows: int) -> Tensor | None:
    side_B = model.take_side_loss()
    return None if side_B is None else side_B.sum() / n_rows
