"""Which trials share a card (`resources.gpu: auto`): a pure rule over what trials of each shape were measured to need.

    shape   what trials have in common that need the same of a card: every setting but seed, rates and length

The rule. A card takes one more trial while
  - their memory adds up to at most 0.9 of the card's,
  - their busy shares add up to at most 1.25: a trial's start, checkpoints and evaluation leave gaps, and a card that is
    asked for a little more than it has stays full; or to at most 8 where kernels of several processes run side by side
    (`runners/mps.py`): a small kernel keeps the card busy and leaves most of it empty,
  - and all cards together hold at most one trial a CPU core: launching kernels keeps a core busy.
The first trial of all runs alone until its first updates have been measured. After that a shape that nobody knows may
join a card on the guess that it needs as much as the hungriest one known, and twice its memory. A trial that runs out
of memory beside others is run again with a card to itself, at its own size: that says nothing about the trial. An
empty card takes anything.

Not covered: what other programs use of a card, and cards of different kinds in one machine (the smallest counts).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from runners import meter
from runners.meter import Reading
from runners.schema import Member, Trial
from runners.split import shape
from runners.store import Store

MEMORY_LIMIT = 0.9
BUSY_LIMIT, BUSY_LIMIT_OVERLAPPING = 1.25, 8.0
GUESSED_MEMORY = 2.0
UNSEEN_BYTES = 2 * 2**30
"""Memory that evaluations may need beyond the first updates, until a trial of the shape has been seen to its end."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trial goes: a card's number, whether it is to time its updates, and what it counts for of the card."""

    card: int
    measures: bool
    share: float


@dataclass
class _Guest:
    shape: str
    card: int
    is_alone: bool
    measures: bool
    had_company: bool = False


