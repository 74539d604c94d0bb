"""Which MLflow server is meant, whether it can be used, and what is said of one that cannot; MLflow is not imported."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import sqlalchemy as sa

from runners.database import patience
from runners.redact import has_secret, redact, shown
from runners.schema import Exit, UserError
from runners.store import DEFAULT_FOLDER, STORE_VARIABLE, Store

URI_VARIABLE = "MEMSWEEP_TRACKING_URI"
_SERVERS, _DATABASES = ("http", "https", "databricks"), ("postgresql", "mysql", "mssql")
_PACKAGES = {
    "psycopg2": "'memsweep[postgres]'",
    "psycopg": "'psycopg[binary]', or write postgresql+psycopg2://",
    "MySQLdb": "mysqlclient",
}
"""What to install for a module that has another name, or another way out."""
_AWAY = re.compile(
    "connection refused|connection reset by peer|timed out|timeout expired|name or service not known|"
    "could not translate host name|temporary failure in name resolution|no route to host|network is unreachable|"
    "certificate verify failed|password authentication failed|no password supplied|too many clients already|"
    "remote end closed connection",
    re.IGNORECASE,
)
_LENGTH = 160


def resolve_uri(store: Store, given: str | None) -> str:
    """The server to write to. Raises `UserError` for a folder, which MLflow no longer takes, and for a bad database."""
    if given is None:
        return store.mlflow_uri
    if given.startswith("sqlite:///"):
        return f"sqlite:///{Path(given.removeprefix('sqlite:///')).expanduser().resolve()}"
    scheme = _scheme(given)
    if scheme in _DATABASES:
        _check_database(given)
        return given
    if scheme in _SERVERS or given == "databricks":
        return given
    what = "(not shown)" if "@" in given and "://" not in given else shown(given)
    raise UserError(
        f"--tracking-uri {what}: MLflow no longer keeps runs in plain folders. Use a server "
        f"(http://host:port), sqlite:////absolute/mlflow.db, or leave it out for {store.mlflow_uri}"
    )


def _scheme(uri: str) -> str:
    return uri.split(":", 1)[0].split("+")[0] if "://" in uri else ""


def _check_database(uri: str) -> None:
    try:
        sa.engine.make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        package = _PACKAGES.get(error.name or "", error.name)
        cure = f"needs {error.name}: pip install {package}" if package else f"cannot be used: {error}"
        raise UserError(f"--tracking-uri {shown(uri)} {cure}", Exit.ENVIRONMENT) from error
    except (sa.exc.ArgumentError, ValueError):  # their words may hold the URL
        raise UserError(
            f"--tracking-uri {shown(uri)} cannot be read: it is database://user:password@host:port/name, and in a "
            "password @ is written %40, / %2F and : %3A"
        ) from None


def probe(uri: str) -> None:
    """Raise what the driver says if `uri` is a database on a server that does not answer.

    MLflow itself would try for 100 s.
    """
    if _scheme(uri) not in _DATABASES:
        return
    engine = sa.create_engine(uri, connect_args=patience(sa.engine.make_url(uri)))
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def key(store: Store, uri: str) -> str:
    """How the ledger calls a server: without its password, and the store's own by a name that survives a move."""
    return "store" if uri == store.mlflow_uri else shown(uri)


def command(store: Store, uri: str, *words: str) -> str:
    """`sweep` with `words`, in words that mean this store and this server wherever they are pasted, quoted."""
    line, after = ["sweep", *words], ""
    if uri != store.mlflow_uri and os.environ.get(URI_VARIABLE) != uri:
        if has_secret(uri):
            after = f" with {URI_VARIABLE} set to {shown(uri)} and its password"
        else:
            line += ["--tracking-uri", uri]
    if Path(os.environ.get(STORE_VARIABLE) or DEFAULT_FOLDER).expanduser().resolve() != store.root:
        line += ["--store", str(store.root)]
    return f"`{shlex.join(line)}`{after}"


def explain(error: Exception, uri: str = "", store: Store | None = None) -> str:
    """What went wrong in one short sentence without a password; for a broken file, with the cure."""
    text = str(error).strip()
    broken = re.search("database disk image is malformed|file is not a database", text)
    if broken and uri.startswith("sqlite:///"):
        again = command(store, uri, "sync") if store else "`sweep sync`"
        return f"{uri.removeprefix('sqlite:///')} is damaged ({broken[0]}): move it away, then run {again}"
    if isinstance(error, UserError):
        return text
    if uri and (away := _AWAY.search(text)):
        return f"{shown(uri)} cannot be reached ({away[0].lower()})"
    if uri and (code := re.search(r"failed with error code (\d{3})", text)):
        return f"{shown(uri)} answered with error {code[1]}"
    line = redact(text.partition("\n")[0], uri)
    if len(line) > _LENGTH:
        line = line[:_LENGTH].rpartition(" ")[0] + " …"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def behind(problem: str, store: Store, uri: str) -> str:
    """`problem`, with what catches up unless it says so itself."""
    return problem if "`sweep " in problem else f"{problem}; {command(store, uri, 'sync')} catches up"
