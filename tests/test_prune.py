"""Pruning: cut-offs are known before a training begins, every resume obeys them, and they end with what made them."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Fake

from runners import driver, record, rungs, train, trial
from runners.ray_tune import read_job, write_job
from runners.schema import Exit, Job, Plan, Rungs, Trial
from runners.search import Searches, State
from runners.store import Store, read_points
from runners.survey import Need, need
from sweeps.plan import load
from sweeps.searches import Suggestions

SPEC = """\
sweep: cut
task: {name: mqar, vocab_size: 64, seq_len: 32, n_pairs: 4}
model: {d_model: 32, n_layers: 1, n_heads: 1}
train: {steps: 16, batch_size: 4, lr: 1e-3}
mechanism: softmax
search: {train.lr: {log_uniform: [1e-4, 1e-1]}, trials: 12, parallel: 3}
prune: {asha: {grace_steps: 3, reduction: 2}}
seeds: 1
"""


def make(text: str, tmp_path: Path) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load(str(path))


def quality(one: Trial, step: int) -> float:
    assert one.train is not None
    return (1 - abs(math.log10(one.train["lr"]) + 2) / 3) * step / 16


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(score=quality)
    monkeypatch.setattr(trial, "load_engine", made.engine)
    return made


class NoProjection:
    """MLflow left out."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def finish(self) -> None:
        return None


@pytest.fixture
def launch(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[..., driver.Summary]:
    monkeypatch.setattr(record, "Projector", NoProjection)

    def run(plan: Plan, **options: Any) -> driver.Summary:
        options = {"store": tmp_path / "runs", "say": lambda _: None, "resolve": Suggestions(plan)} | options
        return driver.launch(plan, executor="inline", **options)

    return run


def state_of(plan: Plan, tmp_path: Path) -> State:
    return next(iter(Searches(plan, Store.open(tmp_path / "runs")).view().states.values()))


# --- the rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "reduction", "direction", "cut"),
    [
        ([], 2, "max", None),
        ([0.5], 3, "max", None),  # one of two cannot be a third
        ([0.5], 2, "max", 0.5),
        ([0.1, 0.9, 0.5], 2, "max", 0.5),  # the best two of four
        ([0.1, 0.9, 0.5], 3, "max", 0.9),
        ([0.1, 0.9, 0.5], 2, "min", 0.5),
        ([0.1, 0.9, 0.5, 0.2, 0.3], 3, "min", 0.2),
        ([0.5, 0.5, 0.5], 4, "max", 0.5),
    ],
)
def test_cut_offs(scores: list[float], reduction: int, direction: str, cut: float | None) -> None:
    assert rungs.cut_off(scores, reduction, direction) == cut


def test_rungs_are_taken_at_the_first_validation_after_them() -> None:
    found = Rungs("valid/accuracy", "max", ((3, 0.5), (6, 0.7)))
    assert rungs.decide(found, 0, 2, 0.0) is None  # before the first rung
    assert rungs.decide(found, 2, 4, 0.5) is None  # equal goes on
    cut = rungs.decide(found, 2, 4, 0.4)
    assert cut == {"step": 4, "rung": 3, "metric": "valid/accuracy", "cut_off": 0.5, "score": 0.4}
    assert rungs.decide(found, 4, 5, 0.0) is None  # taken already
    assert rungs.decide(found, 0, 8, 0.6) == {
        "step": 8,
        "rung": 6,
        "metric": "valid/accuracy",
        "cut_off": 0.7,
        "score": 0.6,
    }
    assert (rungs.decide(found, 2, 4, math.nan) or {})["score"] is None
    assert rungs.decide(dataclasses.replace(found, direction="min"), 2, 4, 0.4) is None
    assert [step for step, _ in zip(rungs.steps({"grace_steps": 5, "reduction": 3}), range(4), strict=False)] == [
        5,
        15,
        45,
        135,
    ]


def test_a_pruned_result_stands_only_for_the_same_cut() -> None:
    result = {"status": "pruned", "step": 4, "pruned": {"rung": 3, "score": 0.4}}
    assert rungs.stands(result, Rungs("valid/accuracy", "max", ((3, 0.5),)))
    assert not rungs.stands(result, Rungs("valid/accuracy", "max", ((3, 0.3),)))
    assert not rungs.stands(result, Rungs("valid/accuracy", "max", ((6, 0.5),)))
    assert not rungs.stands(result, None)
    assert rungs.stands({"status": "complete"}, None)


# --- in a sweep ---------------------------------------------------------------------------------------------------


