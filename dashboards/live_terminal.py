"""`sweep status --watch`: a sweep that redraws itself on a terminal, and speaks in lines everywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dashboards import live_words as words
from dashboards.live_pace import Running
from dashboards.live_snapshot import Snapshot, leaders
from runners.progress import clock
from runners.recent import Tally
from runners.schema import Status, UserError

EVERY_S = 2.0
PLAIN_EVERY_S = 10.0
"""How often a pipe or a log gets a line, if anything is new."""
ASCII = str.maketrans("·…–×", "-~-x")
"""For a terminal that has nothing else."""
COLOURS = {
    Status.COMPLETE: "green",
    Status.DIVERGED: "magenta",
    Status.PRUNED: "cyan",
    Status.RUNNING: "blue",
    Status.FAILED: "red",
    Status.INTERRUPTED: "yellow",
    Status.PLANNED: "bright_black",
}


def watch(
    look: Callable[[], Sequence[Snapshot | Tally]],
    console: Console,
    *,
    rounds: int | None = None,
    sleep: Callable[[float], Any] = time.sleep,
) -> None:
    """Show what `look` finds until Ctrl-C, which ends it without a word (or `rounds` times).

    A store that cannot be read at first is an error; one that goes away later, as a file system may, is waited for.
    """
    made = _Screen if console.is_terminal and not console.is_dumb_terminal else _Lines
    with contextlib.suppress(KeyboardInterrupt):
        found, trouble = look(), ""
        with made(console) as view:
            while True:
                view.tell(found, trouble)
                rounds = None if rounds is None else rounds - 1
                if rounds == 0:
                    return
                is_reading = any(isinstance(one, Snapshot) and one.unread for one in found)
                sleep(view.every_s / 4 if is_reading else view.every_s)
                try:
                    found, trouble = look(), ""
                except (UserError, OSError) as error:
                    trouble = f"the store cannot be read just now: {error}"


class _Screen:
    """Draws itself anew in its own place."""

    every_s = EVERY_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> _Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def tell(self, found: Sequence[Snapshot | Tally], trouble: str) -> None:
        size, plain = self._console.size, self._console.options.ascii_only
        shown = screen(found, size.width, size.height, is_plain=plain, trouble=trouble)
        self._live.update(shown, refresh=True)


class _Lines:
    """A line a sweep when something is new, and each cause of failure once. Never wrapped: a log is for grep."""

    every_s = PLAIN_EVERY_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}
        self._causes: set[tuple[str, str]] = set()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def tell(self, found: Sequence[Snapshot | Tally], trouble: str) -> None:
        self._new("", trouble)
        for one in found if not trouble else ():
            self._new(one.sweep, words.line(one) if isinstance(one, Snapshot) else f"{one.sweep}: {words_of(one)}")
            for cause in one.causes if isinstance(one, Snapshot) else ():
                if (key := (one.sweep, f"{cause.kind} {cause.error}")) not in self._causes:
                    self._causes.add(key)
                    first = cause.trials[0]
                    where = f"({first.cell}, seed {first.trial.seed})"
                    _print(self._console, f"{one.sweep}: {words.cause(cause)} {where}")

    def _new(self, about: str, text: str) -> None:
        if text and self._said.get(about) != text:
            _print(self._console, text)
        self._said[about] = text


def _print(console: Console, text: str) -> None:
    text = text.translate(ASCII) if console.options.ascii_only else text
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.file.flush()


def screen(
    found: Sequence[Snapshot | Tally], width: int, height: int, *, is_plain: bool = False, trouble: str = ""
) -> Group:
    """All of it at this size. One sweep is shown whole, several by a line each."""
    if trouble:
        return Group(_cut(trouble, "red"), screen(found, width, height - 1, is_plain=is_plain))
    if len(found) == 1 and isinstance(found[0], Snapshot):
        return _sweep(found[0], width, height, is_plain)
    tallies = [((one.sweep,), words_of(one), "") for one in found if isinstance(one, Tally)]
    return Group(*_aligned(tallies, width), _cut("`sweep status NAME --watch` shows one of them", "dim"))


def _sweep(found: Snapshot, width: int, height: int, is_plain: bool) -> Group:
    """Sections share what the screen has left: failures first, then what is best, then what runs."""
    head: list[Text] = [Text.assemble((found.sweep, "bold"), f"  revision {found.revision}")]
    if found.question:
        head.append(_cut(found.question, "italic"))
    head += [_bar(found, min(width, 100) - 1, is_plain), Text(words.counts(found))]
    done = f"{found.ended}/{found.total} done, {words.state(found)}"
    head.append(Text(" · ".join(filter(None, [done, words.left(found)]))))
    head += [Text(" · ".join(said)) for said in (words.speed(found), words.cards(found)) if said]
    head += [_cut(note, "yellow") for note in words.notes(found)]
    head += [_cut(search) for search in words.searches(found)[: max(1, height // 6)]]
    rooms = height - sum(_height(one, width) for one in head) - 2
    sections: list[Text] = []
    for make, share in ((_failures, 3), (_best, 2), (_running, 1)):
        # A section is a blank line, a heading, what it shows, and a line for what it does not.
        lines = make(found, max(1, rooms // share - 3), width) if rooms > 3 else []
        if lines:
            sections += [Text(""), *lines]
            rooms -= 1 + len(lines)
    for line in (*head, *sections) if is_plain else ():
        line.plain = line.plain.translate(ASCII)
    return Group(*head, *sections)


def _height(one: Text, width: int) -> int:
    return 1 if one.no_wrap else max(1, -(-len(one) // width))


def _bar(found: Snapshot, width: int, is_plain: bool) -> Text:
    """One stretch a state, at least a character each; letters where a terminal has no blocks or no colours."""
    text, left = Text(no_wrap=True), width
    states = list(found.counts.items())
    for status, n in states:
        share = max(1, round(width * n / max(1, found.total)))
        size = min(share, left) if (status, n) != states[-1] else left
        text.append((words.STATES[status][0] if is_plain else "█") * max(0, size), style=COLOURS[status])
        left -= size
    return text


def _failures(found: Snapshot, room: int, width: int) -> list[Text]:
    if not found.causes:
        return []
    lines: list[Text] = [Text("failures", style="bold")]
    for cause in found.causes[:room]:
        first = cause.trials[0]
        style = COLOURS[Status.DIVERGED if cause.kind == "diverged" else Status.FAILED]
        lines.append(_cut(f"  {words.cause(cause)}  ({first.cell}, seed {first.trial.seed})", style))
    if len(found.causes) > room:
        lines.append(Text(f"  and {len(found.causes) - room} more", style="dim"))
    return lines


def _best(found: Snapshot, room: int, width: int) -> list[Text]:
    led = leaders(found)
    if not led:
        return []
    per = max(1, min(3, room // len(led)))
    shown = [cell for cells in list(led.values())[-room:] for cell in cells[:per]]
    rows = [((words.scores(cell),), cell.cell, "") for cell in shown]
    title = f"best so far, {found.measure.name.replace('/', ' ')}"
    return [Text(title, style="bold"), *_aligned(rows, width)]


def _running(found: Snapshot, room: int, width: int) -> list[Text]:
    if not found.running:
        return []
    shown = sorted(found.running, key=lambda one: -one.share)[:room]
    rows = [((_share(one), clock(one.seconds)), f"{one.cell}, seed {one.seed}", _doing(one)) for one in shown]
    lines: list[Text] = [Text("running", style="bold"), *_aligned(rows, width)]
    if len(found.running) > room:
        lines.append(Text(f"  and {len(found.running) - room} more", style="dim"))
    return lines


def _share(one: Running) -> str:
    return f"{100 * one.share:.0f}%" if one.step is not None else ""


def _doing(one: Running) -> str:
    said = words.progress(one)
    return said if said == "starting" else " · ".join(filter(None, [said, words.remark(one)]))


def words_of(one: Tally) -> str:
    """`12 complete, 4 running, 14 waiting`."""
    order = [status for status in words.STATES if one.counts.get(status)]
    return ", ".join(f"{one.counts[status]:,} {words.STATES[status]}" for status in order) or "no trials"


def _aligned(rows: Sequence[tuple[tuple[str, ...], str, str]], width: int) -> list[Text]:
    """Lines of (what is never cut off, a name, the rest): on a narrow screen the rest gives way, then the name."""
    firsts = [max(map(len, column)) for column in zip(*(row[0] for row in rows), strict=True)]
    left = max(10, width - sum(firsts) - 2 * len(firsts) - 2)
    names = min(max(len(name) for _, name, _ in rows), left * 3 // 5 if any(rest for *_, rest in rows) else left)
    lines = []
    for fixed, name, rest in rows:
        head = "  ".join(f"{text:>{size}}" for text, size in zip(fixed, firsts, strict=True))
        short = name if len(name) <= names else name[: names - 1] + "…"
        lines.append(_cut(f"  {head}  {short:<{names}}  {rest}".rstrip()))
    return lines


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
