"""How fast a running sweep goes, what it uses of its cards, and when it may be done: from what workers recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runners.recent import Attempt
from runners.schema import Member, Trial
from runners.store import read_json

WINDOW_S = 3600.0
"""Trials an hour are counted over this long, or since the first of them began."""
SPEED_S = 60.0
"""Steps a second are measured over this long."""
TRUSTED_SHARE = 0.02
"""A training that is less far says nothing yet of how long it takes."""
ENDS = ("complete", "diverged", "pruned", "failed")


class Speed:
    """Steps a second of one attempt, by its worker's own clock."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._points: deque[tuple[float, int]] = deque()

    def add(self, when: float, step: int) -> None:
        if not self._points or when > self._points[-1][0]:
            self._points.append((when, step))
        while len(self._points) > 2 and self._points[-1][0] - self._points[0][0] > SPEED_S:
            self._points.popleft()

    @property
    def steps_s(self) -> float | None:
        """None before the worker has said where it is for the second time."""
        if len(self._points) < 2:
            return None
        (begin, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - begin)


def tokens_a_step(trial: Trial) -> int | None:
    """Tokens of one update, where the settings say it."""
    train = trial.train or {}
    if train.get("batch_tokens"):
        return int(train["batch_tokens"])
    rows, length = train.get("batch_size"), trial.task.get("seq_len")
    return rows * length if isinstance(rows, int) and isinstance(length, int) else None


@dataclass(frozen=True, slots=True)
class Reading:
    """What an attempt's worker measured of its card (`runners/meter.py`). `busy` is None where it was not measured."""

    card: str
    card_bytes: int
    memory_bytes: int
    busy: float | None


def read_meter(attempt: Path) -> Reading | None:
    """The newest reading in an attempt's folder; None if there is none, or another version wrote it."""
    row = read_json(attempt / "meter.json")
    if not isinstance(row, dict):
        return None
    try:
        return Reading(row["card"], row["card_bytes"], row["memory_bytes"], row.get("busy"))
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Running:
    """A trial at work. `step` is None until its worker has told one; `silent_s`: how long ago it said its last word."""

    trial: str
    arm: str
    cell: str
    seed: int
    attempt: int
    step: int | None
    steps: int | None
    metrics: dict[str, float]
    seconds: float
    silent_s: float | None
    steps_s: float | None
    tokens_s: float | None
    gpu: float
    reading: Reading | None

    @property
    def share(self) -> float:
        """How much of the training is done, 0 to 1."""
        return min(1.0, self.step / self.steps) if self.step is not None and self.steps else 0.0

    @property
    def is_evaluating(self) -> bool:
        return self.steps is not None and self.step == self.steps


@dataclass(frozen=True)
class Pace:
    """Rates now. Each is None where nothing is known of it; `basis` says what `left_s` follows from."""

    per_hour: float | None = None
    window_s: float = 0.0
    n_ended: int = 0
    steps_s: float | None = None
    tokens_s: float | None = None
    left_s: float | None = None
    basis: str = ""
    gpu: float = 0.0
    cards: list[Card] = field(default_factory=list)


@dataclass(frozen=True)
class Card:
    """What measured trials that run now take of one kind of card: memory added up, busy shares added up."""

    name: str
    trials: int
    memory_bytes: int
    card_bytes: int
    busy: float | None


class Durations:
    """How long trials took: those of the same cell, else of the same arm, else all. Seconds."""

    def __init__(self, members: Mapping[str, Member], ended: Mapping[str, float]) -> None:
        self._by: dict[tuple[str, str], tuple[float, int]] = {}
        for trial_id, seconds in ended.items():
            member = members.get(trial_id)
            for key in _keys(member) if member else ():
                total, n = self._by.get(key, (0.0, 0))
                self._by[key] = total + seconds, n + 1
        self.n = self._by.get(("all", ""), (0.0, 0))[1]

    def __call__(self, member: Member | None) -> float | None:
        """What a trial like this one takes; of no one in particular, the mean of all. None if nothing has ended."""
        for key in _keys(member) if member else (("all", ""),):
            if key in self._by:
                total, n = self._by[key]
                return total / n
        return None


