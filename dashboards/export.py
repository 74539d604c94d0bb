"""Hand a sweep's results on: every trial as CSV or Parquet, the cells as a LaTeX or Markdown table.

The cell tables have a row for each series (arm and its varying settings) and a column for each task setting: what goes
into a paper. Their caption says how the numbers were made, so that they keep their meaning outside.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dashboards import cells, table
from dashboards.figures import main_metric, title
from dashboards.labels import bytes_text
from runners.schema import Plan, UserError
from runners.search import Searches
from runners.store import Store

FORMATS = ("csv", "parquet", "latex", "md")


def export(plan: Plan, store: Path, format: str) -> bytes:
    """The results of `plan` in `format`, one of `FORMATS`. Raises `UserError` for an unknown one."""
    if format not in FORMATS:
        raise UserError(f"--format {format}: not a format; choose one of {', '.join(FORMATS)}")
    plan = Searches(plan, Store.open(store)).view().plan
    results = table.load(plan, store)
    if format == "csv":
        return results.members.to_csv(index=False).encode()
    if format == "parquet":
        return _parquet(results)
    found = cells.collect(plan, results)
    head, rows = _pivot(found)
    return (_latex if format == "latex" else _md)(head, rows, caption(plan, found)).encode()


def caption(plan: Plan, found: Sequence[cells.Cell]) -> str:
    """What the numbers of the cell table are."""
    counts = sorted({cell.main.n for cell in found})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"{title('/'.join(main_metric(plan))).capitalize()}, mean over seeds (n = {n}) ± half of the 95 % t interval; "
        "where seeds differ by more than half the metric's range, how many solved it. A set's slices weigh the same. "
        f"Diverged trials score chance. Sweep {plan.sweep}, spec {plan.spec_hash}."
    )


def _parquet(results: table.Results) -> bytes:
    frame = results.members.copy()
    for name in frame:
        # Parquet has one type a column; a path may be a word for one arm and a number for another.
        values = frame[name].dropna()
        if values.map(type).nunique() > 1 or values.map(lambda v: isinstance(v, list | dict)).any():
            frame[name] = [None if v is None or v is pd.NA or v != v else str(v) for v in frame[name]]
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


def _pivot(found: Sequence[cells.Cell]) -> tuple[list[str], list[list[str]]]:
    """Rows are series, columns task settings; the state has its own column, a range where it depends on the task."""
    conditions = list(dict.fromkeys(cell.condition for cell in found))
    places = {(cell.series, cell.condition): cell for cell in found}
    rows = []
    for series in dict.fromkeys(cell.series for cell in found):
        own = [places.get((series, condition)) for condition in conditions]
        states = sorted({cell.state_bytes for cell in own if cell})
        state = " to ".join(bytes_text(size) for size in dict.fromkeys((states[0], states[-1])))
        rows.append([series, state, *("–" if cell is None else cells.plus_minus(cell.main) for cell in own)])
    return ["", "state", *(condition or "score" for condition in conditions)], rows


def _md(head: list[str], rows: list[list[str]], note: str) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines) + f"\n\n{note}\n"


def _latex(head: list[str], rows: list[list[str]], note: str) -> str:
    """A booktabs table; needs \\usepackage{booktabs}."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(note)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(map(_tex, head)) + r" \\",
        r"\midrule",
        *(" & ".join(map(_tex, row)) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
_TEX |= {char: "\\" + char for char in "&%$#_{}"} | {"−": "$-$", "·": r"$\cdot$"}


def _tex(text: str) -> str:
    return re.sub("|".join(map(re.escape, _TEX)), lambda found: _TEX[found[0]], text)
