"""Mailboxes on shared storage: what a worker commits reaches the store whole, in order, and once."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import fsspec
import plans
import pytest

from runners import checkpoints, shared, trial
from runners.schema import Job, Outcome, Status, UserError
from runners.shared import Shared
from runners.store import Store, read_points, read_sealed, write_json

STEPS = 8
quick = pytest.mark.parametrize("url", ["memory", "file"], indirect=True)
"""Not on the server too: what these tests ask does not depend on it, and each takes seconds there."""


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Storage that puts whole files, in memory and on a server, and a file system that does not."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}"
        return
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/some/folder"
        return
    yield f"memory://{tmp_path.name}/folder"
    fs = fsspec.filesystem("memory")
    if fs.exists(f"/{tmp_path.name}"):
        fs.rm(f"/{tmp_path.name}", recursive=True)


class Node:
    """A driver and a node that share nothing but the storage, for one trial that a fake engine trains."""

    def __init__(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **fake: Any) -> None:
        self.store = Store.create(tmp_path / "runs")
        self.shared = Shared(url, self.store.uuid)
        self.member = plans.plan(steps=STEPS).members[0]
        self.store.check_settings(self.member.trial)
        self.folder = self.store.trial_folder(self.member.trial.id)
        self.scratch = tmp_path / "node"
        self.engine = engines.Fake(**fake)
        monkeypatch.setattr(trial, "load_engine", self.engine.engine)

    def job(self, attempt: int) -> Job:
        """A job that the driver has handed over."""
        job = Job(self.member.trial, attempt, self.member.slices, str(self.folder), "cpu", 1, 0.0)
        path = self.folder / "attempts" / str(attempt) / shared.JOB_FILE
        write_json(path, dataclasses.asdict(job))
        self.shared.send(job, path.read_bytes())
        return job

    def work(self, job: Job) -> Outcome:
        """What the worker does with it, with an instance of its own."""
        there = Shared(self.shared.url, self.shared.uuid)
        with there.working_copy(job.trial.id, job.attempt, self.scratch / str(job.attempt)) as folder:
            stop = folder / "attempts" / str(job.attempt) / shared.STOP_FILE
            return trial.run_job(dataclasses.replace(job, folder=str(folder)), should_stop=stop.exists)

    def receive(self, attempt: int) -> None:
        self.shared.receive(self.folder, self.member.trial.id, attempt)

    def points(self) -> list[int]:
        return [step for step, _, _ in read_points(self.folder)]

    def boxes(self) -> list[int]:
        return self.shared.attempts(self.member.trial.id)


def test_a_trial_comes_back_as_if_run_in_the_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(url, tmp_path, monkeypatch)
    node.shared.check()
    job = node.job(1)
    assert node.boxes() == [1]
    assert node.work(job).status == Status.COMPLETE
    assert node.store.result(job.trial.id) is None
    node.receive(1)
    node.receive(1)  # again changes nothing
    far = _content(node.folder)
    assert trial.read_outcome(node.folder, job.trial.id, 1).status == Status.COMPLETE
    assert not node.store.missing_slices(job.trial.id, job.slices)
    node.shared.close(job.trial.id, 1)
    assert node.boxes() == []
    assert not list((tmp_path / "node").rglob("*.json")), "nothing is left on the node"
    shutil.rmtree(node.folder)
    node.store.check_settings(node.member.trial)
    trial.run_job(dataclasses.replace(job, folder=str(node.folder)))
    assert far == _content(node.folder)


def _content(folder: Path) -> dict[str, Any]:
    """What a trial computed: every file but the words of its attempts, without what the clock says."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "attempts" not in p.parts):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            row = json.loads(path.read_text())
            found[name] = {k: v for k, v in row.items() if k not in ("wall_s", "checksum", "peak_mem_bytes", "stamp")}
        else:
            found[name] = path.read_bytes()
    return found


def test_a_lost_node_is_resumed_from_what_it_committed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node goes at step 5 of 8, with checkpoints at 2 and 4; the driver has seen nothing of it until then."""

    class PowerCutError(BaseException):
        pass

    def cut(_trial: Any, step: int) -> None:
        if step == 5 and len(node.engine.trained) == 1:
            mirror.once()  # the last round before the power went; what came after it is lost
            raise PowerCutError

    node = Node(url, tmp_path, monkeypatch, before_step=cut)
    job = node.job(1)
    mirror = shared._Mirror(node.shared, tmp_path / "node/1" / job.trial.id, job.trial.id, 1, {})
    monkeypatch.setattr(shared._Mirror, "start", lambda self: None)
    monkeypatch.setattr(shared._Mirror, "join", lambda self: None)
    monkeypatch.setattr(shared, "patiently", _only_reads(shared.patiently))
    with pytest.raises(PowerCutError):
        node.work(job)
    monkeypatch.undo()
    monkeypatch.setattr(trial, "load_engine", node.engine.engine)
    assert not (node.folder / "checkpoints").exists()
    assert node.shared.collect(node.store, is_held=lambda _: True) == 1
    assert not (node.folder / "checkpoints").exists(), "another driver's trial is its own"
    node.shared.collect(node.store, is_held=lambda _: False)
    assert checkpoints.steps(node.folder / "checkpoints") == [2, 4]
    assert node.points() == [1, 2, 3, 4]
    again = node.job(2)
    assert node.boxes() == [2], "what an older attempt still says, nobody reads"
    assert node.work(again).status == Status.COMPLETE
    assert node.engine.started_at == [0, 4]
    node.receive(2)
    assert node.points() == list(range(1, STEPS + 1))
    assert checkpoints.steps(node.folder / "checkpoints") == []


def _only_reads(patiently: Any) -> Any:
    """`patiently` of a node without power: it copied its mailbox, but has no last word."""

    def call(act: Any, *rest: Any) -> Any:
        return None if getattr(act, "__name__", "") == "once" else patiently(act, *rest)

    return call


@quick
def test_points_without_their_checkpoint_stay_out(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker writes points first: a look at the mailbox between the two takes neither."""
    node = Node(url, tmp_path, monkeypatch)
    job = node.job(1)
    box = node.shared._box(job.trial.id, 1)
    line = json.dumps({"step": 2, "metrics": {"train/loss": 1.0}}).encode() + b"\n"
    node.shared._put(box, "metrics/0-2.jsonl", line)
    node.shared._put(box, "checkpoints/2/tensors.safetensors", b"half")
    node.receive(1)
    assert node.points() == []
    assert checkpoints.steps(node.folder / "checkpoints") == []


