"""A PostgreSQL server of the tests' own, on a socket in a temporary folder: no port, no password, gone at the end.

PostgreSQL refuses to run as root; tests that do start it as the user `postgres`, whom its packages make.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

USER = "postgres"
LAST_WORDS = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}


def missing() -> str | None:
    """Why there can be no server here, or None."""
    if importlib.util.find_spec("psycopg2") is None:
        return "psycopg2 is not installed (pip install psycopg2-binary)"
    if not binaries():
        return "PostgreSQL's server is not installed (apt install postgresql) and MEMSWEEP_TEST_POSTGRES is not set"
    if os.getuid() == 0:
        with contextlib.suppress(KeyError):
            pwd.getpwnam(USER)
            return None
        return f"tests run as root, which PostgreSQL refuses, and there is no user {USER}"
    return None


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: on the PATH, or where Debian keeps the newest."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    usual = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(usual, key=lambda path: float(path.parent.name), default=None)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a running server in which databases may be made."""
    folder = Path(tempfile.mkdtemp(prefix="memsweep-pg-", dir="/tmp"))  # a socket's path has to be short
    who: dict[str, Any] = {}
    if os.getuid() == 0:
        account = pwd.getpwnam(USER)
        os.chown(folder, account.pw_uid, account.pw_gid)
        who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    home = binaries()
    assert home is not None
    make = [home / "initdb", "-D", folder / "data", "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    made = subprocess.run(make, cwd=folder, **LAST_WORDS, **who)
    assert made.returncode == 0, made.stderr
    serve = [home / "postgres", "-D", folder / "data", "-k", folder]
    for setting in ("listen_addresses=", "fsync=off", "full_page_writes=off", "max_connections=60"):
        serve += ["-c", setting]
    with open(folder / "log", "w") as log:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(serve, cwd=folder, process_group=0, **quiet, **who)
    try:
        url = f"postgresql+psycopg2://{USER}@/postgres?host={folder}"
        _wait(url, process, folder / "log")
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # its "fast" shutdown: it does not wait for its clients
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    engine = sa.create_engine(url)
    while True:
        try:
            engine.connect().close()
            return engine.dispose()
        except sa.exc.OperationalError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)


@contextlib.contextmanager
def database(url: str) -> Iterator[str]:
    """The URL of a new, empty database on the server at `url`; it is dropped at the end."""
    name = f"memsweep_{uuid.uuid4().hex[:12]}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.exec_driver_sql(f"create database {name}")
    yield sa.engine.make_url(url).set(database=name).render_as_string(hide_password=False)
    with engine.connect() as db:
        db.exec_driver_sql(f"drop database {name} with (force)")
    engine.dispose()
