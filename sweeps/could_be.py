"""What suggestions of a searched cell could be: trials all over its spaces, for a plan to be costed by.

The trial that stands in a cell's slot has the first values of its spaces, often the cheapest ones. Its cost is not that
of the search where what is searched sets it: updates, rows, sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from runners.schema import BLOCKS, Member, Plan, Search, Trial
from runners.suggest import value_at
from sweeps.catalog import Catalog
from sweeps.searches import Suggestions

COST_NOTHING = {
    *("train.lr", "train.warmup", "train.schedule", "train.optimizer", "train.beta1", "train.beta2"),
    *("train.weight_decay", "train.clip", "train.stop_above"),
}
"""What can be searched without a thought for the cost."""
DRAWS = 32
"""Suggestions drawn for a mean."""
MOST_CORNERS = 64
"""Combinations of the spaces' ends that are looked at for the least and the most."""


@dataclass(frozen=True, slots=True)
class Case:
    """One trial that a cell may train; `is_draw` = it counts for the mean, and is not an end of the spaces only."""

    trial: Trial
    state_bytes: int
    is_draw: bool = True


class Cases:
    """The trials that the cells of a plan may train."""

    def __init__(self, plan: Plan, catalog: Catalog) -> None:
        self._searches = {search.key: search for search in plan.searches}
        self._settle = Suggestions(plan, catalog)

    def of(self, member: Member) -> list[Case]:
        """Those of the member's cell: its own trial alone, unless something is searched there that sets the cost."""
        stands = [Case(member.trial, member.state_bytes)]
        search = self._searches[member.searched.key] if member.searched is not None else None
        if search is None or search.space.keys() <= COST_NOTHING:
            return stands
        found = [
            Case(Trial(member.trial.id, member.trial.seed, *map(made.settings.get, BLOCKS)), made.state_bytes, is_draw)  # type: ignore[arg-type]
            for values, is_draw in _values(search)
            if (made := self._settle(search.key, values)).problem is None
        ]
        return found if any(case.is_draw for case in found) else stands


def _values(search: Search) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Values all over the spaces: their ends, or choices, in every combination, and draws. The same each time."""
    corners = product(*(space.values for space in search.space.values()))
    for corner in islice(corners, MOST_CORNERS):
        yield dict(zip(search.space, corner, strict=True)), search.sampler == "grid"
    yield {path: space.values[-1] for path, space in search.space.items()}, False
    source = random.Random(0)
    for number in range(DRAWS if search.sampler != "grid" else 0):
        # One draw from each part of the first space, so that the mean of a single space is no matter of luck.
        shares = [(number + 0.5) / DRAWS, *(source.random() for _ in range(len(search.space) - 1))]
        yield {p: value_at(s, share) for (p, s), share in zip(search.space.items(), shares, strict=True)}, True
