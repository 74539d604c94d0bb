"""Conformance of every task, found by file name, and the laws of MQAR against a slow, obvious version."""

import dataclasses
import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runners import tasks
from runners.batch import NO_LABEL, SPLITS
from runners.schema import UserError
from sweeps import formula

SMALL: dict[str, dict[str, Any]] = {
    "detection": {"image_size": 32, "max_objects": 1},
    "copy": {"vocab_size": 16, "seq_len": 24},
    "mqar": {"vocab_size": 64, "seq_len": 32, "n_pairs": 4},
    "niah_synthetic": {"vocab_size": 32, "seq_len": 48, "n_needles": 3, "n_queries": 2, "value_len": 3},
    "regbench": {"edges": 3, "symbols": 18, "max_len": 12, "max_strings": 12},
    "selective_copy": {"seq_len": 48, "n_data": 8, "layout": "mamba"},
    "text": {"vocab_size": 260, "seq_len": 16, "data_files": "noise"},
}
"""Settings of a task that make it quick; a task without an entry is tested as it is by default."""

FIXED = {"digits"}
"""Tasks whose training rows are the same for every seed, in another order."""

ON_AVERAGE = {"total_variation"}
"""Metrics whose chance level is that of the mean row."""

SEGMENTS = [{"seq_len": 16, "n_pairs": 2, "examples": 40}, {"seq_len": 32, "n_pairs": 8, "examples": 25}]


def small(name: str, **settings: Any) -> Any:
    return tasks.build({"name": name, **SMALL.get(name, {}), **settings})


