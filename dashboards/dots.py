"""The plainest figure, where nothing varies that could be an axis: a row a cell, its seeds, its median."""

from __future__ import annotations

import altair as alt

from dashboards.axes import title, value_axis
from dashboards.canvas import Canvas, by_family, count, pickable, picked, table_of
from dashboards.style import Figure

MAX_ROWS = 60


def dots(canvas: Canvas, column: str) -> Figure | None:
    """`column` of every cell; None without a score, or with too many cells to be read as rows."""
    data = canvas.members
    if column not in data:
        return None
    data = data.assign(value=data[column], x=0, cell_size=0)
    data = data[data["value"].notna()]
    cells = data["cell"].nunique()
    if not 1 <= cells <= MAX_ROWS:
        return None
    own = column == canvas.column
    name = title(column)
    x = value_axis(column, canvas.bounds if own else None, data["value"], alt.X)
    rows = alt.Y("cell:N", sort=list(dict.fromkeys(data["cell"])), title=None)
    y = rows.axis(labelLimit=300, grid=True)
    base = alt.Chart(data[["cell", "family", "series", "seed", "value"]])
    look = {"color": canvas.colour(), "shape": canvas.shape()}
    middle = base.transform_aggregate(value="median(value)", n="count()", groupby=["cell", "family", "series"])
    tips = ["cell:N", alt.Tooltip("value:Q", format=".4g")]
    seeds = base.mark_point(size=26, filled=False, strokeWidth=1.1).encode(
        x, y, **look, **picked(0.7), tooltip=["seed:O", *tips]
    )
    full = middle.mark_point(size=95, filled=True, stroke="white", strokeWidth=0.8)
    full = full.encode(x, y, **look, **picked(1.0), tooltip=[*tips, "n:Q"])
    table = table_of(data[["x", "value", "family", "series", "size", "condition", "seed", "cell_size"]], name)
    return Figure(
        "cells_" + column.replace("/", "_"),
        f"{name.capitalize()} of every cell",
        f"{name} of every cell. Medians: {by_family(data.groupby('family', sort=False)['value'].median())}.",
        f"{name.capitalize()}. {count(data)} Small marks are seeds, large ones medians.{canvas.tail()}",
        pickable([seeds, full]).properties(width=400, height=max(50, 26 * cells)),
        640,
        table.drop(columns="cell_size"),
    )