class Packer:
    """Places trials on cards. `most` = trials at once on all of them; `overlapping`: their kernels run side by side.

    Not safe for threads by itself.
    """

    def __init__(self, cards: int, most: int, known: Mapping[str, Reading] | None = None) -> None:
        self.most, self.overlapping = most, False
        self._known = dict(known or {})
        self._guests: list[dict[str, _Guest]] = [{} for _ in range(cards)]
        self._shapes: dict[str, str] = {}
        self._alone: set[str] = set()

    def shape(self, trial: Trial) -> str:
        """The trial's shape, made once for each trial."""
        if trial.id not in self._shapes:
            self._shapes[trial.id] = shape(trial)
        return self._shapes[trial.id]

    def place(self, trial: Trial) -> Place | None:
        """Take the trial in, on the card with most room for it; None if it has to wait until another leaves."""
        wants, is_alone = self.shape(trial), trial.id in self._alone
        if sum(map(len, self._guests)) >= self.most:
            return None
        need = self._need(wants)
        open_to = [card for card, guests in enumerate(self._guests) if self._takes(guests, need, is_alone)]
        if not open_to:
            return None
        card = min(open_to, key=lambda at: (self._load(self._guests[at]), at))
        measures = self._known.get(wants) is None or self._known[wants].busy is None
        guests = self._guests[card]
        guests[trial.id] = _Guest(wants, card, is_alone, measures)
        for guest in guests.values():
            guest.had_company = guest.had_company or len(guests) > 1
        share = 1.0 if need is None else min(1.0, max(self._busy(need), need.memory_bytes / need.card_bytes))
        return Place(card, measures, share)

    def take(self, queue: deque[Member]) -> tuple[Member, Place] | None:
        """The first trial of a queue for which there is room now, taken out of it, and its place."""
        refused = set()
        for at, member in enumerate(queue):
            kind = (self.shape(member.trial), member.trial.id in self._alone)
            if kind in refused:
                continue
            place = self.place(member.trial)
            if place is not None:
                del queue[at]
                return member, place
            refused.add(kind)
        return None

    def _takes(self, guests: Mapping[str, _Guest], need: Reading | None, is_alone: bool) -> bool:
        if not guests:
            return True
        if is_alone or need is None or any(guest.is_alone for guest in guests.values()):
            return False
        others = [self._need(guest.shape) for guest in guests.values()]
        total = [need, *(other for other in others if other is not None)]
        if len(total) <= len(others):
            return False
        room = MEMORY_LIMIT * min(reading.card_bytes for reading in total)
        fits = sum(reading.memory_bytes for reading in total) <= room
        limit = BUSY_LIMIT_OVERLAPPING if self.overlapping else BUSY_LIMIT
        return fits and sum(map(self._busy, total)) <= limit

    def _load(self, guests: Mapping[str, _Guest]) -> float:
        needs = [self._need(guest.shape) for guest in guests.values()]
        return sum(1.0 if need is None else self._busy(need) for need in needs)

    @staticmethod
    def _busy(need: Reading) -> float:
        return 1.0 if need.busy is None else need.busy

    def _need(self, wants: str) -> Reading | None:
        """What a shape needs: as measured, or as guessed from the others; None while nothing is known at all."""
        found = self._known.get(wants)
        if found is not None:
            return found if found.is_whole else replace(found, memory_bytes=found.memory_bytes + UNSEEN_BYTES)
        if not self._known:
            return None
        hungriest = max(reading.memory_bytes for reading in self._known.values())
        busy = [reading.busy for reading in self._known.values() if reading.busy is not None]
        one = next(iter(self._known.values()))
        memory = int(GUESSED_MEMORY * hungriest)
        return replace(one, memory_bytes=memory, busy=max(busy) if busy else None, is_whole=True)

    def learn(self, trial_id: str, reading: Reading) -> Reading:
        """Take in what the worker of a trial has measured: what its shape is now known to need.

        Beside others, an update waits for their turns on the device: what is measured then is scaled down by the share
        that the trial is sure to have had.
        """
        found = self._find(trial_id)
        if found is None:
            return reading
        others = [self._need(guest.shape) for name, guest in self._guests[found.card].items() if name != trial_id]
        busy = reading.busy
        if busy is not None:
            left = 1 - sum(self._busy(need) for need in others if need is not None)
            busy *= max(left, 1 / (len(others) + 1))
        before = self._known.get(found.shape)
        if before is not None:
            busy = before.busy if before.busy is not None else busy
            memory = reading.memory_bytes
            if before.is_whole:
                memory = max(before.memory_bytes, memory)
            reading = replace(reading, memory_bytes=memory, is_whole=reading.is_whole or before.is_whole)
        self._known[found.shape] = known = replace(reading, busy=busy)
        found.measures = False
        return known

    def measuring(self) -> list[str]:
        """Trials of which the first reading is still awaited."""
        return [name for guests in self._guests for name, guest in guests.items() if guest.measures]

    def leave(self, trial_id: str) -> None:
        """The trial has ended, or never began."""
        for guests in self._guests:
            guests.pop(trial_id, None)

    def suffered(self, trial_id: str) -> bool:
        """A trial failed by what others may have done: whether it shared its card, so that it is tried again alone."""
        found = self._find(trial_id)
        if found is None or not found.had_company:
            return False
        self._alone.add(trial_id)
        return True

    def _find(self, trial_id: str) -> _Guest | None:
        return next((guests[trial_id] for guests in self._guests if trial_id in guests), None)


def earlier(store: Store, trials: Iterable[Trial], card: str) -> dict[str, Reading]:
    """What earlier launches measured on cards of this name, by shape."""
    found: dict[str, Reading] = {}
    for trial in trials:
        last = store.last_attempt(trial.id)
        if not last:
            continue
        reading = meter.read(store.trial_folder(trial.id) / "attempts" / str(last))
        if reading is None or reading.card != card:
            continue
        wants = shape(trial)
        before = found.get(wants)
        if before is not None:
            busy = before.busy if before.busy is not None else reading.busy
            memory = max(before.memory_bytes, reading.memory_bytes)
            reading = Reading(card, reading.card_bytes, memory, busy, before.is_whole or reading.is_whole)
        found[wants] = reading
    return found
