"""Axes and places: what a score's axis covers, where a log axis has ticks, who is moved aside, what parts panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from dashboards.labels import is_number, name_value

DECADES = 30
"""Largest over smallest value of a score, from which its axis is logarithmic."""
LOAD_FIRST = ("n_pairs", "seq_len")
"""Task settings that make a task harder, the one to put on the x axis first."""
MAX_PANELS = 9


def title(column: str) -> str:
    """`test/accuracy` as `test accuracy`."""
    return column.replace("/", " ").replace("_", " ")


def value_axis(
    column: str, bounds: Sequence[float] | None, values: pd.Series[float] | None = None, channel: Any = alt.Y
) -> Any:
    """The axis of a score: its whole range if it has one, logarithmic if it has none and `values` span decades."""
    if bounds:
        scale, axis, note = alt.Scale(domain=list(bounds)), alt.Axis(grid=True), ""
    elif values is not None and values.min() > 0 and values.max() > DECADES * values.min():
        scale, axis, note = alt.Scale(type="log"), alt.Axis(grid=True, format="~g", tickCount=6), " (log scale)"
    else:
        scale, axis, note = alt.Scale(zero=False), alt.Axis(grid=True), ""
    return channel("value:Q", title=title(column) + note, scale=scale, axis=axis)


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


def loads_of(data: pd.DataFrame) -> list[str]:
    """Columns of evaluations that are numbers and vary, the one to put on the x axis first."""
    found = [c for c in _varying(data) if data[c].map(is_number).all()]
    return sorted(found, key=_load_rank)


def words_of(data: pd.DataFrame) -> list[str]:
    """Columns of evaluations that are no numbers and vary: they part panels and are no axis."""
    return [c for c in _varying(data) if not data[c].map(is_number).any()]


def set_panels(data: pd.DataFrame, load: str) -> pd.DataFrame:
    """`condition` as the panel of each row: what varies besides the load, at training or at evaluation."""
    others = [*words_of(data), *(c for c in loads_of(data) if c != load)]
    # A setting that the load decides (zipped with it) needs no panel of its own.
    free = [c for c in others if (data.groupby(load)[c].nunique() > 1).any()]
    trained = data.groupby(["series", load, *free])["condition"].nunique().max() > 1

    def panel(row: dict[Any, Any]) -> str:
        words = [f"trained at {row['condition']}"] if trained and row["condition"] else []
        return ", ".join([*words, *(name_value(c, row[c]) for c in free)])

    return data.assign(condition=[panel(row) for row in data[["condition", *free]].to_dict("records")])


def conditions_of(data: pd.DataFrame) -> list[str]:
    """The panels, in order; none where one will do, or where there would be too many to read."""
    found = [c for c in dict.fromkeys(data["condition"]) if c]
    return found if 2 <= len(found) <= MAX_PANELS else []


def _varying(data: pd.DataFrame) -> list[str]:
    return [c for c in map(str, data.columns) if c.startswith("eval.") and data[c].nunique() > 1]


def _load_rank(column: str) -> int:
    name = column.removeprefix("eval.")
    return LOAD_FIRST.index(name) if name in LOAD_FIRST else len(LOAD_FIRST)
