"""Spec -> trials: order, axes, items, zips, precedence, forms, units, identity, patches."""

# ruff: noqa: E501 (a small spec is easier to compare with what is asserted when it stands on one line)

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_tools import BASE, FAKE, plan, values

from runners.schema import Plan, UserError
from sweeps import sections
from sweeps.catalog import Catalog
from sweeps.plan import not_there_yet, select
from sweeps.reader import Problems, SpecError, read_text


def test_axes_multiply_in_file_order_an_items_lists_after_its_place_seeds_last(tmp_path: Path) -> None:
    text = """
    axes:
      task.n_pairs: [4, 8]
      mechanism: [softmax, {name: hola, cache: [4, 8], block: [16, 32]}]
    seeds: 2
    """
    found = plan(BASE + text.replace("\n    ", "\n"), tmp_path)
    holas = [("hola", cache, block) for cache in (4, 8) for block in (16, 32)]
    wanted = [(n, *m, s) for n in (4, 8) for m in [("softmax", None, None), *holas] for s in (0, 1)]
    assert values(found, "task.n_pairs", "mechanism", "mechanism.cache", "mechanism.block", "seed") == wanted


def test_a_zip_walks_its_paths_together_and_its_spelling_does_not_matter(tmp_path: Path) -> None:
    one = plan(BASE + "mechanism: softmax\naxes: {'(task.seq_len,task.n_pairs)': [[64, 4], [128, 8]]}", tmp_path)
    two = plan(BASE + "mechanism: softmax\naxes:\n  ( task.n_pairs , task.seq_len ): [[4, 64], [8, 128]]", tmp_path)
    assert values(one, "task.seq_len", "task.n_pairs") == [(64, 4), (128, 8)]
    assert [m.trial.id for m in one.members] == [m.trial.id for m in two.members]


def test_a_zip_inside_an_item(tmp_path: Path) -> None:
    found = plan(BASE + "axes:\n  mechanism: [{name: hola, '(cache, block)': [[4, 8], [8, 16]]}]", tmp_path)
    assert values(found, "mechanism.cache", "mechanism.block") == [(4, 8), (8, 16)]


def test_a_full_path_in_an_item_holds_for_that_item_only(tmp_path: Path) -> None:
    text = "axes: {mechanism: [{name: softmax, model.position: rope, train.lr: [1e-3, 1e-2]}, linear]}"
    found = plan(BASE + text, tmp_path)
    assert values(found, "model.position", "train.lr") == [("rope", 1e-3), ("rope", 1e-2), ("none", 1e-3)]


HYBRID = """
sweep: hybrid
task: {name: mqar, vocab_size: 128}
model: {n_layers: 3, d_model: 32}
train: {steps: 10, batch_size: 4}
mechanism: {name: raven, slots: 8, top_k: 2}
"""


def test_layers_are_one_thing_however_they_are_written(tmp_path: Path) -> None:
    def one(layers: str) -> tuple[str, Any]:
        (member,) = plan(f"{HYBRID}model.layers: {layers}", tmp_path, catalog=Catalog()).members
        return member.trial.id, member.trial.model["layers"]

    short = one("[mechanism, mechanism, softmax]")
    assert short[1] == ["mechanism", "mechanism", "softmax"]
    for same in (
        "[raven, raven, softmax]",
        "[{name: raven}, raven, {name: softmax}]",
        "[{name: mechanism}, mechanism, softmax]",
    ):
        assert one(same) == short
    assert one("[mechanism, mechanism, {name: softmax, position: none}]") == short
    assert one("none") == one("[mechanism]") == one("[raven, raven]")
    own = one("[mechanism, raven, {name: raven, slots: 32}]")
    assert own[1] == ["mechanism", "raven", {"name": "raven", "slots": 32}]
    window = one("[mechanism, {name: sliding_window, window: 16}]")
    assert window == one("[mechanism, sliding_window]")
    assert len({short[0], own[0], window[0], one("[mechanism, {name: sliding_window, window: 8}]")[0]}) == 4


def test_layers_that_repeat_stand_once(tmp_path: Path) -> None:
    text = HYBRID.replace("n_layers: 3", "n_layers: 4") + "model.layers: "
    short, long = ("[raven, softmax]", "[mechanism, softmax, mechanism, softmax]")
    found = [plan(text + layers, tmp_path, catalog=Catalog()).members[0].trial for layers in (short, long)]
    assert found[0] == found[1]
    assert found[0].model["layers"] == ["mechanism", "softmax"]


