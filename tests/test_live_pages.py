"""The dashboard in a real browser: silent, alone, accessible, and following a sweep while a reader reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import browser
import fake_store
import pytest
from moving import CARD, Moving

from dashboards import live_site
from dashboards.live_server import Server
from dashboards.live_site import Site
from runners.schema import Failure

HOSTILE = "ValueError: <img src=x onerror=\"document.title='broken in'\"> is no mechanism"


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moving]:
    """A sweep under way, of which every kind of thing is there."""
    if browser.missing():
        pytest.skip(str(browser.missing()))
    made = Moving(tmp_path_factory.mktemp("live") / "runs", fake_store.make_plan(3))
    for member in made.plan.members[::2][:8]:
        made.finish(member)
    made.fail(made.plan.members[1], HOSTILE, Failure.ERROR)
    made.diverge(made.plan.members[3])
    made.start(made.plan.members[5], card=CARD, gpu=0.5)
    made.tell(made.plan.members[5], 40)
    yield made
    made.ledger.close()


@pytest.fixture(scope="module")
def server(moving: Moving) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, Server(Site(moving.store), port=0) as made:
        patch.setattr(live_site, "LOOK_EVERY_S", 0.0)
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(5)


@pytest.fixture
def sweep(server: Server, moving: Moving) -> str:
    return f"{server.url}/sweep/{moving.plan.sweep}"


def refresh(visit: browser.Visit) -> None:
    """What the page does every few seconds, now; it is over when the page has said so."""
    visit.page.evaluate("document.getElementById('updated').textContent = ''")
    visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    visit.page.wait_for_selector("#updated:not(:empty)")  # a function to wait for would break the page's policy


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.wide),
        pytest.param(390, "light", marks=pytest.mark.wide),
    ],
)
def test_a_sweep_opens_silent_alone_accessible_and_fits(
    chromium: browser.Browser, moving: Moving, sweep: str, width: int, scheme: str
) -> None:
    with chromium.visit(sweep, width=width, scheme=scheme) as visit:
        refresh(visit)
        assert visit.complaints == []
        assert visit.strangers == []
        assert visit.overflow <= 0
        assert visit.faults(("moderate", "serious", "critical")) == []
        assert visit.page.title().endswith("capacity · memsweep"), "an error's HTML is text"
        assert visit.page.locator(".causes img").count() == 0


@pytest.mark.parametrize("target", ["/sweep/capacity/trial/{}", pytest.param("/", marks=pytest.mark.wide)])
def test_the_other_pages_too(chromium: browser.Browser, moving: Moving, server: Server, target: str) -> None:
    with chromium.visit(server.url + target.format(moving.plan.members[1].trial.id), width=390) as visit:
        assert (visit.complaints, visit.strangers) == ([], [])
        assert visit.overflow <= 0
        assert visit.faults(("moderate", "serious", "critical")) == []


def test_it_follows_and_keeps_what_a_reader_does(chromium: browser.Browser, moving: Moving, sweep: str) -> None:
    running, (new, other) = moving.plan.members[5], moving.plan.members[20:22]
    with chromium.visit(sweep) as visit:
        page = visit.page
        page.locator("details summary").click()
        legend = page.locator(".legend button")
        legend.first.click()
        legend.first.focus()
        first = page.locator(".causes li").first
        first.evaluate("node => { window.kept = node; window.loads = 1; }")
        moving.tell(running, 120)
        moving.finish(new)
        moving.fail(other, "OSError: disk gone", Failure.INFRA)
        refresh(visit)
        assert page.locator(".counts").inner_text().startswith("9 complete")
        assert "120/200 steps" in page.locator("main").inner_text()
        assert "OSError: disk gone" in page.locator(".causes").inner_text()
        assert page.locator("details").get_attribute("open") is not None
        assert legend.first.get_attribute("aria-pressed") == "false"
        assert page.evaluate("document.activeElement.dataset.curve") == legend.first.get_attribute("data-curve")
        assert page.locator("#plot .curve.off").count() == 1
        assert page.evaluate("window.kept.isConnected && window.loads === 1"), "what is unchanged is the same node"
        assert visit.complaints == []


def test_hover_legend_and_keys(chromium: browser.Browser, sweep: str) -> None:
    with chromium.visit(sweep) as visit:
        page = visit.page
        page.locator("#plot").scroll_into_view_if_needed()
        box = page.locator(".area").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        readout = page.locator("#readout")
        assert readout.inner_text().startswith("step 100")
        n = page.locator("#cursor .dot").count()
        assert n == 2, "softmax and linear; what runs is not so far yet"
        button = page.locator(".legend button").first
        button.hover()
        assert page.locator("#plot.faded .curve.lit").count() == 1
        button.click()
        assert page.locator("#cursor .dot").count() == n - 1
        page.locator("#plot").focus()
        page.keyboard.press("ArrowRight")
        assert "step 100" not in readout.inner_text() or page.locator("#cursor .line").count() == 1
        for _ in range(60):
            page.keyboard.press("ArrowRight")
        assert readout.inner_text().startswith("step 200")
        page.keyboard.press("Escape")
        assert readout.inner_text() == ""
        with page.expect_navigation():
            page.locator(".chips a", has_text="train/loss").click()
        assert page.locator(".chips a[aria-current]").inner_text() == "train/loss"
        assert visit.complaints == []


@pytest.mark.wide
def test_a_dashboard_that_ended_is_told(chromium: browser.Browser, moving: Moving) -> None:
    with Server(Site(moving.store), port=0) as short:
        thread = threading.Thread(target=short.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        with chromium.visit(f"{short.url}/sweep/capacity") as visit:
            visit.page.route("**/sweep/capacity", lambda route: route.abort())
            visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            visit.page.wait_for_selector("#away:not([hidden])")
            assert "does not answer" in visit.page.locator("#away").inner_text()
            visit.page.unroute("**/sweep/capacity")
            visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            visit.page.wait_for_selector("#away", state="hidden")
        short.shutdown()
        thread.join(5)
