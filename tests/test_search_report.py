"""What people are shown of a search: status, report, export, and verdicts between sides that were tuned differently."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_store import STAMP

from dashboards import cells, export, report, table, words
from dashboards import searches as tables
from dashboards.compare import compare
from dashboards.stats import Verdict
from runners.schema import Exit, Member, Plan
from runners.search import Searches
from runners.store import Store, seal, write_json
from runners.suggest import makers
from sweeps import cli
from sweeps.plan import load
from sweeps.searches import Suggestions

SPEC = """\
sweep: shown
question: Which is better when both are tuned?
task: {name: mqar, vocab_size: 64, seq_len: 32, n_pairs: 4}
model: {d_model: 32, n_layers: 2, n_heads: 1}
train: {steps: 8, batch_size: 4, lr: 1e-3}
axes:
  mechanism:
    - linear
    - {name: deltanet, train.lr: {values: [1e-3, 1e-2]}}
seeds: 8
search: {train.lr: {log_uniform: [1e-4, 1e-1]}, trials: 5}
compare: [{a: {mechanism: deltanet}, b: {mechanism: linear}}]
"""


def make(text: str, tmp_path: Path) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load(str(path))


def finish(store: Store, member: Member) -> None:
    """Write a member's result and evaluations: deltanet is clearly better, and more so at a high rate."""
    one = member.trial
    assert one.train is not None
    score = round(
        0.5 + (0.3 if one.mechanism["name"] == "deltanet" else 0.0) + one.train["lr"] + 0.01 * (one.seed % 5), 6
    )
    folder = store.trial_folder(one.id)
    head = {"schema": 1, "trial": one.id, "attempt": 1, "stamp": STAMP}
    row = {"status": "complete", "step": 8, "metrics": {"valid/accuracy": score, "train/loss": 1.0}, "n_params": 1000}
    row |= {"tokens": 10, "wall_s": 1.0, "stopped_by": "steps", "diverged": None, "peak_mem_bytes": 10}
    for part in member.slices:
        metrics = {"accuracy": score, "loss": 1.0, "n": 100}
        found = head | {"slice": part.id, "task": part.task, "metrics": metrics}
        write_json(folder / "evals" / f"{part.id}.json", seal(found), durable=False)
    write_json(folder / "result.json", seal(head | row), durable=False)


def run(plan: Plan, root: Path, *, rounds: int = 99, reports: bool = True) -> Store:
    """A store in which the plan's searches, and then its report trials, have ended."""
    store = Store.create(root)
    store.freeze(plan)
    searches, resolve = Searches(plan, store), Suggestions(plan)
    for key in searches.searches:
        for _ in range(rounds):
            left = [m for m in searches.advance(key, resolve).members if store.result(m.trial.id) is None]
            if not left:
                break
            for member in left:
                finish(store, member)
    for member in searches.view().plan.members if reports else ():
        finish(store, member)
    return store