def test_a_layers_revision_is_part_of_the_id(tmp_path: Path) -> None:
    text = HYBRID + "model.layers: [mechanism, mechanism, softmax]"
    catalog = Catalog()
    before = plan(text, tmp_path, catalog=catalog).members[0].trial.id
    catalog.block("mechanism", "softmax").literals["REVISION"] = 2
    assert plan(text, tmp_path, catalog=catalog).members[0].trial.id != before


def test_layers_are_an_axis_whose_cells_have_readable_names(tmp_path: Path) -> None:
    text = (
        HYBRID
        + "axes: {model.layers: [[mechanism], [mechanism, softmax], [mechanism, {name: sliding_window, window: 4}]]}"
    )
    names = [member.cell for member in plan(text, tmp_path, catalog=Catalog()).members]
    assert names == [
        "raven/layers-none",
        "raven/layers-mechanism+softmax",
        "raven/layers-mechanism+sliding_window:window-4",
    ]


def test_a_list_parameter_takes_a_list_as_its_value_and_a_list_of_lists_as_an_axis(tmp_path: Path) -> None:
    base = BASE + "mechanism: softmax\n"
    one = plan(base + "model.layers: [base_conv, mechanism]", tmp_path)
    assert values(one, "model.layers") == [(["base_conv", "mechanism"],)]
    two = plan(base + "axes: {model.layers: [[mechanism], [base_conv, mechanism]]}", tmp_path)
    assert values(two, "model.layers") == [(["mechanism"],), (["base_conv", "mechanism"],)]
    inside = plan(BASE + "axes: {mechanism: [{name: softmax, model.layers: [[mechanism], [base_conv]]}]}", tmp_path)
    assert values(inside, "model.layers") == [(["mechanism"],), (["base_conv"],)]
    segments = plan(base + "task.segments: [{seq_len: 32, n_pairs: 2}, {seq_len: 64, n_pairs: 4}]", tmp_path)
    assert len(segments.members) == 1


def test_a_task_axis_drops_the_base_tasks_parameters_unless_the_name_is_the_same(tmp_path: Path) -> None:
    text = "mechanism: softmax\naxes: {task: [copy, {name: recall, n_pairs: 8}]}"
    found = plan(BASE + text, tmp_path)
    assert found.members[0].trial.task == {"name": "copy", "vocab_size": 8192, "seq_len": 64, "n_data": 8}
    assert values(found, "task.vocab_size", "task.seq_len", "task.n_pairs")[1] == (512, 64, 8)


def test_bare_text_is_a_name_everywhere(tmp_path: Path) -> None:
    one = plan(
        BASE + "axes: {mechanism: [{name: softmax}, {name: linear}]}\nexclude: [{mechanism: {name: linear}}]", tmp_path
    )
    two = plan(BASE + "mechanism: softmax", tmp_path)
    assert [m.trial.id for m in one.members] == [m.trial.id for m in two.members]


def test_blocks_inside_the_model(tmp_path: Path) -> None:
    text = "mechanism: softmax\naxes:\n  model.mlp: [none, gelu, {name: swiglu, gate: [silu, relu], width: 8}]\n  model.moe: [none, {experts: 2, bias: [none, outer]}]"
    found = plan(BASE + text, tmp_path)
    assert len(found.members) == 4 * 3
    mlps = values(found, "model.mlp")[::3]
    assert mlps[0] == (None,)
    assert mlps[1] == ({"name": "gelu", "width": None},)
    assert mlps[3] == ({"name": "swiglu", "width": 8, "gate": "relu"},)
    assert not_there_yet(found, FAKE) == ["model.moe: moe"]


def test_a_mechanism_may_be_called_no(tmp_path: Path) -> None:
    assert values(plan(BASE + "mechanism: no", tmp_path), "mechanism", "arm") == [("no", "no")]
    with pytest.raises(SpecError, match="no mechanism 'none'"):
        plan(BASE + "mechanism: none", tmp_path)


def test_lr_in_any_spelling_is_a_number(tmp_path: Path) -> None:
    found = plan(BASE + "mechanism: softmax\naxes: {train.lr: [1e-3, 3E-4, 1e+1, .5e-2, 1]}", tmp_path)
    assert values(found, "train.lr") == [(1e-3,), (3e-4,), (10.0,), (5e-3,), (1.0,)]


