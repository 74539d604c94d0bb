"""Broken specs: each is told at its place, in words, and nothing else is said."""

# ruff: noqa: E501 (a broken spec, its place and its message read best on one line)

from __future__ import annotations

from pathlib import Path

import pytest
from spec_tools import BASE, FAKE, plan, problems

from sweeps.catalog import Catalog
from sweeps.reader import SpecError

HEAD = BASE.count("\n")
"""Lines of BASE: a spec below writes what follows it, so its own lines count from there."""

# name: (what follows BASE, line after BASE, column, words of the message)
# fmt: off
AFTER_BASE = {
    "unknown key": ("axis: {mechanism: [softmax]}\nmechanism: softmax", 1, 1, "no key 'axis' (did you mean 'axes'?)"),
    "unknown mechanism": ("mechanism: sofmax", 1, 12, "no mechanism 'sofmax' (did you mean 'softmax'?)"),
    "unknown mechanism in an item": ("axes:\n  mechanism: [softmax, {name: holla}]", 2, 31, "did you mean 'hola'?"),
    "unknown parameter": ("mechanism: {name: hola, cach: 4}", 1, 25, "mechanism hola has no parameter 'cach' (did you mean 'cache'?)"),
    "unknown parameter in an item": ("axes:\n  mechanism: [{name: hola, blok: [4, 8]}]", 2, 28, "did you mean 'block'?"),
    "parameter of another mechanism": ("axes:\n  mechanism: [softmax, hola]\n  mechanism.cache: [4, 8]", 3, 3, "softmax has no parameter 'cache'"),
    "fraction for a whole number": ("mechanism: {name: hola, cache: 1e-3}", 1, 32, "0.001 is not a whole number"),
    "float for a whole number": ("mechanism: {name: hola, cache: 1e3}", 1, 32, "write 1000"),
    "no for a switch": ("mechanism: {name: linear, unit_keys: no}", 1, 38, "no is not true or false (write false)"),
    "text for a number": ("mechanism: softmax\naxes: {train.lr: [1e-3, fast]}", 2, 25, "fast does not fit"),
    "number for text": ("mechanism: softmax\nquestion: 3", 2, 11, "question is text, not 3"),
    "wrong choice": ("mechanism: {name: hola, admission: recent}", 1, 36, "did you mean 'recency'?"),
    "none where none is no value": ("mechanism: {name: hola, cache: none}", 1, 32, "none does not fit: wanted int"),
    "missing value": ("mechanism: {name: hola, cache: }", 1, 25, "has no value"),
    "a list outside axes": ("mechanism: {name: hola, cache: [4, 8]}", 1, 32, "move it to axes"),
    "a mapping for a number": ("mechanism: {name: hola, cache: {a: 1}}", 1, 32, "a mapping where one value is wanted"),
    "a value for a list": ("mechanism: softmax\naxes: {model.layers: [mechanism]}", 2, 23, "is not a list"),
    "a missing required parameter": ("mechanism: window", 1, 12, "mechanism window needs 'window'"),
    "no mechanism": ("seeds: 2", None, 1, "there is no mechanism"),
    "seeds of zero": ("mechanism: softmax\nseeds: 0", 2, 8, "a count of at least 1"),
    "seeds twice": ("mechanism: softmax\nseeds: [1, 1]", 2, 8, "different whole numbers"),
    "seeds as an axis": ("mechanism: softmax\naxes: {seed: [0, 1]}", 2, 8, "write `seeds: N`"),
    "zip of unequal lengths": ("mechanism: softmax\naxes:\n  (task.seq_len, task.n_pairs): [[64, 4], [128]]", 3, 43, "has 2 values, not 1 values"),
    "zip written again in another order": ("mechanism: softmax\naxes:\n  (task.seq_len, task.n_pairs): [[64, 4]]\n  (task.n_pairs, task.seq_len): [[2, 32]]", 4, 3, "given twice (first in line 7)"),
    "zip of a slice written again in another order": ("mechanism: softmax\nevaluate:\n  (task.seq_len, task.n_pairs): [[64, 4]]\n  (task.n_pairs, task.seq_len): [[2, 32]]", 4, 3, "given twice (first in line 7)"),
    "a ref beyond all numbers": ("axes: {mechanism: [{name: softmax, model.d_model: {ref: task.n_pairs, times: 1.7e308}}]}", 1, 51, "gives a number that is too large"),
    "a rounded ref beyond all numbers": ("mechanism: {name: hola, cache: {ref: model.d_model, times: 1.7e308, round: down}}", 1, 32, "gives a number that is too large"),
    "a ref past 64 bits": ("mechanism: {name: hola, cache: {ref: model.d_model, times: 4611686018427387904}}", 1, 32, "gives a number that is too large"),
    "a ref past 64 bits by a float": ("mechanism: {name: hola, cache: {ref: model.d_model, times: 1e30}}", 1, 32, "not a whole number"),
    "half a character": ('mechanism: softmax\nquestion: "a \\ud800"', 2, 11, "\\ud800 is half a character"),
    "half a character in a key": ('mechanism: softmax\n"\\ud800": 1', 2, 1, "\\ud800 is half a character"),
    "zip of a flat list": ("mechanism: softmax\naxes:\n  (task.seq_len, task.n_pairs): [64, 4]", 3, 33, "rows of 2 values"),
    "zip naming a path twice": ("mechanism: softmax\naxes:\n  (train.lr, train.lr): [[1, 2]]", 3, 3, "names a path twice"),
    "one path on two axes": ("mechanism: softmax\naxes:\n  train.lr: [1e-3]\n  (train.lr, train.warmup): [[1e-2, 5]]", 4, 3, "already written by the axis 'train.lr'"),
    "one path on an axis and an item": ("axes:\n  train.lr: [1e-3, 1e-2]\n  mechanism: [{name: softmax, train.lr: 1e-4}, linear]", 3, 31, "already written by the axis 'train.lr'"),
    "one path twice in an item": ("axes:\n  mechanism: [{name: hola, cache: 4, (cache): [[8]]}]", 2, 38, "written twice in this item"),
    "one path nested and dotted": ("mechanism: softmax\ntrain.lr: 3", 2, 1, "'train.lr' is given twice"),
    "an empty axis": ("mechanism: softmax\naxes: {train.lr: []}", 2, 18, "at least one value"),
    "an axis that is no list": ("mechanism: softmax\naxes: {train.lr: 3}", 2, 18, "at least one value"),
    "an axis of nothing": ("mechanism: softmax\naxes: {lr: [1]}", 2, 8, "no path of a trial"),
    "everything excluded": ("mechanism: softmax\nexclude: [{mechanism: softmax}]", 2, 1, "exclude leaves nothing"),
    "exclude of a value nobody has": ("mechanism: hola\nexclude: [{mechanism.cache: 17}]", 2, 29, "no trial of this sweep has mechanism.cache 17"),
    "exclude of a path nobody has": ("mechanism: hola\nexclude: [{mechanism.cahe: 16}]", 2, 12, "did you mean 'mechanism.cache'?"),
    "an empty condition": ("mechanism: hola\nexclude: [{}]", 2, 11, "would match every trial"),
    "bounds on text": ("mechanism: hola\nexclude: [{mechanism: {min: 3}}]", 2, 23, "no trial of this sweep has mechanism: {min: 3}"),
    "bounds the wrong way round": ("mechanism: hola\nexclude: [{mechanism.cache: {min: 3, max: 1}}]", 2, 29, "min 3 is above max 1"),
    "an unknown operator": ("mechanism: hola\nexclude: [{mechanism.cache: {min: 3, above: 1}}]", 2, 29, "{min, max} or {not: value}"),
    "pairs that do not fit the length": ("mechanism: softmax\naxes:\n  (task.seq_len, task.n_pairs): [[64, 4], [64, 32]]", 3, 48, "task recall wants 4 * n_pairs <= seq_len: here n_pairs is 32, seq_len is 64"),
    "a mechanism's rule": ("mechanism: {name: hola, admission: none, cache: 4}", 1, 49, "mechanism hola wants admission != 'none' or cache == 0"),
    "a model's rule": ("mechanism: softmax\naxes: {model.n_heads: [1, 3]}", 2, 27, "model wants d_model % n_heads == 0"),
    "two owners of a unit": ("mechanism: softmax\naxes: {train.tokens: [1000]}", 2, 8, "one of steps | epochs | tokens is given"),
    "two owners in when": ("mechanism: softmax\nmodel.n_heads: 1\nwhen: [{if: {mechanism: softmax}, set: {model.head_dim: 8, model.n_heads: 4}}]", 3, 60, "one of n_heads | head_dim"),
    "a when that never holds": ("axes:\n  mechanism: [softmax, hola]\nwhen: [{if: {mechanism: softmax, mechanism.cache: 16}, set: {train.lr: 1}}]", 3, 13, "matches none of 2 combinations"),
    "two when that disagree": ("mechanism: softmax\nwhen: [{if: {mechanism: softmax}, set: {train.lr: 1}}, {if: {train.steps: 10}, set: {train.lr: 2}}]", 2, 86, "set differently by another `when`"),
    "a when without if": ("mechanism: softmax\nwhen: [{set: {train.lr: 1}}]", 2, 8, "{if: condition, set: {path: value}}"),
    "a when that changes the mechanism": ("mechanism: softmax\nwhen: [{if: {train.steps: 10}, set: {mechanism: hola}}]", 2, 38, "make it an axis"),
    "a ref in a circle": ("mechanism: softmax\ntask.seq_len: {ref: task.n_pairs}\ntask.n_pairs: {ref: task.seq_len}", None, None, "given twice"),
    "a ref to nothing": ("mechanism: {name: hola, cache: {ref: model.with}}", 1, 32, "ref to 'model.with'"),
    "a ref to text": ("mechanism: {name: hola, cache: {ref: model.position}}", 1, 32, "no number"),
    "a ref that is no whole number": ("mechanism: {name: hola, cache: {ref: model.d_model, times: 0.3}}", 1, 32, "round: down"),
    "a ref with an unknown part": ("mechanism: {name: hola, cache: {ref: model.d_model, time: 2}}", 1, 32, "'time' is no part"),
    "a match that cannot be reached": ("mechanism: {name: hola, cache: {match: state_bytes, to: 10}}", 1, 32, "at 1 the state already holds"),
    "a match of a parameter without state": ("mechanism: hola\ntrain.warmup: {match: state_bytes, to: 100000}", 2, 15, "the state"),
    "a match of something else": ("mechanism: {name: hola, cache: {match: flops, to: 10}}", 1, 32, "only state_bytes"),
    "a match to another form": ("mechanism: {name: hola, cache: {match: state_bytes, to: {ref: task.seq_len}}}", 1, 32, "to is a number, not {ref: task.seq_len}"),
    "a name that two blocks have": ("mechanism: softmax\nmodel.qqqqq: 1", 2, 1, "mlp.width, mlp.gate, moe.experts"),
    "a value that is required": ("mechanism: {name: hola, cache: {required: how many tokens}}", 1, 32, "how many tokens. Give it with --set mechanism.cache=..."),
    "a generated list outside axes": ("mechanism: {name: hola, cache: {linspace: [1, 4, 4]}}", 1, 32, "stands in axes"),
    "a logspace from zero": ("mechanism: softmax\naxes: {train.lr: {logspace: [0, 1, 3]}}", 2, 18, "ends above 0"),
    "a logspace of two numbers": ("mechanism: softmax\naxes: {train.lr: {logspace: [1, 2]}}", 2, 18, "[first, last, n]"),
    "an arm with a slash": ("axes:\n  mechanism: [{arm: a/b, name: softmax}]", 2, 21, "letters, digits"),
    "an item without a name": ("axes:\n  mechanism: [{cache: 4}]", 2, 15, "needs a name"),
    "an item that is a number": ("axes:\n  mechanism: [softmax, 3]", 2, 24, "a name or a mapping with `name`"),
    "a block of the model that is not there": ("mechanism: softmax\nmodel.mlp: gelo", 2, 12, "did you mean 'gelu'?"),
    "a parameter of another block of the model": ("mechanism: softmax\nmodel.mlp: {name: gelu, gate: relu}", 2, 25, "mlp gelu has no parameter 'gate'"),
    "a parameter of no block": ("mechanism: softmax\nmodel.mlp: none\nmodel.mlp.width: 4", 3, 1, "is none here"),
    "an unknown key of a segment": ("mechanism: softmax\ntask.segments: [{seq_len: 64, pairs: 4}]", 2, 16, "segments has no key 'pairs'"),
    "a segment that breaks a rule": ("mechanism: softmax\ntask.segments: [{seq_len: 64, n_pairs: 32}]", 2, 16, "task recall wants 4 * n_pairs"),
    "evaluate of another block": ("mechanism: softmax\nevaluate: {long: {train.lr: [1]}}", 2, 19, "task paths only"),
    "evaluate mixing grids and sets": ("mechanism: softmax\nevaluate: {task.n_pairs: [4], long: {task.seq_len: [128]}}", 2, 31, "either one grid of task paths, or named sets"),
    "evaluate of an impossible slice": ("mechanism: softmax\nevaluate: {task.n_pairs: [4, 64]}", 2, 30, "task recall wants 4 * n_pairs <= seq_len"),
    "evaluate with an unknown path": ("mechanism: softmax\nevaluate: {task.npairs: [4]}", 2, 12, "did you mean 'n_pairs'?"),
    "evaluate of an unknown task": ("mechanism: softmax\nevaluate: {long: {task: {name: recal}}}", 2, 32, "did you mean 'recall'?"),
    "evaluate of a set called valid": ("mechanism: softmax\nevaluate: {valid: {}}", 2, 12, "training metrics"),
    "evaluate if nobody": ("mechanism: softmax\nevaluate: {long: {if: {task: copy}, task.seq_len: [128]}}", 2, 30, "no trial of this sweep has task copy"),
    "evaluate with a short row": ("mechanism: softmax\nevaluate: {long: {\"(task.seq_len, task.n_pairs)\": [[64]]}}", 2, 52, "has 2 values, not 1 values"),
    "search without trials": ("mechanism: softmax\nsearch: {train.lr: {log_uniform: [1e-4, 1e-2]}}", 2, 9, "needs `trials`"),
    "grid with trials": ("mechanism: softmax\nsearch: {train.lr: {values: [1, 2]}, sampler: grid, trials: 3}", 2, 53, "takes no trials"),
    "grid over an interval": ("mechanism: softmax\nsearch: {train.lr: {uniform: [1, 2]}, sampler: grid}", 2, 20, "sampler grid takes {values: [...]}"),
    "an interval the wrong way round": ("mechanism: softmax\nsearch: {train.lr: {uniform: [2, 1]}, trials: 3}", 2, 30, "low < high"),
    "a logarithm of zero": ("mechanism: softmax\nsearch: {train.lr: {log_uniform: [0, 1]}, trials: 3}", 2, 34, "begins above 0"),
    "search of a choice by interval": ("mechanism: softmax\nsearch: {train.dtype: {uniform: [0, 1]}, trials: 3}", 2, 23, "train.dtype is no number: search it with {values: [...]}"),
    "no values": ("mechanism: softmax\nsearch: {train.lr: {values: []}, trials: 3}", 2, 29, "values is empty"),
    "no values in an item": ("axes: {mechanism: [{name: hola, block: 8, cache: {values: []}}]}\nsearch: {trials: 2}", 1, 59, "values is empty"),
    "a bad value after a good one": ("mechanism: softmax\nsearch: {train.dtype: {values: [fp32, bf61]}, trials: 3}", 2, 39, "bf61 does not fit: wanted fp32 | bf16 (did you mean 'bf16'?)"),
    "a bad number after a good one": ("mechanism: softmax\nsearch: {train.lr: {values: [1e-3, foo]}, trials: 3}", 2, 36, "foo does not fit: wanted float"),
    "a bad value in an item": ("axes: {mechanism: [{name: hola, block: 8, cache: {values: [1, 1.5]}}]}\nsearch: {trials: 2}", 1, 63, "1.5 is not a whole number"),
    "a list as a value": ("mechanism: softmax\nsearch: {model.layers: {values: [[mechanism]]}, trials: 3}", 2, 34, "a list cannot be searched: make it an axis"),
    "an end below the rule": ("mechanism: softmax\nsearch: {train.lr: {uniform: [-1, 1]}, trials: 3}", 2, 31, "train wants lr > 0: here lr is -1"),
    "a search of nothing": ("mechanism: softmax\nsearch: {trials: 3}", 2, 9, "names nothing to search"),
    "pruning after the end": ("mechanism: softmax\nsearch: {train.lr: {uniform: [1, 2]}, trials: 3}\nprune: {asha: {grace_steps: 10}}", 3, 29, "the longest training ends at 10"),
    "search of nothing": ("mechanism: softmax\nsearch: {train.lrr: {uniform: [0, 1]}, trials: 3}", 2, 21, "train has no parameter 'lrr'"),
    "an unknown sampler": ("mechanism: softmax\nsearch: {train.lr: {uniform: [1, 2]}, sampler: tpa, trials: 3}", 2, 48, "did you mean 'tpe'?"),
    "search of an axis": ("mechanism: softmax\naxes: {train.lr: [1, 2]}\nsearch: {train.lr: {uniform: [1, 2]}, trials: 3}", 3, 20, "is an axis (line 6)"),
    "prune without search": ("mechanism: softmax\nprune: {asha: {grace_steps: 5}}", 2, 1, "prune needs search"),
    "an unknown pruner": ("mechanism: softmax\nsearch: {train.lr: {uniform: [1, 2]}, trials: 3}\nprune: {ash: {grace_steps: 5}}", 3, 9, "did you mean 'asha'?"),
    "resources": ("mechanism: softmax\nresources: {gpu: some}", 2, 18, "wanted float | auto"),
    "resources below zero": ("mechanism: softmax\nresources: {gpu: -1}", 2, 18, "less than 0"),
    "alone is a switch": ("mechanism: softmax\nresources: {alone: 1}", 2, 20, "1 is not true or false"),
    "retry": ("mechanism: softmax\nretry: {infa: 3}", 2, 9, "did you mean 'infra'?"),
    "budget": ("mechanism: softmax\nbudget: {gpu_hours: 0}", 2, 21, "less than"),
    "a compare that pairs nothing": ("axes:\n  mechanism: [{name: hola, cache: [4, 8]}, softmax]\ncompare: [{a: {mechanism: softmax, train.lr: 1e-3}, b: {mechanism: hola, train.steps: 11}}]", 3, 87, "no trial of this sweep has train.steps 11"),
    "a compare of nobody": ("axes:\n  mechanism: [{name: hola, cache: [4, 8]}, softmax]\ncompare: [{a: {mechanism: softmax, mechanism.cache: 4}, b: {mechanism: hola}}]", 3, 15, "pairs nothing"),
    "a compare with itself": ("axes:\n  mechanism: [{name: hola, cache: [4, 8]}, softmax]\ncompare: [{a: {mechanism: hola}, b: {mechanism.cache: 4}}]", 3, 11, "is on both sides"),
    "a compare with a path on one side": ("axes:\n  mechanism: [{name: hola, cache: [4, 8]}, softmax]\ncompare: [{a: {mechanism: hola}, b: {mechanism: softmax}}]", 3, 11, "varies on one side only: mechanism.cache (4, 8 on side a)"),
    "a compare without b": ("mechanism: softmax\ncompare: [{a: {mechanism: softmax}}]", 2, 11, "{a: condition, b: condition}"),
    "a compare that is no list": ("mechanism: softmax\ncompare: {a: {mechanism: softmax}}", 2, 10, "compare is a list"),
    "an unknown key of compare": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, metrics: test/accuracy}]", 2, 61, "did you mean 'metric'?"),
    "an unknown metric": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, metric: test/acuracy}]", 2, 69, "did you mean 'accuracy'?"),
    "an unknown set": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, metric: tst/accuracy}]", 2, 69, "did you mean 'test'?"),
    "at nowhere": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, at: {task.seq_len: 999}}]", 2, 80, "no slice of 'test' here has task.seq_len 999"),
    "a step of a test metric": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, at: {step: 5}}]", 2, 65, "only training metrics have steps"),
    "a margin of zero": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, margin: 0}]", 2, 69, "a number above 0"),
    "each of nothing": ("axes: {mechanism: [softmax, linear]}\ncompare: [{a: {mechanism: softmax}, b: {mechanism: linear}, each: [mechanism.expnd]}]", 2, 68, "did you mean 'mechanism.expand'?"),
    "sides that cannot differ": ("axes:\n  mechanism: [{name: hola, cache: 48, admission: [residual, recency]}]\ncompare: [{a: {mechanism.admission: residual}, b: {mechanism.admission: recency}}]", 3, 11, "everywhere both sides are the same model"),
    "a window as long as the sequence": ("axes:\n  mechanism: [{name: window, window: [32, 64]}, softmax]\ncompare: [{a: {mechanism.window: 64}, b: {mechanism: softmax}}]", 3, 11, "both sides are the same model"),
}
# fmt: on


