"""The Ray executor does what the inline one does: same numbers, and it survives kills of workers and of the driver.

Ray takes seconds to start, so few tests here, each with much in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import stores
from test_record import runs

from runners import driver
from runners.schema import Exit, Plan
from runners.store import Store

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
sys.path[:0] = [{root!r}, {tests!r}]
import plans
from runners import driver
from pathlib import Path
plan = plans.plan(**json.loads({plan!r}))
say = lambda line: print(line, flush=True)
summary = driver.launch(plan, store=Path({store!r}), executor="ray", jobs=2, say=say)
print(json.dumps([summary.counts, summary.ran, [f.kind + ": " + f.error for f in summary.failures]]))
sys.exit(summary.exit_code)
"""


def start(store: Store, cwd: Path, **plan: Any) -> subprocess.Popen[str]:
    """A driver with Ray in a process of its own."""
    code = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), plan=json.dumps(plan), store=str(store.root))
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, process_group=0, stdin=subprocess.DEVNULL
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the driver ended too early: {process.communicate()}")
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def worker_of(store: Store, trial_id: str, attempt: int = 1) -> int | None:
    """The process that runs the trial, from its log."""
    log = store.trial_folder(trial_id) / "attempts" / str(attempt) / "log.txt"
    found = re.search(r"process (\d+)", log.read_text()) if log.exists() else None
    return int(found[1]) if found else None


def results(store: Store, plan: Plan) -> list[Any]:
    """Everything a trial computed, but for what depends on the clock."""
    found = []
    for member in plan.members:
        result = store.result(member.trial.id)
        evals = [store.evaluation(member.trial.id, part.id)["metrics"] for part in member.slices]
        found.append((result["status"], result["step"], result["metrics"], result["tokens"], evals))
    return found


def scratch_of(pid: int) -> list[Path]:
    """Folders for temporary files that the driver `pid` has left."""
    owners = [*Path(tempfile.gettempdir()).glob("memsweep-ray-*/owner.json")]
    return [path.parent for path in owners if json.loads(path.read_text())["pid"] == pid]


def damage(scratch: Path) -> None:
    """Truncate one half of the files that Ray wrote, and delete the other."""
    files = [path for path in scratch.rglob("*") if path.is_file() and path.parent != scratch]
    assert len(files) > 10
    for number, path in enumerate(files):
        path.unlink(missing_ok=True) if number % 2 else os.truncate(path, 0)


