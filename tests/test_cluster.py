"""A sweep on a Ray cluster that is not ours: two nodes on this machine, one of which dies or hangs on the way."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import clusters
import plans
import pytest
import s3
import stores
import test_cluster_files
from test_ray import results
from test_record import runs

from runners import driver, ray_cluster, trial, watch
from runners.ledger import Ledger
from runners.owner import Owner
from runners.resources import Place
from runners.schema import Exit, Plan, UserError
from runners.shared import Shared
from runners.store import Store, read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
sys.path[:0] = [{root!r}, {tests!r}]
import plans
from runners import driver, ray_cluster, trial, watch
from runners.ledger import Ledger
from runners.owner import Owner
from runners.resources import Place
from pathlib import Path
plan = plans.plan(**json.loads({plan!r}))
say = lambda line: print(line, flush=True)
summary = driver.launch(plan, store=Path({store!r}), say=say, **json.loads({options!r}))
print(json.dumps([summary.counts, summary.ran, [f.kind + ": " + f.error for f in summary.failures]]))
sys.exit(summary.exit_code)
"""
STEPS = 300


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Storage that every node reaches: a bucket where the tests have a server, else a folder."""
    if s3.missing():
        return f"file://{tmp_path_factory.mktemp('bucket')}"
    return f"{request.getfixturevalue('s3_bucket')}/cluster"


@pytest.fixture(scope="module")
def cluster(shared: str) -> Iterator[tuple[str, list[Any]]]:
    with clusters.cluster(3) as found:  # its nodes inherit the keys of the storage
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, list[Any]]:
    """The plan of these tests and its results, run inline without trouble."""
    store = stores.make(tmp_path_factory.mktemp("inline") / "runs")
    plan = plans.plan(seeds=[0, 1, 2], steps=STEPS)
    assert driver.launch(plan, store=store.root, executor="inline", say=lambda _: None).exit_code == Exit.OK
    return plan, results(store, plan)


def start(
    store: Store, cwd: Path, options: dict[str, Any], *, prefix: Sequence[str] = (), **plan: Any
) -> subprocess.Popen[str]:
    """A driver in a process of its own."""
    code = SCRIPT.format(
        root=str(ROOT),
        tests=str(ROOT / "tests"),
        plan=json.dumps(plan),
        store=str(store.root),
        options=json.dumps(options),
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code],
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=cwd,
        process_group=0,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "MEMSWEEP_CHECKPOINT_S": "0.5"},
    )


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the driver ended too early: {process.communicate()}")
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def nodes_of(store: Store, plan: Plan) -> dict[str, list[str]]:
    """The address of the node of each attempt, by trial."""
    found = {}
    for member in plan.members:
        notes = sorted(store.trial_folder(member.trial.id).glob("attempts/*/node.json"))
        found[member.trial.id] = [row["ip"] for note in notes if (row := read_json(note))]
    return found


def ip(node: Any) -> str:
    return str(node.node_ip_address)


def places(text: str) -> set[str]:
    """The addresses of nodes in a text."""
    return set(re.findall(r"127\.0\.0\.\d", text))


def history(store: Store, plan: Plan) -> dict[str, list[tuple[str, str | None]]]:
    """How each attempt ended and its error, by trial."""
    ledger = Ledger.open(store, read_only=True)
    try:
        ids = [member.trial.id for member in plan.members]
        return {one: [(row["status"], row["error"]) for row in ledger.attempts(one)] for one in ids}
    finally:
        ledger.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://10.0.0.1:10001", "ray job submit"),
        ("http://127.0.0.1:8265", "HOST:PORT"),
        ("127.0.0.1", "HOST:PORT"),
        ("127.0.0.1:99999", "HOST:PORT"),
        ("127.0.0.9:1", "no Ray cluster answers at 127.0.0.9:1"),
    ],
)
def test_an_address_that_cannot_work_is_told_at_once(tmp_path: Path, address: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=words):
        driver.launch(plans.plan(), store=tmp_path / "runs", address=address, say=lambda _: None)
    assert time.monotonic() - began < 10


def test_why_a_cluster_cannot_be_joined_is_told_in_words() -> None:
    """Ray's own errors, and one of each that takes another machine to get."""
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as mismatch:
        check_version_info({"ray_version": "2.50.1", "python_version": "3.12.4"}, "here")
    here = f"Ray {importlib.metadata.version('ray')} and Python {platform.python_version()}"
    said = ray_cluster._explain(mismatch.value, "head:6379")
    assert said == (
        "the Ray cluster at head:6379 runs Ray 2.50.1 and Python 3.12.4, this environment "
        f"{here}: they have to be the same"
    )
    for error, words in (
        ("RPC error: InvalidAuthToken: Authentication token is missing", "asks for its token"),
        ("No node info found matching attributes: '' when trying to resolve", "this machine is no node of"),
        ("Something new\nwith more lines", "cannot join the Ray cluster at head:6379: Something new"),
    ):
        outer = ConnectionError("Failed to connect to Ray cluster") if "new" not in error else None
        inner = RuntimeError(error)
        if outer is not None:
            outer.__cause__ = inner
        assert words in ray_cluster._explain(outer or inner, "head:6379")
    assert "no node of a Ray cluster runs on this machine" in ray_cluster._explain(
        ConnectionError("Could not find any running Ray instance. Please specify"), "auto"
    )


