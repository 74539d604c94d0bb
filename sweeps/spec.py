"""The typed spec: what a merged YAML tree says, with every path, name and value form checked against the catalogue.

Terms
    path      mechanism, mechanism.cache, task.seq_len, model.mlp, model.mlp.width, train.lr: one parameter; the path
              of a named block itself (mechanism, task, model.mlp) holds its name
    written   a value as some place of the spec writes it: the node, and the mark of its key
    option    one point of an axis: the values it writes, and the arm it names
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from runners.schema import BLOCKS, UserError
from sweeps.catalog import Block, Catalog, Param
from sweeps.patch import is_form
from sweeps.reader import Mark, Node, Problems, near
from sweeps.sections import Distribution
from sweeps.types import show

KEYS = {
    "sweep": "name of the sweep and of its MLflow experiment",
    "question": "what the sweep is to answer, in a sentence",
    "extends": "the spec this one is a patch on",
    "mechanism": "the memory mechanism, if it is not an axis",
    "task": "the task, if it is not an axis",
    "model": "parameters of the model around the mechanism",
    "train": "parameters of the training",
    "axes": "what is varied: path -> list",
    "when": "list of {if: condition, set: {path: value}}",
    "exclude": "list of conditions: trials that are left out",
    "seeds": "how many seeds, or the list of them",
    "search": "what is tuned inside each cell: path -> distribution",
    "prune": "how hopeless suggestions are stopped",
    "evaluate": "what trained models are evaluated on: grids of task paths",
    "compare": "list of comparisons {a: condition, b: condition}",
    "resources": "what a trial is given",
    "budget": "what the sweep may spend",
    "retry": "how often a failed trial is run again",
    "profiles": "name -> patch, applied with --profile",
}
NAME = re.compile(r"[a-z0-9_-]+")
MAX_NAME = 100
"""Letters of a sweep's name, and of a profile's: both stand in names of folders."""
ARM = re.compile(r"[A-Za-z0-9_+-]+")


class Written(NamedTuple):
    """A value as the spec writes it, and where its key stands."""

    node: Node
    key: Mark


@dataclass(slots=True)
class Option:
    """One point of an axis."""

    values: dict[str, Written]
    arm: str | None = None
    searched: dict[str, Distribution | None] = field(default_factory=dict)


@dataclass(slots=True)
class Axis:
    key: str
    mark: Mark
    options: list[Option]

    def paths(self) -> dict[str, Mark]:
        """Every path that some option writes, and where first."""
        found: dict[str, Mark] = {}
        for option in self.options:
            for path, written in option.values.items():
                found.setdefault(path, written.key)
            for path, searched in option.searched.items():
                if searched is not None:
                    found.setdefault(path, searched.node.mark)
        return found


@dataclass(slots=True)
class Spec:
    """A spec, read. Conditions and evaluation grids stay nodes until the trials are known."""

    name: str
    question: str
    tree: Node
    base: dict[str, Written]
    base_arm: str | None
    axes: list[Axis]
    when: list[tuple[Node, dict[str, Written]]]
    exclude: list[Node]
    seeds: list[int]
    search: dict[str, Distribution]
    search_settings: dict[str, Any]
    prune: dict[str, Any]
    resources: dict[str, Any]
    retry: dict[str, Any]
    budget: dict[str, Any]


@cache
def head(path: str) -> str:
    """The block a path belongs to."""
    return path.partition(".")[0]


class Lookup:
    """Names against the catalogue. What is wrong goes to `problems`; `is_sound` = trials can still be made."""

    def __init__(self, catalog: Catalog, problems: Problems) -> None:
        self.catalog, self.problems = catalog, problems
        self.missing: set[tuple[str, str]] = set()
        self.is_sound = True

    def wrong(self, mark: Mark, message: str) -> None:
        """A problem that leaves the trials unknown."""
        self.is_sound = False
        self.problems.add(mark, message)

    def find(self, kind: str, name: str, mark: Mark) -> Block | None:
        """The block of that name; a missing one is a problem once for each name, whatever uses it."""
        try:
            return self.catalog.block(kind, name)
        except UserError as error:
            self.is_sound = False
            if (kind, name) not in self.missing:
                self.missing.add((kind, name))
                self.problems.add(mark, str(error))
            return None

    def param(self, path: str, block: Block | None) -> Param | None:
        """The parameter at a path below `block` (mechanism, task, model or train), sub-blocks' parameters too."""
        if block is None:
            return None
        parts = path.split(".")[1:]
        if len(parts) == 1:
            return block.params.get(parts[0])
        if len(parts) == 2 and parts[0] in block.blocks:
            found = [sub.params[parts[1]] for sub in block.blocks[parts[0]].values() if parts[1] in sub.params]
            return found[0] if found else None
        return None

    def is_block(self, path: str) -> bool:
        """Whether the value at this path names a block."""
        if path in ("mechanism", "task"):
            return True
        parts = path.split(".")
        return len(parts) == 2 and parts[0] == "model" and parts[1] in self.catalog.block("model").blocks

    def is_path(self, path: str, mark: Mark) -> bool:
        if head(path) in BLOCKS and (path in ("mechanism", "task") or "." in path):
            return True
        known = [*BLOCKS]
        for kind in ("model", "train"):
            known += [f"{kind}.{name}" for name in self.catalog.block(kind).params]
        self.wrong(mark, f"{path!r} is no path of a trial: mechanism, task, model.X, train.X ...{near(path, known)}")
        return False

    def write(self, path: str, node: Node, key: Mark, found: dict[str, Written]) -> None:
        """Write one value, a block inside the model as its name and its parameters."""
        if self.is_block(path) and node.is_map and not is_form(node):
            for inner, child in node.value.items():
                inner_key = node.keys.get(inner, child.mark)
                found[path if inner == "name" else f"{path}.{inner}"] = Written(child, inner_key)
            options = self.catalog.block("model").blocks[path.split(".")[1]]
            if "name" not in node.value and len(options) == 1:
                found[path] = Written(Node(next(iter(options)), node.mark), key)
        else:
            found[path] = Written(node, key)

    def known(self, path: str, block: Block, written: Written) -> Param | None:
        """The parameter of a path; an unknown one is a problem with the nearest name."""
        if self.is_block(path):
            return None
        param = self.param(path, block)
        if param is None:
            name = path.partition(".")[2]
            known = [
                *block.params,
                *(f"{b}.{p}" for b, subs in block.blocks.items() for s in subs.values() for p in s.params),
            ]
            self.wrong(written.key, f"{block.title} has no parameter {name!r}{near(name, known)}")
        return param

    def arm(self, node: Node) -> str | None:
        if not isinstance(node.value, str) or not ARM.fullmatch(node.value):
            self.wrong(node.mark, f"arm: {show(node.plain())} may hold letters, digits, _, + and - only")
            return None
        return node.value
