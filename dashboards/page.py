"""What a report's templates show of one sweep, as plain values."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dashboards import cells, searches, style, table, words
from dashboards.about import main_metric
from dashboards.compare import Comparison
from dashboards.figures import title
from dashboards.labels import bytes_text, effect_text, nearly, p_text, side, signed, verdict_text
from dashboards.stats import Verdict
from dashboards.style import Figure
from runners.schema import Plan, Status
from runners.search import State

MAX_TABLE_ROWS = 200
"""Of a figure's own table: the rest lies in a file beside the page."""
MAX_CELLS = 1_000
"""Of the table of cells in the page."""
MAX_BAD = 100
"""Failed and diverged trials that are listed one by one."""


def view(
    plan: Plan,
    results: table.Results,
    comparisons: Sequence[Comparison],
    states: Mapping[str, State],
    revision: str,
    looks: int,
    store_path: Path,
) -> dict[str, Any]:
    """Everything the templates show, figures aside."""
    found = cells.collect(plan, results)
    rows = results.members
    failed = rows[rows["status"] == Status.FAILED]
    diverged = rows[rows["status"] == Status.DIVERGED]
    return {
        "sweep": plan.sweep,
        "question": plan.question,
        "answer": words.answer(plan, results, comparisons),
        "described": words.described(plan, found),
        "unfinished": words.unfinished(plan, results),
        "notes": words.notes(plan, results, comparisons, found, looks),
        "tests": [_test_row(c) for c in comparisons],
        "single": len(comparisons) == 1,
        "looks": looks,
        "main": title("/".join(main_metric(plan))),
        "columns": list(found[0].scores) if found else [],
        "cells": [_cell_row(cell) for cell in found[:MAX_CELLS]],
        "cells_left_out": max(0, len(found) - MAX_CELLS),
        "failed": failed[["cell", "seed", "trial", "error"]].head(MAX_BAD).to_dict("records"),
        "diverged": diverged[["cell", "seed", "trial", "diverged"]].head(MAX_BAD).to_dict("records"),
        "bad_left_out": max(0, len(failed) - MAX_BAD) + max(0, len(diverged) - MAX_BAD),
        "searches": searches.rows(states),
        "kernels": kernel_rows(results),
        "counts": results.counts(),
        "n_trials": len(plan.members),
        "provenance": _provenance(plan, results, revision),
        "differing": words.stamps_that_differ(plan, results),
        "rerun": _rerun(plan, revision, store_path),
        "source": plan.source,
        "spec": json.dumps(plan.spec, indent=2, ensure_ascii=False),
    }


def _test_row(found: Comparison) -> dict[str, Any]:
    test = found.test
    tone = {Verdict.A_BETTER: "found", Verdict.B_BETTER: "found", Verdict.NO_DIFFERENCE: "same"}
    show = nearly if test.scale == "ratio" else signed
    return {
        "a": side(test.a),
        "b": side(test.b),
        "on": f"{test.set} {test.metric}" + (f" at step {test.step}" if test.step is not None else ""),
        "mean_a": nearly(found.mean_a),
        "mean_b": nearly(found.mean_b),
        "effect": ("× " if test.scale == "ratio" else "") + show(found.effect),
        "interval": "–" if found.low is None else f"{show(found.low)} to {show(found.high)}",
        "text": effect_text(found),
        "sd": "" if found.effect_sd is None else f"{signed(found.effect_sd, 2)} seed sd",
        "margin": "" if test.margin is None else f"{test.margin:g}",
        "p": p_text(found.p),
        "p_adjusted": p_text(found.p_adjusted),
        "pairs": f"{len(found.pairs)} of {len(test.pairs)}",
        "diverged": found.n_diverged,
        "verdict": verdict_text(found),
        "tone": tone.get(found.verdict, "open"),
        "reason": found.reason,
        "needs": found.needs,
        "blocks": [{"block": block or "all", "effect": show(value)} for block, value in found.blocks.items()],
    }


def _cell_row(cell: cells.Cell) -> dict[str, Any]:
    main, label = cell.main, ""
    if not main.n:  # another task than the one that the sweep is about may have other metrics
        column, main = next(((c, s) for c, s in cell.scores.items() if s.n), ("", main))
        label = f"{title(column)} " if column else ""
    bad = {str(s): n for s, n in cell.counts.items() if s != Status.COMPLETE}
    if not label and (odd := cell.counts.get(Status.COMPLETE, 0) - main.n) > 0:
        bad["without a finite score"] = odd
    return {
        "name": cell.name,
        "series": cell.series,
        "condition": cell.condition,
        "state": cell.state_bytes,
        "state_text": bytes_text(cell.state_bytes),
        "params": cell.n_params,
        "n": f"{main.n} of {cell.planned}" if main.n != cell.planned else f"{main.n}",
        "mean": cell.main.mean,
        "mean_text": label + nearly(main.mean),
        "median": cell.main.median,
        "median_text": nearly(main.median),
        "interval": cells.interval_text(main),
        "seeds": " ".join(nearly(v) for v in main.values),
        "others": [{"value": s.mean, "text": cells.plus_minus(s)} for s in list(cell.scores.values())[1:]],
        "bad": ", ".join(f"{n} {status}" for status, n in bad.items()),
    }


