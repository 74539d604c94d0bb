"""`compare`: which trials make a pair, in which block, and what is refused before it runs."""

# ruff: noqa: E501 (a small spec is easier to compare with what is asserted when it stands on one line)

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spec_tools import BASE, plan, problems

from runners import train as training
from runners.schema import Plan, Test
from sweeps.catalog import Catalog
from sweeps.reader import SpecError

HOLAS = "axes:\n  mechanism: [softmax, {name: hola, cache: [4, 8], block: 16, admission: [residual, recency]}]\n  task.n_pairs: [4, 8]\nseeds: 3\n"


R, Q, M = "mechanism.admission: residual", "mechanism.admission: recency", ", mean: [mechanism.cache]"


def compared(text: str, tmp_path: Path) -> tuple[Plan, tuple[Test, ...]]:
    found = plan(BASE + text, tmp_path)
    return found, found.tests


def cells(found: Plan, ids: tuple[str, ...]) -> list[str]:
    by_id = {m.trial.id: m.cell for m in found.members}
    return [by_id[i] for i in ids]


def test_a_block_is_what_a_pair_shares_of_the_task_and_shared_mechanism_paths_are_averaged(tmp_path: Path) -> None:
    found, (test,) = compared(
        HOLAS + "compare: [{a: {mechanism.admission: residual}, b: {mechanism.admission: recency}}]", tmp_path
    )
    assert {pair.block for pair in test.pairs} == {"n_pairs-4", "n_pairs-8"}
    assert len(test.pairs) == 2 * 3
    for pair in test.pairs:
        assert len(pair.a) == len(pair.b) == 2
        for a, b in zip(cells(found, pair.a), cells(found, pair.b), strict=True):
            assert a.replace("residual", "recency") == b
    assert {m.trial.seed for m in found.members if m.trial.id in test.pairs[0].a} == {test.pairs[0].seed}
    assert (test.unpaired_a, test.unpaired_b) == (0, 0)
    assert (test.set, test.metric, test.direction, test.bounded) == ("test", "accuracy", "max", True)


def test_each_makes_one_test_a_value_and_mean_averages(tmp_path: Path) -> None:
    each = "compare: [{a: {mechanism.admission: residual}, b: {mechanism: softmax}, each: [mechanism.cache]}]"
    _, tests = compared(HOLAS + each, tmp_path)
    assert [test.name for test in tests] == [
        f"mechanism.admission: residual, mechanism.cache: {n} vs mechanism: softmax" for n in (4, 8)
    ]
    _, (mean,) = compared(HOLAS + each.replace("each", "mean"), tmp_path)
    assert all(len(pair.a) == 2 and len(pair.b) == 1 for pair in mean.pairs)


def test_a_list_makes_one_test_a_value(tmp_path: Path) -> None:
    text = "compare: [{a: {mechanism.admission: residual, mechanism.cache: [4, 8]}, b: {mechanism: softmax}}]"
    _, tests = compared(HOLAS + text, tmp_path)
    assert [test.a for test in tests] == [f"mechanism.admission: residual, mechanism.cache: {n}" for n in (4, 8)]


def test_without_a_every_other_arm_is_compared_to_b(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear, {arm: big, name: hola, cache: 32}, {name: hola, cache: 4}]}\ncompare: [{b: {mechanism: softmax}}]"
    _, tests = compared(text, tmp_path)
    assert [test.a for test in tests] == ["arm: linear", "arm: big", "arm: hola"]


def test_settings_without_a_partner_are_counted(tmp_path: Path) -> None:
    text = (
        HOLAS
        + "exclude: [{mechanism.admission: recency, task.n_pairs: 8, mechanism.cache: 8}]\ncompare: [{a: {mechanism.admission: residual}, b: {mechanism.admission: recency}}]"
    )
    _, (test,) = compared(text, tmp_path)
    assert (test.unpaired_a, test.unpaired_b) == (3, 0)
    sizes = {pair.block: len(pair.a) for pair in test.pairs}
    assert sizes == {"n_pairs-4": 2, "n_pairs-8": 1}


