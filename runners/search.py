"""The searches of a plan held against the store: which suggestions there are, what they scored, who won.

Optuna keeps nothing. A suggestion is a file, `searches/<key>/<number>.json`, written before it is trained; the first
writer wins, so two drivers agree. It is a function of the search's key, its number and the results of the rounds
before it: kills and the order of workers change nothing. A round begins when all before it has ended.

`Searches.view` puts the winners into the plan's slots; everything that shows results goes through it. Reading needs the
standard library only; what makes suggestions (`runners/suggest.py`) is imported when a search is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

from runners import rungs
from runners.schema import (
    BLOCKS,
    SCHEMA_VERSION,
    Member,
    Pair,
    Plan,
    Rungs,
    Search,
    Searched,
    Status,
    Trial,
    trial_ids,
)
from runners.store import Store, read_json, read_points, read_sealed, seal, write_json


@dataclass(frozen=True)
class Setting:
    """What suggested values make of a cell: its blocks (`settings`), and their part of the identity (`texts`).

    `problem` is the rule that the values break, None if they break none; such a suggestion is refused.
    """

    settings: dict[str, Any]
    texts: dict[str, str]
    state_bytes: int
    problem: str | None


Resolve = Callable[[str, Mapping[str, Any]], Setting]
"""(key of a search, values) -> their setting: the spec language's part of a search."""


@dataclass(frozen=True)
class Suggestion:
    """One suggestion as its file has it. `known`: the results of all suggestions below this number were known."""

    number: int
    known: int
    values: dict[str, Any]
    setting: Setting
    made_by: str = ""
    """`grid`, `random`, or the release of Optuna whose TPE it was."""

    def trial(self, seed: int) -> Trial:
        """Its training on one seed."""
        (trial_id,) = trial_ids(self.setting.texts, (seed,))
        return Trial(trial_id, seed, *(self.setting.settings.get(block) for block in BLOCKS))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Score:
    """How a suggestion ended: complete, diverged (on some seed), pruned or refused.

    `values` are the means over its seeds of what the search selects by; those of a pruned one are from where it was
    cut, at `step`. A refused one has none.
    """

    status: str
    values: tuple[float, ...] = ()
    step: int | None = None


@dataclass(frozen=True)
class State:
    """A search as it stands. `scores` has None for a suggestion that has not ended on every seed."""

    search: Search
    suggestions: tuple[Suggestion, ...]
    scores: tuple[Score | None, ...]
    members: tuple[Member, ...]
    """The trainings of all suggestions, each id once."""

    @property
    def waits_for(self) -> list[int]:
        """Numbers of the suggestions that have not ended."""
        return [number for number, score in enumerate(self.scores) if score is None]

    @property
    def n_ended(self) -> int:
        return len(self.scores) - len(self.waits_for)

    @property
    def is_over(self) -> bool:
        return self.n_ended >= self.search.trials

    @property
    def winner(self) -> int | None:
        """Number of the suggestion that is best so far; None if none was trained to its end.

        Best by the first of `select`, then by the next: of the suggestions that no other one beats in everything, the
        one that is best in the first. Of equal ones the lowest number.
        """
        best: tuple[float, ...] | None = None
        found = None
        for number, score in enumerate(self.scores):
            if score is None or score.status not in (Status.COMPLETE, Status.DIVERGED):
                continue
            signed = tuple(v if d == "max" else -v for v, d in zip(score.values, self.search.directions, strict=True))
            if best is None or signed > best:
                best, found = signed, number
        return found

    def count(self, status: str) -> int:
        """How many suggestions ended so."""
        return sum(score is not None and score.status == status for score in self.scores)


@dataclass(frozen=True)
class View:
    """A plan as the store has it now. `plan` has the winners in its slots, so far as they are known."""

    plan: Plan
    states: dict[str, State]
    members: tuple[Member, ...]
    """Report trials, open slots among them, and the trainings of suggestions: each id once."""


