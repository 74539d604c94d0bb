"""A real Chromium for tests of pages, where Playwright and Chromium are; every request and complaint is written down.

Playwright uses the Chromium of the system (MEMSWEEP_CHROMIUM names another); nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
HERE = ("", "127.0.0.1", "localhost", "::1")
"""Hosts that a page may ask: files have none."""


def path() -> str | None:
    """The browser's program, if there is one."""
    return os.environ.get("MEMSWEEP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str | None:
    """What is missing for a test in a browser; None if nothing is."""
    for name in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: tests in a browser are skipped (memsweep[test-browser] has it)"
    return None if path() else f"no Chromium found ({', '.join(NAMES)} or MEMSWEEP_CHROMIUM): tests in it are skipped"


@dataclass
class Visit:
    """An open page, what it complained of in the console, and every address that it asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def strangers(self) -> list[str]:
        """Requests that left this machine."""
        outside = [url for url in self.requests if not url.startswith(("data:", "blob:", "about:"))]
        return [url for url in outside if (urlsplit(url).hostname or "") not in HERE]

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def faults(self, impacts: tuple[str, ...] = ("serious", "critical")) -> list[str]:
        """What axe-core finds of these impacts: rule, and where."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['target']}" for rule in found if rule["impact"] in impacts for node in rule["nodes"]
        ]


class Browser:
    """Opens pages, each in a context of its own."""

    def __init__(self, made: Any) -> None:
        self._made = made

    @contextmanager
    def visit(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Visit]:
        """`url` in a window of that size and colour scheme, loaded to the end."""
        context = self._made.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        try:
            visit = Visit(context.new_page())
            visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
            visit.page.on("console", lambda said: said.type == "error" and visit.complaints.append(said.text))
            visit.page.on("request", lambda request: visit.requests.append(request.url))
            visit.page.goto(url, wait_until="load")
            yield visit
        finally:
            context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium. While it is open this thread counts as inside an event loop: no asyncio.run beside it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its own sandbox it also runs as root and in containers; it opens our pages only.
        made = playwright.chromium.launch(executable_path=path(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield Browser(made)
        finally:
            made.close()
