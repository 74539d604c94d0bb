"""What the figures of one sweep share: who is drawn how, which score they are about, marks, panels and captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import altair as alt
import pandas as pd

from dashboards.about import main_metric
from dashboards.axes import MAX_PANELS, conditions_of, value_axis
from dashboards.compare import bounds_of
from dashboards.labels import Labels, nearly
from dashboards.style import GREY, Chart, looks
from dashboards.table import Results, chance
from runners.schema import Plan

DASHES = ([1, 0], [7, 3], [2, 2], [10, 3, 2, 3], [4, 2], [1, 3])
"""One a size within a family, in the order of the spec."""
MAX_MARKS = 2_000
"""With more scores than this a figure shows each cell's range instead of every seed: a page has to open."""
WIDE, PANEL = (420, 280), (270, 220)
"""Width and height of a figure of one panel, and of each of several, in pixels."""
LABELS = ("family", "series", "size", "condition")
FADED = 0.08
"""Opacity of the families that are not picked in the legend."""


Part = tuple[pd.DataFrame, Callable[[Any], Chart]]
"""The rows of one layer of a figure, and what draws them on a chart of them."""


class Canvas:
    """One sweep, ready to be drawn; `provenance` ends each caption."""

    def __init__(self, plan: Plan, results: Results, provenance: str) -> None:
        self.plan, self.results, self.provenance = plan, results, provenance
        self.labels = Labels(plan)
        self.set, self.metric = main_metric(plan)
        self.column = f"{self.set}/{self.metric}"
        self.bounds = bounds_of(plan, self.metric)
        self.trains = any(member.trial.train is not None for member in plan.members)
        named = [[getattr(self.labels, name)(member) for name in LABELS] for member in plan.members]
        names = pd.DataFrame(named, columns=list(LABELS), index=results.members.index)
        self.members = pd.concat([results.members, names], axis=1)
        self.who = self.members[["trial", "arm", *LABELS]].drop_duplicates()
        mechanisms = dict(zip(names["family"], (m.trial.mechanism["name"] for m in plan.members), strict=True))
        self.looks = looks({family: mechanisms[family] for family in self.labels.families})

    def scores(self, metric: str) -> pd.DataFrame | None:
        """`metric` as `value`, a row an evaluation of the main set, with who was evaluated and where it trained."""
        data = self.results.scores
        if metric not in data:
            return None
        data = data[(data["set"] == self.set) & data[metric].notna()]
        return data.merge(self.who, on=["trial", "arm"]).rename(columns={metric: "value"})

    @cached_property
    def chance(self) -> float | None:
        """What guessing scores in the main set."""
        level = chance([s for member in self.plan.members for s in member.slices if s.set == self.set], self.metric)
        return None if math.isnan(level) else level

    def marks(
        self,
        data: pd.DataFrame,
        x: alt.X,
        column: str,
        joined: Sequence[str],
        *,
        dashed: bool = True,
        y: alt.Y | None = None,
        without_paths: Collection[str] = (),
    ) -> list[Part]:
        """Medians as large full marks joined by lines (one a combination of `joined`), seeds as small hollow ones.

        `data` has x, value, who and seed, its last column what x stands for; past `MAX_MARKS` rows each cell's range
        stands for its seeds. Chance, where `column` has one, is a dotted rule. Families `without_paths` are not joined.
        """
        own = column == self.column
        at, middle = str(data.columns[-1]), summary(data)
        y = y or value_axis(column, self.bounds if own else None, data["value"])
        colour, dash = self.colour(), self.dash(data) if dashed else {}
        look = {"color": colour, "shape": self.shape()}
        tips: list[Any] = ["series:N", f"{at}:Q", alt.Tooltip("value:Q", format=".4g")]
        detail = [f"{name}:N" for name in joined]
        parts: list[Part] = []
        if own and self.chance is not None:
            # One a panel: a facet draws nothing where it has no row.
            level = middle[["condition"]].drop_duplicates().assign(value=self.chance)
            parts.append((level, lambda c: c.mark_rule(color=GREY, strokeDash=[2, 3]).encode(y)))
        keys = list(dict.fromkeys(["x", *joined, "size"] if dashed else ["x", *joined]))
        paths = middle[~middle["family"].isin(without_paths)].groupby(keys, sort=False)["value"].median().reset_index()
        line = {"color": colour, "detail": detail, **dash, **picked(0.8)}
        if len(paths):
            parts.append((paths, lambda c: c.mark_line(strokeWidth=1.5).encode(x, y, **line)))
        if len(data) <= MAX_MARKS:
            hollow = {**look, **picked(0.6), "tooltip": ["seed:O", *tips]}
            shown = {"size": 26, "strokeWidth": 1.1, "filled": False}
            parts.append((data, lambda c: c.mark_point(**shown).encode(x, y, **hollow)))
        else:
            ends = pd.concat([middle.assign(value=middle[end]) for end in ("lowest", "highest")])
            span = {"color": colour, "detail": ["series:N", "condition:N", "x:Q"], **picked(0.6)}
            parts.append((ends, lambda c: c.mark_line(strokeWidth=1.2).encode(x, y, **span)))
        full = {**look, **picked(1.0), "tooltip": [*tips, "n:Q"]}
        mark = {"size": 95, "filled": True, "stroke": "white", "strokeWidth": 0.8}
        parts.append((middle, lambda c: c.mark_point(**mark).encode(x, y, **full)))
        return parts

    def dash(self, data: pd.DataFrame) -> dict[str, Any]:
        """One dash a size, for lines of one family and so of one colour; nothing where a family is one line."""
        there = set(data["size"])
        sizes = [s for s in dict.fromkeys(map(self.labels.size, self.plan.members)) if s and s in there]
        if not sizes:
            return {}
        scale = alt.Scale(domain=sizes, range=[DASHES[i % len(DASHES)] for i in range(len(sizes))])
        # As wide as the longest dash needs to be told from the others.
        legend = alt.Legend(
            symbolType="stroke", symbolStrokeColor=GREY, symbolStrokeWidth=2, symbolSize=1400, orient="right", columns=1
        )
        coded = alt.StrokeDash("size:N", scale=scale, legend=legend)
        return {"strokeDash": alt.condition("datum.size == ''", alt.value(DASHES[0]), coded)}

    def colour(self) -> alt.Color:
        """Each family's colour; the legend keeps the order of the spec."""
        palette = [self.looks[family].colour for family in self.labels.families]
        return alt.Color("family:N", scale=alt.Scale(domain=self.labels.families, range=palette), title=None)

    def shape(self) -> alt.Shape:
        """Each family's mark."""
        marks = [self.looks[family].shape for family in self.labels.families]
        return alt.Shape("family:N", scale=alt.Scale(domain=self.labels.families, range=marks), title=None)

    def panels(self, parts: Sequence[Part], data: pd.DataFrame) -> Chart:
        """The parts over each other, one panel a condition of `data`, up to nine; with one condition no panels."""
        conditions = conditions_of(data)
        layered = layers(parts)
        if not conditions:
            return layered.properties(width=WIDE[0], height=WIDE[1])
        header = alt.Header(title=None, labelFontSize=11.5, labelFontWeight="bold", labelLimit=PANEL[0])
        facet = alt.Facet("condition:N", sort=conditions, header=header)
        return layered.properties(width=PANEL[0], height=PANEL[1]).facet(facet=facet, columns=_columns(conditions))

    def width(self, data: pd.DataFrame) -> int:
        """About how wide the figure is drawn, in pixels."""
        conditions = conditions_of(data)
        return 60 + (_columns(conditions) * (PANEL[0] + 20) if conditions else WIDE[0])

    def tail(self, with_chance: bool = False) -> str:
        """The end of a caption."""
        level = self.chance if with_chance else None
        return ("" if level is None else f" Dotted: chance ({nearly(level)}).") + f" {self.provenance}"

    def legend_of(self, data: pd.DataFrame) -> str:
        """What the marks are, for a caption, and what lies over each other."""
        seeds = "Small marks are seeds" if len(data) <= MAX_MARKS else "Thin lines span the seeds"
        n = data["condition"].nunique()
        over = f" {n} task settings lie over each other." if n > MAX_PANELS else ""
        return f"{count(data)} {seeds}, large ones medians.{over}"


