"""Time and memory by length: what is timed, and where curves cross. Not covered: how fast anything is."""

from __future__ import annotations

import pytest
import torch

import mechanisms
from dashboards.crossings import crossing
from runners import kernel_bench
from runners import model as models
from runners.schema import Trial
from runners.tasks.latency import Task

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PHASES = ("forward", "train", "prefill", "decode")


def built(mechanism: str, seq_len: int = 33) -> models.Model:
    task = {"name": "latency", "vocab_size": 16, "seq_len": seq_len}
    model = {"d_model": 16, "n_layers": 1, "n_heads": 2, "mlp": "none"}
    return models.build(Trial("t", 0, {"name": mechanism}, task, model, None), DEVICE)


@pytest.mark.parametrize("phase", PHASES)
def test_a_pass_leaves_the_model_as_it_was(phase: str) -> None:
    model = built("gated_deltanet")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = Task(vocab_size=16, seq_len=33, phase=phase, dtype="fp32", repeats=3).measure(model, DEVICE)  # type: ignore[arg-type]
    assert found["n"] == 3
    assert found["ms"] > 0
    assert found["called_ms"] > 0
    assert ("peak_mb" in found) == (DEVICE.type == "cuda")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_timed_is_what_the_model_computes(phase: str) -> None:
    """The result of a pass against the same tokens read in another way."""
    model, task = built("deltanet"), Task(vocab_size=16, seq_len=33, phase=phase, dtype="fp32", rows=2)  # type: ignore[arg-type]
    run = task._pass(model, DEVICE)
    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "a pass goes on from the one before"
    if phase == "train":
        assert len(first) == len(list(model.parameters()))
        assert all(x.isfinite().all() for x in first)
        assert any((x != 0).any() for x in first)
        return
    assert first[0].shape[0] == 2
    assert not first[0].requires_grad
    whole = Task(vocab_size=16, seq_len=33, phase="forward", dtype="fp32", rows=2)._pass(model, DEVICE)()[0]
    if phase == "prefill":
        torch.testing.assert_close(first[0], whole[:, -1], rtol=1e-4, atol=1e-5)
    assert first[0].shape == (whole.shape if phase == "forward" else whole[:, -1].shape)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mechanism", mechanisms.names())
def test_every_pass_is_recorded_on_a_card(mechanism: str, phase: str) -> None:
    model, task = built(mechanism, 100), Task(vocab_size=16, seq_len=100, phase=phase, repeats=2)  # type: ignore[arg-type]
    assert kernel_bench.recorded(task._pass(model, DEVICE)) is not None
    assert task.measure(model, DEVICE)["peak_mb"] > 0


def test_curves_cross_where_they_cross_for_the_last_time() -> None:
    softmax = {1024.0: 1.0, 2048.0: 4.0, 4096.0: 16.0, 8192.0: 64.0}
    assert crossing({n: 2.0 * n / 1024 for n in softmax}, softmax) == pytest.approx(2048, rel=1e-9)
    assert crossing({n: 3.0 * n / 1024 for n in softmax}, softmax) == pytest.approx(3072, rel=1e-9)
    assert crossing({n: 0.5 for n in softmax}, softmax) == 0
    assert crossing({n: 100.0 for n in softmax}, softmax) is None
    twice = {1024.0: 0.5, 2048.0: 5.0, 4096.0: 15.0}  # ln 1.25 above, then ln 16/15 below: 0.7757 of an octave
    assert crossing(twice, softmax) == pytest.approx(2048 * 2**0.7757, rel=1e-3)
    assert crossing({512.0: 0.1}, softmax) is None, "no load in common"
