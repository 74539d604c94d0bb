"""What a launch reports when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Failed:
    """One trial that failed, in this launch or before."""

    trial: str
    cell: str
    seed: int
    kind: str
    error: str
    log: Path


@dataclass
class Summary:
    """What a launch did. `counts` is by status over the members selected; `ran` were trained, `evaluated` only that."""

    sweep: str
    revision: int
    counts: dict[str, int]
    ran: int
    evaluated: int
    skipped: int
    failures: list[Failed] = field(default_factory=list)
    exit_code: int = 0
    seconds: float = 0.0
    backlog: str | None = None
    """Why MLflow is not up to date, or None if it is."""
    stopped: str | None = None
    """Which limit of time or budget ended it early, or None."""
