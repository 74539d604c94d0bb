"""Which trials of two sides make a pair: cells grouped by the values they must share, and the blocks pairs stand in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from runners.schema import Pair
from sweeps import conditions
from sweeps.conditions import MISSING
from sweeps.expand import Cell

Key = tuple[Any, ...]


class Matched:
    """The cells of sides a and b by their values on `paths`. A cell that lacks a path has only its like for partners.

    `shared` are the values that both sides have, in a's order.
    """

    def __init__(self, paths: list[str], a: list[Cell], b: list[Cell]) -> None:
        self.paths = paths
        self.a, self.b = _group(a, paths), _group(b, paths)
        self.shared = [key for key in self.a if key in self.b]

    def cells(self, key: Key) -> list[Cell]:
        return [*self.a[key], *self.b[key]]

    def evaluated_on(self, slices: Collection[str]) -> Matched:
        """The same without cells that are evaluated on none of `slices`: they have no score, now or ever."""

        def is_asked(cell: Cell) -> bool:
            return any(s.id in slices for s in cell.slices)

        a, b = ([cell for cells in groups.values() for cell in cells] for groups in (self.a, self.b))
        if all(map(is_asked, (*a, *b))):
            return self
        return Matched(self.paths, [*filter(is_asked, a)], [*filter(is_asked, b)])

    def label(self, key: Key, blocks: Collection[str] | None = None) -> str:
        """`seq_len-64/n_pairs-4`: the values of a key, or those of its paths in some blocks of settings."""
        parts = [
            f"{path.rpartition('.')[2]}-{'+'.join(map(str, v[1:])) if isinstance(v, tuple) else v}"
            for path, v in zip(self.paths, key, strict=True)
            if v is not MISSING and (blocks is None or path.split(".")[0] in blocks)
        ]
        return "/".join(parts) or "all"

    def pairs(self) -> list[Pair]:
        """One pair a block and seed; what a block shares of mechanism and training is averaged in it."""
        found: dict[tuple[str, int], tuple[dict[str, None], dict[str, None]]] = {}
        for key in self.shared:
            block = self.label(key, ("task", "model"))
            for seed in self.a[key][0].ids:
                for side, cells in zip(
                    found.setdefault((block, seed), ({}, {})), (self.a[key], self.b[key]), strict=True
                ):
                    side.update(dict.fromkeys(cell.ids[seed] for cell in cells if seed in cell.ids))
        return [Pair(block, seed, tuple(a), tuple(b)) for (block, seed), (a, b) in found.items() if a and b]

    def unpaired(self, cells: list[Cell]) -> int:
        """Trials of a side's cells that are in no pair."""
        paired = {id(cell) for key in self.shared for cell in self.cells(key)}
        return sum(len(cell.ids) for cell in cells if id(cell) not in paired)


def _group(cells: list[Cell], paths: list[str]) -> dict[Key, list[Cell]]:
    found: dict[Key, list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(conditions.key(cell.get(path)) for path in paths), []).append(cell)
    return found
