"""The pages of `sweep dashboard`: a path in, a page out. Knows nothing of sockets; only reads.

    /                           the sweeps of the store
    /sweep/NAME                 one sweep; ?curve=train/loss chooses the metric that is drawn
    /sweep/NAME/trial/ID        one trial: settings, attempts, the end of its log; ?attempt=1 an earlier one

Names in a path are looked up among those there are, and never become part of a file's path unseen. Templates escape
everything: an error's text may hold HTML. A page fetches itself again and exchanges what differs.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import jinja2
from markupsafe import Markup, escape

from dashboards import live_words as words
from dashboards.live import READ_S, Follower
from dashboards.live_curves import Curves
from dashboards.live_snapshot import Cell, Snapshot, leaders
from runners.progress import clock
from runners.recent import Attempt, tallies
from runners.schema import Member, Status, UserError
from runners.store import Store, read_json

HERE = Path(__file__).parent
FILES = {"/live.css": "text/css", "/live.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
FIRST_READ_S = 0.1
"""How long the first page waits for results; it asks again after half a second while some are unread."""
LOOK_EVERY_S = 1.0
"""Pages that ask sooner share one look."""
FOLLOWED = 6
"""Sweeps that are remembered; the one asked for longest ago is let go of."""
ROWS = 120
"""Rows of results a page shows, and of running trials at most half as many."""
TAIL_BYTES = 32 * 2**10
"""How much of a log's end is shown."""


