"""What a trial takes of its machine while it runs, sampled by its own worker: processor, memory, and its card.

One line a sample in `attempts/<n>/usage.jsonl`: {"time": seconds since 1970, "metrics": {...}}, under the names that
MLflow shows on a run's page "System metrics". The first sample is taken after `EVERY_S`; later ones are as far apart as
a hundredth of the time so far, so that a trial of a week has hundreds, not hundreds of thousands.

    cpu_utilization_percentage, system_memory_usage_megabytes, system_memory_usage_percentage    the whole machine
    process_cpu_utilization_percentage (100 = one core), process_memory_usage_megabytes          this worker
    gpu_0_utilization_percentage, gpu_0_memory_usage_megabytes, gpu_0_memory_usage_percentage,
    gpu_0_power_usage_watts                                    the trial's card, with all that runs on it
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runners.store import generation

FILE = "usage.jsonl"
PREFIX = "system/"
EVERY_S = 2.0
SHARE = 0.01
"""Of the time so far: how far samples are apart in a long trial."""

Sample = Callable[[], dict[str, float]]


@contextlib.contextmanager
def sampling(attempt: Path, device: Any, sample: Sample | None = None) -> Iterator[None]:
    """Sample into the folder of an attempt until the block ends. Trouble with it is no trouble of the trial."""
    # The card is asked who it is here: CUDA calls of another thread would disturb a graph that is being recorded.
    sampler = _Sampler(attempt / FILE, sample or _sample_of(_card_uuid(device)))
    sampler.start()
    try:
        yield
    finally:
        sampler.over.set()
        sampler.join(2)


def read(folder: Path) -> list[tuple[int, float, dict[str, float]]]:
    """(whole seconds since the first sample, time, metrics) of a trial's folder; of attempts before it began anew none.

    Torn lines, and a second sample in one second, are left out.
    """
    first_attempt, found = generation(folder), {}
    for path in sorted((folder / "attempts").glob(f"*/{FILE}"), key=lambda path: path.parent.name):
        if path.parent.name.isdecimal() and int(path.parent.name) >= first_attempt:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    found[float(row["time"])] = {PREFIX + k: float(v) for k, v in row["metrics"].items()}
    begun = min(found, default=0.0)
    by_second: dict[int, tuple[float, dict[str, float]]] = {}
    for moment in sorted(found):
        by_second.setdefault(int(moment - begun), (moment, found[moment]))
    return [(second, *told) for second, told in by_second.items()]


class _Sampler(threading.Thread):
    def __init__(self, path: Path, sample: Sample) -> None:
        super().__init__(name="usage", daemon=True)
        self._path, self._sample, self.over = path, sample, threading.Event()

    def run(self) -> None:
        begun = time.monotonic()
        while not self.over.wait(max(EVERY_S, SHARE * (time.monotonic() - begun))):
            with contextlib.suppress(Exception):
                metrics = {name: round(value, 2) for name, value in self._sample().items() if math.isfinite(value)}
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"time": round(time.time(), 3), "metrics": metrics}) + "\n")


def _sample_of(card: str | None) -> Sample:
    """A sampler of this machine, this process and the card with this UUID. Imports are left to the first sample."""
    process: list[Any] = []
    handles: list[Any] = []

    def sample() -> dict[str, float]:
        import psutil

        if not process:
            process.append(psutil.Process())
            psutil.cpu_percent(), process[0].cpu_percent()  # both tell what was since they were asked last
            handles.extend(_handles(card))
            time.sleep(0.1)
        memory = psutil.virtual_memory()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
            "process_cpu_utilization_percentage": process[0].cpu_percent(),
            "process_memory_usage_megabytes": process[0].memory_info().rss / 1e6,
        }
        for handle in handles:
            found |= _card_usage(handle)
        return found

    return sample


def _card_uuid(device: Any) -> str | None:
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return None


def _handles(card: str | None) -> list[Any]:
    """NVML's handle of the card, or nothing: no card, no driver, a slice of a card."""
    if card is None:
        return []
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByUUID(card)]
    return []


def _card_usage(handle: Any) -> dict[str, float]:
    """What NVML tells of a card; some cards do not tell all of it."""
    import pynvml

    found: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found["gpu_0_memory_usage_megabytes"] = memory.used / 1e6
        found["gpu_0_memory_usage_percentage"] = 100 * memory.used / memory.total
    with contextlib.suppress(pynvml.NVMLError):
        found["gpu_0_utilization_percentage"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(pynvml.NVMLError):
        found["gpu_0_power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return found
