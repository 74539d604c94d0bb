"""How every figure looks and how it is saved: colours, type sizes, captions, formats."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#B8A800")
"""Okabe and Ito's palette, the yellow darkened to be read on white."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
GREY = "#5f6670"

Chart = Any
"""An Altair chart of any composition."""

BYTES_LABEL = (
    "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : "
    "datum.value >= 1024 ? datum.value / 1024 + ' KiB' : datum.value + ' B'"
)
"""Vega expression: an axis value as B, KiB or MiB."""


@dataclass(frozen=True)
class Figure:
    """A chart, what a reader who cannot see it is told, and its caption."""

    name: str
    title: str
    description: str
    caption: str
    chart: Chart
    width: int
    """About how wide it is drawn, in pixels: where captions wrap."""

    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification."""
        return dict(_dressed(self.chart, self.description).to_dict())

    def spec_with_caption(self) -> dict[str, Any]:
        """The same with the caption under the chart: a picture that leaves its page still says what it is."""
        lines = textwrap.wrap(self.caption, self.width // 5)
        title = alt.TitleParams(lines, orient="bottom", anchor="start", offset=14, fontSize=9.5, color=GREY)
        return dict(_dressed(self.chart.properties(title=title), self.description).to_dict())


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

    return str(vl_convert.vegalite_to_svg(figure.spec(), vl_version=vega_lite_version()))


def vega_lite_version() -> str:
    """`6.4` from Altair's `v6.4.1`."""
    return ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def _dressed(chart: Chart, description: str) -> Chart:
    """The chart with the type sizes and greys of a paper's figure."""
    font = "Helvetica, Arial, sans-serif"
    return (
        chart.properties(description=description, background="white")
        .configure(font=font, padding=8)
        .configure_axis(
            labelFontSize=11,
            titleFontSize=12,
            titleFontWeight="normal",
            gridColor="#e6e8eb",
            domainColor="#888",
            tickColor="#888",
        )
        .configure_legend(
            labelFontSize=11, labelLimit=260, symbolSize=80, symbolOpacity=1, title=None, orient="bottom", columns=4
        )
        .configure_view(stroke="#cfd4da")
        .configure_title(fontWeight="normal")
        .configure_facet(spacing=18)
    )