# --- when, exclude, precedence ----------------------------------------------------------------------------------


def test_when_wins_over_items_and_reads_the_values_before_any_when(tmp_path: Path) -> None:
    text = """
mechanism: softmax
axes: {train.lr: [1e-3, 1e-2]}
when:
  - {if: {train.lr: 1e-3}, set: {train.lr: 5e-3}}
  - {if: {train.lr: 5e-3}, set: {train.batch_size: 99}}
"""
    with pytest.raises(SpecError, match=r"train\.lr 0\.005"):
        plan(BASE + text, tmp_path)
    fine = plan(BASE + text.replace("{if: {train.lr: 5e-3}", "{if: {train.lr: {min: 1e-2}}"), tmp_path)
    assert values(fine, "train.lr", "train.batch_size") == [(5e-3, 4), (1e-2, 99)]


def test_when_reads_defaults_too_and_may_change_the_owner_of_a_unit(tmp_path: Path) -> None:
    text = "mechanism: softmax\nwhen: [{if: {model.position: none, model.mlp: gelu}, set: {train.epochs: 3, model.mlp.width: 7}}]"
    found = plan(BASE + text, tmp_path)
    assert values(found, "train.steps", "train.epochs", "model.mlp.width") == [(None, 3, 7)]


def test_exclude_takes_all_paths_together(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear], task.n_pairs: [4, 8, 16]}\nexclude: [{mechanism: linear, task.n_pairs: [8, 16]}, {mechanism: softmax, task.n_pairs: {max: 4}}]"
    found = plan(BASE + text, tmp_path)
    assert values(found, "mechanism", "task.n_pairs") == [("softmax", 8), ("softmax", 16), ("linear", 4)]


def test_exclude_may_take_away_what_a_rule_forbids(tmp_path: Path) -> None:
    text = "axes: {task.n_pairs: [4, 32], mechanism: [softmax]}\nexclude: [{task.n_pairs: 32}]"
    assert values(plan(BASE + text, tmp_path), "task.n_pairs") == [(4,)]


def test_not_matches_only_trials_that_have_the_path(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, {name: hola, cache: [4, 8]}]}\nexclude: [{mechanism.cache: {not: 4}}]"
    assert values(plan(BASE + text, tmp_path), "mechanism", "mechanism.cache") == [("softmax", None), ("hola", 4)]


# --- forms ------------------------------------------------------------------------------------------------------


def test_ref_follows_axes_when_and_other_refs(tmp_path: Path) -> None:
    text = """
mechanism: {name: hola, cache: {ref: mechanism.block, times: 2, plus: 1}, block: {ref: model.d_model, times: 0.25}}
axes: {model.d_model: [32, 64]}
when: [{if: {model.d_model: 64}, set: {model.d_model: 128}}]
"""
    found = plan(BASE + text, tmp_path)
    assert values(found, "mechanism.block", "mechanism.cache") == [(8, 17), (32, 65)]


def test_ref_reads_derived_values_and_rounds(tmp_path: Path) -> None:
    text = "mechanism: {name: hola, cache: {ref: model.head_dim, times: 0.45, round: even}}\nmodel.n_heads: 2"
    assert values(plan(BASE + text, tmp_path), "mechanism.cache") == [(6,)]


@pytest.mark.parametrize("target", [4096, 5000, 9999, 20000])
def test_match_finds_the_largest_value_that_fits(target: int, tmp_path: Path) -> None:
    base = BASE + "model.n_heads: 2\n"
    found = plan(base + f"mechanism: {{name: linear, expand: {{match: state_bytes, to: {target}}}}}", tmp_path)
    expand = values(found, "mechanism.expand")[0][0]
    reached = found.members[0].state_bytes
    assert reached == 2 * 4 * 2 * 16 * 16 * expand <= target < reached + 2 * 4 * 2 * 16 * 16
    assert any("below" in note for note in found.notes) == (reached < 0.95 * target)


def test_match_keeps_the_rules(tmp_path: Path) -> None:
    text = "mechanism: {name: hola, admission: residual, cache: {match: state_bytes, to: 30000}}"
    found = plan(BASE + text, tmp_path)
    assert found.members[0].state_bytes <= 30000


