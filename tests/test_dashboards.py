"""From a store on disk to tables, verdicts, figures, report and export, with made-up numbers."""

import io
import json
import math
import re
import socket
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_store import STAMP, accuracy, diverge, fail, fill, finish, make_plan, without

import mechanisms
from dashboards import cells, figures, report, style, table, ui, words
from dashboards.compare import compare
from dashboards.export import FORMATS, export
from dashboards.stats import Verdict
from runners import store as stores
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import EvalSlice, Failure, Member, Outcome, Pair, Plan, Status, UserError


def load(root: Path, plan: Plan) -> table.Results:
    return table.load(plan, root)


def is_hola(member: Member, admission: str) -> bool:
    return member.varying.get("mechanism.admission") == admission


# tables


def test_a_row_a_member_with_every_varying_path_and_score(tmp_path):
    plan = make_plan(2, grid=(4, 8))
    fill(tmp_path, plan)
    rows = load(tmp_path, plan).members
    assert list(rows["trial"]) == [m.trial.id for m in plan.members]
    assert set(rows["status"]) == {"complete"}
    for path in table.varying_paths(plan):
        assert path in rows
    member = plan.members[-1]
    row = rows.iloc[-1]
    assert row["mechanism.admission"] == "recency"
    assert row["test/accuracy"] == pytest.approx(accuracy(member, 16))
    assert row["load/accuracy/n_pairs-8"] == pytest.approx(accuracy(member, 8))
    assert row["load/accuracy"] == pytest.approx((accuracy(member, 4) + accuracy(member, 8)) / 2)
    assert row["stamp.commit"] == STAMP["commit"]
    assert row["state_bytes"] == member.state_bytes
    assert "load/n" not in rows  # a count is no score


def test_scores_and_curves_are_long(tmp_path):
    plan = make_plan(1, grid=(4, 8))
    fill(tmp_path, plan)
    found = load(tmp_path, plan)
    assert len(found.scores) == sum(len(m.slices) for m in plan.members)
    assert set(found.scores.loc[found.scores["set"] == "load", "eval.n_pairs"]) == {4, 8}
    curve = found.curves[(found.curves["trial"] == plan.members[0].trial.id) & (found.curves["metric"] == "train/loss")]
    assert list(curve["step"]) == list(range(0, 201, 20))
    assert curve["value"].iloc[0] == pytest.approx(math.log(512))


def test_points_after_the_result_do_not_count(tmp_path):
    plan = make_plan(1)
    store = fill(tmp_path, plan)
    folder = store.trial_folder(plan.members[0].trial.id) / "metrics"
    stores.write_text(folder / "200-400.jsonl", '{"step": 400, "metrics": {"train/loss": 9.0}}\n')
    curves = load(tmp_path, plan).curves
    assert curves["step"].max() == 200


def test_every_way_a_trial_can_stand(tmp_path):
    plan = make_plan(3)
    store = fill(tmp_path, plan, skip=4)
    last = plan.members[-4:]
    diverge(store, last[0])
    fail(store, last[1], "ValueError: wrong shape")
    stores.write_text(store.trial_folder(last[2].trial.id) / "attempts" / "1" / "log.txt", "started\n")
    found = load(tmp_path, plan)
    rows = found.members.tail(4)
    assert list(rows["status"]) == ["diverged", "failed", "interrupted", "planned"]
    assert rows["error"].iloc[1] == "ValueError: wrong shape"
    assert rows["test/accuracy"].iloc[0] == pytest.approx(2 / 512)  # chance
    assert rows["test/loss"].iloc[0] == pytest.approx(math.log(512))
    assert rows["test/accuracy"].iloc[1:].isna().all()
    assert found.counts() == {"complete": 20, "diverged": 1, "failed": 1, "interrupted": 1, "planned": 1}


def test_the_ledger_tells_what_folders_cannot_but_never_overrules_a_result(tmp_path):
    plan = make_plan(1)
    fill(tmp_path, plan, skip=2)
    ids = [m.trial.id for m in plan.members]
    known = {ids[0]: (Status.RUNNING, None), ids[-1]: (Status.FAILED, "killed"), ids[-2]: (Status.RUNNING, None)}
    rows = table.load(plan, tmp_path, known).members.set_index("trial")
    assert rows.loc[ids[0], "status"] == "complete"
    assert rows.loc[ids[-2], "status"] == "running"
    assert (rows.loc[ids[-1], "status"], rows.loc[ids[-1], "error"]) == ("failed", "killed")


