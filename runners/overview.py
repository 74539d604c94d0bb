"""A store looked at: what `sweep status` and `sweep doctor` show. Status only reads, also where it may not write."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runners import checkpoints
from runners.endings import where_diverged, why_pruned
from runners.ledger import Ledger, Row
from runners.mend import mend
from runners.owner import Owner
from runners.rungs import stands
from runners.schema import Finding, Member, Status, UserError
from runners.search import Searches, State
from runners.store import HEAD, HEAD_COPY, Store, is_torn, shared_filesystem

LOW_DISK_BYTES = 500 * 2**20


@dataclass(frozen=True)
class TrialStatus:
    """One line of `sweep status`. `step` and `metrics` are live while the trial runs, else those of its result.

    Without a result, `step` is that of the newest checkpoint; `error` of a diverged trial says where.
    """

    trial: str
    arm: str
    cell: str
    seed: int
    status: str
    attempt: int
    failure: str | None
    error: str | None
    step: int | None
    steps: int | None
    metrics: dict[str, float]
    log: Path | None
    role: str = "report"
    suggestion: int | None = None
    """Number of the suggestion that is trained here (role search), or that won (role report)."""


@dataclass(frozen=True)
class SearchStatus:
    """How far the search of one cell is. `winner` is its number once the search is over, `values` are the winner's."""

    cell: str
    ended: int
    trials: int
    pruned: int
    refused: int
    winner: int | None
    values: dict[str, Any]


@dataclass(frozen=True)
class SweepStatus:
    """What `sweep status NAME` shows. `backlog` says why MLflow lags, None if it does not."""

    sweep: str
    revision: int
    question: str
    counts: dict[str, int]
    trials: list[TrialStatus]
    drivers: list[str]
    backlog: str | None
    searches: list[SearchStatus] = field(default_factory=list)


def status(store: Path, sweep: str | None = None) -> list[SweepStatus]:
    """Where each sweep (or one) stands, from the ledger and the folders. Changes nothing."""
    opened = Store.open(store)
    if sweep is not None:
        opened.plan(sweep)  # an unknown name is told with those there are
    if not _has_ledger(opened):
        return [_sweep_status(opened, None, name) for name in ([sweep] if sweep else opened.sweeps())]
    ledger = Ledger.open(opened, read_only=True)
    try:
        return [_sweep_status(opened, ledger, name) for name in ([sweep] if sweep else opened.sweeps())]
    finally:
        ledger.close()


def _has_ledger(store: Store) -> bool:
    url = store.ledger_url()
    return not url.startswith("sqlite:///") or Path(url.removeprefix("sqlite:///")).exists()


def _sweep_status(store: Store, ledger: Ledger | None, sweep: str) -> SweepStatus:
    revision, plan = store.plan(sweep)
    rows = ledger.rows(sweep, revision) if ledger else {}
    view = Searches(plan, store).view()
    trials = [_trial_status(store, member, rows.get(member.trial.id)) for member in view.members]
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    holders = {row.owner for row in rows.values() if row.owner}
    drivers = [str(owner) for owner in (ledger.drivers() if ledger else []) if _is_alive(owner, holders)]
    problems = ledger.problems(sweep) if ledger else []
    backlog = problems[0] if problems else None
    searches = [_search_status(state) for state in view.states.values()]
    return SweepStatus(sweep, revision, plan.question, counts, trials, drivers, backlog, searches)


def _search_status(state: State) -> SearchStatus:
    winner = state.winner if state.is_over else None
    values = state.suggestions[winner].values if winner is not None else {}
    counts = state.count(Status.PRUNED), state.count("refused")
    return SearchStatus(state.search.cell, state.n_ended, state.search.trials, *counts, winner, values)


def _is_alive(owner: Owner, holders: set[str]) -> bool:
    return owner.uuid in holders and not owner.is_dead()


def _trial_status(store: Store, member: Member, row: Row | None) -> TrialStatus:
    """A result on disk counts even if no driver has taken it into the ledger yet."""
    trial_id = member.trial.id
    folder, result = store.trial_folder(trial_id), store.result(trial_id)
    attempt = row.attempt if row else store.last_attempt(trial_id)
    log = folder / "attempts" / str(attempt) / "log.txt" if attempt else None
    state = _state(store, member, row, result, log)
    step = steps = None
    metrics: dict[str, float] = {}
    if result is not None:
        step, metrics = result["step"], dict(result["metrics"])
        for part in member.slices:
            scores = (store.evaluation(trial_id, part.id) or {}).get("metrics", {})
            name = f"{part.set}/{part.label}" if part.label else part.set
            metrics = {f"{name}/{key}": value for key, value in scores.items() if key != "n"} | metrics
    elif state == Status.RUNNING and (live := store.progress(trial_id)) and live["attempt"] == attempt:
        step, steps, metrics = live["step"], live["steps"], live["metrics"]
    else:
        step = next(iter(checkpoints.steps(folder / "checkpoints")[-1:]), None)  # from where it will go on
        steps = (member.trial.train or {}).get("steps") if step is not None else None
    failure, error = (row.failure, row.error) if row and state == Status.FAILED else (None, None)
    if state == Status.PRUNED and result:
        error = why_pruned(result)
    if state == Status.DIVERGED and result:
        error = where_diverged(result)
    seed = member.trial.seed
    number = member.searched.number if member.searched is not None else None
    return TrialStatus(
        trial_id,
        member.arm,
        member.cell,
        seed,
        state.value,
        attempt,
        failure,
        error,
        step,
        steps,
        metrics,
        log,
        member.role,
        number,
    )


