"""How every figure looks and how it is saved: colours, type sizes, captions, formats."""

from __future__ import annotations

import functools
import hashlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#B8A800")
"""Okabe and Ito's palette, the yellow darkened to be read on white."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
GREY = "#5f6670"
INK, GRID, FRAME, BAND, AXIS = "#333333", "#e6e8eb", "#cfd4da", "#e8ebef", "#888888"
"""What is no data. report.css has a dark twin for each, and finds them by these very values."""

ORDER = (
    "softmax", "linear", "deltanet", "gated_deltanet", "hola", "vla", "raven", "mamba2",
    "log_linear", "sliding_window", "blurry_window", "ela", "gla", "retnet", "based", "gsa",
    "abc", "kda", "mesanet", "preconditioned_gated_deltanet",
)  # fmt: skip
"""Who has which look: those that are often compared are far apart. Any other mechanism gets one by its name."""
_BY_RANK = (6, 5, 3, 2, 1, 0, 4, 7)
"""Colours by place in `ORDER`: black for softmax, the baseline."""

Chart = Any
"""An Altair chart of any composition."""

BYTES_LABEL = (
    "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : "
    "datum.value >= 1024 ? datum.value / 1024 + ' KiB' : datum.value + ' B'"
)
"""Vega expression: an axis value as B, KiB or MiB."""


@dataclass(frozen=True)
class Look:
    """What one family is drawn with."""

    colour: str
    shape: str


def looks(families: Mapping[str, str]) -> dict[str, Look]:
    """A look for each family, given with its mechanism: no two alike, and the same in every report.

    A mechanism has one look for ever; its first family wears it. Further families of it take, by their names, a look
    that is free, in a colour that is free as long as there is one.
    """
    places = [Look(COLOURS[_BY_RANK[i % 8]], SHAPES[(i + i // 8) % 8]) for i in range(64)]
    found: dict[str, Look] = {}
    owners = {mechanism: family for family, mechanism in reversed(list(families.items()))}
    # Those that are known first: a newcomer makes room for them, never they for it.
    ranked = sorted(owners, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    seeds = {owners[name]: ORDER.index(name) if name in ORDER else _number(name) for name in ranked}
    seeds |= {family: _number(family) for family in families if family not in seeds}
    for family, start in seeds.items():
        if start < len(ORDER) and families[family] in ORDER and owners[families[family]] == family:
            found[family] = places[start]
            continue
        used = {look.colour for look in found.values()}
        free = [look for look in (*places[start:], *places[:start]) if look not in found.values()] or places
        found[family] = next((look for look in free if look.colour not in used), free[0])
    return {family: found[family] for family in families}


def _number(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 64


LOOK: dict[str, dict[str, Any]] = {
    "axis": {
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridColor": GRID,
        "domainColor": AXIS,
        "tickColor": AXIS,
    },
    "legend": {
        "labelFontSize": 11,
        "labelLimit": 260,
        "symbolSize": 80,
        "symbolOpacity": 1,
        "title": None,
        "orient": "bottom",
        "columns": 4,
    },
    "view": {"stroke": FRAME},
    "title": {"fontWeight": "normal"},
    "facet": {"spacing": 18},
}
"""What is set for all charts: sizes in pixels of the screen, which are points on paper."""


@dataclass(frozen=True)
class Figure:
    """A chart, what a reader who cannot see it is told, its caption, and its numbers.

    `table` is what the figure shows, a row a mark. `data` is what lies beneath where that is more than is drawn.
    """

    name: str
    title: str
    description: str
    caption: str
    chart: Chart
    width: int
    """About how wide it is drawn, in pixels: where captions wrap."""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    data: pd.DataFrame | None = None

    @functools.cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification, with the type sizes and greys of a paper's figure."""
        # How many rows a figure may hold is decided where it is drawn.
        with alt.data_transformers.disable_max_rows():
            spec = dict(self.chart.to_dict())
        given = spec.get("config", {})
        config = {**given, **{name: {**given.get(name, {}), **own} for name, own in LOOK.items()}}
        config |= {"font": "Helvetica, Arial, sans-serif", "padding": 8}
        return spec | {"background": "white", "config": config, "description": self.description}

    def spec_with_caption(self) -> dict[str, Any]:
        """The same with the caption under the chart: a picture that leaves its page still says what it is."""
        lines = textwrap.wrap(self.caption, self.width // 5)
        place = {"orient": "bottom", "anchor": "start", "offset": 14, "fontSize": 9.5, "color": GREY}
        return self.spec | {"title": {"text": lines, **place}}


def save(figure: Figure, folder: Path, formats: Sequence[str] = ("png", "svg", "pdf")) -> list[Path]:
    """Write `figure` with its caption into `folder` as png (3 pixels a point), svg, pdf or interactive html."""
    import vl_convert  # 0.1 s that only drawing needs

    spec, version = figure.spec_with_caption(), vega_lite_version()
    drawn = vl_convert.vegalite_to_svg(spec, vl_version=version)  # once: laying out is what takes time
    makers = {
        "png": lambda: vl_convert.svg_to_png(drawn, scale=3, ppi=72),
        "svg": lambda: drawn.encode(),
        "pdf": lambda: vl_convert.svg_to_pdf(drawn),
        "html": lambda: vl_convert.vegalite_to_html(spec, vl_version=version, bundle=True).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in formats:
        path = folder / f"{figure.name}.{form}"
        path.write_bytes(makers[form]())
        paths.append(path)
    return paths


def svg(figure: Figure) -> str:
    """The chart as SVG text, without its caption."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(figure.spec, vl_version=vega_lite_version()))


def vega_lite_version() -> str:
    """`6.4` from Altair's `v6.4.1`."""
    return ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
