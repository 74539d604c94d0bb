"""What a launch has to do with: the report trials and suggestions' trainings that were asked of it, as they come up.

Members of searched cells come and go: a search makes its next round when the one before has ended, and fills its slots
when it is over. Everything else is there from the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from runners.schema import EvalSlice, Member, Plan, UserError
from runners.search import Resolve, Searches, State
from runners.store import Store


class Members:
    """The members of one launch, each id once. `only` holds ids of trials and of slots; None = all.

    A search is taken up if one of its slots, or the training of one of its suggestions, is asked for.
    """

    def __init__(self, plan: Plan, store: Store, only: frozenset[str] | None, resolve: Resolve | None) -> None:
        self._plan, self._only = plan, only
        self._searches = Searches(plan, store)
        self._resolve = resolve
        self._found: dict[str, Member] = {}
        self._of: dict[str, set[str]] = {}
        self._states: dict[str, State] = {}

    def __iter__(self) -> Iterator[Member]:
        """Report trials (open slots among them) in plan order, then the trainings of suggestions."""
        yield from self._found.values()

    def made(self) -> list[Member]:
        """Those that the plan itself does not have."""
        planned = {member.trial.id for member in self._plan.members}
        return [member for trial_id, member in self._found.items() if trial_id not in planned]

    def begin(self) -> tuple[Member, ...]:
        """All members that are known at the start, first rounds made where they were missing."""
        view = self._searches.view()
        asked = [member for member in view.members if self._is_asked(member)]
        chosen = {member.searched.key for member in asked if member.searched is not None}
        # Who asks for a suggestion's training asks for what comes of it: the later rounds and the winner's trials.
        whole = {m.searched.key for m in asked if m.searched is not None and m.role == "search"}
        for slot, now in zip(self._plan.members, view.plan.members, strict=True):
            is_after = slot.searched is not None and self._only is not None and slot.searched.key in whole
            if is_after or self._is_asked(now):
                self._found[slot.trial.id] = slot
        for key in self._searches.searches:
            if key in chosen:
                self._advance(key)
        return tuple(self)

    def after(self, member: Member) -> list[Member]:
        """What is to be done now that `member` has ended: new members, and those of which more is asked."""
        found = [one for key in self._of.get(member.trial.id, ()) for one in self._advance(key)]
        return list({one.trial.id: one for one in found}.values())

    @property
    def total(self) -> int:
        """How many there will be, suggestions that are not made yet among them."""
        more = 0
        for state in self._states.values():
            left = state.search.trials - len(state.suggestions)
            more += left * len(state.search.seeds)
            if state.search.is_same and not state.is_over:
                more -= len(self._searches.slots[state.search.key])
        return len(self._found) + more

    def stuck(self, failed: set[str]) -> list[str]:
        """Why searches that are not over do not go on: a line for each, with what helps."""
        lines = []
        for state in self._states.values():
            if state.is_over:
                if state.winner is None:
                    problem = next(s.setting.problem for s in state.suggestions if s.setting.problem is not None)
                    lines.append(f"cell {state.search.cell}: no suggestion could be trained: {problem}")
                continue
            numbers = [m.searched.number for m in state.members if m.trial.id in failed and m.searched is not None]
            if numbers:
                words = ", ".join(map(str, dict.fromkeys(numbers)))
                lines.append(
                    f"cell {state.search.cell} waits for failed suggestion {words}: "
                    f"`sweep resume {self._plan.sweep} --failed`"
                )
        return lines

    def _is_asked(self, member: Member) -> bool:
        slot = member.searched.slot if member.searched is not None else ""
        return self._only is None or member.trial.id in self._only or slot in self._only

    def _advance(self, key: str) -> list[Member]:
        """Take a search as far as it goes: the members that are new, or of which more is asked now."""
        if self._resolve is None:
            raise UserError(f"sweep {self._plan.sweep} searches, which needs its spec: launch or resume it by `sweep`")
        state = self._states[key] = self._searches.advance(key, self._resolve)
        changed = {}
        for slot, winner in self._searches.filled(state):
            if self._found.pop(slot.trial.id, None) is not None:
                changed[winner.trial.id] = self._joined(winner)
        for member in state.members:
            self._of.setdefault(member.trial.id, set()).add(key)
            before = changed.get(member.trial.id) or self._found.get(member.trial.id)
            if before is None or (before.role == "search" and before.rungs != member.rungs):
                changed[member.trial.id] = member
        self._found.update(changed)
        return list(changed.values())

    def _joined(self, winner: Member) -> Member:
        """A winner's trial with all evaluations that are asked of it: another cell may have the same trial."""
        before = self._found.get(winner.trial.id)
        return winner if before is None else replace(winner, slices=_once(before.slices, winner.slices))


def _once(*parts: tuple[EvalSlice, ...]) -> tuple[EvalSlice, ...]:
    return tuple({one.id: one for slices in parts for one in slices}.values())
