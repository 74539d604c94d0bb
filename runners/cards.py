"""What each trial of a launch gets of the cards: one share for all, or packed by what they are measured to need."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runners import meter, packing
from runners.packing import Packer, Place
from runners.resources import Share, card_name
from runners.schema import Failure, Member, Outcome, Trial
from runners.store import Store
from runners.trial import write_outcome


class Cards:
    """Hands out places. Not safe for threads by itself: the launch calls it under its lock."""

    def __init__(self, given: Share, store: Store) -> None:
        self.given, self._store = given, store
        self._packer: Packer | None = None
        self._places: dict[str, Place] = {}
        self._overlapping = False

    def begin(self, trials: Iterable[Trial]) -> None:
        """Before the first trial: take in what earlier launches measured of trials like these."""
        if self.given.packed:
            known = packing.earlier(self._store, trials, card_name())
            self._packer = Packer(self.given.gpus, self.given.slots, known)

    def overlap(self, overlapping: bool) -> None:
        """Say whether kernels of trials that share a card run side by side, or take turns."""
        self._overlapping = overlapping
        if self._packer is not None:
            self._packer.overlapping = overlapping

    def take(self, queue: deque[Member]) -> Member | None:
        """The next trial of `queue` that there is room for now, taken out of it; None if all have to wait."""
        if self._packer is None:
            return queue.popleft()
        taken = self._packer.take(queue)
        if taken is None:
            return None
        member, self._places[taken[0].trial.id] = taken
        return member

    def gpu(self, trial_id: str) -> float:
        """What a trial counts for: cards, or the share of one."""
        place = self._places.get(trial_id)
        return self.given.gpu if place is None else place.share

    def job(self, trial_id: str) -> dict[str, Any]:
        """The fields of a trial's `Job` that say where it runs."""
        place = self._places.get(trial_id)
        if place is None:
            together = {"workers": self.given.workers, "sharded": self.given.sharded}
            return {"device": self.given.device, "gpu": self.given.gpu, **together}
        return {
            "device": f"cuda:{place.card}",
            "gpu": place.share,
            "measure": "steps" if place.measures else "memory",
        }

    def look(self, running: Mapping[str, int]) -> None:
        """Learn what trials need as soon as their first updates have shown it. `running` = attempts by trial."""
        for trial_id in self._packer.measuring() if self._packer is not None else ():
            if trial_id in running:
                self._learn(trial_id, running[trial_id])

    def _learn(self, trial_id: str, attempt: int) -> None:
        reading = meter.read(self._attempt(trial_id, attempt))
        if self._packer is not None and reading is not None:
            known = self._packer.learn(trial_id, reading)
            if reading.is_whole and known != reading:
                with contextlib.suppress(OSError):  # only a later launch would read it
                    meter.write(self._attempt(trial_id, attempt), known)

    def ended(self, outcome: Outcome) -> str | None:
        """Take back the place of a trial: why it is to be run again alone, if others are to blame for its failure.

        They may have had the memory that it needed; or, where kernels run side by side, a kernel of theirs that failed
        for good took its device away. Such an attempt says nothing about the trial's own size, so it leaves no word
        that would halve its batch.
        """
        self._learn(outcome.trial_id, outcome.attempt)
        why = None
        if outcome.failure == Failure.OOM:
            why = "out of memory"
        elif outcome.failure == Failure.ERROR and self._overlapping and "CUDA error" in (outcome.error or ""):
            why = "a CUDA error, maybe of another trial's,"
        if self._packer is None or why is None or not self._packer.suffered(outcome.trial_id):
            why = None
        elif outcome.failure == Failure.OOM:
            attempt = self._attempt(outcome.trial_id, outcome.attempt)
            write_outcome(attempt, dataclasses.replace(outcome, micro_batch=None), gpu=self.gpu(outcome.trial_id))
        self.leave(outcome.trial_id)
        return why

    def leave(self, trial_id: str) -> None:
        """The trial has ended, or was not begun."""
        if self._packer is not None:
            self._packer.leave(trial_id)
            self._places.pop(trial_id, None)

    def _attempt(self, trial_id: str, attempt: int) -> Path:
        return self._store.trial_folder(trial_id) / "attempts" / str(attempt)
