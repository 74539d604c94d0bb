"""The statistics: against numbers worked by hand, against scipy and statsmodels, and by simulation."""

import gc
import itertools
import math

import numpy as np
import pytest
import simulate_verdicts
from scipy import stats as scipy_stats
from simulate_verdicts import BLOCKS, COVERAGE, SEEDS, WRONG, simulate
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from dashboards import stats
from dashboards.stats import Estimate, Evidence, Verdict


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    # statsmodels collects garbage at each call of Holm, which would be nearly all that these tests do.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


# cells


def test_a_cell_of_three_seeds_by_hand():
    found = stats.summarise([0.70, 0.80, 0.90], [0, 1])
    # mean 0.8, sd 0.1, t(2, 97.5 %) = 4.302653: half width 4.302653 · 0.1 / √3 = 0.248414; cut at 1.
    assert found.mean == pytest.approx(0.8)
    assert found.median == pytest.approx(0.8)
    assert found.low == pytest.approx(0.8 - 0.248414, abs=1e-6)
    assert found.high == 1.0
    assert found.split is None
    assert found.n == 3


def test_two_seeds_have_no_interval_and_none_have_no_mean():
    two = stats.summarise([0.5, 0.6], [0, 1])
    assert (two.low, two.high, two.n) == (None, None, 2)
    empty = stats.summarise([math.nan])
    assert empty.n == 0
    assert math.isnan(empty.mean)


def test_seeds_that_split_say_so_instead_of_an_interval():
    found = stats.summarise([0.02, 0.99, 0.97], [0, 1])
    assert found.split == "2 of 3 solved it"
    assert (found.low, found.high) == (None, None)
    assert stats.summarise([0.02, 0.99, 0.97], None).split is None  # no range, no "half of it"
    assert stats.summarise([0.1, 0.9, 0.2], [0, 1], "min").split == "2 of 3 solved it"
    assert stats.summarise([0.3, 0.8, 0.5], [0, 1]).split is None  # exactly half the range is not more than half


# estimates


def test_one_block_is_the_paired_t_test():
    generator = rng(1)
    a, b = generator.normal(size=7), generator.normal(size=7)
    found = stats.estimate({"x": list(a - b)})
    expected = scipy_stats.ttest_rel(a, b)
    assert found.mean == pytest.approx((a - b).mean())
    assert found.df == pytest.approx(6)
    assert found.p_value() == pytest.approx(expected.pvalue)
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_satterthwaite_by_hand():
    # Block x: 1, 2, 3 (variance 1, n 3); block y: 0, 4 (variance 8, n 2). Variances of the means: 1/3 and 4.
    found = stats.estimate({"x": [1.0, 2.0, 3.0], "y": [0.0, 4.0]})
    assert found.mean == pytest.approx(2.0)
    assert found.se == pytest.approx(math.sqrt(1 / 3 + 4) / 2)
    assert found.df == pytest.approx((1 / 3 + 4) ** 2 / ((1 / 3) ** 2 / 2 + 4**2 / 1))


def test_satterthwaite_of_two_blocks_is_welch():
    # The mean of x and of −y is half their difference: same t, same df as Welch's test of x against y.
    generator = rng(2)
    x, y = generator.normal(0.4, 1.0, size=5), generator.normal(0.0, 3.0, size=9)
    found = stats.estimate({"x": list(x), "y": list(-y)})
    welch = scipy_stats.ttest_ind(x, y, equal_var=False)
    assert found.df == pytest.approx(welch.df)
    assert found.p_value() == pytest.approx(welch.pvalue)


def test_blocks_weigh_the_same_whatever_their_pairs():
    assert stats.estimate({"x": [1.0] * 9, "y": [0.0]}).mean == pytest.approx(0.5)


def test_a_block_with_one_pair_gives_no_interval():
    found = stats.estimate({"x": [1.0, 2.0], "y": [0.5]})
    assert found.interval() is None
    assert found.p_value() is None


