"""An existing Ray cluster: reached, looked over node by node, given our code, and left running at the end.

What the launch needs is asked before anything runs: whether the address answers, whether Ray and Python are the same
there, what each node has, whether it sees the store (or the shared storage) and has our dependencies. A node that
joins later is not asked; its workers compare the code before their first job (`runners/code.py`).

The head node is the cluster: a launch that has not reached it for `HEAD_S` says so and ends, before Ray ends the
process without a word of ours. `sweep resume` goes on where there is a cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners import code
from runners.owner import Owner
from runners.resources import Machine
from runners.schema import Exit, Job, UserError
from runners.shared import Shared
from runners.stamp import DRIVER_VARIABLE, version
from runners.store import read_head, read_json

HEAD_S = 25.0
"""How long the head node may be out of reach. Ray itself ends its drivers after 60 s of that."""
ANSWER_S = 5.0
"""How long the address may take to answer."""
END_S = 30.0
PROBE_S = 120.0
"""How long a node may take to answer: it starts a process, and perhaps unpacks our code first."""
WAIT_S = 45.0
"""After so long without a worker at work, the user is told what is missing."""
NODE_FILE = "node.json"
"""In an attempt's folder: Ray's name of the node it ran on, and its address."""
_MINE = re.compile(r"MEMSWEEP_(?!LEDGER|TRACKING|STORE|DRIVER)\w+")
"""Variables that workers get too. Those that may hold a password stay here."""


@dataclass(frozen=True)
class Node:
    """A node that takes trials: its CPUs and GPUs as Ray counts them."""

    id: str
    ip: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Cluster:
    """A cluster this process is connected to."""

    address: str
    nodes: tuple[Node, ...]
    head: Head | None = None

    def __str__(self) -> str:
        return f"the Ray cluster at {self.address}"

    @property
    def machine(self) -> Machine:
        """What its nodes have together."""
        nodes = tuple((node.cpus, node.gpus) for node in self.nodes)
        return Machine(max((n[0] for n in nodes), default=0), sum(n[1] for n in nodes), str(self), False, nodes)


@contextlib.contextmanager
def connect(address: str, *, threads: int) -> Iterator[Cluster]:
    """Join the cluster at `address` (host:port or auto) for the length of the context.

    Workers of this driver get `threads` CPU threads and our code. Raises `UserError`, exit code 3, if it cannot be.
    """
    _refuse(address)
    import ray

    from runners import ray_tune  # its import sets what Ray reads when it is imported

    try:
        with _silence():
            let_go = ray_tune.start_ray(
                address=address, log_to_driver=False, logging_level="ERROR", runtime_env=_environment(threads)
            )
    except Exception as error:
        raise UserError(_explain(error, address), Exit.ENVIRONMENT) from error
    _quiet()
    head = Head(ray.get_runtime_context().gcs_address)
    try:
        yield Cluster(address, _nodes(ray.nodes()), head)
    finally:
        if head.is_lost:
            # Ray's own end waits for the head, in vain, and then ends the process with a code of its own.
            atexit.register(_end_at_once)
        else:
            ray.shutdown()  # of this driver's connection; the cluster is not ours to stop
            let_go()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without standard error: Ray says there, once a second, that it cannot connect. We say it once, in words."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.ENVIRONMENT)


class Head:
    """The head node's server, by its address: whether it still answers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._heard = self._asked = time.monotonic()
        self.is_lost = False

    def look(self) -> None:
        """Call often. Raises `UserError` when the head has been out of reach for `HEAD_S`."""
        now = time.monotonic()
        if now - self._asked < HEAD_S / 5:
            return
        self._asked = now
        try:
            _knock(self._address)
            self._heard = time.monotonic()
        except OSError as error:
            self.is_lost = time.monotonic() - self._heard > HEAD_S
            if self.is_lost:
                raise UserError(
                    f"the head node of the Ray cluster has been out of reach for {HEAD_S:.0f} s ({self._address}: "
                    f"{error.strerror or error}). What was committed is safe: the same command goes on from there, "
                    "on a cluster that is up",
                    Exit.ENVIRONMENT,
                ) from error


