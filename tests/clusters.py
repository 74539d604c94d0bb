"""Ray clusters of the tests' own: nodes that are processes of this machine, on loopback addresses of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # One question "are you there?" every half second; a node that lets several pass is given up.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
_STORE = 80 * 2**20


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[tuple[str, list[Any]]]:
    """The address of a cluster and its nodes: `nodes` with one CPU each, beside a head that takes no trials.

    The head is at 127.0.0.2 (Ray takes 127.0.0.1 for the address that the network sees), the others follow.
    """
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(VARIABLES)
    made = Cluster()
    try:
        made.add_node(num_cpus=0, node_ip_address="127.0.0.2", include_dashboard=False, object_store_memory=_STORE)
        others = [
            made.add_node(num_cpus=1, node_ip_address=f"127.0.0.{3 + n}", object_store_memory=_STORE, wait=False)
            for n in range(nodes)
        ]
        made.wait_for_nodes(60)
        yield made.address, others
    finally:
        for node in others:
            kill(node)  # one that was frozen would outlive the others
        made.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def processes(node: Any) -> list[int]:
    """A node's server and everything below it, its workers too."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    servers = node.all_processes.get("raylet", [])
    found = [server.process.pid for server in servers if server.process.poll() is None]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def kill(node: Any) -> None:
    """What a power cut does to a node."""
    _signal(node, signal.SIGKILL)


def freeze(node: Any) -> None:
    """What a node does that hangs: it is there, and says nothing."""
    _signal(node, signal.SIGSTOP)


def thaw(node: Any) -> None:
    """It comes back, and does not know that it was given up."""
    _signal(node, signal.SIGCONT)


def _signal(node: Any, number: signal.Signals) -> None:
    for process in processes(node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def lines() -> list[str]:
    """The command lines of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
