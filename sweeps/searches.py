"""`search` and `prune` -> the search of each cell, and later each suggestion's values -> a trial.

A search is frozen into the plan. The trials that come of it are resolved while the sweep runs, from the frozen spec
alone: the same reading, typing and rules as for every other trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from runners.schema import BLOCKS, FOLDER, Exit, Plan, Search, Space, UserError, canonical_json, digest
from runners.search import Setting
from sweeps.blocks import param_at
from sweeps.catalog import Catalog
from sweeps.expand import Cell, Expander
from sweeps.parse import Reader
from sweeps.patch import Assembled
from sweeps.reader import Mark, Node, Problems, near
from sweeps.sections import Distribution
from sweeps.slices import Evaluation, chance
from sweeps.spec import Spec, head
from sweeps.types import Misfit, show

PARALLEL = 4
REDUCTION = 3
MAX_GRID = 10_000
FREE = ("state_bytes", "n_params")
"""What selects without being measured in training: less is better."""


class Searches:
    """Gives each searched cell its search; what cannot be searched goes to the reader's problems."""

    def __init__(self, reader: Reader, spec: Spec) -> None:
        self.tree, self.spec, self.problems = reader.tree, spec, reader.problems
        self.node = self.tree.get("search")
        self.settings, self.prune = spec.search_settings, _prune(spec.prune)
        self.is_patched = reader.assembled.is_patched

    def add(self, cells: Sequence[Cell]) -> tuple[Search, ...]:
        """Set `cell.search` where something is searched: every different search, in the order of the cells."""
        found: dict[str, Search] = {}
        for cell in cells:
            if not cell.searched or not self._is_told(cell):
                continue
            search = self._search(cell)
            if search is not None:
                cell.search = found.setdefault(search.key, search)
        self._check_use([cell for cell in cells if cell.search is not None], bool(cells))
        return tuple(found.values())

    def _check_use(self, searched: list[Cell], has_cells: bool) -> None:
        """Tell of a search that has nothing to search, and of pruning that no training is long enough for."""
        if self.problems or not has_cells:
            return
        if self.node is not None and not searched and not self.spec.search:
            what = "search names nothing to search: give a path, as train.lr: {log_uniform: [1e-4, 1e-2]}"
            self._useless(self.node.mark, what)
        lengths = [_most_steps(cell) for cell in searched]
        known = [length for length in lengths if length is not None]
        if self.prune and known and len(known) == len(lengths) and self.prune["grace_steps"] >= max(known):
            mark = self.tree.value["prune"].value["asha"].value["grace_steps"].mark
            steps = f"{self.prune['grace_steps']} updates come before anything is pruned"
            self._useless(mark, f"asha.grace_steps: {steps}, and the longest training ends at {max(known)}")

    def _useless(self, mark: Mark, text: str) -> None:
        """What the file asks for and a patch of it makes useless is no mistake of the file's."""
        if self.is_patched and mark.layer == "file":
            self.problems.note(f"{mark}: {text}")
        else:
            self.problems.add(mark, text)

    def _is_told(self, cell: Cell) -> bool:
        """Whether the spec says how many suggestions there are; an item alone cannot."""
        if self.node is not None:
            return True
        path, distribution = next(iter(cell.searched.items()))
        self.problems.add(
            distribution.node.mark, f"{path} is searched here: say how often, as in search: {{trials: 8}}"
        )
        return False

    def _search(self, cell: Cell) -> Search | None:
        before = len(self.problems)
        space = {path: self._space(cell, path, found) for path, found in cell.searched.items()}
        if any(one is None for one in space.values()):
            return None
        spaces = {path: one for path, one in space.items() if one is not None}
        trials = self._trials(spaces)
        select, directions, scores = self._select(cell)
        if len(self.problems) > before:
            return None
        is_same = self.settings.get("seeds") == "same"
        n_seeds = self.settings.get("seeds", 1)
        told = {
            "texts": {kind: block.text for kind, block in cell.blocks.items()},
            "space": {path: [one.kind, one.values] for path, one in spaces.items()},
            "sampler": self.settings.get("sampler", "tpe"),
            "seeds": n_seeds,
            "select": select,
        }
        return Search(
            key=digest(told),
            cell=cell.name,
            space=spaces,
            sampler=self.settings.get("sampler", "tpe"),
            trials=trials,
            select=select,
            directions=directions,
            chance=scores,
            seeds=tuple(self.spec.seeds if is_same else search_seeds(n_seeds)),
            is_same=is_same,
            parallel=self.settings.get("parallel", PARALLEL),
            prune=self.prune,
        )

    def _space(self, cell: Cell, path: str, found: Distribution) -> Space | None:
        """The typed space of one path. `_check_searched` of the expansion has told what does not fit."""
        mark = found.node.mark
        if head(path) == "task":
            self.problems.add(mark, f"{path} is part of the task: scores on different tasks cannot select a winner")
            return None
        if self.settings.get("sampler") == "grid" and found.kind != "values":
            self.problems.add(mark, f"sampler grid takes {{values: [...]}} for {path}, not {found.kind}")
            return None
        param = param_at(cell.blocks[head(path)].raw, path)
        values = found.values
        try:
            values = values if param is None else tuple([param.type.convert(item) for item in found.items])
        except Misfit:
            return None
        if found.kind == "values":
            keys = [canonical_json(value) for value in values]
            double = next((v for v, key in zip(values, keys, strict=True) if keys.count(key) > 1), None)
            if double is not None:
                self.problems.add(mark, f"{path}: {show(double)} stands twice in values")
            return Space("values", values)
        is_whole = param is not None and "float" not in param.type.scalars
        if is_whole and found.kind == "uniform":
            self.problems.add(mark, f"{path} takes whole numbers: write int_uniform, or log_uniform over a wide range")
        return Space("log_int_uniform" if is_whole and found.kind == "log_uniform" else found.kind, values)

    def _trials(self, spaces: Mapping[str, Space]) -> int:
        """How many suggestions there are: never more than the space has points."""
        size = prod(space.size for space in spaces.values())
        if self.settings.get("sampler") == "grid":
            if size > MAX_GRID:
                self.problems.add(self._mark(), f"a grid of {size:,} points; a search has at most {MAX_GRID:,}")
            return int(size)
        trials = int(self.settings.get("trials", 1))
        if size < trials:
            words = " x ".join(spaces)
            few = f"{int(size)} value{'s' if size > 1 else ''}: {int(size)} suggestion{'s' if size > 1 else ''}"
            self.problems.note(f"{words} has only {few} instead of {trials}")
            return int(size)
        return trials

    def _select(self, cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, float]]:
        """The selecting metrics of a cell, their directions, and what a diverged run scores on them."""
        task = cell.blocks["task"]
        metrics, guess = task.block.literals.get("METRICS", {}), chance(task)
        usual = f"valid/{task.block.literals.get('SELECT', 'accuracy')}"
        node = self.node.get("select") if self.node is not None else None
        mark = node.mark if node is not None else self._mark()
        known = {**{f"valid/{name}": name for name in metrics}, "train/loss": "loss", **{name: "" for name in FREE}}
        select = tuple(self.settings.get("select") or (usual,))
        directions, scores = [], {}
        for name in select:
            if name not in known:
                self.problems.add(mark, f"search.select: {cell.name} has no {name!r}{near(name, known)}")
                continue
            directions.append("min" if name in FREE else metrics.get(known[name], "min"))
            if name not in FREE and known[name] not in guess:
                self.problems.add(mark, f"search.select: {task.block.title} has no chance level of {known[name]}")
            elif name not in FREE:
                scores[name] = guess[known[name]]
        if len(set(select)) < len(select):
            self.problems.add(mark, "search.select names a metric twice")
        if select and select[0] in FREE:
            self.problems.add(mark, f"search.select: the first metric picks the winner; {select[0]} measures nothing")
        if self.prune and (len(select) > 1 or not select[0].startswith("valid/")):
            self.problems.add(
                self.tree.keys["prune"], "prune goes by one validation metric: search.select has to be one, as " + usual
            )
        return select, tuple(directions), scores

    def _mark(self) -> Mark:
        return self.node.mark if self.node is not None else self.tree.mark


