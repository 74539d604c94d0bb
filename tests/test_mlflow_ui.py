"""MLflow's own pages on a store, in a real Chromium: they open, show what was sent, and ask no other machine."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import browser
import pytest
from fake_store import fill, make_plan
from stores import make
from test_mlflow_pages import samples

from dashboards import report, ui
from runners import driver, record, summary_run
from runners.store import Store

pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.timeout(900)]

API = {"experiments", "runs", "metrics", "artifacts", "logged-models", "model-versions", "users", "gateway-proxy"}
API |= {"assistant", "server-info", "registered-models", "traces", "prompts"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A finished sweep with its report, sent."""
    if browser.missing():
        pytest.skip(str(browser.missing()))
    plan = make_plan(2, grid=(4, 8))
    store = fill(make(tmp_path_factory.mktemp("ui") / "runs").root, plan)
    samples(store.trial_folder(plan.members[0].trial.id), 1, 0.0, 2.0, 4.0)
    report.build(plan, store.root, "0001", store.revision_folder("capacity", 1) / "report")
    driver.sync(store.root, say=lambda _: None)
    return store


@pytest.fixture(scope="module")
def address(store: Store) -> Iterator[str]:
    """Where `sweep ui` serves it."""
    line, extra = ui.command(store.root, ui._any_free())
    with open(store.root / "ui.log", "wb") as log:
        server = subprocess.Popen(line, env={**os.environ, **extra}, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 180
        while not _is_up(ui.address(line)):
            assert time.monotonic() < end, (store.root / "ui.log").read_text()
            time.sleep(0.3)
        yield ui.address(line)
    finally:
        server.terminate()
        server.wait(60)


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def pages(store: Store) -> dict[str, tuple[str, str]]:
    """Address and a text that has to show, by page."""
    client = record.make_client(store.mlflow_uri)
    number = client.get_experiment_by_name("capacity").experiment_id
    trial, summary = (
        client.search_runs([number], query, max_results=1)[0].info.run_id
        for query in ("metrics.`system/cpu_utilization_percentage` = 4", "tags.`memsweep.kind` = 'summary'")
    )
    base, table = f"/#/experiments/{number}/runs", summary_run.view_path(store, "capacity")
    return {
        "table": (str(table), "test/accuracy"),
        "charts": (f"{base}?compareRunsMode=CHART", "load/accuracy"),
        "run": (f"{base}/{trial}", "State of one sequence"),
        "metrics": (f"{base}/{trial}/model-metrics", "load/accuracy"),
        "system": (f"{base}/{trial}/system-metrics", "cpu_utilization_percentage"),
        "summary": (f"{base}/{summary}", "Which mechanism keeps the most"),
        "report": (f"{base}/{summary}/artifacts/report/report.html", "report.json"),
    }


@pytest.mark.parametrize("name", ["table", "charts", "run", "metrics", "system", "summary", "report"])
def test_a_page_shows_what_was_sent_and_asks_no_other_machine(chromium, store: Store, address: str, name: str) -> None:
    path, text = pages(store)[name]
    with chromium.visit(address + path, width=1500, height=1000) as visit:
        visit.page.get_by_text(text).first.wait_for(timeout=60_000)
        visit.page.wait_for_timeout(1000)
        assert visit.strangers == []
        asked = {urlsplit(url).path for url in visit.requests}
        api = {path.split("/")[4] for path in asked if path.startswith(("/ajax-api/2.0/", "/ajax-api/3.0/"))}
        assert api <= API, "dashboards/MLFLOW.md does not list it"
        assert [said for said in visit.complaints if "404" not in said and "ResizeObserver" not in said] == []
        if shots := os.environ.get("MEMSWEEP_SHOTS"):
            visit.page.screenshot(path=str(Path(shots) / f"{name}.png"), timeout=120_000)
