"""What is told of the ops on each trial: it is measured on the trial's own numbers, and a wrong op would show."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import plans
import pytest
import stores
import torch
from test_train import CPU, fit, same, trial
from torch import Tensor

import kernels
from runners import driver, kernel_evidence
from runners import train as training
from runners.kernel_evidence import EVIDENCE_FILE, Witness


def example(op: str, T: int = 33) -> dict[str, Any]:
    module = importlib.import_module(f"kernels.{op}")
    return next(iter(module.examples(T, torch.float32, torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("op", kernels.names())
def test_each_op_is_right_and_repeats_itself(op: str) -> None:
    found = kernels.evidence(op, example(op))
    assert (found["op"], found["impl"], found["dtype"], found["law"]) == (op, "chunked", "float32", "reference")
    assert 0 < max(found["errors"].values()) < 1e-4
    assert {name.partition(".")[0] for name in found["errors"]} == {"output", "gradient"}
    assert found["repeatable"]


def test_a_wrong_op_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("kernels.linear_attention")
    right, calls = module.linear_attention, []

    def one_percent_off(*args: Any, impl: str = "auto", **kwargs: Any) -> Any:
        o, state = right(*args, impl=impl, **kwargs)
        return (o, state) if impl != "auto" else (o * 1.01, state)

    def never_the_same(*args: Any, impl: str = "auto", **kwargs: Any) -> Any:
        o, state = right(*args, impl=impl, **kwargs)
        calls.append(impl)
        return o + 1e-6 * len(calls), state

    given = example("linear_attention")
    monkeypatch.setattr(module, "linear_attention", one_percent_off)
    assert kernels.evidence("linear_attention", given)["errors"]["output.0"] == pytest.approx(0.01, rel=0.01)
    monkeypatch.setattr(module, "linear_attention", never_the_same)
    assert not kernels.evidence("linear_attention", given)["repeatable"]


def test_each_kind_of_call_is_heard_once_and_its_first_row_is_kept() -> None:
    op = kernels.get("linear_attention")
    q, k, v = (torch.randn(3, 8, 2, 4) for _ in range(3))
    with kernels.heard() as calls:
        for _ in range(2):
            op(q, k, v, scale=1.0)
        op(q, k, v, scale=0.5)
        op(q[:, :5], k[:, :5], v[:, :5], scale=1.0, impl="reference")
    op(q, k, v, scale=2.0)
    assert [(call.op, call.inputs["scale"], call.impl) for call in calls] == [
        ("linear_attention", 1.0, "auto"),
        ("linear_attention", 0.5, "auto"),
        ("linear_attention", 1.0, "reference"),
    ]
    assert torch.equal(calls[0].inputs["q"], q[:1])
    q.zero_()
    assert calls[0].inputs["q"].any(), "a copy"


def test_a_training_is_the_same_under_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    of = trial(mechanism="hola", steps=4)
    told = fit(of)
    assert told.evidence is not None
    assert {row["op"] for row in told.evidence} == {"short_conv", "delta_rule", "cache_attention"}
    for row in told.evidence:
        assert all(shape[0] == 1 for name, shape in row["shapes"].items() if len(shape) >= 3), row
    monkeypatch.setattr(Witness, "tell", lambda self: [])
    same(told, fit(of))


def test_a_check_that_fails_is_told_and_fails_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: str, inputs: dict[str, Tensor], impl: str = "auto") -> Any:
        raise RuntimeError("no fp64 here")

    monkeypatch.setattr("kernels._evidence.evidence", broken)
    monkeypatch.setattr(kernel_evidence, "_known", {})
    run = training._Run(trial(mechanism="linear", steps=2), CPU)
    while not run.over:
        run.advance()
    result = run.final()
    assert result.status == "complete"
    assert result.evidence is not None
    assert {row["problem"] for row in result.evidence} == {"RuntimeError: no fp64 here"}
    assert "could not be checked: RuntimeError: no fp64 here" in kernel_evidence.words(result.evidence[0])


def test_a_trial_keeps_it(tmp_path: Path) -> None:
    store, plan = stores.make(tmp_path / "runs"), plans.plan(seeds=[0], lrs=[1e-3, 3e-3])
    driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    for member in plan.members:
        result = store.result(member.trial.id)
        assert result is not None
        kept = json.loads((store.trial_folder(member.trial.id) / "attempts" / "1" / EVIDENCE_FILE).read_text())
        assert result["kernels"] == [kernel_evidence.brief(row) for row in kept]
        assert {row["op"] for row in kept} >= {"short_conv"}
        log = (store.trial_folder(member.trial.id) / "attempts" / "1" / "log.txt").read_text()
        assert "op short_conv: chunked, float32, error" in log
