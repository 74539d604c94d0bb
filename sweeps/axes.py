"""`axes`: lists, zips and items of named blocks, as the options that multiply."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from runners.schema import BLOCKS
from sweeps import sections
from sweeps.catalog import Block, Param
from sweeps.patch import is_form, zip_paths
from sweeps.reader import Mark, Node, near
from sweeps.spec import Axis, Lookup, Option, Written, head
from sweeps.types import show


class AxisReader:
    """Reads the axes of a spec whose base values are `base`."""

    def __init__(self, names: Lookup, base: dict[str, Written]) -> None:
        self.names, self.base = names, base

    def read(self, tree: Node) -> list[Axis]:
        node = tree.get("axes")
        if node is None:
            return []
        if not node.is_map:
            self.names.wrong(node.mark, "axes is a mapping: path -> list of values")
            return []
        axes = [axis for key, child in node.value.items() if (axis := self._axis(key, child, node.keys[key]))]
        self._overlaps(axes)
        return axes

    def _axis(self, key: str, node: Node, mark: Mark) -> Axis | None:
        paths = zip_paths(key) or (key,)
        for path in paths:
            if path in ("seed", "seeds"):
                self.names.wrong(mark, "seeds are an axis of their own: write `seeds: N` at the top level")
                return None
            if not self.names.is_path(path, mark):
                return None
        if sections.is_generator(node):
            node = Node(sections.generated(node, self.names.problems), node.mark)
            if not node.value:
                self.names.is_sound = False
                return None
        if zip_paths(key) and node.is_list and node.value and not any(child.is_list for child in node.value):
            self.names.wrong(node.mark, f"axis {key}: a list of rows of {len(paths)} values, not {show(node.plain())}")
            return None
        if not node.is_list or not node.value:
            self.names.wrong(node.mark, f"axis {key}: a list of at least one value is wanted, not {show(node.plain())}")
            return None
        options: list[Option] = []
        for child in node.value:
            if zip_paths(key):
                options += self._row(paths, child, mark)
            elif self.names.is_block(key):
                options += self._item(key, child, mark)
            else:
                options += [Option({key: Written(child, mark)})]
        return Axis(key, mark, options) if options else None

    def _row(self, paths: tuple[str, ...], row: Node, mark: Mark) -> list[Option]:
        if not row.is_list or len(row.value) != len(paths):
            got = f"{len(row.value)} values" if row.is_list else show(row.plain())
            self.names.wrong(row.mark, f"a row of ({', '.join(paths)}) has {len(paths)} values, not {got}")
            return []
        if len(set(paths)) != len(paths):
            self.names.wrong(mark, f"({', '.join(paths)}) names a path twice")
            return []
        parts = [
            self._item(path, child, mark) if self.names.is_block(path) else [Option({path: Written(child, mark)})]
            for path, child in zip(paths, row.value, strict=True)
        ]
        return [_join(combo) for combo in product(*parts)]

    def _item(self, axis: str, node: Node, mark: Mark) -> list[Option]:
        """The options of one item of a named block's axis: its own lists multiply, in their order."""
        if not node.is_map or is_form(node):
            if not isinstance(node.value, str):
                self.names.wrong(
                    node.mark, f"an item of {axis} is a name or a mapping with `name`, not {show(node.plain())}"
                )
                return []
            self._item_block(axis, node)
            return [Option({axis: Written(node, mark)})]
        name = self._item_name(axis, node)
        if name is None:
            return []
        block = self._item_block(axis, name)
        arm = node.get("arm")
        factors: list[list[Option]] = [
            [Option({axis: Written(name, mark)}, self.names.arm(arm) if arm is not None else None)]
        ]
        seen: dict[str, Mark] = {}
        for key, child in node.value.items():
            if key == "name" or (key == "arm" and axis == "mechanism"):
                continue
            at = node.keys.get(key, child.mark)
            paths = tuple(_full(axis, part) for part in zip_paths(key) or (key,))
            for path in paths:
                if path in seen:
                    self.names.wrong(at, f"{path} is written twice in this item (first in line {seen[path].line})")
                seen[path] = at
            if all(self.names.is_path(path, at) for path in paths):
                factors.append(list(self._factor(axis, block, paths, bool(zip_paths(key)), child, at)))
        return [_join(combo) for combo in product(*factors)]

    def _item_name(self, axis: str, node: Node) -> Node | None:
        name = node.get("name")
        if name is None and axis in self.base:
            return Node(self.base[axis].node.value, node.mark)
        if name is None and axis.startswith("model."):
            options = self.names.catalog.block("model").blocks[axis.split(".")[1]]
            if len(options) == 1:
                return Node(next(iter(options)), node.mark)
        if name is None or not isinstance(name.value, str):
            self.names.wrong(node.mark if name is None else name.mark, f"an item of {axis} needs a name (text)")
            return None
        return name

    def _item_block(self, axis: str, name: Node) -> Block | None:
        if axis in ("mechanism", "task"):
            return self.names.find(axis, name.value, name.mark)
        options = self.names.catalog.block("model").blocks[axis.split(".")[1]]
        if name.value != "none" and name.value not in options:
            self.names.wrong(name.mark, f"{axis}: there is no {name.value!r}{near(name.value, [*options, 'none'])}")
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
    ) -> Iterator[Option]:
        """One key of an item as a list of options: one for a value, several for a list."""
        own = [path.startswith(f"{axis}.") for path in paths]
        for path, is_own in zip(paths, own, strict=True):
            name = path.removeprefix(f"{axis}.")
            if is_own and block is not None and name not in block.params and not self.names.is_block(path):
                self.names.wrong(at, f"{block.title} has no parameter {name!r}{near(name, block.params)}")
                return
        if is_zip:
            if not node.is_list:
                self.names.wrong(node.mark, f"({', '.join(paths)}) takes a list of rows")
                return
            for row in node.value:
                yield from self._row(paths, row, at)
            return
        path = paths[0]
        if sections.is_distribution(node):
            found = sections.distribution(node, self.names.problems)
            if found is None:
                self.names.is_sound = False
            else:
                yield Option({}, None, {path: found})
            return
        if sections.is_generator(node):
            node = Node(sections.generated(node, self.names.problems), node.mark)
        param = block.params.get(path.rpartition(".")[2]) if own[0] and block is not None else self._lookup(path)
        is_axis = node.is_list and (not (param and param.type.is_list) or all(child.is_list for child in node.value))
        if is_axis and not node.value:
            self.names.wrong(node.mark, f"{path}: an empty list")
        for child in node.value if is_axis else [node]:
            if self.names.is_block(path):
                yield from self._item(path, child, at)
            else:
                yield Option({path: Written(child, at)}, None, {path: None})

    def _lookup(self, path: str) -> Param | None:
        kind = head(path)
        if kind in ("model", "train"):
            return self.names.param(path, self.names.catalog.block(kind))
        name = str(self.base[kind].node.value) if kind in self.base else ""
        return (
            self.names.param(path, self.names.catalog.block(kind, name))
            if name in self.names.catalog.names(kind)
            else None
        )

    def _overlaps(self, axes: list[Axis]) -> None:
        owner: dict[str, tuple[str, Mark]] = {}
        for axis in axes:
            for path, mark in axis.paths().items():
                if path in owner:
                    other, where = owner[path]
                    self.names.wrong(
                        mark, f"{path} is already written by the axis {other!r} (line {where.line}): one path, one axis"
                    )
                else:
                    owner[path] = (axis.key, mark)
        for path, written in self.base.items():
            if path in owner and written.node.mark.layer == "set":
                key = owner[path][0]
                way = f"--set 'axes.{key}=[...]' changes the axis, --only '{path}: ...' takes a part of it"
                self.names.wrong(written.node.mark, f"{path} is written by an axis: {way}")


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
