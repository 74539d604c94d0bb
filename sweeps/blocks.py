"""A trial's blocks on their way from text to settings: as written (`Raw`), and with everything decided (`Resolved`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runners.schema import digest
from sweeps.catalog import Block, Param
from sweeps.reader import Mark


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A value that follows from others: `{ref: path, times, plus, round}` or `{match: state_bytes, to: N}`."""

    kind: str
    path: str
    number: float
    plus: float
    round: str
    mark: Mark
    param: Param


@dataclass(eq=False)
class Raw:
    """One block as written: typed values and forms by path, and where each stands. `late` paths come from an axis,
    an item or `when`."""

    kind: str
    block: Block
    values: dict[str, Any]
    marks: dict[str, Mark]
    keys: dict[str, Mark]
    late: frozenset[str]
    misfits: set[str] = field(default_factory=set)
    """Paths whose values do not fit, which is told: the parameter is given all the same."""
    forms: dict[str, Form] = field(default_factory=dict)
    settled: dict[tuple[Any, ...], Resolved] = field(default_factory=dict)
    changed: dict[tuple[Any, ...], Raw | None] = field(default_factory=dict)


@dataclass(eq=False)
class Resolved:
    """One block with every setting decided. `text` is its part of a trial's identity."""

    raw: Raw
    settings: dict[str, Any]
    flat: dict[str, Any]
    env: dict[str, Any]
    text: str

    @property
    def block(self) -> Block:
        return self.raw.block


def param_at(raw: Raw, path: str) -> Param | None:
    """The parameter of a path, that of the chosen block inside the model too; None for the name of a block."""
    parts = path.split(".")[1:]
    if len(parts) == 2 and parts[0] in raw.block.blocks:
        top = raw.block.params.get(parts[0])
        usual = top.default.get("name") if top is not None and isinstance(top.default, dict) else None
        block = raw.block.blocks[parts[0]].get(str(raw.values.get(f"{raw.kind}.{parts[0]}", usual)))
        return block.params.get(parts[1]) if block is not None else None
    return raw.block.params.get(parts[0]) if len(parts) == 1 and parts[0] not in raw.block.blocks else None


def environment(blocks: Mapping[str, Resolved]) -> dict[str, Any]:
    """The names a mechanism's formulas may read: model's, task's, its own, `conv`, and whether a task has `images`.

    In training a mixture is as long as its longest segment; blocks without `train` are an evaluation, which is as long
    as its own setting.
    """
    model, task = blocks["model"].env, blocks["task"].env
    seq_len = longest_row(task) if "train" in blocks else task.get("seq_len")
    around = {**task} if seq_len is None else {**task, "seq_len": seq_len}
    images = "PATCHES" in blocks["task"].block.literals
    conv = 3 if model.get("short_conv") else 0
    return {"conv": conv, "images": images, **model, **around, **blocks["mechanism"].env}


def longest_row(task: Mapping[str, Any]) -> int | None:
    """Tokens of the longest training row of these task settings; None for a task without lengths.

    A segment of a mixture that says no length has the task's own.
    """
    own = task.get("seq_len")
    lengths = [part.get("seq_len", own) for part in task.get("segments") or [{}]]
    return max((length for length in lengths if length is not None), default=None)


def slice_id(task: Resolved) -> str:
    """The id of an evaluation on these task settings."""
    return digest({"task": task.text})
