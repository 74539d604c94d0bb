"""Figures at a paper's size, fits, caps, and reports of several sweeps."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_store import fill, make_plan, without

from dashboards import curves, figures, paper, report, table
from dashboards.canvas import Canvas
from dashboards.compare import compare
from dashboards.scale import fit, scale
from runners.schema import Plan, UserError
from sweeps import reports


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> report.Source:
    plan = make_plan(2, grid=(4, 16))
    return report.Source(plan, fill(tmp_path_factory.mktemp("figures"), plan).root, "0001")


def test_a_paper_has_figures_of_its_width_in_type_of_its_size(source, tmp_path):
    plan = source.plan
    results = table.load(plan, source.store)
    drawn = figures.draw(plan, results, compare(plan, results), "Sweep a_b & c.")
    for figure in (drawn[0], drawn[2]):  # of panels, and with names beside it
        pdf, svg, png, tex = paper.save(figure, tmp_path, 3.25)
        box = re.search(rb"/MediaBox\s*\[\s*0 0 ([\d.]+)", pdf.read_bytes())
        assert box is None or float(box[1]) == pytest.approx(3.25 * 72, abs=1)
        assert int.from_bytes(png.read_bytes()[16:20], "big") == pytest.approx(3.25 * 300, abs=3)
        head = svg.read_text()
        assert float(re.search(r'<svg[^>]*? width="([\d.]+)"', head)[1]) == pytest.approx(234, abs=0.1)
        sizes = {float(size) for size in re.findall(r'font-size="([\d.]+)px"', head)}
        assert sizes <= {6.5, 7, 8}
        assert r"Sweep a\_b \& c." in tex.read_text()


def test_a_power_law_is_found_again():
    params = [1e5, 4e5, 2e6, 1e5, 4e5, 2e6]
    law = fit(params, [3 * p**-0.08 for p in params])
    assert law is not None
    assert (law.exponent, law.n_sizes) == (pytest.approx(0.08), 3)
    assert law.at(1e6) == pytest.approx(3 * 1e6**-0.08)
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        sizes = np.geomspace(1e5, 1e7, 6)
        found = fit(sizes.tolist(), (3 * sizes**-0.08 * np.exp(rng.normal(0, 0.01, 6))).tolist())
        assert found is not None
        inside += found.low <= 0.08 <= found.high
    assert 0.91 <= inside / 200 <= 0.99
    assert fit([1e5, 2e5], [3.0, 2.0]) is None
    assert fit([1e5, 2e5, 3e5], [3.0, 2.0, 0.0]) is None


def scaled(plan: Plan, store: Path) -> Canvas:
    """The sweep as if its tasks were sizes of the model and its score a loss."""
    members = []
    for member in plan.members:
        size = {4: 64, 16: 128}[member.trial.task["n_pairs"]]
        varying = {k: v for k, v in member.varying.items() if not k.startswith("task")} | {"model.d_model": size}
        members.append(replace(member, varying=varying))
    changed = without(plan, members=tuple(members), metrics={"loss": "min"}, tests=(), bounds={})
    results = table.load(changed, store)
    results.members["n_params"] = results.members["model.d_model"] ** 2 * 12
    return Canvas(changed, results, "Spec x.")


def test_loss_against_size_has_one_line_a_family_and_says_where_nothing_is_fitted(source):
    drawn = scale(scaled(source.plan, source.store))
    assert drawn is not None
    assert list(drawn.table["parameters"].unique()) == [64**2 * 12, 128**2 * 12]
    assert len(drawn.table) == 8
    assert "Fewer than three sizes: nothing is fitted." in drawn.caption
    assert scale(Canvas(source.plan, table.load(source.plan, source.store), "")) is None


def test_the_length_of_training_is_marked_where_all_of_a_panel_share_it(source):
    plan = without(source.plan, members=tuple(m for m in source.plan.members if m.trial.task["n_pairs"] == 4), tests=())
    canvas = Canvas(plan, table.load(plan, source.store), "")
    canvas.set = "load"
    drawn = figures.load(canvas, "accuracy")
    assert drawn is not None
    assert "The dashed line is where models trained." in drawn.caption
    (rows,) = drawn.spec["datasets"].values()
    assert [row["x"] for row in rows if row["part"] == 0] == [4]


def test_curves_are_capped_and_all_points_lie_beside(source, monkeypatch):
    canvas = Canvas(source.plan, table.load(source.plan, source.store), "")
    monkeypatch.setattr(curves, "MAX_CURVES", 3)
    drawn = next(curves.learning(canvas))
    assert "5 more cells are not drawn. All points: figures/learning_valid_accuracy.parquet." in drawn.caption
    assert drawn.data is not None
    assert drawn.data["trial"].nunique() == 16
    (rows,) = drawn.spec["datasets"].values()
    assert len({(row["series"], row["condition"]) for row in rows}) == 3
    long = pd.DataFrame({"step": range(5000), "trial": "t", "value": 0.0})
    assert len(curves.thinned(long)) <= 200
    assert curves.thinned(long)["step"].iloc[-1] == 4999


def test_several_sweeps_share_a_page_and_no_statistics(source, tmp_path):
    other = replace(source, plan=without(source.plan, sweep="again", question="And once more?"))
    built = report.build_all([source, other], tmp_path, forms=())
    text = built.html.read_text()
    ids = re.findall(r' id="([^"]+)"', text.split("<script>")[0])
    assert len(ids) == len(set(ids))
    assert {"capacity-sweep", "again-sweep", "capacity-figure-state", "again-figure-state"} <= set(ids)
    assert text.index("And once more?") < text.index('id="capacity-sweep"')  # every answer stands before the details
    assert text.count("<h1") == 1
    assert len(built.comparisons) == 2 * len(source.plan.tests)
    assert built.answer.splitlines()[1].startswith("again: ")
    assert built.counts == {"complete": 32}
    assert (tmp_path / "again" / "table.csv").is_file()
    assert not list(tmp_path.rglob("*.png"))
    assert "# And once more?" in (tmp_path / "report.md").read_text()


def test_forms_of_figures_are_checked():
    assert reports.forms_of("pdf, png,pdf") == ("pdf", "png")
    assert reports.forms_of("none") == ()
    with pytest.raises(UserError, match=r"svgz is no form of a figure; choose of png, svg, pdf, or none; .*svg\?"):
        reports.forms_of("svgz")


@pytest.mark.wide
def test_ten_thousand_trials(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tasks = [{"seq_len": 32 * 2 ** (i % 5), "n_pairs": 4 + i} for i in range(50)]
    plan = make_plan(50, margin=0.05, tasks=tasks)
    store = fill(tmp_path / "store", plan)
    assert len(plan.members) == 10_000
    report.build(plan, store.root, "0001", tmp_path / "out")
    # What it read is kept: processor time from now on, as other tests run beside this one.
    start = time.process_time()
    assert len(table.load(plan, store.root).members) == 10_000
    loaded = time.process_time()
    built = report.build(plan, store.root, "0001", tmp_path / "out")
    took = time.process_time() - loaded
    assert loaded - start < 1, f"{loaded - start:.2f} s"
    assert took < 20, f"{took:.1f} s"
    assert built.html.stat().st_size < 10e6
    assert math.isclose(len(pd.read_csv(tmp_path / "out" / "table.csv")), 10_000)