def test_an_altered_or_torn_file_counts_as_not_there_and_is_named(tmp_path):
    plan = make_plan(1)
    store = fill(tmp_path, plan)
    first, second = (store.trial_folder(m.trial.id) for m in plan.members[:2])
    text = (first / "result.json").read_text()
    (first / "result.json").write_text(text.replace('"wall_s": 12.5', '"wall_s": 1.5'))
    torn = second / "evals" / f"{plan.members[1].slices[0].id}.json"
    torn.write_text(torn.read_text()[:40])
    found = load(tmp_path, plan)
    assert list(found.members["status"][:3]) == ["planned", "interrupted", "complete"]
    assert len(found.warnings) == 2
    assert plan.members[0].trial.id in found.warnings[0]


def test_a_set_with_a_missing_slice_has_no_mean(tmp_path):
    plan = make_plan(1, grid=(4, 8))
    store = fill(tmp_path, plan)
    member = plan.members[0]
    (store.trial_folder(member.trial.id) / "evals" / f"{member.slices[-1].id}.json").unlink()
    row = load(tmp_path, plan).members.iloc[0]
    assert math.isnan(row["load/accuracy"])
    assert row["load/accuracy/n_pairs-4"] == pytest.approx(accuracy(member, 4))
    assert row["status"] != "complete"


def test_an_empty_store_gives_empty_tables_with_their_columns(tmp_path):
    plan = make_plan(1)
    stores.Store.create(tmp_path)
    found = load(tmp_path, plan)
    assert set(found.members["status"]) == {"planned"}
    assert {"trial", "task.n_pairs", "state_bytes", "wall_s", "error"} <= set(found.members)
    assert len(found.scores) == len(found.curves) == 0


# comparisons


def test_a_comparison_by_hand(tmp_path):
    plan = make_plan(3, margin=0.05)
    fill(tmp_path, plan)
    (found,) = compare(plan, load(tmp_path, plan))
    by_key = {
        (is_hola(m, "residual"), m.trial.task["n_pairs"], m.trial.seed): m for m in plan.members if m.arm == "hola"
    }
    differences = np.array(
        [[accuracy(by_key[True, n, s], n) - accuracy(by_key[False, n, s], n) for s in range(3)] for n in (4, 16)]
    )
    assert found.effect == pytest.approx(differences.mean())
    assert [found.blocks[b] for b in found.blocks] == pytest.approx(list(differences.mean(1)))
    se = math.sqrt((differences.var(1, ddof=1) / 3).sum()) / 2
    assert (found.high - found.effect) / se > 2.77  # t at no more than 4 degrees of freedom
    assert found.p == 2.0**-5  # six differences of one sign
    assert found.verdict == Verdict.A_BETTER


def test_slices_are_averaged_inside_a_pair(tmp_path):
    plan = make_plan(3, grid=(4, 8, 16))
    fill(tmp_path, plan)
    found = compare(plan, load(tmp_path, plan))[1]
    assert len(found.pairs) == 6  # not 18
    member = next(m for m in plan.members if is_hola(m, "residual"))
    expected = sum(accuracy(member, n) for n in (4, 8, 16)) / 3
    assert found.pairs[0].a == pytest.approx(expected)


def test_missing_pairs_are_counted_and_too_many_leave_no_verdict(tmp_path):
    plan = make_plan(6)
    store = fill(tmp_path, plan)
    recency = [m for m in plan.members if is_hola(m, "recency")]
    for i, member in enumerate(recency[:3]):
        (store.trial_folder(member.trial.id) / "result.json").unlink()
        (found,) = compare(plan, load(tmp_path, plan))
        assert found.n_missing == i + 1
        assert (found.verdict == Verdict.MISSING) == (i == 2)  # 3 of 12 are more than 20 %
    assert "3 of 12" in found.reason


def test_a_diverged_trial_scores_chance_and_is_counted(tmp_path):
    plan = make_plan(3)
    store = fill(tmp_path, plan)
    member = next(m for m in plan.members if is_hola(m, "residual"))
    diverge(store, member)
    (found,) = compare(plan, load(tmp_path, plan))
    assert found.n_missing == 0
    assert found.n_diverged == 1
    assert found.pairs[0].a == pytest.approx(2 / 512)


