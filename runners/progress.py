"""How a launch tells a person where it is: one live line on a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PLAIN_EVERY_S = 10.0
LIVE_EVERY_S = 0.5


@dataclass(frozen=True)
class Tally:
    """Counts of one launch. `running` maps a running trial's name to the share of it that is done (0 to 1)."""

    total: int
    done: int
    failed: int
    running: dict[str, float]
    seconds: float
    pace: float | None = None
    """Trials' worth of work a second, once it is known."""

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace so far; None before there is a pace."""
        if not self.pace:
            return None
        return max(0.0, self.total - self.done - self.failed - sum(self.running.values())) / self.pace

    def __str__(self) -> str:
        is_starting = not self.running and not self.done and not self.failed
        parts = [f"{self.done}/{self.total} done", "starting" if is_starting else f"{len(self.running)} running"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        parts.append(f"{clock(self.seconds)} gone")
        if self.left_s is not None and self.done + self.failed < self.total:
            parts.append(f"about {clock(self.left_s)} left")
        return " · ".join(parts)


class Pace:
    """Trials a second since the first one ended: what came before, starting workers and imports, comes once."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def __call__(self, ended: int, worked: float, now: float) -> float | None:
        """`worked` counts ended trials and running ones by their share; None until it has grown by half a trial."""
        if ended == 0:
            return None
        if self._first is None:
            self._first = (now, worked)
        since, before = self._first
        return (worked - before) / (now - since) if worked - before >= 0.5 and now > since else None


def clock(seconds: float) -> str:
    """`9s`, `1:05`, `2:00:00`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Display:
    """Shows a tally. Use as a context; lines said meanwhile appear above the live line."""

    def __init__(self, say: Callable[[str], None], live: bool) -> None:
        self._say, self._is_live = say, live
        self._live: Any = None
        self._shown = 0.0
        self._last = ""

    def __enter__(self) -> Display:
        self._shown = time.monotonic()
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, tally: Callable[[], Tally], *, now: bool = False) -> None:
        """Show the tally if it is time to; it is made only then."""
        every = LIVE_EVERY_S if self._live is not None else PLAIN_EVERY_S
        if not now and time.monotonic() - self._shown < every:
            return
        self._shown = time.monotonic()
        found = tally()
        if self._live is not None:
            from rich.text import Text

            share = " · ".join(f"{name} {100 * part:.0f}%" for name, part in list(found.running.items())[:4])
            self._live.update(Text(f"{found}   {share}", overflow="ellipsis", no_wrap=True), refresh=True)
        elif (text := str(found)) != self._last:
            self._last = text
            self._say(text)
