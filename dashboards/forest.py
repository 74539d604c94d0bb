"""The sweep's comparisons as a forest plot: one row a test, its interval, its blocks, its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from dashboards.compare import Comparison
from dashboards.labels import effect_text, side, verdict_text
from dashboards.stats import Verdict
from dashboards.style import BAND, COLOURS, GREY, INK, Chart, Figure

_VERDICT_COLOURS = {Verdict.A_BETTER: COLOURS[0], Verdict.B_BETTER: COLOURS[1], Verdict.NO_DIFFERENCE: COLOURS[2]}
WIDTH = 400
"""Of the plot itself, in pixels: names stand left of it, verdicts right."""
ROW_HEIGHT = 40


def forests(comparisons: Sequence[Comparison], provenance: str) -> list[Figure]:
    """The comparisons that have an effect, one figure for each unit they are measured in."""
    shown = [c for c in comparisons if not math.isnan(c.effect)]
    units = list(dict.fromkeys((c.test.metric, c.test.scale) for c in shown))
    return [_forest([c for c in shown if (c.test.metric, c.test.scale) == unit], provenance) for unit in units]


def _forest(shown: list[Comparison], provenance: str) -> Figure:
    test = shown[0].test
    ratio = test.scale == "ratio"
    names = _names(shown)
    rows = [_row(c, name, ratio) for c, name in zip(shown, names, strict=True)]
    parts = [
        {"test": name, "block": block, "effect": value}
        for c, name in zip(shown, names, strict=True)
        for block, value in c.blocks.items()
    ]
    band = any("margin_low" in row for row in rows)
    counts = sorted({len(c.pairs) for c in shown})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return Figure(
        f"tests_{test.metric}" + ("_ratio" if ratio else ""),
        f"Comparisons: {test.metric}",
        "; ".join(f"{c.test.name}: {effect_text(c)}, {verdict_text(c)}" for c in shown) + ".",
        f"Paired {'ratio' if ratio else 'difference'} in {test.metric} with its 95 % interval; small ticks are single "
        f"blocks, descriptive.{' The grey band is the margin.' if band else ''} Verdicts are adjusted over all tests "
        f"of the sweep. n = {n} pairs. {provenance}",
        _chart(rows, parts, test.metric, ratio),
        WIDTH + 260,
        _table(shown),
    )


def _table(shown: list[Comparison]) -> pd.DataFrame:
    rows = [
        {
            "a": side(c.test.a),
            "b": side(c.test.b),
            "on": c.test.set,
            "effect": c.effect,
            "95 % low": c.low,
            "95 % high": c.high,
            "pairs": len(c.pairs),
            "verdict": str(c.verdict),
        }
        for c in shown
    ]
    return pd.DataFrame(rows)


def _names(shown: list[Comparison]) -> list[str]:
    """A two-line name for each test, with the evaluation set where the sides alone do not tell tests apart."""
    sides = [f"a: {side(c.test.a)}\nb: {side(c.test.b)}" for c in shown]
    if len(set(sides)) == len(sides):
        return sides
    named = [f"{side}, on {c.test.set}" for side, c in zip(sides, shown, strict=True)]
    return named if len(set(named)) == len(named) else [c.test.name for c in shown]


def _row(c: Comparison, name: str, ratio: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"test": name, "effect": c.effect, "low": c.low, "high": c.high, "verdict": str(c.verdict)}
    row["colour"] = _VERDICT_COLOURS.get(c.verdict, GREY)
    margin = c.test.margin
    if margin is not None:
        row |= {"margin_low": 1 / (1 + margin), "margin_high": 1 + margin} if ratio else {}
        row |= {} if ratio else {"margin_low": -margin, "margin_high": margin}
    return row


def _chart(rows: list[dict[str, Any]], parts: list[dict[str, Any]], metric: str, ratio: bool) -> Chart:
    axis = alt.Axis(
        labelExpr="split(datum.label, '\\n')",
        labelLimit=340,
        ticks=False,
        domain=False,
        labelPadding=8,
        labelOffset=-6.5,
        labelLineHeight=13,
    )
    y = alt.Y("test:N", sort=[str(row["test"]) for row in rows], title=None, axis=axis)
    scale = alt.Scale(type="log") if ratio else alt.Scale(zero=True, nice=True)
    title = f"{metric}: a ÷ b" if ratio else f"difference in {metric}, a − b"
    numbers = alt.Axis(tickCount=6, format="~g")
    x = alt.X("effect:Q", title=title, scale=scale, axis=numbers)
    base, blocks = alt.Chart(pd.DataFrame(rows)), alt.Chart(pd.DataFrame(parts))
    paint = alt.Color("colour:N", scale=None)
    tips = ["verdict:N", *(alt.Tooltip(f"{c}:Q", format=".4f") for c in ("effect", "low", "high"))]
    layers: list[Chart] = []
    if any("margin_low" in row for row in rows):
        left = alt.X("margin_low:Q", title=title, scale=scale, axis=numbers)
        layers.append(base.mark_bar(color=BAND, height=ROW_HEIGHT - 10).encode(left, y, x2="margin_high:Q"))
    nothing = alt.Chart(pd.DataFrame({"x": [1.0 if ratio else 0.0]}))
    low = alt.X("low:Q", title=title, scale=scale, axis=numbers)
    layers += [
        nothing.mark_rule(color=INK).encode(x="x:Q"),
        blocks.mark_tick(color=GREY, thickness=1, size=14, opacity=0.8).encode(x, y, tooltip=["block:N", "effect:Q"]),
        base.mark_rule(strokeWidth=2).encode(low, y, paint, x2="high:Q"),
        base.mark_point(filled=True, size=80, opacity=1).encode(x, y, paint, tooltip=tips),
        base.mark_text(align="left", fontSize=11).encode(
            x=alt.value(WIDTH + 12), y=y, text="verdict:N", color=alt.value(INK)
        ),
    ]
    return alt.layer(*layers).properties(width=WIDTH, height=max(60, ROW_HEIGHT * len(rows)))
