"""How a loss falls with the size of the model: log against log, and the power law that fits each family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy import stats as distributions

from dashboards.axes import title
from dashboards.canvas import Canvas, Part, picked, table_of
from dashboards.labels import nearly
from dashboards.style import Figure

SIZES_TO_FIT = 3
"""Through two sizes any line goes."""


@dataclass(frozen=True)
class PowerLaw:
    """loss = factor · params^−exponent, fitted to the logarithms of each size's mean; a 95 % t interval (sizes − 2)."""

    exponent: float
    low: float
    high: float
    factor: float
    n_sizes: int

    def at(self, params: float) -> float:
        """The loss of a model with `params` parameters."""
        return self.factor * params**-self.exponent


def fit(params: list[float], losses: list[float]) -> PowerLaw | None:
    """The power law through `losses` at `params` (positive), each size one point; None with fewer than three sizes."""
    means = pd.DataFrame({"params": params, "loss": losses}).groupby("params")["loss"].mean()
    if len(means) < SIZES_TO_FIT or (means <= 0).any():
        return None
    found = distributions.linregress(np.log(means.index.to_numpy(float)), np.log(means.to_numpy(float)))
    half = float(distributions.t.ppf(0.975, len(means) - 2)) * float(found.stderr)
    slope = -float(found.slope)
    return PowerLaw(slope, slope - half, slope + half, math.exp(float(found.intercept)), len(means))


def scale(canvas: Canvas) -> Figure | None:
    """A loss against parameters, where the sweep varies the model's size; None where it does not."""
    data = canvas.members
    varies = [path for path in canvas.labels.paths if path.startswith("model.")]
    if not varies or canvas.bounds or canvas.column not in data or canvas.plan.metrics.get(canvas.metric) != "min":
        return None
    data = data.assign(value=data[canvas.column], x=data["n_params"].astype(float))
    data = data[data["value"].notna() & data["x"].notna() & (data["value"] > 0)]
    # A series is a line here: the size of the model is the axis, no name.
    data = data.assign(series=data["family"], size="", parameters=data["x"])
    if data.groupby(["family", "condition"])["x"].nunique().max() < 2:
        return None
    data = data[["x", "value", "family", "series", "size", "condition", "seed", "parameters"]]
    laws = {
        (str(family), str(condition)): fit(rows["x"].tolist(), rows["value"].tolist())
        for (family, condition), rows in data.groupby(["family", "condition"], sort=False)
    }
    told = "; ".join(filter(None, (_told(key, law) for key, law in laws.items())))
    fitted = (
        f"Straight lines are power laws; exponents: {told}." if told else "Fewer than three sizes: nothing is fitted."
    )
    table = table_of(data, title(canvas.column))
    return Figure(
        "scale",
        f"{title(canvas.metric).capitalize()} against size",
        f"{title(canvas.column)} against the number of parameters. {fitted}",
        f"{title(canvas.column).capitalize()} against parameters, both logarithmic. {canvas.legend_of(data)} {fitted}"
        f"{canvas.tail()}",
        canvas.panels(_parts(canvas, data, laws), data),
        canvas.width(data),
        table,
    )


def _told(key: tuple[str, str], law: PowerLaw | None) -> str:
    if law is None:
        return ""
    name = ", ".join(filter(None, key))
    return f"{name} {nearly(law.exponent)} (95 % {nearly(law.low)} to {nearly(law.high)}, {law.n_sizes} sizes)"


def _parts(canvas: Canvas, data: pd.DataFrame, laws: dict[tuple[str, str], PowerLaw | None]) -> list[Part]:
    log = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X("x:Q", title="parameters (log scale)", scale=log, axis=alt.Axis(format="~s", tickCount=6))
    lowest, highest = float(data["value"].min()) * 0.97, float(data["value"].max()) * 1.03
    y_scale = alt.Scale(type="log", nice=False, domain=[lowest, highest])
    y = alt.Y(
        "value:Q", title=f"{title(canvas.column)} (log scale)", scale=y_scale, axis=alt.Axis(format="~g", grid=True)
    )
    rows: list[dict[str, Any]] = [
        {"family": family, "condition": condition, "x": end, "value": law.at(end)}
        for (family, condition), law in laws.items()
        if law is not None
        for there in [data[(data["family"] == family) & (data["condition"] == condition)]["x"]]
        for end in (float(there.min()), float(there.max()))
    ]
    line = {"color": canvas.colour(), "detail": "condition:N", **picked(0.8)}
    parts = canvas.marks(
        data, x, canvas.column, ["family", "condition"], dashed=False, y=y, without_paths={r["family"] for r in rows}
    )
    if rows:
        parts.insert(0, (pd.DataFrame(rows), lambda c: c.mark_line(strokeWidth=1.5).encode(x, y, **line)))
    return parts
