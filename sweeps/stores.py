"""Which store a command means: the one given, the one here, or the one where the user launched that sweep.

Stores that were launched in are remembered per user, below XDG_STATE_HOME. The list is a convenience: it may be lost,
torn or unwritable, and then only finds nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from runners.schema import Exit, UserError
from runners.store import DEFAULT_FOLDER, Store, is_torn, read_json, write_json

KEEP = 200
"""Stores remembered, the one launched in last first."""


def here(given: Path | None) -> Path:
    """Where a launch goes: the store that was given, or the one of the current folder."""
    return given if given is not None else Path(DEFAULT_FOLDER)


def find(given: Path | None, sweep: str | None = None) -> Path:
    """The store to look at: given (option or variable), else here, else a remembered one that has `sweep`.

    Without `sweep` any remembered store will do. One that is not obvious is named on stderr. Raises `UserError` where
    several would do, or where none has the sweep.
    """
    if given is not None:
        return given
    local = Path(DEFAULT_FOLDER)
    if _has(local, sweep):
        return local
    found = [path for path in remembered() if _has(path, sweep)]
    if len(found) == 1:
        print(f"store: {found[0]}", file=sys.stderr)
        return found[0]
    what = f"sweep {sweep!r}" if sweep else "sweeps"
    if found:
        listed = "\n".join(f"  --store {path}" for path in found)
        raise UserError(f"{what}: in {len(found)} stores that you launched in; say which:\n{listed}", Exit.USAGE)
    if sweep and not _has(local, None) and not is_torn(local):
        names = sorted({name for path in remembered() for name in _sweeps(path)})
        there = f"; those you launched in have: {', '.join(names)}" if names else ""
        raise UserError(f"no sweep {sweep!r}: there is no store at {local.resolve()}{there}. --store FOLDER names one")
    return local


def _has(path: Path, sweep: str | None) -> bool:
    return (path / "store.json").is_file() and (sweep is None or sweep in _sweeps(path))


def _sweeps(path: Path) -> list[str]:
    try:
        return Store.open(path).sweeps()
    except (UserError, OSError):
        return []


def remember(store: Path) -> None:
    """Note that the user launched in `store`. Trouble with the list is nobody's trouble."""
    path = store.expanduser().resolve()
    with contextlib.suppress(OSError, ValueError), _locked() as file:
        known = [path, *(other for other in _read(file) if other != path)]
        write_json(file, {"stores": [str(one) for one in known[:KEEP]]}, durable=False)


def remembered() -> list[Path]:
    """Stores launched in that are still there, the last one first."""
    try:
        return [path for path in _read(_file()) if (path / "store.json").is_file()]
    except OSError:
        return []


def _read(file: Path) -> list[Path]:
    row = read_json(file)
    listed = row.get("stores") if isinstance(row, dict) else None
    return [Path(one) for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "memsweep" / "stores.json"


@contextlib.contextmanager
def _locked() -> Iterator[Path]:
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_name(".stores.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield file
