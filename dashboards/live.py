"""A running sweep followed: what `sweep status --watch` and `sweep dashboard` show, from the store alone.

A `Follower` remembers what it has seen, so that a look costs what changed and not what there is. It trusts the ledger
on which trials ended and opens a trial's folder when the ledger says something new of it; `sweep status` without
--watch opens them all. Nothing is written, no lock is held between two looks.
"""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashboards.live_pace import Running, Speed, measure, read_meter, tokens_a_step
from dashboards.live_scores import Measure, Scores, measure_of
from dashboards.live_snapshot import ORDER, Cause, Cell, Snapshot, condition_of
from runners.ledger import Row
from runners.recent import Attempt, Recent, reading
from runners.schema import Member, Plan, Status
from runners.search import Searches, State
from runners.store import Store

READ_S = 0.3
"""How long one look may read results."""

POINTS = 1000
"""Words of one running trial that are remembered; of more, every second one is let go of."""


@dataclass
class _Seen:
    """What a follower remembers of one revision."""

    revision: int
    plan: Plan
    measure: Measure
    scores: Scores
    searches: Searches | None
    members: dict[str, Member]
    rows: dict[str, Row] = field(default_factory=dict)
    since: float = 0.0
    states: list[State] = field(default_factory=list)


class Follower:
    """Looks at one sweep again and again. One thread at a time may use it."""

    def __init__(self, store: Store, sweep: str, *, clock: Callable[[], float] = time.time) -> None:
        self.store, self.sweep, self._clock = store, sweep, clock
        self._seen: _Seen | None = None
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._asked = 0.0
        self._speeds: dict[str, Speed] = {}
        self.points: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
        """What running attempts said since one looks: metrics by step. Their committed points come later, as files."""

    def member(self, trial_id: str) -> tuple[Member, Row | None] | None:
        """A trial of the sweep and its row, as they were at the last look; None if it has no such trial."""
        seen = self._seen or self._revision()
        member = seen.members.get(trial_id)
        return (member, seen.rows.get(trial_id)) if member is not None else None

    def attempts(self, trial_id: str) -> list[Attempt]:
        """The trial's attempts, oldest first."""
        found = [one for one in self._attempts.values() if one.trial == trial_id]
        return sorted(found, key=lambda one: one.number)

    def look(self, read_s: float = READ_S) -> Snapshot:
        """How the sweep stands now; reads results for about `read_s` at most."""
        seen, now = self._revision(), self._clock()
        if seen.searches is not None:
            view = seen.searches.view()
            seen.members, seen.states = {m.trial.id: m for m in view.members}, list(view.states.values())
        with reading(self.store) as recent:
            has_driver, backlog = self._ask(recent, seen) if recent is not None else (False, None)
        unread = seen.scores.read(_ended(seen), read_s)
        states = {trial_id: self._state(seen, trial_id) for trial_id in seen.members}
        running = [self._running(seen, one, now) for one, status in states.items() if status == Status.RUNNING]
        self._forget({one.trial for one in running})
        waiting = [seen.members[i] for i, s in states.items() if s in (Status.PLANNED, Status.INTERRUPTED)]
        more = max(0, seen.plan.n_trainings - len(seen.members))
        done = [trial_id for trial_id, status in states.items() if status.is_done]
        counted = Counter(states.values()) + Counter({Status.PLANNED: more})
        times = [when for one in self._attempts.values() for when in (one.started, one.ended) if when is not None]
        return Snapshot(
            sweep=self.sweep,
            revision=seen.revision,
            question=seen.plan.question,
            at=now,
            measure=seen.measure,
            counts={status: counted[status] for status in ORDER if counted[status]},
            running=running,
            cells=_cells(seen, states),
            causes=_causes(seen, states),
            pace=measure(running, waiting, more, seen.members, self._attempts, done, now),
            searches=seen.states,
            unread=unread,
            has_ledger=recent is not None,
            has_driver=has_driver,
            backlog=backlog,
            changed=max(times, default=None),
        )

    # ---- what there is -----------------------------------------------------------------------------------------

    def _revision(self) -> _Seen:
        """The newest frozen plan: a later launch may bring a new one while this looks."""
        newest = max(self.store.revisions(self.sweep), default=0)
        if self._seen is None or self._seen.revision != newest:
            with _uncollected():
                revision, plan = self.store.plan(self.sweep)
            searches = Searches(plan, self.store) if plan.searches else None
            measured = measure_of(plan)
            scores = Scores(self.store, measured)
            self._seen = _Seen(revision, plan, measured, scores, searches, {m.trial.id: m for m in plan.members})
        return self._seen

    def _ask(self, recent: Recent, seen: _Seen) -> tuple[bool, str | None]:
        new, seen.since = recent.rows(self.sweep, seen.revision, seen.since)
        seen.rows |= new
        for one in recent.attempts(self.sweep, self._asked):
            self._attempts[one.trial, one.number] = one
        self._asked = max((one.ended for one in self._attempts.values() if one.ended is not None), default=0.0)
        return recent.has_driver(seen.rows.values()), next(iter(recent.problems(self.sweep)), None)

    def _state(self, seen: _Seen, trial_id: str) -> Status:
        row = seen.rows.get(trial_id)
        if row is None:
            return Status.PLANNED
        if row.status == Status.RUNNING:
            # A driver claims one trial more than it runs; a worker's first word is in the log.
            return row.status if self.log(trial_id, row.attempt).exists() else Status.PLANNED
        found = seen.scores.get(trial_id, row)
        return found.status if found is not None else row.status

    def log(self, trial_id: str, attempt: int, name: str = "log.txt") -> Path:
        """An attempt's log, or its error.txt."""
        return self.store.trial_folder(trial_id) / "attempts" / str(attempt) / name

    def _running(self, seen: _Seen, trial_id: str, now: float) -> Running:
        member, row = seen.members[trial_id], seen.rows[trial_id]
        live = self.store.progress(trial_id)
        told: dict[str, Any] = live if isinstance(live, dict) and live.get("attempt") == row.attempt else {}
        speed = self._speeds.get(trial_id)
        if speed is None or speed.attempt != row.attempt:
            speed = self._speeds[trial_id] = Speed(row.attempt)
        if told:
            speed.add(told["time"], told["step"])
            said = self.points.setdefault((trial_id, row.attempt), {})
            said[told["step"]] = told["metrics"]
            if len(said) > POINTS:
                for step in sorted(said)[1:-1:2]:
                    del said[step]
        steps_s, tokens = speed.steps_s, tokens_a_step(member.trial)
        attempt = self._attempts.get((trial_id, row.attempt))
        began = attempt.started if attempt and attempt.started is not None else now
        return Running(
            trial_id,
            member.arm,
            member.cell,
            member.trial.seed,
            row.attempt,
            told.get("step"),
            told.get("steps"),
            told.get("metrics", {}),
            max(0.0, now - began),
            max(0.0, now - told["time"]) if told else None,
            steps_s,
            steps_s * tokens if steps_s is not None and tokens is not None else None,
            attempt.gpu if attempt else 0.0,
            read_meter(self.log(trial_id, row.attempt).parent),
        )

    def _forget(self, running: set[str]) -> None:
        """Let go of what trials said that run no more: a view may be open for weeks."""
        self._speeds = {trial_id: speed for trial_id, speed in self._speeds.items() if trial_id in running}
        self.points = {key: said for key, said in self.points.items() if key[0] in running}


