"""When a difference is one: the statistics of cells and of paired comparisons, over plain arrays.

Vocabulary
    pair    one training of side a and one of side b with the same seed and the same settings; the only unit of n
    block   the pairs of one setting: their seeds are repeats of it
    flips   the sign-flip test: if a and b are exchangeable, every sign of every paired difference is equally likely
    look    a report that was read before more seeds were added; p values are multiplied by the number of looks

Bounded scores (accuracies near a ceiling, solved or not solved) are tested by flips, which assume no distribution;
losses and log ratios by t. Intervals are by t with Satterthwaite's degrees of freedom, blocks weighted equally.
Simulated through `dashboards.compare.judged` (tests/simulate_verdicts.py): 2,000 sweeps without an effect, two to six
blocks, three and five seeds, scores normal, at a ceiling or bimodal. No bootstrap: at n = 20, where it could begin, it
covers the mean of scores near a ceiling no better than t (percentile 88 and 91 %, BCa 90 and 93 %, t 89 and 93 %).
Not covered: settings drawn at random (blocks are the ones the sweep asks about), and pairs that depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions
from statsmodels.stats.multitest import multipletests

from dashboards.needed import ALPHA as ALPHA
from dashboards.needed import pairs_needed as pairs_needed

POWER = 0.8
MAX_MISSING = 0.2
"""Share of planned pairs that may be missing before a comparison gets no verdict."""
ALL_FLIPS = 16
"""Up to this many pairs every flip is counted; above it `DRAWN_FLIPS` of them and the identity."""
DRAWN_FLIPS = 20_000
FLIPS_AT_ONCE = 4_096
"""Bounds the memory of a test with very many pairs."""
MOST_SEEDS = 1_000
"""Beyond this, "needs about n seeds" says "more than"."""
MIN_PAIRS_FOR_SD = 10

Blocks = Mapping[str, Sequence[float]]
"""Paired differences by block."""
Floats = NDArray[np.float64]


class Verdict(StrEnum):
    """What a comparison says. There is no "equal": that needs a margin."""

    A_BETTER = "a better"
    B_BETTER = "b better"
    NO_DIFFERENCE = "no difference beyond margin"
    CANNOT_TELL = "cannot tell"
    TOO_FEW = "too few pairs"
    MISSING = "no verdict"


@dataclass(frozen=True)
class Summary:
    """The seeds of one cell. `low`, `high` is a 95 % t interval of the mean from three seeds on; None below.

    `split` replaces the interval where seeds disagree by more than half the metric's range ("2 of 3 solved it"): no
    interval covers the mean of a two-humped score at such n.
    """

    values: tuple[float, ...]
    mean: float
    median: float
    low: float | None
    high: float | None
    split: str | None

    @property
    def n(self) -> int:
        return len(self.values)


def summarise(values: Sequence[float], bounds: Sequence[float] | None = None, direction: str = "max") -> Summary:
    """Summarise one cell's seeds; `bounds` is the metric's range, if it has one. NaN values are not counted."""
    kept = np.asarray([v for v in values if not math.isnan(v)], dtype=np.float64)
    if kept.size == 0:
        return Summary((), math.nan, math.nan, None, None, None)
    low = high = split = None
    mean = float(kept.mean())
    finite = bounds is not None and all(math.isfinite(b) for b in bounds)
    if finite and bounds is not None and np.ptp(kept) > (bounds[1] - bounds[0]) / 2:
        middle = (bounds[0] + bounds[1]) / 2
        solved = int((kept > middle).sum() if direction == "max" else (kept < middle).sum())
        split = f"{solved} of {kept.size} solved it"
    elif kept.size >= 3:
        half = float(distributions.t.ppf(1 - ALPHA / 2, kept.size - 1)) * float(kept.std(ddof=1)) / math.sqrt(kept.size)
        low, high = cut((mean - half, mean + half), bounds)
    return Summary(tuple(float(v) for v in kept), mean, float(np.median(kept)), low, high, split)


def cut(interval: tuple[float, float], bounds: Sequence[float] | None) -> tuple[float, float]:
    """The interval without what lies outside the metric's range."""
    if bounds is None:
        return interval
    return max(interval[0], bounds[0]), min(interval[1], bounds[1])


