"""The ledger: plans, leases and an index of the trial folders, in SQLite (WAL) or PostgreSQL.

The folders hold the truth; every row here but the leases can be made again from them (`rebuild`). A lease is one
conditional UPDATE on the database's own clock: two drivers never hold one trial, and an attempt number fences what an
older holder still says. `running` with an expired lease reads as `interrupted`.

PostgreSQL runs the same statements, locked by rows where SQLite locks the file. Tests use it where they are given a
server (tests/test_ledger.py); `read_only` is then a promise of the caller, not of the connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from runners.budget import Span
from runners.database import Database, Now
from runners.owner import Owner
from runners.schema import SCHEMA_VERSION, Exit, Member, Outcome, Plan, Status, UserError
from runners.search import Searches
from runners.store import Store, read_json

LEASE_S = 60.0
RENEW_S = 10.0
"""A driver renews its leases this often, and stops its trials when it could not for LEASE_S."""

_tables = sa.MetaData()


def _table(name: str, keys: str, texts: str = "", numbers: str = "", times: str = "") -> sa.Table:
    """A table: `keys` are its primary key (a name ending in # is a number), then optional columns by type."""
    columns = [
        sa.Column(key.rstrip("#"), sa.Integer if key.endswith("#") else sa.Text, primary_key=True)
        for key in keys.split()
    ]
    columns += [sa.Column(text, sa.Text) for text in texts.split()]
    columns += [sa.Column(number, sa.Integer) for number in numbers.split()]
    columns += [sa.Column(time_, sa.Double) for time_ in times.split()]
    return sa.Table(name, _tables, *columns)


store_t = _table("store", "uuid", numbers="schema_version")
driver_t = _table("driver", "uuid", "host begun machine", "pid", "started")
sweep_t = _table("sweep", "name", "question")
revision_t = _table("revision", "sweep number#", "spec_hash", times="created")
membership_t = _table("membership", "sweep revision# trial", "arm cell", "position")
trial_t = _table("trial", "id", "status owner failure error", "attempt", "expires updated")
attempt_t = _table("attempt", "trial number#", "owner status failure error", times="started ended gpu")
evaluation_t = _table("evaluation", "trial slice", times="done")
projector_t = _table("projector", "uri experiment", "marker owner problem", times="expires")
projection_t = _table("projection", "uri experiment trial", "run sent", "step")


@dataclass(frozen=True)
class Row:
    """A trial as the ledger has it. `status` is already read with the lease: expired means interrupted."""

    id: str
    status: Status
    attempt: int
    owner: str | None
    failure: str | None
    error: str | None


class Ledger:
    """An open ledger. One instance may be used from several threads."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._db = Database(url, read_only=read_only)
        self._write, self._read, self._insert = self._db.write, self._db.read, self._db.insert
        self.close = self._db.close

    @classmethod
    def open(cls, store: Store, *, read_only: bool = False) -> Ledger:
        """The store's ledger, made if it is missing. With `read_only` it is neither made nor written."""
        url = store.ledger_url()
        ledger = cls(url, read_only=read_only)
        try:
            if not read_only:
                ledger._make(store.uuid)
            return ledger
        except sa.exc.DatabaseError as error:
            raise ledger._db.refused(error) from error

    def _make(self, store_uuid: str) -> None:
        with self._write() as db:
            self._db.lock_schema(db)
            _tables.create_all(db)
            _add_columns(db)
            db.execute(self._insert(store_t), {"uuid": store_uuid, "schema_version": SCHEMA_VERSION})
            rows = db.execute(sa.select(store_t)).all()
            other = [row.uuid for row in rows if row.uuid != store_uuid]
            if other:  # raised inside the transaction: nothing of this store stays in the other's ledger
                text = f"this ledger belongs to another store ({other[0]}, not {store_uuid})"
                raise UserError(text, Exit.ENVIRONMENT)
        if rows[0].schema_version > SCHEMA_VERSION:
            raise UserError(
                f"the ledger has schema {rows[0].schema_version}; this memsweep reads up to {SCHEMA_VERSION}: upgrade",
                Exit.ENVIRONMENT,
            )

    def store_uuid(self) -> str | None:
        """The store that the ledger belongs to; None if it was never written. Only reads."""
        with self._read() as db:
            is_made = sa.inspect(db).has_table(store_t.name)
            rows = db.execute(sa.select(store_t.c.uuid)).scalars().all() if is_made else []
        return rows[0] if len(rows) == 1 else None

    # ---- plans -------------------------------------------------------------------------------------------------

    def record_plan(self, plan: Plan, revision: int) -> None:
        """Index a frozen plan. Doing it again changes nothing."""
        name = plan.sweep
        head = {"sweep": name, "number": revision, "spec_hash": plan.spec_hash, "created": time.time()}
        with self._write() as db:
            db.execute(self._insert(sweep_t), {"name": name, "question": plan.question})
            db.execute(self._insert(revision_t), head)
        self.add_members(name, revision, plan.members)

    def add_members(self, sweep: str, revision: int, members: Sequence[Member], first: int = 0) -> None:
        """Index members of a revision, at positions from `first`: a search finds them while the sweep runs."""
        planned = {"status": Status.PLANNED.value, "attempt": 0, "updated": time.time()}
        trials = [planned | {"id": member.trial.id} for member in members]
        rows = [
            {"sweep": sweep, "revision": revision, "trial": m.trial.id, "arm": m.arm, "cell": m.cell, "position": i}
            for i, m in enumerate(members, first)
        ]
        if members:
            with self._write() as db:
                db.execute(self._insert(trial_t), trials)
                db.execute(self._insert(membership_t), rows)

    def sweeps_of(self, trial_ids: Iterable[str]) -> dict[str, list[str]]:
        """Which sweeps each trial is in, whatever the revision."""
        query = sa.select(membership_t.c.trial, membership_t.c.sweep).distinct().order_by(membership_t.c.sweep)
        found: dict[str, list[str]] = {trial_id: [] for trial_id in trial_ids}
        with self._read() as db:
            for trial, sweep in db.execute(query):
                if trial in found:
                    found[trial].append(sweep)
        return found

    # ---- trials ------------------------------------------------------------------------------------------------

    def rows(self, sweep: str, revision: int) -> dict[str, Row]:
        """The trials of one revision, in plan order."""
        is_member = (membership_t.c.sweep == sweep) & (membership_t.c.revision == revision)
        query = self._rows().join(membership_t, (membership_t.c.trial == trial_t.c.id) & is_member)
        with self._read() as db:
            return {row.id: read_row(row) for row in db.execute(query.order_by(membership_t.c.position))}

    def row(self, trial_id: str) -> Row | None:
        with self._read() as db:
            found = db.execute(self._rows().where(trial_t.c.id == trial_id)).one_or_none()
        return read_row(found) if found else None

    def _rows(self) -> sa.Select[Any]:
        expired = sa.case((trial_t.c.expires < Now(), 1), else_=0).label("expired")
        return sa.select(trial_t, expired)

    def evaluations(self, trial_ids: Iterable[str]) -> dict[str, set[str]]:
        """Slices known to be evaluated, by trial."""
        found: dict[str, set[str]] = {trial_id: set() for trial_id in trial_ids}
        with self._read() as db:
            for trial, part in db.execute(sa.select(evaluation_t.c.trial, evaluation_t.c.slice)):
                if trial in found:
                    found[trial].add(part)
        return found

    def attempts(self, trial_id: str) -> list[dict[str, Any]]:
        """The trial's history, oldest first."""
        query = sa.select(attempt_t).where(attempt_t.c.trial == trial_id).order_by(attempt_t.c.number)
        with self._read() as db:
            return [dict(row) for row in db.execute(query).mappings()]

    def spans(self, sweep: str, without: str = "") -> list[Span]:
        """What the sweep's trials took, all revisions and attempts; without what the owner `without` runs now."""
        ours = sa.select(membership_t.c.trial).where(membership_t.c.sweep == sweep)
        columns = (attempt_t.c.trial, attempt_t.c.started, attempt_t.c.ended, attempt_t.c.gpu)
        running_there = attempt_t.c.ended.is_(None) & (attempt_t.c.owner == without)
        query = sa.select(*columns).where(attempt_t.c.trial.in_(ours), attempt_t.c.started.is_not(None), ~running_there)
        with self._read() as db:
            return [Span(trial, started, ended, gpu or 0.0) for trial, started, ended, gpu in db.execute(query)]

    def begun(self, sweep: str) -> int:
        """How many of the sweep's trials were ever begun, all revisions."""
        ours = sa.select(membership_t.c.trial).where(membership_t.c.sweep == sweep)
        count = sa.func.count(sa.distinct(attempt_t.c.trial))
        with self._read() as db:
            return int(db.execute(sa.select(count).where(attempt_t.c.trial.in_(ours))).scalar_one())

    def take_in(self, trial_id: str, status: Status, slices: Iterable[str]) -> None:
        """Copy what the folder says: a result, and which slices are evaluated."""
        where = (trial_t.c.id == trial_id) & (trial_t.c.status != status) & trial_t.c.owner.is_(None)
        new: dict[str, Any] = {"status": status.value, "failure": None, "error": None, "updated": Now()}
        done = [{"trial": trial_id, "slice": part, "done": time.time()} for part in slices]
        with self._write() as db:
            db.execute(sa.update(trial_t).where(where).values(new))
            if done:
                db.execute(self._insert(evaluation_t), done)

    def forget_result(self, trial_id: str) -> None:
        """The folder no longer has what the row says: the trial is planned again."""
        where = (trial_t.c.id == trial_id) & trial_t.c.owner.is_(None)
        planned: dict[str, Any] = {"status": Status.PLANNED.value, "failure": None, "error": None, "updated": Now()}
        with self._write() as db:
            db.execute(sa.update(trial_t).where(where).values(planned))
            db.execute(sa.delete(evaluation_t).where(evaluation_t.c.trial == trial_id))

    # ---- leases ------------------------------------------------------------------------------------------------

    def register(self, owner: Owner) -> None:
        row = {"uuid": owner.uuid, "host": owner.host, "begun": owner.begun, "machine": owner.machine}
        with self._write() as db:
            db.execute(self._insert(driver_t), row | {"pid": owner.pid, "started": time.time()})

    def leave(self, owner: Owner) -> None:
        """Give everything back: the driver ends."""
        self._release(owner.uuid)
        with self._write() as db:
            db.execute(sa.delete(driver_t).where(driver_t.c.uuid == owner.uuid))

    def claim(self, trial_id: str, owner: Owner, *, above: int = 0, gpu: float = 0.0) -> int | None:
        """Take the trial for LEASE_S: the new attempt's number, or None if somebody holds it.

        `above` is the highest attempt number seen in the folder: numbers only rise, even past a lost ledger. `gpu` is
        what the attempt counts for: cards, or the share of one.
        """
        last = sa.case((trial_t.c.attempt > above, trial_t.c.attempt), else_=above)
        free = trial_t.c.owner.is_(None) | (trial_t.c.expires < Now())
        new: dict[str, Any] = {"owner": owner.uuid, "expires": Now() + LEASE_S, "attempt": last + 1}
        new |= {"status": Status.RUNNING.value, "failure": None, "error": None, "updated": Now()}
        with self._write() as db:
            held_until = db.execute(sa.select(trial_t.c.expires).where(trial_t.c.id == trial_id)).scalar()
            if db.execute(sa.update(trial_t).where((trial_t.c.id == trial_id) & free).values(new)).rowcount != 1:
                return None
            number = int(db.execute(sa.select(trial_t.c.attempt).where(trial_t.c.id == trial_id)).scalar_one())
            open_before = (attempt_t.c.trial == trial_id) & attempt_t.c.ended.is_(None)
            gone = {"status": Status.INTERRUPTED.value, "ended": _last_seen(held_until)}
            db.execute(sa.update(attempt_t).where(open_before).values(gone))
            row = {"trial": trial_id, "number": number, "owner": owner.uuid, "started": time.time(), "gpu": gpu}
            db.execute(self._insert(attempt_t), row | {"status": Status.RUNNING.value})
        return number

    def renew(self, owner: Owner) -> set[str]:
        """Prolong every lease the driver holds: the trials that are still its own."""
        mine = trial_t.c.owner == owner.uuid
        with self._write() as db:
            db.execute(sa.update(trial_t).where(mine).values(expires=Now() + LEASE_S))
            return set(db.execute(sa.select(trial_t.c.id).where(mine)).scalars())

    def finish(self, outcome: Outcome, slices: Iterable[str] = ()) -> bool:
        """Write how an attempt ended and free the trial. False, and no change, if a newer attempt has it."""
        ended: dict[str, Any] = {"status": outcome.status.value, "failure": outcome.failure, "error": outcome.error}
        where = (trial_t.c.id == outcome.trial_id) & (trial_t.c.attempt == outcome.attempt)
        this = (attempt_t.c.trial == outcome.trial_id) & (attempt_t.c.number == outcome.attempt)
        done = [{"trial": outcome.trial_id, "slice": part, "done": time.time()} for part in slices]
        free: dict[str, Any] = {"owner": None, "expires": None, "updated": Now()}
        with self._write() as db:
            if db.execute(sa.update(trial_t).where(where).values(ended | free)).rowcount != 1:
                return False
            now = time.time()
            # The attempt began when its worker did, not when it was claimed: it may have waited for one.
            worked = {"ended": now} | ({} if outcome.seconds is None else {"started": now - outcome.seconds})
            db.execute(sa.update(attempt_t).where(this).values({**ended, **worked}))
            if done:
                db.execute(self._insert(evaluation_t), done)
        return True

    def drivers(self) -> list[Owner]:
        """Drivers that came and have not left, dead ones too."""
        with self._read() as db:
            return [Owner(r.uuid, r.host, r.pid, r.begun, r.machine) for r in db.execute(sa.select(driver_t))]

    def release_dead(self) -> list[Owner]:
        """Free what drivers hold that are provably dead; the others' leases run out by themselves."""
        dead = [owner for owner in self.drivers() if owner.is_dead()]
        for owner in dead:
            self.leave(owner)
        return dead

    def _release(self, owner_uuid: str) -> None:
        gone = {"status": Status.INTERRUPTED.value, "owner": None, "expires": None, "updated": Now()}
        is_open = (attempt_t.c.owner == owner_uuid) & attempt_t.c.ended.is_(None)
        with self._write() as db:
            held = trial_t.c.owner == owner_uuid
            ended = _last_seen(db.execute(sa.select(sa.func.max(trial_t.c.expires)).where(held)).scalar())
            db.execute(sa.update(trial_t).where(held).values(gone))
            is_gone = {"status": Status.INTERRUPTED.value, "ended": ended}
            db.execute(sa.update(attempt_t).where(is_open).values(is_gone))
            mine = projector_t.c.owner == owner_uuid
            db.execute(sa.update(projector_t).where(mine).values(owner=None, expires=None))

    # ---- the projection to MLflow ------------------------------------------------------------------------------

    def claim_projector(self, uri: str, experiment: str, owner: Owner) -> bool:
        """Become (or stay) the one driver that writes this experiment on this server, for LEASE_S."""
        key = (projector_t.c.uri == uri) & (projector_t.c.experiment == experiment)
        free = projector_t.c.owner.is_(None) | (projector_t.c.owner == owner.uuid) | (projector_t.c.expires < Now())
        with self._write() as db:
            db.execute(self._insert(projector_t), {"uri": uri, "experiment": experiment})
            new = {"owner": owner.uuid, "expires": Now() + LEASE_S}
            return db.execute(sa.update(projector_t).where(key & free).values(new)).rowcount == 1

    def release_projector(self, uri: str, experiment: str, owner: Owner) -> None:
        key = (projector_t.c.uri == uri) & (projector_t.c.experiment == experiment)
        with self._write() as db:
            where = key & (projector_t.c.owner == owner.uuid)
            db.execute(sa.update(projector_t).where(where).values(owner=None, expires=None))

    def projector(self, uri: str, experiment: str) -> dict[str, Any] | None:
        key = (projector_t.c.uri == uri) & (projector_t.c.experiment == experiment)
        with self._read() as db:
            found = db.execute(sa.select(projector_t).where(key)).mappings().one_or_none()
        return dict(found) if found else None

    def problems(self, experiment: str) -> list[str]:
        """What last kept this experiment's projections from being up to date."""
        query = sa.select(projector_t.c.problem).where(projector_t.c.experiment == experiment)
        with self._read() as db:
            return [problem for problem in db.execute(query).scalars() if problem]

    def set_projector(self, uri: str, experiment: str, **values: str | None) -> None:
        key = (projector_t.c.uri == uri) & (projector_t.c.experiment == experiment)
        with self._write() as db:
            db.execute(sa.update(projector_t).where(key).values(values))

    def projections(self, uri: str, experiment: str) -> dict[str, dict[str, Any]]:
        """What was sent, by trial: run id, last step sent, and a digest of the state sent last."""
        key = (projection_t.c.uri == uri) & (projection_t.c.experiment == experiment)
        with self._read() as db:
            return {row["trial"]: dict(row) for row in db.execute(sa.select(projection_t).where(key)).mappings()}

    def set_projection(self, uri: str, experiment: str, trial: str, **values: Any) -> None:
        """Note the run of a trial and what it has been sent: `run`, `step`, `sent`."""
        key = {"uri": uri, "experiment": experiment, "trial": trial}
        where = sa.and_(*(projection_t.c[name] == value for name, value in key.items()))
        with self._write() as db:
            db.execute(self._insert(projection_t), key)
            db.execute(sa.update(projection_t).where(where).values(values))

    def forget_projections(self, uri: str, experiment: str, trial: str | None = None) -> None:
        """The server no longer has what was sent there (of one trial): it is to be sent again."""
        with self._write() as db:
            where = (projection_t.c.uri == uri) & (projection_t.c.experiment == experiment)
            where &= projection_t.c.trial == trial if trial else sa.true()
            db.execute(sa.delete(projection_t).where(where))

    # ---- from the folders --------------------------------------------------------------------------------------

    def rebuild(self, store: Store) -> dict[str, int]:
        """Make the rows again from the folders: how many sweeps, revisions and trials were found.

        Raises `UserError` while a driver is at work. What was sent to MLflow is kept where known, else asked there.
        """
        self.release_dead()
        if alive := self.drivers():
            raise UserError(f"cannot rebuild the ledger while {alive[0]} is launching", Exit.ENVIRONMENT)
        with self._write() as db:
            for table in (membership_t, revision_t, sweep_t, attempt_t, evaluation_t, trial_t):
                db.execute(sa.delete(table))
        found = {"sweeps": 0, "revisions": 0, "trials": 0}
        for sweep in store.sweeps():
            found["sweeps"] += 1
            for revision in store.revisions(sweep):
                found["revisions"] += 1
                plan = store.plan(sweep, revision)[1]
                self.record_plan(plan, revision)
                if plan.searches:
                    self.add_members(sweep, revision, Searches(plan, store).view().members, len(plan.members))
        for trial_id in store.trial_ids():
            found["trials"] += self._rebuild_trial(store, trial_id)
        return found

    def _rebuild_trial(self, store: Store, trial_id: str) -> bool:
        folder = store.trial_folder(trial_id)
        if not isinstance(read_json(folder / "settings.json"), dict):
            return False
        last = store.last_attempt(trial_id)
        attempts = [row for number in range(1, last + 1) if (row := _attempt_row(folder, trial_id, number))]
        result = store.result(trial_id)
        state: dict[str, Any] = {"status": Status.PLANNED.value, "failure": None, "error": None}
        if attempts and (result is None or attempts[-1]["status"] == Status.FAILED):  # trained, and failed after that
            state = {name: attempts[-1][name] for name in state}
        elif result:
            state["status"] = result["status"]
        with self._write() as db:
            db.execute(self._insert(trial_t), {"id": trial_id})
            where = trial_t.c.id == trial_id
            db.execute(sa.update(trial_t).where(where).values({**state, "attempt": last, "updated": Now()}))
            if attempts:
                db.execute(self._insert(attempt_t), attempts)
        if result:
            ids = [path.stem for path in (folder / "evals").glob("*.json") if store.evaluation(trial_id, path.stem)]
            self.take_in(trial_id, Status(state["status"]), ids)
        return True


def _attempt_row(folder: Path, trial_id: str, number: int) -> dict[str, Any] | None:
    if not (folder / "attempts" / str(number)).is_dir():
        return None
    outcome = read_json(folder / "attempts" / str(number) / "outcome.json") or {}
    row = {name: outcome.get(name) for name in ("failure", "error", "gpu")}
    status, ended = outcome.get("status", Status.INTERRUPTED.value), outcome.get("time")
    known = ended is not None and outcome.get("seconds") is not None
    row["started"] = ended - outcome["seconds"] if known else None
    return {"trial": trial_id, "number": number, "status": status, "ended": ended, **row}


def _last_seen(expires: float | None) -> float:
    """When a driver was surely at work for the last time, by the lease it held: a dead one spent nothing since."""
    return time.time() if expires is None else min(time.time(), expires - LEASE_S + RENEW_S)


def _add_columns(db: sa.Connection) -> None:
    """Columns that a ledger made by an earlier version lacks."""
    for table in _tables.sorted_tables:
        there = {column["name"] for column in sa.inspect(db).get_columns(table.name)}
        for column in table.columns:
            if column.name not in there:
                kind = column.type.compile(db.dialect)
                db.execute(sa.DDL(f"alter table {table.name} add column {column.name} {kind}"))


def read_row(row: Any) -> Row:
    """A row of the trial table with `expired` beside it, read with its lease."""
    status = Status(row.status)
    if status == Status.RUNNING and (row.expired or row.owner is None):
        status = Status.INTERRUPTED
    owner = None if row.expired else row.owner
    return Row(row.id, status, row.attempt or 0, owner, row.failure, row.error)
