"""Trials an hour on one GPU: one at a time against packed by measured share (`gpu: 1` against `gpu: auto`).

    python3 -m tests.benchmarks.packing [--steps 400] [--seeds 4]

Runs the same small MQAR sweep twice through `sweep launch`, each time in a fresh store, and prints wall times of the
whole command, trials an hour, their ratio, and what was measured of each shape. Needs a GPU and several CPU cores; no
network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SPEC = """\
sweep: packing
question: How many small trials an hour does one card run?
task: {{name: mqar, vocab_size: 512, seq_len: 64, n_pairs: 8, examples: 20000, valid_examples: 256, test_examples: 512}}
model: {{d_model: 64, n_layers: 2, n_heads: 1}}
train: {{steps: {steps}, batch_size: 64, dtype: bf16, warmup: 50}}
axes:
  mechanism: [{mechanisms}]
  train.lr: [1e-3, 2e-3, 4e-3, 8e-3]
seeds: {seeds}
"""
ITEMS = {"softmax": "{name: softmax, model.position: rope}"}


def launch(spec: Path, store: Path, gpu: str, limit_s: float) -> dict[str, Any]:
    """One sweep in a fresh store. Raises `SystemExit` with the launch's own words if it did not end well."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "sweeps", "launch", str(spec), "--store", str(store), "--no-report"]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*line, "--set", f"resources.gpu={gpu}"],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        raise SystemExit(
            f"gpu: {gpu} was not done after {limit_s:.0f} s: {what_happened(store)}\n{said[-3000:]}"
        ) from late
    wall_s = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"gpu: {gpu} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return {"gpu": gpu, "wall_s": wall_s, **what_happened(store), "said": done.stdout}


def what_happened(store: Path) -> dict[str, Any]:
    """Numbers from the trials' folders."""
    results = [json.loads(path.read_text()) for path in store.glob("trials/*/result.json")]
    outcomes = [json.loads(path.read_text()) for path in store.glob("trials/*/attempts/*/outcome.json")]
    workers = [json.loads(path.read_text()) for path in store.glob("trials/*/attempts/*/worker.json")]
    if not outcomes:
        return {"trials": 0}
    first = min(row["time"] - row["seconds"] for row in outcomes)
    working_s = max(row["time"] for row in outcomes) - first
    return {
        "trials": len(results),
        "attempts": len(outcomes),
        "processes": len({row["pid"] for row in workers}),
        "working_s": working_s,
        "trial_s": sum(row["seconds"] for row in outcomes) / len(outcomes),
        "at_once": sum(row["seconds"] for row in outcomes) / working_s,
        "accuracy": sum(row["metrics"]["valid/accuracy"] for row in results) / max(1, len(results)),
    }


def shapes(store: Path) -> list[str]:
    """What was measured of a card, one line a mechanism."""
    found = {}
    for path in sorted(store.glob("trials/*/attempts/*/meter.json")):
        row = json.loads(path.read_text())
        name = json.loads((path.parents[2] / "settings.json").read_text())["mechanism"]["name"]
        if row["busy"] is not None:
            found[name] = f"{name}: busy {row['busy']:.2f}, {row['memory_bytes'] / 2**30:.2f} GiB"
    return sorted(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="updates a trial")
    parser.add_argument("--seeds", type=int, default=4, help="seeds; trials = mechanisms x 4 rates x seeds")
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "linear"])
    parser.add_argument("--limit", type=float, default=280, help="seconds after which one sweep is given up")
    parser.add_argument("--keep", type=Path, default=None, help="folder to leave the two stores in")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()

    folder = given.keep or Path(tempfile.mkdtemp(prefix="memsweep-packing-"))
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "packing.yaml"
    items = ", ".join(ITEMS.get(name, name) for name in given.mechanisms)
    spec.write_text(SPEC.format(steps=given.steps, seeds=given.seeds, mechanisms=items), encoding="utf-8")
    try:
        runs = [launch(spec, folder / f"store-{gpu}", gpu, given.limit) for gpu in ("1", "auto")]
        measured = shapes(folder / "store-auto")
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    alone, packed = runs
    ratio = {key: alone[key] / packed[key] for key in ("wall_s", "working_s")}
    if given.json:
        print(json.dumps({"runs": runs, "ratio": ratio, "measured": measured}, indent=1))
        return 0
    print(f"{'gpu':>5} {'trials':>6} {'wall s':>7} {'trials/h':>9} {'at work s':>9} {'at once':>7} ", end="")
    print(f"{'s a trial':>9} {'processes':>9} {'attempts':>8} {'accuracy':>8}")
    for run in runs:
        rate = 3600 * run["trials"] / run["wall_s"]
        print(
            f"{run['gpu']:>5} {run['trials']:>6} {run['wall_s']:>7.1f} {rate:>9.0f} {run['working_s']:>9.1f} ", end=""
        )
        print(f"{run['at_once']:>7.1f} {run['trial_s']:>9.2f} {run['processes']:>9} {run['attempts']:>8} ", end="")
        print(f"{run['accuracy']:>8.3f}")
    print(f"auto runs {ratio['wall_s']:.2f} times as many trials an hour, start and end of the command included;")
    print(f"{ratio['working_s']:.2f} times from the first worker's first word to the last one's last")
    for line in measured:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