def _knock(address: str) -> None:
    """Open and close a connection to HOST:PORT. Raises `OSError` if nobody is there."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()


def _refuse(address: str) -> None:
    """Raise `UserError` for an address that could not work, or that nobody answers at."""
    scheme, found, _ = address.partition("://")
    if found and scheme == "ray":
        raise UserError(
            f"--address {address}: a launch cannot run through Ray Client. Run it on a node of the cluster with "
            "--address auto, or give it to the cluster as a job: ray job submit -- sweep launch … --address auto"
        )
    if found:
        raise UserError(
            f"--address {address} is where a cluster takes jobs (ray job submit); a launch takes HOST:PORT of the "
            "head node, usually port 6379, or auto on a node of the cluster"
        )
    if address == "auto":
        return
    _, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--address {address}: give HOST:PORT of the head node, usually port 6379, or auto")
    try:
        _knock(address)
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({error.strerror or error}): is its head node up (ray status there), "
            "and may this machine reach that port?",
            Exit.ENVIRONMENT,
        ) from error


def _explain(error: BaseException, address: str) -> str:
    """What kept us from joining, in words, with the way out."""
    text = "\n".join(str(part) for part in _causes(error))
    if found := re.search(r"Ray: (\S+)\s+Python: (\S+).*?Ray: (\S+)\s+Python: (\S+)", text, re.DOTALL):
        there, here = (f"Ray {ray} and Python {python}" for ray, python in (found.groups()[:2], found.groups()[2:]))
        return f"the Ray cluster at {address} runs {there}, this environment {here}: they have to be the same"
    if re.search("[Aa]uth.*[Tt]oken|Unauthenticated", text):
        return (
            f"the Ray cluster at {address} asks for its token: put the one of its head node (ray get-auth-token) into "
            "RAY_AUTH_TOKEN and set RAY_AUTH_MODE=token here, or start the cluster with RAY_AUTH_MODE=disabled"
        )
    if address == "auto" and re.search("Could not find any running Ray instance|GCS address is unknown", text):
        return "--address auto: no node of a Ray cluster runs on this machine; give HOST:PORT, or start one (ray start)"
    if re.search("No node info found|Ray node|raylet|node_ip_address|IP address", text):
        return (
            f"this machine is no node of the Ray cluster at {address}, and a launch has to be on one: "
            f"`ray start --address={address} --num-cpus=0` makes it one that takes no trials"
        )
    return f"cannot join the Ray cluster at {address}: {(text.strip().splitlines() or [type(error).__name__])[0]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _quiet() -> None:
    """Have Ray keep its own words about lost nodes: it prints twenty lines of a server's log, unasked.

    We tell of each trial that was lost, once.
    """
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _environment(threads: int) -> dict[str, Any]:
    """What workers get on whatever node they start: our code, and the variables that steer it."""
    variables = {name: value for name, value in os.environ.items() if _MINE.fullmatch(name)}
    variables |= {"OMP_NUM_THREADS": str(threads), DRIVER_VARIABLE: json.dumps(code.here())}
    return {
        "py_modules": [str(folder) for folder in code.folders()],
        "env_vars": variables,
        "excludes": ["__pycache__"],
    }


def _nodes(rows: list[dict[str, Any]]) -> tuple[Node, ...]:
    """The nodes that take trials; a head node without CPUs does not."""
    found = []
    for row in rows:
        resources = row["Resources"]
        if row["Alive"] and resources.get("CPU", 0) >= 1:
            cpus, gpus = int(resources["CPU"]), int(resources.get("GPU", 0))
            found.append(Node(row["NodeID"], row["NodeManagerAddress"], cpus, gpus))
    return tuple(sorted(found, key=lambda node: node.ip))


def is_lost(node_id: str) -> bool:
    """Whether Ray has given the node up. False where Ray cannot be asked."""
    import ray

    with contextlib.suppress(Exception):
        return any(row["NodeID"] == node_id and not row["Alive"] for row in ray.nodes())
    return False


def end(attempt: Path, worker: Owner) -> bool:
    """Kill `worker` on the node that ran the attempt, which hangs there. False if that cannot be done."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = read_json(attempt / NODE_FILE)
    if not isinstance(node, dict):
        return False
    there = NodeAffinitySchedulingStrategy(node["node"], soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_end).options(scheduling_strategy=there)
    try:
        return bool(ray.get(task.remote(dataclasses.asdict(worker)), timeout=END_S))
    except Exception:  # the node is lost, or hangs too: then Ray gives it up
        return False


