"""Which training rows a step sees, and their batches. A function of the step alone, so a resume sees what it would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runners import streams
from runners.batch import Batch

TOKENS_AHEAD = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Batches are made several steps at a time, about this many tokens: making them costs launches, not arithmetic."""


class Feed:
    """The batches of one training run.

    An epoch visits the task's groups in order (`order: blocks`) or in a fresh random order of batches and rows every
    epoch (`mixed`). The last batch of a group may be short. An endless task draws new rows every epoch.
    """

    def __init__(self, task: Any, batch_size: int, seed: int, device: torch.device) -> None:
        self.task, self.batch_size, self.seed, self.device = task, batch_size, seed, device
        self.groups = task.groups("train")
        self.plan = [
            (number, first) for number, rows in enumerate(self.groups) for first in range(0, len(rows), batch_size)
        ]
        self.lengths = [self._length(rows) for rows in self.groups]
        self.tokens_per_epoch = sum(len(rows) * length for rows, length in zip(self.groups, self.lengths, strict=True))
        self._ready: dict[int, Batch] = {}
        self._shuffle: tuple[int, Tensor, list[Tensor]] | None = None

    def _length(self, rows: range) -> int:
        return self.task.batch("train", torch.tensor(rows[:1]), self.seed).tokens_BT.shape[1]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.plan)

    def rows(self, step: int) -> tuple[int, Tensor]:
        """The group of step `step` (0-based) and its row numbers, on the host."""
        epoch, at = divmod(step, len(self.plan))
        if self.task.order == "mixed":
            batches, within = self._shuffled(epoch)
            number, first = self.plan[int(batches[at])]
            chosen = within[number][first : first + self.batch_size]
        else:
            number, first = self.plan[at]
            chosen = torch.arange(first, min(first + self.batch_size, len(self.groups[number])))
        if self.task.n_examples("train") is None:
            chosen = chosen + epoch * self.groups[-1].stop
        return number, chosen + self.groups[number].start

    def _shuffled(self, epoch: int) -> tuple[Tensor, list[Tensor]]:
        if self._shuffle is None or self._shuffle[0] != epoch:
            batches = streams.permutation(streams.key("batches", self.seed, epoch), len(self.plan))
            within = [
                streams.permutation(streams.key("rows", self.seed, epoch, number), len(rows))
                for number, rows in enumerate(self.groups)
            ]
            self._shuffle = (epoch, batches, within)
        return self._shuffle[1:]

    def batch(self, step: int) -> Batch:
        """The batch of step `step`. Made together with those of the next steps of the same group."""
        if step not in self._ready:
            self._ready = self._make(step)
        return self._ready[step]

    def _make(self, step: int) -> dict[int, Batch]:
        number, index_B = self.rows(step)
        ahead = [index_B]
        tokens = self.lengths[number] * self.batch_size
        for later in range(step + 1, step + max(1, TOKENS_AHEAD[self.device.type] // tokens)):
            at, index_B = self.rows(later)
            if at != number:
                break
            ahead.append(index_B)
        made = self.task.batch("train", torch.cat(ahead), self.seed, self.device)
        found, first = {}, 0
        for offset, index_B in enumerate(ahead):
            found[step + offset] = made[first : first + len(index_B)]
            first += len(index_B)
        return found
