"""The commands that follow a running sweep: `sweep status --watch` and `sweep dashboard`. They only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dashboards.live import Snapshot
    from runners.recent import Tally


def watch(folder: Path, name: str | None) -> None:
    """Show a sweep, or the list of them, again and again until Ctrl-C."""
    from rich.console import Console

    from dashboards import live_terminal
    from dashboards.live import Follower
    from runners.recent import tallies
    from runners.store import Store

    store = Store.open(folder)
    if name is None and len(store.sweeps()) == 1:
        name = store.sweeps()[0]
    follower = Follower(store, name) if name is not None else None

    def look() -> Sequence[Snapshot | Tally]:
        return [follower.look()] if follower is not None else tallies(store)

    live_terminal.watch(look, Console(highlight=False, markup=False))
