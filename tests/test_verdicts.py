"""What is said of sweeps that went wrong or are odd: failures, NaN, one seed, ties, nothing to compare with."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_store import accuracy, diverge, fail, fill, make_plan, without

from dashboards import cells, table, words
from dashboards.compare import Comparison, compare
from dashboards.pairs import NO_CHANCE, NO_LOGARITHM, NO_SCORE
from dashboards.stats import Verdict
from runners import store as stores
from runners.schema import Member, Pair, Plan, Status

Whole = tuple[Plan, table.Results]


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    # statsmodels collects garbage at each call of Holm.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def hola(plan: Plan, admission: str) -> list[Member]:
    return [m for m in plan.members if m.varying.get("mechanism.admission") == admission]


def told(plan: Plan, results: table.Results) -> tuple[list[Comparison], str]:
    """The comparisons, and everything a report says in sentences."""
    found = compare(plan, results)
    seen = cells.collect(plan, results)
    said = [words.answer(plan, results, found), words.described(plan, seen), words.unfinished(plan, results)]
    said += words.notes(plan, results, found, seen, 1)
    said += [words.sentence(one) for one in found]
    said += [text for cell in seen for text in (cells.plus_minus(cell.main), cells.interval_text(cell.main))]
    text = "\n".join(said)
    assert "nan" not in text.split()
    assert "inf" not in text.split()
    return found, text


def rescored(plan: Plan, results: table.Results, score: Callable[[Member], float]) -> table.Results:
    """The results with other accuracies, made up by `score`."""
    members = results.members.copy()
    members["test/accuracy"] = [score(member) for member in plan.members]
    evals = {
        (m.trial.id, s.id): {**results.evals[m.trial.id, s.id], "accuracy": score(m)}
        for m in plan.members
        for s in m.slices
    }
    return replace(results, members=members, evals=evals)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A finished sweep of three seeds: six pairs, one test."""
    plan, root = make_plan(3, margin=0.05), tmp_path_factory.mktemp("whole")
    fill(root, plan)
    return plan, table.load(plan, root)


def test_missing_pairs_say_what_became_of_them(tmp_path: Path) -> None:
    plan = make_plan(8)
    store = fill(tmp_path, plan)
    lost = hola(plan, "residual")[:3]
    for member in lost:
        (store.trial_folder(member.trial.id) / "result.json").unlink()
    fail(store, lost[0])
    known = {lost[1].trial.id: (Status.PRUNED, None), lost[2].trial.id: (Status.RUNNING, None)}
    (found,), text = told(plan, table.load(plan, tmp_path, known))
    assert found.scored.missing == {"failed": 1, "pruned": 1, "running": 1}
    assert found.verdict != Verdict.MISSING  # 3 of 16 are under 20 %
    assert "3 of 16 pairs missing (1 failed, 1 pruned, 1 running)" in text


def test_a_block_that_is_left_with_one_pair_is_named(tmp_path: Path) -> None:
    plan = make_plan(2, tasks=[{"seq_len": 32, "n_pairs": n} for n in range(1, 7)])
    store = fill(tmp_path, plan)
    lost = hola(plan, "residual")[0]
    (store.trial_folder(lost.trial.id) / "result.json").unlink()
    fail(store, lost)
    (found,), _ = told(plan, table.load(plan, tmp_path))
    assert found.verdict == Verdict.CANNOT_TELL
    (short,) = {pair.block for pair in plan.tests[0].pairs if lost.trial.id in (*pair.a, *pair.b)}
    assert found.needs == f"a second pair in {short}"


def test_a_finished_trial_without_a_finite_score_is_missing(whole: Whole) -> None:
    plan, results = whole
    first = hola(plan, "residual")[0]
    for odd in (math.nan, math.inf, -math.inf):
        scores = {m.trial.id: accuracy(m, 4) for m in plan.members} | {first.trial.id: odd}
        changed = rescored(plan, results, lambda m, scores=scores: scores[m.trial.id])  # type: ignore[misc]
        (found,), text = told(plan, changed)
        assert found.scored.missing == {NO_SCORE: 1}
        assert len(found.pairs) == 5
        assert "1 of 6 pairs missing" in text
        assert math.isfinite(found.effect)


def test_a_diverged_trial_whose_chance_is_not_known_is_not_said_to_score_it(tmp_path: Path) -> None:
    plan = make_plan(3)
    blind = tuple(replace(m, slices=tuple(replace(s, chance={}) for s in m.slices)) for m in plan.members)
    plan = without(plan, members=blind)
    store = fill(tmp_path, plan)
    diverge(store, hola(plan, "residual")[0])
    (found,), text = told(plan, table.load(plan, tmp_path))
    assert found.scored.missing == {NO_CHANCE: 1}
    assert "score chance" not in text
    assert "without a known chance level" in text


def test_every_trial_failed(tmp_path: Path) -> None:
    plan = make_plan(3)
    store = stores.Store.create(tmp_path)
    for member in plan.members:
        fail(store, member)
    (found,), text = told(plan, table.load(plan, tmp_path))
    assert (found.verdict, found.reason) == (
        Verdict.MISSING,
        "none of 6 pairs has a score on both sides (6 failed)",
    )
    assert text.startswith("No answer yet: none of 24 trials has finished.")


def test_a_side_without_trials_gives_no_verdict(whole: Whole) -> None:
    plan, results = whole
    (test,) = plan.tests
    for pairs in ((), tuple(replace(pair, b=()) for pair in test.pairs)):
        (found,), text = told(without(plan, tests=(replace(test, pairs=pairs),)), results)
        assert found.verdict == Verdict.MISSING
        assert "No verdict on admission residual against admission recency" in text
        assert math.isnan(found.mean_a)


