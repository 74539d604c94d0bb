"""Workers that neither die nor work: found by their silence, and killed.

A sign of life is any change to what a worker writes: its progress, its log, a checkpoint, an evaluation. It is told by
difference, never by comparing clocks, which differ between machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
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
    """What the attempt has written; nothing while its worker still starts, which a busy machine can draw out."""
    home = folder / "attempts" / str(attempt)
    worker = _changed(home / WORKER_FILE)
    return (worker, _changed(home / "log.txt"), *(_changed(folder / name) for name in _SIGNS)) if worker else ()


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def kill(
    folder: Path,
    trial_id: str,
    attempt: int,
    why: str,
    *,
    gpu: float = 0.0,
    far: Callable[[Path, Owner], bool] = lambda _attempt, _worker: False,
) -> bool:
    """End the attempt's worker, which has `gpu` of a card, for `why`.

    `far` ends, by its attempt's folder, one that is on another machine. False if the worker is this process, gone
    already, or out of reach.
    """
    home = folder / "attempts" / str(attempt)
    row = read_json(home / WORKER_FILE)
    worker = Owner(**row) if isinstance(row, dict) else None
    if worker is None or worker.is_dead() or (worker.is_here() and worker.pid == os.getpid()):
        return False
    with contextlib.suppress(OSError):
        write_outcome(home, Outcome(trial_id, attempt, Status.FAILED, Failure.INFRA, why))
    if not worker.is_here():
        if is_ended := far(home, worker):
            return is_ended
        (home / "outcome.json").unlink(missing_ok=True)  # it may yet say more itself
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    return True