def _end(row: dict[str, Any]) -> bool:
    worker = Owner(**row)
    if not worker.is_here() or worker.is_dead():
        return False
    os.kill(worker.pid, signal.SIGKILL)
    return True


class Waiting:
    """Says why nothing begins: a cluster may be full, and Ray waits without a word."""

    def __init__(self, threads: int, gpu: float, say: Callable[[str], None]) -> None:
        self._needs = f"{threads} CPU" + (f" and {gpu:g} GPU" if gpu else "")
        self._say = say
        self._since: float | None = None

    def look(self, jobs: Sequence[Job]) -> None:
        """Call often. Says its line once each time that no job has begun for `WAIT_S`."""
        now, logs = time.monotonic(), (Path(job.folder, "attempts", str(job.attempt), "log.txt") for job in jobs)
        if self._since is None or not jobs or any(log.exists() for log in logs):
            self._since = now
        elif now - self._since > WAIT_S:
            self._since = float("inf")
            self._say(f"no worker has begun for {WAIT_S:.0f} s: a trial needs {self._needs}; {_free()}")


def _free() -> str:
    import ray

    try:
        total, free = ray.cluster_resources(), ray.available_resources()
    except Exception as error:
        return f"the cluster does not answer ({error})"
    parts = [f"{free.get(name, 0):g} of {total[name]:g} {name}s are free" for name in ("CPU", "GPU") if name in total]
    return " and ".join(parts) or "the cluster has no CPUs now"


# ---- what each node says of itself ----------------------------------------------------------------------------------


def look(store: str, shared: Shared | None) -> dict[str, Any]:
    """What a node has, asked there: versions, our code, the store it sees at that path (its uuid, or None).

    `trouble` is what keeps it from the shared storage, if there is one.
    """
    found: dict[str, Any] = {"machine": platform.node(), "python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "triton", "safetensors")}
    head, trouble = read_head(Path(store)), None
    if shared is not None:
        try:
            shared.check()
        except UserError as error:
            trouble = str(error)
    return found | {"code": code.here(), "store": head and head["uuid"], "trouble": trouble}


def look_over(cluster: Cluster, store: Path, shared: Shared | None) -> Iterator[str]:
    """Ask every node that takes trials: does it have our code, and see `store` or reach `shared`?

    Yields what is worth a note; raises `UserError` for what would fail every trial there.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {}
    for node in cluster.nodes:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        asked[task.options(scheduling_strategy=there).remote(str(store), shared)] = node
    here = look(str(store), shared)
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_S) if asked else ([], [])
    for reference in silent:
        yield f"node {asked[reference].ip} has not answered for {PROBE_S:.0f} s; what fails there is tried elsewhere"
    notes: Counter[str] = Counter()
    for reference in answered:
        try:
            said = ray.get(reference)
        except Exception as error:
            yield f"node {asked[reference].ip} cannot run our code: {str(error).strip().splitlines()[-1]}"
            continue
        notes.update(_compare(f"node {asked[reference].ip} ({said['machine']})", here, said, store, shared))
    yield from notes


def _compare(
    node: str, here: dict[str, Any], there: dict[str, Any], store: Path, shared: Shared | None
) -> Iterator[str]:
    if there["code"]["code"] != here["code"]["code"]:
        raise UserError(
            f"{node} has {code.told(there['code'])}, this driver {code.told(here['code'])}: trials would not be "
            "those of the plan. Is another memsweep first on the path there?",
            Exit.ENVIRONMENT,
        )
    if there["trouble"]:
        raise UserError(f"{node}: {there['trouble']}", Exit.ENVIRONMENT)
    if shared is None and there["store"] != here["store"]:
        what = "another store" if there["store"] else "no store"
        raise UserError(
            f"{node} sees {what} at {store}: mount the folder there under the same path, or hand trials over through "
            "storage that every node reaches (--shared s3://bucket/folder)",
            Exit.ENVIRONMENT,
        )
    missing = [name for name in ("torch", "safetensors") if there[name] is None]
    if missing:
        raise UserError(
            f"{node} has no {' and no '.join(missing)}: install memsweep's dependencies there", Exit.ENVIRONMENT
        )
    for name in ("torch", "triton", "python"):
        if there[name] != here[name]:
            yield f"{node} has {name} {there[name]}, this driver {here[name]}: last digits may differ"