def test_the_base_itself_is_fine(tmp_path: Path) -> None:
    assert len(plan(BASE + "mechanism: softmax", tmp_path).members) == 1


@pytest.mark.parametrize("name", AFTER_BASE)
def test_a_broken_spec_is_told_once_at_its_place(name: str, tmp_path: Path) -> None:
    text, line, column, words = AFTER_BASE[name]
    found = problems(BASE + text, tmp_path)
    assert any(words in message for _, _, message in found), found
    if column is not None:
        at = next((a, b) for a, b, message in found if words in message)
        assert at == ((HEAD + line) if line else 1, column)
        assert len(found) == 1, found


# fmt: off
WHOLE = {
    "no name": ("question: x\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}", 1, 1, "the key 'sweep' is missing"),
    "a name with capitals": ("sweep: My Sweep\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}", 1, 8, "a-z, 0-9, _ and -"),
    "a name of 101 letters": (f"sweep: {'x' * 101}\nmechanism: softmax\ntask: recall\ntrain: {{steps: 1, batch_size: 1}}", 1, 8, "101 letters; a name has at most 100"),
    "a name that is a number": ("sweep: 3\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}", 1, 8, "sweep is text, not 3"),
    "no task": ("sweep: x\nmechanism: softmax\ntrain: {steps: 1, batch_size: 1}", 1, 1, "there is no task"),
    "no training": ("sweep: x\nmechanism: softmax\ntask: recall", 1, 1, "train needs one of steps | epochs | tokens"),
    "no batch": ("sweep: x\nmechanism: softmax\ntask: recall\ntrain: {steps: 4}", 4, 9, "train needs one of batch_size | batch_tokens"),
    "training nothing": ("sweep: x\nmechanism: softmax\ntask: timing\ntrain: {steps: 1}", 4, 1, "nothing to train"),
    "evaluating nothing": ("sweep: x\nmechanism: softmax\ntask: timing\nevaluate: {a: {}}", 4, 1, "nothing to train"),
    "a list": ("- sweep: x", 1, 1, "a spec is a mapping"),
    "text": ("hello", 1, 1, "a spec is a mapping"),
    "train is a list": ("sweep: x\nmechanism: softmax\ntask: recall\ntrain: [1]", 4, 8, "train is a mapping"),
    "task is a number": ("sweep: x\nmechanism: softmax\ntask: 3\ntrain: {steps: 1, batch_size: 1}", 3, 7, "task needs a name"),
    "axes is a list": ("sweep: x\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}\naxes: [1]", 5, 7, "axes is a mapping"),
    "a profile that is a list": ("sweep: x\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}\nprofiles: {a: [1]}", 5, 15, "a mapping of what it changes"),
    "extends itself": ("sweep: x\nextends: spec.yaml", 2, 10, "comes back to itself"),
    "extends nothing": ("sweep: x\nextends: nowhere", 2, 10, "no such file"),
    "200,001 trials": ("sweep: x\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}\naxes: {train.lr: {linspace: [1, 2, 1000]}, train.warmup: {linspace: [1, 2, 1000]}}", 5, 1, "1,000,000 trials"),
    "a ref in a circle": ("sweep: x\nmechanism: hola\ntask: {name: recall, seq_len: {ref: task.n_pairs, times: 8}, n_pairs: {ref: task.seq_len}}\ntrain: {steps: 1, batch_size: 1}", 3, 31, "ref goes in a circle"),
    "a parameter of no block": ("sweep: x\nmechanism: softmax\ntask: recall\ntrain: {steps: 1, batch_size: 1}\nmodel: {moe: none, moe.experts: 4}", None, None, "is none here"),
}
# fmt: on


