"""Launch a plan on a store, look at a store, bring MLflow up to date: the functions behind the command line."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

from sqlalchemy.exc import OperationalError

from runners import places, tracking
from runners.budget import Budget
from runners.launching import Launch, Say
from runners.ledger import Ledger
from runners.overview import SweepStatus, TrialStatus, doctor, status
from runners.owner import Owner
from runners.redact import redact
from runners.resources import Share, share
from runners.schema import Exit, Plan, UserError
from runners.search import Resolve, Searches
from runners.stale import CHOICES as STALE_CHOICES
from runners.store import Store
from runners.summary import Failed, Summary
from runners.survey import survey

__all__ = ["Failed", "Say", "Summary", "SweepStatus", "TrialStatus", "doctor", "launch", "status", "sync"]


def launch(
    plan: Plan,
    *,
    store: Path,
    executor: str = "ray",
    jobs: int | None = None,
    only: frozenset[str] | None = None,
    tracking_uri: str | None = None,
    failed: bool = True,
    say: Say = print,
    tty: bool = False,
    for_s: float | None = None,
    resolve: Resolve | None = None,
    stale: str = "keep",
    address: str | None = None,
    shared: str | None = None,
) -> Summary:
    """Run what is missing of `plan` and return when every selected trial has ended, here or in another driver.

    `only` = ids of trials and slots; `failed` = also run again what failed before; `tty` = a live line instead of one
    in 10 s; `resolve` = what makes trials of suggested values, for a plan that searches.
    `stale` = what becomes of trials that other code than today's made: keep, or rerun them afresh.
    `for_s` = seconds after which it stops at a checkpoint, as it does when the plan's budget is spent: exit code 4.
    `address` = a Ray cluster to run on instead of this machine; `shared` = storage that its nodes reach, where they do
    not see the store (`runners/shared.py`).
    Raises `UserError` where nothing can be run, or where store or ledger fail meanwhile. SIGINT, SIGTERM and SIGHUP
    end it at a checkpoint, exit code 130.
    """
    if stale not in STALE_CHOICES:
        raise UserError(f"--stale {stale!r}: it is {' or '.join(STALE_CHOICES)}")
    opened = Store.create(store)
    tracking.resolve_uri(opened, tracking_uri)
    if shutil.disk_usage(opened.root).free < 2**27:
        raise UserError(f"less than 128 MiB are free below {opened.root}", Exit.ENVIRONMENT)
    with places.reach(plan, opened, executor, address, shared, say) as place:
        given = share(plan.resources, executor, jobs, place.machine)
        places.look_over(place, opened)
        ledger = Ledger.open(opened)
        owner = Owner.me()
        ledger.register(owner)
        try:
            budget = _budget(plan, given, for_s, say)
            rerun = stale == "rerun"
            launched = Launch(plan, opened, ledger, owner, given, only, failed, say, budget, resolve, rerun, place)
            return launched.run(executor, tracking_uri, tty)
        except BrokenPipeError:
            raise  # whoever read what `say` printed has gone
        except (OSError, OperationalError) as error:
            # Trials tell of their own trouble; this is the driver's: a full disk, a folder or a database that went.
            reason = error.orig if isinstance(error, OperationalError) else error
            said = redact(str(reason), opened.ledger_url())
            raise UserError(
                f"the launch could not go on: {said} (store {opened.root}). What was committed is safe: mend the "
                "cause, and the same command goes on",
                Exit.ENVIRONMENT,
            ) from error
        finally:
            with contextlib.suppress(Exception):
                ledger.leave(owner)
            ledger.close()


def _budget(plan: Plan, given: Share, for_s: float | None, say: Say) -> Budget:
    if plan.budget.get("gpu_hours") is not None and not given.gpu:
        say("note: budget.gpu_hours: trials run on the CPU here, which counts as 0 GPU-hours")
    return Budget.of(plan.budget, for_s)


def sync(
    store: Path,
    sweep: str | None = None,
    *,
    tracking_uri: str | None = None,
    restore: bool = False,
    say: Say = print,
) -> dict[str, int]:
    """Bring MLflow up to date from the ledger and the folders: {sweep: runs of trials written}.

    A report that lies in the store is put back where MLflow has lost it.
    `restore` makes runs again that were deleted in the UI. Raises `UserError` if the server cannot be reached.
    """
    from runners import record, summary_run

    opened = Store.open(store)
    uri = tracking.resolve_uri(opened, tracking_uri)
    names = [sweep] if sweep else opened.sweeps()
    plans = {name: opened.plan(name) for name in names}
    ledger = Ledger.open(opened)
    owner = Owner.me()
    ledger.register(owner)
    sent: dict[str, int] = {}
    try:
        ledger.release_dead()
        for name, (revision, plan) in plans.items():
            ledger.record_plan(plan, revision)
            members = Searches(plan, opened).view().members
            ledger.add_members(name, revision, members)
            survey(opened, ledger, replace(plan, members=members), revision, None)
            projection = record.Projection(opened, ledger, plan, revision, uri, restore=restore)
            if not ledger.claim_projector(projection.key, name, owner):
                say(f"{name}: another driver is writing to MLflow now")
                continue
            try:
                sent[name] = projection.project()
            except Exception as error:
                raise UserError(f"MLflow: {tracking.explain(error, uri, opened)}", Exit.ENVIRONMENT) from error
            ledger.set_projector(projection.key, name, problem=None)
            problem = summary_run.put_report_back(opened, plan, revision, tracking_uri=tracking_uri, restore=restore)
            if problem:
                say(f"{name}: the report is not in MLflow: {problem}")
    finally:
        ledger.leave(owner)
        ledger.close()
    return sent
