"""What is to be run again: failures of a sweep by class, and which trials `sweep resume` takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runners.schema import Status, UserError

if TYPE_CHECKING:
    from runners.overview import SweepStatus, TrialStatus

SHOWN = 5
"""Failures of one class that are told one by one."""

MEANING = {
    "oom": "out of memory, also with one row at once",
    "infra": "the worker or its machine died, hung, or could not write",
    "error": "an error of the trial's own: it comes again unless its cause is mended",
}


def failures(sweep: SweepStatus) -> list[str]:
    """The failed trials by class, each with its error and log, and the command that runs them again."""
    failed = [trial for trial in sweep.trials if trial.status == Status.FAILED]
    if not failed:
        return []
    lines = []
    for kind, n in Counter(trial.failure or "error" for trial in failed).most_common():
        lines.append(f"  failed ({kind}): {n}, {MEANING.get(kind, '')}")
        those = [trial for trial in failed if (trial.failure or "error") == kind]
        for trial in those[:SHOWN]:
            lines.append(f"    {trial.cell}, seed {trial.seed}: {trial.error}")
            lines.append(f"      log: {trial.log}")
        if n > SHOWN:
            lines.append(f"    and {n - SHOWN} more, in the table")
    return [*lines, f"  to run them again: sweep resume {sweep.sweep} --failed"]


def choose(sweep: SweepStatus, *, failed: bool, unfinished: bool, everything: bool) -> frozenset[str]:
    """Ids that `sweep resume` with these options runs: at most one option is given, and none means all."""
    if failed + unfinished + everything > 1:
        raise UserError("give one of --failed, --unfinished and --all")
    kinds = "failed or unfinished" if failed == unfinished else "failed" if failed else "unfinished"
    found = frozenset(trial.trial for trial in sweep.trials if _is_wanted(trial, failed, unfinished))
    count = {"failed": len(_failed(sweep.trials)), "unfinished": len(sweep.trials) - len(_done_or_failed(sweep.trials))}
    print(f"{len(found)} of {len(sweep.trials)} trials are {kinds} and run again", flush=True)
    for kind, n in count.items():
        if n and kind not in kinds:
            print(f"{n} more are {kind}: `sweep resume {sweep.sweep} --{kind}` runs them", flush=True)
    return found


def _is_wanted(trial: TrialStatus, failed: bool, unfinished: bool) -> bool:
    status = Status(trial.status)
    if status.is_done:
        return False
    return failed == unfinished or (status == Status.FAILED) == failed


def _failed(trials: Sequence[TrialStatus]) -> list[TrialStatus]:
    return [trial for trial in trials if trial.status == Status.FAILED]


def _done_or_failed(trials: Sequence[TrialStatus]) -> list[TrialStatus]:
    return [trial for trial in trials if Status(trial.status).is_done or trial.status == Status.FAILED]


def left_failed(sweep: SweepStatus, chosen: frozenset[str]) -> bool:
    """Whether trials failed that this resume leaves alone: it must not end as if all were well."""
    return any(trial.trial not in chosen for trial in _failed(sweep.trials))