def _prune(given: Mapping[str, Any]) -> dict[str, int]:
    asha = given.get("asha")
    return {"grace_steps": asha["grace_steps"], "reduction": asha.get("reduction", REDUCTION)} if asha else {}


def _most_steps(cell: Cell) -> int | None:
    """Updates of a cell's longest training; None where they follow from another unit."""
    if "train.steps" in cell.searched:
        return max((v for v in cell.searched["train.steps"].values if isinstance(v, int)), default=None)
    steps = cell.blocks["train"].flat.get("train.steps") if "train" in cell.blocks else None
    return steps if isinstance(steps, int) else None


def search_seeds(count: int) -> list[int]:
    """Seeds of suggestions: the same in every cell and sweep, and outside of what a spec may list (0 to 2^31 - 1)."""
    return [(1 << 31) + int(digest({"search seed": number}, 7), 16) for number in range(count)]


class Suggestions:
    """Makes the settings of suggestions from a frozen plan. The spec is read again on first use only."""

    def __init__(self, plan: Plan, catalog: Catalog | None = None) -> None:
        self._plan, self._catalog = plan, catalog or Catalog()
        self._cells: dict[str, Cell] = {}
        self._evaluation: Evaluation | None = None

    def __call__(self, key: str, values: Mapping[str, Any]) -> Setting:
        """The settings of a suggestion of the search `key`; its `problem` says which rule it breaks, if it does."""
        if self._evaluation is None:
            self._read()
        evaluation, cell = self._evaluation, self._cells.get(key)
        if cell is None or evaluation is None:
            raise UserError(
                f"the search {key} of sweep {self._plan.sweep} cannot go on: this version of memsweep reads its spec "
                "as other trials. Launch the spec again",
                Exit.ENVIRONMENT,
            )
        problems, before = evaluation.problems, evaluation.problems.messages()
        marks = {path: found.node.mark for path, found in cell.searched.items()}
        blocks = evaluation.resolver.with_values(cell.blocks, marks, values)
        fine = blocks is not None and evaluation.resolver.rules.check(blocks)
        evaluated = {kind: block for kind, block in (blocks or {}).items() if kind != "train"}
        for part in cell.slices if fine else ():
            fine = evaluation.resolver.rules.check({**evaluated, "task": evaluation.resolved[part.id]}) and fine
        if not fine or blocks is None:
            told = problems.messages()[len(before) :]
            return Setting({}, {}, 0, told[0] if told else "its values break a rule")
        settings = {kind: blocks[kind].settings if kind in blocks else None for kind in BLOCKS}
        texts = {kind: block.text for kind, block in blocks.items()}
        return Setting(settings, texts, evaluation.resolver.rules.state_bytes(blocks), None)

    def _read(self) -> None:
        problems = Problems()
        origin = Mark(f"sweep {self._plan.sweep}", 1, 1)
        tasks = [task for m in self._plan.members for task in (m.trial.task, *(part.task for part in m.slices))]
        folders = {origin.file: tuple(dict.fromkeys(Path(task[FOLDER]) for task in tasks if FOLDER in task))}
        reader = Reader(
            Assembled(_node(self._plan.spec, origin), "", origin.file, None, is_patched=True), self._catalog, problems
        )
        spec = reader.read()
        expander = Expander(spec, self._catalog, problems, is_patched=True, folders=folders)
        cells = expander.expand().cells
        Searches(reader, spec).add(cells)
        problems.check()
        self._evaluation = Evaluation(reader, expander.resolver, cells, is_patched=True)
        for cell in cells:
            if cell.search is not None and cell.search.key not in self._cells:
                cell.slices = self._evaluation.slices(cell)
                self._cells[cell.search.key] = cell
        problems.check()


def _node(value: Any, mark: Mark) -> Node:
    """Plain values as nodes again; what was a spec's position is gone."""
    if isinstance(value, dict):
        return Node({k: _node(v, mark) for k, v in value.items()}, mark, dict.fromkeys(value, mark))
    return Node([_node(v, mark) for v in value] if isinstance(value, list) else value, mark)
