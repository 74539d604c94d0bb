"""Searches: suggestions are functions of the results before them, kept before they run, made once, and never lost."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stores
from engines import Fake

from runners import driver, record, search, suggest, trial
from runners.ledger import Ledger
from runners.schema import Exit, Member, Plan, Search, Space, Trial, UserError
from runners.search import Score, Searches, State
from runners.store import Store, seal, write_json
from sweeps.plan import load, select
from sweeps.reader import SpecError
from sweeps.searches import Suggestions, search_seeds

BASE = """\
sweep: tuned
task: {name: mqar, vocab_size: 64, seq_len: 32, n_pairs: 4}
model: {d_model: 32, n_layers: 2, n_heads: 1}
train: {steps: 8, batch_size: 4, lr: 1e-3}
"""
TPE = "search: {train.lr: {log_uniform: [1e-4, 1e-1]}, trials: 12, parallel: 3}\n"
ONE = BASE + "mechanism: softmax\nseeds: 2\n"


def make(text: str, tmp_path: Path, **options: Any) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load(str(path), **options)


def quality(one: Trial, step: int = 8) -> float:
    """A score that is best at a rate of 1e-2 and grows with the steps; seeds differ a little."""
    assert one.train is not None
    return round(
        (1 - abs(math.log10(one.train["lr"]) + 2) / 3) * step / 8
        - 0.01 * (one.seed % 7) / 7
        - 0.001 * len(one.id) / 16,
        6,
    )


def end(store: Store, one: Trial, value: float | None = None, **changes: Any) -> None:
    """Write the result of a training as a worker would."""
    metrics = {"valid/accuracy": quality(one) if value is None else value, "train/loss": 1.0}
    row = {"schema": 1, "trial": one.id, "status": "complete", "step": 8, "metrics": metrics, "n_params": 1000}
    write_json(store.trial_folder(one.id) / "result.json", seal(row | changes), durable=False)


def todo(state: State, store: Store) -> list[Member]:
    return [member for member in state.members if store.result(member.trial.id) is None]


def play(plan: Plan, store: Store, *, backwards: bool = False, fresh: bool = False) -> dict[str, State]:
    """Run all searches of a plan to their end, one training at a time. `fresh`: as if each step had its own process."""
    searches, resolve = Searches(plan, store), Suggestions(plan)
    states: dict[str, State] = {}
    for key in searches.searches:
        while True:
            if fresh:
                searches = Searches(plan, store)
            states[key] = searches.advance(key, resolve)
            left = todo(states[key], store)
            if not left:
                break
            end(store, left[-1 if backwards else 0].trial)
    return states


def files(store: Store) -> dict[str, str]:
    """Every suggestion, and every cut-off, as text."""
    found = sorted((store.root / "searches").rglob("*.json"))
    return {str(p.relative_to(store.root)): p.read_text() for p in found if p.name != "search.json"}


@pytest.fixture
def numbered(tmp_path: Path) -> Callable[[], Store]:
    numbers = itertools.count()
    return lambda: Store.create(tmp_path / f"store-{next(numbers)}")


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_plan_counts_every_training_and_survives_its_own_text(tmp_path: Path) -> None:
    text = BASE + TPE.replace("trials", "seeds: 2, trials") + "seeds: 3\naxes: {mechanism: [softmax, linear]}\n"
    plan = make(text + "compare: [{a: {mechanism: softmax}, b: {mechanism: linear}}]", tmp_path)
    assert [(s.cell, s.trials, len(s.seeds), s.select) for s in plan.searches] == [
        ("softmax", 12, 2, ("valid/accuracy",)),
        ("linear", 12, 2, ("valid/accuracy",)),
    ]
    assert plan.n_trainings == 2 * 3 + 2 * 12 * 2
    again = Plan.from_lines(plan.to_lines())
    assert again == plan
    assert list(again.to_lines()) == list(plan.to_lines())
    ids = {member.trial.id for member in plan.members}
    assert {one for test in plan.tests for pair in test.pairs for one in (*pair.a, *pair.b)} == ids
    assert all(member.is_open and member.role == "report" for member in plan.members)


def test_a_plan_from_before_there_were_searches_can_be_read(tmp_path: Path) -> None:
    plan = make(ONE, tmp_path)
    assert "search" not in "".join(line for line in plan.to_lines() if '"member"' in line)
    assert Plan.from_lines(plan.to_lines()).members[0].searched is None


def test_search_seeds_are_nobody_elses() -> None:
    seeds = search_seeds(50)
    assert len(set(seeds)) == 50
    assert min(seeds) >= 1 << 31  # a spec's own end below
    assert search_seeds(3) == seeds[:3]


def test_a_search_is_known_by_what_decides_it(tmp_path: Path) -> None:
    def key(text: str) -> str:
        return make(text, tmp_path).searches[0].key

    before = key(ONE + TPE)
    for same in (
        TPE.replace("trials: 12", "trials: 20"),
        TPE.replace("parallel: 3", "parallel: 5"),
        TPE + "prune: {asha: {grace_steps: 2}}\n",
        TPE + "evaluate: {task.n_pairs: [2, 4]}\n",
    ):
        assert key(ONE + same) == before, same
    assert key(ONE.replace("seeds: 2", "seeds: 5") + TPE) == before
    assert key(ONE.replace("lr: 1e-3", "lr: 5e-3") + TPE) == before  # the searched value itself
    others = [
        ONE.replace("steps: 8", "steps: 9") + TPE,
        ONE + TPE.replace("1e-1", "1e-2"),
        ONE + TPE.replace("trials", "sampler: random, trials"),
        ONE + TPE.replace("trials", "seeds: 2, trials"),
        ONE + TPE.replace("trials", "seeds: same, trials"),
        ONE + TPE.replace("trials", "select: valid/loss, trials"),
        ONE + TPE.replace("trials", "train.weight_decay: {uniform: [0, 1]}, trials"),
    ]
    assert len({before, *map(key, others)}) == len(others) + 1


def test_spaces_belong_to_items(tmp_path: Path) -> None:
    text = (
        BASE
        + """
    axes:
      mechanism:
        - softmax
        - {name: linear, train.lr: {values: [1e-3, 1e-2]}}
        - {name: gated_deltanet, train.lr: 3e-3}
        - {name: deltanet, model.n_layers: {int_uniform: [1, 4]}}
    search: {train.lr: {log_uniform: [1e-4, 1e-1]}, trials: 6}
    """.replace("\n    ", "\n")
    )
    plan = make(text, tmp_path)
    spaces = {s.cell: {path: space.kind for path, space in s.space.items()} for s in plan.searches}
    assert spaces == {
        "softmax": {"train.lr": "log_uniform"},
        "linear": {"train.lr": "values"},
        "deltanet": {"train.lr": "log_uniform", "model.n_layers": "int_uniform"},
    }
    assert [(s.cell, s.trials) for s in plan.searches] == [("softmax", 6), ("linear", 2), ("deltanet", 6)]
    assert any("has only 2 values: 2 suggestions instead of 6" in note for note in plan.notes)
    plain = next(m for m in plan.members if m.cell == "gated_deltanet")
    assert plain.searched is None
    assert plain.trial.train is not None
    assert plain.trial.train["lr"] == 3e-3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "search: {train.lr: {uniform: [1e-4, 1e-2]}, trials: 3, select: valid/acuracy}",
            "did you mean 'valid/accuracy'",
        ),
        ("search: {train.lr: {uniform: [1e-4, 1e-2]}, trials: 3, select: state_bytes}", "state_bytes measures nothing"),
        ("search: {model.n_layers: {uniform: [1, 4]}, trials: 3}", "write int_uniform"),
        (
            "axes: {mechanism: [{name: softmax, train.lr: {uniform: [1, 2]}}]}\nsearch: {sampler: grid}",
            "sampler grid takes",
        ),
        ("search: {task.n_pairs: {values: [2, 4]}, trials: 3}", "part of the task"),
        ("search: {train.lr: {values: [0.01, 1e-2]}, trials: 3}", "0.01 stands twice"),
        ("axes: {mechanism: [{name: softmax, train.lr: {values: [1e-3, 1e-2]}}]}", "say how often"),
        ("search: {train.lr: {uniform: [1e-4, 1e-2]}, trials: 3}\nprune: {asha: {reduction: 2}}", "needs grace_steps"),
        (
            "search: {train.lr: {uniform: [1e-4, 1e-2]}, trials: 3}\nprune: {asha: {grace_steps: 2, reduction: 1}}",
            "at least 2",
        ),
        (
            "search: {train.lr: {uniform: [1e-4, 1e-2]}, trials: 3, select: [valid/accuracy, state_bytes]}\n"
            "prune: {asha: {grace_steps: 2}}",
            "one validation metric",
        ),
    ],
)
def test_what_cannot_be_searched_is_told(tmp_path: Path, lines: str, said: str) -> None:
    text = BASE + ("" if "axes" in lines else "mechanism: softmax\n") + lines
    with pytest.raises(SpecError, match=said.replace("(", r"\(")):
        make(text, tmp_path)


@pytest.mark.parametrize(
    ("sets", "space"),
    [
        (["search.train.lr.values=[1e-3, 1e-2]"], {"train.lr": ("values", (1e-3, 1e-2))}),
        (["search.train.lr.uniform=[1, 2]"], {"train.lr": ("uniform", (1.0, 2.0))}),
        (["search={train: {lr: {values: [1e-3]}}}"], {"train.lr": ("values", (1e-3,))}),
        (["search.train.lr.values=[1e-3]", "search.train.lr.values+=[1e-2]"], {"train.lr": ("values", (1e-3, 1e-2))}),
        (
            ["search.train.lr=null", "search.model.n_layers.int_uniform=[1, 2]"],
            {"model.n_layers": ("int_uniform", (1, 2))},
        ),
        (["axes.mechanism.softmax.train.lr.values=[1, 2]"], {"train.lr": ("values", (1.0, 2.0))}),
    ],
)
def test_a_patch_names_a_distribution_with_dots(tmp_path: Path, sets: list[str], space: dict[str, Any]) -> None:
    (search,) = make(BASE + "axes: {mechanism: [softmax]}\nseeds: 2\n" + TPE, tmp_path, sets=sets).searches
    assert {path: (one.kind, one.values) for path, one in search.space.items()} == space


def test_a_cell_stands_there_with_values_that_keep_the_rules(tmp_path: Path) -> None:
    """d_model 32 has no three heads: the first value is no reason to refuse the search."""
    plan = make(ONE + "search: {model.n_heads: {values: [3, 5, 4]}, sampler: grid}", tmp_path)
    assert plan.searches[0].trials == 3
    with pytest.raises(SpecError, match="n_heads"):
        make(ONE + "search: {model.n_heads: {values: [3, 5]}, sampler: grid}", tmp_path)


def test_only_asks_for_cells_not_for_values_nobody_knows_yet(tmp_path: Path) -> None:
    plan = make(BASE + TPE + "axes: {mechanism: [softmax, linear]}\nseeds: 2\n", tmp_path)
    chosen = select(plan, "mechanism: linear, seed: 1")
    assert chosen == {m.trial.id for m in plan.members if m.cell == "linear" and m.trial.seed == 1}
    with pytest.raises(SpecError, match=r"train\.lr"):
        select(plan, "train.lr: 1e-4")


# --- suggestions --------------------------------------------------------------------------------------------------


def test_suggestions_are_the_same_after_any_kill_and_in_any_order(
    tmp_path: Path, numbered: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make(ONE + TPE + "prune: {asha: {grace_steps: 2, reduction: 2}}\n", tmp_path)
    whole = numbered()
    (state,) = play(plan, whole).values()
    expected = files(whole)
    assert (state.is_over, len(state.suggestions)) == (True, 12)
    assert sum("cuts" in name for name in expected) == 9
    for other in ({"backwards": True}, {"fresh": True}):
        store = numbered()
        play(plan, store, **other)
        assert files(store) == expected
    # Killed after each single file that the search writes, and started again.
    real = write_json

    class Killed(Exception):
        pass

    def kill_after(path: Path, value: Any, **options: Any) -> bool:
        done = real(path, value, **options)
        if done:
            raise Killed
        return done

    store, kills = numbered(), 0
    monkeypatch.setattr(search, "write_json", kill_after)
    while True:
        try:
            play(plan, store, fresh=True)
            break
        except Killed:
            kills += 1
    assert kills == len(expected) + 1  # and search.json
    assert files(store) == expected


def test_two_drivers_make_one_search(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    plan = make(ONE + TPE, tmp_path)
    alone, store = numbered(), numbered()
    play(plan, alone)
    drivers = [(Searches(plan, store), Suggestions(plan)) for _ in range(2)]
    key = plan.searches[0].key
    for turn in itertools.count():
        states = [one.advance(key, resolve) for one, resolve in drivers]
        left = todo(states[turn % 2], store)
        if not left:
            break
        end(store, left[0].trial)
    assert files(store) == files(alone)
    assert states[0] == states[1]


def test_two_launches_at_once_share_the_rounds(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake, numbered: Callable[[], Store]
) -> None:
    """Each waits for what the other trains, and both see the same winners."""
    plan = make(BASE + TPE + "axes: {mechanism: [softmax, linear]}\nseeds: 2\n", tmp_path)
    alone = numbered()
    play(plan, alone)
    fake.step_s = 0.005
    with ThreadPoolExecutor(2) as pool:
        summaries = list(pool.map(lambda _: launch(plan), range(2)))
    assert len(set(fake.trained)) == len(fake.trained) == plan.n_trainings
    assert [s.exit_code for s in summaries] == [Exit.OK] * 2
    assert [s.counts for s in summaries] == [{"complete": plan.n_trainings}] * 2
    assert sum(s.ran for s in summaries) == plan.n_trainings
    assert files(Store.open(tmp_path / "runs")) == files(alone)


def test_more_trials_go_on_with_the_same_search(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    store, whole = numbered(), numbered()
    few = make(ONE + TPE.replace("12", "7"), tmp_path)
    (before,) = play(few, store).values()
    kept = files(store)
    many = make(ONE + TPE, tmp_path)
    (after,) = play(many, store).values()
    play(many, whole)
    assert files(store) == files(whole)
    assert kept.items() <= files(store).items()
    assert (len(before.suggestions), len(after.suggestions)) == (7, 12)
    (again,) = (Searches(few, store).state(few.searches[0].key),)
    assert again == before  # fewer again: the first seven decide


def test_tpe_learns_and_never_asks_the_same_twice(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    text = ONE + "search: {train.lr: {log_uniform: [1e-4, 1]}, model.short_conv: {values: [true, false]}, trials: 40}"
    (state,) = play(make(text, tmp_path), numbered()).values()
    values = [s.values for s in state.suggestions]
    assert len({json.dumps(v) for v in values}) == 40
    assert all(1e-4 <= v["train.lr"] <= 1 and isinstance(v["model.short_conv"], bool) for v in values)
    assert all(float(f"{v['train.lr']:.6g}") == v["train.lr"] for v in values)

    # Drawn at random they would be one decade from the best rate on average.
    assert sum(abs(math.log10(v["train.lr"]) + 2) for v in values[20:]) / 20 < 0.75


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_small_space_is_used_up_and_then_left(tmp_path: Path, numbered: Callable[[], Store], sampler: str) -> None:
    space = "train.steps: {int_uniform: [8, 12]}, train.keep: {values: [last, best]}"
    text = ONE + f"search: {{{space}, trials: 99, sampler: {sampler}}}"
    (state,) = play(make(text, tmp_path), numbered()).values()
    points = {(s.values["train.steps"], s.values["train.keep"]) for s in state.suggestions}
    assert points == set(itertools.product(range(8, 13), ("last", "best")))
    assert len(state.suggestions) == 10


def test_a_refused_suggestion_is_counted_and_scored_not_lost(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    text = ONE + "search: {model.n_heads: {values: [3, 4, 5, 8, 1, 2]}, sampler: grid, parallel: 2}"
    (state,) = play(make(text, tmp_path), numbered()).values()
    assert [score.status if score else None for score in state.scores] == [
        "refused",
        "complete",
        "refused",
        "complete",
        "complete",
        "complete",
    ]
    assert "d_model" in str(state.suggestions[0].setting.problem)
    assert len({m.trial.id for m in state.members}) == 4
    assert state.is_over


def test_grid_visits_every_point_in_order(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    text = ONE + "search: {train.lr: {values: [1e-3, 1e-2, 1e-1]}, model.n_layers: {values: [1, 2]}, sampler: grid}"
    (state,) = play(make(text, tmp_path), numbered()).values()
    assert [tuple(s.values.values()) for s in state.suggestions] == list(itertools.product([1e-3, 1e-2, 1e-1], [1, 2]))
    assert state.winner is not None
    assert state.suggestions[state.winner].values["train.lr"] == 1e-2


def test_refs_follow_the_suggestion(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    text = BASE + "mechanism: {name: sliding_window, window: {ref: model.n_layers, times: 4}}\n"
    plan = make(text + "search: {model.n_layers: {values: [1, 2, 3]}, sampler: grid}", tmp_path)
    (state,) = play(plan, numbered()).values()
    windows = [(m.trial.model["n_layers"], m.trial.mechanism["window"], m.state_bytes) for m in state.members]
    assert [w[:2] for w in windows] == [(1, 4), (2, 8), (3, 12)]
    assert windows[0][2] < windows[1][2] < windows[2][2]


def test_ids_are_those_of_the_plain_trial(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    """A suggestion is the very trial that a spec with the value written out has."""
    plan = make(ONE + "search: {train.lr: {values: [1e-3, 1e-2]}, sampler: grid}", tmp_path)
    store = numbered()
    play(plan, store)
    plain = make(ONE.replace("lr: 1e-3", "lr: 1e-2"), tmp_path)
    view = Searches(plan, store).view()
    assert [m.trial for m in view.plan.members] == [m.trial for m in plain.members]
    assert view.plan.members[0].state_bytes == plain.members[0].state_bytes


# --- scores and winners -------------------------------------------------------------------------------------------


def _search(**changes: Any) -> Search:
    fields: dict[str, Any] = {
        "key": "0" * 16,
        "cell": "softmax",
        "space": {"train.lr": Space("log_uniform", (1e-4, 1e-1)), "model.n_layers": Space("values", (1, 2, 4))},
        "sampler": "tpe",
        "trials": 40,
        "select": ("valid/accuracy",),
        "directions": ("max",),
        "chance": {"valid/accuracy": 0.1},
        "seeds": (1 << 31,),
        "is_same": False,
        "parallel": 4,
    }
    return Search(**(fields | changes))


def test_ties_go_to_the_lowest_number_and_losses_to_the_smallest() -> None:
    def winner(scores: list[Score | None], **changes: Any) -> int | None:
        return State(_search(**changes), (), tuple(scores), ()).winner

    def done(*values: float) -> Score:
        return Score("complete", values)

    assert winner([done(0.5), done(0.7), done(0.7), None]) == 1
    assert winner([done(0.5), done(0.2), done(0.2)], directions=("min",)) == 1
    assert winner([Score("pruned", (0.9,), 4), Score("refused"), done(0.2)]) == 2
    assert winner([Score("refused")]) is None
    both = {"select": ("valid/accuracy", "state_bytes"), "directions": ("max", "min")}
    assert winner([done(0.5, 10), done(0.7, 99), done(0.7, 50), done(0.7, 50)], **both) == 2


def test_a_diverged_run_scores_chance_and_a_failed_one_nothing(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    plan, store = make(ONE + TPE.replace("trials", "seeds: 2, trials"), tmp_path), numbered()
    searches, key = Searches(plan, store), plan.searches[0].key
    state = searches.advance(key, Suggestions(plan))
    first = [m.trial for m in state.members if m.searched is not None and m.searched.number == 0]
    end(store, first[0], 0.9)
    end(store, first[1], status="diverged", metrics={})
    assert len(first) == 2
    after = searches.state(key)
    assert after.scores[0] == Score("diverged", ((0.9 + plan.searches[0].chance["valid/accuracy"]) / 2,), 8)
    assert after.waits_for == [1, 2]
    assert searches.advance(key, Suggestions(plan)) == after  # nothing new before the round has ended


def test_tpe_takes_every_kind_of_score(tmp_path: Path) -> None:
    values = [{"train.lr": 10 ** -(1 + n / 5), "model.n_layers": (1, 2, 4)[n % 3]} for n in range(12)]
    scores = [Score("complete", (n / 12,)) for n in range(9)]
    scores += [Score("diverged", (0.1,), 3), Score("pruned", (0.2,), 4), Score("refused")]
    made = suggest.Round(_search(), list(zip(values, scores, strict=True)))
    first = made.suggest(12)
    made.add(first)
    assert made.suggest(13) != first
    assert made.made_by.startswith("optuna ")
    two = _search(select=("valid/accuracy", "state_bytes"), directions=("max", "min"))
    pairs = [Score(s.status, (*s.values, 100.0 + n)) if s.values else s for n, s in enumerate(scores[:10])]
    both = suggest.Round(two, list(zip(values[:10], pairs, strict=True)))
    assert 1e-4 <= both.suggest(10)["train.lr"] <= 1e-1


def test_a_round_after_two_hundred_suggestions_takes_no_time() -> None:
    found = _search(sampler="random")
    known = []
    for n in range(200):
        values = suggest.Round(found, []).suggest(n)
        known.append((values, Score("complete", (values["train.lr"],))))
    suggest.Round(_search(), known).suggest(200)  # imports Optuna
    before = time.process_time()
    made = suggest.Round(_search(), known)
    for number in range(200, 204):
        made.add(made.suggest(number))
    assert time.process_time() - before < 1.0  # measured: 0.15 s


@pytest.mark.parametrize("kind", ["uniform", "log_uniform", "int_uniform", "log_int_uniform"])
def test_random_values_fill_their_range_and_never_leave_it(kind: str) -> None:
    low, high = (1, 9) if "int" in kind else (0.1234567, 0.9)
    found = _search(sampler="random", space={"x": Space(kind, (low, high))})
    values = [suggest.Round(found, []).suggest(n)["x"] for n in range(300)]
    assert min(values) >= low
    assert max(values) <= high
    if "int" in kind:
        assert set(values) == set(range(1, 10))
    else:
        assert max(values) > 0.85
        assert min(values) < 0.15


# --- pruning ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(score=quality)
    monkeypatch.setattr(trial, "load_engine", made.engine)
    return made


class NoProjection:
    """MLflow left out: most tests here are about what runs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def finish(self) -> None:
        return None


