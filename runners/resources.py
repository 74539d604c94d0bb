"""What a trial is given here: how many run at once, on which device, with how many threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runners.schema import Exit, Job, Outcome, UserError
from runners.store import read_json, write_json

if TYPE_CHECKING:
    from runners.owner import Owner
    from runners.ray_cluster import Cluster
    from runners.shared import Shared

LAUNCH_FILE = "launch.json"
"""In a revision's folder: what its last launch was given besides the spec, for `sweep resume`."""


@dataclass(frozen=True)
class Machine:
    """What there is for trials: cores and usable GPUs of this machine, or of a cluster (`is_here` is then False).

    `nodes` are the (cores, GPUs) of a cluster's nodes; `cores` is then that of the largest, `gpus` the sum.
    """

    cores: int
    gpus: int
    name: str = "this machine"
    is_here: bool = True
    nodes: tuple[tuple[int, int], ...] = ()

    def fit(self, threads: int, gpu: float = 0.0) -> int:
        """How many trials with `threads` CPUs and `gpu` of a card run at once: each has to fit on one node."""
        found = 0
        for cores, gpus in self.nodes or ((self.cores, self.gpus),):
            found += min(cores // threads, gpus * math.floor(1 / gpu + 1e-9)) if gpu else cores // threads
        return found


@dataclass(frozen=True)
class Share:
    """`slots` trials at once, each with `threads` CPU threads and `gpu` of a card; `gpus` cards in all.

    `packed`: trials share cards by what they are measured to need (`gpu: auto`), and `slots` is the most at once.
    `jobs` is what the user asked for, if anything.
    """

    slots: int
    threads: int
    gpus: int
    gpu: float
    packed: bool = False
    jobs: int | None = None
    workers: int = 1
    """Processes of a trial, each with `threads` threads; on cards each has one, and `gpu` is their number."""
    sharded: bool = False

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    def __str__(self) -> str:
        at_once = "1 trial at a time" if self.slots == 1 else f"{self.slots} trials at once"
        at_once = f"at most {at_once}, as measured," if self.packed else at_once
        cards = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpu else "CPU"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        if self.workers > 1:
            threads = f"{self.workers} workers of {threads}"
        return f"{at_once} on {cards}, {threads} each"


@dataclass(frozen=True)
class Place:
    """Where a launch runs, if not on this machine alone: a cluster it has joined, storage between it and its nodes."""

    cluster: Cluster | None = None
    shared: Shared | None = None
    say: Callable[[str], None] = print

    @property
    def machine(self) -> Machine | None:
        return self.cluster.machine if self.cluster else None

    def end(self, attempt: Path, worker: Owner) -> bool:
        """Kill the worker of the attempt on its node of the cluster. False if it is out of reach."""
        if self.cluster is None:
            return False
        from runners import ray_cluster

        return ray_cluster.end(attempt, worker)


class Executor(Protocol):
    """Both executors' contract; see `runners/inline.py`."""

    def run(
        self,
        next_job: Callable[[], Job | None],
        done: Callable[[Outcome], None],
        *,
        should_stop: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None: ...


def here() -> Machine:
    """This machine."""
    return Machine(cores(), gpu_count())


def share(resources: Mapping[str, Any], executor: str, jobs: int | None, machine: Machine | None = None) -> Share:
    """What each trial gets on `machine` (this one without it). Raises `UserError` at once for what it cannot give.

    Threads are those of the spec (`resources.cpu`, 1 without it), whatever the number of jobs: a sum over more threads
    rounds otherwise, and a trial's numbers must not depend on what else runs.
    """
    if executor not in ("ray", "inline"):
        raise UserError(f"executor {executor!r}: it is ray or inline")
    machine = machine or here()
    asked, cards, threads = resources.get("gpu"), machine.gpus, int(resources.get("cpu") or 1)
    if asked not in (None, "auto", 0) and not cards:
        raise UserError(f"resources.gpu is {asked:g}, but there is no usable GPU on {machine.name}", Exit.ENVIRONMENT)
    if not machine.cores:
        raise UserError(f"{machine.name} has no node that takes trials now (ray status)", Exit.ENVIRONMENT)
    if threads > machine.cores:
        has = f"{machine.cores} cores" if machine.is_here else f"no node with more than {machine.cores} CPUs"
        raise UserError(f"resources.cpu is {threads}, but {machine.name} has {has}", Exit.ENVIRONMENT)
    workers = _workers(resources)
    if workers > 1:
        return _team(resources, executor, jobs, machine, workers)
    is_alone = executor == "inline" or bool(resources.get("alone"))
    fit = max(1, machine.fit(threads))
    if asked == 0 or not cards:
        most = jobs or fit if machine.is_here else min(jobs or fit, fit)
        return Share(1 if is_alone else most, threads, 0, 0.0, jobs=jobs)
    if asked == "auto" and not is_alone and machine.is_here:
        # Each trial's own process keeps a core busy with launching kernels: more trials than cores only wait.
        return Share(min(jobs or fit, fit), threads, cards, 1.0, packed=True, jobs=jobs)
    gpu = float(asked) if isinstance(asked, int | float) else 1.0
    slots = 1 if is_alone else cards * math.floor(1 / gpu + 1e-9)
    if jobs and not is_alone:
        slots = jobs
        gpu = min(gpu, 1 / math.ceil(jobs / cards))
    if not machine.is_here:  # there, unlike here, a CPU is counted too
        slots = min(slots, machine.fit(threads, gpu))
        if not slots:
            what = f"{threads} CPUs beside a GPU"
            raise UserError(
                f"resources: a trial needs {what}, and no node of {machine.name} has them", Exit.ENVIRONMENT
            )
    return Share(slots, threads, cards, gpu, jobs=jobs)


def _workers(resources: Mapping[str, Any]) -> int:
    """Processes of a trial: `workers`, or as many as the cards that `gpu` asks for."""
    asked, workers = resources.get("gpu"), resources.get("workers")
    cards = int(asked) if isinstance(asked, int | float) and asked > 1 else None
    if cards and workers and cards != workers:
        raise UserError(
            f"resources: gpu is {cards} and workers is {workers}; each worker has a GPU, so give one of them"
        )
    found = int(workers or cards or 1)
    if found > 1 and isinstance(asked, float) and 0 < asked < 1:
        raise UserError(f"resources: {found} workers have a whole GPU each, and gpu is {asked:g}")
    if found == 1 and resources.get("shard"):
        raise UserError("resources.shard cuts a trial's weights among its workers: give gpu or workers, 2 or more")
    return found


def _team(resources: Mapping[str, Any], executor: str, jobs: int | None, machine: Machine, workers: int) -> Share:
    """What a trial of several workers gets. They may be on several nodes of a cluster."""
    if executor != "ray":
        raise UserError(f"resources: {workers} workers for one trial want the executor ray, not {executor}")
    threads, asked = int(resources.get("cpu") or 1), resources.get("gpu")
    on_cards = machine.gpus > 0 and asked != 0
    if on_cards and workers > machine.gpus:
        raise UserError(
            f"resources: one trial on {workers} GPUs, but {machine.name} has {machine.gpus}", Exit.ENVIRONMENT
        )
    # Here, cores are not counted where there are cards: a worker launches kernels and waits.
    fit = machine.gpus if on_cards and machine.is_here else machine.fit(threads, 1.0 if on_cards else 0.0)
    if fit < workers:
        each = f"{threads} CPU{'s' if threads > 1 else ''}{' and a GPU' if on_cards else ''}"
        raise UserError(
            f"resources: one trial on {workers} workers with {each} each, but {machine.name} has room for {fit}",
            Exit.ENVIRONMENT,
        )
    slots = 1 if resources.get("alone") else min(jobs or fit, fit // workers)
    sharded, cards = bool(resources.get("shard")), machine.gpus if on_cards else 0
    gpu = float(workers) if on_cards else 0.0
    return Share(slots, threads, cards, gpu, jobs=jobs, workers=workers, sharded=sharded)


def remember(revision: Path, given: Share) -> None:
    """Keep what a launch was given besides the spec, for a later `sweep resume`."""
    row = {"jobs": given.jobs}
    if read_json(revision / LAUNCH_FILE) != row:
        write_json(revision / LAUNCH_FILE, row)


def remembered_jobs(revision: Path) -> int | None:
    """`--jobs` of the revision's last launch; None if it had none."""
    jobs = (read_json(revision / LAUNCH_FILE) or {}).get("jobs")
    return jobs if isinstance(jobs, int) else None


def gpu_count() -> int:
    """Cards that PyTorch can use. Where the machine has no NVIDIA driver, torch is not even imported."""
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def card_name() -> str:
    """What PyTorch calls the first card, as readings and stamps do."""
    import torch

    return torch.cuda.get_device_name(0)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_executor(name: str, given: Share, place: Place) -> AbstractContextManager[Executor]:
    """The executor of that name. Ray is imported only for its own."""
    if name == "inline":
        from runners.inline import InlineExecutor

        return InlineExecutor()
    from runners.ray_tune import RayExecutor

    cards = (0, 0.0) if given.packed else (given.gpus, given.gpu)
    return RayExecutor(given, place, gpus=cards[0], gpu=cards[1])
