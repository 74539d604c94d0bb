"""How often verdicts are wrong and intervals cover where the truth is known: `python -m tests.simulate_verdicts`.

Scores are made up; pairs, p values, Holm, intervals and verdicts are the product's own (`dashboards.compare.judged`).
Every side of a sweep is compared with one shared side, so that the tests of a family depend on each other as in a real
sweep. Blocks differ in difficulty and in spread.

    normal      losses around a level: tested by t
    accuracy    the same shape away from both ends: tested by flips
    ceiling     accuracies whose errors are rare and skewed, cut at 1
    bimodal     accuracies that are solved or not
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dashboards.compare import Comparison, judged
from dashboards.pairs import PairScore, Scored
from dashboards.stats import Floats, Verdict
from runners.schema import Pair, Plan, Test

KINDS = ("normal", "accuracy", "ceiling", "bimodal")
BLOCKS, SEEDS = (2, 3, 6), (3, 5)
WRONG = 0.06
"""At most this share of sweeps without an effect may claim one."""
COVERAGE = (0.93, 0.99)
LEVELS = np.array([0.9, 0.5, 0.7, 0.8, 0.3, 0.6])
"""By block: the share of trainings that solve it (bimodal), or how easy it is."""


def draw(kind: str, shape: tuple[int, ...], effect: float, generator: np.random.Generator) -> Floats:
    """Scores (..., blocks, seeds) with the mean of each block moved by `effect`, at most 0.08 (0.02 at the ceiling)."""
    level = LEVELS[: shape[-2], None]
    if kind == "normal":
        return 3 - level + effect + generator.normal(0, 0.02 + 0.1 * level, shape)
    if kind == "accuracy":
        return 0.3 + 0.3 * level + effect + generator.normal(0, 0.01 + 0.03 * level, shape)
    if kind == "ceiling":
        mistakes = 0.12 - 0.1 * level
        return 1 - np.minimum(generator.gamma(0.5, 2 * (mistakes - effect), shape), 1)
    solved = generator.random(shape) < level + effect / 0.855
    return np.where(solved, generator.uniform(0.93, 1.0, shape), generator.uniform(0.02, 0.2, shape))


def plan_of(kind: str, n_blocks: int, n_seeds: int, n_tests: int) -> Plan:
    """A plan with tests and no trials: what `judged` reads of one."""
    pairs = tuple(Pair(f"block {b}", seed, ("a",), ("b",)) for b in range(n_blocks) for seed in range(n_seeds))
    bounded = kind != "normal"
    common = {"set": "test", "metric": "score", "direction": "max", "bounded": bounded, "scale": "difference"}
    common |= {"margin": None, "step": None, "slices": (), "pairs": pairs, "unpaired_a": 0, "unpaired_b": 0}
    tests = tuple(Test(name=f"arm {i} vs base", a=f"arm: {i}", b="arm: base", **common) for i in range(n_tests))
    bounds = {"score": [0.0, 1.0]} if bounded else {}
    return Plan("simulated", "", {}, "", (), tests, {"score": "max"}, {}, {}, (), bounds)


def sweeps(plan: Plan, kind: str, effect: float, n: int, generator: np.random.Generator) -> Iterator[list[Comparison]]:
    """Judge `n` sweeps; side a of every test is better by `effect` in every block."""
    pairs = plan.tests[0].pairs
    shape = (len({pair.block for pair in pairs}), len({pair.seed for pair in pairs}))
    base = draw(kind, (n, 1, *shape), 0.0, generator)
    arms = draw(kind, (n, len(plan.tests), *shape), effect, generator)
    base, arms = (scores.reshape(n, -1, len(pairs)) for scores in (base, arms))
    blocks = tuple(dict.fromkeys(pair.block for pair in pairs))
    for i in range(n):
        yield judged(plan, [_scored(pairs, blocks, arm, base[i, 0]) for arm in arms[i]])


def _scored(pairs: tuple[Pair, ...], blocks: tuple[str, ...], a: Floats, b: Floats) -> Scored:
    scores = zip(pairs, a.tolist(), b.tolist(), strict=True)
    return Scored(tuple(PairScore(p.block, p.seed, x, y, x - y, 0, False) for p, x, y in scores), blocks=blocks)


@dataclass
class Tally:
    """What became of `n` sweeps of one cell."""

    kind: str
    n_blocks: int
    n_seeds: int
    n_tests: int
    n: int = 0
    wrong: int = 0
    """Sweeps with any "better" against the truth (any at all where nothing is better)."""
    covered: int = 0
    intervals: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)

    def add(self, found: list[Comparison], effect: float) -> None:
        claims = {Verdict.B_BETTER} if effect > 0 else {Verdict.A_BETTER, Verdict.B_BETTER}
        self.n += 1
        self.wrong += any(comparison.verdict in claims for comparison in found)
        self.verdicts.update(comparison.verdict for comparison in found)
        for comparison in found:
            if comparison.low is not None and comparison.high is not None:
                self.intervals += 1
                self.covered += comparison.low <= effect <= comparison.high

    @property
    def coverage(self) -> float:
        return self.covered / self.intervals

    def share(self, verdict: Verdict) -> float:
        return self.verdicts[verdict] / self.verdicts.total()

    def row(self) -> str:
        words = "  ".join(f"{name} {100 * self.share(name):5.1f} %" for name in (Verdict.A_BETTER, Verdict.TOO_FEW))
        name = f"{self.kind:8}  {self.n_blocks} blocks x {self.n_seeds} seeds  {self.n_tests} tests"
        return f"{name}  wrong {100 * self.wrong / self.n:4.1f} %  covered {100 * self.coverage:4.1f} %  {words}"


def simulate(
    kind: str, n_blocks: int, n_seeds: int, n_tests: int, *, n: int, effect: float = 0.0, seed: int = 0
) -> Tally:
    """Judge `n` sweeps of one cell; the same seed gives the same sweeps."""
    tally = Tally(kind, n_blocks, n_seeds, n_tests)
    generator = np.random.default_rng([seed, KINDS.index(kind), n_blocks, n_seeds, n_tests])
    for found in sweeps(plan_of(kind, n_blocks, n_seeds, n_tests), kind, effect, n, generator):
        tally.add(found, effect)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=2000, help="simulated sweeps a cell")
    parser.add_argument("--power", type=int, default=400, help="simulated sweeps a point of the power curve")
    given = parser.parse_args()
    gc.freeze()  # statsmodels collects garbage at each call
    print("no effect")
    for kind in KINDS:
        for n_tests in (1, 4):
            for n_blocks in BLOCKS:
                for n_seeds in SEEDS:
                    tally = simulate(kind, n_blocks, n_seeds, n_tests, n=given.sweeps)
                    fine = tally.wrong <= WRONG * tally.n and COVERAGE[0] <= tally.coverage <= COVERAGE[1]
                    print(tally.row() + ("" if fine else "  OUTSIDE THE BOUNDS"), flush=True)
    print("power: share of sweeps with one test that say a is better, and coverage of the true difference")
    for kind in KINDS:
        for n_blocks, n_seeds in ((2, 3), (2, 5), (3, 5), (6, 5)):
            for effect in (0.01, 0.02, 0.04, 0.08):
                tally = simulate(kind, n_blocks, n_seeds, 1, n=given.power, effect=_possible(kind, effect))
                print(f"effect {_possible(kind, effect):5.3f}  {tally.row()}", flush=True)


def _possible(kind: str, effect: float) -> float:
    """Errors of the easiest block at the ceiling are 3 %: no arm can be better there by more."""
    return effect / 4 if kind == "ceiling" else effect


if __name__ == "__main__":
    main()