def test_generated_lists_are_rounded_to_six_digits(tmp_path: Path) -> None:
    text = "mechanism: softmax\naxes: {train.lr: {logspace: [1e-3, 3.16228e-2, 4]}, model.d_model: {linspace: [16, 64, 4]}}"
    found = plan(BASE + text, tmp_path)
    assert sorted({lr for lr, _ in values(found, "train.lr", "seed")}) == [1e-3, 3.16228e-3, 1e-2, 3.16228e-2]
    assert values(found, "model.d_model")[:4] == [(16,), (32,), (48,), (64,)]


# --- state ------------------------------------------------------------------------------------------------------


def test_state_bytes_count_every_layer_at_the_trials_length_and_width(tmp_path: Path) -> None:
    text = "axes:\n  mechanism: [{name: hola, cache: 4, block: 8}]\n  train.dtype: [fp32, bf16]\n  model.layers: [[mechanism], [base_conv, mechanism]]"
    found = plan(BASE + "model.n_layers: 4\n" + text, tmp_path)
    state, cache = 32 * 32 + 4, 2 * 32 * 12
    wanted = []
    for width, (mixers, convs) in product((4, 2), ((4, 0), (2, 2))):
        wanted.append(mixers * (4 * state + width * cache) + convs * 2 * 32 * width)
    assert [m.state_bytes for m in found.members] == wanted


def test_the_length_of_a_mixture_is_its_longest_segment(tmp_path: Path) -> None:
    text = "mechanism: softmax\ntask.segments: [{seq_len: 128, n_pairs: 4}, {seq_len: 32, n_pairs: 2}]"
    assert plan(BASE + text, tmp_path).members[0].state_bytes == 2 * 4 * 2 * 128 * 32
    text = "mechanism: softmax\ntask.segments: [{n_pairs: 4}, {seq_len: 32, n_pairs: 2}]"  # the first is the task's 64
    assert plan(BASE + text, tmp_path).members[0].state_bytes == 2 * 4 * 2 * 64 * 32


# --- identity ---------------------------------------------------------------------------------------------------


def ids(found: Plan) -> list[str]:
    return [member.trial.id for member in found.members]


SAME = {
    "a default written out": "mechanism: {name: hola, cache: 16, block: 16}\ntrain.clip: 1\nmodel.position: none",
    "a renamed arm": "axes: {mechanism: [{arm: other, name: hola}]}",
    "other sections": "mechanism: hola\nresources: {gpu: 1}\nretry: {infra: 2}\nevaluate: {a: {task.n_pairs: [2]}}\nbudget: {gpu_hours: 3}",
    "a block's default name": "mechanism: hola\nmodel.mlp: gelu",
    "a block's default written out": "mechanism: hola\nmodel.mlp: {name: gelu, width: none}",
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_setting_changes_no_id(name: str, tmp_path: Path) -> None:
    assert ids(plan(BASE + SAME[name], tmp_path)) == ids(plan(BASE + "mechanism: hola", tmp_path))


def test_a_derived_length_is_the_same_written_out(tmp_path: Path) -> None:
    text = "sweep: x\nmechanism: hola\ntask: {name: recall, n_pairs: 2%s}\ntrain: {steps: 1, batch_size: 1}"
    one, two = plan(text % "", tmp_path), plan(text % ", seq_len: 32", tmp_path)
    assert ids(one) == ids(two)
    assert one.members[0].trial.task["seq_len"] == 32


def test_numbers_are_typed_before_they_are_hashed(tmp_path: Path) -> None:
    found = plan(BASE + "mechanism: hola\naxes: {train.lr: [1, 1.0, 1e0]}", tmp_path)
    assert len(found.members) == 1
    assert "reached twice" in found.notes[0]


def test_every_setting_changes_the_id(tmp_path: Path) -> None:
    lines = [
        "mechanism.cache: 5",
        "task.n_pairs: 5",
        "model.d_model: 48",
        "train.lr: 0.5",
        "model.mlp.width: 9",
        "train.clip: none",
    ]
    texts = [BASE + "mechanism: {name: hola}\n", *(BASE + "mechanism: {name: hola}\n" for _ in lines)]
    found = [
        plan(texts[0], tmp_path),
        *(plan(t, tmp_path, sets=[line.replace(": ", "=")]) for t, line in zip(texts[1:], lines, strict=True)),
    ]
    assert len({ids(p)[0] for p in found}) == len(lines) + 1


def test_more_seeds_keep_the_old_ones(tmp_path: Path) -> None:
    three = ids(plan(BASE + "mechanism: hola\nseeds: 3", tmp_path))
    assert ids(plan(BASE + "mechanism: hola\nseeds: 5", tmp_path))[:3] == three
    assert ids(plan(BASE + "mechanism: hola\nseeds: [2, 0]", tmp_path)) == [three[2], three[0]]


def test_one_value_more_adds_trials_and_changes_none(tmp_path: Path) -> None:
    text = BASE + "axes: {mechanism: [softmax, {name: hola, cache: [4, 8%s]}], task.n_pairs: [4, 8]}\nseeds: 2"
    before, after = ids(plan(text % "", tmp_path)), ids(plan(text % ", 12", tmp_path))
    assert set(before) < set(after)
    assert len(after) == len(before) + 4


def test_a_plan_survives_the_round_trip_through_its_lines(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, {name: hola, cache: [4, 8]}]}\nseeds: 2\nevaluate: {a: {task.n_pairs: [2, 4]}}\ncompare: [{a: {mechanism: hola}, b: {mechanism: softmax}, each: [mechanism.cache]}]"
    found = plan(BASE + text, tmp_path)
    assert Plan.from_lines(found.to_lines()) == found


