"""Open the MLflow UI on a store: the command line and environment, for the caller to run.

MLflow's job runner is switched off and one worker is asked for: 0.5 GB instead of 2.1 GB of memory, and nothing of it
is used here. Its telemetry is off: the pages ask nothing of any other machine. The server is bound to 127.0.0.1: it has
no password.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from runners.redact import has_secret, shown
from runners.schema import Exit, UserError

HOST = "127.0.0.1"
DEFAULT_PORT = 5000


def command(store: Path, port: int | None = None, tracking_uri: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The `mlflow ui` command line on `store`, and the environment variables to add to the caller's own.

    `port` None means 5000, or any free port if that is taken; a port asked for by name is never changed silently.
    Raises `UserError` when the store has no MLflow database yet, when `port` is taken or not a port, and for a
    tracking URI that is a server of its own (open it in a browser instead).
    """
    uri = tracking_uri or _default_uri(store)
    if uri.startswith(("http://", "https://", "databricks")):
        raise UserError(
            f"{shown(uri)} is a running MLflow server: open it in a browser, there is nothing to start here"
        )
    artifacts = store.resolve() / "mlartifacts"
    line = [sys.executable, "-m", "mlflow", "ui"]
    extra = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    if has_secret(uri):
        extra["MLFLOW_BACKEND_STORE_URI"] = uri  # every user of the machine may read a command line
    else:
        line += ["--backend-store-uri", uri]
    line += ["--default-artifact-root", str(artifacts)]
    line += ["--host", HOST, "--port", str(_port(port)), "--workers", "1"]
    return line, extra


def address(line: list[str]) -> str:
    """Where the server of a `command` line will answer."""
    return f"http://{HOST}:{line[line.index('--port') + 1]}"


def _default_uri(store: Path) -> str:
    database = store.resolve() / "mlflow.db"
    if not database.is_file():
        raise UserError(
            f"no MLflow database at {database}: `sweep sync` makes it from the ledger; is --store right?",
            Exit.ENVIRONMENT,
        )
    return f"sqlite:///{database}"


def _port(asked: int | None) -> int:
    if asked is None:
        return DEFAULT_PORT if _is_free(DEFAULT_PORT) else _any_free()
    if not 1 <= asked <= 65535:
        raise UserError(f"--port {asked}: a port is a whole number from 1 to 65535; the default is {DEFAULT_PORT}")
    if not _is_free(asked):
        raise UserError(f"--port {asked} is taken on {HOST}; {_any_free()} is free", Exit.ENVIRONMENT)
    return asked


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port that only has closed connections lingering on it counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _any_free() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
