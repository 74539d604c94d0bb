"""A batch in parts: the same loss, gradient and curve as at once; halved after running out of memory, and learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plans
import pytest
import stores
import torch
from engines import Fake
from test_record import runs
from test_train import Log, fit, same, stop_after
from test_train import trial as trial_of

import mechanisms
from runners import driver, evaluate, micro, split, tasks, trial
from runners import model as models
from runners.batch import NO_LABEL, Batch
from runners.schema import Exit, Failure, Outcome, Status, Trial
from runners.store import Store, seal, write_json
from runners.train import Snapshot, batch_rows

UNEVEN = {"batch_size": 10, "steps": 8, "lr": 3e-3, "warmup": 2, "eval_every": 8}
SETTINGS = {
    "hola": {"cache": 4, "block": 4},
    "sliding_window": {"window": 4},
    # From 16, this seed's third gradient has a norm of 24 and follows rounding by 2e-5; at other seeds by 1e-6.
    "preconditioned_gated_deltanet": {"a_max": 1.0},
}


@pytest.fixture
def few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are spread unevenly: of each four rows, one keeps all its labels, and every row the last one."""
    real = tasks.get("mqar").batch

    def batch(self: Any, split_: str, index_B: torch.Tensor, *rest: Any) -> Batch:
        made = real(self, split_, index_B, *rest)
        if split_ == "train":
            made.target_BQ[index_B % 4 != 1, :-1] = NO_LABEL
        return made

    monkeypatch.setattr(tasks.get("mqar"), "batch", batch)


def losses(log: Log) -> list[float]:
    return [point.metrics["train/loss"] for point in log.points if "train/loss" in point.metrics]


@pytest.mark.parametrize("mechanism", mechanisms.names())
def test_the_curve_of_a_split_batch_is_that_of_the_whole(mechanism: str, few_labels: None) -> None:
    """Parts of 4, 4 and 2 rows with different numbers of labels, clipped and stepped once."""
    of = trial_of(mechanism=mechanism, **UNEVEN)
    of = Trial(of.id, of.seed, of.mechanism | SETTINGS.get(mechanism, {}), of.task, of.model, of.train)
    whole, parts = Log(), Log()
    at_once, split_ = fit(of, log=whole), fit(of, log=parts, micro_batch=4)
    assert len(losses(whole)) == 8
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    norms = [[p.metrics["train/grad_norm"] for p in log.points] for log in (whole, parts)]
    # Only the order of sums differs: 1e-7 at the first update. Each update of Adam multiplies that, up to 1e-4 at the
    # eighth where a norm follows a small output (retention); losses stay near.
    assert norms[1][:3] == pytest.approx(norms[0][:3], rel=1e-5)
    assert at_once.tokens == split_.tokens
    assert (at_once.micro_batch, split_.micro_batch) == (None, 4)
    assert losses(parts) != [losses(parts)[0]] * 8


def test_a_mean_of_means_would_be_another_loss(few_labels: None) -> None:
    """The test above can fail: weighing the parts alike is visibly wrong on these labels."""
    of = trial_of(**UNEVEN)
    model, task = models.build(of), tasks.build(of.task)
    batch = task.batch("train", torch.arange(10), 0)
    parts = [batch[first : first + 4] for first in (0, 4, 8)]
    means = [float(micro.backward(model, part, "fp32", None)) for part in parts]
    right = float(micro.backward(model, batch, "fp32", 4))
    assert right == pytest.approx(float(micro.backward(model, batch, "fp32", None)), abs=1e-6)
    assert abs(sum(means) / 3 - right) > 1e-3


def test_rows_that_hold_the_batch_are_the_whole_batch() -> None:
    whole, parts = fit(trial_of(steps=6)), fit(trial_of(steps=6), micro_batch=8)
    assert parts.micro_batch == parts.snapshot.meta["ended"].pop("micro_batch") == 8
    assert whole.snapshot.meta["ended"].pop("micro_batch") is None
    same(whole, parts)


@pytest.mark.parametrize("mechanism", ["softmax", "gated_deltanet"])
def test_interrupted_in_parts_and_resumed_is_bit_exact(mechanism: str) -> None:
    of = trial_of(mechanism=mechanism, batch_size=10, steps=20)
    whole_log, log = Log(), Log()
    whole = fit(of, log=whole_log, micro_batch=4)
    start, result = None, None
    while result is None or result.status == "interrupted":
        result = fit(of, start=start, log=log, should_stop=stop_after(3), micro_batch=4)
        last = log.snapshots[-1]
        start = Snapshot(last.step, last.tensors, json.loads(json.dumps(last.meta)))
    same(whole, result)
    assert [(p.step, p.metrics) for p in log.points] == [(p.step, p.metrics) for p in whole_log.points]
    assert log.snapshots[0].meta["micro_batch"] == 4


