"""What guards a launch while it works: leases that are renewed, and signals that stop it at a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SAME_S = 1.0
"""`timeout` and batch systems signal the process and then its group: what follows within this time is the same one."""


@contextlib.contextmanager
def renewing(
    renew: Callable[[], Any], lost: Callable[[Exception], None], every_s: float, lease_s: float
) -> Iterator[None]:
    """Call `renew` every `every_s`; when that has not worked for `lease_s`, call `lost` with the reason."""
    over = threading.Event()

    def work() -> None:
        renewed = time.monotonic()
        while not over.wait(every_s):
            try:
                renew()
                renewed = time.monotonic()
            except Exception as error:
                if time.monotonic() - renewed > lease_s:
                    lost(error)

    thread = threading.Thread(target=work, name="leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)


@contextlib.contextmanager
def signals(first: Callable[[str], None]) -> Iterator[None]:
    """The first signal calls `first` with its name, a second one ends the process at once.

    Only the main thread may listen; in another one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    since: float | None = None

    def stop(number: int, _frame: Any) -> None:
        nonlocal since
        if since is None:
            since = time.monotonic()
            first(signal.Signals(number).name)
        elif time.monotonic() - since >= SAME_S:
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
