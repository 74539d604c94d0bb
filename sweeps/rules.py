"""The rules between parameters, and the state that decoding carries: formulas of the catalogue on a trial's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runners.schema import UserError
from sweeps import formula
from sweeps.blocks import Resolved, environment
from sweeps.reader import Mark, Problems
from sweeps.types import show


class Rules:
    """Checks blocks, each combination once; what is broken is told where its values are written."""

    def __init__(self, problems: Problems, origin: Mark) -> None:
        self.problems, self.origin = problems, origin
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
            for owner, rule, env, in_segment in false or broken:
                self._tell(owner, rule, env, blocks, in_segment)
            self._limits[memo] = not broken
        return self._limits[memo]

    @staticmethod
    def broken(blocks: Mapping[str, Resolved], owner: Resolved) -> Iterator[tuple[str, dict[str, Any], bool]]:
        """The rules of `owner` that a trial breaks; a training mixture's segments each have to keep the task's."""
        outer = environment(blocks) if owner.block.outer_limits else {}
        for part in [{}, *(owner.env.get("segments") or [])]:
            env = {**outer, **owner.env, **part}
            if not formula.all_hold(owner.block.limits, env):
                yield from ((rule, env, bool(part)) for rule in owner.block.limits if not verdict(rule, env))

    def _tell(
        self, owner: Resolved, rule: str, env: Mapping[str, Any], blocks: Mapping[str, Resolved], in_segment: bool
    ) -> None:
        names = formula.names(rule)
        raws = [owner.raw, *(block.raw for block in blocks.values() if block is not owner)]
        marks = [(m in raw.late, raw.marks[m]) for raw in raws for m in raw.marks if m.rpartition(".")[2] in names]
        marks = [(late, mark) for late, mark in marks if late] or marks
        if in_segment and "task.segments" in owner.raw.marks:
            marks = [(True, owner.raw.marks["task.segments"])]
        where = max(marks, key=lambda m: (m[1].line, m[1].column))[1] if marks else owner.raw.keys.get(owner.raw.kind)
        values = ", ".join(f"{name} is {show(env.get(name))}" for name in sorted(names))
        self.problems.add(where or self.origin, f"{owner.block.title} wants {rule}: here {values}")

    def state_bytes(self, blocks: Mapping[str, Resolved]) -> int:
        """Bytes that decoding carries for one sequence of the trial's length, all layers."""
        train = blocks.get("train")
        memo = (*(id(blocks[kind]) for kind in ("mechanism", "task", "model")), train and train.env.get("dtype"))
        if memo not in self._bytes:
            self._bytes[memo] = self.size(blocks)
        return self._bytes[memo]

    @staticmethod
    def size(blocks: Mapping[str, Resolved]) -> int:
        """The same for blocks that are tried out and not kept."""
        env = environment(blocks)
        train, model = blocks.get("train"), blocks["model"].env
        width = 2 if train is not None and train.env.get("dtype") == "bf16" else 4
        state, cache = blocks["mechanism"].block.state_elements(env)
        n_layers = model.get("n_layers") or 1
        kinds = model.get("layers") or ["mechanism"]
        placed = [kinds[number % len(kinds)] for number in range(n_layers)]
        n_mixers = placed.count("mechanism")
        return n_mixers * (4 * state + width * cache) + placed.count("base_conv") * 2 * env.get("d_model", 0) * width


def verdict(rule: str, env: Mapping[str, Any]) -> bool | None:
    """Whether a rule holds; None where its arithmetic has no value."""
    try:
        return bool(formula.evaluate(rule, env))
    except UserError:
        return None