class Searches:
    """The searches of one plan in one store. Only `advance` writes. One thread at a time may use it."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        self.searches = {search.key: search for search in plan.searches}
        self.slots: dict[str, list[Member]] = {key: [] for key in self.searches}
        for member in plan.members:
            if member.searched is not None:
                self.slots[member.searched.key].append(member)
        # A suggestion and its cut-offs never change; a result is the same one as long as its file is.
        self._suggestions: dict[tuple[str, int], Suggestion] = {}
        self._cuts: dict[Path, Rungs] = {}
        self._curves: dict[tuple[str, str], tuple[list[tuple[int, float]], float | None]] = {}
        self._results: dict[str, tuple[tuple[int, int, int], dict[str, Any] | None]] = {}

    def folder(self, key: str) -> Path:
        return self.store.root / "searches" / key

    # ---- the whole plan ----------------------------------------------------------------------------------------

    def view(self) -> View:
        """The plan with its slots filled, and every training of a suggestion."""
        states = {key: self.state(key) for key in self.searches}
        filled = {slot.trial.id: winner for state in states.values() for slot, winner in self.filled(state)}
        plan = _fill(self.plan, filled) if filled else self.plan
        every = [*plan.members, *(member for state in states.values() for member in state.members)]
        once: dict[str, Member] = {}
        for member in every:
            once.setdefault(member.trial.id, member)
        return View(plan, states, tuple(once.values()))

    def filled(self, state: State) -> list[tuple[Member, Member]]:
        """(slot, the winner's trial) of each report trial of a search that is over; nothing before."""
        if not state.is_over or state.winner is None:
            return []
        best = state.suggestions[state.winner]
        found = []
        for slot in self.slots[state.search.key]:
            searched = Searched(
                state.search.key, slot.trial.id, best.number, best.values, is_selected=state.search.is_same
            )
            trial, size = best.trial(slot.trial.seed), best.setting.state_bytes
            found.append((slot, replace(slot, trial=trial, state_bytes=size, searched=searched)))
        return found

    # ---- one search --------------------------------------------------------------------------------------------

    def state(self, key: str, *, cut: bool = False) -> State:
        """Where a search stands. With `cut`, cut-offs that are still missing are decided and kept."""
        search = self.searches[key]
        suggestions = self._read(search)
        scores: list[Score | None] = []
        members: dict[str, Member] = {}
        for one in suggestions:
            if one.setting.problem is not None:
                scores.append(Score("refused"))
                continue
            ended = []
            for trial in map(one.trial, search.seeds):
                result = self._result(trial.id)
                is_going = result is None or result["status"] == Status.PRUNED
                allowed = self._rungs(search, suggestions, one, trial.seed, cut and is_going)
                members.setdefault(trial.id, self._member(search, one, trial, allowed))
                ended.append(_ended(search, one, result, allowed))
            scores.append(_mean(ended))
        return State(search, suggestions, tuple(scores), tuple(members.values()))

    def advance(self, key: str, resolve: Resolve) -> State:
        """Where a search stands, the next round of suggestions made if there is one to make."""
        from runners.suggest import Round

        search, state = self.searches[key], self.state(key, cut=True)
        while (known := self._next_round(search, state)) is not None:
            scored = zip(state.suggestions[:known], state.scores[:known], strict=True)
            made = Round(search, [(one.values, score) for one, score in scored])
            for number in range(known, min(known + search.parallel, search.trials)):
                if self._suggestion(key, number) is None:
                    self._keep(key, number, known, made, resolve)
                found = self._suggestion(key, number)
                assert found is not None
                made.add(found.values)
            state = self.state(key, cut=True)
        return state

    @staticmethod
    def _next_round(search: Search, state: State) -> int | None:
        """The first number of the round to make now: one that a kill has cut short, or the next. None if there is none.

        Rounds do not depend on `trials`: where that ended one early, raising it fills the round up.
        """
        n = len(state.suggestions)
        if n >= search.trials:
            return None
        first = state.suggestions[-1].known if n else 0
        if n < first + search.parallel:
            return first
        return None if state.waits_for else n

    def _keep(self, key: str, number: int, known: int, made: Any, resolve: Resolve) -> None:
        values = made.suggest(number)
        setting = resolve(key, values)
        if number == 0:
            about = {"schema": SCHEMA_VERSION, **asdict(self.searches[key])}
            write_json(self.folder(key) / "search.json", about, keep_existing=True, durable=False)
        row = {"schema": SCHEMA_VERSION, "search": key, "number": number, "known": known, "values": values}
        path = self.folder(key) / f"{number}.json"
        # A file that is there and cannot be read is torn: the same suggestion takes its place.
        torn = path.exists() and read_sealed(path) is None
        # Not forced to the disk: one that a power cut takes is made again as it was.
        row |= asdict(setting) | {"made_by": made.made_by}
        write_json(path, seal(row), keep_existing=not torn, durable=False)

    def _read(self, search: Search) -> tuple[Suggestion, ...]:
        found: list[Suggestion] = []
        while len(found) < search.trials and (one := self._suggestion(search.key, len(found))) is not None:
            found.append(one)
        return tuple(found)

    def _suggestion(self, key: str, number: int) -> Suggestion | None:
        if (key, number) not in self._suggestions:
            row = read_sealed(self.folder(key) / f"{number}.json")
            if row is None:
                return None
            setting = Setting(row["settings"], row["texts"], row["state_bytes"], row["problem"])
            found = Suggestion(number, row["known"], row["values"], setting, row.get("made_by", ""))
            self._suggestions[key, number] = found
        return self._suggestions[key, number]

    def _member(self, search: Search, one: Suggestion, trial: Trial, allowed: Rungs | None) -> Member:
        first = self.slots[search.key][0]
        searched = Searched(search.key, "", one.number, one.values, allowed)
        return Member(trial, first.arm, first.cell, first.varying, one.setting.state_bytes, (), searched)

    def _result(self, trial_id: str) -> dict[str, Any] | None:
        path = self.store.trial_folder(trial_id) / "result.json"
        try:
            found = path.stat()
        except OSError:
            return None
        which = (found.st_mtime_ns, found.st_size, found.st_ino)
        if self._results.get(trial_id, (None,))[0] != which:
            self._results[trial_id] = (which, self.store.result(trial_id))
        return self._results[trial_id][1]

    # ---- pruning -----------------------------------------------------------------------------------------------

    def _rungs(
        self, search: Search, suggestions: tuple[Suggestion, ...], one: Suggestion, seed: int, decide: bool
    ) -> Rungs | None:
        """The cut-offs of one training: as they were kept, or decided now if `decide`."""
        if not search.prune:
            return None
        if one.known == 0:
            return Rungs(search.select[0], search.directions[0], ())
        name = f"{search.prune['grace_steps']}-{search.prune['reduction']}"
        path = self.folder(search.key) / "cuts" / name / f"{one.number}-{seed}.json"
        if path not in self._cuts:
            row = read_json(path)
            if row is None and decide:
                found = {"cuts": self._cut_offs(search, suggestions[: one.known], seed)}
                write_json(path, found, keep_existing=not path.exists(), durable=False)  # one that is there is torn
                row = read_json(path)
            if row is None:
                return None
            cuts = tuple((step, cut) for step, cut in row["cuts"])
            self._cuts[path] = Rungs(search.select[0], search.directions[0], cuts)
        return self._cuts[path]

    def _cut_offs(self, search: Search, earlier: Iterable[Suggestion], seed: int) -> list[tuple[int, float]]:
        """(rung, cut-off) against earlier suggestions; none while one of them has no result on this seed."""
        curves = []
        for one in earlier:
            if one.setting.problem is None:
                trial_id = one.trial(seed).id
                result = self._result(trial_id)
                if result is None:
                    return []
                curves.append(self._curve(search, trial_id, result))
        found: list[tuple[int, float]] = []
        for step in rungs.steps(search.prune):
            if not any(points and points[-1][0] >= step for points, _ in curves):
                break
            scores = [end if (at := rungs.score_at(points, step)) is None else at for points, end in curves]
            cut = rungs.cut_off([s for s in scores if s is not None], search.prune["reduction"], search.directions[0])
            if cut is not None:
                found.append((step, cut))
        return found

    def _curve(
        self, search: Search, trial_id: str, result: Mapping[str, Any]
    ) -> tuple[list[tuple[int, float]], float | None]:
        """A training's validations, and what it scores at rungs after its end (a pruned one nothing)."""
        name, known = search.select[0], (trial_id, str(result["checksum"]))
        if known not in self._curves:
            folder = self.store.trial_folder(trial_id)
            points = [(step, m[name]) for step, m, _ in read_points(folder, result["step"]) if name in m]
            is_pruned = result["status"] == Status.PRUNED
            self._curves[known] = points, None if is_pruned else _measured(search, name, result)
        return self._curves[known]


def _fill(plan: Plan, filled: Mapping[str, Member]) -> Plan:
    """The plan with winners' trials in place of slots, in its members and in the pairs of its tests."""

    def named(ids: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(filled[one].trial.id if one in filled else one for one in ids)

    members = tuple(filled.get(member.trial.id, member) for member in plan.members)
    tests = tuple(
        replace(test, pairs=tuple(Pair(p.block, p.seed, named(p.a), named(p.b)) for p in test.pairs))
        for test in plan.tests
    )
    return replace(plan, members=members, tests=tests)


def _measured(search: Search, name: str, result: Mapping[str, Any]) -> float:
    """What a training that ended scores: a diverged one, or one whose score is no number, the level of chance."""
    if result["status"] == Status.DIVERGED:
        return search.chance[name]
    return float(result["metrics"].get(name, search.chance[name]))


def _ended(
    search: Search, one: Suggestion, result: Mapping[str, Any] | None, allowed: Rungs | None
) -> tuple[str, tuple[float, ...], int] | None:
    """How a suggestion ended on one seed: status, scores and last step; None if it has not."""
    if result is None or not rungs.stands(result, allowed):
        return None
    if result["status"] == Status.PRUNED:
        score = result["pruned"]["score"]
        return Status.PRUNED, (search.chance[search.select[0]] if score is None else score,), result["step"]
    free = {"state_bytes": one.setting.state_bytes, "n_params": result["n_params"]}
    values = [float(free[name]) if name in free else _measured(search, name, result) for name in search.select]
    return result["status"], tuple(values), result["step"]


def _mean(ended: list[tuple[str, tuple[float, ...], int] | None]) -> Score | None:
    """A suggestion's score over its seeds: pruned or diverged if it was on one of them."""
    found = [one for one in ended if one is not None]
    if len(found) < len(ended):
        return None
    statuses = [status for status, _, _ in found]
    status = next((s for s in (Status.PRUNED, Status.DIVERGED) if s in statuses), Status.COMPLETE)
    values = tuple(fsum(column) / len(column) for column in zip(*(v for _, v, _ in found), strict=True))
    return Score(str(status), values, min(step for _, _, step in found))
