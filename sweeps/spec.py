"""The typed spec: what a merged YAML tree says, with every path, name and value form checked against the catalogue.

Terms
    path      mechanism, mechanism.cache, task.seq_len, model.mlp, model.mlp.width, train.lr: one parameter; the path
              of a named block itself (mechanism, task, model.mlp) holds its name
    written   a value as some place of the spec writes it: the node, and the mark of its key
    option    one point of an axis: the values it writes, and the arm it names
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from runners.schema import BLOCKS, UserError
from sweeps import sections
from sweeps.catalog import Block, Catalog, Param
from sweeps.patch import Assembled, is_form, zip_paths
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


class Reader:
    """Reads a merged tree into a `Spec`. What is wrong goes to `problems`; `is_sound` = trials can still be made."""

    def __init__(self, assembled: Assembled, catalog: Catalog, problems: Problems) -> None:
        self.assembled, self.tree = assembled, assembled.tree
        self.catalog, self.problems = catalog, problems
        self.missing: set[tuple[str, str]] = set()
        self.is_sound = True

    def wrong(self, mark: Mark, message: str) -> None:
        """A problem that leaves the trials unknown."""
        self.is_sound = False
        self.problems.add(mark, message)

    def read(self) -> Spec:
        tree = self.tree
        for key in tree.value:
            if key not in KEYS:
                self.problems.add(tree.keys[key], f"a spec has no key {key!r}{near(key, KEYS)}")
        base = self._base()
        axes = self._axes(base)
        self._overlaps(base, axes)
        name = self._text("sweep", required=True)
        if name and not NAME.fullmatch(name):
            self.problems.add(tree.value["sweep"].mark, f"sweep: {name!r} may hold a-z, 0-9, _ and - only")
        search, settings = self._search()
        arm = tree.get("mechanism").get("arm") if tree.get("mechanism") is not None else None  # type: ignore[union-attr]
        return Spec(
            name=name + (f"@{self.assembled.profile}" if self.assembled.profile else ""),
            question=self._text("question"),
            tree=tree,
            base=base,
            base_arm=self._arm(arm) if arm is not None else None,
            axes=axes,
            when=self._when(),
            exclude=self._conditions("exclude"),
            seeds=self._seeds(),
            search=search,
            search_settings=settings,
            prune=sections.read_prune(tree.get("prune"), self.problems),
            resources=sections.read("resources", tree.get("resources"), self.problems),
            retry=sections.read("retry", tree.get("retry"), self.problems),
            budget=sections.read("budget", tree.get("budget"), self.problems),
        )

    # --- plain keys ---------------------------------------------------------------------------------------------

    def _text(self, key: str, required: bool = False) -> str:
        node = self.tree.get(key)
        if node is None:
            if required:
                self.problems.add(self.tree.mark, f"the key {key!r} is missing: {KEYS[key]}")
            return ""
        if not isinstance(node.value, str):
            self.problems.add(node.mark, f"{key} is text, not {show(node.plain())}; quote it")
            return ""
        return node.value

    def _seeds(self) -> list[int]:
        node = self.tree.get("seeds")
        if node is None:
            return [0]
        if type(node.value) is int and 1 <= node.value <= 10_000:
            return list(range(node.value))
        if node.is_list and node.value:
            values = [child.value for child in node.value]
            if all(type(v) is int and 0 <= v < 1 << 31 for v in values) and len(set(values)) == len(values):
                return values
        self.wrong(
            node.mark, f"seeds is a count of at least 1, or a list of different whole numbers, not {show(node.plain())}"
        )
        return [0]

    def _conditions(self, key: str) -> list[Node]:
        node = self.tree.get(key)
        if node is None:
            return []
        if not node.is_list:
            self.problems.add(node.mark, f"{key} is a list of conditions: [{{path: value}}]")
            return []
        return list(node.value)

    # --- blocks -------------------------------------------------------------------------------------------------

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

    def _base(self) -> dict[str, Written]:
        found: dict[str, Written] = {}
        for kind in BLOCKS:
            node = self.tree.get(kind)
            if node is None:
                continue
            key = self.tree.keys.get(kind, node.mark)
            if kind in ("mechanism", "task"):
                block = self._named(kind, node, key, found)
            elif not node.is_map:
                self.wrong(node.mark, f"{kind} is a mapping of its parameters, not {show(node.plain())}")
                continue
            else:
                block = self.catalog.block(kind)
                for name, child in node.value.items():
                    self._one(f"{kind}.{name}", child, node.keys.get(name, child.mark), found)
            for path, written in found.items():
                if head(path) == kind and path != kind and block is not None:
                    self._known(path, block, written)
        return found

    def _named(self, kind: str, node: Node, key: Mark, found: dict[str, Written]) -> Block | None:
        name = node.get("name") if node.is_map else node
        if name is None or not isinstance(name.value, str):
            where = name.mark if name is not None else key
            self.wrong(where, f"{kind} needs a name{near('', self.catalog.names(kind))}")
            return None
        found[kind] = Written(name, key)
        for inner, child in node.value.items() if node.is_map else ():
            if inner not in ("name", "arm"):
                self._one(f"{kind}.{inner}", child, node.keys.get(inner, child.mark), found)
        return self.find(kind, name.value, name.mark)

    def _one(self, path: str, node: Node, key: Mark, found: dict[str, Written]) -> None:
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

    def _known(self, path: str, block: Block, written: Written) -> Param | None:
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

    # --- axes ---------------------------------------------------------------------------------------------------

    def _axes(self, base: dict[str, Written]) -> list[Axis]:
        node = self.tree.get("axes")
        if node is None:
            return []
        if not node.is_map:
            self.wrong(node.mark, "axes is a mapping: path -> list of values")
            return []
        return [axis for key, child in node.value.items() if (axis := self._axis(key, child, node.keys[key], base))]

    def _axis(self, key: str, node: Node, mark: Mark, base: dict[str, Written]) -> Axis | None:
        paths = zip_paths(key) or (key,)
        for path in paths:
            if path in ("seed", "seeds"):
                self.wrong(mark, "seeds are an axis of their own: write `seeds: N` at the top level")
                return None
            if not self._is_path(path, mark):
                return None
        if sections.is_generator(node):
            node = Node(sections.generated(node, self.problems), node.mark)
            if not node.value:
                self.is_sound = False
                return None
        if zip_paths(key) and node.is_list and node.value and not any(child.is_list for child in node.value):
            self.wrong(node.mark, f"axis {key}: a list of rows of {len(paths)} values, not {show(node.plain())}")
            return None
        if not node.is_list or not node.value:
            self.wrong(node.mark, f"axis {key}: a list of at least one value is wanted, not {show(node.plain())}")
            return None
        options: list[Option] = []
        for child in node.value:
            if zip_paths(key):
                options += self._row(paths, child, mark, base)
            elif self.is_block(key):
                options += self._item(key, child, mark, base)
            else:
                options += [Option({key: Written(child, mark)})]
        return Axis(key, mark, options) if options else None

    def _is_path(self, path: str, mark: Mark) -> bool:
        if head(path) in BLOCKS and (path in ("mechanism", "task") or "." in path):
            return True
        known = [*BLOCKS]
        for kind in ("model", "train"):
            known += [f"{kind}.{name}" for name in self.catalog.block(kind).params]
        self.wrong(mark, f"{path!r} is no path of a trial: mechanism, task, model.X, train.X ...{near(path, known)}")
        return False

    def _row(self, paths: tuple[str, ...], row: Node, mark: Mark, base: dict[str, Written]) -> list[Option]:
        if not row.is_list or len(row.value) != len(paths):
            got = f"{len(row.value)} values" if row.is_list else show(row.plain())
            self.wrong(row.mark, f"a row of ({', '.join(paths)}) has {len(paths)} values, not {got}")
            return []
        if len(set(paths)) != len(paths):
            self.wrong(mark, f"({', '.join(paths)}) names a path twice")
            return []
        parts = [
            self._item(path, child, mark, base) if self.is_block(path) else [Option({path: Written(child, mark)})]
            for path, child in zip(paths, row.value, strict=True)
        ]
        return [_join(combo) for combo in product(*parts)]

    def _item(self, axis: str, node: Node, mark: Mark, base: dict[str, Written]) -> list[Option]:
        """The options of one item of a named block's axis: its own lists multiply, in their order."""
        if not node.is_map or is_form(node):
            if not isinstance(node.value, str):
                self.wrong(node.mark, f"an item of {axis} is a name or a mapping with `name`, not {show(node.plain())}")
                return []
            self._item_block(axis, node)
            return [Option({axis: Written(node, mark)})]
        name = self._item_name(axis, node, base)
        if name is None:
            return []
        block = self._item_block(axis, name)
        arm = node.get("arm")
        factors: list[list[Option]] = [
            [Option({axis: Written(name, mark)}, self._arm(arm) if arm is not None else None)]
        ]
        seen: dict[str, Mark] = {}
        for key, child in node.value.items():
            if key == "name" or (key == "arm" and axis == "mechanism"):
                continue
            at = node.keys.get(key, child.mark)
            paths = tuple(_full(axis, part) for part in zip_paths(key) or (key,))
            for path in paths:
                if path in seen:
                    self.wrong(at, f"{path} is written twice in this item (first in line {seen[path].line})")
                seen[path] = at
            if all(self._is_path(path, at) for path in paths):
                factors.append(list(self._factor(axis, block, paths, bool(zip_paths(key)), child, at, base)))
        return [_join(combo) for combo in product(*factors)]

    def _item_name(self, axis: str, node: Node, base: dict[str, Written]) -> Node | None:
        name = node.get("name")
        if name is None and axis in base:
            return Node(base[axis].node.value, node.mark)
        if name is None and axis.startswith("model."):
            options = self.catalog.block("model").blocks[axis.split(".")[1]]
            if len(options) == 1:
                return Node(next(iter(options)), node.mark)
        if name is None or not isinstance(name.value, str):
            self.wrong(node.mark if name is None else name.mark, f"an item of {axis} needs a name (text)")
            return None
        return name

    def _item_block(self, axis: str, name: Node) -> Block | None:
        if axis in ("mechanism", "task"):
            return self.find(axis, name.value, name.mark)
        options = self.catalog.block("model").blocks[axis.split(".")[1]]
        if name.value != "none" and name.value not in options:
            self.wrong(name.mark, f"{axis}: there is no {name.value!r}{near(name.value, [*options, 'none'])}")
            return None
        return options.get(name.value)

    def _factor(
        self,
        axis: str,
        block: Block | None,
        paths: tuple[str, ...],
        is_zip: bool,
        node: Node,
        at: Mark,
        base: dict[str, Written],
    ) -> Iterator[Option]:
        """One key of an item as a list of options: one for a value, several for a list."""
        own = [path.startswith(f"{axis}.") for path in paths]
        for path, is_own in zip(paths, own, strict=True):
            name = path.removeprefix(f"{axis}.")
            if is_own and block is not None and name not in block.params and not self.is_block(path):
                self.wrong(at, f"{block.title} has no parameter {name!r}{near(name, block.params)}")
                return
        if is_zip:
            if not node.is_list:
                self.wrong(node.mark, f"({', '.join(paths)}) takes a list of rows")
                return
            for row in node.value:
                yield from self._row(paths, row, at, base)
            return
        path = paths[0]
        if sections.is_distribution(node):
            found = sections.distribution(node, self.problems)
            if found is not None:
                yield Option({}, None, {path: found})
            return
        if sections.is_generator(node):
            node = Node(sections.generated(node, self.problems), node.mark)
        param = block.params.get(path.rpartition(".")[2]) if own[0] and block is not None else self._lookup(path, base)
        is_axis = node.is_list and (not (param and param.type.is_list) or all(child.is_list for child in node.value))
        if is_axis and not node.value:
            self.wrong(node.mark, f"{path}: an empty list")
        for child in node.value if is_axis else [node]:
            if self.is_block(path):
                yield from self._item(path, child, at, base)
            else:
                yield Option({path: Written(child, at)}, None, {path: None})

    def _lookup(self, path: str, base: dict[str, Written]) -> Param | None:
        kind = head(path)
        if kind in ("model", "train"):
            return self.param(path, self.catalog.block(kind))
        name = str(base[kind].node.value) if kind in base else ""
        return self.param(path, self.catalog.block(kind, name)) if name in self.catalog.names(kind) else None

    def _arm(self, node: Node) -> str | None:
        if not isinstance(node.value, str) or not ARM.fullmatch(node.value):
            self.wrong(node.mark, f"arm: {show(node.plain())} may hold letters, digits, _, + and - only")
            return None
        return node.value

    def _overlaps(self, base: dict[str, Written], axes: list[Axis]) -> None:
        owner: dict[str, tuple[str, Mark]] = {}
        for axis in axes:
            for path, mark in axis.paths().items():
                if path in owner:
                    other, where = owner[path]
                    self.wrong(
                        mark, f"{path} is already written by the axis {other!r} (line {where.line}): one path, one axis"
                    )
                else:
                    owner[path] = (axis.key, mark)
        for path, written in base.items():
            if path in owner and written.node.mark.layer == "set":
                key = owner[path][0]
                way = f"--set 'axes.{key}=[...]' changes the axis, --only '{path}: ...' takes a part of it"
                self.wrong(written.node.mark, f"{path} is written by an axis: {way}")

    # --- when and search ----------------------------------------------------------------------------------------

    def _when(self) -> list[tuple[Node, dict[str, Written]]]:
        found = []
        for entry in self._conditions("when"):
            condition, settings = entry.get("if"), entry.get("set")
            if condition is None or settings is None or not settings.is_map or len(entry.value) != 2:
                self.wrong(entry.mark, "an entry of when is {if: condition, set: {path: value}}")
                continue
            values: dict[str, Written] = {}
            for path, child in settings.value.items():
                mark = settings.keys.get(path, child.mark)
                if self._is_path(path, mark):
                    if path in ("mechanism", "task"):
                        self.wrong(mark, f"when cannot change the {path}: make it an axis")
                        continue
                    self._one(path, child, mark, values)
            found.append((condition, values))
        return found

    def _search(self) -> tuple[dict[str, Distribution], dict[str, Any]]:
        node = self.tree.get("search")
        if node is None:
            if "prune" in self.tree.value:
                self.problems.add(
                    self.tree.keys["prune"], "prune needs search: it stops suggestions of one cell and seed"
                )
            return {}, {}
        if not node.is_map:
            self.problems.add(node.mark, "search is a mapping: path -> distribution")
            return {}, {}
        paths = tuple(key for key in node.value if "." in key)
        settings = sections.read("search", node, self.problems, skip=paths)
        found = {}
        for path in paths:
            mark = node.keys.get(path, node.value[path].mark)
            if self._is_path(path, mark):
                distribution = sections.distribution(node.value[path], self.problems)
                if distribution is not None:
                    found[path] = distribution
        sampler = settings.get("sampler", "tpe")
        if sampler == "grid":
            if "trials" in settings:
                self.problems.add(node.keys["trials"], "sampler grid visits every value: it takes no trials")
            for path, distribution in found.items():
                if distribution.kind != "values":
                    self.problems.add(
                        distribution.node.mark,
                        f"sampler grid takes {{values: [...]}} for {path}, not {distribution.kind}",
                    )
        elif "trials" not in settings:
            self.problems.add(node.mark, f"search with sampler {sampler} needs `trials`: suggestions a cell in all")
        return found, settings


def _full(axis: str, key: str) -> str:
    """The path of an item's key: a full path if it begins with a block, else the axis block's own parameter."""
    return key if "." in key and head(key) in BLOCKS else f"{axis}.{key}"


def _join(options: tuple[Option, ...]) -> Option:
    joined = Option({})
    for option in options:
        joined.values.update(option.values)
        joined.searched.update(option.searched)
        joined.arm = joined.arm or option.arm
    return joined
