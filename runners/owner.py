"""Who holds a lease or runs a trial: one process, named so that its death can be proved on its own machine."""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A driver or a worker.

    `host` is this boot and process namespace, `begun` when the process started: process ids are used again.
    """

    uuid: str
    host: str
    pid: int
    begun: str
    machine: str

    @classmethod
    def me(cls) -> Owner:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The process `pid` of this machine."""
        return cls(str(uuid.uuid4()), _host(), pid, _begun(pid) or "", platform.node())

    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine since it was started, and its number means something here."""
        return bool(self.host) and self.host == _host()

    def is_dead(self) -> bool:
        """Whether the process is surely gone. False where that cannot be told, as from another machine."""
        return self.is_here() and bool(self.begun) and _begun(self.pid) != self.begun

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}"


def _host() -> str:
    """Empty where /proc is missing. Two containers of one machine differ: neither sees the other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begun(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None if there is none (or only its unreaped shell)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in brackets and may hold spaces and brackets; state is field 3, start time 22.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
