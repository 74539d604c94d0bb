"""A plan's tests and its results in, verdicts out: which numbers make a pair, what is missing, what was adjusted.

Slices and mechanism sub-axes are averaged inside a pair before anything is counted; seeds and blocks are never pooled.
A diverged trial scores the task's chance level and is counted. A failed, pruned or unfinished one drops its pair and is
counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dashboards import stats, tuning
from dashboards.table import COMPARED_STAMPS, Results, chance, speaks_of
from dashboards.tuning import UNTUNED, Tuning
from runners.schema import Member, Pair, Plan, Status, Test


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
class Comparison:
    """One test of the sweep, judged. `low`, `high` is the 95 % interval, in the units of `effect`.

    For `scale: ratio` effect and interval are ratios a / b (1 = no difference); else differences a − b.
    """

    test: Test
    pairs: tuple[PairScore, ...]
    n_missing: int
    effect: float
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    verdict: stats.Verdict
    reason: str
    blocks: dict[str, float] = field(default_factory=dict)
    """Effect in each block: descriptive, without a test of its own."""
    needs: str = ""
    effect_sd: float | None = None
    tuning: Tuning = UNTUNED

    @property
    def mean_a(self) -> float:
        return _block_mean(self.pairs, "a")

    @property
    def mean_b(self) -> float:
        return _block_mean(self.pairs, "b")

    @property
    def n_diverged(self) -> int:
        return sum(pair.diverged for pair in self.pairs)

    @property
    def n_stamps_differ(self) -> int:
        return sum(pair.stamps_differ for pair in self.pairs)


def compare(plan: Plan, results: Results, looks: int = 1) -> list[Comparison]:
    """Judge every test of the plan, adjusted over all of them (Holm) and for `looks` looks."""
    scorer = _Scorer(plan, results)
    scored = [scorer.pairs(test) for test in plan.tests]
    raw = [_p_value(test, pairs) for test, pairs in zip(plan.tests, scored, strict=True)]
    seen = [None if p is None else min(1.0, p * looks) for p in raw]
    adjusted = [None if p is None else q for p, q in zip(seen, stats.holm(seen), strict=True)]
    rows = zip(plan.tests, scored, raw, adjusted, strict=True)
    return [_judge(plan, test, pairs, p, q, looks) for test, pairs, p, q in rows]


def _judge(
    plan: Plan, test: Test, pairs: list[PairScore], p: float | None, p_adjusted: float | None, looks: int
) -> Comparison:
    missing = len(test.pairs) - len(pairs)
    tuned = tuning.of(plan, test)
    needed = stats.pairs_needed(len(plan.tests), looks) if _by_flips(test) else 0
    if not pairs:
        reason = f"none of {len(test.pairs)} pairs is finished"
        return Comparison(
            test, (), missing, math.nan, None, None, None, None, stats.Verdict.MISSING, reason, tuning=tuned
        )
    blocks = _blocks(pairs, "difference")
    found = stats.estimate(blocks)
    margin = _margin(test)
    evidence = stats.Evidence(found, p_adjusted, len(pairs), missing, needed, test.direction, margin)
    verdict, reason = stats.judge(evidence)
    if tuned.is_selected:
        # The best of more suggestions is better by chance alone, as it was chosen on these very scores.
        if not tuned.is_alike and verdict != stats.Verdict.MISSING:
            verdict, reason = stats.Verdict.CANNOT_TELL, f"selected on these seeds, from {tuned.words()}"
        else:
            reason += "; selected on these seeds"
    interval = found.interval()
    if interval is not None and test.scale != "ratio" and (bounds := bounds_of(plan, test.metric)):
        widest = bounds[1] - bounds[0]
        interval = stats.cut(interval, (-widest, widest))
    out = Comparison(
        test=test,
        pairs=tuple(pairs),
        n_missing=missing,
        effect=_shown(test, found.mean),
        low=None if interval is None else _shown(test, interval[0]),
        high=None if interval is None else _shown(test, interval[1]),
        p=p,
        p_adjusted=p_adjusted,
        verdict=verdict,
        reason=reason,
        blocks={name: _shown(test, sum(v) / len(v)) for name, v in blocks.items()},
        effect_sd=stats.effect_in_sd(_blocks(pairs, "a"), _blocks(pairs, "b"), found.mean)
        if test.scale != "ratio"
        else None,
        tuning=tuned,
    )
    return replace(out, needs=_needs(plan, out, blocks, needed, margin, looks))


def _needs(
    plan: Plan, found: Comparison, blocks: Mapping[str, list[float]], needed: int, margin: float | None, looks: int
) -> str:
    """What would bring a verdict, where there is none; empty where there is one."""
    if found.verdict not in (stats.Verdict.CANNOT_TELL, stats.Verdict.TOO_FEW):
        return ""
    # Enough seeds for flips to be able to speak at all, whatever the spread.
    least = math.ceil(needed / max(1, len({pair.block for pair in found.test.pairs})))
    seeds = stats.seeds_needed(blocks, margin, len(plan.tests), looks) if margin else None
    if seeds is None:
        return f"at least {least} seeds" if found.verdict == stats.Verdict.TOO_FEW else ""
    if seeds > stats.MOST_SEEDS:
        return f"more than {stats.MOST_SEEDS} seeds to see the margin"
    return f"about {max(seeds, least)} seeds to see the margin"


def bounds_of(plan: Plan, metric: str) -> list[float] | None:
    """The range of `metric`: as the plan says, or 0 to 1 for a metric that a test calls bounded."""
    if metric in plan.bounds:
        return plan.bounds[metric]
    return [0.0, 1.0] if any(test.metric == metric and test.bounded for test in plan.tests) else None


def _by_flips(test: Test) -> bool:
    return test.bounded and test.scale != "ratio"


def _margin(test: Test) -> float | None:
    """The margin on the scale that is tested: a ratio's margin of 0.1 is a factor of 1.1 either way."""
    if test.margin is None or test.scale != "ratio":
        return test.margin
    return math.log1p(test.margin)


