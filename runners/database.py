"""A database under the ledger: SQLite (WAL) or PostgreSQL with the same statements, and what is said of a bad one."""

from __future__ import annotations

import os
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from runners.redact import redact, shown
from runners.schema import Exit, UserError
from runners.store import LEDGER_VARIABLE

BUSY_S = 60.0
"""How long a write waits for a database that another process holds. A lease is no longer: who has waited in vain has
nothing left to write."""
CONNECT_S = 10
"""How long a server may take to answer."""
_SQLITE_WAITS_S = 2.0


class Now(FunctionElement[float]):
    """Seconds since 1970 by the clock of the database."""

    type = sa.Float()
    inherit_cache = True


@compiles(Now, "sqlite")
def _now_sqlite(_element: Any, _compiler: Any, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(Now, "postgresql")
def _now_postgresql(_element: Any, _compiler: Any, **_: Any) -> str:
    return "extract(epoch from clock_timestamp())"


class Database:
    """An open database. One instance may be used from several threads.

    Raises `UserError` for a URL that is none, or whose driver is missing; whether it answers is seen at first use.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._url, self._read_only = url, read_only
        try:
            self._engine = _engine(url, read_only)
        except ImportError as error:
            extra = "pip install 'memsweep[postgres]'" if "psycopg" in str(error) else "install it"
            raise UserError(f"the ledger {shown(url)} needs {error.name}: {extra}", Exit.ENVIRONMENT) from error
        except (sa.exc.ArgumentError, ValueError):  # their words may hold the URL
            what = shown(url) if "://" in url else "(not shown)"  # who knows what was put there
            raise UserError(
                f"the ledger's URL {what} cannot be used: give sqlite:////absolute/ledger.db or "
                f"postgresql+psycopg2://user:password@host/database ({LEDGER_VARIABLE}, or store.json)",
                Exit.ENVIRONMENT,
            ) from None
        self._busy_since: float | None = None
        # SQLite: a write takes the lock at BEGIN; one that started as a read could not wait for it.
        self._reads = self._engine.execution_options(memsweep_read=True)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that may write."""
        with ExitStack() as stack:
            yield self._begin(stack)

    def _begin(self, stack: ExitStack) -> sa.Connection:
        """A transaction that may write. While somebody else holds the database it waits, BUSY_S in all.

        The pauses are random, so that drivers that wait do not come back together; and the clock runs on between two
        calls, so that a driver that has waited in vain ends soon.
        """
        while True:
            try:
                db = stack.enter_context(self._engine.begin())
            except sa.exc.OperationalError as error:
                now = time.monotonic()
                self._busy_since = self._busy_since or now
                if not _is_busy(error) or now - self._busy_since > BUSY_S:
                    raise
                time.sleep(random.uniform(0.02, 0.2))
            else:
                self._busy_since = None
                return db

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that only reads. Raises `UserError` for a read-only database that does not answer."""
        try:
            with self._reads.connect() as db:
                yield db
        except sa.exc.DatabaseError as error:
            if self._read_only:  # a driver has its own words for one that went while it worked
                raise self.refused(error) from error
            raise

    def insert(self, table: sa.Table) -> Any:
        """INSERT that leaves a row as it is if its key is there."""
        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        return insert(table).on_conflict_do_nothing()

    def lock_schema(self, db: sa.Connection) -> None:
        """Let one driver at a time make tables: "create if missing" fails where two do it at once.

        SQLite's BEGIN has locked already.
        """
        if self._engine.dialect.name == "postgresql":
            db.exec_driver_sql("select pg_advisory_xact_lock(7236)")

    def refused(self, error: sa.exc.DatabaseError) -> UserError:
        """What to tell the user of a database that could not be opened."""
        parsed, what = sa.engine.make_url(self._url), shown(self._url)
        said = redact(str(error.orig).strip().partition("\n")[0], self._url).rstrip(".")
        is_sqlite, folder = parsed.get_backend_name() == "sqlite", Path(parsed.database or ".").parent
        if isinstance(error, sa.exc.OperationalError) and _is_busy(error):
            text = f"another process has held the ledger {what} locked for {BUSY_S:.0f} s: wait for it, or end it"
        elif is_sqlite and not self._read_only and folder.exists() and not _may_write(parsed):
            text = (
                f"cannot open the ledger {what}: {folder} cannot be written. Make it writable, or use another "
                "--store; `sweep status` and `sweep report --out FOLDER` only read"
            )
        elif is_sqlite:
            text = (
                f"cannot open the ledger {what}: {said}. If the file is damaged, move it away: "
                "`sweep doctor --rebuild` makes it again from the trial folders"
            )
        else:
            text = (
                f"cannot open the ledger {what}: {said}. Is the server up, is the database there, may this user make "
                f"tables in it? ({LEDGER_VARIABLE}, or store.json; `sweep doctor --rebuild` fills an empty one)"
            )
        return UserError(text, Exit.ENVIRONMENT)


def _engine(url: str, read_only: bool) -> sa.Engine:
    parsed = sa.engine.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return sa.create_engine(parsed, pool_pre_ping=True, connect_args=patience(parsed))
    path = parsed.database
    if read_only:
        # Without write permission SQLite cannot make the files it shares with writers; if there are none, nobody
        # writes, and the file may be read as it is.
        alone = not Path(f"{path}-wal").exists()
        mode = "immutable=1" if alone and not _writable(Path(path or ".").parent) else "mode=ro"
        parsed = sa.engine.make_url(f"sqlite:///file:{path}?{mode}&uri=true")
    engine = sa.create_engine(parsed, connect_args={"timeout": 30, "check_same_thread": False})

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # BEGIN is ours, below
        if not read_only:
            connection.execute(f"PRAGMA busy_timeout = {1000 * _SQLITE_WAITS_S:.0f}")
            _write_ahead(connection)
            connection.execute("PRAGMA synchronous = NORMAL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        is_read = read_only or connection.get_execution_options().get("memsweep_read")
        connection.exec_driver_sql("BEGIN" if is_read else "BEGIN IMMEDIATE")

    return engine


def patience(url: sa.URL) -> dict[str, Any]:
    """What makes a driver give up on a server that does not answer, unless the URL says how long to wait."""
    is_known = url.get_dialect().driver in ("psycopg2", "psycopg") and "connect_timeout" not in url.query
    return {"connect_timeout": CONNECT_S} if is_known else {}


def _is_busy(error: sa.exc.OperationalError) -> bool:
    return bool(re.search("database (table )?is locked", str(error.orig)))


def _write_ahead(connection: Any) -> None:
    """Switch to WAL. SQLite does not wait for the lock that this takes, so wait here: drivers may start together."""
    for attempt in range(100):
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if attempt == 99:
                raise
            time.sleep(0.05)


def _may_write(url: sa.URL) -> bool:
    """Whether SQLite may write the database and make the files that it needs beside it."""
    path = Path(url.database or "")
    return _writable(path.parent) and (not path.exists() or _writable(path))


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK)