def test_differences_that_never_vary():
    assert stats.estimate({"x": [0.0, 0.0]}).p_value() == 1.0
    assert stats.estimate({"x": [0.1, 0.1]}).p_value() == 0.0
    assert stats.estimate({"x": [0.0, 0.0]}).interval() == (0.0, 0.0)


# flips


@pytest.mark.parametrize("n", [1, 2, 6, 8])
def test_flips_of_one_sign_give_the_smallest_p(n):
    assert stats.flip_p_value({"x": [0.1 * (i + 1) for i in range(n)]}) == pytest.approx(2.0 ** (1 - n))


def test_flips_by_hand():
    # 3, 2, −1 sums to 4; of the eight sign choices ±6, ±4 (both signs) reach it: 4 of 8.
    assert stats.flip_p_value({"x": [3.0, 2.0, -1.0]}) == pytest.approx(0.5)
    assert stats.flip_p_value({"x": [0.0, 0.0, 0.0]}) == 1.0


def test_flips_weigh_blocks_and_count_ties_in_spite_of_rounding():
    blocks = {"x": [0.3, 0.1, -0.2], "y": [0.1, 0.7]}
    parts = [d / (2 * len(v)) for v in blocks.values() for d in v]
    observed = abs(math.fsum(parts))
    signs = list(itertools.product([1, -1], repeat=5))
    sums = [abs(math.fsum(s * p for s, p in zip(choice, parts, strict=True))) for choice in signs]
    assert stats.flip_p_value(blocks) == sum(s >= observed - 1e-12 for s in sums) / 32


def test_exact_flips_agree_with_scipy():
    differences = rng(3).normal(0.3, 1.0, size=9)
    expected = scipy_stats.permutation_test(
        (differences,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", n_resamples=np.inf
    )
    assert stats.flip_p_value({"x": list(differences)}) == pytest.approx(expected.pvalue)


def test_drawn_flips_repeat_and_stay_near_the_exact_p():
    differences = list(rng(4).normal(0.35, 1.0, size=18))
    codes = np.arange(2**18)[:, None] >> np.arange(18)
    sums = np.abs((1.0 - 2.0 * (codes & 1)) @ np.asarray(differences))
    exact = float((sums >= abs(sum(differences)) - 1e-12).mean())
    drawn = stats.flip_p_value({"x": differences})
    assert drawn == stats.flip_p_value({"x": differences})
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / stats.DRAWN_FLIPS))
    assert stats.flip_p_value({"x": [1.0] * 40}) == 1 / (stats.DRAWN_FLIPS + 1)  # the identity alone


# families of tests


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.04 times 3, 2, 1, then made to rise: 0.03, 0.04, 0.04.
    assert stats.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert stats.holm([0.01, None]) == pytest.approx([0.02, 1.0])  # a missing test keeps its place in the family
    assert stats.holm([]) == []
    assert stats.holm([1.7]) == [1.0]


def test_holm_agrees_with_statsmodels_on_random_families():
    for n in (1, 5, 20):
        p = rng(9, n).uniform(0, 0.1, size=n)
        assert stats.holm(list(p)) == pytest.approx(list(multipletests(p, method="holm")[1]))


@pytest.mark.parametrize("sizes", [(3,), (5, 5), (3, 4, 7), (2, 2, 2, 2)])
def test_flips_of_unequal_blocks_agree_with_scipy(sizes):
    blocks = {str(i): list(rng(10, i).normal(0.2, 1.0, size=n)) for i, n in enumerate(sizes)}
    weighted = np.concatenate([np.asarray(v) / len(v) for v in blocks.values()])
    expected = scipy_stats.permutation_test(
        (weighted,), lambda x, axis: np.sum(x, axis=axis), permutation_type="samples", n_resamples=np.inf
    )
    assert stats.flip_p_value(blocks) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(("spread", "margin", "n_tests"), [(1.0, 0.7, 1), (0.05, 0.02, 6), (0.3, 0.5, 3)])