def test_suggestions_compete_with_earlier_rounds_and_keep_their_checkpoints(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    plan = make(SPEC, tmp_path)
    summary = launch(plan)
    state = state_of(plan, tmp_path)
    n_pruned = state.count("pruned")
    assert summary.exit_code == Exit.OK
    assert n_pruned >= 3
    assert summary.counts == {"complete": 13 - n_pruned, "pruned": n_pruned}
    store = Store.open(tmp_path / "runs")
    for member in state.members:
        assert member.searched is not None
        assert member.searched.number is not None
        result, own = store.result(member.trial.id), member.searched.rungs
        assert result is not None
        assert own is not None
        if member.searched.number < 3:
            assert own.cuts == ()  # the first round meets nobody
        _check_cuts(plan, store, state, member.searched.number, own)
        if result["status"] == "pruned":
            assert result["step"] == result["pruned"]["step"] < 16
            assert quality(member.trial, result["step"]) < result["pruned"]["cut_off"]
            assert (store.trial_folder(member.trial.id) / "checkpoints" / str(result["step"])).is_dir()
            assert need(store, member) == Need.NOTHING
    winner = state.winner
    assert winner is not None
    assert state.scores[winner].status == "complete"  # type: ignore[union-attr]
    assert launch(plan).ran == 0


def _check_cuts(plan: Plan, store: Store, state: State, number: int, own: Rungs) -> None:
    """The cut-offs of one suggestion, counted again from the curves of the rounds before it."""
    known = state.suggestions[number].known
    seed = plan.searches[0].seeds[0]
    for rung, cut in own.cuts:
        scores = []
        for one in state.suggestions[:known]:
            result = store.result(one.trial(seed).id)
            assert result is not None
            curve = read_points(store.trial_folder(one.trial(seed).id), result["step"])
            scores += [m["valid/accuracy"] for at, m, _ in curve if at >= rung and "valid/accuracy" in m][:1]
        scores.sort(reverse=True)
        assert cut == scores[(len(scores) + 1) // 2 - 1]


def test_decisions_are_the_same_whenever_a_driver_dies(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    """Stopped at step after step, and resumed: the results are those of an undisturbed sweep."""
    plan = make(SPEC, tmp_path)
    launch(plan, store=tmp_path / "whole")

    class Died(BaseException):
        pass

    left = [0]

    def die(_: Trial, step: int) -> None:
        left[0] += 1
        if left[0] % 9 == 0:
            raise Died

    fake.before_step = die
    deaths = 0
    while True:
        try:
            launch(plan)
            break
        except Died:
            deaths += 1
    assert deaths > 5
    whole, store = Store.open(tmp_path / "whole"), Store.open(tmp_path / "runs")
    for one in Searches(plan, whole).view().members:
        a, b = whole.result(one.trial.id), store.result(one.trial.id)
        assert a is not None
        assert b is not None
        same = ("status", "step", "metrics", "pruned")
        assert [a.get(name) for name in same] == [b.get(name) for name in same]
        curves = [
            [point[:2] for point in read_points(s.trial_folder(one.trial.id), r["step"])]
            for s, r in ((whole, a), (store, b))
        ]
        assert curves[0] == curves[1]
    cuts = [
        {str(p.relative_to(s.root)): p.read_text() for p in (s.root / "searches").rglob("*.json")}
        for s in (whole, store)
    ]
    assert cuts[0] == cuts[1]


@pytest.mark.parametrize("change", ["more grace", "no prune"])
def test_a_pruned_trial_goes_on_under_its_id_when_the_cut_no_longer_holds(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake, change: str
) -> None:
    plan = make(SPEC, tmp_path)
    launch(plan)
    before = state_of(plan, tmp_path)
    pruned = {m.trial.id for m in before.members if need(Store.open(tmp_path / "runs"), m) == Need.NOTHING}
    assert len(pruned) == 12
    cut = {
        s.trial(plan.searches[0].seeds[0]).id
        for s, score in zip(before.suggestions, before.scores, strict=True)
        if score and score.status == "pruned"
    }
    fake.trained.clear(), fake.started_at.clear()
    line = "prune: {asha: {grace_steps: 3, reduction: 2}}\n"
    later = make(SPEC.replace(line, line.replace("3", "12") if change == "more grace" else ""), tmp_path)
    summary = launch(later)
    assert summary.exit_code == Exit.OK
    assert set(fake.trained[: len(cut)]) == cut
    assert min(fake.started_at[: len(cut)]) >= 4  # from their checkpoints
    after = state_of(later, tmp_path)
    assert [s.values for s in after.suggestions] == [s.values for s in before.suggestions]
    assert {s.status for s in after.scores if s} <= {"complete", "pruned"}
    if change == "no prune":
        assert after.count("complete") == 12
    else:
        assert all(score.step >= 12 for score in after.scores if score and score.step)
    # What is complete is never cut off afterwards.
    assert launch(make(SPEC.replace("grace_steps: 3", "grace_steps: 1"), tmp_path)).ran <= after.count("pruned")


def test_a_plain_sweep_takes_a_pruned_training_to_its_end(
    tmp_path: Path, launch: Callable[..., driver.Summary], fake: Fake
) -> None:
    plan = make(SPEC.replace("parallel: 3", "parallel: 3, seeds: same"), tmp_path)
    launch(plan)
    state = state_of(plan, tmp_path)
    number = next(n for n, score in enumerate(state.scores) if score and score.status == "pruned")
    lr, id_ = state.suggestions[number].values["train.lr"], state.suggestions[number].trial(0).id
    head = SPEC[: SPEC.index("search:")].replace("sweep: cut", "sweep: plain").replace("1e-3", repr(lr))
    plain = make(head + "seeds: 1\n", tmp_path)
    assert plain.members[0].trial.id == id_
    fake.trained.clear(), fake.started_at.clear()
    summary = launch(plain)
    assert (summary.ran, summary.counts, fake.trained) == (1, {"complete": 1}, [id_])
    assert fake.started_at[0] >= 4
    assert (Store.open(tmp_path / "runs").trial_folder(id_) / "attempts" / "2" / "old-result.json").exists()


def test_status_says_where_a_trial_was_cut(tmp_path: Path, launch: Callable[..., driver.Summary]) -> None:
    plan = make(SPEC, tmp_path)
    launch(plan)
    sweep = driver.status(tmp_path / "runs", "cut")[0]
    told = [t.error for t in sweep.trials if t.status == "pruned"]
    assert told
    assert all(str(text).startswith("pruned at step ") and "valid/accuracy is worse than" in str(text) for text in told)
    assert sweep.searches[0].pruned == len(told)


# --- in training --------------------------------------------------------------------------------------------------


def real_trial() -> Trial:
    task = {"name": "mqar", "vocab_size": 64, "seq_len": 32, "n_pairs": 4, "examples": 64, "valid_examples": 16}
    settings = {"steps": 12, "batch_size": 4, "lr": 1e-2, "eval_every": 3}
    model = {"d_model": 16, "n_layers": 1, "n_heads": 1}
    return Trial("0" * 16, 1 << 31, {"name": "linear"}, task, model, settings)


def fit(
    start: train.Snapshot | None = None, cut: Rungs | None = None
) -> tuple[train.Fit, list[tuple[int, dict[str, float]]]]:
    points: list[tuple[int, dict[str, float]]] = []

    def commit(_: train.Snapshot, new: list[train.Point]) -> None:
        points.extend((p.step, p.metrics) for p in new)

    options: dict[str, Any] = {"device": torch.device("cpu"), "commit": commit, "checkpoint_every_s": 1e9}
    options |= {"progress": lambda *_: None, "should_stop": lambda: False}
    return train.fit(real_trial(), start=start, rungs=cut, **options), points


def test_a_training_that_is_cut_off_and_goes_on_is_the_undisturbed_one() -> None:
    whole, curve = fit()
    cut = Rungs("valid/loss", "min", ((4, -1.0),))  # no loss is below 0
    first, points = fit(cut=cut)
    assert (first.status, first.step, first.stopped_by) == ("pruned", 6, "pruned")
    assert first.pruned is not None
    assert first.pruned["rung"] == 4
    assert first.pruned["score"] == dict(points)[6]["valid/loss"]
    # Killed between its last checkpoint and its result: the same decision falls again, without another update.
    again, nothing = fit(first.snapshot, cut)
    assert (again.status, again.step, again.pruned, nothing) == ("pruned", 6, first.pruned, [])
    rest, more = fit(first.snapshot)
    assert points + more == curve
    assert (rest.status, rest.metrics) == ("complete", whole.metrics)
    assert all(torch.equal(rest.snapshot.tensors[name], value) for name, value in whole.snapshot.tensors.items())
    # Good enough, or past the last validation: not cut off.
    easy, _ = fit(cut=Rungs("valid/loss", "min", ((4, 1e9), (10, -1.0))))
    assert easy.status == "complete"


def test_a_job_takes_its_cut_offs_to_another_process(tmp_path: Path) -> None:
    cut = Rungs("valid/accuracy", "max", ((3, 0.25), (6, 0.5)))
    for found in (cut, None):
        job = Job(real_trial(), 1, (), str(tmp_path), "cpu", 1, rungs=found)
        assert read_job(write_job(job)) == job