def test_a_trial_that_the_set_leaves_out_has_no_pair(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear], task.n_pairs: [2, 4]}\nseeds: 3\nevaluate: {long: {if: {task.n_pairs: 4}, task.seq_len: [128]}}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}}]"
    found, (test,) = compared(text, tmp_path)
    asked = {m.trial.id for m in found.members if m.slices}
    assert {pair.block for pair in test.pairs} == {"n_pairs-4"}
    assert {i for pair in test.pairs for i in (*pair.a, *pair.b)} == asked
    assert (test.unpaired_a, test.unpaired_b) == (3, 3)


def test_a_training_path_is_averaged_and_a_model_path_makes_blocks(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear], train.lr: [1, 2], model.d_model: [16, 32]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}}]"
    _, (test,) = compared(text, tmp_path)
    assert [(pair.block, len(pair.a), len(pair.b)) for pair in test.pairs] == [
        ("d_model-16", 2, 2),
        ("d_model-32", 2, 2),
    ]


def test_a_path_that_follows_the_arm_is_no_obstacle(tmp_path: Path) -> None:
    text = "axes: {mechanism: [{name: softmax, model.position: rope}, linear]}\nseeds: 2\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}}]"
    found, (test,) = compared(text, tmp_path)
    assert [pair.block for pair in test.pairs] == ["all", "all"]
    assert [note for note in found.notes if "differ in model.position, so" in note]
    found, _ = compared(text.replace("{name: softmax, model.position: rope}", "softmax"), tmp_path)
    assert not [note for note in found.notes if "differ in" in note]


def test_a_matched_value_follows_and_pairs_nothing(tmp_path: Path) -> None:
    text = "axes:\n  mechanism: [{name: linear, expand: {match: state_bytes, to: 40000}}, {name: hola, cache: {match: state_bytes, to: 40000}}]\n  model.d_model: [16, 32]\ncompare: [{a: {mechanism: linear}, b: {mechanism: hola}}]"
    _, (test,) = compared(text, tmp_path)
    assert len(test.pairs) == 2


def test_at_picks_slices_and_sets(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear]}\nevaluate: {short: {task.n_pairs: [2, 4]}, long: {task.seq_len: [128, 256]}}\n"
    entry = "compare: [{a: {mechanism: softmax}, b: {mechanism: linear}, %s}]"
    found, (test,) = compared(text + entry % "metric: long/loss, at: {task.seq_len: 256}, margin: 0.1", tmp_path)
    assert [s.label for s in found.members[0].slices if s.id in test.slices] == ["seq_len-256"]
    assert (test.set, test.metric, test.direction, test.bounded, test.margin) == ("long", "loss", "min", False, 0.1)
    _, (other,) = compared(text + entry % "at: {evaluate: short}", tmp_path)
    assert (other.set, len(other.slices)) == ("short", 2)
    with pytest.raises(SpecError, match="no set 'test' here"):
        compared(text + entry % "margin: 0.1", tmp_path)


@pytest.mark.parametrize(("setting", "apart"), [("kernels: [auto, reference]", False), ("tied: [true, false]", True)])
def test_sides_that_begin_from_other_weights_are_told(setting: str, apart: bool, tmp_path: Path) -> None:
    name, values = setting.split(": ")
    first, second = values.strip("[]").split(", ")
    pair = f"{{a: {{model.{name}: {first}}}, b: {{model.{name}: {second}}}}}"
    text = f"sweep: x\nmodel: {{d_model: 16}}\naxes: {{mechanism: [linear], model.{name}: {values}}}\ncompare: [{pair}]"
    text += "\ntask: {name: mqar, vocab_size: 64, seq_len: 16, n_pairs: 2}\ntrain: {steps: 2, batch_size: 2}"
    notes = plan(text, tmp_path, catalog=CATALOG).notes
    assert any("neither training rows nor initial weights" in note for note in notes) == apart


def test_training_metrics_have_steps(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, metric: valid/loss, at: {step: 4}, scale: ratio}]"
    _, (test,) = compared(text, tmp_path)
    assert (test.set, test.metric, test.step, test.slices, test.scale) == ("valid", "loss", 4, (), "ratio")


CATALOG = Catalog()
REAL = "sweep: x\nmodel: {d_model: 16}\naxes: {mechanism: [softmax, linear]}\n"
AT = "compare: [{a: {mechanism: softmax}, b: {mechanism: linear}, metric: %s, at: {step: %d}}]"


