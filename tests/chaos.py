"""Kill workers, drivers and nodes of a sweep at random moments, then hold what is left against an undisturbed sweep.

    python tests/chaos.py --rounds 5 --kills 10        (make chaos)

Every round is a fresh store and other random moments. A round is right if, once launched to its end, every trial is
there once with the same bits as undisturbed: status, step, every point of every metric, every evaluation, and for a
searched sweep the same suggestions; if MLflow has one run for each trial, none RUNNING, with the same points; and if
as many kills landed as were asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runners import record
from runners.store import Store, read_points

ROOT = Path(__file__).resolve().parent.parent

SPEC = """
sweep: chaos
question: Does a sweep that is killed again and again end like one that is left alone?
task: {name: mqar, vocab_size: 64, seq_len: 32, n_pairs: 2, valid_examples: 64, test_examples: 64}
model: {d_model: 32, n_layers: 1, n_heads: 1}
train: {steps: 400, batch_size: 16, eval_every: 50}
search: {train.lr: {log_uniform: [1e-4, 1e-1]}, trials: 5, parallel: 2}
axes:
  mechanism: [linear, {name: hola, cache: 4, block: 8}, deltanet]
seeds: 3
retry: {infra: 20}
"""
"""24 trials: three cells, each with five suggestions and three report seeds."""


def environment() -> dict[str, str]:
    # Checkpoints often, so that kills fall between two of them and not only before the first.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MEMSWEEP_CHECKPOINT_S": "0.5"}


def launch(spec: Path, store: Path, *options: str) -> subprocess.Popen[str]:
    """A driver in a process of its own; its words go to `driver.log` beside the store."""
    command = [sys.executable, "-m", "sweeps", "launch", str(spec), "--store", str(store), "--no-report", *options]
    with open(store.parent / "driver.log", "a", encoding="utf-8") as log:
        log.write(f"--- {' '.join(options)}\n")
        log.flush()
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment(), process_group=0)


def truth(store: Store) -> dict[str, Any]:
    """All that a sweep computed, but for what depends on the clock: by trial, and by suggestion."""
    found: dict[str, Any] = {}
    for trial in store.trial_ids():
        folder, result = store.trial_folder(trial), store.result(trial)
        if result is None:
            found[trial] = None
            continue
        evaluated = {
            path.stem: store.evaluation(trial, path.stem) for path in sorted((folder / "evals").glob("*.json"))
        }
        points = [(step, metrics) for step, metrics, _ in read_points(folder, result["step"])]
        found[trial] = {
            "status": result["status"],
            "step": result["step"],
            "tokens": result["tokens"],
            "metrics": result["metrics"],
            "points": points,
            "evaluations": {part: row["metrics"] if row else None for part, row in evaluated.items()},
        }
    for path in sorted(store.root.glob("searches/*/*.json")):
        found[f"{path.parent.name}/{path.stem}"] = json.loads(path.read_text(encoding="utf-8"))
    return found


def differences(store: Store, expected: dict[str, Any], sweep: str) -> list[str]:
    """What is wrong with the store of a disturbed sweep: nothing, if all went well."""
    found = truth(store)
    wrong = [f"{key}: not in the disturbed sweep" for key in expected.keys() - found.keys()]
    wrong += [f"{key}: only in the disturbed sweep" for key in found.keys() - expected.keys()]
    for key in sorted(expected.keys() & found.keys()):
        if found[key] != expected[key]:
            wrong.append(f"{key}: {_first_difference(expected[key], found[key])}")
    return wrong + _mlflow_differences(store, {key: e for key, e in expected.items() if "/" not in key}, sweep)


def _first_difference(expected: Any, found: Any) -> str:
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return "no result" if found is None else f"{found} instead of {expected}"
    for name in expected:
        if expected[name] != found.get(name):
            return f"{name} differs: {str(found.get(name))[:200]} instead of {str(expected[name])[:200]}"
    return f"has {sorted(found.keys() - expected.keys())} besides"


def _mlflow_differences(store: Store, expected: dict[str, Any], sweep: str) -> list[str]:
    client = record.make_client(store.mlflow_uri)
    experiment = client.get_experiment_by_name(sweep)
    runs = client.search_runs([experiment.experiment_id], "tags.`memsweep.kind` = 'trial'", max_results=1000)
    by_trial = Counter(run.data.tags["memsweep.trial_id"] for run in runs)
    wrong = [f"{trial}: {by_trial[trial]} runs in MLflow" for trial in expected if by_trial[trial] != 1]
    for run in runs:
        trial = run.data.tags["memsweep.trial_id"]
        if run.info.status == "RUNNING":
            wrong.append(f"{trial}: its run is still RUNNING")
        if not expected.get(trial):
            wrong.append(f"{trial}: a run of a trial that is not in the sweep")
            continue
        sent: dict[str, list[tuple[int, float]]] = {}
        for step, metrics in expected[trial]["points"]:
            for name, value in metrics.items():
                sent.setdefault(name, []).append((step, value))
        for name, points in sent.items():
            there = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
            if there != points:
                wrong.append(f"{trial}: {name} has {len(there)} points in MLflow, {len(points)} in the folder")
    return wrong


class Nodes:
    """A Ray cluster on this machine: a head without CPUs and two nodes of one CPU, each of which may be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Each node wants an address of its own, and Ray takes 127.0.0.1 to mean the one that the network sees.
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.2", "include_dashboard": False},
        )
        self.address: str = self._cluster.address
        self._count = 2
        self._alive = [self._add(), self._add()]

    def _add(self) -> Any:
        self._count += 1
        return self._cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{self._count}")

    def kill_one(self, rng: random.Random) -> None:
        """Kill a node with all that runs on it; another one joins."""
        victim = self._alive.pop(rng.randrange(len(self._alive)))
        self._cluster.remove_node(victim, allow_graceful=False)
        self._alive.append(self._add())

    def close(self) -> None:
        self._cluster.shutdown()


