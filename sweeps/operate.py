"""The commands that run sweeps and look at results: launch, resume, status, report, export, ui, sync, doctor.

Thin: each reads its arguments, calls one function of another room and prints what came back. Everything heavy is
imported inside the command that needs it, so that `sweep --help` stays fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runners.schema import Exit, Plan, Status, UserError
from runners.store import STORE_VARIABLE
from sweeps import again, reports, stores
from sweeps.types import show

if TYPE_CHECKING:
    from runners.driver import Summary, SweepStatus, TrialStatus
    from runners.overview import SearchStatus

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
        help="Folder that holds trials, ledger and MLflow's files.",
        show_default="./memsweep-runs; by name also one you launched in",
    ),
]
SpecArgument = Annotated[str, typer.Argument(help="Spec file, or the name of a shipped one.", show_default=False)]
NameArgument = Annotated[str, typer.Argument(help="Name of a sweep in the store.", show_default=False)]
ProfileOption = Annotated[str | None, typer.Option("--profile", "-p", help="Profile of the spec to apply.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="PATH=VALUE", help="Set one value of the spec; repeatable.")
]
OnlyOption = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="COND",
        help="Run or show only the trials that meet this: 'mechanism: hola, seed: [0, 1]' or mechanism=hola,seed=0.",
    ),
]
ExecutorOption = Annotated[
    str, typer.Option("--executor", help="ray, or inline: one after the other in this process, for debugging.")
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Trials at once.", show_default="one a CPU core, or one a GPU"),
]
UriOption = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        envvar="MEMSWEEP_TRACKING_URI",
        help="MLflow server or database.",
        show_default="SQLite in the store",
    ),
]
ForOption = Annotated[
    str | None,
    typer.Option(
        "--for", metavar="TIME", help="Stop at a checkpoint after 9m, 1.5h, ..., to be resumed (exit code 4)."
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Launch also what is estimated above its budget.")]
StaleOption = Annotated[
    str, typer.Option("--stale", help="Trials that other code than today's made: keep, or rerun them afresh.")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Run on this Ray cluster: HOST:PORT, or auto on one of its nodes.",
        show_default="RAY_ADDRESS, or this machine alone",
    ),
]
SharedOption = Annotated[
    str | None,
    typer.Option(
        "--shared",
        metavar="URL",
        help="Storage for nodes that do not see the store, as s3://bucket/folder. Kept in the store.",
        show_default="every node sees the store",
    ),
]
ReportOption = Annotated[bool, typer.Option("--report/--no-report", help="Write the report at the end.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands on the command line."""
    for command in (launch, resume, status, report, export, ui, sync, doctor):
        app.command()(command)


def launch(
    spec: SpecArgument,
    profile: ProfileOption = None,
    sets: SetOption = None,
    only: OnlyOption = None,
    store: StoreOption = None,
    executor: ExecutorOption = "ray",
    jobs: JobsOption = None,
    limit: ForOption = None,
    yes: YesOption = False,
    address: AddressOption = None,
    shared: SharedOption = None,
    tracking_uri: UriOption = None,
    stale: StaleOption = "keep",
    with_report: ReportOption = True,
) -> None:
    """Run what is missing of a sweep, then write its report. Again = top up."""
    from sweeps import plan as planning

    plan = planning.load(spec, profile=profile, sets=sets or [], only=only)
    missing = planning.not_there_yet(plan)
    if missing:
        raise UserError("this version cannot launch the sweep yet:\n" + "\n".join(f"  {line}" for line in missing))
    selected = planning.select(plan, only) if only else None
    folder, where = stores.here(store), (address, shared)
    _run(
        plan,
        selected,
        folder,
        executor,
        jobs,
        limit,
        tracking_uri,
        stale,
        yes=yes,
        with_report=with_report,
        where=where,
    )