@pytest.mark.parametrize("name", WHOLE)
def test_a_broken_whole_is_told(name: str, tmp_path: Path) -> None:
    text, line, column, words = WHOLE[name]
    found = problems(text, tmp_path)
    assert any(words in message for _, _, message in found), found
    if line is not None:
        assert (line, column) in [(a, b) for a, b, message in found if words in message]


def test_problems_of_different_parts_come_in_one_report(tmp_path: Path) -> None:
    text = (
        BASE
        + "mechanism: {name: hola, cach: 4, block: 1e-3}\nretry: {infa: 1}\nseeds: none\nfoo: 1\nresources: {gpu: x}"
    )
    found = problems(text, tmp_path)
    assert [line - HEAD for line, _, _ in found] == [1, 2, 3, 4, 5]


def test_a_rule_that_many_trials_break_is_told_once(tmp_path: Path) -> None:
    text = BASE + "mechanism: softmax\naxes:\n  train.lr: [1, 2, 3]\n  task.n_pairs: [4, 32]\nseeds: 5"
    found = problems(text, tmp_path)
    assert [(line - HEAD, column) for line, column, _ in found] == [(4, 21)]


@pytest.mark.parametrize("value", ["[a]", "{name: [a]}", "{name: 1, width: 3}", "3"])
def test_a_misfit_that_several_axes_meet_is_told_once(value: str, tmp_path: Path) -> None:
    axes = "axes: {mechanism: [softmax, {name: linear, model.n_heads: [1, 2]}], model.position: [none, rope]}"
    found = problems(f"{BASE}model.mlp: {value}\n{axes}", tmp_path)
    assert len(found) == 1
    assert "model.mlp: there is no" in found[0][2]