@pytest.fixture
def launch(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[..., driver.Summary]:
    monkeypatch.setattr(record, "Projector", NoProjection)

    def run(plan: Plan, **options: Any) -> driver.Summary:
        options = {"store": tmp_path / "runs", "say": lambda _: None} | options
        return driver.launch(plan, executor="inline", resolve=Suggestions(plan), **options)

    return run


def count(found: dict[str, int]) -> int:
    return sum(found.values())


def test_launched_twice_nothing_runs_again_and_the_total_is_exact(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    text = BASE + TPE + "axes: {mechanism: [softmax, {name: linear, train.lr: 1e-2}]}\nseeds: 2\n"
    plan = make(text, tmp_path)
    first = launch(plan)
    assert (first.ran, first.exit_code, first.counts) == (plan.n_trainings, Exit.OK, {"complete": 2 + 2 + 12})
    assert len(set(fake.trained)) == len(fake.trained) == plan.n_trainings
    lines: list[str] = []
    again = launch(plan, say=lines.append)
    assert (again.ran, again.skipped, again.exit_code) == (0, 16, Exit.OK)
    assert lines == ["tuned revision 1: 16 trials, 16 already done: 0 to run"]
    more = make(text.replace("trials: 12", "trials: 15"), tmp_path)
    third = launch(more)
    assert third.exit_code == Exit.OK
    assert third.ran in (3, 3 + 2)  # three suggestions, and a new winner or not
    assert len(set(fake.trained)) == len(fake.trained)


def test_winners_are_trained_afresh_and_only_they_are_reported(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    plan = make(ONE + TPE, tmp_path)
    launch(plan)
    store = Store.open(tmp_path / "runs")
    view = Searches(plan, store).view()
    state = next(iter(view.states.values()))
    assert state.winner is not None
    best = max(range(12), key=lambda n: (state.scores[n].values, -n))  # type: ignore[union-attr]
    assert state.winner == best
    assert [m.trial.seed for m in view.plan.members] == [0, 1]
    assert {m.trial.train["lr"] for m in view.plan.members if m.trial.train} == {
        state.suggestions[best].values["train.lr"]
    }
    assert all(m.role == "report" and m.searched and m.searched.number == best for m in view.plan.members)
    assert set(fake.evaluated) == {m.trial.id for m in view.plan.members}  # suggestions are not tested
    sweep = driver.status(store.root, "tuned")[0]
    assert (sweep.searches[0].ended, sweep.searches[0].winner) == (12, best)
    assert [t.role for t in sweep.trials] == ["report"] * 2 + ["search"] * 12


def test_the_same_seeds_select_and_report_and_nothing_is_trained_again(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    plan = make(ONE + TPE.replace("trials: 12", "trials: 5, seeds: same"), tmp_path)
    summary = launch(plan)
    assert (summary.ran, summary.exit_code) == (10, Exit.OK)
    assert plan.n_trainings == summary.ran == len(fake.trained)
    view = Searches(plan, Store.open(tmp_path / "runs")).view()
    assert all(m.searched is not None and m.searched.is_selected for m in view.plan.members)
    assert sorted(fake.evaluated) == sorted(m.trial.id for m in view.plan.members)
    more = make(ONE.replace("seeds: 2", "seeds: 3") + TPE.replace("trials: 12", "trials: 5, seeds: same"), tmp_path)
    assert launch(more).ran == 5  # the new seed of each suggestion
    assert launch(more).ran == 0


def test_a_grid_with_a_failure_is_whole_after_the_retry(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    text = ONE + "search: {train.lr: {values: [1e-3, 1e-2, 1e-1]}, model.n_layers: {values: [1, 2]}, sampler: grid}"
    plan = make(text, tmp_path)

    def fail(one: Trial, step: int) -> None:
        if (
            one.train is not None
            and (one.train["lr"], one.model["n_layers"]) == (1e-2, 2)
            and one.seed > 9
            and step == 3
        ):
            raise ValueError("not this one")

    fake.before_step = fail
    lines: list[str] = []
    summary = launch(plan, say=lines.append)
    assert (summary.exit_code, summary.counts) == (Exit.FAILED, {"complete": 3, "failed": 1, "planned": 2})
    assert "cell softmax waits for failed suggestion 3: `sweep resume tuned --failed`" in lines
    kept = launch(plan, failed=False)
    assert (kept.ran, kept.exit_code) == (0, Exit.FAILED)
    fake.before_step = lambda *_: None
    failed = frozenset(t.trial for t in driver.status(tmp_path / "runs", "tuned")[0].trials if t.status == "failed")
    assert len(failed) == 1
    mended = launch(plan, only=failed)  # what follows from the suggestion runs too
    assert (mended.ran, mended.exit_code) == (1 + 2 + 2, Exit.OK)
    state = next(iter(Searches(plan, Store.open(tmp_path / "runs")).view().states.values()))
    assert len({tuple(s.values.values()) for s in state.suggestions}) == 6
    assert state.count("complete") == 6


def test_one_cell_that_fails_leaves_the_others_alone(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    plan = make(BASE + TPE + "axes: {mechanism: [softmax, linear]}\nseeds: 1\n", tmp_path)

    def fail(one: Trial, step: int) -> None:
        if one.mechanism["name"] == "softmax" and step == 3:
            raise ValueError("no softmax today")

    fake.before_step = fail
    summary = launch(plan)
    assert summary.exit_code == Exit.FAILED
    assert summary.counts == {"failed": 3, "complete": 13, "planned": 1}


def test_only_runs_the_search_of_the_cells_it_takes(tmp_path: Path, launch: Callable[..., driver.Summary]) -> None:
    plan = make(BASE + TPE + "axes: {mechanism: [softmax, linear]}\nseeds: 2\n", tmp_path)
    summary = launch(plan, only=select(plan, "mechanism: linear, seed: 0"))
    assert (summary.ran, summary.exit_code) == (12 + 1, Exit.OK)
    rest = launch(plan)
    assert (rest.ran, rest.skipped) == (1 + 12 + 2, 13)


def test_two_sweeps_share_a_searched_cell(tmp_path: Path, launch: Callable[..., driver.Summary]) -> None:
    launch(make(ONE + TPE, tmp_path))
    other = make(ONE.replace("tuned", "other").replace("seeds: 2", "seeds: 3") + TPE, tmp_path)
    assert launch(other).ran == 1  # the third seed of the winner


def test_a_lost_ledger_loses_no_suggestion(tmp_path: Path, launch: Callable[..., driver.Summary]) -> None:
    plan = make(ONE + TPE, tmp_path)
    launch(plan)
    store = Store.open(tmp_path / "runs")
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    assert driver.status(store.root, "tuned")[0].counts == {"complete": 14}
    driver.doctor(store.root, rebuild=True)
    ledger = Ledger.open(store)
    assert len(ledger.rows("tuned", 1)) == 2 + 14  # its slots are names, not trials
    ledger.close()
    assert launch(plan).ran == 0


def test_a_torn_suggestion_is_made_again(tmp_path: Path, numbered: Callable[[], Store]) -> None:
    plan, store = make(ONE + TPE, tmp_path), numbered()
    play(plan, store)
    before = files(store)
    path = Searches(plan, store).folder(plan.searches[0].key) / "4.json"
    path.write_text(path.read_text()[:100])
    play(plan, store)
    assert files(store) == before


def test_a_plan_that_searches_needs_its_spec(tmp_path: Path, fake: Fake) -> None:
    plan = make(ONE + TPE, tmp_path)
    with pytest.raises(UserError, match="needs its spec"):
        driver.launch(plan, store=tmp_path / "runs", executor="inline", say=lambda _: None)


def test_the_frozen_spec_makes_the_same_trials(tmp_path: Path) -> None:
    plan = make(
        BASE + 'axes: {"(mechanism, train.warmup)": [[softmax, 1], [linear, 2]]}\n' + TPE,
        tmp_path,
        sets=["train.steps=9"],
    )
    frozen = Plan.from_lines(plan.to_lines())
    for one in plan.searches:
        made = [Suggestions(p)(one.key, {"train.lr": 0.00123}) for p in (plan, frozen)]
        assert made[0] == made[1]
        assert made[0].settings["train"]["steps"] == 9
        assert made[0].settings["train"]["lr"] == 0.00123
    with pytest.raises(UserError, match="Launch the spec again"):
        Suggestions(plan)("no such key", {})
    with pytest.raises(UserError):
        _ = Suggestions(Plan.from_lines(plan.to_lines()))("", {"train.lr": 1.0})


def test_in_mlflow_searches_have_their_own_role(tmp_path: Path, fake: Fake) -> None:
    from test_record import runs

    plan, store = make(ONE + TPE.replace("12", "3"), tmp_path), stores.make(tmp_path / "runs")
    driver.launch(plan, store=store.root, executor="inline", say=lambda _: None, resolve=Suggestions(plan))
    found = runs(store, "tuned")
    roles = sorted((r.data.tags["memsweep.role"], r.info.run_name) for r in found)
    seed = search_seeds(1)[0]
    assert roles == [
        ("report", "softmax seed=0"),
        ("report", "softmax seed=1"),
        *(("search", f"softmax suggestion={n} seed={seed}") for n in range(3)),
    ]
    assert {r.info.status for r in found} == {"FINISHED"}
    assert sorted(r.data.params["suggestion"] for r in found if r.data.tags["memsweep.role"] == "search") == [
        "0",
        "1",
        "2",
    ]
