"""The table that goes into a paper: a row for each series, a column for each task setting, mean ± interval.

Where the task does not vary, the columns are the sweep's scores instead. What is best in a column is set in bold only
where the report would call it better than every other row there: paired by seed, an adjusted p of at most 0.05 (Holm
over the column's rivals) and an interval without 0. So an accuracy takes as many seeds to be bold as a verdict takes
pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dashboards import cells, stats
from dashboards.compare import bounds_of
from dashboards.figures import title
from dashboards.labels import bytes_text
from dashboards.table import Results
from runners.schema import Plan


@dataclass(frozen=True)
class Entry:
    """One cell of the table: its text, and whether it is the best of its column beyond doubt."""

    text: str
    is_best: bool = False


@dataclass(frozen=True)
class Pivot:
    """The table as text: what its columns are called, and its rows, the series and its state first."""

    head: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    what: str
    """The score that the numbers are, or `scores` where each column has its own."""
    seeds: tuple[int, int]
    """Fewest and most seeds behind a number."""
    bold: str
    """A sentence: what bold means, or why nothing is."""


@dataclass(frozen=True)
class _Column:
    """One column: the cell of each series there, and the score that is shown."""

    name: str
    score: str
    cells: dict[str, cells.Cell]


def pivot(plan: Plan, results: Results) -> Pivot:
    """The table of `plan`, rows and columns in the order of its spec."""
    found = cells.collect(plan, results)
    columns = _columns(found)
    best = {column.name: _best(plan, results, column) for column in columns}
    rows = []
    for series in dict.fromkeys(cell.series for cell in found):
        states = sorted(cell.state_bytes for cell in found if cell.series == series)
        state = " to ".join(bytes_text(size) for size in dict.fromkeys((states[0], states[-1])))
        entries = [_entry(column, series, best[column.name] == series) for column in columns]
        rows.append((Entry(series), Entry(state), *entries))
    scores = {column.score for column in columns}
    shown = [cell.scores[column.score].n for column in columns for cell in column.cells.values()]
    seeds = min(shown, default=0), max(shown, default=0)
    head = ("", "state", *(column.name for column in columns))
    bold = _bold(plan, rows, {column.score.rpartition("/")[2] for column in columns}, seeds[1])
    return Pivot(head, tuple(rows), title(scores.pop()) if len(scores) == 1 else "scores", seeds, bold)


def _bold(plan: Plan, rows: Sequence[Sequence[Entry]], metrics: set[str], most_seeds: int) -> str:
    if any(entry.is_best for row in rows for entry in row):
        return (
            "Bold: better than every other row of its column (differences paired by seed; p ≤ 0.05 after Holm over the "
            "column, and a 95 % interval without 0)."
        )
    if any(search.is_same for search in plan.searches):
        return "Nothing is bold: settings were selected on the seeds shown."
    needed = stats.pairs_needed(max(1, len(rows) - 1))
    if most_seeds < needed and all(bounds_of(plan, metric) for metric in metrics):
        return f"Nothing is bold: to call one of {len(rows)} rows the best takes {needed} seeds."
    return "Nothing is bold: no row is clearly better than every other of its column."


def _columns(found: Sequence[cells.Cell]) -> list[_Column]:
    conditions = list(dict.fromkeys(cell.condition for cell in found))
    if len(conditions) == 1 and found:
        scores, own = list(found[0].scores), {cell.series: cell for cell in found}
        return [_Column(title(score) if len(scores) > 1 else "score", score, own) for score in scores]
    main = next(iter(found[0].scores)) if found else ""
    by_condition = {c: {cell.series: cell for cell in found if cell.condition == c} for c in conditions}
    return [_Column(condition or "score", main, own) for condition, own in by_condition.items()]


def _entry(column: _Column, series: str, is_best: bool) -> Entry:
    cell = column.cells.get(series)
    return Entry("–") if cell is None else Entry(cells.plus_minus(cell.scores[column.score]), is_best)


def _best(plan: Plan, results: Results, column: _Column) -> str | None:
    """The series that is better than every other of the column by the report's own rule; None where none is."""
    metric = column.score.rpartition("/")[2]
    direction = plan.metrics.get(metric, "max")
    scored = {s: cell for s, cell in column.cells.items() if cell.scores[column.score].n}
    if len(scored) < 2 or any(search.is_same for search in plan.searches):
        return None  # chosen on these very seeds: the best of more suggestions is better by chance alone
    best = (max if direction == "max" else min)(scored, key=lambda s: scored[s].scores[column.score].mean)
    own = _by_seed(results, scored[best], column.score)
    rivals = [_by_seed(results, cell, column.score) for s, cell in column.cells.items() if s != best]
    pairs = [{seed: own[seed] - other[seed] for seed in own.keys() & other.keys()} for other in rivals]
    blocks = [{"all": list(by_seed.values())} for by_seed in pairs if by_seed]
    if len(blocks) < len(rivals):
        return None
    is_bounded = bounds_of(plan, metric) is not None
    raw = [stats.flip_p_value(b) if is_bounded else stats.estimate(b).p_value() for b in blocks]
    needed = stats.pairs_needed(len(rivals)) if is_bounded else 0
    planned = max(cell.planned for cell in column.cells.values())
    for block, p in zip(blocks, stats.holm(raw), strict=True):
        n = len(block["all"])
        found = stats.Evidence(stats.estimate(block), p, n, planned - n, needed, direction)
        if stats.judge(found)[0] != stats.Verdict.A_BETTER:
            return None
    return best


def _by_seed(results: Results, cell: cells.Cell, score: str) -> dict[int, float]:
    rows = results.members[results.members["cell"] == cell.name]
    if score not in rows:
        return {}
    values = zip(rows["seed"], rows[score].astype(float), strict=True)
    return {int(seed): value for seed, value in values if not math.isnan(value)}