def test_training_metrics_compare_at_a_step_and_at_the_end(tmp_path):
    plan = make_plan(3)
    fill(tmp_path, plan)
    base = replace(plan.tests[0], set="valid", slices=())
    plan = without(plan, tests=(base, replace(base, step=100)))
    last, early = compare(plan, load(tmp_path, plan))
    assert early.effect == pytest.approx(last.effect * (1 - math.exp(-2)))


def test_a_diverged_trial_scores_chance_on_a_training_metric_too(tmp_path):
    plan = make_plan(3)
    store = fill(tmp_path, plan)
    diverge(store, next(m for m in plan.members if is_hola(m, "residual")))
    plan = without(plan, tests=(replace(plan.tests[0], set="valid", slices=()),))
    assert compare(plan, load(tmp_path, plan))[0].pairs[0].a == pytest.approx(2 / 512)


def test_a_trial_with_none_of_the_tested_slices_has_no_score(tmp_path):
    plan = make_plan(3)
    fill(tmp_path, plan)
    plan = without(plan, tests=(replace(plan.tests[0], slices=("another slice",)),))
    (found,) = compare(plan, load(tmp_path, plan))
    assert (found.pairs, found.n_missing, found.verdict) == ((), len(plan.tests[0].pairs), Verdict.MISSING)


def test_ratios_are_compared_as_logs_and_shown_as_ratios(tmp_path):
    plan = make_plan(3)
    fill(tmp_path, plan)
    test = replace(plan.tests[0], metric="loss", direction="min", bounded=False, scale="ratio", margin=0.5)
    plan = without(plan, tests=(test,))
    (found,) = compare(plan, load(tmp_path, plan))
    logs = {b: [math.log(p.a / p.b) for p in found.pairs if p.block == b] for b in found.blocks}
    assert found.effect == pytest.approx(math.exp(np.mean([np.mean(v) for v in logs.values()])))
    assert found.low < found.effect < 1
    assert "× " in words.sentence(found)


def test_at_equal_state_reads_side_b_between_its_sizes_and_never_beyond(tmp_path):
    plan = make_plan(1)
    fill(tmp_path, plan)
    softmax = [m for m in plan.members if m.arm == "softmax"]  # 16 KiB at n_pairs 4, 32 KiB at 16
    hola = next(m for m in plan.members if is_hola(m, "residual"))  # 24 KiB
    linear = next(m for m in plan.members if m.arm == "linear")

    def against(state: int) -> list:
        members = tuple(replace(m, state_bytes=state) if m is hola else m for m in plan.members)
        pair = Pair("all", 0, (hola.trial.id,), tuple(m.trial.id for m in softmax))
        test = replace(plan.tests[0], pairs=(pair,), at_equal="state_bytes", slices=())
        everything = tuple(dict.fromkeys(s.id for m in plan.members for s in m.slices))
        changed = without(plan, members=members, tests=(replace(test, slices=everything),))
        return list(compare(changed, load(tmp_path, changed))[0].pairs)

    low, high = accuracy(softmax[0], 4), accuracy(softmax[1], 16)
    (pair,) = against(24576)
    assert pair.b == pytest.approx(low + (high - low) * math.log2(1.5))
    assert against(16384)[0].b == pytest.approx(low)
    assert against(65536) == []  # beyond b's sizes nothing is known
    assert linear.state_bytes == 16384


def test_looks_multiply_p_before_the_adjustment(tmp_path):
    plan = make_plan(6, grid=(4, 8))
    fill(tmp_path, plan)
    results = load(tmp_path, plan)
    once, twice = compare(plan, results, 1), compare(plan, results, 2)
    assert once[0].p == twice[0].p == 2.0**-11
    assert once[0].p_adjusted == pytest.approx(2 * 2.0**-11)  # two tests
    assert twice[0].p_adjusted == pytest.approx(4 * 2.0**-11)


def test_too_few_pairs_say_how_many_it_takes(tmp_path):
    plan = make_plan(2)
    fill(tmp_path, plan)
    (found,) = compare(plan, load(tmp_path, plan))
    assert found.verdict == Verdict.TOO_FEW
    assert found.needs == "at least 3 seeds"
    assert found.low is not None  # estimate and interval are given all the same
    assert "only 4 pairs; 6 could" in words.sentence(found)


