"""Each fault has one defined end: what was committed stays, the trial goes on from there, and the user is told.

Kills of real workers and drivers are in tests/test_ray.py and tests/test_driver.py.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from engines import Fake

from runners import checkpoints, database, driver, trial, watch
from runners.ledger import Ledger
from runners.owner import Owner
from runners.retry import DEFAULTS, Retries, is_disk_full
from runners.schema import Exit, Failure, Job, Outcome, Plan, Status, Trial, UserError
from runners.store import Store, read_sealed, write_json

ROOT = Path(__file__).resolve().parent.parent
Launch = Callable[..., driver.Summary]


@pytest.fixture
def launch(store: Store, fake: Fake, lines: list[str]) -> Launch:
    def run(plan: Plan) -> driver.Summary:
        return driver.launch(plan, store=store.root, executor="inline", say=lines.append)

    return run


def job(folder: Path, attempt: int = 1) -> Job:
    member = plans.member(plans.trial(), slices=(4, 8))
    return Job(member.trial, attempt, member.slices, str(folder), "cpu", 1)


# a full disk


class Disk:
    """A disk on which every write after the first `left` ones fails. A write counts when it is made to last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.writes = 10**9, 0
        real = os.fsync

        def fsync(descriptor: int) -> None:
            self.writes += 1
            if self.writes > self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)


def content(folder: Path) -> dict[str, Any]:
    """What a trial's folder says in the end, without clocks and attempt numbers."""
    result = read_sealed(folder / "result.json") or {}
    evals = {p.name: (read_sealed(p) or {})["metrics"] for p in sorted((folder / "evals").glob("*.json"))}
    named = {name: result.get(name) for name in ("status", "step", "metrics", "tokens")}
    return named | {"evals": evals, "points": [(s, m) for s, m, _ in trial_points(folder)]}


def trial_points(folder: Path) -> list[tuple[int, dict[str, float], float]]:
    from runners.store import read_points

    return list(read_points(folder))


def test_a_disk_full_at_any_write_loses_nothing_committed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake: Fake,
) -> None:
    """At each write of a trial in turn, and at all after it; with room again the trial ends as if nothing had been."""
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    disk = Disk(monkeypatch)
    assert trial.run_job(job(tmp_path / "whole")).status == Status.COMPLETE
    whole, n_writes = content(tmp_path / "whole"), disk.writes
    assert n_writes >= 30
    assert len(whole["evals"]) == 2
    ends = set()
    for at in range(n_writes):
        folder = tmp_path / str(at)
        disk.left, disk.writes = at, 0
        outcome = trial.run_job(job(folder))
        ends.add((outcome.status, outcome.failure))
        if outcome.status != Status.COMPLETE:
            assert "No space left on device" in (outcome.error or ""), at
            assert is_disk_full(outcome), at
        steps = checkpoints.steps(folder / "checkpoints")
        newest = checkpoints.newest(folder / "checkpoints")
        assert (newest.step if newest else None) == (steps[-1] if steps else None), "every checkpoint there is whole"
        disk.left = 10**9
        fake.started_at.clear()
        assert trial.run_job(job(folder, 2)).status == Status.COMPLETE, at
        assert content(folder) == whole, at
        if newest and fake.started_at:
            assert fake.started_at == [newest.step], at
    assert (Status.FAILED, Failure.INFRA) in ends
    assert not {failure for _, failure in ends} - {None, Failure.INFRA}


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_cannot_be_written_are_a_system_error(tmp_path: Path) -> None:
    """The library that writes them has an exception of its own, which would read as an error of the trial's."""
    small = checkpoints.Checkpoint(2, {"w": torch.ones(4)}, {}, 0.0)
    checkpoints.save(tmp_path, "2", small)
    large = checkpoints.Checkpoint(4, {"w": torch.ones(100_000)}, {}, 0.0)
    with file_size_limit(20_000), pytest.raises(OSError, match="File too large") as caught:
        checkpoints.save(tmp_path, "4", large)
    assert caught.value.errno == errno.EFBIG
    assert trial.classify(caught.value) == Failure.INFRA
    found = checkpoints.newest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2"]