def layers(parts: Sequence[Part]) -> Chart:
    """The parts over each other, on one table: panels are parted by the rows of one table only."""
    base = alt.Chart(pd.concat([rows.assign(part=i) for i, (rows, _) in enumerate(parts)], ignore_index=True))
    return pickable([draw(base.transform_filter(f"datum.part == {i}")) for i, (_, draw) in enumerate(parts)])


def pickable(drawn: Sequence[Chart]) -> Chart:
    """The layers over each other; a click on the legend shows one family and fades the others.

    Shift adds a family, a double click shows all again.
    """
    # Vega-Lite binds a legend to the selection of the first layer that makes it, and to no later one.
    first = next(i for i, layer in enumerate(drawn) if layer.encoding.color is not alt.Undefined)
    return alt.layer(*(layer.add_params(_pick()) if i == first else layer for i, layer in enumerate(drawn)))


def summary(data: pd.DataFrame) -> pd.DataFrame:
    """A row a mark: the median over seeds as `value`, with their number, lowest and highest."""
    keys = ["x", "family", "series", "size", "condition", str(data.columns[-1])]
    found = data.groupby(list(dict.fromkeys(keys)), sort=False)["value"]
    return found.agg(value="median", n="count", lowest="min", highest="max").reset_index()


def table_of(data: pd.DataFrame, metric: str) -> pd.DataFrame:
    """`summary` as people read it."""
    found = summary(data)
    at = str(data.columns[-1])
    kept = [c for c in ("series", "condition", at) if found[c].astype(str).ne("").any()]
    found = found[[*kept, "value", "n", "lowest", "highest"]]
    return found.rename(columns={"value": f"median {metric}", "condition": "task", "n": "seeds"})


def _pick() -> alt.Parameter:
    return alt.selection_point(name="family_picked", fields=["family"], bind="legend")


def picked(opacity: float) -> dict[str, Any]:
    """`opacity` for the families that are picked in the legend, and for all as long as none is."""
    return {"opacity": alt.condition(_pick(), alt.value(opacity), alt.value(FADED))}


def count(data: pd.DataFrame) -> str:
    """`n = 3 seeds a cell.`, or the range where cells differ."""
    counts = data.groupby(["series", "condition"])["seed"].nunique()
    low, high = int(counts.min()), int(counts.max())
    return f"n = {low if low == high else f'{low} to {high}'} seed{'s' if high > 1 else ''} a cell."


def by_family(values: pd.Series[float]) -> str:
    """`softmax 0.97; linear 0.35`."""
    return "; ".join(f"{family} {nearly(float(value))}" for family, value in values.items())


def _columns(conditions: list[str]) -> int:
    return 2 if len(conditions) in (2, 4) else 3