def test_pairs_run_under_different_stamps_are_marked(tmp_path):
    plan = make_plan(3)
    store = fill(tmp_path, plan)
    member = next(m for m in plan.members if is_hola(m, "residual"))
    finish(store, member, stamp={**STAMP, "device": "NVIDIA H200"})
    results = load(tmp_path, plan)
    assert compare(plan, results)[0].n_stamps_differ == 1
    assert words.stamps_that_differ(plan, results) == {"device": {"cpu": 23, "NVIDIA H200": 1}}


def test_a_fingerprint_is_compared_within_its_mechanism_and_task_only(tmp_path):
    plan = make_plan(3)
    store = fill(tmp_path, plan)
    for member in plan.members:
        finish(store, member, stamp={**STAMP, "fingerprint": member.arm, "dtype": f"as seed {member.trial.seed}"})
    results = load(tmp_path, plan)
    assert words.stamps_that_differ(plan, results) == {}
    assert compare(plan, results)[0].n_stamps_differ == 0
    member = next(m for m in plan.members if is_hola(m, "residual"))
    finish(store, member, stamp={**STAMP, "fingerprint": "other code"})
    results = load(tmp_path, plan)
    assert list(words.stamps_that_differ(plan, results)) == ["fingerprint of hola on mqar"]
    assert compare(plan, results)[0].n_stamps_differ == 1


def test_other_code_that_two_mechanisms_share_is_noticed(tmp_path):
    """Each mechanism's fingerprint is one value, yet the training loop changed between them."""
    plan = make_plan(3)
    store = fill(tmp_path, plan)

    def files(member, loop):
        attempt = store.result(member.trial.id)["attempt"]
        mine = f"mechanisms/{member.trial.mechanism['name']}.py"
        row = {"fingerprint": "f00d", "files": {"runners/train.py": loop, mine: member.arm}}
        stores.write_json(store.trial_folder(member.trial.id) / "attempts" / str(attempt) / "code.json", row)

    for member in plan.members:
        files(member, "a")
    results = load(tmp_path, plan)
    assert compare(plan, results)[0].n_stamps_differ == 0
    assert words.stamps_that_differ(plan, results) == {}
    files(next(m for m in plan.members if is_hola(m, "residual")), "b")
    results = load(tmp_path, plan)
    assert compare(plan, results)[0].n_stamps_differ == 1
    assert sorted(words.stamps_that_differ(plan, results)["code that all share"].values()) == [1, 23]


def test_a_trial_of_two_codes_is_neither(tmp_path):
    plan = make_plan(3)
    store = fill(tmp_path, plan)
    member = next(m for m in plan.members if is_hola(m, "residual"))
    path = store.trial_folder(member.trial.id) / "result.json"
    stores.write_json(path, stores.seal(json.loads(path.read_text()) | {"made_by": ["before", "f00d"]}))
    results = load(tmp_path, plan)
    assert compare(plan, results)[0].n_stamps_differ == 1
    assert "before+f00d" in words.stamps_that_differ(plan, results)["fingerprint of hola on mqar"]


# words


def test_the_answer_never_says_more_than_the_verdicts(tmp_path):
    plan = make_plan(3)
    fill(tmp_path, plan)
    results = load(tmp_path, plan)
    found = compare(plan, results)
    assert words.answer(plan, results, found).startswith("admission residual is better than admission recency")
    assert "tests nothing" in words.answer(without(plan, tests=()), results, [])
    lost = [replace(found[0], verdict=Verdict.B_BETTER)]
    assert words.answer(plan, results, lost).startswith("admission recency is better than admission residual")
    unknown = [replace(found[0], verdict=Verdict.CANNOT_TELL)]
    assert words.answer(plan, results, unknown).startswith("Cannot tell whether")
    same = replace(found[0], verdict=Verdict.NO_DIFFERENCE, test=replace(found[0].test, margin=0.05))
    assert words.answer(plan, results, [same]).startswith("No difference beyond 0.05")
    several = words.answer(plan, results, [found[0], unknown[0], unknown[0]])
    assert several.startswith("3 comparisons: 1 decided (admission residual is better")
    assert "2 undecided" in several
    empty = table.load(plan, tmp_path / "none")
    assert words.answer(plan, empty, compare(plan, empty)).startswith("No answer yet: none of 24")


