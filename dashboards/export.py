"""Hand a sweep's results on: every trial as CSV or Parquet, the cells as a LaTeX or Markdown table.

The files of trials have the columns and types of `dashboards.columns`. The tables of cells are those of
`dashboards.pivot`; their caption says how the numbers were made, so that they keep their meaning outside.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from dashboards import columns, table
from dashboards.pivot import Entry, Pivot, pivot
from dashboards.report import known
from dashboards.tex import escaped
from runners.schema import Plan, UserError
from runners.search import Searches
from runners.store import Store

FORMATS = ("csv", "parquet", "latex", "md")


def export(plan: Plan, store: Path, format: str, revision: int | None = None) -> bytes:
    """The results of `plan` in `format`, one of `FORMATS`. Raises `UserError` for an unknown one.

    With the plan's `revision`, statuses that only the ledger knows are told (running, pruned, killed).
    """
    if format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--format {format}: not a format; choose one of {', '.join(FORMATS)}{hint}")
    plan = Searches(plan, Store.open(store)).view().plan
    results = table.load(plan, store, None if revision is None else known(store, plan.sweep, revision))
    if format in ("csv", "parquet"):
        frame = columns.trials(plan, results)
        return columns.csv(frame).encode() if format == "csv" else _parquet(frame)
    found = pivot(plan, results)
    note = caption(plan, found)
    return (_latex(plan, found, note) if format == "latex" else _md(found, note)).encode()


def caption(plan: Plan, found: Pivot) -> str:
    """What the numbers of the cell table are."""
    low, high = found.seeds
    n = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{found.what.capitalize()}, mean over seeds (n = {n}) ± half of the 95 % t interval; where seeds differ by "
        "more than half the metric's range, how many solved it. A set's slices weigh the same. Diverged trials score "
        "chance. "
        f"{found.bold} Sweep {plan.sweep}, spec {plan.spec_hash}."
    )


def _parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


def _md(found: Pivot, note: str) -> str:
    def line(entries: list[str]) -> str:
        return "| " + " | ".join(entries) + " |"

    rows = [[_strong(entry, lambda text: text.replace("|", "\\|"), "**{}**") for entry in row] for row in found.rows]
    head = [name.replace("|", "\\|") for name in found.head]
    return "\n".join(map(line, [head, ["---"] * len(head), *rows])) + f"\n\n{note}\n"


def _latex(plan: Plan, found: Pivot, note: str) -> str:
    """A booktabs table; needs \\usepackage{booktabs}."""
    label = "".join(char if char.isascii() and char.isalnum() else "-" for char in plan.sweep)
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(note)}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(found.head) - 1)}}}",
        r"\toprule",
        " & ".join(map(escaped, found.head)) + r" \\",
        r"\midrule",
        *(" & ".join(_strong(entry, escaped, r"\textbf{{{}}}") for entry in row) + r" \\" for row in found.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _strong(entry: Entry, escape: Callable[[str], str], bold: str) -> str:
    return bold.format(escape(entry.text)) if entry.is_best else escape(entry.text)