def test_a_full_disk_stops_the_launch(launch: Launch, fake: Fake, lines: list[str], store: Store) -> None:
    """Each following trial would fail alike; none is called failed for it, and none is tried again at once."""

    def full(one: Trial, step: int) -> None:
        if one.seed == 1 and step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake.before_step = full
    summary = launch(plans.plan())
    assert (summary.exit_code, summary.counts) == (Exit.ENVIRONMENT, {"complete": 1, "failed": 1, "planned": 2})
    assert sum("the disk is full: stopping" in line for line in lines) == 1
    assert not any("trying again" in line for line in lines)
    fake.before_step = lambda *_: None
    again = launch(plans.plan())
    assert (again.exit_code, again.ran) == (Exit.OK, 3)
    assert fake.started_at[2] == 2


def test_a_disk_full_under_the_driver_is_told_in_words(
    launch: Launch,
    store: Store,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Store, "check_settings", full)
        with pytest.raises(UserError, match=r"could not go on: .*No space left") as caught:
            launch(plans.plan())
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert launch(plans.plan()).exit_code == Exit.OK


# torn checkpoints


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


TEARS: dict[str, Callable[[Path], None]] = {
    "tensors truncated": lambda folder: _truncate(folder / "tensors.safetensors"),
    "tensors empty": lambda folder: (folder / "tensors.safetensors").write_bytes(b""),
    "tensors missing": lambda folder: (folder / "tensors.safetensors").unlink(),
    "meta missing": lambda folder: (folder / "meta.json").unlink(),
    "meta truncated": lambda folder: _truncate(folder / "meta.json"),
    "meta of another kind": lambda folder: (folder / "meta.json").write_text("[1, 2]"),
    "meta without a checksum": lambda folder: (folder / "meta.json").write_text('{"step": 4, "meta": {}}'),
    "meta not text": lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe\0"),
    "empty folder": lambda folder: shutil.rmtree(folder) or folder.mkdir(),  # type: ignore[func-returns-value]
    "a file in its place": lambda folder: shutil.rmtree(folder) or folder.write_text("x"),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("tear", TEARS.values(), ids=TEARS)
def test_a_torn_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path,
    fake: Fake,
    tear: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    trial.run_job(job(tmp_path / "whole"))
    cut = tmp_path / "cut"
    trial.run_job(job(cut), should_stop=lambda: (cut / "checkpoints" / "4").exists())
    assert checkpoints.steps(cut / "checkpoints") == [2, 4]
    tear(cut / "checkpoints" / "4")
    fake.started_at.clear()
    assert trial.run_job(job(cut, 2)).status == Status.COMPLETE
    assert fake.started_at == [2]
    assert content(cut) == content(tmp_path / "whole")


# a busy ledger


@contextmanager
def held(store: Store, seconds: float) -> Iterator[None]:
    """Another process holds the ledger for that long."""
    ready = threading.Event()

    def hold() -> None:
        with sqlite3.connect(store.root / "ledger.db", isolation_level=None) as db:
            db.execute("BEGIN EXCLUSIVE")
            ready.set()
            time.sleep(seconds)
            db.execute("ROLLBACK")

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own waiting, 2 s at a time in earnest, is far shorter than the lock."""
    monkeypatch.setattr(database, "_SQLITE_WAITS_S", 0.05)


def test_a_ledger_held_for_a_while_is_waited_for(
    launch: Launch,
    store: Store,
    fake: Fake,
    impatient: None,
) -> None:
    """A tenth of the time in earnest: 20 s of BEGIN EXCLUSIVE against a lease of 60 s."""
    Ledger.open(store).close()
    locks: list[Any] = []

    def lock(one: Trial, step: int) -> None:
        if not locks:
            locks.append(held(store, 2.0))
            locks[0].__enter__()

    fake.before_step = lock
    began = time.monotonic()
    summary = launch(plans.plan())
    assert time.monotonic() - began > 2.0
    locks[0].__exit__(None, None, None)
    assert (summary.counts, summary.exit_code, len(fake.trained)) == ({"complete": 4}, Exit.OK, 4)


def test_a_ledger_held_too_long_stops_the_launch_resumably(
    launch: Launch,
    store: Store,
    fake: Fake,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.5)
    Ledger.open(store).close()
    locks: list[Any] = []

    def lock(one: Trial, step: int) -> None:
        if one.seed == 1 and not locks:
            locks.append(held(store, 4.0))
            locks[0].__enter__()

    fake.before_step = lock
    with pytest.raises(UserError, match=r"could not go on: database is locked.*What was committed is safe") as caught:
        launch(plans.plan())
    assert caught.value.exit_code == Exit.ENVIRONMENT
    with pytest.raises(UserError, match=r"another process has held the ledger .* locked") as caught:
        launch(plans.plan())
    assert caught.value.exit_code == Exit.ENVIRONMENT
    locks[0].__exit__(None, None, None)
    ledger = Ledger.open(store)
    for owner in ledger.drivers():
        ledger.leave(owner)  # in earnest its process has ended, and the next launch here sees that
    again = launch(plans.plan())
    assert (again.counts, again.exit_code, len(fake.trained)) == ({"complete": 4}, Exit.OK, 4)


CLAIM = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from runners.ledger import Ledger
from runners.owner import Owner
from runners.store import Store
ledger, me = Ledger.open(Store.open(Path(sys.argv[1]))), Owner.me()
ledger.register(me)
print("ready", flush=True)
sys.stdin.readline()
ids = Path(sys.argv[2]).read_text().split()
taken = []
for trial_id in ids:
    if ledger.claim(trial_id, me):
        taken.append(trial_id)
        time.sleep(0.002)  # it would run the trial now
print(*taken)
"""


def claim_all(store: Store, tmp_path: Path, n_trials: int, n_drivers: int) -> list[list[str]]:
    """What each of several driver processes got of one sweep."""
    plan = plans.plan(seeds=range(n_trials // 2))
    ledger = Ledger.open(store)
    ledger.record_plan(plan, 1)
    ledger.close()
    (tmp_path / "ids").write_text("\n".join(m.trial.id for m in plan.members))
    code = CLAIM.format(root=str(ROOT), tests=str(ROOT / "tests"))
    command = [sys.executable, "-c", code, str(store.root), str(tmp_path / "ids")]
    pipe = subprocess.PIPE
    drivers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(n_drivers)]
    for process in drivers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in drivers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    taken = [process.communicate(timeout=240)[0].split() for process in drivers]
    assert [process.returncode for process in drivers] == [0] * n_drivers
    expected = sorted(m.trial.id for m in plan.members)
    assert sorted(trial_id for part in taken for trial_id in part) == expected, "each trial exactly once"
    return taken


def test_four_drivers_claim_a_thousand_trials_each_once(store: Store, tmp_path: Path) -> None:
    taken = claim_all(store, tmp_path, 1000, 4)
    assert sum(map(len, taken)) == 1000
    assert all(taken), "everyone got some"


# workers that hang


def attempt_of(tmp_path: Path, number: int = 1) -> Path:
    attempt = tmp_path / "attempts" / str(number)
    attempt.mkdir(parents=True)
    (attempt / "log.txt").write_text("begun\n")
    return attempt


def test_silence_is_noticed_and_any_sign_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    looking = watch.Watch(60.0)
    assert looking.silent_s(tmp_path, 1) is None  # nobody has begun
    attempt = attempt_of(tmp_path)

    def after(seconds: float) -> float | None:
        now[0] += seconds
        return looking.silent_s(tmp_path, 1)

    for _ in range(3):
        assert after(500) is None  # it starts: on a busy machine its imports take long
    write_json(attempt / trial.WORKER_FILE, {})
    assert after(500) is None  # the first look only remembers
    assert after(60) is None
    assert after(1) == 61
    for sign in ("progress.json", "checkpoints", "evals", "metrics"):
        (tmp_path / sign).mkdir()
        assert after(30) is None
        assert after(59) is None
        assert after(2) == 61
    os.utime(attempt / "log.txt", (1.0, 1.0))  # another machine's clock: a change is a change
    assert after(1) is None


def test_a_hung_worker_is_killed_and_its_end_is_told(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(worker.pid, signal.SIGSTOP)
    row = dataclasses.asdict(Owner.of(worker.pid))
    write_json(attempt / trial.WORKER_FILE, row)
    assert watch.kill(tmp_path, "t", 1, "no progress for 61 s: its worker was killed")
    assert worker.wait(timeout=30) == -signal.SIGKILL
    outcome = trial.read_outcome(tmp_path, "t", 1)
    assert outcome is not None
    assert (outcome.status, outcome.failure) == (Status.FAILED, Failure.INFRA)
    assert outcome.error == "no progress for 61 s: its worker was killed"
    assert not watch.kill(tmp_path, "t", 1, "gone already")


@pytest.mark.parametrize("changed", [{"begun": "1"}, {"host": "another machine"}, {"pid": os.getpid()}])
def test_nobody_else_is_killed(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A number that was given to another process, a process of another machine, and this one."""
    attempt = attempt_of(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    mine = Owner.of(os.getpid()) if "pid" in changed else Owner.of(other.pid)
    write_json(attempt / trial.WORKER_FILE, dataclasses.asdict(mine) | changed)
    assert not watch.kill(tmp_path, "t", 1, "no progress")
    assert other.poll() is None
    assert trial.read_outcome(tmp_path, "t", 1) is None
    other.kill()
    other.wait()


def test_a_hang_in_this_very_process_is_told_and_killed_by_nobody(
    launch: Launch,
    fake: Fake,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The inline executor has no other process to end."""
    monkeypatch.setattr(watch.Watch, "is_due", True)
    monkeypatch.setattr(watch.Watch, "silent_s", lambda *_: 99.0)
    assert launch(plans.plan(seeds=(0,), lrs=(1e-3,))).exit_code == Exit.OK
    assert any("no progress for 99 s (retry.hang); its worker is out of reach from here" in line for line in lines)


# retries


def test_what_is_tried_again_without_a_word_in_the_spec() -> None:
    one = plans.trial()

    def ended(failure: Failure, error: str = "", rows: int | None = None) -> Outcome:
        return Outcome(one.id, 1, Status.FAILED, failure, error, rows)

    retries = Retries({})
    assert [bool(retries.again(one, ended(Failure.INFRA))) for _ in range(5)] == [True, True, True, False, False]
    assert retries.again(one, ended(Failure.ERROR)) is None
    assert retries.again(one, ended(Failure.OOM, rows=None)) is None
    assert "32 rows" in (retries.again(one, ended(Failure.OOM, rows=64)) or "")
    assert retries.again(one, ended(Failure.OOM, rows=1)) is None
    assert retries.again(plans.trial(1), ended(Failure.INFRA)), "counts are of one trial"
    full = ended(Failure.INFRA, "OSError: [Errno 28] No space left on device")
    assert Retries({}).again(one, full) is None
    assert Retries({"infra": 0}).again(one, ended(Failure.INFRA)) is None
    assert DEFAULTS["hang"] == 1800


def test_one_class_of_failure_does_not_use_up_another(launch: Launch, fake: Fake, store: Store) -> None:
    problems = iter([ConnectionError("gone"), ValueError("bug"), ConnectionError("gone again")])

    def fail(_: Trial, step: int) -> None:
        if step == 3 and (problem := next(problems, None)):
            raise problem

    fake.before_step = fail
    summary = launch(plans.plan(seeds=(0,), lrs=(1e-3,), retry={"infra": 2, "error": 1}))
    assert summary.exit_code == Exit.OK
    ledger = Ledger.open(store)
    history = ledger.attempts(plans.plan(seeds=(0,), lrs=(1e-3,)).members[0].trial.id)
    assert [(row["status"], row["failure"]) for row in history] == [
        ("failed", "infra"),
        ("failed", "error"),
        ("failed", "infra"),
        ("complete", None),
    ]


# signals

STUCK = """
import signal, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import plans
from engines import Fake
from runners import driver, trial
from pathlib import Path
def hang(one, step):
    if step == 3:
        print("stuck", flush=True)
        while True:
            time.sleep(0.05)
trial.load_engine = Fake(before_step=hang).engine
from sweeps import cli
say = lambda line: print(line, flush=True)
try:
    summary = driver.launch(plans.plan(), store=Path({store!r}), executor="inline", say=say)
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(summary.exit_code)
"""


def test_a_second_signal_stops_at_once(store: Store, fake: Fake) -> None:
    """The first waits for a checkpoint that a trial stuck in a step never reaches."""
    code = STUCK.format(root=str(ROOT), tests=str(ROOT / "tests"), store=str(store.root))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/")
    assert process.stdout is not None
    while (said := process.stdout.readline()) != "stuck\n":
        assert said, "the driver ended too early"
    process.send_signal(signal.SIGINT)
    time.sleep(1.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # another one counts as well
    assert process.wait(timeout=60) == Exit.INTERRUPTED
    process.stdout.close()
    assert driver.status(store.root, "tiny")[0].counts == {"interrupted": 1, "planned": 3}
    summary = driver.launch(plans.plan(), store=store.root, executor="inline", say=lambda _: None)
    assert (summary.exit_code, summary.ran, fake.started_at[0]) == (Exit.OK, 4, 2)
