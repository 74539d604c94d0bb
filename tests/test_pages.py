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