def commits(results: table.Results) -> str:
    """`, commit 0123abc`: of all trials; empty where no trial knows."""
    found = (str(stamp["commit"]).partition("+") for stamp in results.stamps.values() if stamp.get("commit"))
    # "+changed" says that the code was not what the commit holds: it must not be cut off.
    names = sorted({commit[:12] + plus + mark for commit, plus, mark in found})
    return f", commit {' and '.join(names)}" if names else ""


def figure_rows(figures: Sequence[Figure], folder: str, forms: Sequence[str]) -> list[dict[str, Any]]:
    """Figures as the templates show them; their files lie in `folder`, seen from the page, in `forms`."""
    return [
        {
            "name": figure.name,
            "title": figure.title,
            "description": figure.description,
            "caption": figure.caption,
            # Inside a page nothing may end the script element early.
            "spec": json.dumps(figure.spec, separators=(",", ":")).replace("</", "<\\/"),
            "svg": style.svg(figure),
            "picture": f"{folder}/{figure.name}.png" if "png" in forms else "",
            "files": ", ".join(filter(None, [_files(figure, folder, forms), *beside(figure, folder)])),
            "head": list(map(str, figure.table.columns)),
            "rows": _texts(figure.table.head(MAX_TABLE_ROWS)),
            "n_rows": len(figure.table),
        }
        for figure in figures
    ]


def _files(figure: Figure, folder: str, forms: Sequence[str]) -> str:
    return f"{folder}/{figure.name}." + ", .".join(forms) if forms else ""


def beside(figure: Figure, folder: str) -> list[str]:
    """The Parquet file of a figure, where the page does not hold all of its numbers."""
    whole = figure.data is None and len(figure.table) <= MAX_TABLE_ROWS
    return [] if whole else [f"{folder}/{figure.name}.parquet"]


def _texts(rows: pd.DataFrame) -> list[list[str]]:
    def text(value: Any) -> str:
        if isinstance(value, float):
            whole = value.is_integer() and abs(value) >= 1
            return f"{value:,.0f}" if whole else nearly(value)
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return [list(map(text, row)) for row in rows.astype(object).to_numpy().tolist()]


def kernel_rows(results: table.Results) -> list[dict[str, Any]]:
    """What trials measured of their ops against fp64, worst case by op and implementation."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for found in results.kernels.values():
        for row in found:
            here = rows.setdefault(
                (row["op"], row.get("impl", "")),
                {
                    "op": row["op"],
                    "impl": row.get("impl", "–"),
                    "trials": 0,
                    "error": math.nan,
                    "differ": 0,
                    "problem": "",
                },
            )
            here["trials"] += 1
            here["error"] = max(
                row.get("error", math.nan), here["error"], key=lambda e: -math.inf if math.isnan(e) else e
            )
            here["differ"] += row.get("repeatable") is False
            here["problem"] = here["problem"] or row.get("problem", "")
    return [row | {"error": "–" if math.isnan(row["error"]) else f"{row['error']:.1e}"} for row in rows.values()]


def _provenance(plan: Plan, results: table.Results, revision: str) -> list[tuple[str, str]]:
    """Where the numbers come from, line by line."""
    out = [("sweep", plan.sweep), ("spec hash", plan.spec_hash), ("revision", revision)]
    for name in table.STAMP_FIELDS:
        values = sorted({str(stamp[name]) for stamp in results.stamps.values() if stamp.get(name) is not None})
        if values:
            out.append((name, ", ".join(values)))
    hours = float(results.members.drop_duplicates("trial")["wall_s"].fillna(0).sum()) / 3600
    return [*out, ("time of all trials", f"{hours:.2f} hours")]


def _rerun(plan: Plan, revision: str, store_path: Path) -> list[str]:
    """The commands that run what is missing and write this report again."""
    spec = store_path / "sweeps" / plan.sweep / revision / "spec.yaml"
    _, _, profile = plan.sweep.partition("@")
    launch = f"sweep launch {_quoted(spec)}" + (f" --profile {profile}" if profile else "")
    return [f"{launch} --store {_quoted(store_path)}", f"sweep report {plan.sweep} --store {_quoted(store_path)}"]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
