"""Asks before a sweep is launched that is estimated above its budget."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from runners.budget import Budget, Spent, add_up
from runners.durations import words
from runners.schema import Plan, UserError
from runners.store import Store
from sweeps import bill as bills
from sweeps.bill import Bill
from sweeps.show_bill import hours

Ask = Callable[[str], bool]


def check(
    plan: Plan, store: Path, only: frozenset[str] | None, jobs: int | None, *, yes: bool, ask: Ask | None = None
) -> None:
    """Raises `UserError` if the rest of the sweep is estimated above its budget, unless `yes` or the user agrees.

    `ask` puts a question to the user; without it a terminal is asked, and where there is none the answer is no.
    """
    budget = Budget.of(plan.budget)
    if budget.is_empty or yes:
        return
    opened = Store.open(store) if (store / "store.json").exists() else None
    found = bills.make(plan, store=store, only=only, jobs=jobs)
    over = list(_over(budget, found, _spent(opened, plan.sweep)))
    if not over:
        return
    text = "the sweep is estimated above its budget:\n" + "\n".join(f"  {line}" for line in over)
    ask = ask or (_ask if sys.stdin.isatty() and sys.stdout.isatty() else None)
    if ask is None:
        raise UserError(f"{text}\n--yes launches it all the same, and it stops at the budget, to be resumed")
    if not ask(f"{text}\nLaunch it all the same? It stops at the budget, to be resumed."):
        raise UserError("not launched")


def _ask(question: str) -> bool:
    import typer

    return typer.confirm(question)


def _over(budget: Budget, found: Bill, spent: Spent) -> Iterator[str]:
    how = "" if found.is_measured else "~"
    if budget.gpu_hours is not None and found.on_gpu and found.hours_to_run is not None:
        total = spent.gpu_hours + found.hours_to_run
        if total > budget.gpu_hours:
            before = f" and {spent.gpu_hours:.2g} spent" if spent.gpu_hours else ""
            yield f"{how}{hours(found.hours_to_run)} GPU-hours to run{before}; budget.gpu_hours is {budget.gpu_hours:g}"
    if budget.wall_s is not None and found.wall_s is not None and spent.wall_s + found.wall_s > budget.wall_s:
        before = f" after {words(spent.wall_s)}" if spent.wall_s else ""
        yield f"{how}{words(found.wall_s)} to run{before}; budget.wall is {words(budget.wall_s)}"
    if budget.max_trials is not None and spent.trials + found.to_begin > budget.max_trials:
        before = f" after {spent.trials}" if spent.trials else ""
        yield f"{found.to_begin} trainings to begin{before}; budget.max_trials is {budget.max_trials}"


def _spent(store: Store | None, sweep: str) -> Spent:
    """What the ledger counts so far; nothing where it cannot be read, which the launch itself will tell."""
    from sqlalchemy.exc import SQLAlchemyError

    from runners.ledger import Ledger

    if store is not None:
        with contextlib.suppress(UserError, SQLAlchemyError):
            ledger = Ledger.open(store, read_only=True)
            try:
                return add_up(ledger.spans(sweep), time.time())
            finally:
                ledger.close()
    return Spent()