# --- names of cells ---------------------------------------------------------------------------------------------


def test_a_cell_is_named_by_its_arm_and_what_varies_within_it(tmp_path: Path) -> None:
    text = "axes:\n  mechanism: [{name: softmax, model.position: rope}, {arm: cached, name: hola, cache: [4, 8]}]\n  task.n_pairs: [4, 8]"
    found = plan(BASE + text, tmp_path)
    assert [m.cell for m in found.members] == [
        *("softmax/n_pairs-4", "softmax/n_pairs-8"),
        *("cached/cache-4/n_pairs-4", "cached/cache-4/n_pairs-8"),
        *("cached/cache-8/n_pairs-4", "cached/cache-8/n_pairs-8"),
    ]
    assert found.members[0].varying == {"mechanism": "softmax", "model.position": "rope", "task.n_pairs": 4}
    assert found.members[2].varying["mechanism.cache"] == 4


def test_cells_of_different_settings_have_different_names(tmp_path: Path) -> None:
    text = "axes: {mechanism: [{name: hola, cache: [4, 8]}, {name: linear, expand: [1, 2]}], train.lr: {logspace: [1e-4, 1e-2, 5]}}"
    found = plan(BASE + text, tmp_path)
    assert len({m.cell for m in found.members}) == len(found.members)


# --- tasks without training, search -----------------------------------------------------------------------------


def test_a_task_that_trains_nothing_is_its_own_trial(tmp_path: Path) -> None:
    found = plan("sweep: t\nmechanism: softmax\naxes: {task: [{name: timing, seq_len: [64, 128]}]}", tmp_path)
    assert [m.trial.train for m in found.members] == [None, None]
    assert [m.slices[0].task["seq_len"] for m in found.members] == [64, 128]


def test_search_is_no_part_of_a_cell(tmp_path: Path) -> None:
    text = """
axes: {mechanism: [{name: softmax, train.lr: 1e-4}, {name: linear, train.lr: {values: [1, 2]}}, hola]}
search: {train.lr: {log_uniform: [1e-4, 1e-2]}, trials: 4, select: valid/accuracy, seeds: 1}
prune: {asha: {grace_steps: 5}}
budget: {gpu_hours: 2}
resources: {gpu: auto}
"""
    found = plan(BASE + text, tmp_path)
    assert [m.cell for m in found.members] == ["softmax", "linear", "hola"]
    assert found.members[0].trial.train is not None
    assert found.members[0].trial.train["lr"] == 1e-4
    assert "train.lr" not in found.members[1].varying
    assert not_there_yet(found) == []


def test_a_plain_plan_can_be_launched(tmp_path: Path) -> None:
    assert (
        not_there_yet(plan(BASE + "mechanism: hola\nresources: {gpu: 1, alone: true}\nretry: {infra: 3}", tmp_path))
        == []
    )


# --- evaluate ---------------------------------------------------------------------------------------------------


def slices(found: Plan, number: int = 0) -> list[tuple[str, str]]:
    return [(s.set, s.label) for s in found.members[number].slices]