def _shown(test: Test, value: float) -> float:
    return math.exp(value) if test.scale == "ratio" else value


def _p_value(test: Test, pairs: list[PairScore]) -> float | None:
    if not pairs:
        return None
    blocks = _blocks(pairs, "difference")
    return stats.flip_p_value(blocks) if _by_flips(test) else stats.estimate(blocks).p_value()


def _blocks(pairs: list[PairScore], what: str) -> dict[str, list[float]]:
    blocks: dict[str, list[float]] = {}
    for pair in pairs:
        blocks.setdefault(pair.block, []).append(getattr(pair, what))
    return blocks


def _block_mean(pairs: tuple[PairScore, ...], what: str) -> float:
    blocks = _blocks(list(pairs), what)
    return sum(sum(v) / len(v) for v in blocks.values()) / len(blocks) if blocks else math.nan


class _Scorer:
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

    def pairs(self, test: Test) -> list[PairScore]:
        """The pairs of `test` that both sides finished."""
        return [score for pair in test.pairs if (score := self._pair(test, pair)) is not None]

    def _pair(self, test: Test, pair: Pair) -> PairScore | None:
        a = self._side(test, pair.a)
        b = self._side(test, pair.b) if test.at_equal is None else self._at_equal_state(test, pair)
        if math.isnan(a) or math.isnan(b):
            return None
        if test.scale == "ratio" and (a <= 0 or b <= 0):
            return None  # no logarithm: counted with the missing
        difference = math.log(a / b) if test.scale == "ratio" else a - b
        ids = (*pair.a, *pair.b)
        diverged = sum(self.rows[trial]["status"] == Status.DIVERGED for trial in ids)
        return PairScore(pair.block, pair.seed, a, b, difference, diverged, self._stamps_differ(ids))

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

    def _at_equal_state(self, test: Test, pair: Pair) -> float:
        """Side b at the state of each trial of a: linear in the logarithm of the state, never beyond b's own sizes."""
        by_state: dict[int, list[float]] = {}
        for trial in pair.b:
            by_state.setdefault(self.members[trial][0].state_bytes, []).append(self._trial(test, trial))
        sizes = sorted(by_state)
        scores = [sum(by_state[size]) / len(by_state[size]) for size in sizes]
        wanted = [math.log2(self.members[trial][0].state_bytes) for trial in pair.a]
        found = np.interp(wanted, [math.log2(size) for size in sizes], scores, left=math.nan, right=math.nan)
        return float(found.mean())

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
