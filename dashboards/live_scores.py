"""What trials of a running sweep scored so far, read once each and a little at a time.

A first look at a store of ten thousand trials has as many files to read. A look reads for a fraction of a second and
says how many are left, so that counts, failures and whatever is known are there at once, also on a slow file system.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

from dashboards.about import main_metric
from runners.endings import where_diverged, why_pruned
from runners.ledger import Row
from runners.rungs import stands
from runners.schema import Member, Plan, Status
from runners.store import Store

AGAIN_S = 10.0
"""When a folder is looked at again that lacks what the ledger says is there: a network file system tells it late."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What a sweep is about: one metric on one evaluation set (or `valid`), and which way is better."""

    set: str
    metric: str
    direction: str

    @property
    def name(self) -> str:
        return f"{self.set}/{self.metric}"

    @property
    def sign(self) -> int:
        return 1 if self.direction == "max" else -1


def measure_of(plan: Plan) -> Measure:
    """The report's main metric."""
    name, metric = main_metric(plan)
    return Measure(name, metric, plan.metrics.get(metric, "max"))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a trial ended, as its folder says: `status` is planned where something is still to be run."""

    attempt: int
    status: Status
    score: float | None = None
    """The mean of the sweep's main metric over the set's slices; a diverged trial scores chance."""
    why: str = ""
    """Where it diverged, or was pruned."""


class Scores:
    """The ends of one plan's trials. `read` goes on where the last call stopped."""

    def __init__(self, store: Store, measure: Measure) -> None:
        self._store, self._measure = store, measure
        self._known: dict[str, Ended] = {}
        self._unsure: dict[str, float] = {}

    def get(self, trial_id: str, row: Row) -> Ended | None:
        """What is known of the trial's attempt; None if it has not been read."""
        found = self._known.get(trial_id)
        return found if found is not None and found.attempt == row.attempt else None

    def read(self, wanted: Iterable[tuple[Member, Row]], budget_s: float) -> int:
        """Read the folders of these ended trials for about `budget_s`: how many are left for the next time."""
        until, left = time.monotonic() + budget_s, 0
        for member, row in wanted:
            trial_id, now = member.trial.id, time.monotonic()
            is_known = self.get(trial_id, row) is not None
            if is_known and now < self._unsure.get(trial_id, now + 1):
                continue
            if now >= until:
                left += not is_known
                continue
            found = self._known[trial_id] = self._read(member, row)
            self._unsure.pop(trial_id, None)
            if not found.status.is_done:
                self._unsure[trial_id] = now + AGAIN_S
        return left

    def _read(self, member: Member, row: Row) -> Ended:
        if row.status == Status.COMPLETE:
            return self._complete(member, row)
        result = self._store.result(member.trial.id)
        if result is None or not stands(result, member.rungs):
            return Ended(row.attempt, Status.PLANNED if row.status.is_done else row.status)
        status = Status(result["status"])
        if status == Status.DIVERGED:
            chances = [p.chance[self._measure.metric] for p in self._slices(member) if self._measure.metric in p.chance]
            return Ended(row.attempt, status, _mean(chances), where_diverged(result))
        if status == Status.PRUNED:
            return Ended(row.attempt, status, None, why_pruned(result))
        return self._complete(member, row)

    def _complete(self, member: Member, row: Row) -> Ended:
        if self._missing(member):
            return Ended(row.attempt, Status.PLANNED)
        pieces = self._slices(member)
        if pieces or self._measure.set != "valid":
            rows = [self._store.evaluation(member.trial.id, piece.id) for piece in pieces]
        else:
            result = self._store.result(member.trial.id) or {}
            rows = [{"metrics": _unnamed(result.get("metrics", {}), "valid/")}]
        if pieces and None in rows:
            return Ended(row.attempt, Status.PLANNED)  # torn or altered: the next launch evaluates it again
        values = [found["metrics"].get(self._measure.metric) for found in rows if found]
        return Ended(row.attempt, Status.COMPLETE, None if None in values else _mean(values))

    def _slices(self, member: Member) -> list[Any]:
        return [piece for piece in member.slices if piece.set == self._measure.set]

    def _missing(self, member: Member) -> bool:
        """Whether an evaluation is not there yet. By name only: opening each one would take too long."""
        if not member.slices:
            return False
        try:
            there = set(os.listdir(self._store.trial_folder(member.trial.id) / "evals"))
        except OSError:
            return True
        return any(f"{piece.id}.json" not in there for piece in member.slices)


def _unnamed(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _mean(values: list[Any]) -> float | None:
    return fsum(values) / len(values) if values else None
