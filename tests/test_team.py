"""Several processes train one trial: the numbers are those of one, whatever the split.

All but one test have their processes by fork, which takes a second; that one goes the whole way through Ray Train.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plans
import pytest
import stores
import torch
from test_ray import worker_of

from runners import driver, resources, train
from runners.batch import Batch
from runners.resources import Machine
from runners.schema import Exit, Plan, Trial, UserError
from runners.store import Store
from runners.team import ALONE, Team

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 20
TRIAL = plans.trial(steps=STEPS)


@dataclass
class Trained:
    snapshot: train.Snapshot
    losses: list[float]


def fit(trial: Trial, team: Team, *, stop_at: int = 10**9, **given: Any) -> Trained:
    """Trains on the CPU; stops before update `stop_at` of this process."""
    losses: list[float] = []
    asked = iter(range(10**9))
    done = train.fit(
        trial,
        device=torch.device("cpu"),
        commit=lambda _, points: losses.extend(p.metrics["train/loss"] for p in points),
        progress=lambda *_: None,
        should_stop=lambda: next(asked) >= stop_at,
        checkpoint_every_s=1e9,
        team=team,
        **{"start": None, **given},
    )
    return Trained(done.snapshot, losses)


def together(size: int, call: Callable[[Team], Any], *, sharded: bool = False) -> Any:
    """What `call` gives on rank 0, run by `size` processes that are forked from this one."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = _free_port()

    def member(rank: int) -> None:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        try:
            found = call(Team(rank, size, sharded))
        except BaseException:
            answers.put(traceback.format_exc())
            os._exit(1)
        if rank == 0:
            answers.put(_as_arrays(found))
        torch.distributed.destroy_process_group()

    processes = [context.Process(target=member, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found = answers.get(timeout=120)
    for process in processes:
        process.join(30)
    assert not isinstance(found, str), found
    return _as_tensors(found)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _as_arrays(found: Trained) -> Any:
    """Plain memory: a tensor in a queue is a file that its process takes with it."""
    return {name: value.numpy() for name, value in found.snapshot.tensors.items()}, found.snapshot.meta, found.losses


def _as_tensors(found: Any) -> Trained:
    arrays, meta, losses = found
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return Trained(train.Snapshot(meta["step"], tensors, meta), losses)


@pytest.fixture(scope="module")
def alone() -> Trained:
    """Twenty updates by one process."""
    torch.set_num_threads(1)
    return fit(TRIAL, ALONE)


@pytest.mark.parametrize("sharded", [False, True])
def test_any_number_goes_on_from_any(alone: Trained, sharded: bool) -> None:
    """Two processes as one; a checkpoint of two goes on with one, of one with two, of two with two bit for bit."""
    whole = together(2, lambda team: fit(TRIAL, team), sharded=sharded)
    assert len(whole.losses) == STEPS
    assert whole.losses == pytest.approx(alone.losses, rel=1e-6)
    for name, value in alone.snapshot.tensors.items():
        torch.testing.assert_close(whole.snapshot.tensors[name], value, rtol=1e-4, atol=1e-5)
    half = together(2, lambda team: fit(TRIAL, team, stop_at=8), sharded=sharded)
    rest = fit(TRIAL, ALONE, start=half.snapshot)
    assert half.losses + rest.losses == pytest.approx(alone.losses, rel=1e-6)
    again = together(2, lambda team: fit(TRIAL, team, start=half.snapshot), sharded=sharded)
    assert half.losses + again.losses == whole.losses
    assert all(torch.equal(value, whole.snapshot.tensors[name]) for name, value in again.snapshot.tensors.items())
    first = fit(TRIAL, ALONE, stop_at=8)
    joined = together(2, lambda team: fit(TRIAL, team, start=first.snapshot), sharded=sharded)
    assert first.losses + joined.losses == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_rows_that_do_not_come_out_even(alone: Trained, sharded: bool) -> None:
    """Four rows on three processes, one row at once: two of them have nothing to do in the second part."""
    found = together(3, lambda team: fit(TRIAL, team, micro_batch=1), sharded=sharded)
    assert found.losses == pytest.approx(alone.losses, rel=1e-6)


def test_shares_are_the_batch() -> None:
    """Every row is in one share, and every process gets as many parts."""
    rows = torch.arange(7)
    batch = Batch(rows[:, None], rows[:, None], rows[:, None])
    for size, at_once in ((1, None), (2, None), (3, 2), (9, None)):
        shares = [list(Team(rank, size).parts(batch, at_once)) for rank in range(size)]
        seen = [
            row for share in shares for part, weight in share if weight for row in part.tokens_BT.flatten().tolist()
        ]
        assert sorted(seen) == rows.tolist()
        assert len({len(share) for share in shares}) == 1


def losses(store: Store, plan: Plan) -> list[float]:
    folder = store.trial_folder(plan.members[0].trial.id) / "metrics"
    rows = [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    return [row["metrics"]["train/loss"] for row in rows if "train/loss" in row["metrics"]]


def test_through_ray_train(tmp_path: Path, alone: Trained) -> None:
    """The whole way, evaluation too: the losses are those of one process."""
    plan = plans.plan(seeds=[0], lrs=[1e-3], steps=STEPS, resources={"workers": 2, "gpu": 0})
    store = stores.make(tmp_path / "runs")
    lines: list[str] = []
    done = driver.launch(plan, store=store.root, executor="ray", say=lines.append)
    trial = plan.members[0].trial
    log = (store.trial_folder(trial.id) / "attempts" / "1" / "log.txt").read_text()
    assert done.exit_code == Exit.OK, (lines, log)
    assert "training by 2 processes" in log
    assert losses(store, plan) == pytest.approx(alone.losses, rel=1e-6)
    assert not store.missing_slices(trial.id, plan.members[0].slices)


@pytest.mark.wide
def test_a_killed_worker(tmp_path: Path, alone: Trained) -> None:
    """Rank 0 is killed as soon as it has begun: the others end with it, and the trial is tried again."""
    plan = plans.plan(seeds=[0], lrs=[1e-3], steps=STEPS, resources={"workers": 2, "gpu": 0})
    store = stores.make(tmp_path / "runs")
    trial = plan.members[0].trial
    lines: list[str] = []

    def kill() -> None:
        while (worker := worker_of(store, trial.id)) is None:
            time.sleep(0.01)
        os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = driver.launch(plan, store=store.root, executor="ray", say=lines.append)
    killer.join()
    assert done.exit_code == Exit.OK, lines
    assert any("failed (infra)" in line for line in lines)
    assert store.last_attempt(trial.id) == 2
    assert losses(store, plan) == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "machine", "found"),
    [
        ({"gpu": 2}, Machine(4, 8), (4, 8, 2.0, 2)),
        ({"gpu": 3, "alone": True}, Machine(4, 8), (1, 8, 3.0, 3)),
        ({"workers": 8, "gpu": "auto", "shard": True}, Machine(4, 8), (1, 8, 8.0, 8)),
        ({"workers": 2}, Machine(5, 0), (2, 0, 0.0, 2)),
        ({"workers": 2, "gpu": 0, "cpu": 2}, Machine(8, 8), (2, 0, 0.0, 2)),
        ({"gpu": 4}, Machine(8, 6, "a cluster", False, ((8, 3), (8, 3))), (1, 6, 4.0, 4)),
    ],
)
def test_what_a_team_gets(asked: dict[str, Any], machine: Machine, found: tuple[Any, ...]) -> None:
    given = resources.share(asked, "ray", None, machine)
    assert (given.slots, given.gpus, given.gpu, given.workers) == found
    assert given.sharded == ("shard" in asked)


@pytest.mark.parametrize(
    ("asked", "executor", "said"),
    [
        ({"gpu": 9}, "ray", "one trial on 9 GPUs, but this machine has 8"),
        ({"workers": 9, "gpu": 0}, "ray", "room for 4"),
        ({"workers": 2, "gpu": 3}, "ray", "gpu is 3 and workers is 2"),
        ({"workers": 2, "gpu": 0.5}, "ray", "a whole GPU each"),
        ({"shard": True}, "ray", "give gpu or workers"),
        ({"workers": 2}, "inline", "executor ray"),
    ],
)
def test_what_cannot_be_is_said_at_once(asked: dict[str, Any], executor: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resources.share(asked, executor, None, Machine(4, 8))