def workers(store: Store) -> list[int]:
    """Processes that run a trial now, by the logs of attempts that have not ended."""
    found = []
    for trial in store.trial_ids():
        attempt = store.trial_folder(trial) / "attempts" / str(store.last_attempt(trial))
        with contextlib.suppress(OSError, TypeError):
            pid = re.search(r"process (\d+)", (attempt / "log.txt").read_text(encoding="utf-8"))
            if pid and not (attempt / "outcome.json").exists() and Path(f"/proc/{pid[1]}").exists():
                found.append(int(pid[1]))
    return found


def disturb(
    spec: Path, store: Store, kills: int, rng: random.Random, nodes: Nodes | None, jobs: int = 2
) -> Counter[str]:
    """Launch the sweep to its end, killing something `kills` times on the way: how often what was killed.

    Raises `RuntimeError` for a driver that ends with another code than 0 (all done) or 1 (something is left).
    """
    killed: Counter[str] = Counter()
    kinds = ["worker", "worker", "driver", *(["node"] if nodes else [])]
    options = ["--address", nodes.address] if nodes else []
    deadline = time.monotonic() + 1800
    while time.monotonic() < deadline:
        driver = launch(spec, store.root, "--jobs", str(jobs), *options)
        for _ in _moments(driver, store, rng):
            if killed.total() == kills:
                driver.wait(timeout=900)
                break
            # Each kind comes up at least once, whatever the dice say.
            missing = [kind for kind in dict.fromkeys(kinds) if not killed[kind]]
            kind = rng.choice(missing if kills - killed.total() <= len(missing) else kinds)
            if _kill(kind, driver, store, nodes, rng):
                killed[kind] += 1
        if driver.wait() == 0:
            return killed
        if driver.returncode not in (1, -signal.SIGKILL):
            raise RuntimeError(f"the driver ended with {driver.returncode}: see {store.root.parent / 'driver.log'}")
    raise RuntimeError("the sweep did not end within half an hour")


def _moments(driver: subprocess.Popen[str], store: Store, rng: random.Random) -> Iterator[None]:
    """Random moments at which the driver is alive and a trial runs."""
    while driver.poll() is None:
        time.sleep(rng.uniform(0.1, 3.0))
        while driver.poll() is None and not workers(store):
            time.sleep(0.05)
        if driver.poll() is None:
            yield


def _kill(kind: str, driver: subprocess.Popen[str], store: Store, nodes: Nodes | None, rng: random.Random) -> bool:
    if kind == "driver":
        driver.kill()
        driver.wait()
    elif kind == "node" and nodes is not None:
        nodes.kill_one(rng)
    else:
        running = workers(store)
        if not running:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(running), signal.SIGKILL)
    return True


def undisturbed(spec: Path, folder: Path) -> dict[str, Any]:
    """What the sweep computes when it is left alone, one trial after the other in one process."""
    folder.mkdir(parents=True)
    driver = launch(spec, folder / "runs", "--executor", "inline")
    if driver.wait():
        raise RuntimeError(f"the undisturbed sweep ended with {driver.returncode}: see {folder / 'driver.log'}")
    return truth(Store.open(folder / "runs"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs a round")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round takes the next")
    parser.add_argument("--no-nodes", action="store_true", help="a local Ray instead of a two-node cluster")
    parser.add_argument("--spec", type=Path, help="another spec than the built-in one")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="memsweep-chaos-"))
    spec = given.spec or home / "chaos.yaml"
    if not given.spec:
        spec.write_text(SPEC, encoding="utf-8")
    sweep = re.search(r"^sweep: *(\S+)", spec.read_text(encoding="utf-8"), re.MULTILINE)
    assert sweep is not None, "a spec names its sweep"
    began = time.monotonic()
    expected = undisturbed(spec, home / "undisturbed")
    trials = sum("/" not in key for key in expected)
    print(f"undisturbed: {trials} trials in {time.monotonic() - began:.0f} s; everything is in {home}", flush=True)
    failed = 0
    for seed in range(given.seed, given.seed + given.rounds):
        began, rng = time.monotonic(), random.Random(seed)
        store = Store.create(home / f"round-{seed}" / "runs")
        nodes = None if given.no_nodes else Nodes()
        try:
            killed = disturb(spec, store, given.kills, rng, nodes)
        finally:
            if nodes is not None:
                nodes.close()
        wrong = differences(store, expected, sweep[1])
        if killed.total() < given.kills:
            wrong.append(f"only {killed.total()} of {given.kills} kills landed before the sweep was over")
        attempts = sum(store.last_attempt(trial) for trial in store.trial_ids())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(killed.items()))
        verdict = "right" if not wrong else f"WRONG in {len(wrong)} points"
        seconds = time.monotonic() - began
        print(
            f"seed {seed}: killed {kinds}; {attempts} attempts at {trials} trials, {seconds:.0f} s: {verdict}",
            flush=True,
        )
        for line in wrong[:20]:
            print(f"  {line}")
        failed += bool(wrong)
    print(f"{given.rounds - failed} of {given.rounds} rounds right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
