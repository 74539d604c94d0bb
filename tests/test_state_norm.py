"""Norms of states, token by token and by step maps written out; and the life of a trial that trains nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mechanisms._parts import unit_norm
from runners import evaluate, tasks, train
from runners import model as models
from runners.schema import EvalSlice, Job, Status, Trial, UserError
from runners.store import read_sealed
from runners.tasks.state_norm import slope
from runners.trial import run_job

CPU = torch.device("cpu")


def trial(mechanism: Any, task: dict[str, Any] | None = None, **model: Any) -> Trial:
    shell = {"d_model": 16, "n_layers": 2, "n_heads": 1, "short_conv": False, **model}
    task = {"name": "state_norm", "vocab_size": 32, "seq_len": 40, "every": 5, "rows": 2, **(task or {})}
    return Trial("t", 0, {"name": mechanism} if isinstance(mechanism, str) else mechanism, task, shell, None)


def measured(found: Trial) -> dict[str, float]:
    return evaluate.run(models.build(found).eval(), found, found.task, device=CPU)


def states(found: Trial) -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    """The last mixer, in fp64, its inputs token by token (B, D), and its state matrix after each, (T, B, H, ...)."""
    model = models.build(found).double().eval()
    tokens_BT = tasks.build(found.task).batch()
    inputs: list[torch.Tensor] = []
    mixer: Any = model.layers[-1].mixer
    step = mixer.step
    mixer.step = lambda x_BD, state: (inputs.append(x_BD), step(x_BD, state))[1]
    start = [layer.mixer.initial_state(len(tokens_BT), CPU, torch.float64) for layer in model.layers]  # type: ignore[union-attr, operator]
    state: Any = {"time": 0, "layers": start}
    after = []
    with torch.no_grad():
        for t in range(tokens_BT.shape[1]):
            _, state = model.step(tokens_BT[:, t], state)
            after.append(state["layers"][-1]["S"])
    mixer.step = step
    return mixer, inputs, torch.stack(after)


@pytest.mark.parametrize(("mechanism", "position"), [("linear", "none"), ("vla", "learned")])
def test_norm_and_growth_token_by_token(mechanism: str, position: str) -> None:
    found = trial(mechanism, position=position, n_heads=2)
    _, _, S = states(found)
    norm_T = S.flatten(3).norm(dim=-1).mean((1, 2))
    result = measured(found)
    assert result["state_norm"] == pytest.approx(float(norm_T[-1]), rel=1e-4)
    at = torch.arange(25, 41, 5)
    assert result["growth"] == pytest.approx(slope(at.double().log(), norm_T[at - 1].log()), abs=1e-3)
    assert result["n"] == 2


def test_radius_is_that_of_the_step_maps() -> None:
    """DeltaNet's S -> (I - beta k k^T) S, written out for each token of a row."""
    found = trial("deltanet", {"rows": 1})
    mixer, inputs, _ = states(found)
    P = torch.eye(16, dtype=torch.float64)
    grown = []
    with torch.no_grad():
        for x_BD in inputs:
            _, k, _, _ = mixer.project(x_BD[:, None], None)
            key = unit_norm(k[0, 0, 0])
            beta = float(mixer.write(x_BD[:, None]))
            P = P - beta * torch.outer(key, key) @ P
            grown.append(P.norm())
    expected = math.exp(float((grown[-1] / grown[19]).log()) / 20)
    assert measured(found)["radius"] == pytest.approx(expected, abs=2e-3)
    assert expected < 0.999


def test_radius_of_a_fixed_decay_is_the_decay() -> None:
    assert measured(trial("linear"))["radius"] == pytest.approx(1, abs=1e-5)
    gamma = 1 - 2.0**-5  # RetNet's first head
    assert measured(trial("retnet"))["radius"] == pytest.approx(gamma, abs=1e-4)


def test_sums_grow_linearly_and_what_is_erased_does_not() -> None:
    sizes = {"seq_len": 400, "every": 20, "vocab_size": 256}
    assert measured(trial("linear", {**sizes, "tokens": "same"}, n_layers=1))["growth"] == pytest.approx(1, abs=1e-3)
    assert measured(trial("linear", sizes))["growth"] == pytest.approx(1, abs=0.1)
    assert abs(measured(trial("deltanet", sizes))["growth"]) < 0.4


def test_a_longer_row_begins_with_the_shorter() -> None:
    short, long = (tasks.build(trial("linear", {"seq_len": length}).task).batch() for length in (20, 40))
    assert torch.equal(long[:, :20], short)
    assert not torch.equal(long[0], long[1])


def test_what_has_no_matrix_says_so() -> None:
    with pytest.raises(UserError, match="softmax keeps no matrix"):
        measured(trial("softmax"))
    with pytest.raises(UserError, match="seq_len % every == 0"):
        measured(trial("linear", {"every": 7}))


def test_a_trial_that_trains_nothing_ends_at_once_with_its_first_weights() -> None:
    found, commits = trial("vla"), []
    fit = train.fit(
        found,
        device=CPU,
        start=None,
        commit=lambda *given: commits.append(given),
        progress=lambda *_: None,
        should_stop=lambda: False,
        checkpoint_every_s=60,
    )
    assert (fit.status, fit.step, fit.tokens) == ("complete", 0, 0)
    model = train.load_model(found, fit.snapshot, CPU)
    assert evaluate.run(model, found, found.task, device=CPU) == measured(found)
    assert train.batch_rows(found) == 1


def test_its_folder_holds_a_result_and_an_evaluation(tmp_path: Path) -> None:
    found = trial("linear")
    part = EvalSlice("own", "test", found.task, {}, {})
    assert run_job(Job(found, 1, (part,), str(tmp_path), "cpu", 1)).status == Status.COMPLETE
    result, row = (read_sealed(tmp_path / name) for name in ("result.json", "evals/own.json"))
    assert result is not None
    assert row is not None
    assert (result["status"], result["step"], result["tokens"]) == ("complete", 0, 0)
    assert row["metrics"] == measured(found)
    more = EvalSlice("longer", "test", {**found.task, "seq_len": 60}, {}, {})
    assert run_job(Job(found, 2, (part, more), str(tmp_path), "cpu", 1)).status == Status.COMPLETE
    again = read_sealed(tmp_path / "evals/longer.json")
    assert again is not None
    assert again["metrics"]["state_norm"] > row["metrics"]["state_norm"]


@pytest.mark.gpu
def test_the_same_on_the_card() -> None:
    found = trial("vla", {"seq_len": 200})
    assert torch.equal(tasks.build(found.task).batch("cuda").cpu(), tasks.build(found.task).batch())
    here, there = (
        measured(found),
        evaluate.run(models.build(found, "cuda"), found, found.task, device=torch.device("cuda")),
    )
    assert there == pytest.approx(here, rel=1e-3, abs=1e-3)
