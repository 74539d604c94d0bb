"""One self-contained report of one or several sweeps: question, answer, verdicts, figures, tables, provenance.

The HTML loads nothing: Vega and the data are inside, and each figure is there as SVG even where scripts do not run. The
Markdown, the tidy table as CSV, the figures as PNG, SVG and PDF, and what is too much for a page as Parquet lie beside
it. Sweeps that share a report share no statistics: p values are adjusted within each.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from dashboards import columns, page, style, table
from dashboards import paper as for_paper
from dashboards.compare import Comparison, compare
from dashboards.figures import draw
from dashboards.kept import kept_text
from dashboards.outcome import outcome
from dashboards.style import Figure
from runners import store as stores
from runners.ledger import Ledger
from runners.schema import Plan, Status
from runners.search import Searches

HERE = Path(__file__).parent
LOOKS_FILE = "looks.json"
FORMS = ("png", "svg", "pdf")
"""What figures are saved as."""


@dataclass(frozen=True)
class Report:
    """What `build` wrote. `answer` is the one sentence the report opens with; `files` are all files written."""

    html: Path
    files: tuple[Path, ...]
    answer: str
    counts: dict[str, int]
    warnings: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True)
class Source:
    """A sweep to report on.

    `looks` is how often its results were read before seeds were added, this time included (`count_look`): p values are
    multiplied by it.
    """

    plan: Plan
    store: Path
    revision: str
    looks: int = 1


def build(
    plan: Plan, store_path: Path, revision: str, out: Path, looks: int = 1, forms: Sequence[str] = FORMS
) -> Report:
    """Write the report of `plan` from the trial folders of the store into `out` (made if missing).

    `forms` is what figures are saved as beside the page: of png, svg, pdf.
    """
    return build_all([Source(plan, store_path, revision, looks)], out, forms)


def build_all(sources: Sequence[Source], out: Path, forms: Sequence[str] = FORMS, paper: float | None = None) -> Report:
    """One report of all `sources`, in their order; what lies beside it is in a folder a sweep if there are several.

    With `paper`, a width in inches, figures are saved for a paper too (`dashboards.paper`).
    """
    out.mkdir(parents=True, exist_ok=True)
    alone = len(sources) == 1
    parts = [_part(source, out, "" if alone else f"{source.plan.sweep}/", forms, paper) for source in sources]
    shown = {
        "sweeps": [part.shown for part in parts],
        "vega": _vega() if any(part.shown["figures"] for part in parts) else "",
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    texts = {"report.html": _render("report.html.j2", shown), "report.md": _render("report.md.j2", shown)}
    for name, text in texts.items():
        stores.write_text(out / name, text, durable=False)
    answers = [part.shown["answer"] if alone else f"{part.shown['sweep']}: {part.shown['answer']}" for part in parts]
    warned = [(part.shown["sweep"], warning) for part in parts for warning in part.warnings]
    return Report(
        out / "report.html",
        (*(path for part in parts for path in part.files), *(out / name for name in texts)),
        "\n".join(answers),
        {s: sum(p.counts.get(s, 0) for p in parts) for s in dict.fromkeys(s for p in parts for s in p.counts)},
        tuple(warning if alone else f"{sweep}: {warning}" for sweep, warning in warned),
        tuple(comparison for part in parts for comparison in part.comparisons),
    )


@dataclass(frozen=True)
class _Part:
    """One sweep of a report: what the templates show, and what was written beside them."""

    shown: dict[str, Any]
    files: tuple[Path, ...]
    counts: dict[str, int]
    warnings: tuple[str, ...]
    comparisons: tuple[Comparison, ...]


def _part(source: Source, out: Path, folder: str, forms: Sequence[str], paper: float | None) -> _Part:
    view = Searches(source.plan, stores.Store.open(source.store)).view()
    plan, revision = view.plan, source.revision
    results = table.load(plan, source.store, known(source.store, plan.sweep, int(revision)))
    comparisons = compare(plan, results, source.looks)
    provenance = f"Sweep {plan.sweep}, spec {plan.spec_hash}, revision {revision}{page.commits(results)}."
    figures = draw(plan, results, comparisons, provenance, view.states)
    files = _save(figures, out, f"{folder}figures", forms)
    if paper is not None:
        files += [path for figure in figures for path in for_paper.save(figure, out / folder / "paper", paper)]
    shown = page.view(plan, results, comparisons, view.states, revision, source.looks, source.store)
    shown["figures"] = page.figure_rows(figures, f"{folder}figures", forms)
    # Ids of a page are one of a kind.
    shown["prefix"] = folder.replace("/", "-")
    shown["folder"] = folder
    warnings = tuple(filter(None, [shown["unfinished"], *shown["notes"]]))
    texts = {
        "report.json": outcome(plan, revision, shown["answer"], results.counts(), comparisons, warnings),
        "table.csv": columns.csv(columns.trials(plan, results)),
    }
    for name, text in texts.items():
        stores.write_text(out / folder / name, text, durable=False)
        files.append(out / folder / name)
    return _Part(shown, tuple(files), results.counts(), warnings, tuple(comparisons))


def _save(figures: Sequence[Figure], out: Path, folder: str, forms: Sequence[str]) -> list[Path]:
    files = [path for figure in figures for path in style.save(figure, out / folder, forms)]
    for figure in figures:
        for name in page.beside(figure, folder):
            rows = figure.table if figure.data is None else figure.data.drop(columns="x", errors="ignore")
            (out / folder).mkdir(parents=True, exist_ok=True)
            rows.to_parquet(out / name, index=False)
            files.append(out / name)
    return files


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


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network, safe inside a script element."""
    import vl_convert

    version = style.vega_lite_version()

    def bundle() -> str:
        # Its type stub asks for a snippet; without one the bundle offers vegaEmbed to the page.
        return str(vl_convert.javascript_bundle(vl_version=version))  # type: ignore[call-arg]

    return kept_text(f"vega-{version}-{metadata.version('vl-convert-python')}.js", bundle).replace(
        "</script", "<\\/script"
    )


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
