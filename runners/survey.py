"""What is there and what is missing: a plan held against the trial folders, and the ledger brought up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runners.ledger import Ledger, Row
from runners.need import Need, need
from runners.schema import Member, Plan, Status
from runners.store import Store

__all__ = ["Found", "Need", "counts", "need", "survey"]


@dataclass(frozen=True)
class Found:
    """A member, how the ledger has it, and what it needs."""

    member: Member
    row: Row
    need: Need


def survey(
    store: Store,
    ledger: Ledger,
    plan: Plan,
    revision: int,
    only: frozenset[str] | None,
    *,
    believe: bool = False,
) -> list[Found]:
    """Every member (of `only`), in plan order. Results found on disk enter the ledger; rows without one leave it.

    Every result is read and its checksum compared; with `believe`, what the ledger calls done only has to be there.
    """
    rows = ledger.rows(plan.sweep, revision)
    known = ledger.evaluations(rows)
    found = []
    for member in plan.members:
        if only is not None and member.trial.id not in only:
            continue
        row = rows[member.trial.id]
        # Whether a pruned trial still is one, its folder says.
        is_believed = believe and row.status.is_done and row.status != Status.PRUNED
        wanted = {part.id for part in member.slices} if row.status == Status.COMPLETE else set()
        if is_believed and wanted <= known[row.id] and _files_are_there(store, row.id, wanted):
            found.append(Found(member, row, Need.NOTHING))
            continue
        found.append(_look(store, ledger, member, row))
    return found


def look(store: Store, ledger: Ledger, member: Member) -> Found:
    """One member held against its folder, as `survey` does it. The ledger has to know the trial."""
    row = ledger.row(member.trial.id)
    assert row is not None, f"the ledger has no trial {member.trial.id}"
    return _look(store, ledger, member, row)


def _look(store: Store, ledger: Ledger, member: Member, row: Row) -> Found:
    missing = need(store, member)
    if row.owner is None:
        row = _take_in(store, ledger, member, row, missing)
    return Found(member, row, missing)


def _files_are_there(store: Store, trial_id: str, slices: set[str]) -> bool:
    folder = store.trial_folder(trial_id)
    return (folder / "result.json").exists() and all((folder / "evals" / f"{part}.json").exists() for part in slices)


def _take_in(store: Store, ledger: Ledger, member: Member, row: Row, missing: Need) -> Row:
    trial_id = member.trial.id
    if missing == Need.TRAIN:
        if row.status.is_done:
            ledger.forget_result(trial_id)
    else:
        result = store.result(trial_id) or {}
        done = {part.id for part in member.slices} - {part.id for part in store.missing_slices(trial_id, member.slices)}
        # Trained, and failed in its evaluation: that stays its state until it is evaluated.
        is_failed = row.status == Status.FAILED and missing != Need.NOTHING
        ledger.take_in(trial_id, row.status if is_failed else Status(result["status"]), done)
    return ledger.row(trial_id) or row


def counts(found: Sequence[Found]) -> dict[str, int]:
    """Members by status. One that is trained but not evaluated in full counts as planned (or as it is, if running)."""
    total: dict[str, int] = {}
    for item in found:
        status = item.row.status
        if status.is_done and item.need != Need.NOTHING:
            status = Status.PLANNED
        total[status.value] = total.get(status.value, 0) + 1
    return total