def test_divergence_is_found_in_its_part() -> None:
    result = fit(trial_of(lr=1e30, warmup=0, clip=None, weight_decay=0.0), micro_batch=3)
    assert result.status == "diverged"
    assert result.diverged is not None
    assert result.diverged["step"] == 2
    assert result.diverged["where"] != "?"


def test_an_evaluation_takes_fewer_rows_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    of = trial_of()
    model, task = models.build(of), tasks.build(of.task)
    whole = evaluate.score(model, task, "test", torch.device("cpu"), "fp32")
    sizes = _limit_rows(monkeypatch, 10, in_training=False)
    parts = evaluate.score(model, task, "test", torch.device("cpu"), "fp32")
    assert parts == pytest.approx(whole, rel=1e-6)
    assert sizes[:4] == [64, 32, 16, 8]
    assert sum(n for n in sizes if n <= 10) == parts["n"] == 64
    assert model.training
    _limit_rows(monkeypatch, 0, in_training=False)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate.score(model, task, "test", torch.device("cpu"), "fp32")


def _limit_rows(monkeypatch: pytest.MonkeyPatch, limit: int, *, in_training: bool = True) -> list[int]:
    """The model runs out of memory above `limit` rows, in evaluation and (`in_training`) in training: rows it saw."""
    sizes: list[int] = []
    real = models.Model.__call__

    def call(self: Any, tokens_BT: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(tokens_BT))
        if len(tokens_BT) > limit and (in_training or not self.training):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(self, tokens_BT, *rest)

    monkeypatch.setattr(models.Model, "__call__", call)
    return sizes


# the life of such a trial


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(trial, "load_engine", made.engine)
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    return made


def launch(plan: Any, store: Store) -> tuple[driver.Summary, list[str]]:
    lines: list[str] = []
    return driver.launch(plan, store=store.root, executor="inline", say=lines.append), lines


def wide(rows: int, **changes: Any) -> Any:
    """A plan whose trials train `rows` rows a batch."""
    plan = plans.plan(**changes)
    for member in plan.members:
        assert member.trial.train is not None
        member.trial.train["batch_size"] = rows
    return plan


