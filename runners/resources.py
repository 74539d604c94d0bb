"""What a trial is given here: how many run at once, on which device, with how many threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runners.schema import Exit, Job, Outcome, UserError


@dataclass(frozen=True)
class Share:
    """`slots` trials at once, each with `threads` CPU threads and `gpu` of a card; `gpus` cards in all."""

    slots: int
    threads: int
    gpus: int
    gpu: float

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    def __str__(self) -> str:
        at_once = "1 trial at a time" if self.slots == 1 else f"{self.slots} trials at once"
        cards = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpu else "CPU"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{at_once} on {cards}, {threads} each"


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


def share(resources: Mapping[str, Any], executor: str, jobs: int | None) -> Share:
    """What each trial gets on this machine. Raises `UserError` at once for what the machine cannot give.

    Threads are those of the spec (`resources.cpu`, 1 without it), whatever the number of jobs: a sum over more threads
    rounds otherwise, and a trial's numbers must not depend on what else runs.
    """
    asked = resources.get("gpu")
    cards = gpu_count()
    if asked not in (None, "auto", 0) and not cards:
        raise UserError(f"resources.gpu is {asked}, but there is no usable GPU on this machine", Exit.ENVIRONMENT)
    if isinstance(asked, int | float) and asked > 1:
        raise UserError(f"resources.gpu is {asked}: one trial on several GPUs is not there yet; give 1 or less")
    threads = int(resources.get("cpu") or 1)
    cores = _cores()
    if threads > cores:
        raise UserError(f"resources.cpu is {threads}, but this machine has {cores} cores", Exit.ENVIRONMENT)
    if executor not in ("ray", "inline"):
        raise UserError(f"executor {executor!r}: it is ray or inline")
    is_alone = executor == "inline" or bool(resources.get("alone"))
    if asked == 0 or not cards:
        return Share(1 if is_alone else jobs or max(1, cores // threads), threads, 0, 0.0)
    gpu = float(asked) if isinstance(asked, int | float) else 1.0
    slots = 1 if is_alone else cards * math.floor(1 / gpu + 1e-9)
    if jobs and not is_alone:
        slots = jobs
        gpu = min(gpu, 1 / math.ceil(jobs / cards))
    return Share(slots, threads, cards, gpu)


def gpu_count() -> int:
    """Cards that PyTorch can use. Where the machine has no NVIDIA driver, torch is not even imported."""
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_executor(name: str, given: Share) -> AbstractContextManager[Executor]:
    """The executor of that name. Ray is imported only for its own."""
    if name == "inline":
        from runners.inline import InlineExecutor

        return InlineExecutor()
    from runners.ray_tune import RayExecutor

    return RayExecutor(slots=given.slots, threads=given.threads, gpus=given.gpus, gpu=given.gpu)
