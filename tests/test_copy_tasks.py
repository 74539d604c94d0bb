"""Copying and selective copying, read back from their tokens as a person would."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runners import tasks
from runners.schema import UserError


def rows(task: Any, n: int) -> list[tuple[list[int], list[int], list[int]]]:
    batch = task.batch("train", torch.arange(n), 3)
    return list(zip(*(t.tolist() for t in (batch.tokens_BT, batch.position_BQ, batch.target_BQ)), strict=True))


def build(name: str, **settings: Any) -> Any:
    return tasks.build({"name": name, **settings})


@pytest.mark.parametrize("length", [2, 4, 34])
@pytest.mark.parametrize("shown", [True, False])
def test_a_copy_follows_its_separator(length: int, shown: bool) -> None:
    for row, positions, targets in rows(build("copy", vocab_size=9, seq_len=length, shown=shown), 50):
        at = row.index(8)
        text = row[:at]
        assert len(row) == length
        assert len(text) == length // 2
        assert targets == text
        assert positions == list(range(at, length))
        assert row[at + 1 :] == (text[:-1] if shown else [8] * (len(text) - 1))


def test_letters_are_uniform() -> None:
    found = [row[:2] for row, _, _ in rows(build("copy", vocab_size=7, seq_len=4), 20000)]
    assert stats.chisquare(np.bincount([a * 6 + b for a, b in found], minlength=36)).pvalue > 1e-3


def test_exact_wants_a_whole_row() -> None:
    task = build("copy", vocab_size=9, seq_len=8)
    batch = task.batch("test", torch.arange(2), 0)
    logits = torch.nn.functional.one_hot(batch.target_BQ, 9).float()
    logits[1, 2] = logits[1, 2].roll(1)
    scores = task.score(logits, batch)
    assert scores["exact"].tolist() == [1, 0]
    assert scores["accuracy"].tolist() == [1, 0.75]


@pytest.mark.parametrize(
    ("layout", "vocab", "n", "length"),
    [("mamba", 16, 16, 64), ("mamba", 3, 1, 2), ("spread", 128, 16, 33), ("spread", 9, 3, 20)],
)
def test_selective_copies_are_the_letters_in_their_order(layout: str, vocab: int, n: int, length: int) -> None:
    task = build("selective_copy", layout=layout, vocab_size=vocab, n_data=n, seq_len=length)
    letters = set(range(1, vocab - 1)) if layout == "mamba" else set(range(3, vocab // 2 + 2))
    noise = {0} if layout == "mamba" else set(range(vocab // 2 + 3, vocab))
    for row, positions, targets in rows(task, 100):
        body = row[: length - n - (layout == "spread")]
        assert [token for token in body if token in letters] == targets
        assert len(targets) == n
        assert set(body) <= letters | noise
        assert row[len(body) :] == ([vocab - 1] * n if layout == "mamba" else [1] + [2] * n)
        assert positions == list(range(length - n, length))
        assert layout == "mamba" or len(set(targets)) == n


@pytest.mark.parametrize("layout", ["mamba", "spread"])
def test_places_are_a_uniform_choice(layout: str) -> None:
    length = 8 if layout == "mamba" else 9
    task = build("selective_copy", layout=layout, vocab_size=12, n_data=2, seq_len=length)
    letters = range(1, 11) if layout == "mamba" else range(3, 8)
    found = [tuple(t for t in range(6) if row[t] in letters) for row, _, _ in rows(task, 15000)]
    ways = list(combinations(range(6), 2))
    assert stats.chisquare(np.bincount([ways.index(way) for way in found], minlength=len(ways))).pvalue > 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "rule"),
    [
        ("copy", {"seq_len": 7}, "even"),
        ("copy", {"vocab_size": 2}, "vocab_size >= 3"),
        ("selective_copy", {"n_data": 16, "seq_len": 31}, "2 * n_data <= seq_len"),
        ("selective_copy", {"layout": "spread", "vocab_size": 16, "n_data": 8}, "n_data <= vocab_size // 2 - 1"),
    ],
)
def test_what_cannot_be_is_refused(name: str, settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError) as caught:
        build(name, **settings)
    assert rule in str(caught.value)
