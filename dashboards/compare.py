"""A plan's tests and its results in, verdicts out: what was estimated, what was adjusted, what more it would take.

What a pair is and scores is `dashboards.pairs`; here seeds and blocks are never pooled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dashboards import stats, tuning
from dashboards.pairs import PairScore, Scored, Scorer
from dashboards.table import Results
from dashboards.tuning import UNTUNED, Tuning
from runners.schema import Plan, Test


@dataclass(frozen=True)
class Comparison:
    """One test of the sweep, judged. `low`, `high` is the 95 % interval, in the units of `effect`.

    For `scale: ratio` effect and interval are ratios a / b (1 = no difference); else differences a − b.
    """

    test: Test
    scored: Scored
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
    def pairs(self) -> tuple[PairScore, ...]:
        return self.scored.pairs

    @property
    def n_missing(self) -> int:
        return self.scored.n_missing

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
    scorer = Scorer(plan, results)
    return judged(plan, [scorer.score(test) for test in plan.tests], looks)


def judged(plan: Plan, scored: Sequence[Scored], looks: int = 1) -> list[Comparison]:
    """Judge the plan's tests from their pairs, in the plan's order."""
    raw = [_p_value(test, found.pairs) for test, found in zip(plan.tests, scored, strict=True)]
    seen = [None if p is None else min(1.0, p * looks) for p in raw]
    adjusted = [None if p is None else q for p, q in zip(seen, stats.holm(seen), strict=True)]
    rows = zip(plan.tests, scored, raw, adjusted, strict=True)
    return [_judge(plan, test, found, p, q, looks) for test, found, p, q in rows]


def _judge(plan: Plan, test: Test, scored: Scored, p: float | None, p_adjusted: float | None, looks: int) -> Comparison:
    tuned, pairs = tuning.of(plan, test), scored.pairs
    needed = stats.pairs_needed(len(plan.tests), looks) if _by_flips(test) else 0
    if not pairs:
        return Comparison(
            test,
            scored,
            *(math.nan, None, None, None, None),
            verdict=stats.Verdict.MISSING,
            reason=_why_nothing(scored),
            tuning=tuned,
        )
    blocks = _blocks(pairs, "difference")
    found = stats.estimate(blocks)
    margin = _margin(test)
    evidence = stats.Evidence(found, p_adjusted, len(pairs), scored.n_missing, needed, test.direction, margin)
    verdict, reason = stats.judge(evidence)
    if verdict == stats.Verdict.MISSING:
        reason += f" ({missing_text(scored)})"
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
        scored=scored,
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


def _why_nothing(scored: Scored) -> str:
    """Why a test has no pair at all."""
    if scored.n_missing == 0 and scored.n_outside:
        return "no size of a lies between the sizes of b: interpolation would be a guess"
    pairs = "1 pair" if scored.n_missing == 1 else f"{scored.n_missing} pairs"
    return f"none of {pairs} has a score on both sides ({missing_text(scored)})"


def missing_text(scored: Scored) -> str:
    """`2 failed, 1 planned`: what became of the missing pairs."""
    return ", ".join(f"{n} {why}" for why, n in scored.missing.items()) or "0 planned"


def _needs(
    plan: Plan, found: Comparison, blocks: Mapping[str, list[float]], needed: int, margin: float | None, looks: int
) -> str:
    """What would bring a verdict, where there is none; empty where there is one."""
    if found.verdict not in (stats.Verdict.CANNOT_TELL, stats.Verdict.TOO_FEW):
        return ""
    if thin := [block for block, values in blocks.items() if len(values) < 2]:
        return f"a second pair in {', '.join(block or 'all' for block in thin[:3])}{' and others' * (len(thin) > 3)}"
    # Enough seeds for flips to be able to speak at all, whatever the spread.
    least = math.ceil(needed / max(1, len(found.scored.blocks)))
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


def _p_value(test: Test, pairs: Sequence[PairScore]) -> float | None:
    if not pairs:
        return None
    blocks = _blocks(pairs, "difference")
    return stats.flip_p_value(blocks) if _by_flips(test) else stats.estimate(blocks).p_value()


def _blocks(pairs: Sequence[PairScore], what: str) -> dict[str, list[float]]:
    blocks: dict[str, list[float]] = {}
    for pair in pairs:
        blocks.setdefault(pair.block, []).append(getattr(pair, what))
    return blocks


def _block_mean(pairs: Sequence[PairScore], what: str) -> float:
    blocks = _blocks(pairs, what)
    return sum(sum(v) / len(v) for v in blocks.values()) / len(blocks) if blocks else math.nan
