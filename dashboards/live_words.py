"""What live views say: the same words in a terminal and on a page."""

from __future__ import annotations

from dashboards.live_pace import Card, Running
from dashboards.live_snapshot import Cause, Cell, Snapshot, leaders
from runners.progress import clock
from runners.schema import Status
from runners.search import State

STATES = {
    Status.COMPLETE: "complete",
    Status.DIVERGED: "diverged",
    Status.PRUNED: "pruned",
    Status.RUNNING: "running",
    Status.FAILED: "failed",
    Status.INTERRUPTED: "interrupted",
    Status.PLANNED: "waiting",
}
MEANING = {"oom": "out of memory", "infra": "worker or machine", "error": "error", "diverged": "diverged"}
SILENT_S = 60.0
"""A worker that has not spoken for so long is told to be silent."""


def number(value: float | None) -> str:
    """Four digits of a score or a loss; a dash for nothing."""
    return "–" if value is None else f"{value:.4g}"


def rate(value: float | None, unit: str) -> str:
    """`3.2k tokens/s`; empty for nothing."""
    if value is None:
        return ""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter} {unit}"
    return f"{value:.3g} {unit}"


def gib(n: float) -> str:
    return f"{n / 2**30:.1f}" if n < 100 * 2**30 else f"{n / 2**30:.0f}"


def headline(found: Snapshot) -> str:
    """`16 of 40 done, 3 failed`: changes only when a trial ends."""
    done = f"{found.ended:,} of {found.total:,} done"
    return f"{done}, {found.failed:,} failed" if found.failed else done


def counts(found: Snapshot) -> str:
    """`12 complete, 4 running, 14 waiting`."""
    return ", ".join(f"{n:,} {STATES[status]}" for status, n in found.counts.items()) or "no trials"


def state(found: Snapshot) -> str:
    """What the sweep does now, in a few words."""
    if found.running:
        return f"{len(found.running)} running"
    if found.is_whole:
        return "all ended"
    if found.has_driver:
        return "a launch is at work, no trial runs this moment"
    if found.ended + found.failed == found.total:
        return f"ended, {found.failed} failed"
    return f"nothing is running: `sweep resume {found.sweep}` goes on"


def speed(found: Snapshot) -> list[str]:
    """Trials an hour and steps or tokens a second, with what they were measured on."""
    pace, said = found.pace, []
    if pace.per_hour is not None:
        per_hour = f"{pace.per_hour:.3g}" if pace.per_hour < 1000 else f"{pace.per_hour:,.0f}"
        said.append(f"{per_hour} trials/h ({pace.n_ended} in {clock(pace.window_s)})")
    said += filter(None, [rate(pace.steps_s, "steps/s"), rate(pace.tokens_s, "tokens/s")])
    return said


def left(found: Snapshot) -> str:
    """`about 9:40 left (from 12 that ended, 4 at a time)`; empty while nothing runs or nothing is known."""
    pace = found.pace
    return f"about {clock(pace.left_s)} left ({pace.basis})" if pace.left_s is not None else ""


def cards(found: Snapshot) -> list[str]:
    """What running trials hold and use of their cards; empty where none was recorded."""
    gpu = found.pace.gpu
    said = [f"{gpu:.3g} {'card' if gpu <= 1 else 'cards'} claimed"] if gpu else []
    return said + [_card(card) for card in found.pace.cards]


def _card(card: Card) -> str:
    busy = f", busy {100 * card.busy:.0f}% of one" if card.busy is not None else ""
    trials = f"{card.trials} trial{'' if card.trials == 1 else 's'}"
    return f"{card.name}: {gib(card.memory_bytes)} GiB by {trials} (a card has {gib(card.card_bytes)}){busy}"


def size(n: float) -> str:
    """`16 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"


def progress(one: Running) -> str:
    """`120/400 steps`, `evaluating`, or `starting`."""
    if one.step is None or one.steps is None:
        return "starting"
    return "evaluating" if one.is_evaluating else f"{one.step:,}/{one.steps:,} steps"


def remark(one: Running) -> str:
    """Speed and the last loss or score; how long a worker has been silent where that is long."""
    said = [rate(one.steps_s, "steps/s")]
    said += [f"{name.rpartition('/')[2]} {number(value)}" for name, value in list(one.metrics.items())[:2]]
    if one.silent_s is not None and one.silent_s > SILENT_S:
        said.insert(0, f"no word for {clock(one.silent_s)}")
    return " · ".join(filter(None, said))


def scores(cell: Cell) -> str:
    """`0.953 (3 of 5 seeds)`."""
    n = len(cell.scores)
    seeds = f"{n} of {cell.planned} seeds" if n < cell.planned else f"{n} seed{'' if n == 1 else 's'}"
    return f"{number(cell.mean)} ({seeds})"


def cause(one: Cause) -> str:
    """`12 × out of memory: CUDA out of memory ...`."""
    times = f"{len(one.trials)} × " if len(one.trials) > 1 else ""
    return f"{times}{MEANING.get(one.kind, one.kind)}" + (f": {one.error}" if one.error else "")


def best(found: Snapshot) -> str:
    """The leading cell of the last condition that has scores; empty before the first score."""
    led = leaders(found)
    if not led:
        return ""
    condition, cells = list(led.items())[-1]
    where = f" at {condition}" if condition else ""
    return f"best {found.measure.name.replace('/', ' ')}{where}: {number(cells[0].mean)} {cells[0].cell}"


def line(found: Snapshot) -> str:
    """The whole sweep in one line, for a pipe or a log."""
    said = [f"{found.sweep}: {found.ended}/{found.total} done", state(found)]
    if found.failed and found.running:
        said.append(f"{found.failed} failed")
    said += [*speed(found), left(found), *cards(found), best(found)]
    if found.unread:
        said.append(f"{found.unread:,} results still to be read")
    return " · ".join(filter(None, said))


def notes(found: Snapshot) -> list[str]:
    """What a reader has to know beside the numbers."""
    said = []
    if not found.has_ledger:
        said.append("this store has no ledger: a launch makes one, `sweep doctor --rebuild` makes it from the folders")
    if found.unread:
        said.append(f"{found.unread:,} results are still to be read: scores are of those that were")
    if found.backlog:
        said.append(f"MLflow is behind: {found.backlog}")
    return said


def searches(found: Snapshot) -> list[str]:
    """How far each search is, and its best suggestion."""
    return [_search(one) for one in found.searches]


def _search(one: State) -> str:
    said = f"search of {one.search.cell}: {one.n_ended}/{one.search.trials} suggestions"
    pruned = one.count(Status.PRUNED)
    said += f", {pruned} pruned" if pruned else ""
    if one.winner is None:
        return said
    score = one.scores[one.winner]
    values = ", ".join(f"{path} {_value(value)}" for path, value in one.suggestions[one.winner].values.items())
    scored = f", {one.search.select[0]} {number(score.values[0])}" if score is not None and score.values else ""
    return f"{said}; {'winner' if one.is_over else 'best so far'}: number {one.winner} ({values}){scored}"


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
