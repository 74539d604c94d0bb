"""Figures for a paper: as wide as a column or a page, in type of 7 and 8 points, the caption as LaTeX beside them.

A figure is laid out anew, not shrunk: panels get smaller and the type keeps its size.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from dashboards import style
from dashboards.style import Figure

POINTS = 72
"""Of an inch; a pixel of a chart is one."""
DPI = 300
TYPE = {
    "axis": {"labelFontSize": 7, "titleFontSize": 8, "tickSize": 3, "labelPadding": 2},
    "legend": {"labelFontSize": 7, "symbolSize": 36, "rowPadding": 1, "columnPadding": 8, "offset": 6},
    "header": {"labelFontSize": 8, "labelPadding": 4},
    "facet": {"spacing": 10},
}
LOWEST = 0.55
"""Of a panel's height, what is kept at least."""
SMALL = 0.45
"""By how much the areas of marks shrink."""


def save(figure: Figure, folder: Path, inches: float) -> list[Path]:
    """Write `figure` into `folder`, `inches` wide, as pdf, svg and png (300 dots an inch), and its caption as tex."""
    import vl_convert

    drawn = _drawn(figure, inches * POINTS)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {form: folder / f"{figure.name}.{form}" for form in ("pdf", "svg", "png", "tex")}
    paths["svg"].write_text(drawn, encoding="utf-8")
    paths["pdf"].write_bytes(vl_convert.svg_to_pdf(drawn))
    paths["png"].write_bytes(vl_convert.svg_to_png(drawn, scale=DPI / POINTS, ppi=POINTS))
    paths["tex"].write_text(_latex(figure, inches), encoding="utf-8")
    return list(paths.values())


def _drawn(figure: Figure, width: float) -> str:
    """SVG `width` points wide: panels shrink until all of it fits, as titles and legends keep their size."""
    import vl_convert

    room = width / figure.width
    for _ in range(3):
        svg = str(
            vl_convert.vegalite_to_svg(_smaller(copy.deepcopy(figure.spec), room), vl_version=style.vega_lite_version())
        )
        found = _width(svg)
        if abs(found - width) < 2:
            break
        room *= max(0.3, 1 + (width - found) / (room * figure.width))
    # What is left of the way is a hair: the picture itself is set to the width that was asked for.
    scale = width / _width(svg)
    return re.sub(r'(<svg[^>]*?) width="([\d.]+)" height="([\d.]+)"', lambda m: _sized(m, scale), svg, count=1)


def _sized(found: re.Match[str], scale: float) -> str:
    return f'{found[1]} width="{float(found[2]) * scale:.2f}" height="{float(found[3]) * scale:.2f}"'


def _width(svg: str) -> float:
    found = re.search(r'<svg[^>]*? width="([\d.]+)"', svg)
    assert found is not None, "an SVG of Vega says how wide it is"
    return float(found[1])


def _smaller(spec: dict[str, Any], room: float) -> dict[str, Any]:
    """`spec` with views `room` times as large, small type, small marks and thin lines."""
    view = spec.get("spec", spec)
    before = view["width"]
    view["width"] = max(40, round(before * room))
    encodings = [layer["encoding"] for layer in view["layer"]]
    if not any(encoding.get("y", {}).get("type") == "nominal" for encoding in encodings):
        # Not as flat as they are narrow: rows of names keep their height, scores some of it.
        view["height"] = max(60, round(view["height"] * max(room, LOWEST)))
    for encoding in encodings:
        if isinstance(encoding.get("x", {}).get("value"), int | float):  # words beside the panel
            encoding["x"]["value"] += view["width"] - before
        for channel in ("x", "y"):
            axis = encoding.get(channel, {})
            if axis.get("title"):
                axis["title"] = axis["title"].removesuffix(" (log scale)")
    header = spec.get("facet", {}).get("header")
    if header:
        header |= {"labelFontSize": 8, "labelLimit": view["width"] + 20}
    for layer in view.get("layer", []):
        mark = layer["mark"]
        if isinstance(mark, dict):
            mark |= {"size": mark["size"] * SMALL} if mark.get("type") == "point" and "size" in mark else {}
            mark |= {"strokeWidth": mark["strokeWidth"] * 0.7} if "strokeWidth" in mark else {}
            mark |= {"fontSize": 6.5} if mark.get("type") == "text" else {}
    config = spec["config"]
    for part, values in TYPE.items():
        config[part] = config.get(part, {}) | values
    return spec | {"padding": 2}


def _latex(figure: Figure, inches: float) -> str:
    from dashboards.tex import escaped

    return (
        "\\begin{figure}\n\\centering\n"
        f"\\includegraphics[width={inches:g}in]{{{figure.name}.pdf}}\n"
        f"\\caption{{{escaped(figure.caption)}}}\n\\label{{fig:{figure.name.replace('_', '-')}}}\n\\end{{figure}}\n"
    )
