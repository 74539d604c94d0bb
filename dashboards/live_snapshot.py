"""What there is to say of a running sweep at one moment: plain values, made by `dashboards/live.py`."""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.live_pace import Pace, Running
from dashboards.live_scores import Measure
from runners.schema import Member, Status
from runners.search import State

ORDER = (
    Status.COMPLETE,
    Status.DIVERGED,
    Status.PRUNED,
    Status.RUNNING,
    Status.FAILED,
    Status.INTERRUPTED,
    Status.PLANNED,
)
"""In which order states are told."""


@dataclass(frozen=True)
class Cell:
    """The trials of one cell: their scores by seed, as far as they are known."""

    arm: str
    cell: str
    condition: str
    state_bytes: int
    planned: int
    scores: dict[int, float]
    diverged: int
    best_trial: str | None

    @property
    def mean(self) -> float | None:
        return sum(self.scores.values()) / len(self.scores) if self.scores else None


@dataclass(frozen=True)
class Cause:
    """Trials that ended badly in the same way. `kind` is oom, infra, error, or diverged; `error` one of their lines."""

    kind: str
    error: str
    trials: list[Member]


@dataclass(frozen=True)
class Snapshot:
    """A sweep at one moment. `unread`: results that are there and not read yet."""

    sweep: str
    revision: int
    question: str
    at: float
    measure: Measure
    counts: dict[Status, int]
    running: list[Running]
    cells: list[Cell]
    causes: list[Cause]
    pace: Pace
    searches: list[State]
    unread: int
    has_ledger: bool
    has_driver: bool
    """Whether a launch is at work, also in the moment between two trials."""
    backlog: str | None = None
    changed: float | None = None
    """When an attempt last began or ended, in seconds since 1970."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def ended(self) -> int:
        """Trials with nothing left to run, well or badly."""
        return sum(n for status, n in self.counts.items() if status.is_done)

    @property
    def failed(self) -> int:
        return self.counts.get(Status.FAILED, 0)

    @property
    def is_whole(self) -> bool:
        return self.ended == self.total


def condition_of(member: Member) -> str:
    """`seq_len 64, n_pairs 16`: the task's own part of what varies. Scores of two conditions do not compare."""
    parts = [f"{path.rsplit('.', 1)[-1]} {value}" for path, value in member.varying.items() if path.startswith("task")]
    return ", ".join(parts)


def leaders(snapshot: Snapshot) -> dict[str, list[Cell]]:
    """Cells with a score by condition, in plan order, the best mean first."""
    found: dict[str, list[Cell]] = {}
    for cell in snapshot.cells:
        if cell.scores:
            found.setdefault(cell.condition, []).append(cell)
    sign = snapshot.measure.sign
    for cells in found.values():
        cells.sort(key=lambda cell: -sign * (cell.mean or 0.0))
    return found
