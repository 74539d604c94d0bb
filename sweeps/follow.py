"""The commands that follow a running sweep: `sweep status --watch` and `sweep dashboard`. They only read."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runners.schema import UserError
from sweeps import stores
from sweeps.operate import StoreOption

if TYPE_CHECKING:
    from dashboards.live_site import Site
    from dashboards.live_snapshot import Snapshot
    from runners.recent import Tally


def add_commands(app: typer.Typer) -> None:
    """Register this file's command on the command line."""
    app.command()(dashboard)


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


def dashboard(
    name: Annotated[
        str | None, typer.Argument(help="Sweep to begin with; the list of all without it.", show_default=False)
    ] = None,
    store: StoreOption = None,
    port: Annotated[int | None, typer.Option("--port", help="Port.", show_default="8270, or a free one")] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than this machine's own are open to everybody.")
    ] = "127.0.0.1",
) -> None:
    """Follow running sweeps on a local web page: progress, curves, results and failures, from the store alone."""
    from urllib.parse import quote

    from dashboards.live_server import Server
    from dashboards.live_site import Site
    from runners.store import Store

    opened = Store.open(stores.find(store, name))
    if name is not None:
        opened.revisions(name) or opened.plan(name)  # an unknown name is told with those there are
    site = Site(opened)
    with Server(site, host, port) as server:
        bound = server.server_address[1]
        if server.is_open:
            print(
                f"warning: with --host {host} everybody who reaches port {bound} of this machine reads the settings, "
                "logs and results of this store; there is no password",
                file=sys.stderr,
            )
        print(f"dashboard: {server.url}{f'/sweep/{quote(name)}' if name else ''} (Ctrl-C ends it)")
        if "SSH_CONNECTION" in os.environ and not server.is_open:
            print(f"from the machine you sit at: ssh -L {bound}:127.0.0.1:{bound} {platform.node()}")
        sys.stdout.flush()
        # A plan of ten thousand trials takes a second to read: while the browser opens.
        threading.Thread(target=_open, args=(site, name), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _open(site: Site, name: str | None) -> None:
    with contextlib.suppress(UserError, OSError):  # the page says it
        site.open(name)
