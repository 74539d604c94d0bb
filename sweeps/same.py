"""Which trials compute the same: settings without effect (INERT, CAPS) and mechanisms that coincide (SAME_AS) gone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from runners.schema import UserError
from sweeps import formula
from sweeps.blocks import Resolved, environment
from sweeps.catalog import Catalog
from sweeps.expand import Cell


class Sameness:
    """Gives each cell a key; cells with equal keys train and evaluate the same model, whatever they are called.

    `slices` are the evaluations that count: a setting without effect in training may have one on a longer sequence.
    """

    def __init__(self, catalog: Catalog, resolved: dict[str, Resolved], slices: Collection[str]) -> None:
        self.catalog, self.resolved, self.slices = catalog, resolved, slices
        self._same: dict[tuple[int, ...], str] = {}

    def key(self, cell: Cell) -> tuple[str, ...]:
        """What a cell computes: its settings without those that have no effect, in training and on each slice."""
        blocks = cell.blocks
        memo = (id(cell.slices), *(id(blocks[kind]) for kind in ("mechanism", "task", "model")))
        if memo not in self._same:
            ids = [s.id for s in cell.slices if s.id in self.slices]
            evaluated = {kind: block for kind, block in blocks.items() if kind != "train"}
            found = [self._effective(blocks), *(self._effective({**evaluated, "task": self.resolved[i]}) for i in ids)]
            self._same[memo] = repr(found)
        rest = [_effective(blocks[kind]) for kind in ("task", "model", "train") if kind in blocks]
        # The values a searched cell stands there with are not the winner's: only the same search finds the same.
        return (self._same[memo], *rest, cell.search.key if cell.search is not None else "")

    def _effective(self, blocks: dict[str, Resolved]) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Name and settings of the mechanism that matter on this task, after CAPS, INERT and SAME_AS."""
        mechanism = blocks["mechanism"]
        block, settings = mechanism.block, {p: mechanism.env[p] for p in mechanism.block.params}
        around = environment(blocks)
        for _ in range(4):
            env = {**around, **settings}
            for name, rule in block.literals.get("CAPS", {}).items():
                env[name] = settings[name] = _capped(settings[name], rule, env)
            kept = {p: v for p, v in settings.items() if not _holds(block.literals.get("INERT", {}).get(p), env)}
            others = block.literals.get("SAME_AS", {})
            other = next((name for name, rule in others.items() if _holds(rule, env)), None)
            if other is None or other not in self.catalog.names("mechanism"):
                return block.name, tuple(sorted(kept.items(), key=lambda item: item[0]))
            block = self.catalog.block("mechanism", other)
            settings = {p: settings.get(p, param.default) for p, param in block.params.items()}
        return block.name, tuple(sorted(settings.items(), key=lambda item: item[0]))


def _effective(block: Resolved) -> str:
    """The settings of a block that has no relatives, but for those of INERT."""
    idle = {name for name, rule in block.block.literals.get("INERT", {}).items() if _holds(rule, block.env)}
    return repr(sorted((k, v) for k, v in block.env.items() if k not in idle)) if idle else block.text


def _capped(value: Any, rule: Any, env: dict[str, Any]) -> Any:
    """A value above what the rule says acts as that."""
    try:
        return min(value, formula.evaluate(str(rule), env))
    except (UserError, TypeError):
        return value


def _holds(rule: Any, env: dict[str, Any]) -> bool:
    try:
        return rule is not None and bool(formula.evaluate(str(rule), env))
    except UserError:
        return False
