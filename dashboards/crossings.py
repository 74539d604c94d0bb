"""From which load on each model costs less than softmax: where two curves of cost against load cross for the last time.

Between two measured loads the curves are taken as straight in logarithms of both. A curve that is below softmax's at
every load crosses before the first; one that is above it at the last load does not cross.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from dashboards.style import COLOURS, GREY, Figure

BASELINE = "softmax"
ROW_HEIGHT = 24
WIDTH = 260
"""Of a panel, in pixels."""
METRIC_COLOURS = COLOURS[:3]


def crossing(cost: Mapping[float, float], baseline: Mapping[float, float]) -> float | None:
    """The load from which on `cost` is below `baseline` (both by load), among the loads of both.

    0 where it is below at all of them, None where it is not at the last, or there is none.
    """
    loads = sorted(cost.keys() & baseline.keys())
    gaps = [math.log(cost[load] / baseline[load]) for load in loads]
    if not loads or gaps[-1] >= 0:
        return None
    above = [i for i, gap in enumerate(gaps) if gap >= 0]
    if not above:
        return 0.0
    i = above[-1]
    share = gaps[i] / (gaps[i] - gaps[i + 1])
    return math.exp(math.log(loads[i]) + share * (math.log(loads[i + 1]) - math.log(loads[i])))


def crossings(data: pd.DataFrame, load: str, costs: Sequence[str], tail: str) -> Figure | None:
    """Every series against the baseline; None where that is missing. `data` has the columns `load`, `costs`, `family`,
    `series` and `condition`, a row an evaluation; repeated ones count by their median."""
    if BASELINE not in set(data["family"]):
        return None
    rows = []
    medians = data.groupby(["condition", "family", "series", load], sort=False)[list(costs)].median().reset_index()
    for condition, there in medians.groupby("condition", sort=False):
        for cost in costs:
            of = {
                name: dict(zip(part[load], part[cost], strict=True))
                for name, part in there.dropna(subset=[cost]).groupby("series", sort=False)
            }
            bases = [name for name in of if name in set(there.loc[there["family"] == BASELINE, "series"])]
            rows += [
                {"panel": condition, "series": name, "cost": cost, "from": crossing(of[name], of[base])}
                for base in bases[:1]
                for name in of
                if name not in bases
            ]
    return _figure(pd.DataFrame(rows), load, sorted(data[load].unique()), tail) if rows else None


def _figure(rows: pd.DataFrame, load: str, loads: list[float], tail: str) -> Figure:
    first, last = loads[0], loads[-1]
    shown = rows.assign(
        x=[2 * last if x is None or math.isnan(x) else max(x, first) for x in rows["from"]],
        told=[_words(x, last) for x in rows["from"]],
        crosses=[not (x is None or math.isnan(x)) for x in rows["from"]],
    )
    name = load.removeprefix("eval.")
    axis = alt.Axis(values=[*loads], format="~s", title=f"{name} (log scale); hollow: not up to {last:g}")
    x = alt.X("x:Q", scale=alt.Scale(type="log", base=2, domain=[first, 2 * last], nice=False), axis=axis)
    series = list(dict.fromkeys(shown["series"]))
    y = alt.Y("series:N", sort=series, title=None, axis=alt.Axis(labelLimit=240, grid=True))
    costs = list(dict.fromkeys(shown["cost"]))
    colour = alt.Color("cost:N", scale=alt.Scale(domain=costs, range=list(METRIC_COLOURS[: len(costs)])), title=None)
    shape = alt.Shape("cost:N", scale=alt.Scale(domain=costs, range=["circle", "square", "triangle-up"]), title=None)
    base = alt.Chart(shown)
    tips = ["series:N", "cost:N", alt.Tooltip("told:N", title=f"below {BASELINE}")]
    marks = base.transform_filter("datum.crosses").mark_point(size=80, filled=True, opacity=1)
    hollow = base.transform_filter("!datum.crosses").mark_point(size=60, filled=False, opacity=0.7, color=GREY)
    layered = alt.layer(*(part.encode(x, y, colour, shape, tooltip=tips) for part in (marks, hollow)))
    layered = layered.properties(width=WIDTH, height=ROW_HEIGHT * len(series))
    panels = [panel for panel in dict.fromkeys(shown["panel"]) if panel]
    columns = min(2, max(1, len(panels)))
    if len(panels) > 1:
        header = alt.Header(title=None, labelFontSize=11.5, labelFontWeight="bold")
        layered = layered.facet(facet=alt.Facet("panel:N", sort=panels, header=header), columns=columns)
    words = "; ".join(
        ", ".join(filter(None, (row["series"], row["panel"], row["cost"]))) + f": {row['told']}"
        for row in shown.to_dict("records")
    )
    return Figure(
        "crossings",
        f"From which {name} on below {BASELINE}",
        f"From which {name} on each costs less than {BASELINE}. {words}.",
        f"The {name} from which on each costs less than {BASELINE}, from straight lines between measured ones in "
        f"logarithms of both; at the left edge: at every one measured.{tail}",
        layered,
        60 + columns * (WIDTH + 200),
        rows.assign(told=shown["told"])[["series", "panel", "cost", "told"]].rename(
            columns={"told": f"below {BASELINE}", "panel": "of"}
        ),
    )


def _words(start: float | None, last: float) -> str:
    if start is None or math.isnan(start):
        return f"not up to {last:g}"
    return "at every one" if start == 0 else f"from {start:,.0f}"