def test_seeds_needed_agrees_with_the_power_of_statsmodels(spread, margin, n_tests):
    blocks = {str(i): [-spread + i, i, spread + i] for i in range(3)}  # sd = spread in each
    n = stats.seeds_needed(blocks, margin, n_tests)

    def power(seeds: int) -> float:
        level, df = stats.ALPHA / n_tests, 3 * (seeds - 1)
        return float(TTestPower().power(margin / spread, 3 * seeds, level, df=df, alternative="two-sided"))

    assert power(n) >= stats.POWER
    assert n == 2 or power(n - 1) < stats.POWER


@pytest.mark.parametrize(("n_tests", "looks", "needed"), [(1, 1, 6), (4, 1, 8), (20, 1, 10), (1, 4, 8), (2, 2, 8)])
def test_pairs_needed(n_tests, looks, needed):
    assert stats.pairs_needed(n_tests, looks) == needed
    smallest = 2.0 ** (1 - needed)
    assert smallest * n_tests * looks <= stats.ALPHA < 2 * smallest * n_tests * looks


def test_seeds_needed_has_the_power_it_promises():
    blocks = {"x": [0.0, 1.0, 2.0], "y": [3.0, 4.0, 5.0]}  # sd 1 within blocks
    n = stats.seeds_needed(blocks, margin=0.7)
    assert n is not None

    def power(seeds: int) -> float:
        draws = rng(5).normal(0.7, 1.0, size=(4000, 2 * seeds))
        t = draws.mean(1) / draws.std(1, ddof=1) * math.sqrt(2 * seeds)
        return float((np.abs(t) >= scipy_stats.t.ppf(0.975, 2 * seeds - 1)).mean())

    # One pooled variance here against one a block there: a df apart, so within 3 points of 80 %.
    assert power(n) >= 0.77
    assert power(n - 2) < 0.80
    assert stats.seeds_needed(blocks, margin=0.7, n_tests=10) > n
    assert stats.seeds_needed(blocks, margin=1e-6) == stats.MOST_SEEDS + 1
    assert stats.seeds_needed({"x": [1.0]}, margin=0.5) is None
    # The level of the differences does not enter, only their spread.
    assert stats.seeds_needed({"x": [9.0, 10.0, 11.0], "y": [3.0, 4.0, 5.0]}, margin=0.7) == n


def test_effect_in_sd_from_ten_pairs_only():
    a, b = {"x": [1.0, 3.0] * 5}, {"x": [0.0, 2.0] * 5}
    spread = math.sqrt(10 / 9)  # each side varies by ±1 around its mean, n = 10
    assert stats.effect_in_sd(a, b, 1.0) == pytest.approx(1 / spread)
    assert stats.effect_in_sd({"x": [1.0] * 9}, {"x": [0.0] * 9}, 1.0) is None


# verdicts


def evidence(mean, se=0.01, df=10.0, p=0.01, n=8, missing=0, needed=6, direction="max", margin=None) -> Evidence:
    return Evidence(Estimate(mean, se, df), p, n, missing, needed, direction, margin)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (evidence(0.10), Verdict.A_BETTER),
        (evidence(-0.10), Verdict.B_BETTER),
        (evidence(-0.10, direction="min"), Verdict.A_BETTER),
        (evidence(0.10, direction="min"), Verdict.B_BETTER),
        (evidence(0.10, p=0.06), Verdict.CANNOT_TELL),
        (evidence(0.01, se=0.01, p=0.04), Verdict.CANNOT_TELL),  # flips say yes, the interval holds 0
        (evidence(0.0, p=1.0), Verdict.CANNOT_TELL),  # never "equal" without a margin
        (evidence(0.0, p=1.0, margin=0.05), Verdict.NO_DIFFERENCE),
        (evidence(0.04, p=0.2, margin=0.05), Verdict.CANNOT_TELL),  # the 90 % interval sticks out
        (evidence(0.03, se=0.005, margin=0.05), Verdict.A_BETTER),  # real, though smaller than the margin
        (evidence(0.10, n=5), Verdict.TOO_FEW),
        (evidence(0.0, p=1.0, n=5, margin=0.05), Verdict.TOO_FEW),
        (evidence(0.10, n=3, needed=0), Verdict.A_BETTER),  # a t test may speak at three pairs
        (evidence(0.10, n=8, missing=2), Verdict.A_BETTER),  # exactly 20 % missing
        (evidence(0.10, n=11, missing=3), Verdict.MISSING),
        (evidence(0.10, n=0), Verdict.MISSING),
        (evidence(0.10, se=None, df=None), Verdict.CANNOT_TELL),
    ],
)
def test_verdicts(found, verdict):
    assert stats.judge(found)[0] == verdict