@dataclass(frozen=True)
class Estimate:
    """Mean over blocks of the mean paired difference, with its standard error and Satterthwaite's degrees of freedom.

    `se` and `df` are None when a block has one pair only: that block's variance is then not known.
    """

    mean: float
    se: float | None
    df: float | None

    def interval(self, level: float = 1 - ALPHA) -> tuple[float, float] | None:
        """The t interval at `level`; None without a standard error."""
        if self.se is None or self.df is None:
            return None
        half = float(distributions.t.ppf((1 + level) / 2, self.df)) * self.se
        return self.mean - half, self.mean + half

    def p_value(self) -> float | None:
        """Two-sided p of the t test against zero; differences that never vary are certain either way."""
        if self.se is None or self.df is None:
            return None
        if self.se == 0.0:
            return 1.0 if self.mean == 0.0 else 0.0
        return float(2 * distributions.t.sf(abs(self.mean) / self.se, self.df))


def estimate(blocks: Blocks) -> Estimate:
    """The effect over `blocks` (none empty), each with equal weight and its own variance (Satterthwaite 1946)."""
    arrays = [np.asarray(values, dtype=np.float64) for values in blocks.values()]
    mean = float(np.mean([a.mean() for a in arrays]))
    if any(a.size < 2 for a in arrays):
        return Estimate(mean, None, None)
    # The variance of each block's mean, and of their equally weighted mean.
    parts = np.array([a.var(ddof=1) / a.size for a in arrays])
    freedom = np.array([a.size - 1 for a in arrays], dtype=np.float64)
    if parts.sum() == 0.0:
        return Estimate(mean, 0.0, float(freedom.sum()))
    df = float(parts.sum() ** 2 / (parts**2 / freedom).sum())
    return Estimate(mean, float(math.sqrt(parts.sum())) / len(arrays), df)


def flip_p_value(blocks: Blocks) -> float:
    """Two-sided p of the sign-flip test on the mean over blocks of the mean difference.

    Exact (all flips) up to 16 pairs. Above, 20,000 drawn flips and the identity, from a fixed seed: the same data give
    the same p everywhere.
    """
    sizes = [len(values) for values in blocks.values()]
    weights = np.concatenate([np.full(n, 1 / (n * len(sizes))) for n in sizes])
    parts: Floats = np.concatenate([np.asarray(v, dtype=np.float64) for v in blocks.values()]) * weights
    observed = abs(parts.sum())
    # Sums of the same numbers in another order differ by rounding; a tie is a tie.
    reached = observed - 1e-12 * np.abs(parts).sum()
    signs, hits = _signs(parts.size), 0
    for start in range(0, len(signs), FLIPS_AT_ONCE):
        hits += int((np.abs(signs[start : start + FLIPS_AT_ONCE] @ parts) >= reached).sum())
    return hits / len(signs)


@lru_cache(maxsize=8)
def _signs(n: int) -> NDArray[np.int8]:
    """The flips of n pairs, a row of ±1 each; the identity is among them.

    Where all are counted only those that leave the first pair as it is: the others reach the same sums, negated.
    """
    if n <= ALL_FLIPS:
        bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1
        return (1 - 2 * bits).astype(np.int8)
    generator, signs = np.random.default_rng(0), np.ones((1 + DRAWN_FLIPS, n), dtype=np.int8)
    for start in range(1, len(signs), FLIPS_AT_ONCE):  # a part at a time: drawn numbers are eight times as wide
        part = signs[start : start + FLIPS_AT_ONCE]
        part -= 2 * generator.integers(0, 2, size=part.shape, dtype=np.int64).astype(np.int8)
    return signs