def test_without_evaluate_a_trial_is_tested_on_its_own_task(tmp_path: Path) -> None:
    found = plan(BASE + "mechanism: softmax", tmp_path)
    (only,) = found.members[0].slices
    assert (only.set, only.at, only.task) == ("test", {}, found.members[0].trial.task)
    assert only.chance == {"accuracy": 2 / 512, "loss": pytest.approx(6.2383, abs=1e-4)}


def test_a_bare_grid_is_the_set_test_and_named_sets_keep_their_names(tmp_path: Path) -> None:
    bare = plan(BASE + "mechanism: softmax\nevaluate:\n  (task.seq_len, task.n_pairs): [[64, 4], [128, 8]]", tmp_path)
    assert slices(bare) == [("test", "seq_len-64/n_pairs-4"), ("test", "seq_len-128/n_pairs-8")]
    named = plan(
        BASE + "mechanism: softmax\nevaluate: {own: {}, load: {task.n_pairs: [2, 4], task.seq_len: [64, 128]}}",
        tmp_path,
    )
    assert slices(named)[0] == ("own", "")
    assert [label for name, label in slices(named) if name == "load"] == [
        f"n_pairs-{n}/seq_len-{t}" for n in (2, 4) for t in (64, 128)
    ]


def test_a_set_may_hold_for_some_trials_and_name_another_task(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax], task.n_pairs: [4, 8]}\nevaluate: {some: {if: {task.n_pairs: 4}}, other: {task: {name: copy, n_data: [2, 4], seq_len: 32, vocab_size: 512}}}"
    found = plan(BASE + text, tmp_path)
    assert slices(found, 0) == [("some", ""), ("other", "n_data-2"), ("other", "n_data-4")]
    assert slices(found, 1) == [("other", "n_data-2"), ("other", "n_data-4")]
    assert found.members[0].slices[1].task == {"name": "copy", "vocab_size": 512, "seq_len": 32, "n_data": 2}
    assert found.metrics == {"accuracy": "max", "loss": "min", "bits": "min"}


def test_equal_slices_have_equal_ids_whatever_the_trial(tmp_path: Path) -> None:
    found = plan(
        BASE + "axes: {mechanism: [softmax, hola], train.lr: [1, 2]}\nevaluate: {task.n_pairs: [2, 4]}", tmp_path
    )
    assert len({tuple(s.id for s in m.slices) for m in found.members}) == 1


def test_evaluating_more_changes_no_trial(tmp_path: Path) -> None:
    text = BASE + "mechanism: softmax\nevaluate: {task.n_pairs: [2%s]}"
    assert ids(plan(text % "", tmp_path)) == ids(plan(text % ", 4", tmp_path))


# --- patches ----------------------------------------------------------------------------------------------------


def test_a_profile_merges_appends_removes_and_renames_the_sweep(tmp_path: Path) -> None:
    text = """
axes: {mechanism: [softmax, {name: hola, cache: [4, 8]}], task.n_pairs: [4, 8]}
exclude: [{mechanism: softmax}]
profiles:
  paper:
    train.steps: 99
    model: {d_model: 48}
    exclude: null
    axes:
      mechanism+: [linear]
      task.n_pairs: null
    axes.mechanism.hola.cache: 6
"""
    found = plan(BASE + text, tmp_path, profile="paper")
    assert found.sweep == "base@paper"
    assert values(found, "mechanism", "mechanism.cache", "train.steps", "model.d_model", "task.n_pairs") == [
        ("softmax", None, 99, 48, 4),
        ("hola", 6, 99, 48, 4),
        ("linear", None, 99, 48, 4),
    ]
    assert "profiles" not in found.spec


def test_a_zip_axis_is_replaced_by_its_paths_in_any_order(tmp_path: Path) -> None:
    text = "mechanism: softmax\naxes:\n  (task.seq_len, task.n_pairs): [[64, 4]]\n  train.lr: [1, 2]\nprofiles: {p: {axes: {'(task.n_pairs,task.seq_len)': [[64, 4], [128, 8]]}}}"
    with pytest.raises(SpecError, match=r"n_pairs is 64"):  # 64 pairs in 4 tokens
        plan(BASE + text, tmp_path, profile="p")
    fine = text.replace("[[64, 4], [128, 8]]}}}", "[[4, 64], [8, 128]]}}}")
    found = plan(BASE + fine, tmp_path, profile="p")
    assert values(found, "task.seq_len", "task.n_pairs", "train.lr") == [
        (64, 4, 1),
        (64, 4, 2),
        (128, 8, 1),
        (128, 8, 2),
    ]