@pytest.fixture(autouse=True, scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A text in which no row stands twice."""
    path = tmp_path_factory.mktemp("text") / "noise"
    path.write_bytes(np.random.default_rng(0).bytes(500_000))
    SMALL["text"]["folder"] = str(path.parent)


def whole(task: Any, scores: dict[str, torch.Tensor]) -> dict[str, float]:
    """The metrics of a set from those of its rows."""
    means = {metric: float(value.double().mean()) for metric, value in scores.items()}
    return means | (task.of_means(means) if hasattr(task, "of_means") else {})


TRAINED = [name for name in tasks.names() if importlib.import_module(f"runners.tasks.{name}").TRAINS]
every_task = pytest.mark.parametrize("name", TRAINED)
every_task_of_tokens = pytest.mark.parametrize(
    "name", [name for name in TRAINED if not hasattr(importlib.import_module(f"runners.tasks.{name}"), "PATCHES")]
)


@every_task
def test_a_row_is_the_same_whatever_shares_its_batch(name: str) -> None:
    task = small(name)
    for split in SPLITS:
        index_B = torch.tensor([3, 11, 7, 0, 30])
        whole = task.batch(split, index_B, 5)
        for place, index in enumerate(index_B.tolist()):
            alone = task.batch(split, torch.tensor([index]), 5)
            assert torch.equal(alone.tokens_BT[0], whole.tokens_BT[place])
            assert torch.equal(alone.position_BQ[0], whole.position_BQ[place])
            assert torch.equal(alone.target_BQ[0], whole.target_BQ[place])


@every_task
def test_splits_and_seeds(name: str) -> None:
    """Validation and test rows are for every seed the same; training rows are not, and no row is in two splits."""
    task = small(name)
    rows: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    index_B = torch.arange(200)
    for split in SPLITS:
        for seed in (0, 1):
            rows[split, seed] = {tuple(row) for row in task.batch(split, index_B, seed).tokens_BT.flatten(1).tolist()}
            assert len(rows[split, seed]) == 200
    assert rows["valid", 0] == rows["valid", 1]
    assert rows["test", 0] == rows["test", 1]
    for a, b in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not rows[a, 0] & rows[b, 0]
    assert name in FIXED or not rows["train", 0] & rows["train", 1]


@every_task
def test_groups_hold_every_row_once(name: str) -> None:
    task = small(name)
    for split in SPLITS:
        numbers = [row for rows in task.groups(split) for row in rows]
        assert numbers == list(range(len(numbers)))
        assert task.n_examples(split) in (None, len(numbers))
        assert split == "train" or task.n_examples(split) is not None


@every_task_of_tokens
def test_shapes_and_ranges(name: str) -> None:
    task = small(name)
    batch = task.batch("train", torch.arange(16), 0)
    n_rows, length = batch.tokens_BT.shape
    assert n_rows == 16
    assert length == task.seq_len
    assert batch.position_BQ.shape == batch.target_BQ.shape
    for tensor, limit in (
        (batch.tokens_BT, task.vocab_size),
        (batch.target_BQ, task.vocab_size),
        (batch.position_BQ, length),
    ):
        assert tensor.dtype == torch.int64
        assert tensor.min() >= 0 or tensor is batch.target_BQ
        assert tensor.clamp(min=0).eq(tensor).logical_or(tensor == NO_LABEL).all()
        assert tensor.max() < limit


@every_task_of_tokens
def test_scores_of_a_perfect_and_of_a_guessing_model(name: str) -> None:
    task, facts = small(name), importlib.import_module(f"runners.tasks.{name}")
    batch = task.batch("test", torch.arange(300), 0)
    n_rows, n_labels = batch.target_BQ.shape
    perfect = torch.full((n_rows, n_labels, task.vocab_size), -30.0)
    perfect.scatter_(2, batch.target_BQ.clamp(min=0)[..., None], 30.0)
    scores = task.score(perfect, batch)
    assert all(value.shape == (n_rows,) for value in scores.values())
    assert set(whole(task, scores)) == set(facts.METRICS) == set(facts.CHANCE)
    assert facts.SELECT in facts.METRICS
    assert scores["loss"].max() < 1e-6
    # CHANCE: a model that knows nothing finds every token as likely.
    values = {"layout": "zoology", **SMALL.get(name, {}), "vocab_size": task.vocab_size, "seq_len": task.seq_len}
    flat = whole(task, task.score(torch.zeros(n_rows, n_labels, task.vocab_size), batch))
    for metric in set(facts.METRICS) - {"accuracy"}:
        near = 1e-5 if metric not in ON_AVERAGE else 0.02
        assert flat[metric] == pytest.approx(formula.evaluate(facts.CHANCE[metric], values), rel=near)
    if "accuracy" not in facts.METRICS:
        return
    # A model that knows what a label may be, and nothing else, guesses one of them.
    torch.testing.assert_close(scores["accuracy"], torch.ones(n_rows))
    chance = formula.evaluate(facts.CHANCE["accuracy"], values)
    kinds = batch.target_BQ[batch.target_BQ != NO_LABEL].unique()
    guess = torch.randint(0, len(kinds), batch.target_BQ.shape, generator=torch.Generator().manual_seed(0))
    guessed = torch.full_like(perfect, -1.0).scatter_(2, kinds[guess][..., None], 1.0)
    deviation = math.sqrt(chance * (1 - chance) / (batch.target_BQ != NO_LABEL).sum())
    assert abs(float(task.score(guessed, batch)["accuracy"].mean()) - chance) < 4 * deviation


@pytest.mark.gpu
@every_task
def test_same_rows_on_the_card(name: str) -> None:
    task = small(name)
    for split in SPLITS:
        here = task.batch(split, torch.arange(64), 3)
        there = task.batch(split, torch.arange(64), 3, "cuda")
        for field in dataclasses.fields(here):
            ours, theirs = getattr(here, field.name), getattr(there, field.name)
            assert torch.equal(ours, theirs.cpu()) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.gpu
@every_task
def test_making_rows_never_waits_for_the_card(name: str) -> None:
    task = small(name)
    task.batch("train", torch.arange(16), 3, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        task.batch("train", torch.arange(16, 32), 3, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'mqar'"):
        tasks.get("mqra")


# MQAR


@pytest.mark.parametrize(
    ("vocab", "length", "n"), [(64, 32, 8), (65, 32, 1), (512, 64, 16), (66, 64, 5), (8192, 256, 64)]
)
@pytest.mark.parametrize("fill", [True, False])
def test_mqar_rows_obey_the_rules(vocab: int, length: int, n: int, fill: bool) -> None:
    task = tasks.build(
        {"name": "mqar", "vocab_size": vocab, "seq_len": length, "n_pairs": n, "random_non_queries": fill}
    )
    batch = task.batch("train", torch.arange(20), 9)
    for row, positions, targets in zip(
        *(t.tolist() for t in (batch.tokens_BT, batch.position_BQ, batch.target_BQ)), strict=True
    ):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert len(set(keys)) == n
        assert len(set(values)) == n
        assert all(1 <= key < vocab // 2 for key in keys)
        assert all(vocab // 2 <= value < vocab for value in values)
        assert len(positions) == len(set(positions)) == n
        answers = dict(zip(keys, values, strict=True))
        for place, (position, target) in enumerate(zip(positions, targets, strict=True)):
            assert position % 2 == 0
            assert 2 * n <= position <= length - 2
            assert row[position] == keys[place]  # the j-th label is the j-th key's
            assert answers[row[position]] == target
        others = [row[t] for t in range(2 * n, length) if t not in positions]
        if not fill:
            assert set(others) <= {0}
    if fill:
        rest = batch.tokens_BT[:, 2 * n :].flatten()
        assert rest.unique().numel() > min(vocab, rest.numel()) / 3


def _slow_gaps(rng: np.random.Generator, slots: int, n: int, power: float) -> list[int]:
    """The law as Zoology writes it: weights power * i^(power-1), drawn without replacement one after the other."""
    weights = power * np.arange(1, slots + 1) ** (power - 1)
    left, drawn = list(range(slots)), []
    for _ in range(n):
        p = np.array([weights[slot] for slot in left])
        drawn.append(left.pop(rng.choice(len(left), p=p / p.sum())))
    return drawn


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_mqar_gap_law(power: float) -> None:
    """Ordered pairs of slots: their exact probabilities, ours, and those of the slow version."""
    slots, n, rows = 4, 2, 20000
    task = tasks.build({"name": "mqar", "vocab_size": 64, "seq_len": 12, "n_pairs": n, "power": power})
    gaps = (task.batch("train", torch.arange(rows), 1).position_BQ - 2 * n) // 2
    ours = torch.bincount(gaps[:, 0] * slots + gaps[:, 1], minlength=slots * slots).numpy()
    w = np.arange(1, slots + 1) ** (power - 1.0)
    p = w / w.sum()
    exact = np.array([0 if a == b else p[a] * p[b] / (1 - p[a]) for a in range(slots) for b in range(slots)])
    may = exact > 0
    assert ours[~may].sum() == 0
    assert stats.chisquare(ours[may], exact[may] * rows).pvalue > 1e-3
    rng = np.random.default_rng(2)
    drawn = [_slow_gaps(rng, slots, n, power) for _ in range(3000)]
    slow = np.bincount([a * slots + b for a, b in drawn], minlength=slots * slots)
    assert stats.chisquare(slow[may], exact[may] * 3000).pvalue > 1e-3


def test_mqar_keys_and_values_are_uniform_ordered_and_apart() -> None:
    rows = 20000
    task = tasks.build({"name": "mqar", "vocab_size": 14, "seq_len": 12, "n_pairs": 2})
    tokens = task.batch("train", torch.arange(rows), 4).tokens_BT
    for first, lowest, kinds in ((0, 1, 6), (1, 7, 7)):
        a, b = tokens[:, first] - lowest, tokens[:, first + 2] - lowest
        counts = torch.bincount(a * kinds + b, minlength=kinds * kinds).view(kinds, kinds)
        assert counts.diagonal().sum() == 0
        assert stats.chisquare(counts[~torch.eye(kinds, dtype=torch.bool)].numpy()).pvalue > 1e-3
    joint = torch.bincount((tokens[:, 0] - 1) * 7 + tokens[:, 1] - 7, minlength=42)
    assert stats.chisquare(joint.numpy()).pvalue > 1e-3


def test_mqar_fillers_are_uniform_over_the_whole_vocabulary() -> None:
    task = tasks.build({"name": "mqar", "vocab_size": 40, "seq_len": 32, "n_pairs": 1, "power": 1.0})
    last = task.batch("train", torch.arange(20000), 4).tokens_BT[:, -1]  # never a query
    assert stats.chisquare(torch.bincount(last, minlength=40).numpy()).pvalue > 1e-3


def test_mqar_vla_layout() -> None:
    n, vocab = 6, 32
    task = tasks.build({"name": "mqar", "layout": "vla", "vocab_size": vocab, "n_pairs": n})
    assert task.seq_len == 3 * n + 1
    batch = task.batch("train", torch.arange(500), 0)
    assert (batch.tokens_BT[:, 2 * n] == vocab - 1).all()
    repeated = False
    for row, positions, targets in zip(
        *(t.tolist() for t in (batch.tokens_BT, batch.position_BQ, batch.target_BQ)), strict=True
    ):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert len(set(keys)) == n
        assert max(keys + values) < vocab - 1
        assert positions == list(range(2 * n + 1, 3 * n + 1))
        assert [values[keys.index(row[at])] for at in positions] == targets
        repeated |= len(set(row[2 * n + 1 :])) < n and len(set(values)) < n
    assert repeated  # queries and values are drawn with replacement


def _read(task: Any, rows: int) -> list[tuple[list[int], list[int], list[int]]]:
    batch = task.batch("train", torch.arange(rows), 3)
    return list(zip(*(t.tolist() for t in (batch.tokens_BT, batch.position_BQ, batch.target_BQ)), strict=True))


@pytest.mark.parametrize(("n", "m"), [(4, 1), (4, 4), (5, 3)])
def test_mqar_updates_make_the_last_value_count(n: int, m: int) -> None:
    task = small("mqar", vocab_size=40, n_pairs=n, updates=m, random_non_queries=False)
    chosen = []
    for row, positions, targets in _read(task, 300):
        said: dict[int, list[int]] = {}
        for at in range(0, 2 * (n + m), 2):
            said.setdefault(row[at], []).append(row[at + 1])
        assert len(said) == n
        again = [key for key, values in said.items() if len(values) == 2]
        assert len(again) == m
        assert all(1 <= key < 20 and min(values) >= 20 for key, values in said.items())
        assert all(said[key][0] != said[key][1] for key in again)
        assert [row[at] for at in positions] == row[: 2 * n : 2]
        assert min(positions) >= 2 * (n + m)
        assert [said[row[at]][-1] for at in positions] == targets
        order = row[: 2 * n : 2]
        chosen += [order.index(row[at]) for at in range(2 * n, 2 * (n + m), 2)]
    counts = np.bincount(chosen, minlength=n)  # a subset, so spread less than independent draws
    assert m == n or stats.chisquare(counts).pvalue > 1e-3


def test_mqar_new_values_are_uniform_over_the_others() -> None:
    task = small("mqar", vocab_size=16, seq_len=12, n_pairs=1, updates=1)
    rows = _read(task, 20000)
    pairs = np.bincount([(row[1] - 8) * 8 + row[3] - 8 for row, _, _ in rows], minlength=64).reshape(8, 8)
    assert pairs.trace() == 0
    assert stats.chisquare(pairs[~np.eye(8, dtype=bool)]).pvalue > 1e-3


@pytest.mark.parametrize(("n", "vocab", "length"), [(1, 9, 8), (4, 30, 26), (9, 97, 64)])
def test_mqar_compositional_rows_are_grids(n: int, vocab: int, length: int) -> None:
    task = small("mqar", layout="compositional", vocab_size=vocab, n_pairs=n, seq_len=length, random_non_queries=False)
    side, third, orders = math.isqrt(n), vocab // 3, set()
    for row, positions, targets in _read(task, 200):
        triples = [tuple(row[at : at + 3]) for at in range(0, 3 * n, 3)]
        firsts, seconds, values = (sorted({triple[at] for triple in triples}) for at in range(3))
        assert (len(firsts), len(seconds), len(values)) == (side, side, n)
        assert {triple[:2] for triple in triples} == {(a, b) for a in firsts for b in seconds}
        assert 1 <= firsts[0] <= firsts[-1] < third <= seconds[0] <= seconds[-1] < 2 * third <= values[0]
        assert values[-1] < vocab
        table = {triple[:2]: triple[2] for triple in triples}
        for at, target in zip(positions, targets, strict=True):
            assert (at - 3 * n) % 3 == 1
            assert table[row[at - 1], row[at]] == target
        asked = {t for at in positions for t in (at - 1, at)}
        assert len(asked) == 2 * n
        assert {row[t] for t in range(3 * n, length) if t not in asked} <= {0}
        orders.add(tuple((firsts.index(a), seconds.index(b)) for a, b, _ in triples))
    assert len(orders) > (n > 1)


@pytest.mark.parametrize(("n", "length"), [(4, 16), (3, 21), (5, 64)])
def test_mqar_asks_for_every_key_at_the_end(n: int, length: int) -> None:
    task = small("mqar", layout="end", vocab_size=16, n_pairs=n, seq_len=length)
    orders = set()
    for row, positions, targets in _read(task, 200):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert positions == list(range(length - 2 * n, length, 2))
        asked = [row[at] for at in positions]
        assert sorted(asked) == sorted(set(keys))
        assert [values[keys.index(key)] for key in asked] == targets
        assert all(1 <= key < 8 <= value for key, value in zip(keys, values, strict=True))
        assert len(set(values)) == n
        assert min(row) >= 1
        orders.add(tuple(keys.index(key) for key in asked))
    assert len(orders) > 5


def test_mqar_fresh_and_fixed() -> None:
    fixed = small("mqar", examples=50)
    fresh = small("mqar", examples=50, data="fresh")
    assert fixed.n_examples("train") == 50
    assert fresh.n_examples("train") is None
    first, second = (fresh.batch("train", torch.arange(50) + 50 * epoch, 0).tokens_BT for epoch in (0, 1))
    assert torch.equal(first, fixed.batch("train", torch.arange(50), 0).tokens_BT)
    assert not (first == second).all(1).any()


def test_mqar_more_rows_keep_the_rows_there_are() -> None:
    index_B = torch.arange(40)
    a, b = small("mqar", examples=50, valid_examples=40), small("mqar", examples=90, valid_examples=80)
    for split in ("train", "valid"):
        assert torch.equal(a.batch(split, index_B, 1).tokens_BT, b.batch(split, index_B, 1).tokens_BT)


def test_mqar_segments() -> None:
    task = small("mqar", segments=SEGMENTS, valid_examples=10)
    assert task.seq_len == 32
    assert task.groups("train") == [range(40), range(40, 65)]
    assert task.groups("valid") == [range(10), range(10, 20)]
    assert task.batch("train", torch.arange(40), 0).tokens_BT.shape == (40, 16)
    later = task.batch("train", torch.arange(40, 65), 0)
    assert later.tokens_BT.shape == (25, 32)
    assert later.position_BQ.shape == (25, 8)
    with pytest.raises(ValueError, match="different segments"):
        task.batch("train", torch.tensor([39, 40]), 0)
    # The mixture is what is trained on; a test set is what the evaluation asks for, whatever the training was.
    assert torch.equal(
        task.batch("test", torch.arange(9), 0).tokens_BT, small("mqar").batch("test", torch.arange(9), 0).tokens_BT
    )


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"seq_len": 15, "n_pairs": 2}, "even"),
        ({"n_pairs": 17}, "4 * n_pairs <= seq_len"),
        ({"vocab_size": 32}, "vocab_size > seq_len"),
        ({"n_pairs": 0}, "n_pairs >= 1"),
        ({"seq_len": 128, "vocab_size": 129, "n_pairs": 32, "segments": [{"n_pairs": 33}]}, "4 * n_pairs"),
        ({"segments": []}, "empty"),
        ({"segments": [{"pairs": 3}]}, "'pairs' is none of"),
        ({"layout": "vla", "seq_len": 9}, "2 * n_pairs + 2 <= seq_len"),
        ({"updates": 5}, "0 <= updates <= n_pairs"),
        ({"updates": 3, "n_pairs": 7}, "4 * n_pairs + 2 * updates <= seq_len"),
        ({"updates": 1, "layout": "vla"}, "layout == 'zoology'"),
        ({"layout": "end", "n_pairs": 9}, "4 * n_pairs <= seq_len"),
        ({"layout": "compositional", "n_pairs": 5}, "square"),
        ({"layout": "compositional", "n_pairs": 9}, "6 * n_pairs <= seq_len"),
    ],
)
def test_mqar_refuses_in_words(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError) as caught:
        small("mqar", **settings)
    assert rule in str(caught.value)