def _state(store: Store, member: Member, row: Row | None, result: dict[str, Any] | None, log: Path | None) -> Status:
    state = row.status if row else Status.INTERRUPTED if log else Status.PLANNED
    if state == Status.RUNNING:
        # A driver claims one trial more than it runs, so that no worker waits; a worker's first word is in the log.
        return state if log and log.exists() else Status.PLANNED
    if result is None or not stands(result, member.rungs):
        return Status.PLANNED if state.is_done else state  # its folder was taken away, or it goes on
    is_whole = result["status"] != Status.COMPLETE or not store.missing_slices(member.trial.id, member.slices)
    if is_whole:
        return Status(result["status"])
    return Status.FAILED if state == Status.FAILED else Status.PLANNED


def doctor(store: Path, *, rebuild: bool = False) -> list[Finding]:
    """Check a store's files against its ledger; with `rebuild` make the ledger, and a torn store.json, anew."""
    mended = mend(store) if rebuild else None
    opened = Store.open(store)
    shared = shared_filesystem(opened.root)
    on = f" on a {shared} file system, which machines can share" if shared else " on a local file system"
    found = [Finding("ok", f"store {opened.root}{on}, uuid {opened.uuid}")]
    if mended:
        found.append(mended)
    elif is_torn(opened.root):
        text = f"{opened.root / HEAD} is torn; its copy {HEAD_COPY} is read instead"
        found.append(Finding("note", text, "the next launch or `sweep doctor --rebuild` writes it again"))
    free = shutil.disk_usage(opened.root).free
    if free < LOW_DISK_BYTES:
        found.append(Finding("problem", f"only {free / 2**20:.0f} MiB are free", "make room, or move the store"))
    try:
        ledger = Ledger.open(opened)
    except UserError as error:
        return [*found, Finding("problem", str(error))]
    try:
        if rebuild:
            counted = ledger.rebuild(opened)
            numbers = ", ".join(f"{n} {what}" for what, n in counted.items())
            found.append(Finding("ok", f"ledger made again from the folders: {numbers}"))
        found += _check_drivers(ledger)
        found += [finding for sweep in opened.sweeps() for finding in _check_sweep(opened, ledger, sweep)]
    finally:
        ledger.close()
    return found


def _check_drivers(ledger: Ledger) -> list[Finding]:
    found = []
    for owner in ledger.drivers():
        if owner.is_dead():
            remedy = "the next launch or sync takes its trials over"
            found.append(Finding("note", f"a driver ended without a word: {owner}", remedy))
        else:
            found.append(Finding("note", f"a driver is at work, or was on another machine: {owner}"))
    return found


def _check_sweep(store: Store, ledger: Ledger, sweep: str) -> list[Finding]:
    revision, plan = store.plan(sweep)
    rows = ledger.rows(sweep, revision)
    found = []
    torn = lost = unknown = 0
    for member in Searches(plan, store).view().members:
        folder, row = store.trial_folder(member.trial.id), rows.get(member.trial.id)
        result = store.result(member.trial.id)
        torn += result is None and (folder / "result.json").exists()
        torn += sum(
            (folder / "evals" / f"{part.id}.json").exists()
            for part in store.missing_slices(member.trial.id, member.slices)
        )
        lost += result is None and row is not None and row.status.is_done
        unknown += result is not None and (row is None or not (row.status.is_done or row.owner))
    name = f"sweep {sweep}, revision {revision}"
    if torn:
        found.append(Finding("note", f"{name}: {torn} results cannot be read", "the next launch runs them again"))
    if lost:
        found.append(Finding("note", f"{name}: {lost} results are gone from the folders", "the next launch runs them"))
    if unknown:
        remedy = "the next launch or `sweep doctor --rebuild` takes them in"
        found.append(Finding("note", f"{name}: {unknown} results are not in the ledger", remedy))
    if plan.members and not rows:
        found.append(Finding("problem", f"{name} is not in the ledger", "run `sweep doctor --rebuild`"))
    if problems := ledger.problems(sweep):
        found.append(Finding("note", f"{name}: MLflow is behind: {problems[0]}"))
    return found or [Finding("ok", f"{name}: {len(plan.members)} trials, files and ledger agree")]
