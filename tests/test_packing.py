"""Packing trials on cards: the rule, the meter's arithmetic, and launches whose cards and meters are made up."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
import stores
import torch
from engines import Fake

from runners import cards, driver, launching, meter, packing, resources, trial
from runners.ledger import Ledger
from runners.meter import CudaMeter, Reading
from runners.packing import UNSEEN_BYTES, Packer
from runners.schema import Exit, Job, Outcome, Trial
from runners.store import Store

GIB = 2**30
CARD = "a card"


def reading(gib: float, busy: float | None, *, whole: bool = True, card_gib: float = 80) -> Reading:
    return Reading(CARD, int(card_gib * GIB), int(gib * GIB), busy, whole)


def trials(n: int, *, n_pairs: int = 4, lr: float = 1e-3) -> list[Trial]:
    return [plans.trial(seed, n_pairs=n_pairs, lr=lr) for seed in range(n)]


def placed(packer: Packer, some: list[Trial]) -> list[Trial]:
    return [one for one in some if packer.place(one) is not None]


# --- the rule ---------------------------------------------------------------------------------------------------


def test_the_first_trial_is_alone_until_its_updates_are_measured() -> None:
    packer, some = Packer(1, 16), trials(6)
    first = packer.place(some[0])
    assert first is not None
    assert (first.card, first.measures, first.share) == (0, True, 1.0)
    assert packer.place(some[1]) is None
    assert packer.measuring() == [some[0].id]
    packer.learn(some[0].id, reading(4, 0.3, whole=False))
    assert packer.measuring() == []
    assert len(placed(packer, some[1:])) == 3  # 4 x 0.3 is at most 1.25, 5 x 0.3 is not
    packer.leave(some[0].id)
    after = packer.place(some[5])
    assert after is not None
    assert (after.measures, after.share) == (False, 0.3)


def test_memory_of_evaluations_is_allowed_for_until_a_trial_was_seen_to_its_end() -> None:
    packer, some = Packer(1, 16), trials(9)
    packer.place(some[0])
    packer.learn(some[0].id, reading(10, 0.01, whole=False, card_gib=80))
    assert len(placed(packer, some[1:])) == int(0.9 * 80 / (10 + UNSEEN_BYTES / GIB)) - 1
    packer = Packer(1, 16)
    packer.place(some[0])
    packer.learn(some[0].id, reading(10, 0.01, whole=False))
    packer.learn(some[0].id, reading(30, None, whole=True))  # its end: more than its first updates showed
    packer.leave(some[0].id)
    assert len(placed(packer, some[1:])) == 2
    small = trials(3)
    packer = Packer(1, 16, {packing.shape(some[0]): reading(30, 0.5)})
    packer.place(small[0])
    packer.learn(small[0].id, reading(20, None))
    assert len(placed(packer, small[1:])) == 1, "the largest that was seen counts"


def test_an_unknown_shape_joins_on_a_guess_of_twice_the_hungriest() -> None:
    for gib, joins in ((30, False), (10, True)):
        packer, known, new = Packer(1, 16), trials(2), trials(3, n_pairs=8)
        packer.place(known[0])
        packer.learn(known[0].id, reading(gib, 0.3))
        found = packer.place(new[0])
        assert (found is not None) == joins
        if found is not None:
            assert (found.measures, found.share) == (True, 0.3)
            assert packer.measuring() == [new[0].id]


def test_what_is_measured_beside_others_is_scaled_to_the_share_it_had() -> None:
    packer, known, new = Packer(1, 16), trials(3), trials(2, n_pairs=8)
    packer.place(known[0])
    packer.learn(known[0].id, reading(1, 0.3))
    packer.place(known[1])
    packer.place(new[0])
    packer.learn(new[0].id, reading(1, 0.6))  # the others leave it 0.4 of the card
    packer.leave(known[0].id)
    packer.leave(known[1].id)
    packer.leave(new[0].id)
    again = packer.place(new[1])
    assert again is not None
    assert (again.measures, again.share) == (False, pytest.approx(0.24))


def test_rates_seeds_and_lengths_share_a_shape_and_settings_do_not() -> None:
    one = plans.trial(0)
    assert packing.shape(one) == packing.shape(plans.trial(5, lr=0.1, steps=99))
    assert packing.shape(one) != packing.shape(plans.trial(0, n_pairs=8))
    assert one.train is not None
    larger = dataclasses.replace(one, train=one.train | {"batch_size": 8})
    assert packing.shape(one) != packing.shape(larger)


def test_no_more_trials_than_cores_and_cards_are_filled_evenly() -> None:
    some = trials(12)
    packer = Packer(2, 5, {packing.shape(some[0]): reading(1, 0.1)})
    places = [packer.place(one) for one in some]
    assert [place.card for place in places if place is not None] == [0, 1, 0, 1, 0]


def test_each_empty_card_takes_a_trial_that_nobody_knows() -> None:
    packer, some = Packer(2, 8), trials(3)
    assert [p and p.card for p in map(packer.place, some)] == [0, 1, None]


def test_a_share_never_measured_fills_the_card() -> None:
    some = trials(3)
    packer = Packer(1, 8, {packing.shape(some[0]): reading(1, None)})
    first = packer.place(some[0])
    assert first is not None
    assert first.measures
    assert packer.place(some[1]) is None


def test_out_of_memory_beside_others_is_tried_alone_and_alone_is_its_own() -> None:
    some = trials(4)
    packer = Packer(1, 8, {packing.shape(some[0]): reading(1, 0.2)})
    placed(packer, some[:2])
    packer.leave(some[1].id)
    assert packer.suffered(some[0].id), "it had company, even if that has left"
    packer.leave(some[0].id)
    packer.place(some[2])
    assert packer.place(some[0]) is None, "it waits for an empty card"
    packer.leave(some[2].id)
    assert packer.place(some[0]) is not None
    assert packer.place(some[3]) is None, "and nobody joins it"
    assert not packer.suffered(some[0].id)


def test_what_does_not_fit_is_passed_over_in_the_queue() -> None:
    small, large = trials(3), trials(2, n_pairs=8)
    known = {packing.shape(small[0]): reading(1, 0.1), packing.shape(large[0]): reading(60, 0.1)}
    packer = Packer(1, 8, known)
    members = [plans.member(one) for one in (large[0], large[1], *small)]
    queue = deque(members)
    order = []
    while (taken := packer.take(queue)) is not None:
        order.append(taken[0].trial.id)
    assert order == [one.id for one in (large[0], *small)]
    assert [member.trial.id for member in queue] == [large[1].id]


# --- the meter --------------------------------------------------------------------------------------------------


class Cuda:
    """A card on which an update takes `wall_s`, of which the device works `device_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wall_s: float, device_s: float) -> None:
        self.wall_s, self.device_s, self.now, self.paused = wall_s, device_s, 0.0, 0
        self.reserved = 3 * GIB
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def get_device_properties(self, _: Any) -> Any:
        return SimpleNamespace(name=CARD, total_memory=80 * GIB)

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, _: Any) -> None: ...

    def synchronize(self, _: Any) -> None: ...

    def max_memory_reserved(self, _: Any) -> int:
        return self.reserved

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.paused += 1

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 1000 * self.device_s)


@pytest.mark.parametrize(("wall_s", "device_s", "busy"), [(0.004, 0.001, 0.25), (0.02, 0.02, 1.0), (0.01, 0.011, 1.0)])
def test_busy_is_the_devices_time_over_all_of_it(
    monkeypatch: pytest.MonkeyPatch, wall_s: float, device_s: float, busy: float
) -> None:
    cuda = Cuda(monkeypatch, wall_s, device_s)
    tool = CudaMeter("cuda:0", times=True, cuda=cuda)
    found = []
    for _ in range(100):
        if (one := tool.step()) is not None:
            found.append(one)
        cuda.now += wall_s
    (first,) = found
    assert first == Reading(CARD, 80 * GIB, 3 * GIB + meter.CONTEXT_BYTES, pytest.approx(busy), False)
    assert cuda.paused == meter.QUEUED
    cuda.reserved = 5 * GIB
    assert tool.whole() == dataclasses.replace(first, memory_bytes=5 * GIB + meter.CONTEXT_BYTES, is_whole=True)


def test_without_times_only_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, 0.1, 0.1)
    tool = CudaMeter("cuda:0", times=False, cuda=cuda)
    assert [tool.step() for _ in range(50)] == [None] * 50
    assert cuda.paused == 0
    assert tool.whole().busy is None


def test_a_reading_of_another_version_counts_as_none(tmp_path: Path) -> None:
    one = reading(1, 0.5)
    meter.write(tmp_path, one)
    assert meter.read(tmp_path) == one
    (tmp_path / meter.METER_FILE).write_text('{"bytes": 3}')
    assert meter.read(tmp_path) is None
    assert meter.read(tmp_path / "nowhere") is None


# --- launches ---------------------------------------------------------------------------------------------------


class FakeMeter:
    """Reads the same from every trial: at the third update, and at the end."""

    def __init__(self, early: Reading, *, times: bool) -> None:
        self.early, self.times, self.steps = early, times, 0

    def step(self) -> Reading | None:
        self.steps += 1
        return self.early if self.times and self.steps == 3 else None

    def whole(self) -> Reading:
        return dataclasses.replace(self.early, is_whole=True, busy=self.early.busy if self.times else None)


class Threads:
    """An executor of threads, on a card that is made up. `jobs` are in the order of their start."""

    def __init__(self, slots: int, early: Reading) -> None:
        self.slots, self.early = slots, early
        self.jobs: list[Job] = []

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _run(self, job: Job, should_stop: Callable[[], bool]) -> Outcome:
        here = dataclasses.replace(job, device="cpu")
        tool = FakeMeter(self.early, times=job.measure == "steps") if job.measure else None
        return trial.run_job(here, should_stop=should_stop, meter=tool)

    def run(self, next_job: Any, done: Any, *, should_stop: Any, tick: Any) -> None:
        with ThreadPoolExecutor(self.slots) as pool:
            running: set[Future[Outcome]] = set()
            while True:
                while not should_stop() and len(running) < self.slots and (job := next_job()) is not None:
                    self.jobs.append(job)
                    running.add(pool.submit(self._run, job, should_stop))
                if not running:
                    return
                ended, running = wait(running, timeout=0.01, return_when=FIRST_COMPLETED)
                for future in ended:
                    done(future.result())
                tick()


class Crowd:
    """How many trials train at once, and the most that ever did."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.most, self._lock = 0, threading.Lock()

    def step(self, one: Trial, step: int) -> None:
        with self._lock:
            (self.now.discard if step == one.train["steps"] - 1 else self.now.add)(one.id)  # type: ignore[index]
            self.most = max(self.most, len(self.now))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(step_s=0.01, commit_every=1000)
    monkeypatch.setattr(trial, "load_engine", made.engine)
    monkeypatch.setattr(resources, "gpu_count", lambda: 1)
    monkeypatch.setattr(resources, "cores", lambda: 8)
    monkeypatch.setattr(cards, "card_name", lambda: CARD)
    return made


def launch(
    store: Store, monkeypatch: pytest.MonkeyPatch, early: Reading, **plan: Any
) -> tuple[Any, Threads, list[str]]:
    used: list[Threads] = []
    lines: list[str] = []

    def make(_: str, given: Any, _place: Any) -> Threads:
        assert given.packed
        used.append(Threads(given.slots, early))
        return used[0]

    monkeypatch.setattr(launching, "make_executor", make)
    found = plans.plan(**({"seeds": range(4), "steps": 60, "resources": {"gpu": "auto"}} | plan))
    return driver.launch(found, store=store.root, say=lines.append), used[0], lines


def test_a_launch_packs_by_what_its_first_trial_shows_and_a_later_one_knows(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, crowd = stores.make(tmp_path / "runs"), Crowd()
    fake.before_step = crowd.step
    early = reading(1, 0.4, whole=False)
    summary, used, lines = launch(store, monkeypatch, early)
    assert (summary.exit_code, summary.counts) == (Exit.OK, {"complete": 8})
    assert any("at most 8 trials at once, as measured, on 1 GPU" in line for line in lines)
    assert crowd.most == 3  # 3 x 0.4
    assert [job.measure for job in used.jobs] == ["steps"] + ["memory"] * 7
    assert {job.device for job in used.jobs} == {"cuda:0"}
    assert [job.gpu for job in used.jobs] == [1.0] + [0.4] * 7
    shares = {span.gpu for span in Ledger.open(store).spans("tiny")}
    assert shares == {1.0, 0.4}
    _, used, _ = launch(store, monkeypatch, early, seeds=range(6))
    assert [job.measure for job in used.jobs] == ["memory"] * 4, "what was learned stays in the store"


@pytest.mark.parametrize("oom", [pytest.param(0, marks=pytest.mark.wide), "split"])
def test_memory_that_runs_out_beside_others_costs_no_try_and_no_half_batch(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, oom: int | str
) -> None:
    store, crowd, failed = stores.make(tmp_path / "runs"), Crowd(), []

    def step(one: Trial, step: int) -> None:
        crowd.step(one, step)
        if len(crowd.now) > 1 and not failed and step == 10:
            failed.append(one.id)
            crowd.now.discard(one.id)
            raise torch.OutOfMemoryError("CUDA out of memory")

    fake.before_step = step
    summary, used, lines = launch(store, monkeypatch, reading(1, 0.3, whole=False), retry={"oom": oom})
    assert (summary.exit_code, summary.counts, len(failed)) == (Exit.OK, {"complete": 8}, 1)
    assert {job.micro_batch for job in used.jobs} == {None}
    assert sum("out of memory beside others; trying again with a card to itself" in line for line in lines) == 1
    again = [job for job in used.jobs if job.trial.id == failed[0]]
    assert [job.attempt for job in again] == [1, 2]
    assert [job.micro_batch for job in again] == [None, None]


def test_doctor_finds_the_drivers_version(tmp_path: Path) -> None:
    from sweeps import environment

    said = tmp_path / "version"
    said.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version: 12\n")
    assert environment._driver(said) == "570.86.15"
    assert environment._driver(tmp_path / "nowhere") == "of an unknown version"