@contextmanager
def _uncollected() -> Iterator[None]:
    """A plan of ten thousand trials is many objects that all stay: looking for garbage among them takes as long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _ended(seen: _Seen) -> Iterator[tuple[Member, Row]]:
    """Trials whose folder may hold a result: also where a driver died before it took the result in."""
    for trial_id, row in seen.rows.items():
        if (row.status.is_done or row.status == Status.INTERRUPTED) and trial_id in seen.members:
            yield seen.members[trial_id], row


def _cells(seen: _Seen, states: Mapping[str, Status]) -> list[Cell]:
    """Report trials by cell, in plan order."""
    groups: dict[str, list[Member]] = {}
    for member in seen.members.values():
        if member.role == "report":
            groups.setdefault(member.cell, []).append(member)
    return [_cell(group, states, seen) for group in groups.values()]


def _causes(seen: _Seen, states: Mapping[str, Status]) -> list[Cause]:
    """Failures first, those of one cause together; numbers do not make two causes."""
    found: dict[tuple[str, str], Cause] = {}
    for trial_id, status in states.items():
        if status not in (Status.FAILED, Status.DIVERGED):
            continue
        row = seen.rows[trial_id]
        kind, error = row.failure or "error", row.error or ""
        if status == Status.DIVERGED:
            ended = seen.scores.get(trial_id, row)
            kind, error = "diverged", ended.why if ended else ""
        error = "".join(letter if letter.isprintable() else " " for letter in error)  # no escapes for a terminal
        cause = found.setdefault((kind, re.sub(r"\d+(\.\d+)?", "#", error)), Cause(kind, error, []))
        cause.trials.append(seen.members[trial_id])
    return sorted(found.values(), key=lambda one: (one.kind == "diverged", -len(one.trials)))


def _cell(members: list[Member], states: Mapping[str, Status], seen: _Seen) -> Cell:
    first, scored = members[0], []
    for member in members:
        row = seen.rows.get(member.trial.id)
        found = seen.scores.get(member.trial.id, row) if row is not None else None
        if found is not None and found.score is not None and found.status.is_done:
            scored.append((found.score, member.trial))
    best = max(scored, key=lambda one: seen.measure.sign * one[0])[1].id if scored else None
    diverged = sum(states[member.trial.id] == Status.DIVERGED for member in members)
    scores = {trial.seed: score for score, trial in scored}
    return Cell(first.arm, first.cell, condition_of(first), first.state_bytes, len(members), scores, diverged, best)
