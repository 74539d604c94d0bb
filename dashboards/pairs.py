"""What the two sides of a pair scored, and why a pair could not be used.

Slices and mechanism sub-axes are averaged inside a pair. A diverged trial scores the task's chance level. A pair that a
side has no score for is left out and counted by the reason: nothing is dropped in silence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dashboards.table import COMPARED_STAMPS, Results, chance, speaks_of
from runners.schema import Member, Pair, Plan, Status, Test

NO_CHANCE = "diverged, where chance is not known"
NO_SCORE = "complete without a finite score"
NO_LOGARITHM = "not above 0, which a ratio needs"


@dataclass(frozen=True)
class PairScore:
    """One pair that could be used: both sides' scores and their difference a − b (of logs for a ratio)."""

    block: str
    seed: int
    a: float
    b: float
    difference: float
    diverged: int
    stamps_differ: bool


@dataclass(frozen=True)
class Scored:
    """The pairs of one test: those that can be used, and how many are missing for which reason.

    `n_outside` trials of a have a state outside the range of b's (`at_equal`) and are left out of both sides; a pair
    with no other is none, and not missing: no run could fill it. `blocks` are the blocks of the pairs that remain.
    """

    pairs: tuple[PairScore, ...]
    missing: Mapping[str, int] = field(default_factory=dict)
    n_outside: int = 0
    blocks: tuple[str, ...] = ()

    @property
    def n_missing(self) -> int:
        return sum(self.missing.values())


class Scorer:
    """Scores a trial, a side and a pair of a test."""

    def __init__(self, plan: Plan, results: Results) -> None:
        self.results = results
        self.members: dict[str, list[Member]] = {}
        for member in plan.members:
            self.members.setdefault(member.trial.id, []).append(member)
        # A trial reached by two arms has one result.
        self.rows = results.members.drop_duplicates("trial").set_index("trial").to_dict("index")
        self.curves: dict[tuple[str, int, str], float] = {}
        if any(test.step is not None for test in plan.tests):
            points = results.curves[["trial", "step", "metric", "value"]].itertuples(index=False)
            self.curves = {(trial, step, metric): value for trial, step, metric, value in points}

    def score(self, test: Test) -> Scored:
        """The pairs of `test` that both sides finished, and what became of the others."""
        pairs, missing, blocks, n_outside = [], Counter[str](), dict[str, None](), 0
        for pair in test.pairs:
            compared = pair if test.at_equal is None else self._inside(pair)
            n_outside += len(pair.a) - len(compared.a)
            if pair.a and not compared.a:
                continue
            blocks[pair.block] = None
            found = self._pair(test, compared)
            if isinstance(found, PairScore):
                pairs.append(found)
            else:
                missing[found] += 1
        return Scored(tuple(pairs), dict(missing), n_outside, tuple(blocks))

    def _pair(self, test: Test, pair: Pair) -> PairScore | str:
        """The pair's scores, or why it has none."""
        a = self._side(test, pair.a)
        b = self._side(test, pair.b) if test.at_equal is None else self._at_equal_state(test, pair)
        if not (math.isfinite(a) and math.isfinite(b)):
            return self._why_missing(test, (*pair.a, *pair.b))
        if test.scale == "ratio" and (a <= 0 or b <= 0):
            return NO_LOGARITHM
        difference = math.log(a / b) if test.scale == "ratio" else a - b
        ids = (*pair.a, *pair.b)
        diverged = sum(self.rows[trial]["status"] == Status.DIVERGED for trial in ids)
        return PairScore(pair.block, pair.seed, a, b, difference, diverged, self._stamps_differ(ids))

    def _why_missing(self, test: Test, trials: tuple[str, ...]) -> str:
        """What the first of `trials` without a score says for itself."""
        silent = (trial for trial in trials if not math.isfinite(self._trial(test, trial)))
        row = self.rows.get(next(silent, ""), {"status": Status.PLANNED})
        return {Status.COMPLETE: NO_SCORE, Status.DIVERGED: NO_CHANCE}.get(row["status"], str(row["status"]))

    def _stamps_differ(self, trials: tuple[str, ...]) -> bool:
        """Whether trials ran under different versions, devices or code.

        Each field is compared among the trials it speaks of (`table.speaks_of`); of others, the files that all of them
        used are.
        """
        seen: dict[tuple[str, str], Any] = {}
        for trial in trials:
            stamp, settings = self.results.stamps.get(trial, {}), self.members[trial][0].trial
            for name in COMPARED_STAMPS:
                if seen.setdefault((name, speaks_of(name, settings)), stamp.get(name)) != stamp.get(name):
                    return True
        return len(set(self.results.shared_code(trials).values())) > 1

    def _side(self, test: Test, trials: tuple[str, ...]) -> float:
        scores = [self._trial(test, trial) for trial in trials]
        return sum(scores) / len(scores) if scores else math.nan

    def _size(self, trial: str) -> int:
        return self.members[trial][0].state_bytes

    def _inside(self, pair: Pair) -> Pair:
        """The pair without those sizes of a that lie outside b's range.

        The range is that of b's planned sizes, not of the finished ones: a failed run must not move what is compared.
        """
        sizes = [self._size(trial) for trial in pair.b] or [0]
        kept = tuple(trial for trial in pair.a if 0 < min(sizes) <= self._size(trial) <= max(sizes))
        return Pair(pair.block, pair.seed, kept, pair.b)

    def _at_equal_state(self, test: Test, pair: Pair) -> float:
        """Side b at the state of each trial of a: linear in the logarithm of the state, between b's own sizes."""
        by_state: dict[int, list[float]] = {}
        for trial in pair.b:
            by_state.setdefault(self._size(trial), []).append(self._trial(test, trial))
        sizes = sorted(by_state)
        scores = [sum(by_state[size]) / len(by_state[size]) for size in sizes]
        wanted = np.log2([self._size(trial) for trial in pair.a])
        return float(np.interp(wanted, np.log2(sizes), scores).mean())

    def _trial(self, test: Test, trial: str) -> float:
        """The trial's score on the test's metric; NaN where there is none (yet)."""
        row: dict[Any, Any] | None = self.rows.get(trial)
        if row is None or row["status"] not in (Status.COMPLETE, Status.DIVERGED):
            return math.nan
        slices = {piece.id: piece for member in self.members[trial] for piece in member.slices}
        wanted = [slices[name] for name in test.slices if name in slices]
        if test.slices and not wanted:
            return math.nan  # its own slices answer another question
        if wanted:
            values = [self.results.evals.get((trial, piece.id), {}).get(test.metric, math.nan) for piece in wanted]
            return sum(values) / len(values)
        if row["status"] == Status.DIVERGED:
            task = self.members[trial][0].trial.task.get("name")
            return chance(slices.values(), test.metric, task)
        name = f"{test.set}/{test.metric}"
        if test.step is not None:
            return self.curves.get((trial, test.step, name), math.nan)
        return float(row.get(name, math.nan))
