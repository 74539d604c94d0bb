"""`evaluate`: what each trained model is evaluated on. Costs no retraining, so its grids hold task paths only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from runners.schema import EvalSlice, UserError
from sweeps import conditions, formula, sections
from sweeps.blocks import Raw, Resolved, slice_id
from sweeps.conditions import Condition
from sweeps.expand import Cell, universe
from sweeps.parse import Reader
from sweeps.patch import is_form, zip_paths
from sweeps.reader import Mark, Node, near
from sweeps.resolve import Resolver, wanted
from sweeps.spec import Written
from sweeps.types import show

RESERVED = {"train", "valid"}
"""Names of training metrics: no evaluation set may take them."""


@dataclass(slots=True)
class EvalSet:
    """One named set: a condition on trials, another task if it names one, and the points of its grid."""

    name: str
    mark: Mark
    condition: Condition | None
    task: dict[str, Written]
    points: list[dict[str, Written]]
    shown: list[str]
    """Paths that tell the points apart."""


class Evaluation:
    """Reads `evaluate` and gives each cell its slices."""

    def __init__(self, reader: Reader, resolver: Resolver, cells: list[Cell], is_patched: bool) -> None:
        self.reader, self.resolver, self.problems = reader, resolver, resolver.problems
        self.known = universe(cells, is_patched) if reader.tree.get("evaluate") is not None else None
        self.sets = self._read()
        conditional = any(s.condition is not None for s in self.sets)
        self._always = () if conditional else tuple(range(len(self.sets)))
        self._slices: dict[tuple[Any, ...], tuple[EvalSlice, ...]] = {}
        self._own: dict[tuple[int, int], Raw | None] = {}
        self.resolved: dict[str, Resolved] = {}
        """The task of each slice, by the slice's id."""

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self) -> list[EvalSet]:
        tree = self.reader.tree
        node = tree.get("evaluate")
        own = EvalSet("test", tree.mark, None, {}, [{}], [])
        if node is None or (node.is_map and not node.value):
            return [own]
        if not node.is_map:
            self.problems.add(node.mark, "evaluate is a grid of task paths, or a mapping of named grids")
            return [own]
        bare = [key for key in node.value if _is_grid_key(key)]
        if bare and len(bare) < len(node.value):
            other = next(key for key in node.value if key not in bare)
            hint = near(other, ["task", "if"]) if "." not in other else ""
            self.problems.add(
                node.keys[other],
                f"evaluate: {other!r} beside {bare[0]!r}: either one grid of task paths, or named sets{hint}",
            )
            return [own]
        if bare:
            return [self._set("test", node, node.mark)]
        return [self._set(name, child, node.keys[name]) for name, child in node.value.items()]

    def _set(self, name: str, node: Node, mark: Mark) -> EvalSet:
        found = EvalSet(name, mark, None, {}, [{}], [])
        if name in RESERVED or "/" in name or "." in name:
            known = [f"task.{p}" for p in self._params()]
            hint = near(name, known) if "." in name else f" ({', '.join(sorted(RESERVED))} are training metrics)"
            self.problems.add(mark, f"evaluate: {name!r} is no name of a set{hint}")
            return found
        if not node.is_map:
            self.problems.add(
                node.mark, f"evaluate.{name} is a mapping of task path -> values; {{}} = the trial's own setting"
            )
            return found
        factors: list[list[dict[str, Written]]] = []
        for key, child in node.value.items():
            at = node.keys.get(key, child.mark)
            if key == "if":
                condition = conditions.read(child, self.problems, "if")
                if condition is not None and self.known is not None and self.known.check(condition, self.problems):
                    found.condition = condition
            elif key == "task":
                self._task(found, child, at, factors)
            else:
                factors.append(self._factor(found, key, child, at))
        found.points = [{k: w for part in combo for k, w in part.items()} for combo in product(*factors)]
        return found

    def _params(self) -> list[str]:
        return sorted(
            {p for name in self.reader.catalog.names("task") for p in self.reader.catalog.block("task", name).params}
        )

    def _task(self, found: EvalSet, node: Node, at: Mark, factors: list[list[dict[str, Written]]]) -> None:
        """Another task: its parameters replace the trial's; lists among them are axes of the grid."""
        name = node.get("name") if node.is_map else node
        if name is None or not isinstance(name.value, str):
            self.problems.add(node.mark, "evaluate: task needs a name")
            return
        block = self.reader.find("task", name.value, name.mark)
        found.task["task"] = Written(name, at)
        for key, child in node.value.items() if node.is_map else ():
            if key == "name" or block is None:
                continue
            mark, path = node.keys.get(key, child.mark), f"task.{key}"
            param = block.params.get(key)
            if is_form(child) and "required" in child.value:
                path = f"evaluate.{found.name}.{path}"
                self.problems.add(child.mark, wanted(path, child))
                factors.append([])  # without it there is no slice to speak of
                continue
            if child.is_list and param is not None and not param.type.is_list:
                factors.append([{path: Written(item, mark)} for item in child.value])
                found.shown.append(path)
            else:
                found.task[path] = Written(child, mark)

    def _factor(self, found: EvalSet, key: str, node: Node, at: Mark) -> list[dict[str, Written]]:
        paths = zip_paths(key) or (key,)
        for path in paths:
            if not path.startswith("task."):
                self.problems.add(
                    at, f"evaluate holds task paths only, not {path!r}: another value there is another training"
                )
                return [{}]
            if path in found.shown:
                self.problems.add(at, f"evaluate: {path} is written twice in this set")
        found.shown += paths
        if sections.is_generator(node):
            node = Node(sections.generated(node, self.problems), node.mark)
        if zip_paths(key) is None:
            is_axis = node.is_list and (not self._is_list(key) or all(child.is_list for child in node.value))
            nodes = node.value if is_axis else [node]
            if not nodes:
                self.problems.add(node.mark, f"evaluate: {key} is an empty list")
            return [{key: Written(child, at)} for child in nodes]
        rows: list[dict[str, Written]] = []
        for row in node.value if node.is_list else [node]:
            if not row.is_list or len(row.value) != len(paths):
                got = f"{len(row.value)} values" if row.is_list else show(row.plain())
                self.problems.add(row.mark, f"a row of {key} has {len(paths)} values, not {got}")
            else:
                rows.append({path: Written(child, at) for path, child in zip(paths, row.value, strict=True)})
        return rows

    def _is_list(self, path: str) -> bool:
        name = path.partition(".")[2]
        blocks = [self.reader.catalog.block("task", task) for task in self.reader.catalog.names("task")]
        return any(block.params[name].type.is_list for block in blocks if name in block.params)

    # --- the slices of a cell -----------------------------------------------------------------------------------

    def slices(self, cell: Cell) -> tuple[EvalSlice, ...]:
        """Every evaluation of a cell's trained model. A slice that a rule forbids is told at its place in the grid."""
        chosen = self._always or tuple(
            n for n, s in enumerate(self.sets) if s.condition is None or s.condition.holds(cell.get)
        )
        blocks = cell.blocks
        memo = (chosen, *(id(blocks[kind]) for kind in ("mechanism", "task", "model")))
        if memo not in self._slices:
            found = [slice_ for n in chosen for slice_ in self._of_set(n, cell)]
            self._slices[memo] = tuple(found)
        return self._slices[memo]

    def _of_set(self, number: int, cell: Cell) -> list[EvalSlice]:
        found: dict[str, EvalSlice] = {}
        own = self.sets[number]
        for at, point in enumerate(own.points):
            raw = self._raw(number, at, point, cell)
            if raw is None:
                continue
            blocks = {kind: block for kind, block in cell.blocks.items() if kind not in ("train", "task")}
            raws = {**{kind: block.raw for kind, block in blocks.items()}, "task": raw}
            settled = self.resolver.settle(raws) if raw.forms else {"task": self.resolver.settle({"task": raw})["task"]}  # type: ignore[index]
            if settled is None:
                continue
            task = settled["task"]
            if not self.resolver.rules.check({**blocks, "task": task}) or not self._fits(cell, task, own):
                continue
            slice_ = self._slice(own, task)
            found.setdefault(slice_.id, slice_)
        return list(found.values())

    def _fits(self, cell: Cell, task: Resolved, own: EvalSet) -> bool:
        """Whether an evaluation is for the trained task, and the model has an embedding for every token of it."""
        for_, name = task.block.evaluates, cell.blocks["task"].block.name
        if for_ is not None and for_ != name:
            mark = task.raw.marks.get("task", own.mark)
            self.problems.add(
                mark, f"{task.block.title} evaluates models of task {for_}, and a trial here trains {name}"
            )
            return False
        trained, wanted = (block.env.get("vocab_size") for block in (cell.blocks["task"], task))
        if trained is None or wanted is None or wanted <= trained:
            return True
        mark = task.raw.marks.get("task.vocab_size", own.mark)
        self.problems.add(
            mark, f"task.vocab_size {wanted} is above the {trained} of training: the model has no rows for the rest"
        )
        return False

    def _raw(self, number: int, at: int, point: dict[str, Written], cell: Cell) -> Raw | None:
        own = self.sets[number]
        if not own.task:
            raw = cell.blocks["task"].raw
            return self.resolver.changed(raw, point, (-1 - number, at)) if point else raw
        if (number, at) not in self._own:
            self._own[number, at] = self.resolver.raw("task", {**own.task, **point}, frozenset(point))
        return self._own[number, at]

    def _slice(self, own: EvalSet, task: Resolved) -> EvalSlice:
        at = {path: task.flat[path] for path in own.shown}
        found = EvalSlice(slice_id(task), own.name, task.settings, at, chance(task))
        self.resolved[found.id] = task
        return found


def chance(task: Resolved) -> dict[str, float]:
    """The score of guessing on these task settings, by metric."""
    found = {}
    for metric, text in task.block.literals.get("CHANCE", {}).items():
        try:
            found[metric] = float(formula.evaluate(str(text), task.env))
        except UserError:
            continue
    return found


def _is_grid_key(key: str) -> bool:
    return key in ("task", "if") or key.startswith(("task.", "("))
