"""Budgets: lengths of time, what attempts add up to, and launches that stop for a limit and go on."""

from __future__ import annotations

import functools
import json
import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import plans
import pytest
import sqlalchemy as sa
from engines import Fake
from spec_tools import BASE, plan, problems

from runners import alone, budget, driver, durations, launching, resources, trial
from runners.budget import Allowance, Budget, Span, add_up
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Exit, Outcome, Plan, Status, Trial, UserError
from runners.store import Store


def launch(store: Store, found: Plan, **arguments: Any) -> driver.Summary:
    return driver.launch(found, store=store.root, executor="inline", **({"say": lambda _: None} | arguments))


# --- lengths of time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [("90", 90), ("9m", 540), ("1.5h", 5400), ("2d", 172_800), ("1h30m", 5400), (" 45 S ", 45), (7, 7), (0.5, 0.5)],
)
def test_lengths_of_time(text: str | float, found: float) -> None:
    assert durations.seconds(text) == found


@pytest.mark.parametrize("text", ["", "m", "9 min", "-3m", "0", "0s", "inf", "nan", "1h-2m", True, float("nan"), -1])
def test_what_is_no_length_of_time(text: Any) -> None:
    with pytest.raises(ValueError, match="no length of time above 0"):
        durations.seconds(text)


@pytest.mark.parametrize(
    ("length_s", "found"),
    [
        (0.42, "0.42 s"),
        (45, "45 s"),
        (99.4, "99 s"),
        (540, "9 min"),
        (5400, "1.5 h"),
        (36_000, "10 h"),
        (9e5, "10 days"),
    ],
)
def test_lengths_of_time_in_words(length_s: float, found: str) -> None:
    assert durations.words(length_s) == found


def test_a_spec_takes_the_same_lengths(tmp_path: Path) -> None:
    text = BASE + "mechanism: hola\nbudget: {gpu_hours: 3, wall: 1h30m, max_trials: 7}\n"
    found = plan(text, tmp_path)
    assert found.budget == {"gpu_hours": 3.0, "wall": 5400.0, "max_trials": 7}
    assert Plan.from_lines(found.to_lines()).budget == found.budget
    assert plan(text.replace("1h30m", "90"), tmp_path).budget["wall"] == 90


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("budget: {wall: 3 weeks}", "budget.wall: '3 weeks' is no length of time"),
        ("budget: {wall: 0}", "budget.wall: 0"),
        ("budget: {max_trials: 0}", "budget.max_trials: 0 is less than 1"),
        ("budget: {hours: 3}", "budget has no key 'hours'"),
        (
            "resources: {gpu: 1.5}",
            "resources.gpu: 1.5 is neither a share of one GPU (up to 1) nor a whole number: 1 or 2",
        ),
        ("resources: {gpu: -1}", "resources.gpu: -1 is less than 0"),
        ("resources: {cpu: 0}", "resources.cpu: 0 is less than 1"),
        ("resources: {gpu: most}", "did you mean"),
    ],
)
def test_what_is_wrong_is_told_at_its_place(section: str, said: str, tmp_path: Path) -> None:
    found = problems(BASE + f"mechanism: hola\n{section}\n", tmp_path)
    assert len(found) == 1
    assert found[0][0] == 6
    assert said.replace("did you mean", "") in found[0][2]


# --- what attempts add up to ------------------------------------------------------------------------------------


def test_time_is_added_by_share_and_wall_time_is_counted_once() -> None:
    spans = [
        Span("a", 0, 3600, 0.5),
        Span("b", 1800, 3600, 1.0),
        Span("a", 7200, 9000, 0.5),
        Span("c", 8000, None, 1.0),
    ]
    spent = add_up(spans, now=10_000)
    assert spent.gpu_hours == pytest.approx((1800 + 1800 + 900 + 2000) / 3600)
    assert spent.wall_s == 3600 + 2800
    assert spent.trials == 3
    assert add_up([], 5) == budget.Spent()


def test_a_watch_looks_at_the_ledger_now_and_then() -> None:
    clock, looked = [100.0], []

    def spans() -> list[Span]:
        looked.append(clock[0])
        return [Span("a", 0, 3000, 1.0)]

    def own() -> list[Span]:
        return [Span("b", 4000, None, 1.0)]

    watch = Allowance(Budget(gpu_hours=1, for_s=50), spans, own, clock=lambda: clock[0], now=lambda: 4000 + clock[0])
    assert watch.reason() is None
    clock[0] += 1
    assert watch.reason() is None
    assert looked == [100.0]
    clock[0] = 149.9
    assert watch.reason() is None
    clock[0] = 150.0
    assert watch.reason() == "--for 50 s is over"
    clock[0] = 700.0
    watch = Allowance(Budget(gpu_hours=1), spans, own, clock=lambda: clock[0], now=lambda: 4000 + clock[0])
    assert "1.03 of 1 GPU-hours are spent" in (watch.reason() or "")


