"""Tables in, charts out: what a figure shows is decided by what the sweep varies.

Every seed is a point and every median a mark; one colour and one mark shape a mechanism, the same in every report
(`style.looks`). Colours are Okabe and Ito's, which people with colour-blindness tell apart. A figure with nothing to
show is not made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from dashboards.axes import LOAD_FIRST as LOAD_FIRST
from dashboards.axes import loads_of, log_axis, set_panels, spread, ticks_of
from dashboards.axes import title as title
from dashboards.canvas import MAX_MARKS, Canvas, Part, by_family, table_of
from dashboards.compare import Comparison
from dashboards.crossings import crossings
from dashboards.curves import learning
from dashboards.dots import dots
from dashboards.forest import forests
from dashboards.heat import heat, is_map
from dashboards.history import history
from dashboards.scale import scale
from dashboards.style import BYTES_LABEL, GREY, Figure
from dashboards.table import Results
from runners.schema import Plan
from runners.search import State


def draw(
    plan: Plan,
    results: Results,
    comparisons: Sequence[Comparison],
    provenance: str,
    states: Mapping[str, State] | None = None,
) -> list[Figure]:
    """Every figure of the sweep that has something to show; `provenance` ends each caption."""
    canvas = Canvas(plan, results, provenance)
    found = [scale(canvas), state(canvas), depth_map(canvas) or load(canvas, canvas.metric)]
    if not canvas.trains:
        others = [metric for metric in plan.metrics if metric != canvas.metric]
        found += [*(load(canvas, metric) for metric in others), cost_crossings(canvas)]
    if not any(found):
        found.append(dots(canvas, canvas.column))
    found += [*forests(comparisons, provenance), *history(canvas, states or {}), *learning(canvas)]
    return [figure for figure in found if figure is not None]


def state(canvas: Canvas) -> Figure | None:
    """The field's figure: the score against the bytes of state, one panel a task setting."""
    if canvas.column not in canvas.members or not canvas.trains:
        return None
    data = canvas.members.assign(value=canvas.members[canvas.column])
    data = data[data["value"].notna()]
    if data["state_bytes"].nunique() < 2:
        return None
    data = spread(data, "state_bytes", canvas.labels.families)
    ticks = ticks_of(data["state_bytes"].min(), data["state_bytes"].max())
    axis = alt.Axis(values=ticks, labelExpr=BYTES_LABEL)
    x = log_axis("state of one sequence (log scale)", axis)
    data = data[["x", "value", "family", "series", "size", "condition", "seed", "state_bytes"]]
    name = title(canvas.column)
    medians = data.groupby("family", sort=False)["value"].median()
    return Figure(
        "state",
        f"{title(canvas.metric).capitalize()} against state",
        f"{name} against bytes of state. Median over all that is shown: {by_family(medians)}.",
        f"{name.capitalize()} against the state that decoding carries, all layers. {canvas.legend_of(data)} "
        f"Families at about the same state are set apart sideways.{canvas.tail(True)}",
        canvas.panels(canvas.marks(data, x, canvas.column, ["family", "condition"], dashed=False), data),
        canvas.width(data),
        table_of(data, name),
        data if len(data) > MAX_MARKS else None,
    )


def depth_map(canvas: Canvas) -> Figure | None:
    """The score by depth and length, where evaluations vary both."""
    data = canvas.scores(canvas.metric)
    if data is None or not is_map(data):
        return None
    return heat(data, title(canvas.column), canvas.bounds, canvas.tail())


def load(canvas: Canvas, metric: str) -> Figure | None:
    """A score against the load (pairs, else length, else another task number); panels for what else varies.

    Where models were trained at one load of several, a line marks it: what is right of it is extrapolated.
    """
    data = canvas.scores(metric)
    loads = [] if data is None else loads_of(data)
    if data is None or not loads:
        return None
    at, name = loads[0], loads[0].removeprefix("eval.")
    data = set_panels(data, at)
    ticks = sorted(data[at].unique().tolist())
    logarithmic = ticks[0] > 0
    trained = _trained(canvas, data, name)
    data = spread(data, at, canvas.labels.families) if logarithmic else data.assign(x=data[at])
    data = data.rename(columns={at: name})[["x", "value", "family", "series", "size", "condition", "seed", name]]
    column = f"{canvas.set}/{metric}"
    marks = canvas.marks(data, _load_axis(name, ticks), column, ["family", "series", "size", "condition"])
    said = " The dashed line is where models trained." if len(trained) else ""
    ends = data[data[name] == ticks[-1]].groupby("family", sort=False)["value"].median()
    own = metric == canvas.metric
    return Figure(
        "load" if own else f"load_{metric}",
        f"{title(metric).capitalize()} against {name}",
        f"{title(column)} against {name}, {ticks[0]:g} to {ticks[-1]:g}. Median at {ticks[-1]:g}: {by_family(ends)}.",
        f"{title(column).capitalize()} against {name}. {canvas.legend_of(data)} Lines join medians.{said}"
        f"{canvas.tail(own)}",
        canvas.panels([*_rule(trained), *marks], data),
        canvas.width(data),
        table_of(data, title(column)),
        data if len(data) > MAX_MARKS else None,
    )


def _load_axis(name: str, ticks: list[float]) -> alt.X:
    axis = alt.Axis(values=ticks, format="~s")
    if ticks[0] > 0:
        return log_axis(f"{name} (log scale)", axis)
    return alt.X("x:Q", title=name, scale=alt.Scale(zero=False, padding=14), axis=axis)


def _trained(canvas: Canvas, data: pd.DataFrame, name: str) -> pd.DataFrame:
    """Where the models of each panel were trained (`x`), if all of a panel were trained at one load of several."""
    if not canvas.trains:
        return pd.DataFrame()
    at = {member.trial.id: member.trial.task.get(name) for member in canvas.plan.members}
    found = data.assign(x=data["trial"].map(at)).groupby("condition", sort=False)
    once = found.filter(lambda rows: rows["x"].nunique() == 1 < rows[f"eval.{name}"].nunique())
    return once[["condition", "x"]].drop_duplicates()


def _rule(trained: pd.DataFrame) -> list[Part]:
    style = {"color": GREY, "strokeDash": [6, 4], "strokeWidth": 1.2}
    return [(trained, lambda c: c.mark_rule(**style).encode(x="x:Q"))] if len(trained) else []


def cost_crossings(canvas: Canvas) -> Figure | None:
    """From which load on untrained models cost less than softmax: of every cost that has no bounds."""
    costs = [c for c, way in canvas.plan.metrics.items() if way == "min" and c in canvas.results.scores]
    data = canvas.scores(canvas.metric)
    if data is None or not (loads := loads_of(data)):
        return None
    data = data.rename(columns={"value": canvas.metric})
    costs = [c for c in costs if data[c].notna().any()]
    return crossings(set_panels(data, loads[0]), loads[0], costs, canvas.tail()) if costs else None