@quick
def test_a_torn_checkpoint_and_the_points_after_it_go(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's newest checkpoint is damaged: the worker goes on from the one before, and so does the store."""
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    stopped = threading.Event()
    node = Node(url, tmp_path, monkeypatch, before_step=lambda _, step: stopped.set() if step == 6 else None)
    job = dataclasses.replace(node.job(1), folder=str(node.folder))
    trial.run_job(job, should_stop=stopped.is_set)
    node.engine.before_step = lambda *_: None
    assert checkpoints.steps(node.folder / "checkpoints")[-1] >= 6
    newest = checkpoints.steps(node.folder / "checkpoints")[-1]
    (node.folder / "checkpoints" / str(newest) / "tensors.safetensors").write_bytes(b"torn")
    assert node.work(node.job(2)).status == Status.COMPLETE
    assert node.engine.started_at[-1] < newest
    node.receive(2)
    assert node.points() == list(range(1, STEPS + 1))
    names = [path.name for path in (node.folder / "metrics").iterdir()]
    ends = sorted(int(name.split("-")[1].split(".")[0]) for name in names)
    assert len(set(ends)) == len(ends)


@quick
def test_stop_and_takeover_reach_the_worker(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MIRROR_S", 0.05)
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    node = Node(url, tmp_path, monkeypatch, step_s=0.05)
    job = node.job(1)
    node.engine.before_step = lambda _, step: node.shared.ask_to_stop(job) if step == 2 else None
    assert node.work(job).status == Status.INTERRUPTED
    node.receive(1)
    assert node.store.result(job.trial.id) is None
    assert checkpoints.steps(node.folder / "checkpoints")

    second = node.job(2)
    node.engine.before_step = lambda _, step: node.job(3) if step == 6 else None
    outcome = node.work(second)
    assert (outcome.status, outcome.error) == (Status.INTERRUPTED, "attempt 3 has taken over")
    before = _content(node.folder)
    node.receive(2)
    assert _content(node.folder) == before, "an older attempt's mailbox is not read"


@quick
def test_the_first_result_stays(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(url, tmp_path, monkeypatch)
    job = node.job(1)
    node.work(job)
    node.receive(1)
    first = read_sealed(node.folder / "result.json")
    box = node.shared._box(job.trial.id, 1)
    node.shared._put(box, "result.json", b"{}")
    node.receive(1)
    assert read_sealed(node.folder / "result.json") == first


@quick
def test_new_evaluations_use_the_final_weights(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(url, tmp_path, monkeypatch)
    node.work(node.job(1))
    node.receive(1)
    node.member = dataclasses.replace(node.member, slices=plans.member(node.member.trial, slices=(4, 8)).slices)
    assert node.work(node.job(2)).status == Status.COMPLETE
    assert node.engine.trained == [node.member.trial.id]
    node.receive(2)
    assert not node.store.missing_slices(node.member.trial.id, node.member.slices)
    # Without them the trial is trained again, and the old result gives way.
    shutil.rmtree(node.folder / "checkpoints" / checkpoints.FINAL)
    node.member = dataclasses.replace(node.member, slices=plans.member(node.member.trial, slices=(4, 8, 2)).slices)
    assert node.work(node.job(3)).status == Status.COMPLETE
    assert len(node.engine.trained) == 2
    node.receive(3)
    assert (node.store.result(node.member.trial.id) or {})["attempt"] == 3
    assert not node.store.missing_slices(node.member.trial.id, node.member.slices)


def test_storage_that_is_away_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(f"file://{tmp_path}/bucket", tmp_path, monkeypatch)
    job = node.job(1)
    calls = []

    def flaky(self: Any, folder: str, path: str, data: bytes) -> None:
        calls.append(path)
        if len(calls) < 4:
            raise OSError("503 Slow Down")
        put(self, folder, path, data)

    put = Shared._put
    monkeypatch.setattr(Shared, "_put", flaky)
    monkeypatch.setattr(shared.time, "sleep", lambda _: None)
    assert node.work(job).status == Status.COMPLETE
    node.receive(1)
    assert node.store.result(job.trial.id) is not None

    def away() -> None:
        raise OSError("503 Slow Down")

    with pytest.raises(OSError, match="away for 0 s: OSError: 503 Slow Down"):
        shared.patiently(away, 0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("s3://key:secret@bucket/folder", r"s3://bucket/folder: .*leave the password out"),
        ("s3://key:a@secret/@bucket/folder", r"s3://bucket/folder: .*leave the password out"),
        ("/mnt/folder", "give a URL"),
        ("nonsense://x/y", "nonsense"),
    ],
)
def test_urls_that_cannot_be_used(given: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        Shared(given, "uuid")
    assert "secret" not in str(caught.value)


def test_storage_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the shared storage"):
        Shared(f"file://{tmp_path}/file/below", "uuid").check()