def test_real_training_that_fits_four_rows_completes_with_the_whole_batch(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends above 4 rows: 10 -> 5 -> 3, in fp32, and the curve is the undisturbed one."""
    plan = wide(10, seeds=(0,), lrs=(1e-3,), retry={"oom": "split"})
    roomy = stores.make(tmp_path / "roomy")
    assert launch(plan, roomy)[0].exit_code == Exit.OK
    sizes = _limit_rows(monkeypatch, 4)
    summary, lines = launch(plan, store)
    assert (summary.exit_code, summary.counts, summary.ran) == (Exit.OK, {"complete": 1}, 1)
    one = plan.members[0].trial.id
    result, undisturbed = store.result(one), roomy.result(one)
    assert (result["micro_batch"], result["oom_at"], result["status"]) == (3, [10, 5], "complete")
    assert undisturbed["micro_batch"] is None
    assert (result["step"], result["tokens"], result["stamp"]["dtype"]) == (6, undisturbed["tokens"], "fp32")
    assert max(sizes) > 4
    curves = [[m["train/loss"] for _, m, _ in stores.points(s, one) if "train/loss" in m] for s in (store, roomy)]
    assert len(curves[1]) == 6
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    assert any("trying again with 5 rows at once instead of 10, the same batch in all" in line for line in lines)
    assert [row["failure"] for row in _attempts(store, one)] == ["oom", "oom", None]
    run = runs(store)[0]
    assert run.data.metrics["micro_batch"] == 3
    assert run.data.tags["memsweep.oom_at_rows"] == "10, 5"
    assert not [name for name in run.data.params if "micro" in name]
    assert run.info.status == "FINISHED"


def _attempts(store: Store, trial_id: str) -> list[dict[str, Any]]:
    from runners.ledger import Ledger

    return Ledger.open(store).attempts(trial_id)


def test_later_trials_of_the_shape_begin_at_the_size_that_fits(store: Store, fake: Fake) -> None:
    fake.fits = 4
    plan = wide(16, seeds=(0, 1), lrs=(1e-3, 3e-3))
    summary, lines = launch(plan, store)
    assert (summary.exit_code, summary.counts) == (Exit.OK, {"complete": 4})
    assert fake.sizes == [None, 8, 4, 4, 4, 4]
    told = [line for line in lines if "rows at once, as others of its shape needed" in line]
    assert len(told) == 3  # the first has its own history
    # Another launch learns from the results.
    fake.sizes.clear()
    assert launch(wide(16, seeds=(0, 1, 2)), store)[0].exit_code == Exit.OK
    assert fake.sizes == [4, 4]
    # Another shape knows nothing of it.
    fake.fits, fake.sizes = 10**9, []
    launch(wide(8, seeds=(7,)), store)
    assert fake.sizes == [None, None]


def test_the_floor_is_one_row_and_the_history_stays(store: Store, fake: Fake) -> None:
    fake.fits = 0
    plan = wide(6, seeds=(0,), lrs=(1e-3,))
    summary, _ = launch(plan, store)
    assert (summary.counts, summary.exit_code) == ({"failed": 1}, Exit.FAILED)
    assert fake.sizes == [None, 3, 2, 1]
    one = plan.members[0].trial.id
    assert [row["failure"] for row in _attempts(store, one)] == ["oom"] * 4
    assert split.tried(store.trial_folder(one)) == [6, 3, 2, 1]
    assert summary.failures[0].kind == "oom"
    # With room again it goes on where it was.
    fake.fits = 1
    assert launch(plan, store)[0].exit_code == Exit.OK
    assert store.result(one)["micro_batch"] == 1


def test_a_killed_driver_knows_the_size_again(store: Store, fake: Fake) -> None:
    """Killed while the half ran, before its first checkpoint and after it: the size stays."""
    fake.fits = 2
    plan = wide(4, seeds=(0,), lrs=(1e-3,))
    for at in (1, 4):

        def die(_: Trial, step: int, at: int = at) -> None:
            if step == at and fake.sizes[-1] == 2:
                raise SystemExit  # the process ends here: no outcome is written

        fake.before_step = die
        with pytest.raises(SystemExit):
            launch(plan, store)
    fake.before_step = lambda *_: None
    assert launch(plan, store)[0].exit_code == Exit.OK
    assert fake.sizes == [None, 2, 2, 2]
    assert fake.started_at == [0, 0, 0, 4]


def test_one_that_has_begun_keeps_its_size(tmp_path: Path) -> None:
    """What others learn meanwhile would change its bits."""
    sizes, one = split.Sizes(), plans.trial()
    sizes.learn(plans.trial(seed=5, lr=1.0), 2)
    assert sizes.first(one, tmp_path) == 2
    sizes.learn(one, 8)
    assert sizes.first(one, tmp_path) == 2  # the smallest that was needed
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    assert sizes.first(one, tmp_path) is None
    trial.write_outcome(tmp_path / "attempts" / "3", Outcome(one.id, 3, Status.FAILED, Failure.OOM, "full", 4))
    assert sizes.first(one, tmp_path) == 2
    assert split.shape(one) != split.shape(plans.trial(n_pairs=8))


def test_out_of_memory_in_the_evaluation_does_not_train_again(
    store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fake, "evaluate", full)
    summary, _ = launch(wide(4, seeds=(0,), lrs=(1e-3,)), store)
    assert (summary.counts, summary.ran, len(fake.trained)) == ({"failed": 1}, 1, 1)
    assert summary.failures[0].kind == "oom"


def test_batch_rows() -> None:
    assert batch_rows(trial_of()) == 8
    assert batch_rows(trial_of(batch_size=None, batch_tokens=64)) == 4


def test_an_old_result_without_sizes_is_read(store: Store, fake: Fake) -> None:
    plan = wide(4, seeds=(0,))
    launch(plan, store)
    path = store.trial_folder(plan.members[0].trial.id) / "result.json"
    row = json.loads(path.read_text())
    del row["micro_batch"], row["oom_at"]
    write_json(path, seal(row))
    assert launch(plan, store)[0].ran == 0
    (store.trial_folder(plan.members[1].trial.id) / "result.json").unlink()
    assert launch(plan, store)[0].ran == 1