def test_extends_is_a_patch_and_a_changed_name_replaces_a_block(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        BASE + "mechanism: {name: hola, cache: 5}\nmodel.mlp: {name: gelu, width: 7}\nprofiles: {p: {train.steps: 3}}"
    )
    child = "sweep: child\nextends: parent\nmechanism: {block: 4}\nmodel: {mlp: swiglu}\ntask.n_pairs: 2\nprofiles: {p: {train.lr: 9}}"
    found = plan(child, tmp_path)
    assert found.sweep == "child"
    assert values(found, "mechanism.cache", "mechanism.block", "model.mlp", "task.n_pairs") == [
        (5, 4, {"name": "swiglu", "width": None, "gate": "silu"}, 2)
    ]
    both = plan(child, tmp_path, profile="p")
    assert values(both, "train.steps", "train.lr") == [(3, 9.0)]


def test_a_chain_holds_four_specs_at_most(tmp_path: Path) -> None:
    (tmp_path / "s0.yaml").write_text(BASE + "mechanism: softmax")
    for number in range(1, 6):
        (tmp_path / f"s{number}.yaml").write_text(f"sweep: s{number}\nextends: s{number - 1}")
    assert len(plan("sweep: x\nextends: s2", tmp_path).members) == 1
    with pytest.raises(SpecError, match="at most 4"):
        plan("sweep: x\nextends: s3", tmp_path)


def test_set_is_typed_as_in_the_file_and_comes_last(tmp_path: Path) -> None:
    text = "mechanism: {name: hola, cache: 4}\nprofiles: {p: {train.lr: 5}}"
    found = plan(
        BASE + text,
        tmp_path,
        profile="p",
        sets=["train.lr=1e-2", "mechanism.cache=8", "seeds=2", "mechanism={name: hola, block: 8}"],
    )
    assert values(found, "train.lr", "mechanism.cache", "mechanism.block", "seed") == [(0.01, 8, 8, 0), (0.01, 8, 8, 1)]


def test_set_reaches_axes_and_items_and_gives_what_is_required(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, {arm: c, name: hola, cache: [4, 8]}], task.n_pairs: [4, 8]}\ntrain.warmup: {required: a number}"
    sets = [
        "axes.mechanism.c.cache=32",
        "axes.task.n_pairs=[2]",
        "train.warmup=3",
        "axes.mechanism.softmax.model.position=rope",
    ]
    found = plan(BASE + text, tmp_path, sets=sets)
    assert values(found, "mechanism.cache", "task.n_pairs", "train.warmup", "model.position") == [
        (None, 2, 3, "rope"),
        (32, 2, 3, "none"),
    ]


@pytest.mark.parametrize("path", ["task.n_pairs=4", "mechanism=hola", "train.lr=3"])
def test_set_on_an_axis_is_refused_with_the_two_ways(path: str, tmp_path: Path) -> None:
    text = "axes: {mechanism: [{name: softmax, train.lr: 1}, hola], task.n_pairs: [4, 8]}"
    with pytest.raises(SpecError, match=r"--set 'axes\..*--only"):
        plan(BASE + text, tmp_path, sets=[path])


@pytest.mark.parametrize(
    "bad",
    ["x", "=3", "train.lr=", "train.lr=[", "profiles.x=1", "train.lr.x=3", "nothing=3", "axes.mechanism.hula.cache=3"],
)
def test_a_bad_set_is_told(bad: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--set"):
        plan(BASE + "axes: {mechanism: [hola]}", tmp_path, sets=[bad])


def test_what_a_profile_took_away_is_a_note_and_not_an_error(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, hola], task.n_pairs: [4, 8]}\nexclude: [{mechanism: softmax, task.n_pairs: 8}]\ncompare: [{a: {mechanism: hola}, b: {mechanism: softmax}}]\nprofiles: {one: {axes.task.n_pairs: [4], axes.mechanism: [softmax]}}"
    found = plan(BASE + text, tmp_path, profile="one")
    assert len(found.members) == 1
    assert any("task.n_pairs 8" in note for note in found.notes)
    assert any("mechanism hola" in note for note in found.notes)
    assert found.tests == ()