def _keys(member: Member) -> tuple[tuple[str, str], ...]:
    return (member.role, member.cell), ("arm", member.arm), ("all", "")


def measure(
    running: Sequence[Running],
    waiting: Sequence[Member],
    more: int,
    members: Mapping[str, Member],
    attempts: Mapping[tuple[str, int], Attempt],
    done: Iterable[str],
    now: float,
) -> Pace:
    """The pace of a sweep. `waiting` are to be run still, `more` is how many a search has not made up yet."""
    took: dict[str, float] = {}
    for one in attempts.values():
        if one.started is not None and one.ended is not None:
            took[one.trial] = took.get(one.trial, 0.0) + max(0.0, one.ended - one.started)
    durations = Durations(members, {trial_id: took[trial_id] for trial_id in done if trial_id in took})
    per_hour, window_s, n_ended = _per_hour(attempts.values(), {one.trial for one in running}, now)
    left_s, basis = _left(running, waiting, more, members, durations)
    steps = [one.steps_s for one in running if one.steps_s is not None]
    tokens = [one.tokens_s for one in running if one.tokens_s is not None]
    return Pace(
        per_hour,
        window_s,
        n_ended,
        sum(steps) if steps else None,
        sum(tokens) if tokens and len(tokens) == len(steps) else None,
        left_s,
        basis,
        sum(one.gpu for one in running),
        _cards(running),
    )


def _per_hour(attempts: Iterable[Attempt], running: set[str], now: float) -> tuple[float | None, float, int]:
    """Trials that ended an hour, over how many seconds, and how many they were; nothing while nothing runs."""
    began, n = now, 0
    for one in attempts:
        # An open attempt of a trial that does not run belongs to a driver that died.
        if one.trial in running if one.ended is None else one.ended > now - WINDOW_S:
            began = min(began, one.started if one.started is not None else now)
            n += one.ended is not None and one.status in ENDS
    window_s = min(WINDOW_S, now - began)
    return (n * 3600 / window_s if running and n and window_s > 0 else None), window_s, n


def _left(
    running: Sequence[Running], waiting: Sequence[Member], more: int, members: Mapping[str, Member], took: Durations
) -> tuple[float | None, str]:
    """Seconds until all is done with as many trials at once as now, and what that is guessed from."""
    if not running:
        return None, ""
    whole = [one.seconds / one.share for one in running if one.share >= TRUSTED_SHARE]
    own = sum(whole) / len(whole) if whole else None
    if took.n == 0 and own is None:
        return None, "" if waiting or running else "all ended"
    at_work = [_rest(one, took(members.get(one.trial)) or own or 0.0) for one in running]
    later = [took(member) or own or 0.0 for member in waiting]
    later.append(more * (took(None) or own or 0.0))
    at_once = f"{len(running)} at a time" if len(running) > 1 else "one at a time"
    source = f"{took.n} that ended" if took.n else f"{len(whole)} that run"
    return max([*at_work, (sum(at_work) + sum(later)) / len(running)]), f"from {source}, {at_once}"


def _rest(one: Running, whole: float) -> float:
    if one.steps_s and one.steps is not None and one.step is not None and one.step < one.steps:
        return (one.steps - one.step) / one.steps_s
    return whole * (1 - one.share) if one.step is not None else max(0.0, whole - one.seconds)


def _cards(running: Sequence[Running]) -> list[Card]:
    by_name: dict[str, list[Any]] = {}
    for one in running:
        if one.reading is not None:
            by_name.setdefault(one.reading.card, []).append(one.reading)
    found = []
    for name, readings in by_name.items():
        busy = [reading.busy for reading in readings if reading.busy is not None]
        memory = sum(reading.memory_bytes for reading in readings)
        found.append(Card(name, len(readings), memory, readings[0].card_bytes, sum(busy) if busy else None))
    return found