def test_the_report_tells_how_each_cell_was_tuned(tmp_path: Path) -> None:
    plan = make(SPEC, tmp_path)
    store = run(plan, tmp_path / "runs")
    built = report.build(plan, store.root, "0001", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert r"| deltanet | train.lr of 0.001 \| 0.01 | 2 random (TPE begins after 8) | suggestion" in text
    assert "| linear | train.lr log_uniform 0.0001 to 0.1 | 5 random (TPE begins after 8) | suggestion" in text
    assert "| train.lr 0.01 | 0.8" in text
    assert "valid/accuracy on 1 seed of its own" in text
    assert any("were not tuned alike: 2 suggestions a cell against 5" in line for line in built.warnings)
    assert built.counts == {"complete": 16}  # suggestions are in no table
    assert [c.verdict for c in built.comparisons] == [Verdict.A_BETTER]
    html = built.html.read_text()
    assert 'id="searches" class="h2">Searches</h2>' in html
    assert "figure-search_valid_accuracy" in html  # and its history as a figure
    assert "first round" not in html


def test_an_unfinished_search_is_no_result(tmp_path: Path) -> None:
    plan = make(SPEC.replace("trials: 5", "trials: 9"), tmp_path)
    store = run(plan, tmp_path / "runs", rounds=1, reports=False)
    built = report.build(plan, store.root, "0001", tmp_path / "out")
    assert built.counts == {"planned": 16}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| 4 of 9 random (TPE begins after 8) | not known yet |" in text
    assert "No answer yet" in built.answer
    rows = table.load(plan, store.root).members
    assert list(rows["status"].unique()) == ["planned"]


def test_who_made_the_suggestions_is_told_as_it_was(tmp_path: Path) -> None:
    plan = make(SPEC.replace("trials: 5", "trials: 12, parallel: 3"), tmp_path)
    store = run(plan, tmp_path / "runs", reports=False)
    rows = {row["cell"]: row for row in tables.rows(Searches(plan, store).view().states)}
    assert (rows["linear"]["suggestions"], rows["linear"]["sampler"]) == ("12", "(9 random, 3 TPE)")
    told = {search.cell: makers(search) for search in plan.searches}
    assert told == {"linear": "(9 random, 3 TPE)", "deltanet": "random (TPE begins after 9)"}


def test_the_shipped_search_comes_to_tpe() -> None:
    assert {makers(search) for search in load("tuned").searches} == {"(8 random, 4 TPE)"}


def test_exports_have_the_winners_values(tmp_path: Path) -> None:
    plan = make(SPEC, tmp_path)
    store = run(plan, tmp_path / "runs")
    text = export.export(plan, store.root, "csv").decode()
    head, *rows = text.splitlines()
    columns = head.split(",")
    found = [dict(zip(columns, row.split(","), strict=False)) for row in rows]
    assert {row["train.lr"] for row in found if row["cell"] == "deltanet"} == {"0.01"}
    winners = {m.trial.id for m in Searches(plan, store).view().plan.members}
    assert {row["trial"] for row in found} == winners
    assert b"linear" in export.export(plan, store.root, "md")


@pytest.mark.parametrize("equal", [True, False])
def test_selected_results_have_a_verdict_only_if_both_sides_were_tuned_alike(tmp_path: Path, equal: bool) -> None:
    text = SPEC.replace("trials: 5", "trials: 2, seeds: same" if equal else "trials: 5, seeds: same")
    plan = make(text, tmp_path)
    store = run(plan, tmp_path / "runs")
    view = Searches(plan, store).view()
    (found,) = compare(view.plan, table.load(view.plan, store.root))
    assert found.tuning.is_selected
    if equal:
        assert found.verdict == Verdict.A_BETTER
        assert found.reason.endswith("selected on these seeds")
    else:
        assert found.verdict == Verdict.CANNOT_TELL
        assert found.reason == "selected on these seeds, from 2 suggestions a cell against 5"
    results = table.load(view.plan, store.root)
    told = words.notes(view.plan, results, [found], cells.collect(view.plan, results), 1)
    assert any("selected on the seeds shown" in line for line in told)
    assert {row["seeds"] for row in tables.rows(view.states)} == {"the report's seeds"}


def test_sides_that_were_not_searched_are_told_too(tmp_path: Path) -> None:
    plan = make(SPEC.replace("{values: [1e-3, 1e-2]}", "1e-2"), tmp_path)
    store = run(plan, tmp_path / "runs")
    view = Searches(plan, store).view()
    (found,) = compare(view.plan, table.load(view.plan, store.root))
    assert (found.tuning.a, found.tuning.b, found.tuning.is_alike) == ((0,), (5,), False)


def test_several_aims_pick_the_best_in_the_first(tmp_path: Path) -> None:
    text = SPEC[: SPEC.index("search:")].replace(", train.lr: {values: [1e-3, 1e-2]}", "")
    text += "search: {model.n_layers: {int_uniform: [1, 6]}, trials: 6, select: [valid/accuracy, state_bytes]}\n"
    plan = make(text, tmp_path)
    assert [(s.select, s.directions) for s in plan.searches] == [
        (("valid/accuracy", "state_bytes"), ("max", "min"))
    ] * 2
    store = run(plan, tmp_path / "runs")
    states = Searches(plan, store).view().states.values()
    for state in states:  # all score the same here, so the smallest state wins
        assert state.winner is not None
        assert state.suggestions[state.winner].values == {"model.n_layers": 1}
        assert {s.values["model.n_layers"] for s in state.suggestions} == set(range(1, 7))


def test_status_groups_suggestions_by_their_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make(SPEC, tmp_path)
    store = run(plan, tmp_path / "runs", rounds=1, reports=False)

    def sweep(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["sweep", *words])
        assert cli.main() == Exit.OK
        return capsys.readouterr().out

    lines = sweep("status", "shown", "--store", str(store.root)).splitlines()
    assert lines[1] == "  linear: search 4/5"
    assert re.fullmatch(r"  deltanet: search 2/2; suggestion [01] won: train\.lr 0\.01", lines[2])
    assert sum(" suggestion " in line for line in lines[3:]) == 4 + 2
    found: list[dict[str, Any]] = json.loads(sweep("status", "shown", "--json", "--store", str(store.root)))
    assert [s["ended"] for s in found[0]["searches"]] == [4, 2]
    assert {t["role"] for t in found[0]["trials"]} == {"report", "search"}
    shown = sweep("plan", str(tmp_path / "spec.yaml"))
    assert "16 trials (2 cells x 8 seeds), 7 trainings of suggestions" in shown
    assert "23 trainings" in shown
    assert "5 random (TPE begins after 8)" in shown
