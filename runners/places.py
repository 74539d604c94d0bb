"""Where a launch runs: this machine, or a Ray cluster that is joined, looked over, and left as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from runners.launching import Say
from runners.resources import Place
from runners.schema import Plan, UserError
from runners.store import Store

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own variable for the cluster to use where none is named; a job that Ray starts has it."""


@contextlib.contextmanager
def reach(
    plan: Plan, store: Store, executor: str, address: str | None, shared: str | None, say: Say
) -> Iterator[Place]:
    """The place that `--address` and `--shared` name, for the length of the context.

    Raises `UserError` for a cluster or storage that cannot be used.
    """
    if executor != "ray":
        if address or shared:
            raise UserError(f"{'--address' if address else '--shared'} goes with --executor ray")
        yield Place(say=say)
        return
    url, storage = shared or store.shared, None
    if url:
        from runners.shared import Shared

        storage = Shared(url, store.uuid)
        storage.check()
        store.keep_shared(url)
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address or address == "local":
        yield Place(shared=storage, say=say)
        return
    from runners import ray_cluster

    with ray_cluster.connect(address, threads=int(plan.resources.get("cpu") or 1)) as cluster:
        yield Place(cluster, storage, say)


def look_over(place: Place, store: Store) -> None:
    """Tell what the cluster has, and ask its nodes whether trials can run there. Raises `UserError` if they cannot."""
    if place.cluster is None:
        return
    from runners import ray_cluster

    nodes = place.cluster.nodes
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    place.say(f"on {place.cluster}: {len(nodes)} nodes with {cpus} CPUs and {gpus} GPUs")
    for note in ray_cluster.look_over(place.cluster, store.root, place.shared):
        place.say(f"note: {note}")
