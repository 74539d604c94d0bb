"""Launches: only what is missing runs, failures are told, drivers share, kills lose nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_store
import plans
import pytest
from engines import Fake
from sqlalchemy.exc import OperationalError

from runners import database, driver, launching, resources, trial
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Exit, Plan, Trial, UserError
from runners.store import Store, seal, write_json
from sweeps import reports

ROOT = Path(__file__).resolve().parent.parent


Launch = Callable[..., driver.Summary]


@pytest.fixture
def launch(store: Store, fake: Fake, lines: list[str]) -> Launch:
    def run(plan: Plan, **arguments: Any) -> driver.Summary:
        return driver.launch(plan, store=store.root, executor="inline", say=lines.append, **arguments)

    return run


def fail_seed(seed: int, times: int = 10**9, problem: type[Exception] = ValueError) -> Callable[[Trial, int], None]:
    """Fails trials of `seed` at step 3, `times` times in all."""
    left = [times]

    def check(one: Trial, step: int) -> None:
        if one.seed == seed and step == 3 and left[0]:
            left[0] -= 1
            raise problem("not this one")

    return check


def test_a_second_launch_runs_nothing_and_says_so(launch: Launch, lines: list[str], fake: Fake) -> None:
    first = launch(plans.plan())
    assert (first.ran, first.skipped, first.counts, first.exit_code) == (4, 0, {"complete": 4}, Exit.OK)
    lines.clear()
    again = launch(plans.plan())
    assert (again.ran, again.skipped, again.counts, again.exit_code) == (0, 4, {"complete": 4}, Exit.OK)
    assert lines == ["tiny revision 1: 4 trials, 4 already done: 0 to run"]
    assert len(fake.trained) == 4


def test_more_seeds_and_values_run_only_the_difference(launch: Launch, lines: list[str], fake: Fake) -> None:
    launch(plans.plan())
    assert launch(plans.plan(seeds=(0, 1, 2))).ran == 2
    assert launch(plans.plan(seeds=(0, 1, 2), lrs=(1e-3, 2e-3, 3e-3))).ran == 3
    assert len(set(fake.trained)) == len(fake.trained) == 9
    summary = launch(plans.plan(seeds=(0,)))
    assert (summary.ran, summary.revision) == (0, 4)
    assert any("7 trials of revision 3 are no longer planned; their results stay" in line for line in lines)


def test_new_slices_are_evaluated_without_training(launch: Launch, fake: Fake, lines: list[str]) -> None:
    launch(plans.plan())
    summary = launch(plans.plan(slices=(4, 8)))
    assert (summary.ran, summary.evaluated, summary.skipped) == (0, 4, 0)
    assert any("4 of them only to evaluate" in line for line in lines)
    assert (len(fake.trained), len(fake.evaluated)) == (4, 8)


def test_final_weights_gone_is_told_and_trained_again(launch: Launch, store: Store, lines: list[str]) -> None:
    plan = plans.plan()
    launch(plan)
    shutil.rmtree(store.trial_folder(plan.members[0].trial.id) / "checkpoints")
    summary = launch(plans.plan(slices=(4, 8)))
    assert (summary.ran, summary.evaluated) == (1, 3)
    assert any("1 of them to train again" in line for line in lines)


def test_a_trial_of_two_sweeps_runs_once(launch: Launch, fake: Fake) -> None:
    launch(plans.plan(sweep="one"))
    assert launch(plans.plan(sweep="two", seeds=(0, 1, 2))).ran == 2
    assert len(fake.trained) == 6


def test_only_runs_a_part_and_keeps_the_plan(launch: Launch, store: Store) -> None:
    plan = plans.plan()
    part = frozenset(m.trial.id for m in plan.members[:1])
    summary = launch(plan, only=part)
    assert (summary.ran, summary.counts, summary.exit_code) == (1, {"complete": 1}, Exit.OK)
    assert driver.status(store.root, "tiny")[0].counts == {"complete": 1, "planned": 3}
    assert launch(plan).ran == 3


def test_one_failure_is_told_at_once_and_the_rest_goes_on(launch: Launch, fake: Fake, lines: list[str]) -> None:
    fake.before_step = fail_seed(0)
    plan = plans.plan()
    summary = launch(plan)
    assert (summary.counts, summary.exit_code) == ({"failed": 2, "complete": 2}, Exit.FAILED)
    assert [(f.trial, f.seed, f.kind, f.error) for f in summary.failures] == [
        (plan.members[i].trial.id, 0, "error", "ValueError: not this one") for i in (0, 2)
    ]
    told = [line for line in lines if line.startswith("failed (error): lr-0.001 softmax, seed 0: ValueError")]
    assert len(told) == 1
    assert str(summary.failures[0].log) in told[0]
    assert "ValueError" in summary.failures[0].log.read_text()
    # By default a launch tries failed ones again; without, it still does not call them done.
    left = launch(plan, failed=False)
    assert (left.ran, left.exit_code, len(left.failures)) == (0, Exit.FAILED, 2)
    fake.before_step = lambda *_: None
    mended = launch(plan)
    assert (mended.ran, mended.exit_code) == (2, Exit.OK)
    assert (mended.failures, fake.started_at[-1]) == ([], 2)  # from its checkpoint


def test_trained_but_not_evaluated_is_failed_and_tried_again(
    launch: Launch, store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, float]:
        raise ValueError("a vocabulary larger than the model's")

    plan = plans.plan(seeds=(0,))
    with monkeypatch.context() as patch:
        patch.setattr(fake, "evaluate", refuse)
        summary = launch(plan)
        assert (summary.ran, summary.counts, summary.exit_code) == (2, {"failed": 2}, Exit.FAILED)
        assert len(summary.failures) == 2
        again = launch(plan)
        assert (again.ran, again.evaluated, again.counts, again.exit_code) == (0, 0, {"failed": 2}, Exit.FAILED)
        kept = launch(plan, failed=False)
        assert (kept.counts, kept.exit_code, len(kept.failures)) == ({"failed": 2}, Exit.FAILED, 2)
    for rebuilt in (False, True):
        if rebuilt:
            driver.doctor(store.root, rebuild=True)
        driver.sync(store.root)
        seen = driver.status(store.root, "tiny")[0]
        assert seen.counts == {"failed": 2}
        assert {(t.failure, t.error) for t in seen.trials} == {
            ("error", "ValueError: a vocabulary larger than the model's")
        }
    mended = launch(plan)
    assert (mended.ran, mended.evaluated, mended.counts, mended.exit_code) == (0, 2, {"complete": 2}, Exit.OK)
    assert len(fake.trained) == 2
    assert driver.status(store.root, "tiny")[0].trials[0].error is None


@pytest.mark.parametrize(
    ("retry", "problem", "times", "code", "attempts"),
    [
        ({"infra": 2}, ConnectionError, 2, Exit.OK, 3),
        ({"infra": 1}, ConnectionError, 2, Exit.FAILED, 2),
        ({"infra": 2, "error": 0}, ValueError, 1, Exit.FAILED, 1),
        ({"error": 1}, ValueError, 1, Exit.OK, 2),
        ({"oom": 1}, MemoryError, 1, Exit.OK, 2),
    ],
)
def test_retries_are_counted_by_kind(
    launch: Launch, fake: Fake, store: Store, retry: dict[str, int], problem: type, times: int, code: int, attempts: int
) -> None:
    fake.before_step = fail_seed(0, times, problem)
    plan = plans.plan(seeds=(0,), lrs=(1e-3,), retry=retry)
    assert launch(plan).exit_code == code
    one = plan.members[0].trial.id
    assert store.last_attempt(one) == attempts
    assert all((store.trial_folder(one) / "attempts" / str(n + 1) / "log.txt").exists() for n in range(attempts))


def test_collision_stops_the_launch_and_overwrites_nothing(launch: Launch, store: Store, fake: Fake) -> None:
    plan = plans.plan()
    one = plan.members[1].trial
    other = one.settings() | {"train": one.train | {"lr": 7.0}}
    path = store.trial_folder(one.id) / "settings.json"
    write_json(path, other)
    with pytest.raises(UserError, match=rf"share the trial id {one.id}: train\.lr"):
        launch(plan)
    assert json.loads(path.read_text()) == other
    assert one.id not in fake.trained
    assert Ledger.open(store).drivers() == []


def test_a_store_that_fails_meanwhile_ends_the_launch_in_words(launch: Launch, store: Store, fake: Fake) -> None:
    plan = plans.plan()

    def lose_ledger(*_: Any) -> None:
        with sqlite3.connect(store.root / "ledger.db") as db:
            db.execute("drop table if exists attempt")

    fake.before_step = lose_ledger
    with pytest.raises(UserError, match="could not go on: no such table: attempt") as caught:
        launch(plan)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_a_folder_that_cannot_be_written_ends_the_launch_in_words(launch: Launch, store: Store) -> None:
    plan = plans.plan()
    store.trial_folder(plan.members[0].trial.id).parent.mkdir(exist_ok=True)
    store.trial_folder(plan.members[0].trial.id).write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"could not go on: .*File exists") as caught:
        launch(plan)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_a_result_on_disk_is_taken_in(launch: Launch, store: Store, fake: Fake) -> None:
    """The driver died between the worker's commit and its own row; or the ledger is new."""
    launch(plans.plan())
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    summary = launch(plans.plan())
    assert (summary.ran, summary.counts) == (0, {"complete": 4})
    assert len(fake.trained) == 4