def holm(p_values: Sequence[float | None]) -> list[float]:
    """Holm-adjusted p values. A test without a p value counts as p = 1: it stays in the family."""
    if not p_values:
        return []
    known = [1.0 if p is None else min(p, 1.0) for p in p_values]
    return [float(p) for p in multipletests(known, alpha=ALPHA, method="holm")[1]]


def seeds_needed(blocks: Blocks, margin: float, n_tests: int = 1, looks: int = 1) -> int | None:
    """Seeds a block for 80 % power to see a true difference of `margin`, from the spread seen so far.

    At the first step of Holm (the strictest), by the noncentral t. Never computed for the observed effect, which
    would make power a function of p. None without two pairs in some block; `MOST_SEEDS` + 1 if not reached.
    """
    variances = [float(np.var(v, ddof=1)) for v in blocks.values() if len(v) > 1]
    if not variances or margin <= 0:
        return None
    spread = math.sqrt(sum(variances) / len(variances))
    n_blocks, level = len(blocks), ALPHA / (n_tests * looks)
    for n in range(2, MOST_SEEDS + 1):
        df = n_blocks * (n - 1)
        critical = float(distributions.t.ppf(1 - level / 2, df))
        shift = math.inf if spread == 0 else margin / spread * math.sqrt(n * n_blocks)
        if not math.isfinite(shift) or float(distributions.nct.sf(critical, df, shift)) >= POWER:
            return n
    return MOST_SEEDS + 1


def effect_in_sd(blocks_a: Blocks, blocks_b: Blocks, effect: float) -> float | None:
    """`effect` in standard deviations over seeds (within blocks, both sides pooled); None below ten pairs."""
    sides = [np.asarray(v, dtype=np.float64) for side in (blocks_a, blocks_b) for v in side.values()]
    freedom = sum(a.size - 1 for a in sides)
    if sum(len(v) for v in blocks_a.values()) < MIN_PAIRS_FOR_SD or freedom <= 0:
        return None
    spread = math.sqrt(sum(float(((a - a.mean()) ** 2).sum()) for a in sides) / freedom)
    return effect / spread if spread > 0 else None


@dataclass(frozen=True)
class Evidence:
    """What a verdict is reached from; differences are a − b in the scale they were tested on."""

    estimate: Estimate
    p_adjusted: float | None
    n_pairs: int
    n_missing: int
    n_needed: int
    """Pairs that flips need; 0 for a t test."""
    direction: str = "max"
    margin: float | None = None


def judge(found: Evidence) -> tuple[Verdict, str]:
    """The verdict and the reason for it in a few words."""
    planned = found.n_pairs + found.n_missing
    if planned == 0 or found.n_missing / planned > MAX_MISSING:
        return Verdict.MISSING, f"{found.n_missing} of {planned} pairs are missing"
    if found.n_pairs < found.n_needed:
        return Verdict.TOO_FEW, f"{found.n_pairs} pairs; {found.n_needed} could reach p ≤ {ALPHA}"
    wide, narrow = found.estimate.interval(), found.estimate.interval(1 - 2 * ALPHA)
    if wide is None or narrow is None or found.p_adjusted is None:
        return Verdict.CANNOT_TELL, "a block with one pair has no variance: it takes two seeds in every block"
    inside = found.margin is not None and -found.margin < narrow[0] and narrow[1] < found.margin
    if found.p_adjusted <= ALPHA and (wide[0] > 0 or wide[1] < 0):
        a_wins = (found.estimate.mean > 0) == (found.direction == "max")
        reason = "the interval excludes 0" + (", but lies inside the margin" if inside else "")
        return (Verdict.A_BETTER if a_wins else Verdict.B_BETTER), reason
    if inside:
        return Verdict.NO_DIFFERENCE, f"the 90 % interval lies inside ±{found.margin:g}"
    if found.p_adjusted <= ALPHA:
        return Verdict.CANNOT_TELL, "the interval holds 0"
    return Verdict.CANNOT_TELL, f"adjusted p is above {ALPHA}"