@dataclass(frozen=True)
class Answer:
    """What goes back to the browser."""

    status: int
    kind: str
    body: bytes

    @functools.cached_property
    def tag(self) -> str:
        """The ETag: a page that did not change is not sent again."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'


@dataclass
class _Followed:
    """A sweep that somebody looks at."""

    follower: Follower
    curves: Curves
    lock: threading.Lock = field(default_factory=threading.Lock)
    found: Snapshot | None = None
    looked: float = float("-inf")

    def look(self) -> Snapshot:
        """The newest snapshot, at most LOOK_EVERY_S old. Call it under the lock."""
        if self.found is None or time.monotonic() - self.looked >= LOOK_EVERY_S:
            self.found = self.follower.look(FIRST_READ_S if self.found is None else READ_S)
            self.looked = time.monotonic()
        return self.found


class Site:
    """Answers requests for one store. Any number of threads may ask."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._followed: dict[str, _Followed] = {}
        self._lock = threading.Lock()
        loader = jinja2.FileSystemLoader(HERE)
        self._pages = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        self._pages.globals |= {"words": words, "clock": clock, "Status": Status}
        self._pages.filters |= {"code": _code, "date": _date, "size": words.size, "number": words.number}

    def answer(self, target: str) -> Answer:
        """The answer to GET `target`. Never raises."""
        path, _, asked = target.partition("?")
        query = {name: values[-1] for name, values in parse_qs(asked).items()}
        try:
            if path in FILES:
                return Answer(200, FILES[path], (HERE / path[1:]).read_bytes())
            match [unquote(part) for part in path.split("/")[1:]]:
                case [""]:
                    return self._list()
                case ["sweep", name]:
                    return self._sweep(name, query)
                case ["sweep", name, "trial", trial_id]:
                    return self._trial(name, trial_id, query)
            return self._error(404, "There is no such page.")
        except UserError as error:
            return self._error(503, str(error))
        except OSError as error:
            return self._error(503, f"The store cannot be read: {error}")

    def open(self, sweep: str | None = None) -> None:
        """Read a sweep's plan (of the one that changed last) before somebody asks for its page, and the templates."""
        for name in ("live_sweep.html.j2", "live_trial.html.j2", "live_list.html.j2"):
            self._pages.get_template(name)
        newest = sweep or next((one.sweep for one in tallies(self.store)), None)
        if newest is None:
            return
        followed = self._follow(newest)
        with followed.lock:
            followed.look()

    def _follow(self, sweep: str) -> _Followed:
        with self._lock:
            followed = self._followed.pop(sweep, None)
            if followed is None:
                follower = Follower(self.store, sweep)
                followed = _Followed(follower, Curves(follower))
            self._followed[sweep] = followed
            while len(self._followed) > FOLLOWED:
                del self._followed[next(iter(self._followed))]
            return followed

    def _page(self, template: str, code: int = 200, **values: Any) -> Answer:
        text = self._pages.get_template(template).render(store=self.store.root, **values)
        return Answer(code, "text/html", text.encode())

    def _error(self, code: int, text: str) -> Answer:
        return self._page("live_error.html.j2", code, text=text, status=code)

    def _list(self) -> Answer:
        return self._page("live_list.html.j2", sweeps=tallies(self.store))

    def _sweep(self, name: str, query: Mapping[str, str]) -> Answer:
        if name not in self.store.sweeps():
            return self._error(404, f"There is no sweep {name!r} in this store.")
        followed = self._follow(name)
        with followed.lock:
            found = followed.look()
            chart = followed.curves.draw(found, query.get("curve"))
        led = leaders(found)
        each = max(3, ROWS // max(1, len(led)))
        return self._page(
            "live_sweep.html.j2",
            found=found,
            chart=chart,
            bar=_bar(found),
            results={condition: cells[:each] for condition, cells in led.items()},
            hidden=sum(max(0, len(cells) - each) for cells in led.values()),
            unscored=sum(not cell.scores for cell in found.cells),
            running=sorted(found.running, key=lambda one: -one.share)[: ROWS // 2],
            each_seed=_each_seed,
        )

    def _trial(self, name: str, trial_id: str, query: Mapping[str, str]) -> Answer:
        if name not in self.store.sweeps():
            return self._error(404, f"There is no sweep {name!r} in this store.")
        followed = self._follow(name)
        with followed.lock:
            found = followed.look()
            known = followed.follower.member(trial_id)
            attempts = followed.follower.attempts(trial_id)
        if known is None:
            return self._error(404, f"The sweep {name} has no trial {trial_id!r}.")
        member, row = known
        numbers = [one.number for one in attempts] or ([row.attempt] if row is not None and row.attempt else [])
        asked = query.get("attempt", "")
        number = int(asked) if asked.isdecimal() and int(asked) in numbers else max(numbers, default=0)
        folder = self.store.trial_folder(member.trial.id) / "attempts" / str(number)
        return self._page(
            "live_trial.html.j2",
            found=found,
            member=member,
            row=row,
            state=_state_of(row.status if row is not None else Status.PLANNED),
            running=next((one for one in found.running if one.trial == trial_id), None),
            attempts=attempts,
            number=number,
            took=_took,
            settings=_settings(member),
            log=self._tail(folder / "log.txt"),
            error=self._tail(folder / "error.txt"),
            result=read_json(self.store.trial_folder(member.trial.id) / "result.json"),
        )

    def _tail(self, path: Path) -> str:
        """The end of a text file; empty if there is none, or if a link leads out of the store."""
        try:
            if not path.resolve(strict=True).is_relative_to(self.store.root):
                return ""
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        return text if size <= TAIL_BYTES else f"… {size - TAIL_BYTES:,} bytes before\n{text.partition(chr(10))[2]}"


def _bar(found: Snapshot) -> list[tuple[str, int, float, float]]:
    """(state, trials, where it begins, how wide it is) of each stretch of the bar, out of 100."""
    stretches, at = [], 0.0
    for status, n in found.counts.items():
        width = 100 * n / found.total
        stretches.append((words.STATES[status], n, round(at, 3), round(width, 3)))
        at += width
    return stretches


def _state_of(status: Status) -> str:
    return words.STATES[status]


def _each_seed(cell: Cell) -> str:
    """Every seed's score, the first ten."""
    values = [words.number(value) for _, value in sorted(cell.scores.items())]
    return ", ".join(values[:10]) + (f" and {len(values) - 10} more" if len(values) > 10 else "")


def _took(attempt: Attempt) -> str:
    if attempt.started is None:
        return ""
    return clock((time.time() if attempt.ended is None else attempt.ended) - attempt.started)


def _code(text: str) -> Markup:
    """Text whose `commands` are set as code; everything in it is escaped first."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _date(seconds: float | None) -> str:
    return "" if not seconds else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _settings(member: Member) -> list[tuple[str, str]]:
    """`(mechanism.name, deltanet)` of every setting."""

    def flat(value: Any, at: str) -> list[tuple[str, str]]:
        if isinstance(value, dict) and value:
            return [pair for key, inner in value.items() for pair in flat(inner, f"{at}.{key}" if at else str(key))]
        return [(at, "none" if value is None else str(value))]

    return flat(member.trial.settings(), "")
