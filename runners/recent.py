"""What is new in a ledger since one last looked: for views that follow a running sweep.

Every look opens the ledger for reading, asks little and closes it: a view that is open for days holds no transaction,
so it keeps no writer waiting and no write-ahead log from being cleared, and it follows a ledger that was moved or made
anew. Times are by the database's clock where leases are concerned, by the drivers' clocks for attempts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from runners.database import Database, Now
from runners.ledger import Row, attempt_t, driver_t, membership_t, projector_t, read_row, revision_t, sweep_t, trial_t
from runners.owner import Owner
from runners.schema import Plan, Status
from runners.store import Store

SLACK_S = 5.0
"""How long a change may take from its time stamp to its commit: looks overlap by it."""
SKEW_S = 300.0
"""How far the clocks of drivers may be apart: an attempt's end is stamped by its driver's."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a trial. Seconds since 1970; `gpu` = cards, or the share of one."""

    trial: str
    number: int
    status: str
    started: float | None
    ended: float | None
    gpu: float


@dataclass(frozen=True)
class Tally:
    """One sweep in a list: its newest revision, and its trials by status as the ledger has them."""

    sweep: str
    question: str
    revision: int
    counts: dict[str, int]
    changed: float | None
    """When a trial of it last changed, in seconds since 1970."""


@contextmanager
def reading(store: Store) -> Iterator[Recent | None]:
    """The store's ledger, open for reading; None if there is none. Raises `UserError` where it does not answer."""
    url = store.ledger_url()
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        yield None
        return
    database = Database(url, read_only=True)
    try:
        yield Recent(database)
    finally:
        database.close()


class Recent:
    """Questions to an open ledger. None of them writes."""

    def __init__(self, database: Database) -> None:
        self._read = database.read

    def rows(self, sweep: str, revision: int, since: float = 0.0) -> tuple[dict[str, Row], float]:
        """Trials of a revision that changed since `since` or run now, and what to give as `since` the next time."""
        is_member = (membership_t.c.sweep == sweep) & (membership_t.c.revision == revision)
        expired = sa.case((trial_t.c.expires < Now(), 1), else_=0).label("expired")
        is_new = (trial_t.c.updated >= since) | trial_t.c.updated.is_(None) | (trial_t.c.status == Status.RUNNING.value)
        query = sa.select(trial_t, expired).join(membership_t, (membership_t.c.trial == trial_t.c.id) & is_member)
        with self._read() as db:
            now = float(db.execute(sa.select(Now())).scalar_one())
            found = {row.id: read_row(row) for row in db.execute(query.where(is_new))}
        return found, now - SLACK_S

    def attempts(self, sweep: str, since: float = 0.0) -> list[Attempt]:
        """Attempts at the sweep's trials, all revisions, that are open or ended since `since` (a little before too)."""
        ours = sa.select(membership_t.c.trial).where(membership_t.c.sweep == sweep)
        columns = [attempt_t.c[name] for name in ("trial", "number", "status", "started", "ended", "gpu")]
        is_new = attempt_t.c.ended.is_(None) | (attempt_t.c.ended >= since - SKEW_S)
        with self._read() as db:
            rows = db.execute(sa.select(*columns).where(attempt_t.c.trial.in_(ours), is_new)).all()
        return [Attempt(r.trial, r.number, r.status, r.started, r.ended, r.gpu or 0.0) for r in rows]

    def has_driver(self, rows: Iterable[Row]) -> bool:
        """Whether a driver is at work: one of this machine that lives, or one that holds one of these trials."""
        holders = {row.owner for row in rows if row.owner is not None}
        with self._read() as db:
            owners = [Owner(r.uuid, r.host, r.pid, r.begun, r.machine) for r in db.execute(sa.select(driver_t))]
        return any((one.is_here() or one.uuid in holders) and not one.is_dead() for one in owners)

    def problems(self, sweep: str) -> list[str]:
        """What keeps the sweep's projections to MLflow from being up to date."""
        query = sa.select(projector_t.c.problem).where(projector_t.c.experiment == sweep)
        with self._read() as db:
            return [problem for problem in db.execute(query).scalars() if problem]

    def tallies(self) -> list[Tally]:
        """Every sweep of the ledger, the one that changed last first."""
        newest = sa.select(revision_t.c.sweep, sa.func.max(revision_t.c.number).label("number"))
        last = newest.group_by(revision_t.c.sweep).subquery()
        is_last = (membership_t.c.sweep == last.c.sweep) & (membership_t.c.revision == last.c.number)
        has_lapsed = trial_t.c.owner.is_(None) | (trial_t.c.expires < Now())
        is_lapsed = (trial_t.c.status == Status.RUNNING.value) & has_lapsed
        status = sa.case((is_lapsed, Status.INTERRUPTED.value), else_=trial_t.c.status).label("status")
        counted = (
            sa.select(last.c.sweep, status, sa.func.count(), sa.func.max(trial_t.c.updated))
            .join(membership_t, is_last)
            .join(trial_t, trial_t.c.id == membership_t.c.trial)
            .group_by(last.c.sweep, status)
        )
        heads = sa.select(sweep_t.c.name, sweep_t.c.question, last.c.number).join(last, last.c.sweep == sweep_t.c.name)
        with self._read() as db:
            named = {name: (question or "", number) for name, question, number in db.execute(heads)}
            groups = db.execute(counted).all()
        counts: dict[str, dict[str, int]] = {name: {} for name in named}
        changed: dict[str, float] = {}
        for sweep, state, n, when in groups:
            counts[sweep][state] = n
            changed[sweep] = max(changed.get(sweep, 0.0), when or 0.0)
        found = [Tally(name, *named[name], counts[name], changed.get(name)) for name in named]
        return sorted(found, key=lambda one: one.changed or 0.0, reverse=True)


def tallies(store: Store) -> list[Tally]:
    """Every sweep of the store, those that the ledger does not know last and without counts."""
    with reading(store) as recent:
        found = recent.tallies() if recent is not None else []
    known = {one.sweep for one in found}
    counted = [_with_searches(one, store) for one in found]
    return counted + [Tally(name, "", 0, {}, None) for name in store.sweeps() if name not in known]


def _with_searches(one: Tally, store: Store) -> Tally:
    """With a search, the ledger has rows of slots, which never run, and none of what is not made up yet."""
    n = _n_trainings(store.revision_folder(one.sweep, one.revision) / "plan.jsonl")
    if n is None:
        return one
    begun = {status: count for status, count in one.counts.items() if status != Status.PLANNED}
    waiting = max(0, n - sum(begun.values()))
    return replace(one, counts=begun | ({Status.PLANNED.value: waiting} if waiting else {}))


@functools.lru_cache(maxsize=256)
def _n_trainings(plan: Path) -> int | None:
    """Trainings of a frozen plan with a search; None for one without, which is not read to its end."""
    try:
        with open(plan, encoding="utf-8") as lines:
            head = [next(lines, ""), next(lines, "")]
            return Plan.from_lines([*head, *lines]).n_trainings if '"kind": "search"' in head[1][:40] else None
    except OSError:
        return None