def test_a_wrong_slice_is_not_told_again_by_the_comparison_on_it(tmp_path: Path) -> None:
    text = "axes: {mechanism: [softmax, linear]}\nevaluate: {long: {task.n_pairs: [64]}}\n"
    found = problems(f"{BASE}{text}compare: [{{a: {{mechanism: softmax}}, b: {{mechanism: linear}}}}]", tmp_path)
    assert [line - HEAD for line, _, _ in found] == [2]


def test_a_problem_in_a_parent_is_told_in_the_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(BASE + "mechanism: {name: hola, cach: 4}")
    with pytest.raises(SpecError) as caught:
        plan("sweep: child\nextends: parent", tmp_path)
    (mark, _), *rest = caught.value.problems
    assert mark.file.endswith("parent.yaml")
    assert (mark.line, rest) == (HEAD + 1, [])


def test_a_problem_of_set_is_told_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        plan(BASE + "mechanism: hola", tmp_path, sets=["mechanism.cache=1e-3"])
    assert str(caught.value).startswith("--set mechanism.cache=1e-3:1:1: mechanism.cache: 0.001 is not a whole number")


REAL = "sweep: x\nmechanism: softmax\ntask: {name: mqar, vocab_size: 128}\ntrain: {steps: 10, batch_size: 4}\n"