def test_a_lost_head_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = ray_cluster.Head(f"127.0.0.1:{server.getsockname()[1]}")
        for now[0] in range(0, 600, 5):
            head.look()

    def wait() -> None:
        for now[0] in range(600, 700):
            head.look()

    with pytest.raises(UserError, match="out of reach for 25 s") as caught:
        wait()
    assert (head.is_lost, caught.value.exit_code) == (True, Exit.ENVIRONMENT)
    assert now[0] <= 595 + ray_cluster.HEAD_S + 6


def test_what_a_cluster_lacks_is_told_before_anything_runs(tmp_path: Path, cluster: tuple[str, list[Any]]) -> None:
    address, _ = cluster
    store = stores.make(tmp_path / "runs")
    for resources, words in (({"gpu": 1}, "no usable GPU on the Ray cluster at"), ({"cpu": 2}, "more than 1 CPUs")):
        with pytest.raises(UserError, match=words) as caught:
            driver.launch(plans.plan(resources=resources), store=store.root, address=address, say=lambda _: None)
        assert caught.value.exit_code == Exit.ENVIRONMENT
    assert not list(store.root.glob("trials/*/attempts"))


def test_a_worker_that_hangs_on_another_node_is_killed_there(tmp_path: Path, cluster: tuple[str, list[Any]]) -> None:
    attempt = tmp_path / "attempts" / "1"
    worker = subprocess.Popen(["sleep", "300"])
    row = dataclasses.asdict(Owner.of(worker.pid))
    (attempt).mkdir(parents=True)
    with ray_cluster.connect(cluster[0], threads=1) as joined:
        write_json(attempt / ray_cluster.NODE_FILE, {"node": joined.nodes[0].id, "ip": joined.nodes[0].ip})
        far = Place(joined).end
        write_json(attempt / trial.WORKER_FILE, row | {"host": "another machine"})
        assert not watch.kill(tmp_path, "t", 1, "why", far=far), "it is not on that node either"
        assert worker.poll() is None
        assert trial.read_outcome(tmp_path, "t", 1) is None
        assert far(attempt, Owner(**row)), "what a node does for one of its own"
    assert worker.wait(timeout=30) == -signal.SIGKILL


HIDDEN = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none "$0" && "$@"; end=$?; cp -a "$0/." "$0.seen"; exit $end',
]
"""Runs what follows in a world where the folder named first is one that nobody else sees."""


