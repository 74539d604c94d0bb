"""Spec -> cells, in file order: every combination of the axes, with `when` and `exclude` applied and rules checked.

Pure and stable: the same spec gives the same cells and ids on every machine. A cell is a trial without its seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any

from runners.schema import BLOCKS, EvalSlice, Search, digest, trial_ids
from sweeps import conditions, formula
from sweeps.blocks import Raw, Resolved, param_at
from sweeps.catalog import Catalog
from sweeps.conditions import MISSING, Condition, Universe
from sweeps.files import Folders
from sweeps.reader import Node, Problems
from sweeps.resolve import Resolver
from sweeps.rules import verdict
from sweeps.sections import Distribution
from sweeps.spec import Axis, Option, Spec, Written, head
from sweeps.types import show

MAX_TRIALS = 200_000
MOST_STAND_INS = 256
"""How many values are tried for a searched cell to stand there with."""


@dataclass(slots=True, eq=False)
class Cell:
    """One combination. Its name and what follows are filled in once all cells are known."""

    arm: str
    blocks: dict[str, Resolved]
    searched: dict[str, Distribution]
    state_bytes: int = 0
    name: str = ""
    varying: dict[str, Any] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    slices: tuple[EvalSlice, ...] = ()
    search: Search | None = None

    def get(self, path: str) -> Any:
        """The value at a path, or `MISSING`. A searched value is not one of the cell's."""
        if path == "arm":
            return self.arm
        block = self.blocks.get(head(path))
        return block.flat.get(path, MISSING) if block is not None and path not in self.searched else MISSING


@dataclass(slots=True)
class Expansion:
    """The cells of a sweep, and the paths that vary in it, in axis order."""

    cells: list[Cell]
    varying: list[str]
    derived: frozenset[str]
    """Paths that some trial's `ref` or `match` decides: they follow others and pair nothing."""


