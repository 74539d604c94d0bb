"""What a launch does about trials that other code or data made than today's: tells them, trains them afresh if asked.

A half-trained one is trained afresh on other data without being asked: no model has seen a bit of two texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from runners import stale
from runners.schema import Trial
from runners.store import Store
from runners.survey import Found, Need


class Rerun:
    """The rule of one launch: `wanted` is whether such trials are made again."""

    def __init__(self, store: Store, wanted: bool, say: Callable[[str], None]) -> None:
        self._store, self._wanted, self._say = store, wanted, say
        self._trials: set[str] = set()

    def look(self, found: list[Found]) -> list[Found]:
        """Tell which of `found` are by other code. Those to be made again come back with that need."""
        others: dict[str, tuple[str, ...]] = {}
        for item in found:
            names = stale.changes(self._store, item.member.trial) if item.row.owner is None else None
            if names is not None:
                others[item.member.trial.id] = names
        again: set[str] = set()
        for is_done, afresh in itertools.product((True, False), repeat=2):
            changes = {
                item.member.trial.id: names
                for item in found
                if (names := others.get(item.member.trial.id)) is not None
                and (item.need in (Need.NOTHING, Need.EVALUATE)) == is_done
                and (self._wanted or (not is_done and stale.other_data(names))) == afresh
            }
            again.update(changes if afresh else ())
            kept = f"{'kept' if is_done else 'gone on with'}; --stale rerun trains afresh"
            for line in stale.words(changes.values(), "" if is_done else "unfinished "):
                self._say(f"{line}: {'trained afresh' if afresh else kept}")
        self._trials.update(again)
        return [replace(item, need=Need.RERUN) if item.member.trial.id in again else item for item in found]

    def __contains__(self, trial: Trial) -> bool:
        """Whether the trial is still to be made again: another driver, or an earlier attempt, may have begun to."""
        return trial.id in self._trials and stale.changes(self._store, trial) is not None
