"""Keeps other launches off the machine while trials are timed (`resources: {alone: true}`).

Every launch of a user holds a lock of this machine while it works: shared, or by itself for timing. A launch that has
to wait says so. Not covered: other users, other machines of a cluster, and programs that are not ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.2


def lock_file() -> Path:
    return Path(tempfile.gettempdir()) / f"memsweep-{os.getuid()}.lock"


@contextlib.contextmanager
def machine(
    is_alone: bool, *, say: Callable[[str], None], should_stop: Callable[[], bool], tick: Callable[[], None]
) -> Iterator[None]:
    """Hold the machine, by itself or shared with other launches; entered without it once `should_stop` says so."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(lock_file(), "a"))
        except OSError as error:
            if is_alone:
                say(f"note: resources.alone: other launches cannot be kept off this machine: {error}")
            yield
            return
        wanted, is_told = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH, False
        while not should_stop():
            try:
                fcntl.flock(file, wanted | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_told:
                    is_told = True
                    other = "other launches" if is_alone else "a launch that times its trials alone"
                    say(f"waiting for {other} on this machine to end (resources.alone)")
                tick()
                time.sleep(POLL_S)
        yield