def resume(
    name: NameArgument,
    failed: Annotated[bool, typer.Option("--failed", help="Only trials that failed.")] = False,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only trials that have not ended.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Both (the default).")] = False,
    only: OnlyOption = None,
    store: StoreOption = None,
    executor: ExecutorOption = "ray",
    jobs: JobsOption = None,
    limit: ForOption = None,
    yes: YesOption = False,
    address: AddressOption = None,
    shared: SharedOption = None,
    tracking_uri: UriOption = None,
    stale: StaleOption = "keep",
    with_report: ReportOption = True,
) -> None:
    """Go on with a sweep by its name, from any folder: its latest revision, from the store alone."""
    from runners import driver
    from runners.resources import remembered_jobs
    from runners.search import Searches
    from runners.store import Store
    from sweeps import plan as planning

    folder = stores.find(store, name)
    opened = Store.open(folder)
    revision, plan = opened.plan(name)
    jobs = jobs or remembered_jobs(opened.revision_folder(name, revision))
    sweep = driver.status(folder, name)[0]
    chosen = again.choose(sweep, failed=failed, unfinished=unfinished, everything=everything)
    part = chosen if failed or unfinished else None  # all: what is not planned yet too
    if only:
        view = Searches(plan, opened).view()
        selected = planning.select(view.plan, only)
        # Trainings of suggestions are no members of the plan; a condition takes those of the cells that it takes.
        cells = {member.cell for member in view.plan.members if member.trial.id in selected}
        selected |= {m.trial.id for m in view.members if m.role == "search" and m.cell in cells}
        part = selected if part is None else selected & part
    try:
        _run(
            plan,
            part,
            folder,
            executor,
            jobs,
            limit,
            tracking_uri,
            stale,
            yes=yes,
            with_report=with_report,
            failed=not unfinished,
            where=(address, shared),
        )
    except typer.Exit as end:
        if end.exit_code == Exit.OK and not only and again.left_failed(sweep, chosen):
            raise typer.Exit(Exit.FAILED) from end
        raise


def _run(
    plan: Plan,
    selected: frozenset[str] | None,
    store: Path,
    executor: str,
    jobs: int | None,
    limit: str | None,
    tracking_uri: str | None,
    stale: str,
    *,
    yes: bool,
    with_report: bool,
    failed: bool = True,
    where: tuple[str | None, str | None],
) -> None:
    if executor not in ("ray", "inline"):
        raise UserError(f"--executor {executor!r}: it is ray or inline")
    for_s = _seconds(limit)
    from runners import driver
    from sweeps import spending
    from sweeps.searches import Suggestions

    print(f"{plan.sweep}: {plan.question}" if plan.question else plan.sweep)
    for note in plan.notes:
        print(f"note: {note}")
    spending.check(plan, store, selected, jobs, yes=yes)
    stores.remember(store)
    summary = driver.launch(
        plan,
        store=store,
        executor=executor,
        jobs=jobs,
        only=selected,
        tracking_uri=tracking_uri,
        say=lambda line: print(line, flush=True),
        tty=sys.stdout.isatty(),
        for_s=for_s,
        failed=failed,
        address=where[0],
        shared=where[1],
        resolve=Suggestions(plan) if plan.searches else None,
        stale=stale,
    )
    _print_summary(summary)
    if with_report and summary.counts.get(Status.COMPLETE, 0) + summary.counts.get(Status.DIVERGED, 0):
        print("writing the report", flush=True)
        reports.show(reports.write(store, plan.sweep, None, tracking_uri))
    raise typer.Exit(summary.exit_code)


def _seconds(limit: str | None) -> float | None:
    from runners import durations

    try:
        return None if limit is None else durations.seconds(limit)
    except ValueError as error:
        raise UserError(f"--for: {error}") from error