def test_torn_and_missing_results_run_again(launch: Launch, store: Store, fake: Fake) -> None:
    plan = plans.plan()
    launch(plan)
    torn, gone, no_eval, _ = (store.trial_folder(m.trial.id) for m in plan.members)
    (torn / "result.json").write_text("{")
    shutil.rmtree(gone)
    shutil.rmtree(no_eval / "evals")
    summary = launch(plan)
    assert (summary.ran, summary.evaluated, summary.exit_code) == (2, 1, Exit.OK)
    findings = driver.doctor(store.root)
    assert [f.level for f in findings if f.level == "problem"] == []


def test_doctor_finds_what_was_torn(launch: Launch, store: Store) -> None:
    plan = plans.plan()
    launch(plan)
    assert any("files and ledger agree" in f.what for f in driver.doctor(store.root))
    (store.trial_folder(plan.members[0].trial.id) / "result.json").write_text("{")
    assert any("1 results cannot be read" in f.what for f in driver.doctor(store.root))
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    assert any(f.level == "problem" and "not in the ledger" in f.what for f in driver.doctor(store.root))
    found = driver.doctor(store.root, rebuild=True)
    assert any("made again from the folders: 1 sweeps, 1 revisions, 4 trials" in f.what for f in found)
    assert driver.status(store.root, "tiny")[0].counts == {"planned": 1, "complete": 3}


