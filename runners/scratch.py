"""Folders for temporary files of Ray, one a driver on the machine it runs on: named so that the dead ones are found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runners.owner import Owner
from runners.store import read_json, write_json

PREFIX = "memsweep-ray-"
OWNER_FILE = "owner.json"
SERVICE = "mps"
"""The folder in it where NVIDIA's Multi-Process Service has its pipes, if the driver started one."""
_LONGEST = (107 if sys.platform == "linux" else 103) - 70
"""Bytes of a path that is short enough for the sockets that Ray puts below it; the system bounds their length."""


def places() -> set[Path]:
    """Where such folders are made: the usual place, and /tmp where paths there would be too long for sockets."""
    return {Path(tempfile.gettempdir()), Path("/tmp")}


def dead() -> Iterator[Path]:
    """This user's folders whose driver has ended without removing them."""
    for folder in {found for place in places() for found in place.glob(f"{PREFIX}*")}:
        with contextlib.suppress(FileNotFoundError):  # a launch removes it too
            row = read_json(folder / OWNER_FILE) if folder.lstat().st_uid == os.getuid() else None
            if isinstance(row, dict) and Owner(**row).is_dead():
                yield folder


def make() -> Path:
    """A folder of this driver; those of drivers that died on this machine are removed."""
    from runners import mps

    for folder in dead():
        mps.end_left(folder / SERVICE)
        shutil.rmtree(folder, ignore_errors=True)
    usual = Path(tempfile.gettempdir())
    fits = len(os.fsencode(usual / f"{PREFIX}12345678")) <= _LONGEST
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=usual if fits else "/tmp"))
    write_json(made / OWNER_FILE, dataclasses.asdict(Owner.me()), durable=False)
    return made
