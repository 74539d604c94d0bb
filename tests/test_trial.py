"""The life of one trial in its folder: commits, resumes, fences, failures."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import plans
import pytest
import torch
from engines import Fake

from runners import checkpoints, stamp, trial
from runners.schema import Failure, Job, Status, Trial
from runners.store import read_json, read_points, read_sealed, seal, write_json


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(trial, "load_engine", made.engine)
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    return made


def job(folder: Path, attempt: int = 1, *, slices: tuple[int, ...] = (), **settings: float) -> Job:
    member = plans.member(plans.trial(**settings), slices=slices)
    return Job(member.trial, attempt, member.slices, str(folder), "cpu", 1)


def points(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(step, metrics) for step, metrics, _ in read_points(folder)]


def test_a_whole_life(tmp_path: Path, fake: Fake) -> None:
    outcome = trial.run_job(job(tmp_path, slices=(4, 8)))
    assert (outcome.status, outcome.failure, outcome.error) == (Status.COMPLETE, None, None)
    result = read_sealed(tmp_path / "result.json")
    assert result["step"] == 6
    assert result["tokens"] == 48
    assert result["metrics"] == {"train/loss": pytest.approx(0.006), "valid/accuracy": 0.5}  # no infinity in JSON
    assert set(result["stamp"]) == {
        *("memsweep", "commit", "python", "torch", "triton", "device", "dtype", "fingerprint")
    }
    assert result["stamp"]["torch"] == torch.__version__
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert all(set(metrics) == {"train/loss"} for _, metrics in points(tmp_path))
    evals = {row["task"]["n_pairs"]: row for p in (tmp_path / "evals").iterdir() if (row := read_sealed(p))}
    assert {n: row["metrics"]["accuracy"] for n, row in evals.items()} == {
        4: pytest.approx(0.018 / 4),
        8: pytest.approx(0.018 / 8),
    }
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["final"]
    assert trial.read_outcome(tmp_path, outcome.trial_id, 1) == outcome
    assert not (tmp_path / "progress.json").exists()


def test_again_runs_nothing_and_a_new_slice_only_evaluates(tmp_path: Path, fake: Fake) -> None:
    trial.run_job(job(tmp_path, 1))
    before = (tmp_path / "result.json").read_bytes()
    assert trial.run_job(job(tmp_path, 2)).status == Status.COMPLETE
    assert len(fake.trained) == len(fake.evaluated) == 1
    assert trial.run_job(job(tmp_path, 3, slices=(4, 8))).status == Status.COMPLETE
    assert len(fake.trained) == 1
    assert len(fake.evaluated) == 2  # n_pairs 4 is the slice that was there
    assert (tmp_path / "result.json").read_bytes() == before


def test_new_slice_without_final_weights_trains_again(tmp_path: Path, fake: Fake) -> None:
    trial.run_job(job(tmp_path, 1))
    shutil.rmtree(tmp_path / "checkpoints")
    assert trial.run_job(job(tmp_path, 2, slices=(8,))).status == Status.COMPLETE
    assert fake.started_at == [0, 0]
    assert (tmp_path / "attempts" / "2" / "old-result.json").exists()
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert read_sealed(tmp_path / "result.json")["attempt"] == 2


def test_a_kill_at_any_step_changes_nothing(tmp_path: Path, fake: Fake) -> None:
    trial.run_job(job(tmp_path / "undisturbed"))
    whole = points(tmp_path / "undisturbed")
    for kill_at in range(6):
        folder = tmp_path / str(kill_at)

        def die(_: Trial, step: int, at: int = kill_at) -> None:
            if step == at:
                raise KeyboardInterrupt  # nothing after this line runs, as with a kill

        fake.before_step = die
        assert trial.run_job(job(folder, 1)).status == Status.INTERRUPTED
        assert read_sealed(folder / "result.json") is None
        fake.before_step = lambda *_: None
        assert trial.run_job(job(folder, 2)).status == Status.COMPLETE
        assert fake.started_at[-1] == kill_at // 2 * 2  # the newest checkpoint
        assert points(folder) == whole
        a, b = (read_sealed(f / "result.json")["metrics"] for f in (folder, tmp_path / "undisturbed"))
        assert a == b


def test_points_after_the_checkpoint_are_dropped_into_the_log(tmp_path: Path, fake: Fake) -> None:
    trial.run_job(job(tmp_path, 1), should_stop=lambda: (tmp_path / "checkpoints" / "4").exists())
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    assert (tmp_path / "metrics" / "2-4.jsonl").exists()
    fake.before_step = lambda *_: None
    trial.run_job(job(tmp_path, 2))
    assert fake.started_at == [0, 2]
    assert (tmp_path / "attempts" / "2" / "log.txt").read_text().count("dropped, after the checkpoint") == 2
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, fake: Fake) -> None:
    trial.run_job(job(tmp_path, 1), should_stop=lambda: (tmp_path / "checkpoints" / "4").exists())
    torn = tmp_path / "checkpoints" / "4" / "tensors.safetensors"
    torn.write_bytes(torn.read_bytes()[:-4] + b"\0\0\0\1")
    assert checkpoints.newest(tmp_path / "checkpoints").step == 2
    assert trial.run_job(job(tmp_path, 2)).status == Status.COMPLETE
    assert fake.started_at == [0, 2]
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", ["", "{", '{"schema": 1}'])
def test_a_torn_result_is_no_result(tmp_path: Path, fake: Fake, torn: str) -> None:
    trial.run_job(job(tmp_path, 1))
    whole = read_sealed(tmp_path / "result.json")["metrics"]
    (tmp_path / "result.json").write_text(torn)
    assert trial.run_job(job(tmp_path, 2)).status == Status.COMPLETE
    assert read_sealed(tmp_path / "result.json")["metrics"] == whole


def test_an_attempt_stops_when_a_newer_one_is_there(tmp_path: Path, fake: Fake) -> None:
    def newer(_: Trial, step: int) -> None:
        if step == 3:
            (tmp_path / "attempts" / "2").mkdir()

    fake.before_step = newer
    outcome = trial.run_job(job(tmp_path, 1))
    assert outcome.status == Status.INTERRUPTED
    assert "attempt 2 has taken over" in outcome.error
    assert not (tmp_path / "result.json").exists()
    assert checkpoints.steps(tmp_path / "checkpoints") == [2]  # what came before stays


def test_the_first_result_stays(tmp_path: Path, fake: Fake) -> None:
    """An attempt that lost its lease unseen, at the last moment, replaces nothing."""
    theirs = seal({"schema": 1, "status": "complete", "step": 6, "metrics": {}, "attempt": 2, "trial": "x"})

    def meanwhile(_: Trial, step: int) -> None:
        if step == 5:
            write_json(tmp_path / "result.json", theirs)

    fake.before_step = meanwhile
    trial.run_job(job(tmp_path, 1))
    assert read_sealed(tmp_path / "result.json") == theirs


@pytest.mark.parametrize(
    ("problem", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Failure.OOM),
        (MemoryError(), Failure.OOM),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), Failure.OOM),
        (OSError(28, "No space left on device"), Failure.INFRA),
        (ConnectionResetError("gone"), Failure.INFRA),
        (FileNotFoundError("corpus.txt"), Failure.ERROR),
        (ValueError("bad\nsecond line"), Failure.ERROR),
    ],
)
def test_failures_have_a_class_and_a_traceback(
    tmp_path: Path, fake: Fake, problem: Exception, failure: Failure
) -> None:
    def fail(_: Trial, step: int) -> None:
        if step == 3:
            raise problem

    fake.before_step = fail
    outcome = trial.run_job(job(tmp_path, 1))
    assert (outcome.status, outcome.failure) == (Status.FAILED, failure)
    assert outcome.error.startswith(type(problem).__name__)
    assert "\n" not in outcome.error
    assert "in fail" in (tmp_path / "attempts" / "1" / "error.txt").read_text()
    assert trial.read_outcome(tmp_path, outcome.trial_id, 1) == outcome
    fake.before_step = lambda *_: None
    assert trial.run_job(job(tmp_path, 2)).status == Status.COMPLETE
    assert fake.started_at == [0, 2]
    assert (tmp_path / "attempts" / "1" / "error.txt").exists()  # history stays


@pytest.mark.parametrize("left", [0, 1, 2, 3, 5, 100])
def test_a_full_disk_is_a_failure_and_raises_nothing(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """After some lines of the log nothing can be written any more: neither traceback nor outcome."""
    written = [0]
    real = trial.Log.__call__

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def log(self: trial.Log, line: str) -> None:
        written[0] += 1
        if written[0] > left:
            for name in ("write_text", "write_json"):
                monkeypatch.setattr(trial, name, full)
            full()
        real(self, line)

    monkeypatch.setattr(trial.Log, "__call__", log)
    outcome = trial.run_job(job(tmp_path, 1))
    committed = read_sealed(tmp_path / "result.json") is not None and any((tmp_path / "evals").glob("*"))
    if left == 100:
        assert (outcome.status, committed) == (Status.COMPLETE, True)
        return
    assert (outcome.status, outcome.failure) == (Status.FAILED, Failure.INFRA)
    assert "No space left" in (outcome.error or "")
    monkeypatch.undo()
    monkeypatch.setattr(trial, "load_engine", fake.engine)
    assert trial.run_job(job(tmp_path, 2)).status == Status.COMPLETE


def test_a_disk_full_after_the_commit_loses_nothing(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trial.Log.__call__

    def log(self: trial.Log, line: str) -> None:
        if line == "complete":
            raise OSError(28, "No space left on device")
        real(self, line)

    monkeypatch.setattr(trial.Log, "__call__", log)
    assert trial.run_job(job(tmp_path, 1)).status == Status.COMPLETE


def test_a_folder_that_cannot_be_made_is_a_failure(tmp_path: Path, fake: Fake) -> None:
    (tmp_path / "attempts").write_text("a file where the folder should be")
    outcome = trial.run_job(job(tmp_path, 1))
    assert (outcome.status, outcome.failure) == (Status.FAILED, Failure.INFRA)


def test_scores_beside_a_loss_that_is_no_number_are_none() -> None:
    assert trial.finite({"loss": math.nan, "accuracy": 0.0, "n": 3}) == {"n": 3.0}
    assert trial.finite({"loss": 1.0, "perplexity": math.inf, "n": 3}) == {"loss": 1.0, "n": 3.0}


def test_diverged_is_a_result_and_is_not_evaluated(tmp_path: Path, fake: Fake) -> None:
    fake.diverge = frozenset({5})
    assert trial.run_job(job(tmp_path, 1, seed=5)).status == Status.DIVERGED
    result = read_sealed(tmp_path / "result.json")
    assert result["status"] == "diverged"
    assert result["diverged"] == {"step": 6}
    assert not (tmp_path / "evals").exists()
    assert trial.run_job(job(tmp_path, 2, seed=5)).status == Status.DIVERGED
    assert len(fake.trained) == 1


def test_stop_before_the_start_leaves_a_clean_folder(tmp_path: Path, fake: Fake) -> None:
    assert trial.run_job(job(tmp_path, 1), should_stop=lambda: True).status == Status.INTERRUPTED
    assert fake.trained == []


def test_wall_time_adds_up_over_attempts(tmp_path: Path, fake: Fake) -> None:
    fake.step_s = 0.02
    trial.run_job(job(tmp_path, 1), should_stop=lambda: (tmp_path / "checkpoints" / "4").exists())
    before = checkpoints.newest(tmp_path / "checkpoints").wall_s
    trial.run_job(job(tmp_path, 2))
    assert before >= 0.08
    assert read_sealed(tmp_path / "result.json")["wall_s"] >= before + 0.04


def test_tied_tensors_can_be_kept(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    tensors = {"a": weight, "b": weight, "c": weight.t(), "half": weight.bfloat16(), "n": torch.tensor(3)}
    checkpoints.save(tmp_path, "7", checkpoints.Checkpoint(7, tensors, {"best": -math.inf}, 1.5))
    read = checkpoints.load(tmp_path, "7")
    assert (read.step, read.meta, read.wall_s) == (7, {"best": -math.inf}, 1.5)
    assert all(
        torch.equal(read.tensors[name], value) and read.tensors[name].dtype == value.dtype
        for name, value in tensors.items()
    )


def test_real_training_resumed_from_a_checkpoint_is_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    make = lambda name, attempt: dataclasses.replace(  # noqa: E731
        job(tmp_path / name, attempt, steps=12), checkpoint_every_s=0.0
    )
    trial.run_job(make("whole", 1))
    stop = lambda: (tmp_path / "cut" / "checkpoints" / "5").exists()  # noqa: E731
    assert trial.run_job(make("cut", 1), should_stop=stop).status == Status.INTERRUPTED
    assert trial.run_job(make("cut", 2)).status == Status.COMPLETE
    assert "resuming from the checkpoint at step" in (tmp_path / "cut" / "attempts" / "2" / "log.txt").read_text()
    whole, cut = (checkpoints.load(tmp_path / name / "checkpoints", "final") for name in ("whole", "cut"))
    assert whole.tensors.keys() == cut.tensors.keys()
    assert all(torch.equal(whole.tensors[name], cut.tensors[name]) for name in whole.tensors)
    assert points(tmp_path / "whole") == points(tmp_path / "cut")
    scores = [[read_sealed(p)["metrics"] for p in (tmp_path / n / "evals").iterdir()] for n in ("whole", "cut")]
    assert scores[0] == scores[1]


def test_fingerprint_covers_what_the_trial_imports() -> None:
    found: dict[str, Path] = {}
    stamp._collect("mechanisms.softmax", found)
    stamp._collect("runners.train", found)
    assert {"mechanisms.softmax", "mechanisms._parts", "runners.train", "runners.model"} <= found.keys()
    assert not {name for name in found if name.startswith("mechanisms.")} - {"mechanisms.softmax", "mechanisms._parts"}
    assert len(stamp.fingerprint("softmax", "mqar")) == 16


def test_progress_is_told_and_overwritten(tmp_path: Path, fake: Fake) -> None:
    seen = []

    def look(step: int, steps: int, _: object) -> None:
        seen.append((step, steps, read_json(tmp_path / "progress.json")["step"]))

    trial.run_job(job(tmp_path, 1), progress=look)
    assert seen[-1] == (6, 6, 6)
    assert json.dumps(seen)
