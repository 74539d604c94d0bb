"""Training on a card: no waiting inside a step, and CUDA graphs that change no bit. Needs one."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from test_train import CLEAN, SEGMENTS, Log, fit, same, stop_after, trial

import mechanisms
from runners import model as models
from runners import tasks
from runners import train as training
from runners.schema import Trial

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"layers": ["mechanism", "softmax"], "n_layers": 4},
    "base_conv": {"layers": ["base_conv", "mechanism"], "norm_type": "rms"},
    "hyper_link": {"block": "hyper_link"},
    "lobe": {"block": "hyper_link", "lobe": "causal"},
    "experts outer": {"moe": {"name": "moe", "experts": 4, "top_k": 2, "bias": "outer"}},
    "experts inner": {"moe": {"name": "moe", "experts": 5, "top_k": 1, "bias": "inner"}, "block": "hyper_link"},
    "swiglu": {"mlp": {"name": "swiglu"}, "norm_type": "rms", "norm": "post"},
}


def test_no_step_waits_for_the_card() -> None:
    run = training._Run(trial(steps=1000, eval_every=1000), CARD)
    for _ in range(40):  # warm: allocations, kernels, rows made ahead
        run.advance()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(run.log_every - 1):
            run.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.step == 40 + run.log_every - 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_learns_on_the_card(dtype: str) -> None:
    result = fit(trial(steps=250, batch_size=16, task=CLEAN, dtype=dtype), device=CARD)
    assert result.metrics["valid/accuracy"] > 0.9


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mechanism", mechanisms.names())
def test_recorded_updates_are_the_updates(mechanism: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = trial(mechanism=mechanism, steps=40, dtype=dtype, task={"segments": SEGMENTS, "order": "mixed"})
    recorded_updates_are_the_updates(of, monkeypatch)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_recorded_updates_of_every_kind_of_block(model: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = trial(mechanism="gated_deltanet", steps=40, dtype=dtype, task={"segments": SEGMENTS, "order": "mixed"})
    recorded_updates_are_the_updates(dataclasses.replace(of, model={**of.model, **MODELS[model]}), monkeypatch)


def recorded_updates_are_the_updates(of: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    run = training._Run(of, CARD)
    while not run.over:
        run.advance()
    assert run.update.on, "no graph could be recorded"
    assert len(run.update._recordings) >= 2, "one for each shape of batch"
    monkeypatch.setenv("MEMSWEEP_CUDA_GRAPHS", "0")
    same(run.final(), fit(of, device=CARD))


IMAGES: dict[str, dict[str, Any]] = {
    "digits": {"name": "digits", "patch": 2, "examples": 40, "valid_examples": 20},
    "detection": {"name": "detection", "image_size": 32, "max_objects": 1, "examples": 40, "valid_examples": 20},
}


@pytest.mark.parametrize("task", IMAGES)
@pytest.mark.parametrize("mechanism", ["ela", "softmax", "gated_deltanet"])
def test_recorded_updates_of_images(mechanism: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if task == "detection":
        pytest.importorskip("pycocotools", reason="needs pycocotools (extra vision)")
    model = {"d_model": 32, "n_layers": 2, "n_heads": 2, "short_conv": False, "causal": False, "position": "learned"}
    train = {"steps": 30, "batch_size": 16, "lr": 3e-3}  # an epoch is 16, 16 and 8 rows
    recorded_updates_are_the_updates(Trial("t", 0, {"name": mechanism}, IMAGES[task], model, train), monkeypatch)


@pytest.mark.parametrize("mechanism", ["conv", "ela", "softmax", "gated_deltanet"])
def test_images_are_read_on_the_card_as_on_the_cpu(mechanism: str) -> None:
    model = {"d_model": 32, "n_layers": 2, "n_heads": 2, "short_conv": False, "causal": False, "position": "learned"}
    found = []
    for device in (torch.device("cpu"), CARD):
        built = models.build(Trial("t", 0, {"name": mechanism}, IMAGES["detection"], model, None), device)
        batch = tasks.build(IMAGES["detection"]).batch("train", torch.arange(8), 0, device)
        loss = batch.mean_loss(built(batch.tokens_BT, batch.position_BQ))
        loss.backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu() for p in built.parameters() if p.grad is not None)])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=2e-3, atol=2e-4 * float(here.abs().max() + 1))


def test_a_recording_is_not_spoilt_by_what_is_left_of_an_earlier_trial() -> None:
    """Objects that hold each other live until Python looks for them, which it may do at any allocation."""
    before = gc.get_threshold()
    gc.disable()
    for _ in range(2):
        run = training._Run(trial(steps=10), CARD)
        while not run.over:
            run.advance()
        run.itself = run  # type: ignore[attr-defined]
        assert run.update.on
        del run
        gc.set_threshold(1, 1, 1)
        gc.enable()
    gc.set_threshold(*before)


def test_a_resumed_run_records_anew() -> None:
    of = trial(steps=40)
    whole, log = fit(of, device=CARD), Log()
    first = fit(of, device=CARD, should_stop=stop_after(17), log=log)
    assert first.status == "interrupted"
    same(whole, fit(of, device=CARD, start=log.snapshots[-1]))


def test_an_update_that_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    of = trial(steps=20)
    whole = fit(of, device=CARD)
    run = training._Run(of, CARD)
    update = run.update._update

    def waits(batch):
        loss, norm = update(batch)
        float(loss)
        return loss, norm

    said = []
    run.update._update, run.update._tell = waits, said.append
    while not run.over:
        run.advance()
    assert not run.update.on
    assert "without CUDA graphs" in said[0]
    assert run.final().metrics == whole.metrics