def test_a_real_difference_inside_the_margin_says_so():
    assert "inside the margin" in stats.judge(evidence(0.03, se=0.005, margin=0.05))[1]


# how often the rule is wrong when there is nothing to find


SLICE = 20
"""Sweeps a cell in the quick suite."""


@pytest.mark.parametrize("kind", simulate_verdicts.KINDS)
def test_a_slice_of_the_simulation_stays_within_its_bounds(kind):
    """One test a sweep, every number of blocks and seeds: 120 sweeps, three standard errors of a binomial allowed."""
    cells = [simulate(kind, blocks, seeds, 1, n=SLICE) for blocks in BLOCKS for seeds in SEEDS]
    n, wrong = sum(cell.n for cell in cells), sum(cell.wrong for cell in cells)
    assert n == SLICE * 6
    assert wrong / n <= WRONG + 3 * math.sqrt(WRONG * (1 - WRONG) / n)
    coverage = sum(cell.covered for cell in cells) / n
    assert coverage >= COVERAGE[0] - 3 * math.sqrt(COVERAGE[0] * (1 - COVERAGE[0]) / n)


def test_a_simulated_effect_is_found_the_right_way_round():
    for kind, effect in (("normal", 0.3), ("accuracy", 0.1)):
        found = simulate(kind, 3, 5, 1, n=SLICE, effect=effect)
        assert found.share(Verdict.A_BETTER) >= 0.9
        assert found.wrong == 0
    few = simulate("accuracy", 2, 3, 4, n=3, effect=0.1)  # six pairs where four tests need eight
    assert few.share(Verdict.TOO_FEW) == 1.0
    assert few.intervals == 12  # estimate and interval are given all the same


@pytest.mark.wide
@pytest.mark.parametrize("kind", simulate_verdicts.KINDS)
@pytest.mark.parametrize("n_tests", [1, 4])
def test_the_whole_simulation_stays_within_its_bounds(kind, n_tests):
    for blocks in BLOCKS:
        for seeds in SEEDS:
            found = simulate(kind, blocks, seeds, n_tests, n=2000)
            assert found.wrong / found.n <= WRONG, found.row()
            assert COVERAGE[0] <= found.coverage <= COVERAGE[1], found.row()


def test_false_positives_of_the_t_test_are_right_at_three_seeds():
    differences = rng(7).normal(size=(4000, 3))
    wrong = sum((stats.estimate({"x": list(row)}).p_value() or 0.0) <= 0.05 for row in differences)
    # 200 expected, standard deviation 13.8: four of them either way.
    assert 145 <= wrong <= 255


def test_the_interval_covers():
    """Three unequal blocks of four seeds: coverage of the 95 % interval is 95 to 98 % (three standard errors)."""
    generator, runs = rng(8), 3000
    scales = np.array([0.2, 1.0, 3.0])[:, None]
    draws = 0.5 + scales * generator.normal(size=(runs, 3, 4))
    covered = 0
    for draw in draws:
        interval = stats.estimate({str(i): list(row) for i, row in enumerate(draw)}).interval()
        assert interval is not None
        covered += interval[0] <= 0.5 <= interval[1]
    assert 0.938 <= covered / runs <= 0.985