class Expander:
    """Turns a `Spec` into its cells."""

    def __init__(
        self, spec: Spec, catalog: Catalog, problems: Problems, is_patched: bool, folders: Folders | None = None
    ) -> None:
        self.spec, self.problems, self.is_patched = spec, problems, is_patched
        self.catalog = catalog
        self.resolver = Resolver(catalog, problems, spec.tree.mark, folders)
        self.raws: dict[tuple[str, tuple[int, ...]], Raw | None] = {}
        self.touching = {kind: [n for n, axis in enumerate(spec.axes) if _touches(axis, kind)] for kind in BLOCKS}
        self.trains: set[bool] = set()
        self.unfit: set[str] = set()
        """Searched paths of which some value does not fit, which is told: their cells are looked at no further."""

    def expand(self) -> Expansion:
        """All cells. Problems go where `problems` are; check them before the result is used."""
        axes = [axis.options for axis in self.spec.axes]
        count = prod(map(len, axes)) * len(self.spec.seeds)
        if count > MAX_TRIALS:
            shown = " x ".join(f"{axis.key} {len(axis.options)}" for axis in self.spec.axes)
            self.problems.add(
                self.spec.tree.keys.get("axes", self.spec.tree.mark),
                f"{count:,} trials ({shown} x seeds {len(self.spec.seeds)}); a sweep holds at most {MAX_TRIALS:,}",
            )
            return Expansion([], [], frozenset())
        combos = list(self._combos(axes))
        cells = self._exclude(self._when(combos))
        for cell in cells:
            if not self.unfit.isdisjoint(cell.searched):
                continue
            if cell.searched:
                self._stand_in(cell)
            self.resolver.rules.check(cell.blocks)
        if not self.problems:
            for cell in cells:
                cell.state_bytes = self.resolver.rules.state_bytes(cell.blocks)
        if combos and not cells and not self.problems:
            mark = self.spec.tree.keys.get("exclude", self.spec.tree.mark)
            self.problems.add(mark, f"exclude leaves nothing of {len(combos):,} combinations")
        self._check_training()
        derived = frozenset(path for cell in cells for block in cell.blocks.values() for path in block.raw.forms)
        return Expansion(cells, self._name(cells), derived)

    def _combos(self, axes: list[list[Option]]) -> Iterator[tuple[Cell, dict[str, Raw]]]:
        """Every combination, settled before any `when`."""
        spec = self.spec
        has_search = bool(spec.search) or any(option.searched for options in axes for option in options)
        for choice in product(*(range(len(options)) for options in axes)):
            options = [options[at] for options, at in zip(axes, choice, strict=True)]
            searched = _searched(spec, options) if has_search else {}
            raws = self._chosen(choice, options, searched)
            if raws is None:
                continue
            blocks = self.resolver.settle(raws)
            if blocks is not None:
                arm = next((option.arm for option in options if option.arm), None) or spec.base_arm
                yield Cell(arm or raws["mechanism"].block.name, blocks, searched), raws

    def _chosen(
        self, choice: tuple[int, ...], options: list[Option], searched: dict[str, Distribution]
    ) -> dict[str, Raw] | None:
        """The blocks of one combination; None if one does not fit (which is told)."""
        raws: dict[str, Raw] = {}
        for kind, touching in self.touching.items():
            if kind == "train" and not raws["task"].block.trains:
                continue
            raw = self._raw(kind, tuple([choice[n] for n in touching]), options, searched)
            if raw is None:
                return None
            raws[kind] = raw
        task = raws["task"]
        if task.block.evaluates:
            text = f"{task.block.title} evaluates models of task {task.block.evaluates} and trains none: see `evaluate`"
            self.problems.add(task.marks["task"], text)
            return None
        self.trains.add(task.block.trains)
        return raws

    def _raw(
        self, kind: str, chosen: tuple[int, ...], options: list[Option], searched: dict[str, Distribution]
    ) -> Raw | None:
        """One block of a combination, typed once for each choice that touches it."""
        if (kind, chosen) in self.raws:
            return self.raws[kind, chosen]
        written = {path: w for path, w in self.spec.base.items() if head(path) == kind}
        late: dict[str, Written] = {}
        for number in self.touching[kind]:
            late.update({p: w for p, w in options[number].values.items() if head(p) == kind})
        for path in [path for path in late if path in written and _is_name(path)]:
            if late[path].node.value != written[path].node.value:
                written = {p: w for p, w in written.items() if p != path and not p.startswith(f"{path}.")}
        written.update(late)
        own = {path: distribution for path, distribution in searched.items() if head(path) == kind}
        own = {path: distribution for path, distribution in own.items() if self._is_scale(path, distribution, written)}
        for path, distribution in own.items():
            written[path] = Written(distribution.items[0], distribution.node.mark)
        self.raws[kind, chosen] = raw = self.resolver.raw(kind, written, frozenset(late))
        for path, distribution in own.items():
            before = len(self.problems)
            self._check_searched(path, distribution, written, raw, frozenset(late))
            if len(self.problems) > before:
                self.unfit.add(path)
        return raw

    def _is_scale(self, path: str, distribution: Distribution, written: dict[str, Written]) -> bool:
        """Whether a distribution that has ends is one of a number; told if not."""
        kind = head(path)
        name = written[kind].node.value if kind in written else ""
        if distribution.kind == "values" or (kind in ("mechanism", "task") and name not in self.catalog.names(kind)):
            return True
        values = {other: one.node.value for other, one in written.items()}
        param = param_at(Raw(kind, self.catalog.block(kind, name), values, {}, {}, frozenset()), path)
        if param is None or param.type.is_number:
            return True
        self.problems.add(distribution.node.mark, f"{path} is no number: search it with {{values: [...]}}")
        self.unfit.add(path)
        return False

    def _check_searched(
        self,
        path: str,
        distribution: Distribution,
        written: dict[str, Written],
        first: Raw | None,
        late: frozenset[str],
    ) -> None:
        """Type every value of a distribution, not just the one that stands there, and hold it against its own rules."""
        for number, item in enumerate(distribution.items):
            at = Written(item, distribution.node.mark)
            raw = first if number == 0 else self.resolver.raw(head(path), {**written, path: at}, late)
            if raw is None:
                self.problems.again()
                continue
            name = path.partition(".")[2]
            for rule in raw.block.own_limits:
                if formula.names(rule) == {name} and verdict(rule, {name: raw.values[path]}) is False:
                    text = f"{raw.block.title} wants {rule}: here {name} is {show(raw.values[path])}"
                    self.problems.add(item.mark, text)

    def _stand_in(self, cell: Cell) -> None:
        """Have a searched cell stand there with values that keep the rules: the first ones do not always."""
        if self.resolver.rules.keeps(cell.blocks) or any(block.raw.forms for block in cell.blocks.values()):
            return
        marks = {path: found.node.mark for path, found in cell.searched.items()}
        for combo in islice(product(*(found.values for found in cell.searched.values())), MOST_STAND_INS):
            blocks = self.resolver.with_values(cell.blocks, marks, dict(zip(cell.searched, combo, strict=True)))
            if blocks is not None and self.resolver.rules.keeps(blocks):
                cell.blocks = blocks
                return

    # --- when and exclude ---------------------------------------------------------------------------------------

    def _when(self, combos: list[tuple[Cell, dict[str, Raw]]]) -> list[Cell]:
        entries = self._read([node for node, _ in self.spec.when], [cell for cell, _ in combos], "if")
        if not entries:
            return [cell for cell, _ in combos]
        found = []
        hits = dict.fromkeys(number for number, _ in entries)
        for cell, raws in combos:
            which = tuple(number for number, condition in entries if condition.holds(cell.get))
            hits.update(dict.fromkeys(which, True))
            if not which:
                found.append(cell)
                continue
            settings = self._settings(which)
            new = {kind: self._changed(raw, settings, which) for kind, raw in raws.items()}
            blocks = (
                self.resolver.settle({k: r for k, r in new.items() if r is not None}) if all(new.values()) else None
            )
            if blocks is not None:
                found.append(Cell(cell.arm, blocks, {p: d for p, d in cell.searched.items() if p not in settings}))
        for number, condition in entries:
            if combos and not hits[number]:
                self._never(condition, "this entry of when", len(combos))
        return found

    def _settings(self, which: tuple[int, ...]) -> dict[str, Written]:
        settings: dict[str, Written] = {}
        for number in which:
            for path, written in self.spec.when[number][1].items():
                other = settings.get(path)
                if other is not None and other.node.plain() != written.node.plain():
                    self.problems.add(
                        written.key,
                        f"{path} is set differently by another `when` of the same trial (line {other.key.line})",
                    )
                settings[path] = written
        return settings

    def _changed(self, raw: Raw, settings: dict[str, Written], which: tuple[int, ...]) -> Raw | None:
        own = {path: written for path, written in settings.items() if head(path) == raw.kind}
        return self.resolver.changed(raw, own, which) if own else raw

    def _exclude(self, cells: list[Cell]) -> list[Cell]:
        entries = self._read(self.spec.exclude, cells, "an entry of exclude")
        for _, condition in entries:
            kept = [cell for cell in cells if not condition.holds(cell.get)]
            if len(kept) == len(cells) and cells:
                self._never(condition, "this entry of exclude", len(cells))
            cells = kept
        return cells

    def _never(self, condition: Condition, what: str, count: int) -> None:
        text = f"{what} matches none of {count:,} combinations: {condition}"
        if self.is_patched and condition.mark.layer == "file":
            self.problems.note(f"{condition.mark}: {text}")
        else:
            self.problems.add(condition.mark, text)

    def _read(self, nodes: list[Node], cells: list[Cell], what: str) -> list[tuple[int, Condition]]:
        """The conditions among `nodes` that can hold for some cell, with their numbers."""
        if not nodes:
            return []
        read = [(number, conditions.read(node, self.problems, what)) for number, node in enumerate(nodes)]
        known = universe(cells, self.is_patched)
        return [(n, c) for n, c in read if c is not None and cells and known.check(c, self.problems)]

    # --- the whole ----------------------------------------------------------------------------------------------

    def _check_training(self) -> None:
        if self.trains != {False}:
            return
        for word in ("train", "search", "prune", "evaluate"):
            if word in self.spec.tree.value:
                self.problems.add(
                    self.spec.tree.keys[word], f"{word}: the task has nothing to train, so the trial is the evaluation"
                )

    def _name(self, cells: list[Cell]) -> list[str]:
        """Find what varies and name the cells: the arm, then what varies within it, in axis order."""
        order: dict[str, None] = {}
        for axis in self.spec.axes:
            order.update(dict.fromkeys(axis.paths()))
        for _, settings in self.spec.when:
            order.update(dict.fromkeys(settings))
        by_arm: dict[str, dict[str, set[Any]]] = {}
        distinct = {
            (c.arm, id(block), *c.searched): (c, kind, block) for c in cells for kind, block in c.blocks.items()
        }
        for cell, kind, block in distinct.values():
            seen = by_arm.setdefault(cell.arm, {path: set() for path in order})
            for path in order:
                if head(path) == kind and path in block.flat and path not in cell.searched:
                    seen[path].add(conditions.key(block.flat[path]))
        varying = [path for path in order if len(set().union(*(arm[path] for arm in by_arm.values()))) > 1]
        within = {name: [path for path in varying if len(arm[path]) > 1] for name, arm in by_arm.items()}
        kinds = [(path, head(path)) for path in varying]
        for cell in cells:
            flats = {kind: block.flat for kind, block in cell.blocks.items()}
            cell.varying = {
                path: flats[kind][path]
                for path, kind in kinds
                if kind in flats and path in flats[kind] and path not in cell.searched
            }
            parts = [
                f"{path.rpartition('.')[2]}-{_word(cell.varying[path])}"
                for path in within[cell.arm]
                if path in cell.varying
            ]
            cell.name = "/".join([cell.arm, *parts])
        return varying