def test_generated_lists_reach_the_ends_of_the_numbers(tmp_path: Path) -> None:
    for form, wanted in (
        ("{logspace: [1e-308, 1e308, 3]}", [1e-308, 1.0, 1e308]),
        ("{logspace: [1e308, 1e-308, 3]}", [1e308, 1.0, 1e-308]),
        ("{linspace: [1, 1.5e308, 3]}", [1.0, 7.5e307, 1.5e308]),
        ("{logspace: [1, 100, 3]}", [1.0, 10.0, 100.0]),
    ):
        found = plan(f"{BASE}mechanism: softmax\naxes: {{train.lr: {form}}}", tmp_path)
        assert [member.trial.train["lr"] for member in found.members] == pytest.approx(wanted)  # type: ignore[index]


def test_a_line_from_one_end_of_the_numbers_to_the_other() -> None:
    node = read_text("{linspace: [-1.5e308, 1.5e308, 3]}", "spec")
    assert [item.value for item in sections.generated(node, Problems())] == [-1.5e308, 0.0, 1.5e308]


# --- only -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("mechanism: hola", 4),
        ("{mechanism: hola, seed: 0}", 2),
        ("mechanism.cache: {min: 5}, seed: [0, 1]", 2),
        ("arm: softmax", 2),
        ("seed: {not: 0}", 3),
        ("mechanism=hola", 4),
        ("mechanism = hola, seed=[0, 1],mechanism.cache: 8", 2),
        ("{mechanism=hola, seed=0}", 2),
        ("mechanism.cache={min: 5}", 2),
    ],
)
def test_only_takes_a_part_and_leaves_the_plan(only: str, count: int, tmp_path: Path) -> None:
    found = plan(BASE + "axes: {mechanism: [softmax, {name: hola, cache: [4, 8]}]}\nseeds: 2", tmp_path, only=only)
    assert len(found.members) == 6
    assert len(select(found, only)) == count


@pytest.mark.parametrize(
    "only", ["mechanism: hula", "mechanism.cahe: 4", "mechanism: softmax, mechanism.cache: 4", "hola", "{", ""]
)
def test_only_that_takes_nothing_is_told(only: str, tmp_path: Path) -> None:
    found = plan(BASE + "axes: {mechanism: [softmax, {name: hola, cache: [4, 8]}]}", tmp_path)
    with pytest.raises(UserError, match="--only"):
        select(found, only)


@pytest.mark.parametrize("only", ["hola", "", "seed=0,1", "mechanism=", "mechanism==hola", ",seed=0", "seed=[0", "="])
def test_only_in_neither_form_is_told_with_both(only: str, tmp_path: Path) -> None:
    found = plan(BASE + "axes: {mechanism: [softmax, hola]}\nseeds: 2", tmp_path)
    with pytest.raises(UserError, match="--only") as caught:
        select(found, only)
    assert only in ("seed=[0", "mechanism==hola") or "path: value or path=value" in str(caught.value)


# --- properties -------------------------------------------------------------------------------------------------

axis_values = {
    "task.n_pairs": st.integers(1, 16),
    "train.lr": st.floats(1e-6, 1, allow_nan=False),
    "model.d_model": st.integers(1, 64).map(lambda n: 4 * n),
    "train.warmup": st.integers(0, 50),
}


@st.composite
def grids(draw: st.DrawFn) -> dict[str, list[float]]:
    paths = draw(st.lists(st.sampled_from(sorted(axis_values)), unique=True, max_size=3))
    return {path: draw(st.lists(axis_values[path], min_size=1, max_size=3, unique=True)) for path in paths}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grid=grids(), seeds=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_a_grid_is_the_product_of_its_axes_and_its_ids_do_not_depend_on_order(
    grid: dict[str, list[float]], seeds: int, order: object, tmp_path: Path
) -> None:
    text = BASE + "mechanism: softmax\nseeds: %d\naxes: {%s}"
    found = plan(text % (seeds, ", ".join(f"{p}: {v}" for p, v in grid.items())), tmp_path)
    wanted = [(*combo, seed) for combo in product(*grid.values()) for seed in range(seeds)]
    assert values(found, *grid, "seed") == wanted
    shuffled = list(grid.items())
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = plan(text % (seeds, ", ".join(f"{p}: {v}" for p, v in shuffled)), tmp_path)
    assert set(ids(again)) == set(ids(found))
    assert len(set(ids(found))) == len(wanted)