def test_two_drivers_at_once_share_the_work(store: Store, fake: Fake) -> None:
    fake.step_s = 0.01
    plan = plans.plan(seeds=range(6))
    start = threading.Barrier(2)

    def one(_: int) -> driver.Summary:
        start.wait()
        return driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)

    with ThreadPoolExecutor(2) as pool:
        summaries = list(pool.map(one, range(2)))
    assert len(set(fake.trained)) == len(fake.trained) == 12
    assert [s.counts for s in summaries] == [{"complete": 12}] * 2  # each waited for the other's
    assert [s.exit_code for s in summaries] == [Exit.OK] * 2
    assert sum(s.ran for s in summaries) == 12
    assert min(s.ran for s in summaries) >= 1
    assert store.revisions("tiny") == [1]


def test_status_reads_a_running_sweep(store: Store, fake: Fake) -> None:
    seen: list[driver.SweepStatus] = []

    def look(one: Trial, step: int) -> None:
        if one.seed == 1 and step == 4 and not seen:
            time.sleep(0.6)
            seen.extend(driver.status(store.root))

    fake.before_step = look
    driver.launch(plans.plan(), store=store.root, executor="inline", say=lambda _: None)
    sweep = seen[0]
    assert sweep.counts == {"complete": 1, "running": 1, "planned": 2}
    assert sweep.drivers == [f"process {os.getpid()} on {os.uname().nodename}"]
    running = next(t for t in sweep.trials if t.status == "running")
    assert (running.attempt, running.seed, running.steps) == (1, 1, 6)
    done = next(t for t in sweep.trials if t.status == "complete")
    assert "test/accuracy" in done.metrics


def test_a_second_driver_leaves_what_the_first_has_just_done(store: Store, fake: Fake) -> None:
    """Both have all trials in their queue; the second comes to them when the first has ended."""
    plan = plans.plan()
    once: list[driver.Summary] = []

    def first(_: Trial, step: int) -> None:
        if not once:
            once.append(None)  # type: ignore[arg-type]
            others = frozenset(m.trial.id for m in plan.members[1:])
            once[0] = driver.launch(plan, store=store.root, executor="inline", only=others, say=lambda _: None)

    fake.before_step = first
    second = driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    assert (once[0].ran, second.ran, second.counts, second.exit_code) == (3, 1, {"complete": 4}, Exit.OK)
    ledger = Ledger.open(store)
    assert [[row["number"] for row in ledger.attempts(m.trial.id)] for m in plan.members] == [[1]] * 4