def _print_summary(summary: Summary) -> None:
    counts = ", ".join(f"{n} {status}" for status, n in summary.counts.items() if n)
    done = f"ran {summary.ran} trials"
    if summary.evaluated:
        done += f", evaluated {summary.evaluated} more"
    print(f"\n{done} in {summary.seconds:.0f} s; {summary.skipped} were there already. Now: {counts or 'no trials'}")
    for failure in summary.failures:
        print(f"failed ({failure.kind}): {failure.cell}, seed {failure.seed}: {failure.error}\n  log: {failure.log}")
    if summary.stopped:
        goes_on = f"; `sweep resume {summary.sweep}` goes on" if summary.stopped.startswith("--for") else ""
        print(f"stopped: {summary.stopped}{goes_on}")
    if summary.backlog:
        print(f"MLflow is behind: {summary.backlog}")


def status(
    name: Annotated[str | None, typer.Argument(help="One sweep; all without it.", show_default=False)] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Follow it until Ctrl-C; lines into a pipe."),
    ] = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Where each sweep stands. Only reads: safe while a driver runs."""
    from runners import driver

    folder = stores.find(store, name)
    if watch and not as_json:
        from sweeps import follow

        follow.watch(folder, name)
        return
    while True:
        found = driver.status(folder, name)
        if as_json:
            print(json.dumps([asdict(sweep) for sweep in found], indent=1, default=str))
        else:
            for sweep in found:
                _print_status(sweep, trials=name is not None)
            if not found:
                print(f"no sweeps in {folder}")
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(2)


def _print_status(sweep: SweepStatus, *, trials: bool) -> None:
    counts = ", ".join(f"{n} {state}" for state, n in sweep.counts.items() if n)
    print(f"{sweep.sweep} (revision {sweep.revision}): {counts or 'no trials'}")
    for line in sweep.drivers:
        print(f"  driver: {line}")
    for found in sweep.searches:
        print(f"  {found.cell}: {_search_words(found)}")
    if sweep.backlog:
        print(f"  MLflow is behind: {sweep.backlog}")
    for line in again.failures(sweep):
        print(line)
    if trials:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("trial", "cell", "seed", "state", "step", "last"):
            table.add_column(column, justify="right" if column in ("seed", "step") else "left", overflow="fold")
        for trial in sorted(sweep.trials, key=lambda trial: trial.role):  # report trials first
            table.add_row(*_status_row(trial))
        # A pipe has no width to fit, and a cut cell name is of no use to grep.
        width = None if sys.stdout.isatty() else 200
        Console(width=width, highlight=False, markup=False).print(table)


def _status_row(trial: TrialStatus) -> tuple[str, ...]:
    state = trial.status + (f" ({trial.failure})" if trial.failure else "")
    step = "" if trial.step is None else f"{trial.step}/{trial.steps}" if trial.steps else str(trial.step)
    scores = [(name, value) for name, value in trial.metrics.items() if value is not None]
    last = trial.error or ", ".join(f"{name} {value:.4g}" for name, value in scores[:3])
    cell = trial.cell + (f" suggestion {trial.suggestion}" if trial.role == "search" else "")
    return trial.trial, cell, str(trial.seed), state, step, last


def _search_words(found: SearchStatus) -> str:
    """`search 7/16, 2 pruned`, and the winner once it is over."""
    words = f"search {found.ended}/{found.trials}"
    words += "".join(f", {n} {what}" for n, what in ((found.pruned, "pruned"), (found.refused, "refused")) if n)
    if found.winner is not None:
        values = ", ".join(f"{path} {show(value)}" for path, value in found.values.items())
        words += f"; suggestion {found.winner} won: {values}"
    return words


def report(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Sweeps in the store.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for it.", show_default="in the store")] = None,
    figures: Annotated[
        str, typer.Option("--figures", help="What figures are saved as beside it: of png, svg, pdf; or none.")
    ] = "png,svg,pdf",
    paper: Annotated[
        float | None,
        typer.Option(
            "--paper", min=1.5, max=20, help="Also save them so many inches wide, without captions, for a paper."
        ),
    ] = None,
    store: StoreOption = None,
    tracking_uri: UriOption = None,
) -> None:
    """Write the report of one sweep, or one of several: tables, figures, one self-contained HTML."""
    forms, names = reports.forms_of(figures), list(dict.fromkeys(names))
    if len(names) == 1:
        built = reports.write(stores.find(store, names[0]), names[0], out, tracking_uri, forms, paper)
    else:
        built = reports.write_together([(stores.find(store, name), name) for name in names], out, forms, paper)
    reports.show(built)


def export(
    name: NameArgument,
    form: Annotated[str, typer.Option("--format", "-f", help="csv, parquet, latex or md.")] = "csv",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File.", show_default="standard output")] = None,
    store: StoreOption = None,
) -> None:
    """Hand a sweep's results on: every trial as CSV or Parquet, the cells as LaTeX or Markdown."""
    from dashboards import export as exporting
    from runners.store import Store

    opened = Store.open(stores.find(store, name))
    revision, plan = opened.plan(name)
    data = exporting.export(plan, opened.root, form, revision)
    if out is None:
        if form == "parquet" and sys.stdout.isatty():
            raise UserError("Parquet is binary: give --out FILE, or pipe it")
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        try:
            out.write_bytes(data)
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror}", Exit.ENVIRONMENT) from error
        print(out)