@pytest.mark.parametrize(
    ("train", "metric", "step", "words"),
    [
        ("steps: 30", "valid/loss", 31, "at step 31: softmax ends at 30"),
        ("steps: 30", "valid/loss", 7, "every 6 updates and at the last, 30; nearest: 6"),
        ("steps: 30", "valid/loss", 12, None),
        ("steps: 29", "valid/loss", 29, None),
        ("steps: 29", "valid/loss", 28, "every 6 updates and at the last, 29; nearest: 29"),
        ("steps: 30, eval_every: 7", "valid/loss", 28, None),
        ("steps: 30, eval_every: 7", "valid/loss", 5, "every 7 updates"),
        ("steps: 30", "train/loss", 7, None),
        ("steps: 200", "train/loss", 8, None),
        ("steps: 200, eval_every: 25", "train/loss", 25, None),
        ("steps: 200", "train/loss", 9, "every 40 or 4 updates and at the last, 200; nearest: 8"),
        ("epochs: 2", "valid/loss", 26, None),
        ("epochs: 2", "valid/loss", 13, None),
        ("epochs: 2", "valid/loss", 12, "every 13 updates and at the last, 26; nearest: 13"),
        ("epochs: 2", "valid/loss", 27, "ends at 26"),
        ("tokens: 100000", "valid/loss", 27, None),
    ],
)
def test_a_step_at_which_nothing_is_measured_is_refused(
    train: str, metric: str, step: int, words: str | None, tmp_path: Path
) -> None:
    task = "task: {name: mqar, vocab_size: 128, segments: [{examples: 17}, {seq_len: 32, examples: 30}]}\n"
    text = f"{REAL}{task}train: {{{train}, batch_size: 4}}\n{AT % (metric, step)}"
    found = problems(text, tmp_path, catalog=CATALOG)
    assert [words in message for _, _, message in found] == ([True] if words else []), found
    if words:
        assert found[0][:2] == (6, text.splitlines()[-1].index("step: ") + len("step: ") + 1)


def test_where_validation_falls_is_what_the_trainer_does(tmp_path: Path) -> None:
    task = "task: {name: mqar, vocab_size: 128, valid_examples: 8, examples: 17, segments: [{}, {seq_len: 32}]}\n"
    for train in ("epochs: 2", "steps: 101", "steps: 30, eval_every: 7"):
        text = f"{REAL}{task}train: {{{train}, batch_size: 4}}\n"
        (member, *_) = plan(text, tmp_path, catalog=CATALOG).members
        points: list[training.Point] = []
        training.fit(
            member.trial,
            device=torch.device("cpu"),
            start=None,
            commit=lambda _, new, points=points: points.extend(new),
            progress=lambda *_: None,
            should_stop=lambda: False,
            checkpoint_every_s=1e9,
        )
        for metric in ("valid/loss", "train/loss"):
            asked = range(1, points[-1].step + 3)
            allowed = [n for n in asked if not problems(text + AT % (metric, n), tmp_path, catalog=CATALOG)]
            assert allowed == [point.step for point in points if metric in point.metrics]


def test_if_narrows_both_sides(tmp_path: Path) -> None:
    _, (test,) = compared(
        HOLAS
        + "compare: [{a: {mechanism.admission: residual}, b: {mechanism.admission: recency}, if: {task.n_pairs: 8, mechanism.cache: 4}}]",
        tmp_path,
    )
    assert {(pair.block, len(pair.a)) for pair in test.pairs} == {("all", 1)}


def test_at_equal_state_takes_every_size_of_b(tmp_path: Path) -> None:
    text = "axes: {mechanism: [{name: hola, cache: [4, 8]}, {name: linear, model.d_model: [16, 32, 48]}], task.n_pairs: [2, 4]}\ncompare: [{a: {mechanism: hola}, b: {mechanism: linear}, at_equal: state_bytes}]"
    _, (test,) = compared(text, tmp_path)
    assert test.at_equal == "state_bytes"
    assert [(len(pair.a), len(pair.b)) for pair in test.pairs] == [(2, 3), (2, 3)]