def test_status_says_where_a_trial_diverged(launch: Launch, store: Store, fake: Fake) -> None:
    fake.diverge = frozenset({1})
    plan = plans.plan(seeds=(1,), lrs=(1e-3,))
    launch(plan)
    path = store.trial_folder(plan.members[0].trial.id) / "result.json"
    assert driver.status(store.root, "tiny")[0].trials[0].error == "not finite at step 6"
    found = {"step": 6, "what": "gradient", "where": "blocks.0.mixer.q"}
    write_json(path, seal(json.loads(path.read_text()) | {"diverged": found}))
    trial_status = driver.status(store.root, "tiny")[0].trials[0]
    assert (trial_status.status, trial_status.failure, trial_status.step) == ("diverged", None, 6)
    assert trial_status.error == "not finite at step 6: gradient of blocks.0.mixer.q"


def test_status_of_claimed_and_of_interrupted_trials(store: Store, fake: Fake) -> None:
    plan = plans.plan(seeds=(0,))
    revision, _ = store.freeze(plan)
    ledger, me = Ledger.open(store), Owner.me()
    ledger.register(me)
    ledger.record_plan(plan, revision)
    one, other = (m.trial for m in plan.members)
    ledger.claim(one.id, me)
    ledger.claim(other.id, me)
    assert driver.status(store.root, "tiny")[0].counts == {"planned": 2}  # no worker has begun
    seen: list[driver.SweepStatus] = []

    def stop(_: Trial, step: int) -> None:
        if step == 5:
            seen.extend(driver.status(store.root))
            raise KeyboardInterrupt

    fake.before_step = stop
    ledger.finish(trial.run_job(trial.Job(one, 1, plan.members[0].slices, str(store.trial_folder(one.id)), "cpu", 1)))
    assert seen[0].counts == {"running": 1, "planned": 1}
    status = driver.status(store.root, "tiny")[0]
    assert status.counts == {"interrupted": 1, "planned": 1}
    assert (status.trials[0].step, status.trials[0].steps) == (4, 6)
    assert status.trials[1].step is None