def identify(cells: list[Cell], seeds: list[int], problems: Problems) -> list[tuple[Cell, int, str]]:
    """(cell, seed, id) of every trial, in order; a trial reached twice is kept once, with a note.

    The id of a searched cell's trial is that of its slot: the trial is known once the search is over.
    """
    seen: dict[str, Cell] = {}
    found = []
    doubles: dict[str, int] = {}
    for cell in cells:
        text = {kind: block.text for kind, block in cell.blocks.items()}
        ids = slot_ids(cell.search.key, seeds) if cell.search is not None else trial_ids(text, seeds)
        for seed, trial in zip(seeds, ids, strict=True):
            cell.ids[seed] = trial
            if trial in seen:
                words = f"{cell.name} is the same as {seen[trial].name}"
                doubles[words] = doubles.get(words, 0) + 1
                continue
            seen[trial] = cell
            found.append((cell, seed, trial))
    for words, count in doubles.items():
        problems.note(f"{words}: {count} trial{'s' if count > 1 else ''} reached twice, run once")
    return found


def slot_ids(key: str, seeds: list[int]) -> list[str]:
    """What a searched cell's report trials are called until its winner is known: never the id of a trial."""
    return [digest({"slot": key, "seed": seed}) for seed in seeds]


def universe(cells: list[Cell], is_patched: bool) -> Universe:
    """Every value of every path over some cells, each different block looked at once."""
    blocks = {id(block): block.flat for cell in cells for block in cell.blocks.values()}
    arms = {cell.arm: {"arm": cell.arm} for cell in cells}
    return Universe([*arms.values(), *blocks.values()], is_patched)


def _touches(axis: Axis, kind: str) -> bool:
    return any(head(path) == kind for option in axis.options for path in (*option.values, *option.searched))


def _is_name(path: str) -> bool:
    return path in ("mechanism", "task") or (path.count(".") == 1 and head(path) == "model")


def _searched(spec: Spec, options: list[Option]) -> dict[str, Distribution]:
    searched: dict[str, Distribution | None] = dict(spec.search)
    for option in options:
        searched.update(option.searched)
    return {path: distribution for path, distribution in searched.items() if distribution is not None}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(map(_word, value))
    if isinstance(value, dict) and "name" in value:
        return ":".join([value["name"], *(f"{key}-{_word(v)}" for key, v in value.items() if key != "name")])
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
