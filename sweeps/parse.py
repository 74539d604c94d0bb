"""A merged YAML tree -> `Spec`: every key, path, name and value form checked against the catalogue."""

from __future__ import annotations

from typing import Any

from runners.schema import BLOCKS
from sweeps import sections
from sweeps.axes import AxisReader
from sweeps.catalog import Block, Catalog
from sweeps.patch import Assembled, zip_paths
from sweeps.reader import Mark, Node, Problems, near
from sweeps.sections import Distribution
from sweeps.spec import KEYS, MAX_NAME, NAME, Lookup, Spec, Written, head
from sweeps.types import show


class Reader(Lookup):
    """Reads a merged tree into a `Spec`. What is wrong goes to `problems`; `is_sound` = trials can still be made."""

    def __init__(self, assembled: Assembled, catalog: Catalog, problems: Problems) -> None:
        super().__init__(catalog, problems)
        self.assembled, self.tree = assembled, assembled.tree

    def read(self) -> Spec:
        tree = self.tree
        for key in tree.value:
            if key not in KEYS:
                self.problems.add(tree.keys[key], f"a spec has no key {key!r}{near(key, KEYS)}")
        base = self._base()
        axes = AxisReader(self, base).read(tree)
        name = self._text("sweep", required=True)
        if name and not NAME.fullmatch(name):
            self.problems.add(tree.value["sweep"].mark, f"sweep: {name!r} may hold a-z, 0-9, _ and - only")
        elif len(name) > MAX_NAME:
            self.problems.add(tree.value["sweep"].mark, f"sweep: {len(name)} letters; a name has at most {MAX_NAME}")
        if len(self.assembled.profile or "") > MAX_NAME:
            where = tree.value["profiles"].keys[self.assembled.profile]
            self.problems.add(where, f"a profile's name has at most {MAX_NAME} letters")
        search, settings = self._search()
        for axis in axes:
            for path in zip_paths(axis.key) or (axis.key,):
                if path in search:
                    where = search[path].node.mark
                    self.wrong(
                        where, f"{path} is an axis (line {axis.mark.line}): search something else, or drop the axis"
                    )
        arm = tree.get("mechanism").get("arm") if tree.get("mechanism") is not None else None  # type: ignore[union-attr]
        return Spec(
            name=name + (f"@{self.assembled.profile}" if self.assembled.profile else ""),
            question=self._text("question"),
            tree=tree,
            base=base,
            base_arm=self.arm(arm) if arm is not None else None,
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
                    self.write(f"{kind}.{name}", child, node.keys.get(name, child.mark), found)
            for path, written in found.items():
                if head(path) == kind and path != kind and block is not None:
                    self.known(path, block, written)
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
                self.write(f"{kind}.{inner}", child, node.keys.get(inner, child.mark), found)
        return self.find(kind, name.value, name.mark)

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
                if self.is_path(path, mark):
                    if path in ("mechanism", "task"):
                        self.wrong(mark, f"when cannot change the {path}: make it an axis")
                        continue
                    self.write(path, child, mark, values)
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
            if self.is_path(path, mark):
                distribution = sections.distribution(node.value[path], self.problems)
                if distribution is None:
                    self.is_sound = False
                else:
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
