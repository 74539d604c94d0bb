"""Whether the sides of a comparison were tuned alike."""

from __future__ import annotations

from dataclasses import dataclass

from runners.schema import Plan, Test


@dataclass(frozen=True)
class Tuning:
    """How the two sides of a test were tuned: how many suggestions their cells had (0 = not searched).

    `is_selected`: some trial was chosen on the very seeds that it is reported on.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    is_selected: bool

    @property
    def is_alike(self) -> bool:
        return self.a == self.b and len(self.a) <= 1

    def words(self) -> str:
        """`16 suggestions a cell against 4`."""
        a, b = (" or ".join(map(str, side)) or "no" for side in (self.a, self.b))
        return f"{a} suggestions a cell against {b}"


UNTUNED = Tuning((), (), False)


def of(plan: Plan, test: Test) -> Tuning:
    """How the sides of `test` were tuned."""
    trials = {search.key: search.trials for search in plan.searches}
    searched = {m.trial.id: m.searched for m in plan.members if m.searched is not None}
    sides: dict[str, set[int]] = {"a": set(), "b": set()}
    selected = False
    for pair in test.pairs:
        for side, ids in (("a", pair.a), ("b", pair.b)):
            for found in map(searched.get, ids):
                sides[side].add(trials[found.key] if found is not None else 0)
                selected |= found is not None and found.is_selected
    return Tuning(tuple(sorted(sides["a"])), tuple(sorted(sides["b"])), selected)
