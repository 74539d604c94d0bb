"""Rows that are made, not read: what the synthetic tasks share.

A row's numbers come from streams (`runners/streams.py`) whose counters are the row's own: it is the same on every
device, in any batch, on any worker and after any resume. Each split has streams of its own.

Letters: B rows, T time, Q labelled positions of a row, V vocabulary, S places, n of them chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runners import streams
from runners.batch import SPLITS, Batch, label_scores
from runners.schema import UserError


class Rows:
    """A task of one group, all rows alike in length. The subclass says what is in them: `make`.

    Args:
        name: the task's
        law: the settings that a row depends on. How many rows there are is none of them: raising that keeps the valid
            and test rows there are (training rows depend on every setting of the task, through their seed)
        fresh: every epoch draws new training rows; else the same rows come in another order
        rows: how many rows each split has
    """

    def __init__(self, name: str, law: dict[str, Any], *, fresh: bool, rows: dict[str, int]) -> None:
        self._name, self._law, self._fresh, self._rows = name, law, fresh, rows
        self.order = "blocks" if fresh else "mixed"

    def groups(self, split: str) -> list[range]:
        """Row numbers of one epoch."""
        return [range(self._rows[split])]

    def n_examples(self, split: str) -> int | None:
        return None if split == "train" and self._fresh else self._rows[split]

    def batch(self, split: str, index_B: Tensor, seed: int, device: torch.device | str = "cpu") -> Batch:
        """Rows `index_B` (int64, on the host), made on `device`."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
        return self.make(self.stream(split, seed), index_B.to(device, non_blocking=True)[:, None], split)

    def stream(self, split: str, seed: int) -> int:
        """What the rows of a split are drawn from."""
        return streams.key(self._name, split, seed if split == "train" else None, self._law)

    def make(self, stream: int, row_B1: Tensor, split: str) -> Batch:
        """The rows with these numbers, by draws from `stream`."""
        raise NotImplementedError

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Accuracy and loss of each row: its mean over the row's labels. `exact`: whether all of them are right."""
        right_BQ = logits_BQV.argmax(-1) == batch.target_BQ
        return {**label_scores(logits_BQV, batch), "exact": right_BQ.all(1).float()}


def refuse(task: str, rules: dict[str, bool], at: str) -> None:
    """Raises `UserError` for the first that does not hold: LIMITS once more, for who builds a task without a plan."""
    for rule, holds in rules.items():
        if not holds:
            raise UserError(f"{task} with {at} breaks the rule {rule}")


def draw(stream: int, name: str, row_B1: Tensor, width: int) -> tuple[int, Tensor]:
    """The stream `name` of these rows and its counters, `width` to a row."""
    return streams.key(stream, name), row_B1 * width + torch.arange(width, device=row_B1.device)


def integers(stream: int, name: str, row_B1: Tensor, width: int, of: int) -> Tensor:
    """`width` numbers of 0 .. of-1 for each row, with replacement."""
    return streams.integers(*draw(stream, name, row_B1, width), of)


def distinct(stream: int, name: str, row_B1: Tensor, n: int, of: int) -> Tensor:
    """n distinct numbers of 0 .. of-1 in uniformly random order: the places of the n largest of `of` random words."""
    return streams.bits(*draw(stream, name, row_B1, of)).topk(n, dim=1).indices


def successive(stream: int, name: str, row_B1: Tensor, n: int, weights: Sequence[float]) -> Tensor:
    """n distinct places, drawn one after the other with these weights among the places left.

    An exponential race is exactly that law: place s arrives at E_s / w_s, and the order of arrival is successive
    sampling (the minimum of what is left is place s with probability w_s over the weights left, by lack of memory).
    """
    w_S = torch.tensor(weights, dtype=torch.float64).to(row_B1.device, non_blocking=True)
    arrival_BS = streams.exponential(*draw(stream, name, row_B1, len(weights))) / w_S
    return arrival_BS.topk(n, dim=1, largest=False).indices


def places(first: int, last: int, row_B1: Tensor, every: int = 1) -> Tensor:
    """Labels at first, first + every, ... below last in every row."""
    return torch.arange(first, last, every, device=row_B1.device).expand(len(row_B1), -1)