# fmt: off
WITH_THE_REAL_CATALOGUE = {
    "a slice with tokens the model has no rows for": ("evaluate: {test: {}, big: {task.vocab_size: [96, 128, 256]}}", 5, 55, "task.vocab_size 256 is above the 128 of training"),
    "a slice of another task with such tokens": ("evaluate: {big: {task: {name: mqar, vocab_size: 512}}}", 5, 49, "task.vocab_size 512 is above the 128 of training"),
    "a slice of another task by its defaults": ("evaluate: {big: {task: mqar}}", 5, 12, "task.vocab_size 8192 is above the 128 of training"),
    "a layer of no kind": ("model: {layers: [base_cnv, mechanism]}", 5, 18, "no layer is called 'base_cnv' (did you mean 'base_conv'?)"),
    "a layer that is a number": ("model: {layers: [mechanism, 3]}", 5, 29, "3 is no name, and no mapping with one"),
    "a layer without a name": ("model: {layers: [mechanism, {window: 4}]}", 5, 29, "a layer of its own has a name"),
    "a layer with a setting it has not": ("model: {layers: [mechanism, {name: sliding_window, widow: 4}]}", 5, 52, "mechanism sliding_window has no parameter 'widow' (did you mean 'window'?)"),
    "a layer with a value that does not fit": ("model: {layers: [mechanism, {name: sliding_window, window: 4.5}]}", 5, 60, "window: 4.5 is not a whole number"),
    "a layer that breaks its mechanism's rule": ("model: {layers: [mechanism, {name: sliding_window, window: 0}]}", 5, 17, "mechanism sliding_window in model.layers wants window >= 1: here window is 0"),
    "rotary positions where a layer cannot have them": ("model: {layers: [mechanism, linear], position: rope}", 5, 17, "mechanism linear in model.layers wants position != 'rope'"),
    "a rotary layer that cannot be one": ("model: {layers: [mechanism, {name: linear, position: rope}]}", 5, 17, "mechanism linear in model.layers wants position != 'rope'"),
    "more picks than experts": ("model: {moe: {name: moe, experts: 2, top_k: 3}}", 5, 45, "model.moe wants top_k <= experts: here experts is 2, top_k is 3"),
    "a lobe without its link": ("model: {lobe: causal}", 5, 15, "model wants lobe == 'none' or block == 'hyper_link'"),
    "a lobe that reads the future": ("model: {block: hyper_link, lobe: bidirectional}", 5, 34, "model wants lobe != 'bidirectional' or not causal"),
    "experts of nothing": ("model: {mlp: none, moe: moe}", 5, 25, "model wants moe is None or mlp is not None"),
    "settings of the mechanism in its layer": ("model: {layers: [{name: mechanism, window: 4}]}", 5, 36, "stand under `mechanism`"),
    "layers of others alone": ("model: {layers: [linear, deltanet]}", 5, 17, "'mechanism' in layers: here layers is [linear, deltanet]"),
    "layers without the mechanism": ("model: {layers: [base_conv, base_conv]}", 5, 17, "model wants layers is None or 'mechanism' in layers"),
    "no layers": ("model: {layers: []}", 5, 17, "'mechanism' in layers: here layers is []"),
    "more kinds of layer than layers": ("model: {n_layers: 1, layers: [base_conv, mechanism]}", 5, 30, "len(layers) <= n_layers"),
    "no heads": ("model: {n_heads: 0}", 5, 18, "model wants n_heads >= 1: here n_heads is 0"),
    "no heads where a mechanism has a rule on their width": ("model: {n_heads: 0, position: rope}", 5, 18, "model wants n_heads >= 1: here n_heads is 0"),
    "heads of no width": ("model: {d_model: 32, head_dim: 0}", 5, 32, "model wants head_dim >= 1: here head_dim is 0"),
}
# fmt: on