def test_doing_better_under_a_heavier_load_is_told(tmp_path):
    plan = make_plan(3)
    fill(tmp_path, plan)
    found = cells.collect(plan, load(tmp_path, plan))
    loads = words.condition_loads(plan)
    assert loads == {"seq_len 32, n_pairs 4": 4, "seq_len 64, n_pairs 16": 16}
    assert cells.rises_with_load(found, loads) == []
    backwards = {name: -load for name, load in loads.items()}
    assert any("linear does better at seq_len 32" in note for note in cells.rises_with_load(found, backwards))
    assert any("linear does better" in note for note in cells.rises_with_load(found, loads, "min"))


# figures


def pixels(path: Path) -> np.ndarray:
    from matplotlib import image  # comes with mlflow

    return np.asarray(image.imread(path))[..., :3]


def test_figures_are_drawn_and_not_blank(tmp_path):
    plan = make_plan(3, margin=0.05, grid=(4, 8, 16))
    fill(tmp_path / "store", plan)
    results = load(tmp_path / "store", plan)
    drawn = figures.draw(plan, results, compare(plan, results), "Spec abc.")
    names = [figure.name for figure in drawn]
    assert names == ["state", "load", "tests_accuracy", "learning_valid_accuracy", "learning_train_loss"]
    for figure in drawn:
        assert figure.caption.endswith("Spec abc.")
        assert "n = " in figure.caption
        assert len(figure.description) > 40
    png, svg = style.save(drawn[0], tmp_path / "out", ("png", "svg"))
    image = pixels(png)
    assert image.shape[0] > 500
    colours = {tuple(int(v) for v in c) for c in np.unique((image * 255).round().reshape(-1, 3), axis=0)}
    for look in figures.Canvas(plan, results, "").looks.values():  # each family's own colour is really there
        assert tuple(bytes.fromhex(look.colour[1:])) in colours
    assert (image < 0.99).any(axis=2).mean() > 0.01
    for family in ("softmax", "hola, residual", "Spec abc."):
        assert family in svg.read_text()


def test_where_nothing_could_be_an_axis_cells_are_rows(tmp_path):
    plan = make_plan(1, tests=False)
    kept = tuple(replace(m, state_bytes=1) for m in plan.members if m.trial.task["n_pairs"] == 4)
    plan = without(plan, members=kept)
    assert figures.draw(plan, load(tmp_path, plan), [], "") == []  # nothing has run
    store = fill(tmp_path, plan)
    for member in kept:
        (store.trial_folder(member.trial.id) / "metrics" / "0-200.jsonl").unlink()
    (drawn,) = figures.draw(plan, load(tmp_path, plan), [], "")
    assert drawn.name == "cells_test_accuracy"
    assert len(drawn.table) == 4


def test_a_mechanism_looks_the_same_in_every_report():
    every = style.looks({name: name for name in style.ORDER})
    assert len(set(every.values())) == len(style.ORDER)
    assert style.looks({"mine": "hola", "softmax": "softmax"}) == {"mine": every["hola"], "softmax": every["softmax"]}
    assert set(style.ORDER) <= set(mechanisms.names())
    # A variant and a newcomer take what is free, and push nobody aside.
    wide = style.looks({"new": "new", "hola, recency": "hola", "hola, residual": "hola", "linear": "linear"})
    assert (wide["hola, recency"], wide["linear"]) == (every["hola"], every["linear"])
    assert len({look.colour for look in wide.values()}) == 4
    many = style.looks({f"f{i}": f"f{i}" for i in range(64)})
    assert len(set(many.values())) == 64
    assert len(style.looks({f"f{i}": f"f{i}" for i in range(70)})) == 70


def test_numbers_inside_a_family_make_series_of_one_colour(tmp_path):
    plan = make_plan(1)
    members = []
    for cache in (8, 16):
        for m in plan.members:
            if m.arm == "hola":
                trial = replace(m.trial, id=f"{m.trial.id[:-2]}{cache:02d}")
                varying = m.varying | {"mechanism.cache": cache}
                members.append(replace(m, trial=trial, varying=varying, state_bytes=1000 * cache))
    plan = without(plan, members=tuple(members), tests=())
    fill(tmp_path, plan)
    canvas = figures.Canvas(plan, load(tmp_path, plan), "")
    assert canvas.labels.families == ["hola, residual", "hola, recency"]
    drawn = figures.load(canvas, "accuracy")
    assert "cache 16" in json.dumps(drawn.spec)