def ray_processes(parent: int) -> list[str]:
    """Ray's processes that name the driver `parent` or descend from it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            mother = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if mother == parent and "ray" in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, list[Any]]:
    """The plan of these tests and its results, run inline without trouble."""
    store = stores.make(tmp_path_factory.mktemp("inline") / "runs")
    plan = plans.plan(seeds=[0, 1], steps=300)
    summary = driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    assert summary.exit_code == Exit.OK
    return plan, results(store, plan)


def test_same_numbers_one_killed_worker_and_one_hung(tmp_path: Path, undisturbed: tuple[Plan, list[Any]]) -> None:
    """Nothing of it is asked for in the spec but how long a worker may be silent."""
    plan, expected = undisturbed
    store = stores.make(tmp_path / "runs")
    victim = plan.members[0].trial.id
    process = start(store, tmp_path, seeds=[0, 1], steps=300, retry={"hang": 20})
    wait_for(lambda: (store.trial_folder(victim) / "progress.json").exists(), process)
    os.kill(worker_of(store, victim), signal.SIGKILL)
    hung = next(m.trial.id for m in plan.members[3:])
    wait_for(lambda: (store.trial_folder(hung) / "progress.json").exists(), process)
    os.kill(worker_of(store, hung), signal.SIGSTOP)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == Exit.OK, said + errors
    assert errors == ""  # nothing of Ray's reaches the user
    assert json.loads(said.splitlines()[-1]) == [{"complete": 4}, 4, []]
    assert "failed (infra)" in said
    assert said.count("trying again (1 of 3)") == 2
    assert "(retry.hang); its worker was killed" in said
    assert "2 trials at once on CPU, 1 thread each" in said
    assert results(store, plan) == expected
    assert store.last_attempt(victim) == 2
    assert "worker process died" in (store.trial_folder(victim) / "attempts" / "1" / "error.txt").read_text()
    workers = [worker_of(store, m.trial.id, store.last_attempt(m.trial.id)) for m in plan.members]
    assert len(set(workers)) < 4  # actors are used again
    assert {run.info.status for run in runs(store)} == {"FINISHED"}
    assert len(runs(store)) == 4
    assert scratch_of(process.pid) == []
    assert ray_processes(process.pid) == []


def test_driver_killed_then_launched_from_elsewhere(tmp_path: Path, undisturbed: tuple[Plan, list[Any]]) -> None:
    plan, expected = undisturbed
    store = stores.make(tmp_path / "runs")
    first = start(store, tmp_path, seeds=[0, 1], steps=300)
    wait_for(lambda: len(list(store.root.glob("trials/*/result.json"))) >= 1, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    damage(scratch_of(first.pid)[0])
    n_before = len(list(store.root.glob("trials/*/result.json")))
    sweep = driver.status(store.root, "tiny")[0]
    assert sweep.drivers == []
    other = tmp_path / "elsewhere"
    other.mkdir()
    second = start(store, other, seeds=[0, 1], steps=300)
    said, errors = second.communicate(timeout=300)
    assert second.returncode == Exit.OK, said + errors
    assert "taking over from process" in said
    counts, ran, failures = json.loads(said.splitlines()[-1])
    assert (counts, failures) == ({"complete": 4}, [])
    assert ran <= 4 - n_before
    assert results(store, plan) == expected
    found = runs(store)
    assert sorted(run.data.tags["memsweep.trial_id"] for run in found) == sorted(m.trial.id for m in plan.members)
    assert {run.info.status for run in found} == {"FINISHED"}
    assert scratch_of(first.pid) == scratch_of(second.pid) == []


def test_scratch_has_room_for_sockets_and_what_the_dead_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runners.ray_tune import make_scratch

    short = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    first, second = make_scratch(), make_scratch()
    assert first.parent == second.parent == short
    owner = json.loads((first / "owner.json").read_text())
    (first / "owner.json").write_text(json.dumps(owner | {"begun": "1"}))  # a process number that is used again
    third = make_scratch()
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)
    shutil.rmtree(short)
    # A job's folder on a cluster, and each user's on a Mac: Ray's sockets would not fit below.
    long = tmp_path / ("long" * 12)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = make_scratch()
    assert made.parent == Path("/tmp")
    shutil.rmtree(made)


def test_signals_stop_at_a_checkpoint(tmp_path: Path, undisturbed: tuple[Plan, list[Any]]) -> None:
    """Ctrl-C, `timeout` and batch systems signal the whole group, and some of them the driver once more."""
    plan, expected = undisturbed
    store = stores.make(tmp_path / "runs")
    # The other signal has a test while Ray starts, and both have one without Ray (test_driver).
    for number in (signal.SIGINT, signal.SIGTERM) if os.environ.get("MEMSWEEP_WIDE") else (signal.SIGINT,):
        begun = {path.parent for path in store.root.glob("trials/*/attempts/*/log.txt")}

        def is_training(begun: set[Path] = begun) -> bool:
            found = [path.parent for path in store.root.glob("trials/*/attempts/*/log.txt") if path.parent not in begun]
            return any((attempt.parent.parent / "progress.json").exists() for attempt in found)

        process = start(store, tmp_path, seeds=[0, 1], steps=300)
        wait_for(is_training, process)
        os.kill(process.pid, number)
        os.killpg(process.pid, number)
        said, errors = process.communicate(timeout=240)
        assert process.returncode == Exit.INTERRUPTED, said + errors
        assert f"{number.name}: stopping at a checkpoint" in said
        counts = driver.status(store.root, "tiny")[0].counts
        assert "running" not in counts
        assert counts.get("interrupted", 0) >= 1
        assert "failed" not in counts
        assert "RUNNING" not in {run.info.status for run in runs(store)}
    summary = driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    assert summary.exit_code == Exit.OK
    assert results(store, plan) == expected


def test_a_signal_while_ray_starts_is_not_lost(tmp_path: Path) -> None:
    """Ray's start, seconds long, would put handlers in place of ours that exit at once with the signal's number."""
    store = stores.make(tmp_path / "runs")
    process = start(store, tmp_path, seeds=[0], steps=300)
    assert process.stdout is not None
    said = next(line for line in process.stdout if "to run" in line)

    def has_scratch() -> bool:
        made = Path(tempfile.gettempdir()).glob("memsweep-ray-*/owner.json")
        return any(_owner_pid(path) == process.pid for path in made)

    wait_for(has_scratch, process)  # Ray is about to start
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGTERM)
    rest, errors = process.communicate(timeout=240)
    assert process.returncode == Exit.INTERRUPTED, said + rest + errors
    assert "SIGTERM: stopping at a checkpoint" in rest
    assert not has_scratch()
    assert driver.status(store.root, "tiny")[0].counts == {"interrupted": 1, "planned": 1}


def _owner_pid(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(json.loads(path.read_text())["pid"])
    return None
