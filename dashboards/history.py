"""Search history: what each suggestion scored, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from dashboards.axes import title
from dashboards.canvas import Canvas, pickable, picked
from dashboards.labels import nearly
from dashboards.style import Figure
from runners.schema import Status
from runners.search import State

COLUMNS = ("cell", "family", "suggestion", "value", "best", "status")


def history(canvas: Canvas, states: Mapping[str, State]) -> list[Figure]:
    """One figure for each metric that searches select by; none without a search."""
    metrics = dict.fromkeys(state.search.select[0] for state in states.values())
    found = (
        _figure(canvas, [s for s in states.values() if s.search.select[0] == metric], metric) for metric in metrics
    )
    return [figure for figure in found if figure is not None]


def rows_of(canvas: Canvas, states: list[State]) -> pd.DataFrame:
    """A row a suggestion that has a score; `best` is the best among those trained to the end up to it."""
    families = {m.searched.key: canvas.labels.family(m) for m in canvas.plan.members if m.searched is not None}
    rows: list[tuple[Any, ...]] = []
    for state in states:
        way = max if state.search.directions[0] == "max" else min
        best = math.nan
        family = families.get(state.search.key, state.search.cell)
        for number, score in enumerate(state.scores):
            if score is None or not score.values:
                continue
            value = score.values[0]
            if score.status != Status.PRUNED:
                best = value if math.isnan(best) else way(best, value)
            rows.append((state.search.cell, family, number, value, best, score.status))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _figure(canvas: Canvas, states: list[State], metric: str) -> Figure | None:
    data = rows_of(canvas, states)
    if len(data) < 2:
        return None
    x = alt.X("suggestion:Q", axis=alt.Axis(tickMinStep=1, grid=False), scale=alt.Scale(nice=False, padding=10))
    y = alt.Y("value:Q", title=title(metric), scale=alt.Scale(zero=False))
    base, look = alt.Chart(data), {"color": canvas.colour(), "detail": "cell:N"}
    steps = base.mark_line(strokeWidth=1.8, interpolate="step-after")
    steps = steps.encode(x, alt.Y("best:Q", title=title(metric)), **look, **picked(0.9))
    tips = ["cell:N", "suggestion:Q", alt.Tooltip("value:Q", format=".4g"), "status:N"]
    marks = [
        base.transform_filter(rule)
        .mark_point(size=size, filled=filled, strokeWidth=1.2)
        .encode(x, y, shape=canvas.shape(), tooltip=tips, **look, **picked(opacity))
        for rule, size, filled, opacity in (
            ("datum.status == 'complete'", 55, True, 0.9),
            ("datum.status != 'complete'", 40, False, 0.7),
        )
    ]
    chart = pickable([steps, *marks]).properties(width=460, height=280)
    last = data.dropna(subset=["best"]).groupby("cell", sort=False)["best"].last()
    words = "; ".join(f"{cell} {nearly(float(value))}" for cell, value in last.items())
    table = data.drop(columns="family").rename(columns={"value": title(metric), "best": "best so far"})
    return Figure(
        "search_" + metric.replace("/", "_"),
        f"Search: {title(metric)}",
        f"{title(metric)} of each suggestion, in the order they were made. Best at the end: {words}.",
        f"{title(metric).capitalize()} of each suggestion, and the best so far (line). Hollow marks diverged or were "
        f"pruned, and stand where they were cut. n = {len(data)} suggestions.{canvas.tail()}",
        chart,
        520,
        table,
    )