def test_one_seed_and_one_mechanism_are_described_and_not_judged(tmp_path: Path) -> None:
    plan = make_plan(1)
    plan = without(plan, members=tuple(hola(plan, "residual") + hola(plan, "recency")))
    fill(tmp_path, plan)
    (found,), text = told(plan, table.load(plan, tmp_path))
    assert (found.verdict, found.low, found.p_adjusted) == (Verdict.TOO_FEW, None, 0.5)
    assert "only 2 pairs; 6 could reach" in text
    assert "no interval below 3 seeds" in text
    alone = without(plan, members=tuple(hola(plan, "residual")), tests=())
    assert "tests nothing" in told(alone, table.load(alone, tmp_path))[1]


def test_ties_are_no_difference_only_within_a_margin(whole: Whole) -> None:
    plan, results = whole
    tied = rescored(plan, results, lambda m: 0.75)
    (found,), text = told(plan, tied)
    assert (found.verdict, found.effect, found.low, found.p) == (Verdict.NO_DIFFERENCE, 0.0, 0.0, 1.0)
    assert "equal" not in text
    (test,) = plan.tests
    (open_,), _ = told(without(plan, tests=(replace(test, margin=None),)), tied)
    assert open_.verdict == Verdict.CANNOT_TELL


def test_differences_that_never_vary_are_judged_by_their_number(whole: Whole) -> None:
    """Zero variance is no certainty for a bounded score: six pairs of one sign have p = 1/32 and no less."""
    plan, results = whole
    same = rescored(plan, results, lambda m: 0.8 if m.varying.get("mechanism.admission") == "residual" else 0.7)
    (found,), _ = told(plan, same)
    assert (found.verdict, found.p) == (Verdict.A_BETTER, 2.0**-5)
    assert found.low == pytest.approx(0.1)


def test_a_block_that_lost_every_pair_is_named(tmp_path: Path) -> None:
    plan = make_plan(3)
    store = fill(tmp_path, plan)
    for member in hola(plan, "recency")[:3]:
        (store.trial_folder(member.trial.id) / "result.json").unlink()
    (found,), text = told(plan, table.load(plan, tmp_path))
    assert found.verdict == Verdict.MISSING
    assert "no pair at seq_len 32, n_pairs 4: the mean is over the other blocks" in text


def test_a_ratio_of_nothing_is_missing(whole: Whole) -> None:
    plan, results = whole
    (test,) = plan.tests
    first = hola(plan, "residual")[0]
    zero = rescored(plan, results, lambda m: 0.0 if m is first else 0.5 + accuracy(m, 4))
    (found,), _ = told(without(plan, tests=(replace(test, scale="ratio", bounded=False),)), zero)
    assert found.scored.missing == {NO_LOGARITHM: 1}


# equal bytes


def at_equal(whole: Whole, sizes_a: tuple[int, int], sizes_b: tuple[int, int]) -> Comparison:
    """One pair a seed: residual at two sizes against recency at two sizes (each arm's two tasks stand for them)."""
    plan, results = whole
    (test,) = plan.tests
    sizes: dict[str, int] = {}
    pairs = []
    for seed in range(3):
        sides = [[m for m in hola(plan, side) if m.trial.seed == seed] for side in ("residual", "recency")]
        for side, own in zip(sides, (sizes_a, sizes_b), strict=True):
            sizes |= {m.trial.id: size for m, size in zip(side, own, strict=True)}
        pairs.append(Pair("all", seed, *(tuple(m.trial.id for m in side) for side in sides)))
    members = tuple(replace(m, state_bytes=sizes.get(m.trial.id, m.state_bytes)) for m in plan.members)
    tests = (replace(test, pairs=tuple(pairs), at_equal="state_bytes"),)
    (found,), text = told(without(plan, members=members, tests=tests), results)
    assert ("of a size outside b's" in text) == (found.scored.n_outside > 0)
    return found


def test_equal_bytes_compare_per_seed_and_linear_in_log2(whole: Whole) -> None:
    plan, _ = whole
    found = at_equal(whole, (2048, 4096), (1024, 8192))
    for pair in found.pairs:
        sides = ([m for m in hola(plan, side) if m.trial.seed == pair.seed] for side in ("residual", "recency"))
        a, b = ([accuracy(m, n) for m, n in zip(side, (4, 16), strict=True)] for side in sides)
        assert pair.a == pytest.approx(sum(a) / 2)
        thirds = (b[0] + (b[1] - b[0]) / 3, b[0] + (b[1] - b[0]) * 2 / 3)
        assert pair.b == pytest.approx(sum(thirds) / 2)


def test_sizes_beyond_the_other_sides_are_left_out_of_both(whole: Whole) -> None:
    plan, _ = whole
    found = at_equal(whole, (1024, 1 << 20), (1024, 8192))
    assert (len(found.pairs), found.n_missing, found.scored.n_outside) == (3, 0, 3)
    first = [next(m for m in hola(plan, side) if m.trial.seed == 0) for side in ("residual", "recency")]
    assert (found.pairs[0].a, found.pairs[0].b) == pytest.approx([accuracy(m, 4) for m in first])


@pytest.mark.parametrize("sizes_a", [(512, 1 << 20), (0, 0)])
def test_no_overlap_is_no_missing_run(whole: Whole, sizes_a: tuple[int, int]) -> None:
    found = at_equal(whole, sizes_a, (1024, 8192))
    assert (found.pairs, found.n_missing, found.scored.n_outside) == ((), 0, 6)
    assert found.reason == "no size of a lies between the sizes of b: interpolation would be a guess"
