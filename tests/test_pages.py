"""The report in a real browser: silent, alone, accessible, answering, and no wider than its window."""

from __future__ import annotations

import browser
import pytest
from fake_store import fill, make_plan

from dashboards import report


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report."""
    if browser.missing():
        pytest.skip(str(browser.missing()))
    root = tmp_path_factory.mktemp("page")
    plan = make_plan(3, margin=0.05, grid=(4, 16))
    built = report.build(plan, fill(root / "store", plan, skip=1).root, "0001", root / "out")
    return built.html.as_uri()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.wide),
        pytest.param(390, "light", marks=pytest.mark.wide),
    ],
)
def test_a_report_opens_silent_alone_accessible_and_fits(chromium, page, width, scheme):
    with chromium.visit(page, width=width, scheme=scheme) as visit:
        visit.page.wait_for_selector(".vega-embed svg")
        assert visit.complaints == []
        assert visit.strangers == []
        assert visit.overflow <= 0
        assert visit.faults() == []


def test_hovering_tells_and_the_legend_picks(chromium, page):
    with chromium.visit(page) as visit:
        chart = visit.page.locator("#figure-load .vega-embed")
        chart.wait_for()
        full = chart.locator(".mark-symbol.role-mark").last.locator("path")
        full.first.hover(force=True)
        tip = visit.page.locator("#vg-tooltip-element")
        tip.wait_for(state="visible")
        assert "n_pairs" in tip.inner_text()
        opacities = "marks => marks.map(mark => mark.getAttribute('opacity'))"
        assert set(full.evaluate_all(opacities)) == {"1"}
        chart.locator(".role-legend-symbol path").first.click(force=True)
        visit.page.wait_for_timeout(200)
        assert set(full.evaluate_all(opacities)) == {"1", "0.08"}
        assert visit.complaints == []


def test_the_numbers_of_a_figure_open_and_a_heading_sorts(chromium, page):
    with chromium.visit(page) as visit:
        figure = visit.page.locator("#figure-state")
        figure.locator("summary").click()
        assert "median test accuracy" in figure.locator("table").inner_text()
        cells = visit.page.locator("table.cells")
        cells.locator("thead button", has_text="mean").click()
        means = cells.locator("tbody td:nth-child(4)").evaluate_all("tds => tds.map(td => Number(td.dataset.value))")
        assert means == sorted(means)
