"""What a trial needs of a card: memory and busy share, measured by its own worker during its first updates.

    busy    the share of the time in which the card works for this trial when it has the card to itself: the time that
            an update takes on the device, over the time it takes in all. Small models wait for the CPU to launch their
            kernels, so this is often 0.1 to 0.5, and several of them fit on one card.

The device's own time is found without a profiler, which would cost seconds and slow down what it measures: the card is
first given a pause to sit through, the update's kernels queue up behind it, and two events around them say how long
they take back to back. An update of more kernels than the queue holds, or one that waits for the device inside, comes
out too long, never too short.

The meter is an argument of the worker, so that tests can drive all that follows from it on a CPU.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runners.store import read_json, write_json

METER_FILE = "meter.json"
"""In an attempt's folder: the newest reading."""
CONTEXT_BYTES = 768 * 2**20
"""What a process takes of a card beyond its allocator: context, code of kernels, libraries' workspaces."""
WARM, TIMED, QUEUED = 6, 12, 4
"""Updates before measuring (kernels compile, caches fill), those timed as they come, those queued behind a pause."""
_CYCLES_PER_S = 2.0e9
_LONGEST_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Reading:
    """`busy` is None if it was not measured. `is_whole`: memory of the whole trial with its evaluations, not only of
    the first updates."""

    card: str
    card_bytes: int
    memory_bytes: int
    busy: float | None = None
    is_whole: bool = False


class Meter(Protocol):
    """Measures one training and what follows it, in the worker's process."""

    def step(self) -> Reading | None:
        """Called before each update. A reading once, when the first updates have shown enough."""

    def whole(self) -> Reading:
        """What the trial took, at its end."""


def write(attempt: Path, reading: Reading) -> None:
    write_json(attempt / METER_FILE, dataclasses.asdict(reading), durable=False)


def read(attempt: Path) -> Reading | None:
    """The newest reading of an attempt; None if there is none, or another version wrote it."""
    row = read_json(attempt / METER_FILE)
    try:
        return Reading(**row) if isinstance(row, dict) else None
    except TypeError:
        return None


class CudaMeter:
    """The real one. With `times`, updates are timed too, which holds the training up for a few of them."""

    def __init__(self, device: Any, *, times: bool, cuda: Any = None) -> None:
        import torch

        self._cuda, self.device = cuda or torch.cuda, device
        self._card = self._cuda.get_device_properties(device)
        self._step = 0 if times else WARM + TIMED + QUEUED + 1
        self._began = self._wall_s = self._device_s = 0.0
        self._events: list[Any] = []
        self._busy: float | None = None
        self._cuda.empty_cache()  # of the trial that this process ran before
        self._cuda.reset_peak_memory_stats(device)

    def step(self) -> Reading | None:
        at, self._step = self._step, self._step + 1
        if at == WARM:
            self._cuda.synchronize(self.device)
            self._began = time.perf_counter()
        elif at == WARM + TIMED:
            self._cuda.synchronize(self.device)
            self._wall_s = (time.perf_counter() - self._began) / TIMED
        if WARM + TIMED <= at <= WARM + TIMED + QUEUED:
            return self._queued(is_last=at == WARM + TIMED + QUEUED)
        return None

    def _queued(self, *, is_last: bool) -> Reading | None:
        if self._events:
            self._events[1].record()
            self._cuda.synchronize(self.device)
            self._device_s += self._events[0].elapsed_time(self._events[1]) / 1000
        if is_last:
            self._busy = min(1.0, self._device_s / QUEUED / max(self._wall_s, 1e-9))
            return self._reading(is_whole=False)
        pause_s = min(1.5 * self._wall_s, _LONGEST_PAUSE_S)
        self._cuda._sleep(int(pause_s * _CYCLES_PER_S))
        self._events = [self._cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()
        return None

    def whole(self) -> Reading:
        return self._reading(is_whole=True)

    def _reading(self, *, is_whole: bool) -> Reading:
        memory = self._cuda.max_memory_reserved(self.device) + CONTEXT_BYTES
        return Reading(self._card.name, self._card.total_memory, memory, self._busy, is_whole)
