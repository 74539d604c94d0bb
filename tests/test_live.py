"""A sweep followed while it runs: what a look finds when ledger and folders change between two looks."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_store
import plans
import postgres
import pytest
from moving import CARD, STEPS, Moving
from rich.console import Console

from dashboards import about, live, live_terminal
from dashboards import live_words as words
from dashboards.live import Follower
from dashboards.live_pace import Speed, tokens_a_step
from dashboards.live_scores import measure_of
from dashboards.live_snapshot import Snapshot, leaders
from runners import overview
from runners.recent import reading, tallies
from runners.schema import Failure, Member, Plan, Search, Searched, Space, Status, UserError
from runners.search import Searches
from runners.store import Store, seal, write_json

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    made = Moving(tmp_path / "runs", fake_store.make_plan(2))
    yield made
    made.ledger.close()


def follow(moving: Moving) -> Follower:
    return Follower(moving.store, moving.plan.sweep)


def by_status(follower: Follower) -> dict[str, int]:
    return {str(status): n for status, n in follower.look().counts.items()}


def test_counts_follow_the_ledger(moving: Moving) -> None:
    follower, (a, b, c, d, *_) = follow(moving), moving.plan.members
    assert by_status(follower) == {"planned": 16}
    moving.start(a)
    moving.finish(b)
    moving.diverge(c)
    moving.fail(d, "ValueError: no")
    assert by_status(follower) == {"complete": 1, "diverged": 1, "running": 1, "failed": 1, "planned": 12}
    moving.finish(a)
    assert by_status(follower) == {"complete": 2, "diverged": 1, "failed": 1, "planned": 12}


def test_it_agrees_with_the_status_that_opens_every_folder(moving: Moving) -> None:
    for member, happens in zip(moving.plan.members, (moving.finish, moving.diverge, moving.start, moving.finish)):  # noqa: B905
        happens(member)
    moving.fail(moving.plan.members[4], "OSError: gone", Failure.INFRA)
    last = moving.plan.members[3]
    for piece in last.slices:  # its evaluation was taken away: it is to be evaluated again
        (moving.store.trial_folder(last.trial.id) / "evals" / f"{piece.id}.json").unlink()
    careful = overview.status(moving.store.root, moving.plan.sweep)[0].counts
    assert by_status(follow(moving)) == careful
    assert careful == {"complete": 1, "diverged": 1, "running": 1, "failed": 1, "planned": 12}


def test_a_claimed_trial_without_a_word_of_its_worker_waits(moving: Moving) -> None:
    member = moving.plan.members[0]
    moving.start(member)
    (moving.attempt(member) / "log.txt").unlink()
    assert by_status(follow(moving)) == {"planned": 16}


def test_a_result_counts_though_its_driver_died(moving: Moving) -> None:
    member = moving.plan.members[0]
    moving.start(member)
    fake_store.finish(moving.store, member)
    moving.ledger.leave(moving.owner)
    assert by_status(follow(moving)) == {"complete": 1, "planned": 15}


def test_a_folder_that_comes_late_is_looked_at_again(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    member, follower = moving.plan.members[0], follow(moving)
    moving.finish(member)
    evals = moving.store.trial_folder(member.trial.id) / "evals"
    evals.rename(evals.with_name("late"))
    assert by_status(follower) == {"planned": 16}
    evals.with_name("late").rename(evals)
    assert by_status(follower) == {"planned": 16}, "not at every look"
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 11)
    assert by_status(follower) == {"complete": 1, "planned": 15}


def test_scores_are_those_of_the_report(moving: Moving) -> None:
    first = [member for member in moving.plan.members if member.cell == moving.plan.members[0].cell]
    for member in first:
        moving.finish(member)
    moving.diverge(moving.plan.members[4])
    found = follow(moving).look()
    cells = {cell.cell: cell for cell in found.cells}
    expected = {m.trial.seed: fake_store.accuracy(m, m.trial.task["n_pairs"]) for m in first}
    assert cells[first[0].cell].scores == pytest.approx(expected)
    diverged = cells[moving.plan.members[4].cell]
    assert (list(diverged.scores.values()), diverged.diverged) == ([2 / 512], 1)  # chance, as in the report
    assert leaders(found)[cells[first[0].cell].condition][0].cell == first[0].cell
    assert found.measure.name == "test/accuracy"


@pytest.mark.parametrize(
    "plan",
    [
        fake_store.make_plan(1),
        fake_store.make_plan(1, tests=False, grid=(4, 8)),
        replace(fake_store.make_plan(1, tests=False), members=(), metrics={"loss": "min"}),
        plans.plan(),
    ],
)
def test_the_measure_is_the_main_metric_of_the_report(plan: Plan) -> None:
    found = measure_of(plan)
    assert (found.set, found.metric) == about.main_metric(plan)


def test_results_are_read_a_little_at_a_time(moving: Moving) -> None:
    for member in moving.plan.members[:6]:
        moving.finish(member)
    follower = follow(moving)
    first = follower.look(read_s=0.0)
    assert first.unread == 6
    assert first.counts[Status.COMPLETE] == 6, "the ledger knows the counts before a result is read"
    assert "6 results still to be read" in words.line(first)
    second = follower.look()
    assert (second.unread, sum(len(cell.scores) for cell in second.cells)) == (0, 6)


def test_a_new_revision_is_taken_up(moving: Moving) -> None:
    follower = follow(moving)
    assert follower.look().total == 16
    more = fake_store.make_plan(3)
    revision, _ = moving.store.freeze(more)
    moving.ledger.record_plan(more, revision)
    found = follower.look()
    assert (found.revision, found.total) == (2, 24)


def test_speed_is_by_the_workers_clock() -> None:
    speed = Speed(1)
    speed.add(1000.0, 10)
    assert speed.steps_s is None
    speed.add(1002.0, 30)
    speed.add(1002.0, 30)  # the same word, read twice
    assert speed.steps_s == pytest.approx(10.0)
    for second in range(3, 200):
        speed.add(1000.0 + second, 30 + second)
    assert speed.steps_s == pytest.approx(1.0)


def test_what_runs(moving: Moving) -> None:
    follower, (a, b, *_) = follow(moving), moving.plan.members
    moving.start(a, card=CARD, gpu=0.25)
    moving.start(b, gpu=0.25)
    now = time.time()
    moving.tell(a, 50, when=now - 4)
    follower.look()
    moving.tell(a, 90, when=now - 2)
    found = follower.look()
    running = {one.trial: one for one in found.running}
    one = running[a.trial.id]
    assert (one.step, one.steps, one.share) == (90, STEPS, 0.45)
    assert one.steps_s == pytest.approx(20.0, rel=0.01)
    assert one.tokens_s == pytest.approx(20.0 * (tokens_a_step(a.trial) or 0), rel=0.01)
    assert (words.progress(running[b.trial.id]), words.progress(one)) == ("starting", "90/200 steps")
    assert words.cards(found) == [
        "0.5 card claimed",
        "NVIDIA H200: 9.0 GiB by 1 trial (a card has 140), busy 25% of one",
    ]
    moving.tell(a, STEPS)
    assert words.progress(next(o for o in follower.look().running if o.trial == a.trial.id)) == "evaluating"
    moving.finish(a)
    follower.look()
    assert {key[0] for key in follower.points} <= {b.trial.id}, "what ended is let go of"


def test_what_a_trial_said_does_not_grow_without_end(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POINTS", 10)
    follower, member = follow(moving), moving.plan.members[0]
    moving.start(member)
    for step in range(40):
        moving.tell(member, step)
        follower.look()
    kept = sorted(next(iter(follower.points.values())))
    assert (kept[0], kept[-1]) == (0, 39)
    assert len(kept) <= 10


def test_the_time_left_and_where_it_comes_from(moving: Moving) -> None:
    slow, quick = moving.plan.members[0:2], moving.plan.members[2:4]
    moving.finish(slow[0], 100.0)
    moving.finish(quick[0], 10.0)
    follower = follow(moving)
    assert follower.look().pace.left_s is None, "nothing runs"
    assert words.state(follower.look()) == "a launch is at work, no trial runs this moment"
    moving.start(slow[1])
    pace = follower.look().pace
    # One at a time: 100 s of a cell that took so long, 10 s of the other one, twelve at the mean of their arm or all.
    assert pace.left_s == pytest.approx(100 + 10 + 12 * 55, rel=0.02)
    assert pace.basis == "from 2 that ended, one at a time"
    assert pace.n_ended == 2


def test_failures_of_one_cause_are_told_together(moving: Moving) -> None:
    for member, size in zip(moving.plan.members[:3], (2, 4, 8), strict=True):
        moving.fail(member, f"OutOfMemoryError: tried to allocate {size}.50 GiB", Failure.OOM)
    moving.fail(moving.plan.members[3], "ValueError: no")
    moving.diverge(moving.plan.members[4])
    causes = [words.cause(one) for one in follow(moving).look().causes]
    assert causes[0] == "3 × out of memory: OutOfMemoryError: tried to allocate 2.50 GiB"
    assert causes[1] == "error: ValueError: no"
    assert causes[2].startswith("diverged: not finite at step 60")


def test_a_sweep_that_nobody_runs_says_how_to_go_on(moving: Moving) -> None:
    follower = follow(moving)
    moving.start(moving.plan.members[0])
    moving.ledger.leave(moving.owner)
    assert words.state(follower.look()) == "nothing is running: `sweep resume capacity` goes on"


def test_a_store_without_a_ledger_is_told(tmp_path: Path) -> None:
    store = fake_store.fill(tmp_path / "runs", fake_store.make_plan(1))
    found = Follower(store, "capacity").look()
    assert not found.has_ledger
    assert "doctor --rebuild" in words.notes(found)[0]
    assert [(one.sweep, one.counts) for one in tallies(store)] == [("capacity", {})]


def test_the_list_of_sweeps(moving: Moving) -> None:
    moving.finish(moving.plan.members[0])
    moving.start(moving.plan.members[1])
    other = plans.plan()
    moving.ledger.record_plan(other, moving.store.freeze(other)[0])
    found = {one.sweep: one for one in tallies(moving.store)}
    assert found["capacity"].counts == {"complete": 1, "running": 1, "planned": 14}
    assert found["tiny"].counts == {"planned": 4}
    assert found["capacity"].question == moving.plan.question


def test_a_search_is_followed(tmp_path: Path) -> None:
    search = Search(
        "key", "lr-0.001 softmax", {"train.lr": Space("values", (0.1, 0.2))}, "grid", 2, ("valid/accuracy",), ("max",),
        {"valid/accuracy": 0.0}, (7,), is_same=False, parallel=2,
    )  # fmt: skip
    plain = plans.plan(lrs=(1e-3,), seeds=(0, 1, 2))
    slots = tuple(replace(m, searched=Searched("key", slot=m.trial.id)) for m in plain.members)
    moving = Moving(tmp_path / "runs", replace(plain, members=slots, tests=(), searches=(search,)))
    setting = {block: getattr(slots[0].trial, block) for block in ("mechanism", "task", "model", "train")}
    texts = {block: f'"{block}"' for block in setting}
    row = {"search": "key", "number": 0, "known": 0, "values": {"train.lr": 0.1}, "settings": setting, "texts": texts}
    write_json(moving.store.root / "searches/key/0.json", seal(row | {"state_bytes": 1, "problem": None}))
    made = Searches(moving.plan, moving.store).view().members[-1]
    moving.ledger.add_members("tiny", 1, [made], 3)
    follower = follow(moving)
    assert by_status(follower) == {"planned": 5}, "three slots, two trainings, one of which is not made up yet"
    moving.start(made)
    assert by_status(follower) == {"running": 1, "planned": 4}
    assert tallies(moving.store)[0].counts == {"running": 1, "planned": 4}
    assert words.searches(follower.look()) == ["search of lr-0.001 softmax: 0/2 suggestions"]
    moving.ledger.close()


def test_looking_holds_nothing(moving: Moving) -> None:
    follow(moving).look()
    with reading(moving.store) as recent:
        assert recent is not None
        recent.rows("capacity", 1)
        moving.finish(moving.plan.members[0])  # a writer does not wait for one who looks
    assert not list(moving.store.root.glob("*.journal"))


# ---- the terminal --------------------------------------------------------------------------------------------------


def shown(moving: Moving, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(live_terminal.screen([follow(moving).look()], width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def busy(moving: Moving) -> None:
    a, b, c, d, e, *_ = moving.plan.members
    moving.finish(a)
    moving.fail(b, "ValueError: [red]no[/red] \x1b[31m" + "long " * 40)
    for member in (c, d, e):
        moving.start(member)
        moving.tell(member, 60)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 16), (200, 60)])
def test_the_screen_fits(moving: Moving, width: int, height: int) -> None:
    busy(moving)
    lines = shown(moving, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "1 complete, 3 running, 1 failed" in text
    assert "[red]no" in text or width == 40, "markup in an error is text"
    assert "\x1b" not in text
    assert "30%" in text or height == 16


def test_a_terminal_without_more_than_ascii(moving: Moving) -> None:
    busy(moving)
    text = "\n".join(
        str(line) for line in live_terminal.screen([follow(moving).look()], 60, 30, is_plain=True).renderables
    )
    assert text.isascii()
    assert "crrrrrrrrrrrffff" in text


def test_a_pipe_gets_a_line_when_something_is_new(moving: Moving) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    follower, after = follow(moving), iter((lambda: None, lambda: moving.finish(moving.plan.members[0]), lambda: None))
    live_terminal.watch(lambda: [follower.look()], console, rounds=3, sleep=lambda _: next(after)())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["capacity: 0/16 done", "capacity: 1/16 done"]


def test_a_store_that_goes_away_is_waited_for(moving: Moving) -> None:
    console, looks = Console(file=io.StringIO(), width=80), iter(["ok", "gone", "gone", "ok"])
    follower = follow(moving)

    def look() -> list[Snapshot]:
        if next(looks) == "gone":
            raise OSError(116, "Stale file handle")
        return [follower.look()]

    live_terminal.watch(look, console, rounds=4, sleep=lambda _: None)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["capacity", "the store cannot be read just now"]
    with pytest.raises(UserError):
        live_terminal.watch(lambda: Store.open(moving.store.root / "no") and [], console, rounds=1)


def test_several_sweeps_are_told_in_a_line_each(moving: Moving) -> None:
    other = plans.plan()
    moving.ledger.record_plan(other, moving.store.freeze(other)[0])
    moving.finish(moving.plan.members[0])
    console = Console(file=io.StringIO(), width=80)
    console.print(live_terminal.screen(tallies(moving.store), 80, 24))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [" ".join(line.split()) for line in lines[:2]] == ["capacity 1 complete, 15 waiting", "tiny 4 waiting"]


def test_the_list_on_postgresql(tmp_path: Path, postgres_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres.database(postgres_server) as url:
        monkeypatch.setenv("MEMSWEEP_LEDGER", url)
        moving = Moving(tmp_path / "runs", fake_store.make_plan(1))
        moving.finish(moving.plan.members[0])
        moving.start(moving.plan.members[1])
        assert tallies(moving.store)[0].counts == {"complete": 1, "running": 1, "planned": 6}
        follower = follow(moving)
        assert by_status(follower) == {"complete": 1, "running": 1, "planned": 6}
        moving.finish(moving.plan.members[1])
        assert by_status(follower) == {"complete": 2, "planned": 6}
        moving.ledger.close()


def test_ctrl_c_leaves_the_terminal_as_it_was(moving: Moving) -> None:
    busy(moving)
    reader, terminal = os.openpty()
    command = [sys.executable, "-m", "sweeps", "status", "capacity", "--watch", "--store", str(moving.store.root)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment, cwd=ROOT) as process:
        seen = b""
        while b"running" not in seen:
            seen += os.read(reader, 1 << 16)
        process.send_signal(signal.SIGINT)
        code = process.wait(10)
    os.set_blocking(reader, False)
    seen += os.read(reader, 1 << 16)
    os.close(terminal)
    os.close(reader)
    assert code == 0
    assert b"Traceback" not in seen
    assert seen.rstrip().endswith(b"\x1b[?25h"), "the cursor is back"


def test_a_member_by_its_id(moving: Moving) -> None:
    follower, member = follow(moving), moving.plan.members[0]
    moving.finish(member)
    follower.look()
    found = follower.member(member.trial.id)
    assert found is not None
    assert isinstance(found[0], Member)
    assert found[1] is not None
    assert found[1].attempt == 1
    assert follower.member("../../etc/passwd") is None
    assert isinstance(follower.store, Store)