def ui(
    store: StoreOption = None,
    port: Annotated[int | None, typer.Option("--port", help="Port.", show_default="5000, or a free one")] = None,
    tracking_uri: UriOption = None,
) -> None:
    """Open the MLflow UI on the store, on 127.0.0.1."""
    from dashboards import ui as uis
    from runners import summary_run, tracking
    from runners.store import Store

    folder = stores.find(store)
    line, extra = uis.command(folder, port, tracking_uri)
    address, opened = uis.address(line), Store.open(folder)
    try:
        views = {name: summary_run.view_path(opened, name, tracking_uri=tracking_uri) for name in opened.sweeps()}
    except Exception as error:  # what MLflow raises
        told = tracking.explain(error, tracking.resolve_uri(opened, tracking_uri), opened)
        raise UserError(f"MLflow: {told}", Exit.ENVIRONMENT) from error
    print(f"MLflow UI: {address} (Ctrl-C ends it; it takes some seconds to answer)")
    for name, view in views.items():
        if view:
            print(f"  {name}: {address}{view}")
    sys.stdout.flush()
    raise typer.Exit(subprocess.run(line, env={**os.environ, **extra}, check=False).returncode)


def sync(
    name: Annotated[str | None, typer.Argument(help="One sweep; all without it.", show_default=False)] = None,
    restore: Annotated[bool, typer.Option("--restore", help="Make runs again that were deleted in the UI.")] = False,
    store: StoreOption = None,
    tracking_uri: UriOption = None,
) -> None:
    """Rebuild MLflow from the ledger, or catch it up."""
    from runners import driver

    sent = driver.sync(
        stores.find(store, name),
        name,
        tracking_uri=tracking_uri,
        restore=restore,
        say=lambda line: print(line, flush=True),
    )
    for sweep, runs in sent.items():
        print(f"{sweep}: {runs} runs written")
    if not sent:
        print("nothing to send: the store has no sweeps yet")


def doctor(
    store: StoreOption = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the ledger anew from the trial folders.")] = False,
) -> None:
    """Check this installation, this machine and the store."""
    from runners import driver
    from sweeps import environment

    folder = stores.here(store)
    findings = [*environment.check(), *(driver.doctor(folder, rebuild=rebuild) if folder.exists() else [])]
    for found in findings:
        mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[found.level]
        print(f"{mark} {found.what}" + (f"\n        {found.remedy}" if found.remedy else ""))
    if not folder.exists():
        print(f"note    no store at {folder} yet: the first launch makes it")
    if any(found.level == "problem" for found in findings):
        raise typer.Exit(Exit.ENVIRONMENT)
