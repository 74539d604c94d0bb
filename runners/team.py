"""Several processes that train one trial together: what they have to agree on, and what they add up.

Each trains its share of every batch and adds its part of the gradient, which is that of the whole batch: the losses
are those of one process but for the order of the sums. Rank 0 decides when to commit and when to stop, is the only one
that writes, and says to the others what it has decided. The number of processes is a resource, no setting: it is in no
id, and a checkpoint of any number of them is one of all.

A team of one does nothing at all, and is what everything else is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from runners.batch import Batch

T = TypeVar("T")


class MemberLostError(ConnectionError):
    """Another process of the team has died or failed; what it did may be told in its own words."""


@dataclass(frozen=True)
class Team:
    """This process among `size` that share a training, joined by torch's default process group.

    `sharded`: weights, gradients and moments are cut among them (FSDP) instead of being held by each (DDP).
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, value: T) -> T:
        """What rank 0 gives, for all. Waits for the other processes, not for the devices."""
        if self.size == 1:
            return value
        held: list[Any] = [value]
        with self._losing_members():
            dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        return held[0]

    def add(self, value: Tensor) -> Tensor:
        """`value`, in place, summed over the team: the same bits for each."""
        if self.size > 1:
            with self._losing_members():
                dist.all_reduce(value)
        return value

    def share(self, rows: Tensor) -> Tensor:
        """This process's part of `rows` (n, ...): each `size`-th, from its rank on. It may be empty."""
        return rows[self.rank :: self.size]

    def parts(self, batch: Batch, rows: int | None) -> Iterator[tuple[Batch, float]]:
        """This process's share of a batch, `rows` rows at once (None = all), each part with its weight.

        Every process gets the same number of parts, for they may have to meet in each: where one has no rows left it
        is given one with weight 0.
        """
        n = len(batch.target_BQ)
        most = -(-n // self.size)
        mine = batch[slice(self.rank, None, self.size)]
        at_once = min(rows or most, most)
        for first in range(0, most, at_once):
            part = mine[first : first + at_once]
            yield (part, 1.0) if len(part.target_BQ) else (batch[:1], 0.0)

    @contextlib.contextmanager
    def _losing_members(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as problem:  # torch has no narrower kind that all backends use
            text = str(problem).strip().splitlines()
            raise MemberLostError(f"a process of the trial was lost: {text[0] if text else problem!r}") from problem


ALONE = Team()
