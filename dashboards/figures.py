"""Tables in, charts out: what a figure shows is decided by what the sweep varies.

Every seed is a point and every median a mark; one colour and one mark shape a family, the same in every figure. Colours
are Okabe and Ito's, which people with colour-blindness tell apart. A figure with nothing to show is not made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from dashboards.compare import Comparison, bounds_of
from dashboards.crossings import crossings
from dashboards.forest import forests
from dashboards.heat import heat, is_map
from dashboards.labels import Labels, is_number, name_value, nearly
from dashboards.style import BYTES_LABEL, COLOURS, GREY, SHAPES, Chart, Figure
from dashboards.table import Results, chance
from runners.schema import Plan

MAX_PANELS = 9
MAX_CURVE_POINTS = 100
MAX_POINTS = 20_000
"""Of all curves of a figure together: a page has to open."""
MAX_CURVES = 150
"""More trials than this and learning curves show the median of each cell only."""
DASHES = ([1, 0], [7, 3], [2, 2], [10, 3, 2, 3], [4, 2], [1, 3])
"""One a size within a family, in the order of the spec."""
DECADES = 30
"""Largest over smallest value of a score, from which its axis is logarithmic."""
LOAD_FIRST = ("n_pairs", "seq_len")
"""Task settings that make a task harder, the one to put on the x axis first."""
WIDE, PANEL = (420, 280), (270, 220)
"""Width and height of a figure of one panel, and of each of several, in pixels."""
LABELS = ("family", "series", "size", "condition")


def draw(plan: Plan, results: Results, comparisons: Sequence[Comparison], provenance: str) -> list[Figure]:
    """Every figure of the sweep that has something to show; `provenance` ends each caption."""
    painter = Painter(plan, results, provenance)
    scores = [painter.state(), painter.map() or painter.load(), painter.crossings()]
    found = [*scores, *forests(comparisons, provenance), *painter.learning()]
    return [figure for figure in found if figure is not None]


class Painter:
    """Draws the figures of one sweep."""

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

    def state(self) -> Figure | None:
        """The field's figure: the score against the bytes of state, one panel a task setting."""
        if self.column not in self.members or not self.trains:
            return None
        data = self.members.assign(value=self.members[self.column])
        data = data[data["value"].notna()]
        if data["state_bytes"].nunique() < 2:
            return None
        data = spread(data, "state_bytes", self.labels.families)
        ticks = ticks_of(data["state_bytes"].min(), data["state_bytes"].max())
        x = log_axis("state carried for one sequence (log scale)", alt.Axis(values=ticks, labelExpr=BYTES_LABEL))
        data = data[["x", "value", "family", "series", "size", "condition", "seed", "state_bytes"]]
        medians = data.groupby("family", sort=False)["value"].median()
        return Figure(
            "state",
            f"{title(self.metric).capitalize()} against state",
            f"{title(self.column)} against bytes of state. Median over all that is shown: {_by_family(medians)}.",
            f"{title(self.column).capitalize()} against the state that decoding carries, all layers. {count(data)} "
            f"{_MARKS} Families at about the same state are set apart sideways.{self._tail(True)}",
            self._panels(self._marks(data, x, ["x", "family", "condition"]), data),
            self._width(data),
        )

    def _scores(self) -> pd.DataFrame | None:
        """The main metric as `value`, a row an evaluation of the main set, with who was evaluated."""
        data = self.results.scores
        if self.metric not in data:
            return None
        data = data[(data["set"] == self.set) & data[self.metric].notna()]
        return data.merge(self.who, on=["trial", "arm"]).rename(columns={self.metric: "value"})

    def map(self) -> Figure | None:
        """The score by depth and length, where evaluations vary both."""
        data = self._scores()
        if data is None or not is_map(data):
            return None
        return heat(data, title(self.column), self.bounds, self._tail(False))

    def load(self) -> Figure | None:
        """The score against the load (pairs, else length, else another task number); panels for what else varies."""
        data = self._scores()
        if data is None:
            return None
        loads = sorted((c for c in map(str, data.columns) if _is_load(c, data)), key=_load_rank)
        if not loads:
            return None
        load, name = loads[0], loads[0].removeprefix("eval.")
        words = [c for c in map(str, data.columns) if _is_word(c, data)]
        data = _set_panels(data, load, [*words, *loads[1:]])
        ticks = sorted(data[load].unique().tolist())
        logarithmic = ticks[0] > 0
        data = spread(data, load, self.labels.families) if logarithmic else data.assign(x=data[load])
        axis = alt.Axis(values=ticks, format="~s")
        plain = alt.X("x:Q", title=name, scale=alt.Scale(zero=False, padding=14), axis=axis)
        x = log_axis(f"{name} (log scale)", axis) if logarithmic else plain
        data = data.rename(columns={load: name})
        data = data[["x", "value", "family", "series", "size", "condition", "seed", name]]
        ends = data[data[name] == ticks[-1]].groupby("family", sort=False)["value"].median()
        return Figure(
            "load",
            f"{title(self.metric).capitalize()} against {name}",
            f"{title(self.column)} against {name}, {ticks[0]:g} to {ticks[-1]:g}. Median at {ticks[-1]:g}: "
            f"{_by_family(ends)}.",
            f"{title(self.column).capitalize()} against {name}. {count(data)} {_MARKS} Lines join medians."
            f"{self._tail(True)}",
            self._panels(self._marks(data, x, ["x", "family", "series", "size", "condition"]), data),
            self._width(data),
        )

    def crossings(self) -> Figure | None:
        """From which load on untrained models cost less than softmax: of every cost that has no bounds."""
        data = self._scores()
        if data is None or self.trains:
            return None
        data = data.rename(columns={"value": self.metric})
        loads = sorted((c for c in map(str, data.columns) if _is_load(c, data)), key=_load_rank)
        costs = [c for c, way in self.plan.metrics.items() if way == "min" and c in data and data[c].notna().any()]
        if not loads or not costs:
            return None
        words = [c for c in map(str, data.columns) if _is_word(c, data)]
        return crossings(_set_panels(data, loads[0], [*words, *loads[1:]]), loads[0], costs, self._tail(False))

    def learning(self) -> list[Figure]:
        """Learning curves: the validation score and the training loss, where there is more than one point."""
        found = [self._curve(metric) for metric in dict.fromkeys((f"valid/{self.metric}", "train/loss"))]
        return [figure for figure in found if figure is not None]

    def _curve(self, metric: str) -> Figure | None:
        data = self.results.curves
        data = data[(data["metric"] == metric) & data["value"].map(math.isfinite)]
        if data["step"].nunique() < 2:
            return None
        data = data.merge(self.who, on=["trial", "arm"])
        with_seeds = data["trial"].nunique() <= MAX_CURVES
        data = thinned(data, with_seeds)[["step", "value", "family", "series", "size", "condition", "seed", "trial"]]
        ends = data.sort_values("step").groupby("trial").tail(1).groupby("family", sort=False)["value"].median()
        bounded = metric.endswith(f"/{self.metric}")
        seeds = "Thin lines are seeds, bold ones their medians." if with_seeds else "Lines are medians over seeds."
        return Figure(
            "learning_" + metric.replace("/", "_"),
            f"Learning: {title(metric)}",
            f"{title(metric)} by training step. Median of the last points: {_by_family(ends)}.",
            f"{title(metric).capitalize()} during training. {count(data)} {seeds}{self._tail(False)}",
            self._panels(self._lines(data, metric, self.bounds if bounded else None, with_seeds), data),
            self._width(data),
        )

    def _lines(self, data: pd.DataFrame, metric: str, bounds: list[float] | None, with_seeds: bool) -> Chart:
        """Learning curves: a thin line a seed, a bold one for the median of a series."""
        x = alt.X("step:Q", axis=alt.Axis(format="~s", tickCount=5))
        groups: list[Any] = ["step", "family", "series", "size", "condition"]
        if not with_seeds:
            data = data.groupby(groups, sort=False)["value"].median().reset_index()
        y, colour, base = value_axis(metric, bounds), self._colour(), alt.Chart(data)
        middle = base.transform_aggregate(value="median(value)", groupby=groups)
        tips = ["series:N", "step:Q", alt.Tooltip("value:Q", format=".4f")]
        dash = self._dash(data)
        bold = middle.mark_line(strokeWidth=2.2).encode(x, y, colour, **dash, detail="series:N", tooltip=tips)
        if not with_seeds:
            return alt.layer(bold)
        thin = base.mark_line(strokeWidth=0.8, opacity=0.4)
        return alt.layer(thin.encode(x, y, colour, detail="trial:N", tooltip=["seed:O", *tips]), bold)

    def _marks(self, data: pd.DataFrame, x: alt.X, groups: list[Any]) -> Chart:
        """Seeds as small hollow marks, medians as large full ones joined by lines, chance as a dotted rule."""
        base, y = alt.Chart(data), value_axis(self.column, self.bounds, data["value"])
        colour, shape = self._colour(), self._shape()
        tips = ["series:N", *(f"{c}:Q" for c in (data.columns[-1], "seed")), alt.Tooltip("value:Q", format=".4f")]
        middle = base.transform_aggregate(value="median(value)", n="count()", groupby=groups)
        told = [f"{groups[-2] if 'series' in groups else 'family'}:N", alt.Tooltip("value:Q", format=".4f"), "n:Q"]
        layers: list[Chart] = []
        level = self._chance()
        if level is not None:
            rule = alt.Chart(data).mark_rule(color=GREY, strokeDash=[2, 3], strokeWidth=1)
            layers.append(rule.encode(y=alt.datum(level)))
        path = middle.mark_line(strokeWidth=1.4, opacity=0.8).encode(x, y, colour)
        layers.append(path.encode(**self._dash(data), detail="series:N") if "series" in groups else path)
        seeds = base.mark_point(size=26, opacity=0.6, strokeWidth=1.1, filled=False)
        layers.append(seeds.encode(x, y, colour, shape, tooltip=tips))
        medians = middle.mark_point(size=95, opacity=1, filled=True, stroke="white", strokeWidth=0.8)
        layers.append(medians.encode(x, y, colour, shape, tooltip=told))
        return alt.layer(*layers)

    def _dash(self, data: pd.DataFrame) -> dict[str, alt.StrokeDash]:
        """One dash a size, for lines of one family and so of one colour; nothing where a family is one line."""
        sizes = [size for size in dict.fromkeys(map(self.labels.size, self.plan.members)) if size in set(data["size"])]
        sizes = [size for size in sizes if size]
        if not sizes:
            return {}
        scale = alt.Scale(domain=sizes, range=[DASHES[i % len(DASHES)] for i in range(len(sizes))])
        # As wide as the longest dash needs to be told from the others.
        legend = alt.Legend(
            symbolType="stroke", symbolStrokeColor=GREY, symbolStrokeWidth=2, symbolSize=1400, orient="right", columns=1
        )
        alone = alt.condition(
            "datum.size == ''", alt.value(DASHES[0]), alt.StrokeDash("size:N", scale=scale, legend=legend)
        )
        return {"strokeDash": alone}

    def _colour(self) -> alt.Color:
        """One colour a family; the legend keeps the order of the spec."""
        families = self.labels.families
        palette = [COLOURS[i % len(COLOURS)] for i in range(len(families))]
        return alt.Color("family:N", scale=alt.Scale(domain=families, range=palette), title=None)

    def _shape(self) -> alt.Shape:
        """One mark a family; past the eighth, colours repeat with another mark."""
        families = self.labels.families
        marks = [SHAPES[(i + i // len(COLOURS)) % len(SHAPES)] for i in range(len(families))]
        return alt.Shape("family:N", scale=alt.Scale(domain=families, range=marks), title=None)

    def _panels(self, layered: Chart, data: pd.DataFrame) -> Chart:
        """One panel a condition, up to nine of them; with one condition no panels."""
        conditions = _conditions(data)
        if not conditions:
            return layered.properties(width=WIDE[0], height=WIDE[1])
        header = alt.Header(title=None, labelFontSize=11.5, labelFontWeight="bold")
        facet = alt.Facet("condition:N", sort=conditions, header=header)
        return layered.properties(width=PANEL[0], height=PANEL[1]).facet(facet=facet, columns=_columns(conditions))

    def _width(self, data: pd.DataFrame) -> int:
        conditions = _conditions(data)
        return 60 + (_columns(conditions) * (PANEL[0] + 20) if conditions else WIDE[0])

    def _chance(self) -> float | None:
        pieces = [s for member in self.plan.members for s in member.slices if s.set == self.set]
        level = chance(pieces, self.metric)
        return None if math.isnan(level) else level

    def _tail(self, with_chance: bool) -> str:
        level = self._chance() if with_chance else None
        return ("" if level is None else f" Dotted: chance ({nearly(level)}).") + f" {self.provenance}"


_MARKS = "Small marks are seeds, large ones medians."


def main_metric(plan: Plan) -> tuple[str, str]:
    """The evaluation set and metric the sweep is about: that of its first test, else the first set and score."""
    sets = list(dict.fromkeys(piece.set for member in plan.members for piece in member.slices))
    for test in plan.tests:
        if test.set in sets:
            return test.set, test.metric
    scores = [name for name, direction in plan.metrics.items() if direction == "max"] or list(plan.metrics)
    return (sets[0] if sets else "valid"), (scores[0] if scores else "accuracy")


def title(column: str) -> str:
    """`test/accuracy` as `test accuracy`."""
    return column.replace("/", " ").replace("_", " ")


def count(data: pd.DataFrame) -> str:
    """`n = 3 seeds a cell.`, or the range where cells differ."""
    counts = data.groupby(["series", "condition"])["seed"].nunique()
    low, high = int(counts.min()), int(counts.max())
    return f"n = {low if low == high else f'{low} to {high}'} seed{'s' if high > 1 else ''} a cell."


def value_axis(column: str, bounds: Sequence[float] | None, values: pd.Series[float] | None = None) -> alt.Y:
    """The y axis of a score: its whole range if it has one, logarithmic if it has none and `values` span decades."""
    if bounds:
        return alt.Y("value:Q", title=title(column), scale=alt.Scale(domain=list(bounds)), axis=alt.Axis(grid=True))
    if values is not None and values.min() > 0 and values.max() > DECADES * values.min():
        axis = alt.Axis(grid=True, format="~g", tickCount=6)
        return alt.Y("value:Q", title=f"{title(column)} (log scale)", scale=alt.Scale(type="log"), axis=axis)
    return alt.Y("value:Q", title=title(column), scale=alt.Scale(zero=False), axis=alt.Axis(grid=True))


def log_axis(name: str, axis: alt.Axis) -> alt.X:
    """A base-2 x axis over the column `x` of `spread`."""
    return alt.X("x:Q", title=name, scale=alt.Scale(type="log", base=2, nice=False, padding=14), axis=axis)


def ticks_of(low: float, high: float) -> list[int]:
    """Where a base-2 axis from `low` to `high` bytes has ticks: powers of two, or quarters between where few fit."""
    first, last = math.floor(math.log2(max(low, 1))), math.ceil(math.log2(max(high, 1)))
    powers = [2**k for k in range(first, last + 1, 1 + (last - first) // 10)]
    inside = [tick for tick in powers if low * 0.97 <= tick <= high * 1.03]
    if len(inside) >= 3:
        return inside
    fine = [2**k * quarter // 4 for k in range(max(first, 2), last + 1) for quarter in (4, 5, 6, 7)]
    inside = [tick for tick in fine if low * 0.97 <= tick <= high * 1.03]
    return inside[:: 1 + len(inside) // 5] or powers


def spread(data: pd.DataFrame, column: str, families: list[str]) -> pd.DataFrame:
    """Column `x`: `column`, moved a little sideways (in logs) for families that stand at about the same place."""
    logs = [math.log2(value) for value in data[column]]
    octaves = max(1.0, max(logs, default=0.0) - min(logs, default=0.0))
    place = [round(log / (0.03 * octaves)) for log in logs]
    keys = list(zip(place, data["condition"], data["family"], strict=True))
    here: dict[tuple[int, str], set[str]] = {}
    for where, condition, family in keys:
        here.setdefault((where, condition), set()).add(family)
    x = []
    for log, (where, condition, family) in zip(logs, keys, strict=True):
        there = [name for name in families if name in here[where, condition]]
        step = octaves * min(0.035, 0.15 / max(1, len(there) - 1))
        x.append(2 ** (log + step * (there.index(family) - (len(there) - 1) / 2)))
    return data.assign(x=x)


def thinned(data: pd.DataFrame, with_seeds: bool = True) -> pd.DataFrame:
    """At most `MAX_CURVE_POINTS` steps (fewer for very many lines), the same for all curves, and each curve's last."""
    lines = data.groupby(["trial"] if with_seeds else ["series", "condition"]).ngroups
    steps = sorted(data["step"].unique())
    stride = math.ceil(len(steps) / min(MAX_CURVE_POINTS, max(10, MAX_POINTS // lines)))
    last = data.groupby("trial")["step"].transform("max")
    return data[data["step"].isin(steps[::stride]) | (data["step"] == last)]


def _is_load(column: str, data: pd.DataFrame) -> bool:
    return column.startswith("eval.") and data[column].nunique() > 1 and bool(data[column].map(is_number).all())


def _is_word(column: str, data: pd.DataFrame) -> bool:
    """A setting of the evaluations that is no number and varies: it parts panels and is no axis."""
    return column.startswith("eval.") and data[column].nunique() > 1 and not data[column].map(is_number).any()


def _load_rank(column: str) -> int:
    name = column.removeprefix("eval.")
    return LOAD_FIRST.index(name) if name in LOAD_FIRST else len(LOAD_FIRST)


def _set_panels(data: pd.DataFrame, load: str, others: list[str]) -> pd.DataFrame:
    """`condition` as the panel of each row: what varies besides the load, at training or at evaluation."""
    # A setting that the load decides (zipped with it) needs no panel of its own.
    free = [c for c in others if (data.groupby(load)[c].nunique() > 1).any()]
    trained = data.groupby(["series", load, *free])["condition"].nunique().max() > 1

    def panel(row: dict[Any, Any]) -> str:
        words = [f"trained at {row['condition']}"] if trained and row["condition"] else []
        return ", ".join([*words, *(name_value(c, row[c]) for c in free)])

    return data.assign(condition=[panel(row) for row in data.to_dict("records")])


def _conditions(data: pd.DataFrame) -> list[str]:
    """The panels, in order; none where one will do, or where there would be too many to read."""
    found = [c for c in dict.fromkeys(data["condition"]) if c]
    return found if 2 <= len(found) <= MAX_PANELS else []


def _columns(conditions: list[str]) -> int:
    return 2 if len(conditions) in (2, 4) else 3


def _by_family(values: pd.Series[float]) -> str:
    return "; ".join(f"{family} {nearly(float(value))}" for family, value in values.items())