def test_a_ledger_that_may_not_be_written_is_not_called_damaged(
    launch: Launch, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(plans.plan())

    def refuse(*_: Any) -> None:
        raise OperationalError("begin", {}, sqlite3.OperationalError("attempt to write a readonly database"))

    monkeypatch.setattr(Ledger, "_make", refuse)
    monkeypatch.setattr(database, "_writable", lambda _: False)  # permissions do not bind root
    with pytest.raises(UserError, match="cannot be written") as caught:
        launch(plans.plan())
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert "damaged" not in str(caught.value)


def test_a_report_that_cannot_be_written_is_told_in_words(tmp_path: Path) -> None:
    plan = fake_store.make_plan(seeds=2)
    store = fake_store.fill(tmp_path / "runs", plan)
    (store.revision_folder(plan.sweep, 1) / "report").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot write the report in .*report: .*--out FOLDER") as caught:
        reports.write(store.root, plan.sweep, None, None)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_status_of_an_unknown_sweep_names_the_others(launch: Launch, store: Store) -> None:
    launch(plans.plan())
    with pytest.raises(UserError, match=r"no sweep 'tine'.*tiny"):
        driver.status(store.root, "tine")


def test_status_without_a_ledger_reads_the_folders(launch: Launch, store: Store) -> None:
    launch(plans.plan())
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    assert driver.status(store.root)[0].counts == {"complete": 4}
    assert not (store.root / "ledger.db").exists()


def test_a_driver_that_cannot_renew_stops_its_trials(
    store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(launching, "RENEW_S", 0.02)
    monkeypatch.setattr(launching, "LEASE_S", 0.1)

    def broken(*_: object) -> None:
        if fake.trained:
            raise OSError("disk gone")

    monkeypatch.setattr(Ledger, "renew", broken)
    fake.step_s = 0.2
    summary = driver.launch(plans.plan(), store=store.root, executor="inline", say=lines.append)
    assert summary.exit_code == Exit.ENVIRONMENT
    assert sum("could not be reached" in line for line in lines) == 1
    assert len(fake.trained) == 1


@pytest.mark.parametrize(
    ("asked", "cards", "jobs", "found"),
    [
        ({}, 0, None, (4, 1, 0, 0.0)),
        ({"cpu": 2}, 0, None, (2, 2, 0, 0.0)),
        ({}, 0, 3, (3, 1, 0, 0.0)),
        ({"alone": True}, 0, 3, (1, 1, 0, 0.0)),
        ({}, 2, None, (2, 1, 2, 1.0)),
        ({}, 2, 6, (6, 1, 2, 1 / 3)),
        ({"gpu": 0.25}, 1, None, (4, 1, 1, 0.25)),
        ({"gpu": 0}, 1, None, (4, 1, 0, 0.0)),
        ({"gpu": "auto"}, 1, None, (4, 1, 1, 1.0)),
        ({"gpu": "auto", "cpu": 2}, 2, 9, (2, 2, 2, 1.0)),
        ({"gpu": "auto", "alone": True}, 2, None, (1, 1, 2, 1.0)),
    ],
)
def test_shares(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], cards: int, jobs: int | None, found: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(resources, "gpu_count", lambda: cards)
    monkeypatch.setattr(resources, "cores", lambda: 4)
    given = resources.share(asked, "ray", jobs)
    assert (given.slots, given.threads, given.gpus, given.gpu) == pytest.approx(found)
    assert given.device == ("cuda" if given.gpu else "cpu")


def test_what_the_machine_lacks_is_refused_at_once(store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "gpu_count", lambda: 0)
    for asked, said in (({"gpu": 1}, "no usable GPU"), ({"cpu": 10_000}, "this machine has")):
        with pytest.raises(UserError, match=said) as caught:
            driver.launch(plans.plan(resources=asked), store=store.root, executor="inline", say=lambda _: None)
        assert caught.value.exit_code == Exit.ENVIRONMENT
    with pytest.raises(UserError, match="ray or inline"):
        driver.launch(plans.plan(), store=store.root, executor="slurm", say=lambda _: None)
    assert not store.revisions("tiny")


SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import plans
from engines import Fake
from runners import driver, trial
from pathlib import Path
trial.load_engine = Fake(step_s=0.05).engine
say = lambda line: print(line, flush=True)
summary = driver.launch(plans.plan(steps=40), store=Path({store!r}), executor="inline", say=say)
sys.exit(summary.exit_code)
"""


def start(store: Store) -> subprocess.Popen[str]:
    """A driver in a process of its own, in the middle of its second trial."""
    code = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), store=str(store.root))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/")
    second = store.trial_folder(plans.plan(steps=40).members[1].trial.id) / "checkpoints" / "4"
    end = time.monotonic() + 60
    while not second.exists():
        assert process.poll() is None, "the driver ended too early"
        assert time.monotonic() < end, "the driver did not get going"
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.wide), signal.SIGTERM])
def test_a_signal_stops_at_a_checkpoint(store: Store, fake: Fake, number: signal.Signals) -> None:
    process = start(store)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED, said
    assert f"{number.name}: stopping at a checkpoint" in said
    sweep = driver.status(store.root, "tiny")[0]
    assert (sweep.counts, sweep.drivers) == ({"complete": 1, "interrupted": 1, "planned": 2}, [])
    _resume_and_check(store, fake)


def test_a_kill_is_taken_over_at_once(store: Store, fake: Fake) -> None:
    process = start(store)
    process.kill()
    process.wait()
    before = time.monotonic()
    summary = _resume_and_check(store, fake)
    assert summary.skipped == 1
    assert time.monotonic() - before < 30  # not the 60 s of the lease


def _resume_and_check(store: Store, fake: Fake) -> driver.Summary:
    lines: list[str] = []
    plan = plans.plan(steps=40)
    summary = driver.launch(plan, store=store.root, executor="inline", say=lines.append)
    assert (summary.ran, summary.counts, summary.exit_code) == (3, {"complete": 4}, Exit.OK)
    assert fake.trained[0] == plan.members[1].trial.id
    assert fake.started_at[0] >= 4
    assert fake.started_at[1:] == [0, 0]
    from test_record import runs

    found = runs(store)
    assert sorted(run.data.tags["memsweep.trial_id"] for run in found) == sorted(m.trial.id for m in plan.members)
    assert {run.info.status for run in found} == {"FINISHED"}
    return summary
