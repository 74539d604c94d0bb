"""What a sweep may spend, what it has spent, and when a launch has to stop for it.

`gpu_hours`, `wall` and `max_trials` are of the sweep: every launch of it, every attempt, whoever ran it, as the ledger
says. `--for` is of one launch. Time is counted from a worker's first word to its last, never the wait before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runners.durations import words

LOOK_EVERY_S = 2.0
"""How often the ledger is asked what has been spent."""


@dataclass(frozen=True, slots=True)
class Span:
    """One attempt of a trial: seconds since 1970; `ended` is None while it runs; `gpu` = cards, or the share of one."""

    trial: str
    started: float
    ended: float | None
    gpu: float


@dataclass(frozen=True)
class Spent:
    """`wall_s` is the time in which at least one trial of the sweep was at work; `trials` were begun."""

    gpu_hours: float = 0.0
    wall_s: float = 0.0
    trials: int = 0


def add_up(spans: Iterable[Span], now: float) -> Spent:
    """What attempts took in all; those still at work count up to `now`."""
    known = sorted((s.started, max(s.started, now if s.ended is None else s.ended), s.gpu, s.trial) for s in spans)
    gpu_s = wall_s = 0.0
    reached = float("-inf")
    for start, end, gpu, _ in known:
        gpu_s += (end - start) * gpu
        wall_s += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Spent(gpu_s / 3600, wall_s, len({span[3] for span in known}))


@dataclass(frozen=True)
class Budget:
    """Limits of a sweep, and of this launch (`for_s`). None = no limit."""

    gpu_hours: float | None = None
    wall_s: float | None = None
    max_trials: int | None = None
    for_s: float | None = None

    @classmethod
    def of(cls, budget: Mapping[str, Any], for_s: float | None = None) -> Budget:
        """From a plan's `budget`, whose `wall` is in seconds."""
        return cls(budget.get("gpu_hours"), budget.get("wall"), budget.get("max_trials"), for_s)

    @property
    def is_empty(self) -> bool:
        return self == Budget()

    def reached(self, spent: Spent, launch_s: float) -> str | None:
        """Which limit a running sweep has come to, in words with what to do; None if it may go on."""
        if self.for_s is not None and launch_s >= self.for_s:
            return f"--for {words(self.for_s)} is over"
        if self.gpu_hours is not None and spent.gpu_hours >= self.gpu_hours:
            used = f"{spent.gpu_hours:.3g} of {self.gpu_hours:g} GPU-hours are spent"
            more = f"{_more(spent.gpu_hours, self.gpu_hours):g}"
            return f"{used}; `sweep launch` with --set budget.gpu_hours={more} allows more"
        if self.wall_s is not None and spent.wall_s >= self.wall_s:
            used = f"budget.wall of {words(self.wall_s)} is over, all launches together"
            more = f"{math.ceil(_more(spent.wall_s, self.wall_s))}s"
            return f"{used}; `sweep launch` with --set budget.wall={more} allows more"
        return None

    def too_many(self, begun: int) -> str | None:
        """Why no further trial may be begun after `begun` of them; None if one may."""
        if self.max_trials is None or begun < self.max_trials:
            return None
        used = f"{begun} of at most {self.max_trials} trials are begun"
        return f"{used}; `sweep launch` with --set budget.max_trials={2 * max(begun, self.max_trials)} allows more"


def _more(spent: float, limit: float) -> float:
    """Twice what there is of the limit or of what is spent, which may be far above it; rounded up to two digits."""
    wanted = 2 * max(spent, limit)
    digit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    return float(f"{math.ceil(wanted / digit) * digit:.6g}")


class Allowance:
    """Looks after a budget during one launch. `spans` = closed attempts and other drivers'; `own` = those at work here.

    The clocks are arguments so that tests need not wait.
    """

    def __init__(
        self,
        budget: Budget,
        spans: Callable[[], Iterable[Span]],
        own: Callable[[], Iterable[Span]],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.budget = budget
        self._spans, self._own, self._clock, self._now = spans, own, clock, now
        self._began = clock()
        self._looked = float("-inf")
        self._has_total = budget.gpu_hours is not None or budget.wall_s is not None

    def reason(self) -> str | None:
        """Why the launch has to stop now, or None. Cheap: the ledger is asked every LOOK_EVERY_S."""
        launch_s = self._clock() - self._began
        spent = Spent()
        if self._has_total and self._clock() - self._looked >= LOOK_EVERY_S:
            self._looked = self._clock()
            spent = self.spent()
        return self.budget.reached(spent, launch_s)

    def reached(self) -> str | None:
        """The limit that is reached, with what is spent by now; None if the launch might go on."""
        return self.budget.reached(self.spent(), self._clock() - self._began)

    def spent(self) -> Spent:
        return add_up([*self._spans(), *self._own()], self._now())