def test_nodes_that_do_not_see_the_store(
    tmp_path: Path, cluster: tuple[str, list[Any]], shared: str, undisturbed: tuple[Plan, list[Any]]
) -> None:
    """The store is mounted for the driver alone: without shared storage that is told, with it the sweep runs."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount of its own (root)")
    plan, expected = undisturbed
    store = stores.make(tmp_path / "runs")
    options = {"address": cluster[0]}
    process = start(store, tmp_path, options, prefix=[*HIDDEN, str(store.root)], seeds=[0, 1, 2], steps=STEPS)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.search(r"UserError: node 127\.0\.0\.\d .* sees another store at .*--shared s3://", errors)
    options["shared"] = shared
    process = start(store, tmp_path, options, prefix=[*HIDDEN, str(store.root)], seeds=[0, 1, 2], steps=STEPS)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == Exit.OK, said + errors
    assert errors == ""
    seen = Store.open(f"{store.root}.seen")
    assert results(seen, plan) == expected
    assert places(str(nodes_of(seen, plan))) == {ip(node) for node in cluster[1]}
    assert seen.shared == shared
    for member in plan.members:
        assert "trained: complete" in (seen.trial_folder(member.trial.id) / "attempts" / "1" / "log.txt").read_text()
        assert Shared(shared, seen.uuid).attempts(member.trial.id) == [], "mailboxes are emptied"
    assert s3.SECRET not in said
    assert not list(store.root.glob("trials/*/attempts")), "nobody else saw the store"


@pytest.mark.wide  # the Slurm script's test runs a sweep on a cluster too
def test_a_kuberay_job(tmp_path: Path, cluster: tuple[str, list[Any]]) -> None:
    """As the operator runs its entrypoint: on the head node, with the cluster's address in RAY_ADDRESS."""
    line = shlex.split(test_cluster_files.job()["spec"]["entrypoint"].replace("/store/runs", str(tmp_path / "runs")))
    assert line[:3] == ["sweep", "launch", "specs/capacity.yaml"]
    smoke = [sys.executable, "-m", "sweeps", "launch", "specs/smoke.yaml", *line[3:], "--no-report"]
    ran = subprocess.run(
        [*smoke, "--only", "mechanism=linear", "--jobs", "1", "--set", "train.steps=60"],
        env={**os.environ, "RAY_ADDRESS": cluster[0], "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == Exit.OK, ran.stdout + ran.stderr
    assert "1 trial at a time on CPU" in ran.stdout
    assert "Now: 2 complete" in ran.stdout
    store = Store.open(tmp_path / "runs")
    spans = sorted(_span(store, one) for one in store.trial_ids())
    assert spans[0][1] <= spans[1][0], "--jobs 1 on three nodes: one after the other"


def _span(store: Store, trial_id: str) -> tuple[float, float]:
    """When the trial's only attempt began and ended, by the clock of this machine."""
    attempt = store.trial_folder(trial_id) / "attempts" / "1"
    return (attempt / "node.json").stat().st_mtime, (attempt / "outcome.json").stat().st_mtime


def test_a_node_dies_and_another_hangs(
    tmp_path: Path, cluster: tuple[str, list[Any]], undisturbed: tuple[Plan, list[Any]]
) -> None:
    address, (_, dying, hanging) = cluster
    plan, expected = undisturbed
    store = stores.make(tmp_path / "runs")
    process = start(store, tmp_path, {"address": address}, seeds=[0, 1, 2], steps=STEPS, retry={"infra": 3})

    def at_work(node: Any) -> bool:
        """A trial is between its first checkpoint and its end there."""
        for trial_id, ips in nodes_of(store, plan).items():
            folder = store.trial_folder(trial_id)
            if ips and ips[-1] == ip(node) and list(folder.glob("checkpoints/[0-9]*")):
                return not (folder / "result.json").exists()
        return False

    def lost() -> list[str]:
        return [error for ends in history(store, plan).values() for status, error in ends if status == "failed"]

    wait_for(lambda: at_work(dying) and at_work(hanging), process)
    clusters.kill(dying)
    clusters.freeze(hanging)
    wait_for(lambda: len(lost()) == 2, process)
    clusters.thaw(hanging)  # its worker may go on now; a newer attempt fences it
    said, errors = process.communicate(timeout=300)
    assert process.returncode == Exit.OK, said + errors
    assert errors == ""  # nothing of Ray's reaches the user
    assert "3 nodes with 3 CPUs and 0 GPUs" in said
    assert "3 trials at once on CPU" in said
    assert json.loads(said.splitlines()[-1]) == [{"complete": 6}, 6, []]
    assert results(store, plan) == expected
    assert sorted(places(str(lost()))) == sorted([ip(dying), ip(hanging)])
    for ends in history(store, plan).values():
        assert [status for status, _ in ends] == ["failed"] * (len(ends) - 1) + ["complete"]
    assert {place for places in nodes_of(store, plan).values() for place in places} == {
        "127.0.0.3",
        "127.0.0.4",
        "127.0.0.5",
    }
    assert {run.info.status for run in runs(store)} == {"FINISHED"}
    assert len(runs(store)) == 6
    assert clusters.processes(cluster[1][0])  # the cluster is not ours to stop
