"""Whether two machines run the same code of ours: a digest over all that a worker may import, told beside a version."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from runners import stamp
from runners.stamp import ROOMS, driver_code, room, version


class OtherCodeError(Exception):
    """This machine has other code than the driver."""


def here() -> dict[str, str | None]:
    """The code of this process: `code` is 16 hex digits, the same wherever the sources are the same."""
    return {"code": _digest(), "memsweep": version("memsweep"), "commit": stamp.commit()}


def check() -> None:
    """Raise `OtherCodeError`, naming both, if the driver that started this worker runs other code than it has here."""
    driver = driver_code()
    if driver and driver["code"] != _digest():
        mine = {"code": _digest(), "memsweep": version("memsweep"), "commit": None}
        raise OtherCodeError(f"this node has {told(mine)} in {room('runners').parent}, the driver has {told(driver)}")


def told(code: dict[str, str | None]) -> str:
    """`memsweep 2026.12.0 (code 0123456789abcdef, commit 89abcdef)`."""
    commit = code.get("commit")
    parts = [f"code {code['code']}"] + ([f"commit {commit[:8]}"] if commit else [])
    return f"memsweep {code.get('memsweep') or 'from its source'} ({', '.join(parts)})"


def folders() -> list[Path]:
    """The packages that a worker needs."""
    return [room(name) for name in ROOMS]


@functools.cache
def _digest() -> str:
    total = hashlib.sha256()
    for folder in folders():
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{folder.name}/{path.relative_to(folder).as_posix()}".encode() + b"\0")
            total.update(path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
