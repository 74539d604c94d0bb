"""The needle in a haystack, found again by reading the row from its beginning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runners import tasks
from runners.schema import UserError


def build(**settings: Any) -> Any:
    return tasks.build({"name": "niah_synthetic", **settings})


def rows(task: Any, n: int, split: str = "train") -> list[tuple[list[int], list[int], list[int]]]:
    batch = task.batch(split, torch.arange(n), 3)
    return list(zip(*(t.tolist() for t in (batch.tokens_BT, batch.position_BQ, batch.target_BQ)), strict=True))


def needles(row: list[int], length: int) -> dict[int, tuple[int, list[int]]]:
    """Key -> (where its needle begins, its value)."""
    starts = [t for t in range(len(row) - length - 1) if row[t] == 0]
    return {row[t + 1]: (t, row[t + 2 : t + 2 + length]) for t in starts}


@pytest.mark.parametrize("haystack", ["noise", "random", "needles"])
@pytest.mark.parametrize(("n", "asked", "length"), [(1, 1, 4), (4, 1, 1), (5, 5, 2)])
def test_the_answer_is_what_the_needle_says(haystack: str, n: int, asked: int, length: int) -> None:
    vocab, seq_len = 96, 61
    task = build(vocab_size=vocab, seq_len=seq_len, haystack=haystack, n_needles=n, n_queries=asked, value_len=length)
    for row, positions, targets in rows(task, 60):
        body = seq_len - asked * (length + 1)
        found = needles(row[:body], length)
        assert len(found) == (n if haystack != "needles" else body // (length + 2))
        assert len(row) == seq_len
        said = []
        for at in range(body, seq_len, length + 1):
            key, value = row[at + 1], found[row[at + 1]][1]
            assert row[at] == 1
            assert row[at + 2 : at + length + 1] == value[:-1]
            assert 2 <= key < 26
            assert all(26 <= token < 50 for token in value)
            said += [(at + 1 + i, token) for i, token in enumerate(value)]
        assert list(zip(positions, targets, strict=True)) == said
        inside = {t for start, _ in found.values() for t in range(start, start + length + 2)}
        hay = [(t, row[t]) for t in range(body) if t not in inside]
        assert all(50 <= token < vocab for _, token in hay)
        if haystack == "noise":
            assert all(token == 50 + t % 25 for t, token in hay)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth_is_where_the_needle_asked_for_lies(depth: float) -> None:
    task = build(seq_len=6 * 41 + 5, n_needles=4, depth=depth)
    for row, positions, _ in rows(task, 40, "test"):
        start, _ = needles(row[: task.body], 4)[row[positions[0]]]
        assert start == 6 * round(depth * 40)


def test_a_map_by_depth_moves_the_needle_and_nothing_else() -> None:
    first, last = (rows(build(haystack="random", depth=depth), 20, "test") for depth in (0.0, 1.0))
    for (row, _, target), (other, _, other_target) in zip(first, last, strict=True):
        assert target == other_target
        assert row[6 : 251 - 11] == other[6 : 251 - 11]
        assert row[251:] == other[251:]


def test_without_a_depth_every_place_is_as_likely() -> None:
    task = build(vocab_size=64, seq_len=35, n_needles=3, value_len=1)
    at = [needles(row[:33], 1)[row[34]][0] // 3 for row, _, _ in rows(task, 15000)]
    assert stats.chisquare(np.bincount(at, minlength=11)).pvalue > 1e-3


def test_exact_is_a_share_of_answers() -> None:
    task = build(n_needles=2, n_queries=2, value_len=3)
    batch = task.batch("test", torch.arange(2), 0)
    logits = torch.nn.functional.one_hot(batch.target_BQ, task.vocab_size).float()
    logits[1, 4] = logits[1, 4].roll(1)
    assert task.score(logits, batch)["exact"].tolist() == [1, 0.5]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"seq_len": 10}, "<= seq_len"),
        ({"n_queries": 2}, "n_needles >= n_queries >= 1"),
        ({"n_needles": 2, "n_queries": 2, "depth": 0.5}, "depth is None or n_queries == 1"),
        ({"haystack": "needles", "vocab_size": 64}, "n_needles <= vocab_size // 4"),
        ({"depth": 1.5}, "0 <= depth <= 1"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError) as caught:
        build(**settings)
    assert rule in str(caught.value)
