"""Needles in haystacks as the well-known map: how deep by how long, a panel a model, the score as colour and number."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from dashboards.labels import nearly
from dashboards.style import Figure

DEPTH, LENGTH = "eval.depth", "eval.seq_len"
MAX_PANELS = 24
CELL = 34
"""Width and height of a cell, in pixels."""


def is_map(data: pd.DataFrame) -> bool:
    """Whether evaluations differ in both depth and length."""
    return {DEPTH, LENGTH} <= set(data) and data[DEPTH].nunique() > 1 and data[LENGTH].nunique() > 1


def heat(data: pd.DataFrame, name: str, bounds: Sequence[float] | None, tail: str) -> Figure | None:
    """The map of scores `data` (value, series, condition, seed, depth and length a row); None with too many panels.

    A cell is the median over seeds, and over whatever else an evaluation may vary.
    """
    rows = data.assign(panel=[f"{s}, {c}" if c else s for s, c in zip(data["series"], data["condition"], strict=True)])
    panels = list(dict.fromkeys(rows["panel"]))
    if len(panels) > MAX_PANELS:
        return None
    cells = rows.groupby(["panel", DEPTH, LENGTH], sort=False)["value"].median().reset_index()
    cells = cells.rename(columns={DEPTH: "depth", LENGTH: "length"})
    low, high = bounds or (float(cells["value"].min()), float(cells["value"].max()))
    x = alt.X("length:O", title="seq_len", axis=alt.Axis(labelAngle=0))
    y = alt.Y("depth:O", title="depth of the needle")
    scale = alt.Scale(scheme="cividis", domain=[low, high])
    colour = alt.Color("value:Q", scale=scale, title=name, legend=alt.Legend(gradientLength=160))
    is_dark = f"datum.value < {low + 0.55 * (high - low)}"
    base = alt.Chart(cells)
    tiles = base.mark_rect().encode(x, y, colour, tooltip=["panel:N", "depth:O", "length:O", "value:Q"])
    shade = alt.condition(is_dark, alt.value("white"), alt.value("black"))
    words = base.mark_text(fontSize=9.5).encode(x, y, text=alt.Text("value:Q", format=".2f"), color=shade)
    wide, tall = (CELL * cells[column].nunique() for column in ("length", "depth"))
    header = alt.Header(title=None, labelFontSize=11.5, labelFontWeight="bold")
    columns = min(3, len(panels))
    chart = alt.layer(tiles, words).properties(width=wide, height=tall)
    chart = chart.facet(facet=alt.Facet("panel:N", sort=panels, header=header), columns=columns)
    means = "; ".join(
        f"{panel} {nearly(float(mean))}" for panel, mean in cells.groupby("panel", sort=False)["value"].mean().items()
    )
    return Figure(
        "map",
        f"{name.capitalize()} by depth and length",
        f"{name} by the depth of the needle and the length of the row. Mean over the map: {means}.",
        f"{name.capitalize()} where the needle lies so deep (0 the beginning of the row, 1 its end) in rows so long. "
        f"Median over seeds.{tail}",
        chart,
        60 + columns * (wide + 40),
        cells.rename(columns={"panel": "model", "value": f"median {name}"}),
    )