def test_the_ledger_counts_from_the_workers_first_word_and_a_dead_driver_spends_nothing(store: Store) -> None:
    found = plans.plan(seeds=(0, 1))
    ledger, me = Ledger.open(store), Owner.me()
    ledger.record_plan(found, 1)
    ledger.register(me)
    one, other, third, _ = (m.trial.id for m in found.members)
    assert ledger.claim(one, me, gpu=0.25) == 1
    ledger.finish(Outcome(one, 1, Status.INTERRUPTED, seconds=100.0))
    ledger.claim(one, me, gpu=0.25)
    ledger.claim(other, me, gpu=0.25)
    (closed,) = ledger.spans("tiny", without=me.uuid)
    assert closed.ended - closed.started == pytest.approx(100.0)
    assert (closed.gpu, closed.trial) == (0.25, one)
    assert len(ledger.spans("tiny")) == 3
    assert ledger.begun("tiny") == 2
    assert ledger.begun("another") == 0
    day = 86_400
    with ledger._write() as db:  # the driver died a day ago
        db.execute(sa.text(f"update trial set expires = expires - {day}"))
        db.execute(sa.text(f"update attempt set started = started - {day} where number = 2 or trial = '{other}'"))
    ledger.leave(me)
    assert all(span.ended - span.started < 120 for span in ledger.spans("tiny"))
    assert ledger.claim(third, Owner.me()) == 1


def test_a_ledger_of_an_earlier_version_gets_its_new_column(store: Store) -> None:
    Ledger.open(store).close()
    with sqlite3.connect(store.root / "ledger.db") as db:
        db.execute("alter table attempt drop column gpu")
    found = plans.plan()
    ledger = Ledger.open(store)
    ledger.record_plan(found, 1)
    ledger.claim(found.members[0].trial.id, Owner.me(), gpu=0.5)
    assert [span.gpu for span in ledger.spans("tiny")] == [0.5]


# --- launches ---------------------------------------------------------------------------------------------------


