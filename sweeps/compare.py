"""`compare` -> tests: which trials form a pair, in which block, and what cannot be compared.

A pair is one trial of a and one of b with the same seed and equal on every varying path that neither side names and on
which the sides share a value. A block is what a pair shares of task and model; what it shares of mechanism and training
is averaged inside the pair, because such trials share their random streams and are no independent evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dashboards.needed import pairs_needed
from runners.schema import EvalSlice, Test
from sweeps import conditions, steps
from sweeps.blocks import Resolved
from sweeps.catalog import Catalog
from sweeps.conditions import MISSING, Condition, Universe
from sweeps.expand import Cell, Expansion, universe
from sweeps.pairs import Matched
from sweeps.reader import Node, Problems, near
from sweeps.same import Sameness
from sweeps.slices import Evaluation
from sweeps.types import show

KEYS = ("a", "b", "metric", "margin", "at", "at_equal", "each", "mean", "pair", "if", "scale")


@dataclass(slots=True)
class Entry:
    """One entry of `compare`, typed."""

    node: Node
    a: Condition | None
    b: Condition
    only: Condition | None
    each: list[str]
    mean: list[str]
    pair: list[str]
    at: Condition | None
    set: str
    metric: str
    step: int | None
    margin: float | None
    scale: str
    at_equal: str | None


@dataclass(slots=True)
class Side:
    """The cells of one side of a test and what to call them."""

    label: str
    cells: list[Cell]

    def values(self, path: str) -> dict[Any, Any]:
        found = {}
        for cell in self.cells:
            value = cell.get(path)
            if value is not MISSING:
                found[conditions.key(value)] = value
        return found

    def where(self, path: str, value: Any) -> Side:
        return Side(
            self.label, [c for c in self.cells if c.get(path) is not MISSING and conditions.key(c.get(path)) == value]
        )


class Comparer:
    """Makes the tests of a sweep."""

    def __init__(self, expansion: Expansion, evaluation: Evaluation, catalog: Catalog, is_patched: bool) -> None:
        self.cells, self.varying, self.derived = expansion.cells, expansion.varying, expansion.derived
        self.evaluation, self.catalog = evaluation, catalog
        self.problems: Problems = evaluation.problems
        self.is_patched = is_patched
        self.known = universe(self.cells, is_patched)

    def tests(self, node: Node | None) -> tuple[Test, ...]:
        if node is None:
            return ()
        if not node.is_list:
            self.problems.add(node.mark, "compare is a list of entries: [{a: condition, b: condition}]")
            return ()
        found: dict[str, Test] = {}
        for child in node.value:
            entry = self._entry(child)
            for test in self._of_entry(entry) if entry is not None else ():
                name = test.name if test.name not in found else f"{test.name} ({len(found) + 1})"
                found[name] = Test(**{f: getattr(test, f) for f in Test.__dataclass_fields__} | {"name": name})
        self._power(list(found.values()))
        return tuple(found.values())

    def _power(self, tests: list[Test]) -> None:
        """Warn where a test has too few pairs for a verdict: sign flips of N pairs give no p below 2^(1-N)."""
        if not tests:
            return
        # Seeds that are added once a report was read are a second look, which doubles every p.
        wanted, later = (pairs_needed(len(tests), looks) for looks in (1, 2))
        more = f", {later} if they are added after a report" if later > wanted else ""
        need = f"a bounded score needs {wanted}"
        if len(tests) > 1:
            need = f"{len(tests)} tests of a bounded score need {wanted} each"
        for test in tests:
            if test.bounded and test.scale == "difference" and len(test.pairs) < wanted:
                self.problems.note(
                    f"{test.name}: {len(test.pairs)} pair{'' if len(test.pairs) == 1 else 's'} cannot reach a verdict; "
                    f"{need}{more}: add seeds"
                )

    # --- reading ------------------------------------------------------------------------------------------------

    def _entry(self, node: Node) -> Entry | None:
        if not node.is_map or "b" not in node.value:
            self.problems.add(
                node.mark,
                "an entry of compare is {a: condition, b: condition}; without a, every other arm is compared to b",
            )
            return None
        before = len(self.problems)
        for key in node.value:
            if key not in KEYS:
                self.problems.add(node.keys[key], f"an entry of compare has no key {key!r}{near(key, KEYS)}")
        read = {word: self._condition(node, word) for word in ("a", "b", "if")}
        lists = {word: self._paths(node, word) for word in ("each", "mean", "pair")}
        scale = self._word(node, "scale", ("difference", "ratio")) or "difference"
        at_equal = self._word(node, "at_equal", ("state_bytes",))
        at, step, set_from_at = self._at(node)
        set_, metric = self._metric(node, set_from_at, read)
        margin = node.get("margin")
        if margin is not None and (
            isinstance(margin.value, bool) or not isinstance(margin.value, int | float) or margin.value <= 0
        ):
            self.problems.add(margin.mark, f"margin is a number above 0, not {show(margin.plain())}")
        if step is not None and set_ not in ("train", "valid"):
            self.problems.add(
                node.value["at"].mark, f"at step: only training metrics have steps, {set_}/{metric} has none"
            )
        if len(self.problems) > before or read["b"] is None or (read["a"] is None and "a" in node.value):
            return None
        number = float(margin.value) if margin is not None else None
        return Entry(
            node,
            read["a"],
            read["b"],
            read["if"],
            **lists,
            at=at,
            set=set_,
            metric=metric,
            step=step,
            margin=number,
            scale=scale,
            at_equal=at_equal,
        )

    def _condition(self, node: Node, word: str) -> Condition | None:
        child = node.get(word)
        if child is None:
            return None
        condition = conditions.read(child, self.problems, f"{word} of a comparison")
        return condition if condition is not None and self.known.check(condition, self.problems) else None

    def _paths(self, node: Node, word: str) -> list[str]:
        child = node.get(word)
        if child is None:
            return []
        nodes = child.value if child.is_list else [child]
        for item in nodes:
            if not isinstance(item.value, str) or (item.value != "arm" and item.value not in self.known.values):
                self.problems.add(
                    item.mark,
                    f"{word}: no trial of this sweep has {show(item.plain())}{near(item.value, self.known.values)}",
                )
        return [str(item.value) for item in nodes]

    def _word(self, node: Node, word: str, choices: tuple[str, ...]) -> str | None:
        child = node.get(word)
        if child is None:
            return None
        if child.value not in choices:
            self.problems.add(
                child.mark, f"{word}: {show(child.plain())} is none of {', '.join(choices)}{near(child.value, choices)}"
            )
        return str(child.value)

    def _at(self, node: Node) -> tuple[Condition | None, int | None, str | None]:
        child = node.get("at")
        if child is None:
            return None, None, None
        if not child.is_map or not child.value:
            self.problems.add(child.mark, "at picks slices, {task path: value}, or a step, {step: n}")
            return None, None, None
        rest = {key: value for key, value in child.value.items() if key not in ("step", "evaluate")}
        step, name = child.get("step"), child.get("evaluate")
        if step is not None and (type(step.value) is not int or step.value < 1):
            self.problems.add(step.mark, f"at step: a whole number of at least 1, not {show(step.plain())}")
        sets = [s.name for s in self.evaluation.sets]
        if name is not None and name.value not in sets:
            self.problems.add(name.mark, f"at: there is no evaluation set {show(name.plain())}{near(name.value, sets)}")
        at = conditions.read(Node(rest, child.mark, child.keys), self.problems, "at") if rest else None
        return at, step.value if step is not None else None, str(name.value) if name is not None else None

    def _metric(self, node: Node, set_from_at: str | None, read: Mapping[str, Condition | None]) -> tuple[str, str]:
        child = node.get("metric")
        sets = [s.name for s in self.evaluation.sets]
        usual = set_from_at or ("test" if "test" in sets or len(sets) != 1 else sets[0])
        if child is None:
            if usual not in sets:
                self.problems.add(
                    node.mark,
                    f"there is no set 'test' here: say `metric: SET/METRIC` with one of {', '.join(sets)}",
                )
            tasks = self._tasks(usual, read)
            selected = {str(block.block.literals.get("SELECT", "accuracy")) for block in tasks}
            if len(selected) > 1:
                names = ", ".join(sorted(block.block.name for block in tasks))
                self.problems.add(
                    node.mark, f"{names} are not scored alike: narrow it with `if: {{task: ...}}`, or say `metric`"
                )
            return usual, sorted(selected)[0] if selected else "accuracy"
        if not isinstance(child.value, str):
            self.problems.add(child.mark, f"metric is SET/metric, not {show(child.plain())}")
            return usual, "accuracy"
        first, slash, rest = child.value.partition("/")
        set_, metric = (first, rest) if slash else (usual, first)
        if set_ not in (*sets, "valid", "train"):
            self.problems.add(child.mark, f"metric: there is no set {set_!r}{near(set_, [*sets, 'valid', 'train'])}")
        else:
            tasks = self._tasks(set_, read)
            known = sorted({m for block in tasks for m in block.block.literals.get("METRICS", {})})
            lacking = [block.block.name for block in tasks if metric not in block.block.literals.get("METRICS", {})]
            if metric not in known:
                self.problems.add(child.mark, f"metric: {set_} has no {metric!r}{near(metric, known)}")
            elif lacking:
                self.problems.add(
                    child.mark,
                    f"metric: task {lacking[0]} has no {metric!r}: narrow the comparison with `if: {{task: ...}}`",
                )
        return set_, metric

    def _tasks(self, set_: str, read: Mapping[str, Condition | None]) -> list[Resolved]:
        """The tasks that a set's metrics come from in a comparison of these conditions, each once by name."""
        found: dict[str, Resolved] = {}
        own = next((s for s in self.evaluation.sets if s.name == set_), None)
        only, sides = read["if"], (read["a"], read["b"])
        for cell in self.cells:
            if only is not None and not only.holds(cell.get):
                continue
            if not any(side is None or side.holds(cell.get) for side in sides):
                continue
            if own is not None and own.task:
                for slice_ in cell.slices:
                    if slice_.set == set_:
                        task = self.evaluation.resolved[slice_.id]
                        found.setdefault(task.block.name, task)
            else:
                found.setdefault(cell.blocks["task"].block.name, cell.blocks["task"])
        return list(found.values())

    # --- sides --------------------------------------------------------------------------------------------------

    def _of_entry(self, entry: Entry) -> Iterator[Test]:
        cells = [cell for cell in self.cells if entry.only is None or entry.only.holds(cell.get)]
        named = {*entry.b.paths, *(entry.a.paths if entry.a is not None else ("arm", "mechanism"))}
        for b_condition in conditions.split(entry.b):
            b = Side(str(b_condition), [cell for cell in cells if b_condition.holds(cell.get)])
            if not self._filled(b, b_condition, entry):
                continue
            for a, condition in self._a_sides(entry, cells, b):
                if not self._filled(a, condition, entry) or not self._apart(a, b, entry):
                    continue
                for one_a, one_b in self._each(entry, a, b):
                    test = self._test(entry, one_a, one_b, named)
                    if test is not None:
                        yield test

    def _a_sides(self, entry: Entry, cells: list[Cell], b: Side) -> list[tuple[Side, Condition | None]]:
        if entry.a is not None:
            parts = conditions.split(entry.a)
            return [(Side(str(part), [cell for cell in cells if part.holds(cell.get)]), part) for part in parts]
        arms = dict.fromkeys(cell.arm for cell in cells)
        others = [arm for arm in arms if arm not in {cell.arm for cell in b.cells}]
        if not others:
            self.problems.add(entry.node.mark, "there is no other arm to compare with b: name a")
        return [(Side(f"arm: {arm}", [cell for cell in cells if cell.arm == arm]), None) for arm in others]

    def _filled(self, side: Side, condition: Condition | None, entry: Entry) -> bool:
        if side.cells:
            return True
        where = condition.mark if condition is not None else entry.node.mark
        narrowed = f" where {entry.only}" if entry.only is not None else ""
        text = f"this comparison pairs nothing: no trial has {side.label}{narrowed}"
        if self.is_patched and where.layer == "file":
            self.problems.note(f"{where}: {text}")
        else:
            self.problems.add(where, text)
        return False

    def _apart(self, a: Side, b: Side, entry: Entry) -> bool:
        both = {id(cell) for cell in a.cells} & {id(cell) for cell in b.cells}
        if both:
            cell = next(cell for cell in a.cells if id(cell) in both)
            self.problems.add(entry.node.mark, f"{cell.name} is on both sides: narrow a or b")
        return not both

    def _each(self, entry: Entry, a: Side, b: Side) -> Iterator[tuple[Side, Side]]:
        """One pair of sides for each value of the paths in `each`."""
        options: list[list[tuple[str, Any, str]]] = []
        for path in entry.each:
            in_a, in_b = a.values(path), b.values(path)
            shared = in_a.keys() & in_b.keys()
            if shared:
                options.append([(path, v, "ab") for v in in_a if v in shared])
            elif len(in_a) > 1 and len(in_b) > 1:
                self.problems.add(
                    entry.node.value["each"].mark, f"each: {path} varies on both sides, but they share no value"
                )
                return
            else:
                side = "a" if len(in_a) >= len(in_b) else "b"
                options.append([(path, v, side) for v in (in_a if side == "a" else in_b)])
        for combo in product(*options):
            one_a, one_b, words = a, b, []
            for path, value, sides in combo:
                one_a = one_a.where(path, value) if "a" in sides else one_a
                one_b = one_b.where(path, value) if "b" in sides else one_b
                words.append(f"{path}: {show(value)}")
            if not words:
                yield a, b
            elif one_a.cells and one_b.cells:
                label = ", ".join(words)
                side = "b" if all("a" not in sides for _, _, sides in combo) else "a"
                yield (
                    Side(f"{a.label}, {label}", one_a.cells) if side == "a" else one_a,
                    Side(f"{b.label}, {label}", one_b.cells) if side == "b" else one_b,
                )

    # --- pairs --------------------------------------------------------------------------------------------------

    def _paired_paths(self, entry: Entry, a: Side, b: Side, named: set[str]) -> list[str] | None:
        """The paths on which a pair must agree; None if a path is left hanging on one side."""
        found, hanging = [], []
        for path in ("arm", *self.varying):
            if path in entry.pair:
                found.append(path)
                continue
            if path in named or path in entry.each or path in entry.mean or path in self.derived:
                continue
            in_a, in_b = a.values(path), b.values(path)
            if len(in_a.keys() | in_b.keys()) < 2:
                continue
            if in_a.keys() & in_b.keys():
                if entry.at_equal is None or path.startswith(("task.", "train.")) or path == "task":
                    found.append(path)
            elif len(in_a) > 1 or len(in_b) > 1:
                side = "a" if len(in_a) > 1 else "b"
                values = in_a if side == "a" else in_b
                hanging.append(f"{path} ({', '.join(show(v) for v in values.values())} on side {side})")
        if hanging and entry.at_equal is None:
            words = ", ".join(hanging)
            self.problems.add(
                entry.node.mark, f"varies on one side only: {words}. Name it in a or b, or put it in `each` or `mean`"
            )
            return None
        return found

    def _test(self, entry: Entry, a: Side, b: Side, named: set[str]) -> Test | None:
        paths = self._paired_paths(entry, a, b, named)
        if paths is None:
            return None
        matched = Matched(paths, a.cells, b.cells)
        slices = self._slices(entry, [cell for key in matched.shared for cell in matched.cells(key)])
        if slices is None:
            return None
        matched = matched.evaluated_on(slices) if slices else matched
        pairs = matched.pairs()
        if not pairs:
            self.problems.add(
                entry.node.mark,
                f"this comparison pairs nothing: no trials of {a.label} and {b.label} agree on "
                f"{', '.join(paths) or 'anything'} and have a score on {entry.set!r}",
            )
            return None
        if not self._is_measured(entry, matched) or not self._can_differ(entry, a, b, matched, slices):
            return None
        self._note_apart(a, b, matched)
        direction, bounded = self._direction(entry)
        return Test(
            name=f"{a.label} vs {b.label}" + ("" if entry.set == "test" else f" on {entry.set}/{entry.metric}"),
            a=a.label,
            b=b.label,
            set=entry.set,
            metric=entry.metric,
            direction=direction,
            bounded=bounded,
            scale=entry.scale,
            margin=entry.margin,
            step=entry.step,
            slices=tuple(slices),
            pairs=tuple(pairs),
            unpaired_a=matched.unpaired(a.cells),
            unpaired_b=matched.unpaired(b.cells),
            **({"at_equal": entry.at_equal} if entry.at_equal is not None else {}),
        )

    def _is_measured(self, entry: Entry, matched: Matched) -> bool:
        """Whether every trial has the metric at the step of `at`, as far as its updates are known before it runs."""
        if entry.step is None:
            return True
        at = entry.node.value["at"].value["step"].mark
        before = len(self.problems)
        for cell in (cell for key in matched.shared for cell in matched.cells(key)):
            why = steps.why_not(entry.step, entry.set, cell.blocks)
            if why is not None:
                self.problems.add(at, f"at step {entry.step}: {cell.name} {why}")
                break
        return len(self.problems) == before

    def _note_apart(self, a: Side, b: Side, matched: Matched) -> None:
        """Note where a pair has the seed in common but no random stream: those follow task and model."""
        apart: dict[str, None] = {}
        for key in matched.shared:
            for one, other in product(matched.a[key], matched.b[key]):
                for kind in ("task", "model"):
                    mine, theirs = one.blocks[kind], other.blocks[kind]
                    if mine.text != theirs.text:
                        same = {f"{kind}.{parameter}" for parameter in mine.block.literals.get("SAME_STREAMS", ())}
                        differ = (p for p, v in mine.flat.items() if v != theirs.flat.get(p) and p not in same)
                        apart.update(dict.fromkeys(differ))
        if apart:
            self.problems.note(
                f"{a.label} vs {b.label}: the sides differ in {', '.join(apart)}, so the two trainings of a pair have "
                "the seed in common but neither training rows nor initial weights"
            )

    def _direction(self, entry: Entry) -> tuple[str, bool]:
        task = self._tasks(entry.set, {"if": entry.only, "a": entry.a, "b": entry.b})[0].block.literals
        return task.get("METRICS", {}).get(entry.metric, "min"), entry.metric in task.get("BOUNDS", {})

    def _slices(self, entry: Entry, cells: list[Cell]) -> dict[str, EvalSlice] | None:
        """The slices a test averages, by id; None, with a problem, if `at` picks none."""
        if entry.set in ("train", "valid"):
            if entry.at is not None:
                self.problems.add(
                    entry.at.mark, f"at: {entry.set}/{entry.metric} is measured in training: it has steps, no slices"
                )
                return None
            return {}
        every = {s.id: s for cell in cells for s in cell.slices if s.set == entry.set}
        if not every and cells:
            self.problems.add(
                entry.node.mark, f"this comparison pairs nothing: none of its trials is evaluated on {entry.set!r}"
            )
            return None
        if entry.at is None:
            return every
        flats = {id_: self.evaluation.resolved[id_].flat for id_ in every}
        if not Universe(flats.values(), self.is_patched).check(
            entry.at, self.problems, f"no slice of {entry.set!r} here"
        ):
            return None
        chosen = {id_: s for id_, s in every.items() if entry.at.holds(lambda path, f=flats[id_]: f.get(path, MISSING))}  # type: ignore[misc]
        if not chosen:
            self.problems.add(entry.at.mark, f"at picks no slice of {entry.set!r}: {entry.at}")
            return None
        return chosen

    # --- sides that cannot differ -------------------------------------------------------------------------------

    def _can_differ(self, entry: Entry, a: Side, b: Side, matched: Matched, slices: dict[str, EvalSlice]) -> bool:
        """Refuse a test whose two sides are the same model everywhere; note the blocks where they are."""
        same = Sameness(self.catalog, self.evaluation.resolved, slices)
        alike: dict[str, None] = {}
        for key in matched.shared:
            ways = [Counter(same.key(cell) for cell in side[key]) for side in (matched.a, matched.b)]
            if _same_mean(*ways) and (entry.at_equal is None or len(ways[0]) == 1):
                alike[matched.label(key)] = None
        if not alike:
            return True
        words = "; ".join(alike)
        if len(alike) == len({matched.label(key) for key in matched.shared}):
            where = "everywhere" if words == "all" else f"at {words}"
            self.problems.add(
                entry.node.mark,
                f"{a.label} and {b.label}: {where} both sides are the same model, so they cannot differ",
            )
            return False
        self.problems.note(
            f"{entry.node.mark}: {a.label} and {b.label}: at {words} both sides are the same model, "
            "so the difference there is 0 and pulls the mean towards 0"
        )
        return True


def _same_mean(a: Counter[Any], b: Counter[Any]) -> bool:
    """Whether the mean over a's models is that over b's, whatever they score: the same models in the same shares."""
    return a.keys() == b.keys() and all(n * b.total() == b[model] * a.total() for model, n in a.items())
