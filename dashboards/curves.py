"""Learning curves: the validation score and the training loss, where there is more than one point."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import altair as alt
import pandas as pd

from dashboards.axes import title, value_axis
from dashboards.canvas import Canvas, Part, by_family, count, picked
from dashboards.style import Figure

MAX_CURVES = 200
"""With more trials than this a figure shows the median of each cell; with more cells, the first so many."""
MAX_CURVE_POINTS = 200
MAX_POINTS = 20_000
"""Of all curves of a figure together: a page has to open."""
GROUPS: list[Any] = ["step", "family", "series", "size", "condition"]


def learning(canvas: Canvas) -> Iterator[Figure]:
    """The learning curves of a sweep."""
    for metric in dict.fromkeys((f"valid/{canvas.metric}", "train/loss")):
        figure = _curve(canvas, metric)
        if figure is not None:
            yield figure


def _curve(canvas: Canvas, metric: str) -> Figure | None:
    every = canvas.results.curves
    every = every[(every["metric"] == metric) & every["value"].map(math.isfinite)]
    if every["step"].nunique() < 2:
        return None
    every = every.merge(canvas.who, on=["trial", "arm"])
    every = every[["step", "value", "family", "series", "size", "condition", "seed", "trial"]]
    with_seeds = every["trial"].nunique() <= MAX_CURVES
    data, left_out = _fewer(every, with_seeds)
    ends = every.sort_values("step").groupby("trial").tail(1)
    seeds = "Thin lines are seeds, bold ones their medians." if with_seeds else "Lines are medians over seeds."
    if left_out:
        seeds += f" {left_out} more cells are not drawn."
    name = "learning_" + metric.replace("/", "_")
    more = f" All points: figures/{name}.parquet." if len(data) < len(every) else ""
    return Figure(
        name,
        f"Learning: {title(metric)}",
        f"{title(metric)} by training step. Median of the last points: "
        f"{by_family(ends.groupby('family', sort=False)['value'].median())}.",
        f"{title(metric).capitalize()} during training. {count(every)} {seeds}{more}{canvas.tail()}",
        canvas.panels(_lines(canvas, data, metric, with_seeds), data),
        canvas.width(data),
        _ends(ends, metric),
        every if more else None,
    )


def _fewer(data: pd.DataFrame, with_seeds: bool) -> tuple[pd.DataFrame, int]:
    """What is drawn of `data`, and how many cells are not."""
    left_out = 0
    if not with_seeds:
        cells = data[["series", "condition"]].drop_duplicates()
        left_out = max(0, len(cells) - MAX_CURVES)
        data = data.merge(cells.head(MAX_CURVES), on=["series", "condition"])
        data = data.groupby(GROUPS, sort=False)["value"].median().reset_index()
    return thinned(data, with_seeds), left_out


def thinned(data: pd.DataFrame, with_seeds: bool = True) -> pd.DataFrame:
    """At most `MAX_CURVE_POINTS` steps (fewer for very many lines), the same for all curves, and each curve's last."""
    line = ["trial"] if with_seeds else ["series", "condition"]
    steps = sorted(data["step"].unique())
    stride = math.ceil(len(steps) / min(MAX_CURVE_POINTS - 1, max(10, MAX_POINTS // data.groupby(line).ngroups)))
    last = data.groupby(line)["step"].transform("max")
    return data[data["step"].isin(steps[::stride]) | (data["step"] == last)]


def _ends(ends: pd.DataFrame, metric: str) -> pd.DataFrame:
    groups = [c for c in ("series", "condition") if ends[c].ne("").any()] or ["series"]
    found = ends.groupby(groups, sort=False).agg(step=("step", "max"), median=("value", "median"), n=("value", "count"))
    names = {"median": f"median {title(metric)} at its last point", "n": "seeds", "condition": "task"}
    return found.reset_index().rename(columns=names)


def _lines(canvas: Canvas, data: pd.DataFrame, metric: str, with_seeds: bool) -> list[Part]:
    """A thin line a seed, a bold one for the median of a series."""
    bounds = canvas.bounds if metric.endswith(f"/{canvas.metric}") else None
    x = alt.X("step:Q", axis=alt.Axis(format="~s", tickCount=5))
    y, colour = value_axis(metric, bounds), canvas.colour()
    tips: list[Any] = ["series:N", "step:Q", alt.Tooltip("value:Q", format=".4f")]
    middle = data.groupby(GROUPS, sort=False)["value"].median().reset_index() if with_seeds else data
    bold = {"detail": ["series:N", "condition:N"], "tooltip": tips, **canvas.dash(data), **picked(1.0)}
    thin = {"detail": "trial:N", "tooltip": ["seed:O", *tips], **picked(0.4)}
    parts: list[Part] = []
    if with_seeds:
        parts.append((data, lambda c: c.mark_line(strokeWidth=0.8).encode(x, y, colour, **thin)))
    parts.append((middle, lambda c: c.mark_line(strokeWidth=2.2).encode(x, y, colour, **bold)))
    return parts