# report


class Loads(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "xlink:href") and value:
                self.found.append(value)


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> tuple[report.Report, Path]:
    """The report of a sweep with a diverged, a failed and an unrun trial, and a stamp that differs."""
    root = tmp_path_factory.mktemp("partial")
    plan = without(make_plan(6, margin=0.05), question="Is <b>a</b> & b the same?")
    store = fill(root / "store", plan, skip=1)
    hola = [m for m in plan.members if is_hola(m, "residual")]
    for member in hola[:2]:
        for path in sorted(store.trial_folder(member.trial.id).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    diverge(store, hola[0])
    fail(store, hola[1], "ValueError: </script><script>alert(1)</script>")
    finish(store, hola[2], stamp={**STAMP, "commit": "fedcba9876543210+changed"})
    return report.build(plan, store.root, "0001", root / "out", looks=2), root / "out"


def test_the_report_says_what_is_missing_before_anything_else(partial):
    built, out = partial
    text = (out / "report.html").read_text()
    banner = text.index("Not finished: 2 of 48 trials")
    assert banner < text.index('class="answer"') < text.index("<figure")
    assert built.counts == {"complete": 45, "diverged": 1, "failed": 1, "planned": 1}
    assert built.answer in text.replace("&#39;", "'")
    assert any("1 of 48 trials diverged" in w for w in built.warnings)
    assert any("looked at 2 times" in w for w in built.warnings)
    for words_ in (
        "2 of 12",
        "multiplied by 2 looks",
        "seed 1 failed",
        "fedcba987654+changed",
        "sweep launch",
        "4 of 5 solved it",
    ):
        assert words_ in text, words_


def test_the_report_stands_alone_and_escapes_what_it_shows(partial):
    _, out = partial
    text = (out / "report.html").read_text()
    page = Loads()
    page.feed(text)
    assert [u for u in page.found if not u.startswith(("#", "data:"))] == []
    assert not re.search(r"@import|url\(\s*['\"]?https?:", text.split("<script", 1)[0])
    assert "&lt;b&gt;a&lt;/b&gt; &amp; b" in text
    assert "alert(1)</script>" not in text
    assert text.count("<script") == text.count("</script>")
    assert "vegaEmbed" in text
    for name in ("state", "load", "tests_accuracy"):
        spec = re.search(rf'id="spec-{name}">(.*?)</script>', text, re.S)
        assert "$schema" in json.loads(spec[1].replace("<\\/", "</"))


def test_the_report_has_markdown_table_and_pictures_beside_it(partial):
    built, out = partial
    assert {p.suffix for p in built.files} == {".html", ".md", ".csv", ".json", ".png", ".svg", ".pdf"}
    assert all(p.is_file() and p.stat().st_size > 500 for p in built.files)
    markdown = (out / "report.md").read_text()
    for picture in re.findall(r"\]\((figures/.*?)\)", markdown):
        assert (out / picture).is_file()
    assert "| admission residual | admission recency |" in markdown
    rows = pd.read_csv(out / "table.csv")
    assert len(rows) == 48
    assert "task.n_pairs" in rows


def test_a_report_of_nothing_says_so(tmp_path):
    plan = make_plan(1)
    store = stores.Store.create(tmp_path / "store")
    built = report.build(plan, store.root, "0001", tmp_path / "out")
    assert built.answer.startswith("No answer yet")
    assert "Not finished: 8 of 8" in (tmp_path / "out" / "report.html").read_text()


def test_running_and_silently_dead_trials_are_known_from_the_ledger(tmp_path):
    plan = make_plan(1)
    store = fill(tmp_path, plan, skip=2)
    assert report.known(store.root, plan.sweep, 1) == {}  # no ledger yet is no error
    running, dead = plan.members[-2].trial.id, plan.members[-1].trial.id
    ledger, owner = Ledger.open(store), Owner.me()
    ledger.record_plan(plan, 1)
    ledger.claim(running, owner)
    attempt = ledger.claim(dead, owner)
    ledger.finish(Outcome(dead, attempt, Status.FAILED, Failure.INFRA, "the worker was killed"))
    ledger.close()
    known = report.known(store.root, plan.sweep, 1)
    rows = table.load(plan, store.root, known).members.tail(2)
    assert list(rows["status"]) == ["running", "failed"]
    assert rows["error"].iloc[1] == "the worker was killed"
    assert rows["error"].isna().iloc[0]


def test_looks_count_reports_after_which_seeds_were_added(tmp_path):
    store = fill(tmp_path, make_plan(3))
    assert report.count_look(store, "capacity", 1) == 1
    assert report.count_look(store, "capacity", 1) == 1  # reading twice is one look
    store.freeze(make_plan(3, margin=0.1))
    assert report.count_look(store, "capacity", 2) == 1  # no seed was added
    store.freeze(make_plan(5))
    assert report.count_look(store, "capacity", 3) == 2
    assert report.count_look(store, "capacity", 1) == 1


def test_a_report_before_the_first_result_is_no_look(tmp_path):
    store = stores.Store.create(tmp_path)
    store.freeze(make_plan(1))
    report.count_look(store, "capacity", 1)
    fill(tmp_path, make_plan(3))
    assert report.count_look(store, "capacity", 2) == 1


# export


def test_exports(tmp_path):
    plan = make_plan(3)
    fill(tmp_path, plan)
    tables = {form: export(plan, tmp_path, form) for form in FORMATS}
    from_csv, from_parquet = (
        pd.read_csv(io.BytesIO(tables["csv"])),
        pd.read_parquet(io.BytesIO(tables["parquet"])),
    )
    assert list(from_csv) == list(from_parquet)
    assert from_csv["test/accuracy"].to_numpy() == pytest.approx(from_parquet["test/accuracy"].to_numpy())
    latex = tables["latex"].decode()
    assert r"n\_pairs 16" in latex
    assert latex.count(r"\\") == 5  # a heading and four series
    assert "| hola, residual | 24 KiB |" in tables["md"].decode()
    with pytest.raises(UserError, match="csv, parquet, latex, md"):
        export(plan, tmp_path, "xlsx")


def test_parquet_takes_a_path_that_is_a_word_here_and_a_number_there(tmp_path):
    plan = make_plan(1)
    first = replace(plan.members[0], varying=plan.members[0].varying | {"model.size": "small"})
    second = replace(plan.members[1], varying=plan.members[1].varying | {"model.size": 3})
    plan = without(plan, members=(first, second, *plan.members[2:]))
    fill(tmp_path, plan)
    frame = pd.read_parquet(io.BytesIO(export(plan, tmp_path, "parquet")))
    assert list(frame["model.size"][:2]) == ["small", "3"]
    assert frame["model.size"][2:].isna().all()


# ui


def test_the_ui_command_is_bound_to_loopback_and_light(tmp_path):
    (tmp_path / "mlflow.db").touch()
    line, extra = ui.command(tmp_path)
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--workers") + 1] == "1"
    assert line[line.index("--backend-store-uri") + 1] == f"sqlite:///{tmp_path.resolve()}/mlflow.db"
    assert extra["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert extra["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert ui.address(line).startswith("http://127.0.0.1:")


def test_a_taken_port_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="is taken"):
            ui.command(tmp_path, port)
        monkeypatch.setattr(ui, "DEFAULT_PORT", port)
        line, _ = ui.command(tmp_path)
        assert int(line[line.index("--port") + 1]) != port
    with pytest.raises(UserError, match="65535"):
        ui.command(tmp_path, 70000)


def test_the_ui_refuses_what_it_cannot_serve(tmp_path):
    with pytest.raises(UserError, match="sweep sync"):
        ui.command(tmp_path)
    with pytest.raises(UserError, match="browser"):
        ui.command(tmp_path, tracking_uri="http://mlflow.example:5000")


def test_a_slice_shared_by_two_sets_is_read_once_and_counts_in_both(tmp_path):
    plan = make_plan(1)
    member = plan.members[0]
    same = member.slices[0]
    twice = replace(member, slices=(same, EvalSlice(same.id, "load", same.task, {"task.n_pairs": 4}, same.chance)))
    plan = without(plan, members=(twice, *plan.members[1:]))
    fill(tmp_path, plan)
    row = load(tmp_path, plan).members.iloc[0]
    assert row["load/accuracy"] == row["test/accuracy"] == pytest.approx(accuracy(member, 4))
