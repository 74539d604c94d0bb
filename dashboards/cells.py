"""Cells: the seeds of one setting taken together, with what they scored and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dashboards.about import main_metric
from dashboards.compare import bounds_of
from dashboards.labels import Labels, nearly
from dashboards.stats import Summary, summarise
from dashboards.table import Results
from runners.schema import Plan


@dataclass(frozen=True)
class Cell:
    """One cell; `scores` summarises each `SET/metric` over its seeds, the main one first."""

    name: str
    series: str
    condition: str
    state_bytes: int
    n_params: int | None
    planned: int
    counts: dict[str, int]
    scores: dict[str, Summary]

    @property
    def main(self) -> Summary:
        """The score the sweep is about."""
        return next(iter(self.scores.values()))


def collect(plan: Plan, results: Results) -> list[Cell]:
    """Every cell of the plan in its order, run or not."""
    labels, columns = Labels(plan), score_columns(plan, results)
    groups: dict[str, list[int]] = {}
    for i, member in enumerate(plan.members):
        groups.setdefault(member.cell, []).append(i)
    found = []
    for name, where in groups.items():
        rows, member = results.members.iloc[where], plan.members[where[0]]
        params = rows["n_params"].dropna()
        scores = {
            column: summarise(
                rows[column].astype(float).tolist() if column in rows else [],
                bounds_of(plan, metric := column.split("/", 1)[1]),
                plan.metrics.get(metric, "max"),
            )
            for column in columns
        }
        found.append(
            Cell(
                name,
                labels.series(member),
                labels.condition(member),
                member.state_bytes,
                int(params.iloc[0]) if len(params) else None,
                len(where),
                {str(k): int(v) for k, v in rows["status"].value_counts().items()},
                scores,
            )
        )
    return found


def score_columns(plan: Plan, results: Results) -> list[str]:
    """`SET/metric` columns, the sweep's own metric first: means over a set, no single slices."""
    sets = dict.fromkeys(piece.set for member in plan.members for piece in member.slices)
    every = [f"{name}/{metric}" for name in sets for metric in plan.metrics]
    main = "/".join(main_metric(plan))
    return [main, *(c for c in every if c != main and c in results.members)]


def interval_text(summary: Summary) -> str:
    """The interval, or why there is none."""
    if summary.split:
        return summary.split
    if summary.low is None or summary.high is None:
        return "no interval below 3 seeds" if summary.n else "–"
    return f"{nearly(summary.low)} to {nearly(summary.high)}"


def plus_minus(summary: Summary) -> str:
    """`0.96 ± 0.02` (half of the 95 % interval), `2 of 3 solved it`, or the mean and n."""
    if summary.n == 0:
        return "–"
    if summary.split:
        return summary.split
    if summary.low is None or summary.high is None:
        return f"{nearly(summary.mean)} (n = {summary.n})"
    return f"{nearly(summary.mean)} ± {nearly(max(summary.high - summary.mean, summary.mean - summary.low))}"


def rises_with_load(cells: Sequence[Cell], loads: dict[str, float], direction: str = "max") -> list[str]:
    """Series that do clearly better under a heavier load: a sign of a broken task or a score that ignores part of it.

    `loads` is the load of each condition. Clearly: the two intervals do not touch.
    """
    notes = []
    for series in dict.fromkeys(cell.series for cell in cells):
        own = [cell for cell in cells if cell.series == series and cell.condition in loads]
        own.sort(key=lambda cell: loads[cell.condition])
        for light, heavy in pairwise(own):
            worse, better = (light.main, heavy.main) if direction == "max" else (heavy.main, light.main)
            if worse.high is None or better.low is None or loads[light.condition] == loads[heavy.condition]:
                continue
            if better.low > worse.high:
                notes.append(
                    f"{series} does better at {heavy.condition} than at {light.condition}, a lighter load: "
                    "look at the task or the training before trusting it"
                )
    return notes
