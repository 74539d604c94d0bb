"""Readings of a memory: their formulas, every mechanism by the common hook, and that looking changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mechanisms
from runners import model as models
from runners import probes, tasks, train
from runners.model import Model
from runners.schema import Trial
from sweeps.catalog import Catalog
from sweeps.plan import load
from sweeps.reader import SpecError

CPU = torch.device("cpu")
TASK = {"name": "mqar", "vocab_size": 64, "seq_len": 32, "n_pairs": 4, "examples": 64, "valid_examples": 12}
SMALL: dict[str, dict[str, Any]] = {
    "raven": {"slots": 8, "top_k": 2},
    "hola": {"cache": 6, "block": 4, "admission": "recency"},
    "log_linear": {"d_state": 4},
    "mamba2": {"d_state": 4},
}


def trial(name: str, **settings: Any) -> Trial:
    model = {"d_model": 16, "n_layers": 2, "n_heads": 2, **settings.pop("model", {})}
    train = {"steps": 4, "batch_size": 8, "eval_every": 2, **settings.pop("train", {})}
    return Trial("t", 0, {"name": name, **SMALL.get(name, {}), **settings}, TASK, model, train)


def read(found: Trial) -> tuple[Model, dict[str, float]]:
    model = models.build(found)
    return model, probes.read(model, tasks.build(found.task), CPU, "fp32")


@pytest.mark.parametrize("name", mechanisms.names())
def test_every_mechanism_is_read_by_one_hook(name: str) -> None:
    model, found = read(trial(name))
    assert model.training
    assert all(math.isfinite(value) for value in found.values())
    start = model.layers[0].mixer.initial_state(1, CPU, torch.bfloat16)  # type: ignore[union-attr, operator]
    matrices = {key for key, x in start.items() if x.dtype == torch.float32 and x.dim() >= 4}
    for number in range(2):
        for key in matrices:
            assert found[f"probe/{number}/norm/{key}"] > 0
            assert 0 < found[f"probe/{number}/rank/{key}"] <= start[key].shape[-1] + 1e-9
    assert found or name in ("conv", "softmax", "sliding_window")


def test_effective_numbers() -> None:
    weight = torch.tensor([[1.0, 1, 1, 1], [0, 5, 0, 0], [0, 0, 0, 0], [2, 2, 0, 0]])
    torch.testing.assert_close(probes.effective_number(weight), torch.tensor([4.0, 1, 0, 2], dtype=torch.float64))


@pytest.mark.parametrize("settings", [{}, {"erase": "write"}, {"precision": "identity"}, {"nudge": True}])
def test_vla_tells_the_norms_of_its_steps(settings: dict[str, Any]) -> None:
    mixer: Any = models.build(trial("vla", **settings)).double().layers[0].mixer
    x_BTD = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, state = mixer(x_BTD)
    found = mixer.probe(x_BTD, state)
    k_raw = mixer.project(x_BTD, None)[1]
    key = torch.nn.functional.normalize(torch.nn.functional.elu(k_raw) + 1, dim=-1)
    A, product, norms = torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8) / mixer.lambda0, None, []
    for t in range(9):
        write = key[:, t]
        if mixer.penalty is not None:
            u = torch.nn.functional.normalize(mixer.penalty(k_raw[:, t].flatten(1)).unflatten(1, (2, 8)), dim=-1)
            u = u * 8**-0.5
            A = (A.inverse() + u[..., None] * u[..., None, :]).inverse()
            write = torch.nn.functional.normalize((A @ write[..., None])[..., 0], dim=-1)
        erase = write if mixer.erase == "write" else key[:, t]
        step = torch.eye(8, dtype=torch.float64) - erase[..., None] * write[..., None, :]
        product = step if product is None else product @ step
        norms.append(torch.linalg.matrix_norm(step, 2))
    torch.testing.assert_close(found["step_norm"], torch.stack(norms, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["product_norm"], torch.linalg.matrix_norm(product, 2), rtol=1e-6, atol=1e-6)
    if mixer.penalty is not None:
        torch.testing.assert_close(found["condition"], torch.linalg.cond(A), rtol=1e-6, atol=1e-6)


def test_what_slots_levels_and_caches_tell() -> None:
    _, raven = read(trial("raven"))
    assert 2 <= raven["probe/0/effective/slots"] <= 8
    _, gsa = read(trial("gsa", slots=8))
    assert 1 <= gsa["probe/1/effective/slots"] <= 8
    _, levels = read(trial("log_linear", lam="softmax"))
    weights = [value for name, value in levels.items() if name.startswith("probe/0/lambda/")]
    assert sum(weights) == pytest.approx(1)
    _, hola = read(trial("hola"))  # 32 tokens, blocks of 4: the cache holds the newest six that are in finished blocks
    ages = [hola[f"probe/0/age/{n}"] for n in range(4)]
    assert ages == [1, 0, 0, 0]
    _, hybrid = read(trial("linear", model={"n_layers": 3, "layers": ["base_conv", "softmax", "mechanism"]}))
    assert {name.split("/")[1] for name in hybrid} == {"2"}
    _, linked = read(trial("linear", model={"block": "hyper_link", "lobe": "causal"}))
    assert {name.split("/")[1] for name in linked} == {"0", "1"}


def test_looking_changes_nothing_but_what_is_told() -> None:
    fits = {}
    for probe in (False, True):
        points: list[train.Point] = []
        fits[probe] = train.fit(
            trial("raven", train={"probe": probe}),
            device=CPU,
            start=None,
            commit=lambda _, found, points=points: points.extend(found),  # type: ignore[misc]
            progress=lambda *_: None,
            should_stop=lambda: False,
            checkpoint_every_s=1e9,
        )
        told = {point.step for point in points if any(name.startswith("probe/") for name in point.metrics)}
        assert told == ({2, 4} if probe else set())
    plain, probed = (fits[probe].snapshot.tensors for probe in (False, True))
    assert all(torch.equal(plain[name], probed[name]) for name in plain)
    assert {name for name in fits[True].metrics if name not in fits[False].metrics} == {
        f"probe/{layer}/{name}"
        for layer in range(2)
        for name in ("norm/keys", "rank/keys", "norm/values", "rank/values", "effective/slots")
    }


def test_a_comparison_of_looking_with_not_looking_is_refused(tmp_path: Path) -> None:
    spec = f"sweep: x\nquestion: y?\ntask: {TASK}\ntrain: {{steps: 4, batch_size: 8}}\nseeds: 6\n".replace("'", "")
    spec += "axes:\n  mechanism: [linear]\n  train.probe: [true, false]\n"
    (tmp_path / "x.yaml").write_text(spec + "compare: [{a: {train.probe: true}, b: {train.probe: false}}]\n")
    with pytest.raises(SpecError, match="everywhere both sides are the same model"):
        load(str(tmp_path / "x.yaml"), catalog=Catalog())
