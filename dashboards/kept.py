"""What takes seconds to make, kept from one report to the next: tables of big sweeps, and the script that draws charts.

Ten thousand trials are 40,000 files. Their tables are known by the time and size of every file behind them, so they are
never out of date. All of it lies in the user's own cache folder, not in the store, for a pickle is code, and so is a
script: both are only read where nobody else can write.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from runners.schema import Plan
from runners.store import last_attempt

FROM = 1_000
"""Members of a plan from which on tables are kept."""
MOST = 8
"""Kept of a kind; of more, those longest unread go."""

Tables = TypeVar("Tables")


def kept(plan: Plan, store: Path, known: Mapping[str, Any], read: Callable[[], Tables]) -> Tables:
    """`read()`, or what it gave when everything was as it is now."""
    folder = _own_folder() if len(plan.members) >= FROM else None
    if folder is None:
        return read()
    path = folder / f"{_signature(plan, store, known)}.pickle"
    try:
        with open(path, "rb") as file:
            found: Tables = pickle.load(file)
        os.utime(path)
        return found
    except FileNotFoundError:
        pass
    except Exception:  # whatever a torn pickle, or one of another library's version, may raise
        path.unlink(missing_ok=True)
    found = read()
    _keep(path, pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL))
    return found


def kept_text(name: str, make: Callable[[], str]) -> str:
    """`make()`, or what it gave before; `name` says of what versions."""
    folder = _own_folder()
    if folder is None:
        return make()
    path = folder / name
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        found = make()
        _keep(path, found.encode())
    return found


def _keep(path: Path, content: bytes) -> None:
    """Best effort: a full disk costs the next look its time, and nothing else."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
        for old in sorted(path.parent.glob(f"*{path.suffix}"), key=lambda p: p.stat().st_mtime)[:-MOST]:
            old.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _own_folder() -> Path | None:
    """Made if missing; None where it cannot be, or is not the user's alone."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsweep" / "reports"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    return folder if found.st_uid == os.getuid() and not found.st_mode & 0o022 else None


def _signature(plan: Plan, store: Path, known: Mapping[str, Any]) -> str:
    reader = Path(__file__).with_name("table.py").stat().st_mtime_ns
    head = (reader, pd.__version__, sys.version_info, plan.spec_hash, os.fspath(store.resolve()))
    lines = [repr(head), *_lines(plan, os.fspath(store / "trials"), known)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _lines(plan: Plan, trials: str, known: Mapping[str, Any]) -> Iterator[str]:
    for member in plan.members:
        folder = f"{trials}/{member.trial.id}/"
        names = ["result.json", "metrics", *(f"evals/{piece.id}.json" for piece in member.slices)]
        seen = [_state(folder + name) for name in names]
        if None in seen:  # failed, running, diverged: others have a say
            attempt = last_attempt(Path(folder))
            last = _state(f"{folder}attempts/{attempt}/error.txt")
            yield f"{attempt} {last} {known.get(member.trial.id)}"
        yield f"{member.arm} {member.cell} {member.trial.id} {seen}"


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
