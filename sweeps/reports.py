"""Writing reports: where they go, what figures are saved as, what is printed. The command is in operate.py."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runners.schema import Exit, Plan, UserError

if TYPE_CHECKING:
    from dashboards.report import Report, Source
    from runners.store import Store

FORMS = ("png", "svg", "pdf")
TOGETHER = "reports"
"""Folder of a store for the reports of several sweeps."""


def forms_of(text: str) -> tuple[str, ...]:
    """`png,pdf` as the forms that figures are saved in; `none` saves none beside the page."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    for name in names:
        if name not in FORMS:
            near = difflib.get_close_matches(name, FORMS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"--figures {text}: {name} is no form of a figure; choose of {', '.join(FORMS)}, or none{hint}"
            )
    return tuple(dict.fromkeys(names))


def write(
    store: Path,
    name: str,
    out: Path | None,
    tracking_uri: str | None,
    forms: Sequence[str] = FORMS,
    paper: float | None = None,
) -> Report:
    """Build the report of a sweep's latest revision and hang it on the sweep's summary run."""
    from runners import summary_run, tracking
    from runners.store import Store

    opened = Store.open(store)
    revision, plan = opened.plan(name)
    folder = out or opened.revision_folder(name, revision) / "report"
    built = _build([_source(opened, plan, revision)], folder, forms, paper)
    problem = summary_run.log_report(opened, plan, revision, folder, tracking_uri=tracking_uri)
    if problem:
        again = tracking.command(opened, tracking.resolve_uri(opened, tracking_uri), "report", name)
        print(f"the report is not in MLflow: {problem}; {again} tries again")
    return built


def write_together(
    found: Sequence[tuple[Path, str]], out: Path | None, forms: Sequence[str] = FORMS, paper: float | None = None
) -> Report:
    """One report of several sweeps, each given with its store; it belongs to none of their summary runs."""
    from runners.store import Store

    sources = []
    for store, name in found:
        opened = Store.open(store)
        revision, plan = opened.plan(name)
        sources.append(_source(opened, plan, revision))
    folder = out or found[0][0] / TOGETHER / "+".join(name for _, name in found)
    return _build(sources, folder, forms, paper)


def show(built: Report) -> None:
    """Print what to beware of, the answer, and where the report is."""
    for warning in built.warnings:
        print(f"note: {warning}")
    print(f"\n{built.answer}\n\nreport: {built.html}")


def _source(store: Store, plan: Plan, revision: int) -> Source:
    from dashboards import report

    return report.Source(plan, store.root, f"{revision:04d}", report.count_look(store, plan.sweep, revision))


def _build(sources: Sequence[Source], folder: Path, forms: Sequence[str], paper: float | None) -> Report:
    from dashboards import report

    try:
        return report.build_all(sources, folder, forms, paper)
    except OSError as error:
        names = " ".join(source.plan.sweep for source in sources)
        raise UserError(
            f"cannot write the report in {folder}: {error.strerror or error} ({error.filename or folder}). "
            f"`sweep report {names} --out FOLDER` writes it elsewhere",
            Exit.ENVIRONMENT,
        ) from error
