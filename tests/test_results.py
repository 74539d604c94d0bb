"""Results in other hands: DataFrames, CSV and Parquet with types, LaTeX and Markdown tables, the example notebook."""

import io
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from fake_store import accuracy, fill, finish, make_plan, without
from nbclient import NotebookClient
from pylatexenc.latexwalker import LatexEnvironmentNode, LatexWalker

import dashboards
from dashboards import columns, table
from dashboards.export import export
from dashboards.pivot import Pivot, pivot
from runners.schema import Plan, UserError
from runners.store import read_sealed, seal, write_json

ROOT = Path(__file__).resolve().parent.parent
AWKWARD = r"50 % of a_b & {c} ~ d^2 \ #1 $x$ <λ> ± – “q”"


def mixed(plan: Plan) -> Plan:
    """`plan` with settings of every kind: a word here and a number there, a gap, a switch, a list."""
    odd = [
        {"model.size": "small", "model.tied": True, "model.layers": ["a", "b"], "train.lr": 1e-3},
        {"model.size": 3, "model.tied": False, "train.lr": 1},
    ]
    members = [replace(m, varying=m.varying | odd[i]) for i, m in enumerate(plan.members[:2])]
    return without(plan, members=(*members, *plan.members[2:]))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep `capacity` but for one trial that was not run."""
    root = tmp_path_factory.mktemp("results")
    fill(root, mixed(make_plan(3, grid=(4, 8))), skip=1)
    return root


def test_a_frame_has_its_types_and_keeps_them_in_files(filled, tmp_path):
    trials = dashboards.load("capacity", store=filled)
    assert trials.shape[0] == 24
    assert list(trials["status"][-2:]) == ["complete", "planned"]
    types = trials.dtypes.astype(str)
    told = {"mechanism": "string", "task.n_pairs": "Int64", "model.size": "string", "model.tied": "boolean"}
    told |= {"model.layers": "string", "train.lr": "float64", "test/accuracy": "float64", "load/loss": "float64"}
    for name, type_ in (columns.DTYPES | told).items():
        assert name not in types or types[name] == type_, name
    assert list(trials["model.size"][:2]) == ["small", "3"]
    assert json.loads(trials["model.layers"][0]) == ["a", "b"]
    plan = mixed(make_plan(3, grid=(4, 8)))
    path = tmp_path / "capacity.csv"
    path.write_bytes(export(plan, filled, "csv", 1))
    pd.testing.assert_frame_equal(dashboards.read_csv(path), trials)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(export(plan, filled, "parquet", 1))), trials)
    plain = pd.read_csv(path, dtype=columns.DTYPES).dtypes.astype(str)
    assert all(plain[name] == type_ for name, type_ in columns.DTYPES.items() if name in plain)
    assert plain["test/accuracy"] == "float64"


def test_curves_and_evaluations_are_typed_too(filled):
    curves = dashboards.load("capacity", store=filled, table="curves")
    assert curves.dtypes.astype(str).to_dict() == {name: columns.DTYPES[name] for name in table.CURVE_COLUMNS}
    slices = dashboards.load("capacity", store=filled, table="evaluations")
    assert (slices["eval.n_pairs"].dtype, slices["accuracy"].dtype) == ("Int64", "float64")
    row = slices.iloc[2]
    assert (row["set"], row["label"], row["eval.n_pairs"]) == ("load", "n_pairs-8", 8)
    assert row["accuracy"] == pytest.approx(accuracy(make_plan(1, grid=(4, 8)).members[0], 8))


def test_what_is_not_there_is_told_with_the_nearest(filled, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="did you mean 'capacity'"):
        dashboards.load("capcity", store=filled)
    with pytest.raises(UserError, match="it has: capacity"):
        dashboards.load("x", store=filled)
    with pytest.raises(UserError, match="did you mean 'curves'"):
        dashboards.load("capacity", store=filled, table="curve")
    with pytest.raises(UserError, match="revision 7"):
        dashboards.load("capacity", store=filled, revision=7)
    with pytest.raises(UserError, match="MEMSWEEP_STORE"):
        dashboards.load("capacity", store=tmp_path)
    monkeypatch.setenv("MEMSWEEP_STORE", str(filled))
    assert len(dashboards.load("capacity")) == 24


# tables for papers


def best(found: Pivot) -> list[list[bool]]:
    return [[entry.is_best for entry in row[2:]] for row in found.rows]


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path, table.Results]:
    """A finished sweep of seven seeds: the fewest with which an accuracy can be called the best of four."""
    root, plan = tmp_path_factory.mktemp("seven"), make_plan(7)
    fill(root, plan)
    return plan, root, table.load(plan, root)


def changed(results: table.Results, arm: str, seeds: int, value: float) -> table.Results:
    """`results` with another accuracy for the first seeds of `arm` at the lighter load."""
    rows = results.members.copy()
    rows.loc[(rows["arm"] == arm) & (rows["task.n_pairs"] == 4) & (rows["seed"] < seeds), "test/accuracy"] = value
    return replace(results, members=rows)


def test_bold_is_what_the_reports_own_rule_calls_best(seven):
    plan, _, results = seven
    found = pivot(plan, results)
    assert best(found) == [[True, True], *[[False, False]] * 3], "softmax is clearly best, in both columns"
    assert "Holm" in found.bold
    at_chance = changed(
        results, "softmax", 3, 2 / 512
    )  # three of seven: the mean is no longer best, nor anyone's clearly
    assert [row[0] for row in best(pivot(plan, at_chance))] == [False] * 4
    missing = changed(results, "linear", 2, math.nan)
    assert best(pivot(plan, missing))[0] == [False, True], "more than a fifth of the pairs with a rival are missing"


def test_too_few_seeds_make_nothing_bold_and_the_caption_says_so(seven):
    plan, root, _ = seven
    plan = without(plan, members=tuple(m for m in plan.members if m.trial.seed < 6))
    found = pivot(plan, table.load(plan, root))
    assert not any(map(any, best(found)))
    assert found.bold == "Nothing is bold: to call one of 4 rows the best takes 7 seeds."
    assert found.bold in export(plan, root, "md").decode()


def test_without_task_settings_the_columns_are_the_scores(seven):
    plan, root, _ = seven
    members = [m for m in plan.members if m.trial.task["n_pairs"] == 4]
    members = [replace(m, varying={k: v for k, v in m.varying.items() if "task" not in k}) for m in members]
    plan = without(plan, members=tuple(members), tests=())
    found = pivot(plan, table.load(plan, root))
    assert found.head == ("", "state", "test accuracy", "test loss")
    assert best(found)[0] == [True, True], "the highest accuracy and the lowest loss"
    assert found.what == "scores"


@pytest.fixture(scope="module")
def awkward(seven) -> str:
    """The LaTeX table of a sweep whose names hold every character that LaTeX minds, with something in bold."""
    plan, root, _ = seven
    members = [replace(m, arm=AWKWARD) if m.arm == "softmax" else m for m in plan.members]
    return export(without(plan, members=tuple(members)), root, "latex").decode()


def test_the_latex_table_is_well_formed(awkward):
    nodes, _, _ = LatexWalker(awkward, tolerant_parsing=False).get_latex_nodes()
    environments = [node for node in nodes if node.isNodeType(LatexEnvironmentNode)]
    assert [node.environmentname for node in environments] == ["table"]
    assert awkward.count(r"\\") == 5  # a heading and four series
    body = awkward[awkward.index(r"\toprule") : awkward.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert all(len(re.findall(r"(?<!\\)&", line)) == 3 for line in lines), "four columns"
    assert len(re.findall(r"\\textbf\{", body)) == 2
    assert r"a\_b \& \{c\} {\textasciitilde} d{\textasciicircum}2 {\textbackslash} \#1 \$x\$" in body
    assert r"50 \%" in body


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex with booktabs")
def test_the_latex_table_compiles(awkward, tmp_path):
    head = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    (tmp_path / "t.tex").write_text(head + awkward + "\\end{document}\n", encoding="utf-8")
    line = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    ran = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert (tmp_path / "t.pdf").stat().st_size > 5000
    assert "Missing character" not in (tmp_path / "t.log").read_text(errors="replace")


def test_numbers_survive_exactly(tmp_path):
    """Not only to six digits: 0.1 + 0.2 and 1/3 come back as they were."""
    plan = make_plan(1)
    store = fill(tmp_path, plan)
    path = next((store.trial_folder(plan.members[0].trial.id) / "evals").iterdir())
    row = read_sealed(path)
    write_json(path, seal({**row, "metrics": {"accuracy": 0.1 + 0.2, "loss": 1 / 3}}), durable=False)
    finish(store, plan.members[1])
    (tmp_path / "t.csv").write_bytes(export(plan, tmp_path, "csv"))
    read = dashboards.read_csv(tmp_path / "t.csv")
    assert (read["test/accuracy"][0], read["test/loss"][0]) == (0.1 + 0.2, 1 / 3)
    assert not any(math.isnan(v) for v in read["test/loss"])


# the notebook


def test_the_example_notebook_runs(filled, monkeypatch):
    path = ROOT / "dashboards" / "examples" / "results.ipynb"
    book = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in book.cells), "cleared"
    monkeypatch.setenv("MEMSWEEP_STORE", str(filled))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert all(output["output_type"] == "execute_result" for output in shown), "no warning, no error"
    assert sum("image/svg+xml" in output["data"] for output in shown) == 2