def test_too_few_pairs_are_told_before_the_run(tmp_path: Path) -> None:
    one = "compare: [{a: {mechanism: softmax}, b: {mechanism: linear}}]"
    axes = "axes: {mechanism: [softmax, linear]}\nseeds: %d\n"
    found, _ = compared(axes % 5 + one, tmp_path)
    assert any("5 pairs cannot reach a verdict; a bounded score needs 6, 7 if they are" in note for note in found.notes)
    enough, _ = compared(axes % 6 + one, tmp_path)
    assert enough.notes == ()
    loss, _ = compared(axes % 3 + one.replace("}}]", "}, metric: test/loss}]"), tmp_path)
    assert loss.notes == ()


def test_sides_that_are_the_same_model_in_some_blocks_are_noted(tmp_path: Path) -> None:
    text = "axes:\n  mechanism: [{name: hola, cache: 16, block: 16, admission: [residual, recency]}]\n  (task.seq_len, task.n_pairs): [[32, 4], [64, 4]]\nseeds: 9\ncompare: [{a: {mechanism.admission: residual}, b: {mechanism.admission: recency}}]"
    found, (test,) = compared(text, tmp_path)
    assert len(test.pairs) == 18
    assert len(found.notes) == 1
    assert (
        "at seq_len-32/n_pairs-4 both sides are the same model" in found.notes[0]
        or "at seq_len-32 both" in found.notes[0]
    )


def test_a_longer_evaluation_may_tell_apart_what_training_cannot(tmp_path: Path) -> None:
    text = "axes:\n  mechanism: [{name: hola, cache: 48, block: 16, admission: [residual, recency]}]\nevaluate: {task.seq_len: [64%s]}\ncompare: [{a: {mechanism.admission: residual}, b: {mechanism.admission: recency}}]"
    with pytest.raises(SpecError, match="cannot differ"):
        compared(text % "", tmp_path)
    assert len(compared(text % ", 128", tmp_path)[1]) == 1


@pytest.mark.parametrize(
    ("items", "a", "b", "more", "differ"),
    [
        ("{name: hola, cache: [48, 64, 256]}", "mechanism.cache: 64", "mechanism.cache: 256", "", False),
        ("{name: hola, cache: [48, 64, 256]}", "mechanism.cache: 48", "mechanism.cache: 64", "", False),
        ("{name: hola, cache: [32, 47, 48]}", "mechanism.cache: 47", "mechanism.cache: 48", "", True),
        ("{name: hola, block: [64, 128]}", "mechanism.block: 64", "mechanism.block: 128", "", False),
        ("{name: hola, block: [63, 128]}", "mechanism.block: 63", "mechanism.block: 128", "", True),
        ("{name: hola, block: 64, cache: [0, 8]}", "mechanism.cache: 0", "mechanism.cache: 8", "", False),
        (
            "{arm: x, name: hola, block: 64, cache: 8}, {arm: y, name: hola, block: 99, cache: 0, admission: none}",
            "arm: x",
            "arm: y",
            "",
            False,
        ),
        ("{name: hola, cache: [0, 64], admission: [residual, recency]}", R, Q, M, False),
        ("{name: hola, cache: [4, 64], admission: [residual, recency]}", R, Q, M, True),
        (
            "{name: hola, cache: [0, 4], admission: residual}, {arm: y, name: hola, cache: 0}",
            "arm: hola",
            "arm: y",
            M,
            1,
        ),
    ],
)
def test_sides_of_settings_that_act_alike_are_refused(
    items: str, a: str, b: str, more: str, differ: bool, tmp_path: Path
) -> None:
    text = f"axes:\n  mechanism: [{items}]\nseeds: 6\ncompare: [{{a: {{{a}}}, b: {{{b}}}{more}}}]"
    found = [message for _, _, message in problems(BASE + text, tmp_path)]
    assert ["both sides are the same model, so they cannot differ" in message for message in found] == [True] * (
        not differ
    )


def test_a_cap_is_that_of_every_length_the_model_sees(tmp_path: Path) -> None:
    text = "axes:\n  mechanism: [{name: hola, cache: [48, 64]}]\nevaluate: {task.seq_len: [64%s]}\nseeds: 6\ncompare: [{a: {mechanism.cache: 48}, b: {mechanism.cache: 64}}]"
    with pytest.raises(SpecError, match="cannot differ"):
        compared(text % "", tmp_path)
    assert len(compared(text % ", 128", tmp_path)[1]) == 1
