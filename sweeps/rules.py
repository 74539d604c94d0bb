"""The rules between parameters, and the state that decoding carries: formulas of the catalogue on a trial's blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from runners.schema import UserError
from sweeps import formula, layers
from sweeps.blocks import Resolved, environment
from sweeps.catalog import Block, Catalog
from sweeps.reader import Mark, Problems
from sweeps.types import show


class Rules:
    """Checks blocks, each combination once; what is broken is told where its values are written."""

    def __init__(self, catalog: Catalog, problems: Problems, origin: Mark) -> None:
        self.catalog, self.problems, self.origin = catalog, problems, origin
        # Keyed by the blocks' ids: their `Raw` keeps every settled block alive.
        self._limits: dict[tuple[int, ...], bool] = {}
        self._bytes: dict[tuple[Any, ...], int] = {}

    def check(self, blocks: Mapping[str, Resolved]) -> bool:
        """Whether the rules of all blocks hold for a trial; broken ones are told where their values are written."""
        around = (id(blocks["task"]), id(blocks["model"]))
        train = blocks.get("train")
        fine = self._check((id(blocks["mechanism"]), *around), blocks, ("mechanism", "task", "model"))
        return fine if train is None else self._check((id(train), *around), blocks, ("train",)) and fine

    def keeps(self, blocks: Mapping[str, Resolved]) -> bool:
        """Whether the rules hold, without a word."""
        return not any(True for block in blocks.values() for _ in self.broken(blocks, block))

    def _check(self, memo: tuple[int, ...], blocks: Mapping[str, Resolved], kinds: tuple[str, ...]) -> bool:
        if memo not in self._limits:
            broken = [(blocks[kind], *found) for kind in kinds for found in self.broken(blocks, blocks[kind])]
            # What has no value follows from what is broken: d_model % n_heads with n_heads of 0.
            false = [found for found in broken if verdict(found[1], found[2]) is False]
            for owner, rule, env, inside in false or broken:
                self._tell(owner, rule, env, blocks, inside)
            self._limits[memo] = not broken
        return self._limits[memo]

    def broken(self, blocks: Mapping[str, Resolved], owner: Resolved) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The rules of `owner` that a trial breaks, with the values they read and what inside the block breaks them:
        `segments` of a training mixture each have to keep the task's rules, layers of their own their mechanism's."""
        outer = environment(blocks) if owner.block.outer_limits else {}
        for part in [{}, *(owner.env.get("segments") or [])]:
            env = {**outer, **owner.env, **part}
            yield from ((rule, env, "segments" if part else "") for rule in _broken(owner.block, env))
        for name, options in owner.block.blocks.items():
            if chosen := owner.env.get(name):
                env = {**owner.env, **chosen}
                yield from ((rule, env, name) for rule in _broken(options[chosen["name"]], env))
        if owner.block.kind == "model" and owner.env.get("layers"):
            mechanism = blocks["mechanism"].block
            for name, block, env in layers.placed(self.catalog, mechanism, environment(blocks)):
                if block is not None and name != "mechanism":
                    yield from ((rule, env, name) for rule in _broken(block, env))

    @staticmethod
    def _inside(owner: Resolved, inside: str) -> Collection[str]:
        """Parameters of the block that is chosen for `inside`."""
        options = owner.block.blocks.get(inside)
        return options[owner.env[inside]["name"]].params.keys() if options else ()

    def _tell(
        self, owner: Resolved, rule: str, env: Mapping[str, Any], blocks: Mapping[str, Resolved], inside: str
    ) -> None:
        names = formula.names(rule)
        known = owner.block.params.keys() | self._inside(owner, inside)
        raws = {True: [owner.raw], False: [owner.raw, *(b.raw for b in blocks.values() if b is not owner)]}
        marks = [
            (m in raw.late, raw.marks[m])
            for name in names
            for raw in raws[name in known]  # another block's parameter of the same name is not what the rule reads
            for m in raw.marks
            if m.rpartition(".")[2] == name
        ]
        marks = [(late, mark) for late, mark in marks if late] or marks
        title = owner.block.title
        if inside in owner.block.blocks:
            title = f"model.{inside}"
        elif inside:
            own = "task.segments" if inside == "segments" else "model.layers"
            marks = [(True, owner.raw.marks[own])] if own in owner.raw.marks else marks
            title = title if inside == "segments" else f"mechanism {inside} in model.layers"
        where = max(marks, key=lambda m: (m[1].line, m[1].column))[1] if marks else owner.raw.keys.get(owner.raw.kind)
        values = ", ".join(f"{name} is {show(env.get(name))}" for name in sorted(names))
        self.problems.add(where or self.origin, f"{title} wants {rule}: here {values}")

    def state_bytes(self, blocks: Mapping[str, Resolved]) -> int:
        """Bytes that decoding carries for one sequence of the trial's length, all layers."""
        train = blocks.get("train")
        memo = (*(id(blocks[kind]) for kind in ("mechanism", "task", "model")), train and train.env.get("dtype"))
        if memo not in self._bytes:
            self._bytes[memo] = self.size(blocks)
        return self._bytes[memo]

    def size(self, blocks: Mapping[str, Resolved]) -> int:
        """The same for blocks that are tried out and not kept."""
        train = blocks.get("train")
        width = 2 if train is not None and train.env.get("dtype") == "bf16" else 4
        env = environment(blocks)
        placed = list(layers.placed(self.catalog, blocks["mechanism"].block, env))
        sizes = [layers.state_elements(block, values) for _, block, values in placed]
        sizes += [blocks["model"].block.state_elements(blocks["model"].env)] * len(placed)
        return sum(4 * state + width * cache for state, cache in sizes)


def _broken(block: Block, env: Mapping[str, Any]) -> Iterator[str]:
    if not formula.all_hold(block.limits, env):
        yield from (rule for rule in block.limits if not verdict(rule, env))


def verdict(rule: str, env: Mapping[str, Any]) -> bool | None:
    """Whether a rule holds; None where its arithmetic has no value."""
    try:
        return bool(formula.evaluate(rule, env))
    except UserError:
        return None
