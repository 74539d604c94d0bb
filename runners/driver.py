"""Launch a plan on a store, and look at a store: the functions behind `sweep launch | status | sync | doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runners.schema import Plan

Say = Callable[[str], None]
"""Takes one line for the user (no line break). The driver never prints by itself."""


@dataclass(frozen=True)
class Failed:
    """One trial that failed in this launch (or before, if it was not tried again)."""

    trial: str
    cell: str
    seed: int
    kind: str
    error: str
    log: Path


@dataclass
class Summary:
    """What a launch did. `counts` is by status over all members selected; `ran` trials trained, `evaluated` only evaluated."""

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


@dataclass(frozen=True)
class TrialStatus:
    """One line of `sweep status`."""

    trial: str
    arm: str
    cell: str
    seed: int
    status: str
    attempt: int
    failure: str | None
    error: str | None
    step: int | None
    steps: int | None
    metrics: dict[str, float]
    log: Path | None


@dataclass(frozen=True)
class SweepStatus:
    """What `sweep status NAME` shows. `backlog` says why MLflow lags, None if it does not."""

    sweep: str
    revision: int
    question: str
    counts: dict[str, int]
    trials: list[TrialStatus]
    drivers: list[str]
    backlog: str | None


@dataclass(frozen=True)
class Finding:
    """One thing `sweep doctor` looked at. `level` is ok, note or problem."""

    level: str
    what: str
    remedy: str = ""


def launch(
    plan: Plan,
    *,
    store: Path,
    executor: str = "ray",
    jobs: int | None = None,
    only: frozenset[str] | None = None,
    tracking_uri: str | None = None,
    failed: bool = True,
    say: Say = print,
    tty: bool = False,
) -> Summary:
    """Run what is missing of `plan`. `only` = trial ids; `failed` = also those that failed before; `tty` = a live line."""
    raise NotImplementedError


def status(store: Path, sweep: str | None = None) -> list[SweepStatus]:
    """Where each sweep (or one) stands. Only reads."""
    raise NotImplementedError


def sync(
    store: Path, sweep: str | None = None, *, tracking_uri: str | None = None, restore: bool = False, say: Say = print
) -> dict[str, int]:
    """Bring MLflow up to date from the ledger and the trial folders: {sweep: trials projected}."""
    raise NotImplementedError


def doctor(store: Path, *, rebuild: bool = False) -> list[Finding]:
    """Check a store; with `rebuild` make the ledger anew from the folders."""
    raise NotImplementedError
