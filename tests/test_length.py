"""Every synthetic task at lengths it was not trained on, and its rows whoever makes them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import multiprocessing
from typing import Any

import pytest
import torch

from runners import evaluate, tasks
from runners import model as models
from runners.feed import TOKENS_AHEAD, Feed
from runners.schema import Trial

CPU = torch.device("cpu")
SHORT: dict[str, dict[str, Any]] = {
    "copy": {"vocab_size": 12, "seq_len": 16},
    "mqar": {"vocab_size": 300, "seq_len": 16, "n_pairs": 2, "power": 1.0},
    "niah_synthetic": {"vocab_size": 32, "seq_len": 16, "n_needles": 2, "value_len": 1, "depth": 0.5},
    "regbench": {
        "nodes": 4,
        "edges": 2,
        "symbols": 4,
        "vocab_size": 6,
        "min_strings": 2,
        "max_strings": 2,
        "max_len": 8,
    },
    "selective_copy": {"vocab_size": 12, "n_data": 4, "seq_len": 16},
}
LONGER: dict[str, str] = {"regbench": "max_strings"}
"""What makes a row longer, where it is not its length."""
KINDS = {
    "mqar updates": ("mqar", {"updates": 1}),
    "mqar compositional": ("mqar", {"layout": "compositional", "n_pairs": 1}),
    "mqar end": ("mqar", {"layout": "end"}),
    "mqar vla": ("mqar", {"layout": "vla", "vocab_size": 12}),
    "mqar segments": ("mqar", {"segments": [{"seq_len": 8, "n_pairs": 1}, {}], "order": "mixed"}),
    "niah random": ("niah_synthetic", {"haystack": "random", "depth": None, "n_queries": 2}),
    "selective spread": ("selective_copy", {"layout": "spread"}),
    **{name: (name, {}) for name in SHORT},
}

KNOWN = {
    "copy": "12995d1b4543",
    "mqar": "fadae152b22a",
    "mqar compositional": "8f5c9124042c",
    "mqar end": "fd0390f06783",
    "mqar segments": "b9ebfba05dbb",
    "mqar updates": "350e78318e6c",
    "mqar vla": "2f102ad8c83a",
    "niah random": "55a44b7a9bea",
    "niah_synthetic": "9ad4121c708b",
    "regbench": "f476e2d3f2f4",
    "selective spread": "8cc40de04c1b",
    "selective_copy": "cb402651e7ff",
}
"""The first batch of each kind: results are compared over years, so its rows never change without a REVISION."""


def settings(kind: str, times: int = 1) -> dict[str, Any]:
    name, own = KINDS[kind]
    found = {"name": name, "examples": 40, "valid_examples": 3, "test_examples": 3, **SHORT[name], **own}
    longer = LONGER.get(name, "seq_len")
    return {**found, longer: found[longer] * times}


def decoded(model: Any, task: Any) -> dict[str, float]:
    """The scores of the test rows with the model read token by token, its state its only memory."""
    batch = task.batch("test", torch.arange(3), 0)
    n, state = len(batch.tokens_BT), None
    layers = [layer.mixer.initial_state(n, CPU, torch.float32) for layer in model.layers]
    state, logits = {"time": 0, "layers": layers}, []
    with torch.no_grad():
        for t in range(batch.tokens_BT.shape[1]):
            after, state = model.step(batch.tokens_BT[:, t], state)
            logits.append(after)
    at_BQ1 = batch.position_BQ[..., None].expand(-1, -1, model.vocab_size)
    scores = task.score(torch.stack(logits, 1).gather(1, at_BQ1), batch)
    return {name: float(value.mean()) for name, value in scores.items()}


@pytest.mark.parametrize(
    ("kind", "times", "mechanism", "position"),
    [
        ("mqar", 16, "linear", "none"),
        ("copy", 4, "softmax", "rope"),
        ("selective_copy", 4, "gated_deltanet", "learned"),
        ("niah_synthetic", 4, "deltanet", "none"),
        ("regbench", 4, "gla", "none"),
    ],
)
def test_longer_rows_are_scored_as_decoding_reads_them(kind: str, times: int, mechanism: str, position: str) -> None:
    """A model of short rows, evaluated on longer ones: the same scores as reading those with a state of fixed size."""
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 1, "mlp": "none", "position": position}
    found = Trial("t", 0, {"name": mechanism}, settings(kind), shape, {"steps": 1, "batch_size": 2})
    model, longer = models.build(found).eval(), settings(kind, times)
    task = tasks.build(longer)
    assert task.seq_len >= times * tasks.build(found.task).seq_len
    scores = evaluate.run(model, found, longer, device=CPU)
    assert scores.pop("n") == 3
    assert scores == pytest.approx(decoded(model, task), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_of_one_to_sixteen_times_have_rows(kind: str) -> None:
    rows = [tasks.build(settings(kind, times)).batch("test", torch.arange(3), 0) for times in (1, 2, 4, 8, 16)]
    lengths = [batch.tokens_BT.shape[1] for batch in rows]
    assert all(after >= 2 * before for before, after in itertools.pairwise(lengths))
    for batch in rows:
        known = batch.target_BQ >= 0
        assert known.any()
        assert batch.position_BQ.max() < batch.tokens_BT.shape[1]


def digests(kind: str, steps: list[int]) -> list[str]:
    """A hash of the training batch of each of `steps`, made in this order by one feed."""
    feed = Feed(tasks.build(settings(kind)), 8, 11, CPU)
    found = []
    for step in steps:
        batch = feed.batch(step)
        parts = [getattr(batch, field.name).contiguous().numpy().tobytes() for field in dataclasses.fields(batch)]
        found.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return found


def everything(_: int) -> list[list[str]]:
    return [digests(kind, [0, 3]) for kind in KINDS]


@pytest.fixture
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are made a few at a time: making hundreds costs seconds."""
    monkeypatch.setitem(TOKENS_AHEAD, "cpu", 400)


def test_four_workers_see_the_batches_of_one(few_ahead: None) -> None:
    here = everything(0)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(everything, range(4)) == [here] * 4


def test_rows_are_what_they_were(few_ahead: None) -> None:
    assert {kind: digests(kind, [0])[0][:12] for kind in KINDS} == KNOWN


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_sees_the_batches_it_would_have_seen(kind: str, few_ahead: None) -> None:
    whole = digests(kind, list(range(8)))
    assert digests(kind, [6, 7]) == whole[6:]
    assert len(set(whole)) >= 5, "five batches an epoch, in fixed data in order the same in each"