def test_for_stops_at_a_checkpoint_and_a_launch_goes_on(
    store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch's clock is the number of steps made."""
    clock = [0.0]
    monkeypatch.setattr(launching, "Allowance", functools.partial(Allowance, clock=lambda: clock[0]))
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    fake.before_step = lambda *_: clock.__setitem__(0, clock[0] + 1)
    lines: list[str] = []
    found = plans.plan(steps=60)
    first = launch(store, found, for_s=90, say=lines.append)
    assert (first.exit_code, first.stopped) == (Exit.STOPPED, "--for 90 s is over")
    assert "--for 90 s is over: stopping at a checkpoint" in lines
    assert first.counts == {"complete": 1, "interrupted": 1, "planned": 2}
    second = launch(store, found)
    assert (second.exit_code, second.stopped, second.counts) == (Exit.OK, None, {"complete": 4})
    assert fake.started_at == [0, 0, 30, 0, 0]


def spent(store: Store) -> budget.Spent:
    return add_up(Ledger.open(store).spans("tiny"), time.time())


def test_gpu_hours_count_all_launches(store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "gpu_count", lambda: 1)
    monkeypatch.setattr(resources.Share, "device", "cpu")  # the card is made up
    monkeypatch.setattr(budget, "LOOK_EVERY_S", 0.0)
    fake.step_s, fake.commit_every = 0.05, 1000  # 10 s a trial, of which 3 s are allowed
    first = launch(store, plans.plan(steps=200, budget={"gpu_hours": 3 / 3600}))
    assert (first.exit_code, first.ran, first.counts) == (Exit.STOPPED, 0, {"interrupted": 1, "planned": 3})
    assert "of 0.000833333 GPU-hours are spent; `sweep launch` with --set" in (first.stopped or "")
    before = spent(store)
    assert before.gpu_hours > 0
    fake.step_s = 0.0
    again = launch(store, plans.plan(steps=200, budget={"gpu_hours": before.gpu_hours}))
    assert (again.exit_code, again.ran, fake.started_at[1:]) == (Exit.STOPPED, 0, [])
    more = launch(store, plans.plan(steps=200, budget={"gpu_hours": 1.0}))
    assert (more.exit_code, more.counts, more.stopped) == (Exit.OK, {"complete": 4}, None)
    assert fake.started_at[1] > 0


def test_wall_is_of_all_launches(store: Store, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LOOK_EVERY_S", 0.0)
    fake.step_s, fake.commit_every = 0.05, 1000
    first = launch(store, plans.plan(steps=200, budget={"wall": 1.0}))
    assert (first.exit_code, first.ran) == (Exit.STOPPED, 0)
    assert "budget.wall of 1 s is over, all launches together" in (first.stopped or "")
    told = re.search(r"--set budget\.wall=(\w+) allows more", first.stopped or "")
    assert told is not None
    assert durations.seconds(told[1]) >= 2 * max(1.0, spent(store).wall_s)
    again = launch(store, plans.plan(steps=200, budget={"wall": spent(store).wall_s}))
    assert (again.exit_code, len(fake.trained)) == (Exit.STOPPED, 1)


@pytest.mark.parametrize("used", [1.0, 13.0, 123.4, 99_999.0])
def test_what_a_stopped_launch_advises_is_more_than_is_spent(used: float) -> None:
    def advised(said: str | None) -> float:
        found = re.search(r"=([0-9.e+]+)s? allows more", said or "")
        assert found is not None
        return float(found[1])

    spent_by_all = budget.Spent(gpu_hours=used / 7, wall_s=used, trials=int(used))
    assert advised(budget.Budget(wall_s=0.5).reached(spent_by_all, 0.0)) > used
    assert advised(budget.Budget(gpu_hours=0.01).reached(spent_by_all, 0.0)) > used / 7
    assert advised(budget.Budget(max_trials=1).too_many(int(used))) > used


def test_gpu_hours_on_a_cpu_count_nothing_and_say_so(store: Store, fake: Fake) -> None:
    lines: list[str] = []
    summary = launch(store, plans.plan(budget={"gpu_hours": 1e-9}), say=lines.append)
    assert summary.exit_code == Exit.OK
    assert any("counts as 0 GPU-hours" in line for line in lines)
    assert spent(store).gpu_hours == 0


def test_max_trials_are_begun_and_what_was_begun_goes_on(store: Store, fake: Fake) -> None:
    once = [True]

    def stop(one: Trial, step: int) -> None:
        if once and step == 3:
            once.clear()
            raise ValueError("mend me")

    fake.before_step = stop
    found = plans.plan(budget={"max_trials": 3})
    first = launch(store, found)
    assert first.exit_code == Exit.STOPPED
    assert (first.counts, first.ran) == ({"failed": 1, "complete": 2, "planned": 1}, 2)
    assert "1 trials are not begun: 3 of at most 3 trials are begun" in (first.stopped or "")
    second = launch(store, found)
    assert (second.counts, second.ran, second.exit_code) == ({"complete": 3, "planned": 1}, 1, Exit.STOPPED)
    more = launch(store, plans.plan(budget={"max_trials": 4}))
    assert (more.exit_code, more.stopped) == (Exit.OK, None)


def test_outcomes_keep_their_time_for_a_ledger_made_anew(store: Store, fake: Fake) -> None:
    fake.step_s = 0.02
    found = plans.plan(seeds=(0,))
    launch(store, found)
    path = store.trial_folder(found.members[0].trial.id) / "attempts" / "1" / "outcome.json"
    assert json.loads(path.read_text())["seconds"] > 6 * 0.02
    before = spent(store)
    driver.doctor(store.root, rebuild=True)
    after = spent(store)
    assert (after.trials, after.wall_s) == (2, pytest.approx(before.wall_s, abs=0.3))


# --- what the machine can give ----------------------------------------------------------------------------------


def test_a_cluster_is_asked_instead_of_the_machine() -> None:
    cluster = resources.Machine(64, 0, "the cluster at 10.0.0.1:6379", is_here=False)
    with pytest.raises(UserError, match="no usable GPU on the cluster at") as caught:
        resources.share({"gpu": 0.5}, "ray", None, cluster)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    with pytest.raises(UserError, match=r"cpu is 65, but the cluster at .* has no node with more than 64 CPUs"):
        resources.share({"cpu": 65}, "ray", None, cluster)
    given = resources.share({"gpu": "auto"}, "ray", None, resources.Machine(64, 4, "there", is_here=False))
    assert (given.slots, given.gpu, given.packed) == (4, 1.0, False)


def test_jobs_are_kept_for_resume(store: Store, fake: Fake) -> None:
    found = plans.plan()
    launch(store, found, jobs=2)
    folder = store.revision_folder("tiny", 1)
    assert resources.remembered_jobs(folder) == 2
    assert resources.remembered_jobs(folder / "nowhere") is None
    launch(store, found)
    assert resources.remembered_jobs(folder) is None


def test_a_timing_launch_waits_for_others_and_others_for_it(
    store: Store, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "lock_file", lambda: tmp_path / "lock")
    order: list[str] = []
    lines: list[str] = []
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        quiet = {"should_stop": lambda: False, "tick": lambda: None}
        with alone.machine(False, say=lambda _: None, **quiet), alone.machine(False, say=lambda _: None, **quiet):
            is_held.set()  # two ordinary launches share the machine
            may_go.wait(60)
            order.append("released")

    fake.before_step = lambda *_: order.append("step")

    def say(line: str) -> None:
        lines.append(line)
        if "waiting for other launches" in line:
            may_go.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    summary = launch(store, plans.plan(seeds=(0,), resources={"alone": True}), say=say)
    holder.join()
    assert summary.exit_code == Exit.OK
    assert order[0] == "released"
    assert sum("waiting for other launches on this machine to end (resources.alone)" in line for line in lines) == 1
    with alone.machine(True, say=lines.append, should_stop=lambda: False, tick=lambda: None):
        fake.trained.clear()
        stopped = launch(store, plans.plan(seeds=(5,)), for_s=0.5, say=lines.append)
    assert (stopped.exit_code, fake.trained) == (Exit.STOPPED, [])
    assert any("waiting for a launch that times its trials alone" in line for line in lines)