@pytest.mark.parametrize("name", WITH_THE_REAL_CATALOGUE)
def test_what_could_not_run_is_told_before(name: str, tmp_path: Path) -> None:
    text, line, column, words = WITH_THE_REAL_CATALOGUE[name]
    found = problems(REAL + text, tmp_path, catalog=Catalog())
    assert [(a, b) for a, b, message in found if words in message] == [(line, column)], found
    assert len(found) == 1, found


def test_a_slice_of_a_smaller_vocabulary_and_a_mixture_of_layers_are_fine(tmp_path: Path) -> None:
    text = "model: {n_layers: 4, layers: [base_conv, mechanism]}\nevaluate: {task.vocab_size: [100, 128]}"
    assert len(plan(REAL + text, tmp_path, catalog=Catalog()).members[0].slices) == 2


@pytest.mark.parametrize(
    ("model", "mechanism", "column", "words"),
    [
        ("mlp: {name: swiglu, width: 0}", "linear", 49, "model.mlp wants width is None or width >= 1"),
        ("norm: post, block: hyper_link", "{name: hola, cache: 8, block: 8}", 41, "model wants block == 'pre_norm'"),
        ("moe: {top_k: 9}", "{name: raven, slots: 8, top_k: 2}", 35, "model.moe wants top_k <= experts"),
    ],
)
def test_a_rule_points_at_its_own_blocks_parameters(
    model: str, mechanism: str, column: int, words: str, tmp_path: Path
) -> None:
    """Other blocks have parameters of the same names."""
    text = f"sweep: x\ntask: {{name: mqar, vocab_size: 64}}\nmodel: {{d_model: 16, {model}}}\ntrain: {{steps: 2, batch_size: 2}}\nmechanism: {mechanism}"
    with pytest.raises(SpecError) as caught:
        plan(text, tmp_path, catalog=Catalog())
    assert f"spec.yaml:3:{column}: {words}" in str(caught.value)


def test_the_catalogue_used_here_is_the_small_one() -> None:
    assert "no" in FAKE.names("mechanism")
