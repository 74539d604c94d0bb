"""Conditions on trials: `if`, `exclude`, `a`, `b`, `at`, `--only`.

All paths must agree; a list means any of its values; `{min, max}` are bounds, both included; `{not: v}` is anything but
`v`; a trial that does not have the path does not match. A path or a value that no trial has is told, with the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from runners.schema import normal
from sweeps.reader import Mark, Node, Problems, near
from sweeps.types import show

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing", "__bool__": lambda self: False})()
"""What a trial without the path has there."""

OPERATORS = {"min", "max", "not"}
Get = Callable[[str], Any]


def key(value: Any) -> Any:
    """A hashable form of a value: equal numbers are equal whatever their type, true is not 1, none is none."""
    if isinstance(value, bool):
        return ("bool", value)
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ("list", *map(key, value))
    if isinstance(value, dict):
        return ("dict", *((k, key(v)) for k, v in sorted(value.items())))
    return value


@dataclass(frozen=True, slots=True)
class Matcher:
    """What one path must be. Exactly one of `any_of`, `none_of` and the bounds is in use."""

    path: str
    key_mark: Mark
    mark: Mark
    any_of: dict[Any, Node] | None = None
    none_of: dict[Any, Node] | None = None
    low: float | None = None
    high: float | None = None

    def holds(self, value: Any) -> bool:
        if value is MISSING:
            return False
        if self.any_of is not None:
            return key(value) in self.any_of
        if self.none_of is not None:
            return key(value) not in self.none_of
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.any_of is not None:
            values = [show(node.plain()) for node in self.any_of.values()]
            return f"{self.path}: {values[0] if len(values) == 1 else '[' + ', '.join(values) + ']'}"
        if self.none_of is not None:
            return f"{self.path}: {{not: {', '.join(show(node.plain()) for node in self.none_of.values())}}}"
        bounds = [f"{word}: {show(v)}" for word, v in (("min", self.low), ("max", self.high)) if v is not None]
        return f"{self.path}: {{{', '.join(bounds)}}}"


@dataclass(frozen=True, slots=True)
class Condition:
    """Matchers that must all hold. An empty one holds everywhere."""

    matchers: tuple[Matcher, ...]
    mark: Mark

    @property
    def paths(self) -> list[str]:
        return [matcher.path for matcher in self.matchers]

    def holds(self, get: Get) -> bool:
        return all(matcher.holds(get(matcher.path)) for matcher in self.matchers)

    def __str__(self) -> str:
        return ", ".join(map(str, self.matchers)) or "every trial"


def read(node: Node, problems: Problems, what: str) -> Condition | None:
    """The condition that a node writes; None, with a problem, if it is not one."""
    if not node.is_map:
        problems.add(node.mark, f"{what} is a mapping of path: value, not {show(node.plain())}")
        return None
    if not node.value:
        problems.add(node.mark, f"{what} is empty: it would match every trial")
        return None
    before = len(problems)
    matchers = list(_matchers("", node, problems))
    return Condition(tuple(matchers), node.mark) if len(problems) == before else None


def _matchers(prefix: str, node: Node, problems: Problems) -> Iterable[Matcher]:
    for name, child in node.value.items():
        path = prefix if name == "name" and prefix else f"{prefix}.{name}" if prefix else name
        at = node.keys.get(name, child.mark)
        if child.is_map and not OPERATORS & child.value.keys():
            if child.value:
                yield from _matchers(path, child, problems)
            else:
                problems.add(child.mark, f"{path}: an empty condition")
        elif child.is_map:
            found = _operator(path, child, at, problems)
            if found is not None:
                yield found
        elif child.is_list:
            if not child.value:
                problems.add(child.mark, f"{path}: an empty list matches nothing")
            # For a list parameter the whole list may be meant, and a list of lists is any of them.
            nodes = [*child.value, child] if child.value else []
            yield Matcher(path, at, child.mark, any_of={key(n.plain()): n for n in nodes if n.value is not None})
        elif child.value is None:
            problems.add(at, f"{path}: a value is missing (`none` is text)")
        else:
            yield Matcher(path, at, child.mark, any_of={key(child.value): child})


def _operator(path: str, node: Node, at: Mark, problems: Problems) -> Matcher | None:
    unknown = [name for name in node.value if name not in OPERATORS]
    if unknown or ("not" in node.value and len(node.value) > 1):
        problems.add(node.mark, f"{path}: {{min, max}} or {{not: value}}, not {show(node.plain())}")
        return None
    if "not" in node.value:
        child = node.value["not"]
        nodes = child.value if child.is_list else [child]
        return Matcher(path, at, node.mark, none_of={key(n.plain()): n for n in nodes})
    bounds = {name: child.value for name, child in node.value.items()}
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in bounds.values()):
        problems.add(node.mark, f"{path}: min and max are numbers, not {show(node.plain())}")
        return None
    low, high = bounds.get("min"), bounds.get("max")
    if low is not None and high is not None and low > high:
        problems.add(node.mark, f"{path}: min {show(low)} is above max {show(high)}")
        return None
    return Matcher(path, at, node.mark, low=low, high=high)


def split(condition: Condition) -> list[Condition]:
    """One condition for each combination of listed values: in a comparison a list makes one test a value."""
    combos: list[list[Matcher]] = [[]]
    for matcher in condition.matchers:
        single = [matcher]
        if matcher.any_of is not None and len(matcher.any_of) > 1:
            items = [(k, n) for k, n in matcher.any_of.items() if not (isinstance(k, tuple) and n.mark == matcher.mark)]
            single = [Matcher(matcher.path, matcher.key_mark, n.mark, any_of={k: n}) for k, n in items]
        combos = [[*combo, one] for combo in combos for one in single]
    return [Condition(tuple(combo), condition.mark) for combo in combos]


class Universe:
    """Every value that some trial has, by path: what a condition can possibly mean."""

    def __init__(self, gets: Iterable[dict[str, Any]], is_patched: bool = False) -> None:
        self.values: dict[str, dict[Any, Any]] = {}
        self.is_patched = is_patched
        for flat in gets:
            for path, value in flat.items():
                self.values.setdefault(path, {})[key(value)] = value

    def check(self, condition: Condition, problems: Problems, where: str = "no trial of this sweep") -> bool:
        """Tell what `condition` names and no trial has. A patched sweep may have lost it: then it is only a note."""
        fine = True
        for matcher in condition.matchers:
            message = self._why_never(matcher, where)
            if message is not None:
                mark, text = message
                if self.is_patched and mark.layer == "file":
                    problems.note(f"{mark}: {text}")
                else:
                    problems.add(mark, text)
                fine = False
        return fine

    def _why_never(self, matcher: Matcher, where: str) -> tuple[Mark, str] | None:
        path = matcher.path
        known = self.values.get(path)
        if known is None:
            near_path = near(path, self.values) if len(self.values) > 40 else near(path, sorted(self.values))
            return matcher.key_mark, f"{where} has {path!r}{near_path}"
        wanted = matcher.any_of if matcher.any_of is not None else matcher.none_of
        if wanted is not None:
            for k, node in wanted.items():
                if k not in known and not (isinstance(k, tuple) and k[0] == "list" and node.mark == matcher.mark):
                    shown = [show(v) for v in known.values()]
                    return node.mark, f"{where} has {path} {show(normal(node.plain()))}{near(show(node.value), shown)}"
            return None
        if not any(matcher.holds(value) for value in known.values()):
            return matcher.mark, f"{where} has {matcher} (there are: {', '.join(show(v) for v in known.values())})"
        return None
