"""Workers that neither die nor work: found by their silence, and killed.

A sign of life is any change to what a worker writes: its progress, its log, a checkpoint, an evaluation. It is told by
difference, never by comparing clocks, which differ between machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from runners.owner import Owner
from runners.schema import Failure, Outcome, Status
from runners.store import read_json
from runners.trial import WORKER_FILE, write_outcome

_SIGNS = ("progress.json", "checkpoints", "metrics", "evals", "result.json")


class Watch:
    """Remembers when each running attempt last gave a sign of life; after `after_s` without one it is hung."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._seen: dict[tuple[str, int], tuple[tuple[int, ...], float]] = {}
        self._looked = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again. Looking costs some stats a trial."""
        every = min(10.0, self._after_s / 5)
        if time.monotonic() - self._looked < every:
            return False
        self._looked = time.monotonic()
        return True

    def silent_s(self, folder: Path, attempt: int) -> float | None:
        """Seconds since the attempt's last sign of life, if that is too long; None while all is well."""
        key, signs, now = (str(folder), attempt), _signs(folder, attempt), time.monotonic()
        if not signs:
            return None  # its worker has not begun
        before, since = self._seen.get(key, ((), now))
        if signs != before:
            self._seen[key] = (signs, now)
            return None
        return now - since if now - since > self._after_s else None

    def forget(self, folder: Path, attempt: int) -> None:
        self._seen.pop((str(folder), attempt), None)


def _signs(folder: Path, attempt: int) -> tuple[int, ...]:
    log = _changed(folder / "attempts" / str(attempt) / "log.txt")
    return (log, *(_changed(folder / name) for name in _SIGNS)) if log else ()


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def kill(folder: Path, trial_id: str, attempt: int, why: str, *, gpu: float = 0.0) -> bool:
    """End the attempt's worker, which has `gpu` of a card, for `why`.

    False if it is this process, gone already, or on another machine.
    """
    row = read_json(folder / "attempts" / str(attempt) / WORKER_FILE)
    worker = Owner(**row) if isinstance(row, dict) else None
    if worker is None or not worker.is_here() or worker.is_dead() or worker.pid == os.getpid():
        return False
    with contextlib.suppress(OSError):
        write_outcome(folder / "attempts" / str(attempt), Outcome(trial_id, attempt, Status.FAILED, Failure.INFRA, why))
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    return True
