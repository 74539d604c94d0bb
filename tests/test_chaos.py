"""Three kills in one sweep, and it ends like one that was left alone. `make chaos` has more of them, and nodes too."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import chaos
import pytest
import stores

from sweeps import cli

SPEC = """
sweep: few
task: {name: mqar, vocab_size: 64, seq_len: 32, n_pairs: 2, valid_examples: 32, test_examples: 32}
model: {d_model: 32, n_layers: 1, n_heads: 1}
train: {steps: 200, batch_size: 16, lr: 3e-3, eval_every: 50}
axes:
  mechanism: [linear, {name: hola, cache: 4, block: 8}]
seeds: 2
retry: {infra: 5}
"""


def undisturbed(spec: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As `chaos.undisturbed`, in this process, which has imported everything."""
    folder.mkdir()
    options = ["--store", str(folder / "runs"), "--no-report", "--executor", "inline"]
    monkeypatch.setattr(sys, "argv", ["sweep", "launch", str(spec), *options])
    assert cli.main() == 0
    return chaos.truth(chaos.Store.open(folder / "runs"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_sweep_ends_like_one_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "few.yaml"
    spec.write_text(SPEC)
    expected = undisturbed(spec, tmp_path / "undisturbed", monkeypatch)
    assert len(expected) == 4
    store = stores.make(tmp_path / "disturbed" / "runs")
    killed = chaos.disturb(spec, store, 3, random.Random(1), None)
    log = (tmp_path / "disturbed" / "driver.log").read_text()
    assert killed.total() == 3, log
    assert killed["driver"] >= 1, log
    assert killed["worker"] >= 1, log
    assert chaos.differences(store, expected, "few") == []


def test_what_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: a changed number, a lost trial and a second run are each told."""
    spec = tmp_path / "one.yaml"
    spec.write_text(
        SPEC.replace("steps: 200", "steps: 10").replace("seeds: 2", "seeds: 1").replace("sweep: few", "sweep: one")
    )
    expected = undisturbed(spec, tmp_path / "alone", monkeypatch)
    store = chaos.Store.open(tmp_path / "alone" / "runs")
    assert chaos.differences(store, expected, "one") == []
    first, second = expected
    altered = expected | {first: expected[first] | {"tokens": 1}, "lost": expected[second]}
    wrong = chaos.differences(store, altered, "one")
    assert any(line.startswith(f"{first}: tokens differs") for line in wrong)
    assert "lost: not in the disturbed sweep" in wrong
    client = chaos.record.make_client(store.mlflow_uri)
    experiment = client.get_experiment_by_name("one")
    client.create_run(experiment.experiment_id, tags={"memsweep.kind": "trial", "memsweep.trial_id": first})
    wrong = chaos.differences(store, expected, "one")
    assert f"{first}: 2 runs in MLflow" in wrong
    assert f"{first}: its run is still RUNNING" in wrong
