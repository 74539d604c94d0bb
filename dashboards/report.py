"""One self-contained report of a sweep: the question, the answer, the verdicts, figures, tables and provenance.

The HTML loads nothing: Vega and the data are inside, and each figure is there as SVG even where scripts do not run. The
Markdown, the tidy table as CSV and the figures as PNG, SVG and PDF lie beside it.
"""

from __future__ import annotations

import functools
import html
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from dashboards import cells, columns, searches, style, table, words
from dashboards.compare import Comparison, compare
from dashboards.figures import draw, main_metric, title
from dashboards.labels import bytes_text, effect_text, nearly, p_text, side, signed, verdict_text
from dashboards.outcome import outcome
from dashboards.stats import Verdict
from runners import store as stores
from runners.ledger import Ledger
from runners.schema import Plan, Status
from runners.search import Searches

HERE = Path(__file__).parent
LOOKS_FILE = "looks.json"


@dataclass(frozen=True)
class Report:
    """What `build` wrote. `answer` is the one sentence the report opens with; `files` are all files written."""

    html: Path
    files: tuple[Path, ...]
    answer: str
    counts: dict[str, int]
    warnings: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()


def build(plan: Plan, store_path: Path, revision: str, out: Path, looks: int = 1) -> Report:
    """Write the report of `plan` from the trial folders of the store into `out` (made if missing).

    `looks` is how often this sweep's results were read before seeds were added, this time included (`count_look`):
    p values are multiplied by it.
    """
    view = Searches(plan, stores.Store.open(store_path)).view()
    plan = view.plan
    results = table.load(plan, store_path, known(store_path, plan.sweep, int(revision)))
    comparisons = compare(plan, results, looks)
    found = cells.collect(plan, results)
    provenance = f"Sweep {plan.sweep}, spec {plan.spec_hash}, revision {revision}{_commits(results)}."
    figures = draw(plan, results, comparisons, provenance)
    out.mkdir(parents=True, exist_ok=True)
    files = [path for figure in figures for path in style.save(figure, out / "figures")]
    shown = _view(plan, results, comparisons, found, revision, looks, store_path)
    shown["searches"] = searches.rows(view.states)
    shown["figures"] = [
        {
            "name": figure.name,
            "title": figure.title,
            "description": figure.description,
            "caption": figure.caption,
            # Inside a page nothing may end the script element early.
            "spec": json.dumps(figure.spec()).replace("</", "<\\/"),
            "svg": style.svg(figure),
        }
        for figure in figures
    ]
    shown["vega"] = _vega() if figures else ""
    texts = {"report.html": _render("report.html.j2", shown), "report.md": _render("report.md.j2", shown)}
    warnings = tuple(filter(None, [shown["unfinished"], *shown["notes"]]))
    texts["report.json"] = outcome(plan, revision, shown["answer"], results.counts(), comparisons, warnings)
    texts["table.csv"] = columns.csv(columns.trials(plan, results))
    for name, text in texts.items():
        stores.write_text(out / name, text, durable=False)
    files += [out / name for name in texts]
    return Report(out / "report.html", tuple(files), shown["answer"], results.counts(), warnings, tuple(comparisons))


def known(store_path: Path, sweep: str, revision: int) -> dict[str, tuple[Status, str | None]]:
    """What the ledger knows of a revision's trials; nothing where the store has no ledger (yet)."""
    opened = stores.Store.open(store_path)
    url = opened.ledger_url()
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return {}
    ledger = Ledger.open(opened, read_only=True)
    try:
        return {trial: (row.status, row.error) for trial, row in ledger.rows(sweep, revision).items()}
    finally:
        ledger.close()


def count_look(store: stores.Store, sweep: str, revision: int) -> int:
    """Note that the results of `revision` are read now, and count the looks at this sweep, this one included.

    A look is a report after which seeds were added: reading the same seeds again, finishing an interrupted launch or
    adding settings is none. Reports of a sweep that has no result yet are not counted. A store that cannot be written
    keeps its count.
    """
    plan = Searches(store.plan(sweep, revision)[1], store).view().plan
    path = store.root / "sweeps" / sweep / LOOKS_FILE
    seen: list[list[int]] = stores.read_json(path) or []
    seeds = sorted({member.trial.seed for member in plan.members})
    if seeds in seen:
        return 1 + seen.index(seeds)
    if any(store.result(member.trial.id) is not None for member in plan.members):
        try:
            stores.write_json(path, [*seen, seeds])
        except OSError:
            return 1 + len(seen)
    return 1 + len(seen)


def _view(
    plan: Plan,
    results: table.Results,
    comparisons: Sequence[Comparison],
    found: Sequence[cells.Cell],
    revision: str,
    looks: int,
    store_path: Path,
) -> dict[str, Any]:
    """Everything the templates show, figures aside, as plain values."""
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
        "cells": [_cell_row(cell) for cell in found],
        "failed": failed[["cell", "seed", "trial", "error"]].to_dict("records"),
        "diverged": diverged[["cell", "seed", "trial", "diverged"]].to_dict("records"),
        "counts": results.counts(),
        "n_trials": len(plan.members),
        "provenance": _provenance(plan, results, revision),
        "differing": words.stamps_that_differ(plan, results),
        "rerun": _rerun(plan, revision, store_path),
        "source": plan.source,
        "spec": json.dumps(plan.spec, indent=2, ensure_ascii=False),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
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
    bad = {s: n for s, n in cell.counts.items() if s != Status.COMPLETE}
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


def _commits(results: table.Results) -> str:
    found = (str(stamp["commit"]).partition("+") for stamp in results.stamps.values() if stamp.get("commit"))
    # "+changed" says that the code was not what the commit holds: it must not be cut off.
    commits = sorted({commit[:12] + plus + mark for commit, plus, mark in found})
    return f", commit {' and '.join(commits)}" if commits else ""


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


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network, safe inside a script element."""
    import vl_convert

    # Its type stub asks for a snippet; without one the bundle offers vegaEmbed to the page.
    bundle = vl_convert.javascript_bundle(vl_version=style.vega_lite_version())  # type: ignore[call-arg]
    return str(bundle).replace("</script", "<\\/script")


def _render(template: str, view: dict[str, Any]) -> str:
    loader = jinja2.FileSystemLoader(HERE)
    is_html = template.endswith(".html.j2")
    environment = jinja2.Environment(loader=loader, autoescape=is_html, trim_blocks=True, lstrip_blocks=True)
    environment.filters["md"] = _markdown
    files = {name: (HERE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js")} if is_html else {}
    return environment.get_template(template).render(
        **view, style=files.get("report.css", ""), script=files.get("report.js", "")
    )


def _markdown(value: object) -> str:
    """Text safe in a Markdown table cell."""
    return html.escape(str(value), quote=False).replace("|", "\\|").replace("\n", " ")
