"""The parts of a spec that make no trial: resources, retry, budget, prune, search; typed like any parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from runners import durations
from sweeps import types
from sweeps.catalog import Param
from sweeps.reader import Node, Problems, near
from sweeps.types import Misfit, show

DISTRIBUTIONS = {"log_uniform", "uniform", "int_uniform", "values"}
GENERATORS = {"logspace", "linspace"}


def _section(**fields: tuple[str, str]) -> dict[str, Param]:
    return {name: Param(name, types.parse(kind), None, meaning) for name, (kind, meaning) in fields.items()}


SECTIONS = {
    "resources": _section(
        gpu=("float | Literal['auto']", "GPUs a trial: a share up to 1, a count, 0 = the CPU, or auto = as measured"),
        cpu=("int", "CPU cores a trial, or each of its workers (count)"),
        workers=(
            "int",
            "processes that train a trial together, with a GPU each where there are any (count; gpu: N = N)",
        ),
        shard=("bool", "cut weights, gradients and moments among the workers (FSDP) instead of copying them (DDP)"),
        alone=("bool", "no other trial runs on the machine meanwhile, for timing"),
    ),
    "retry": _section(
        oom=(
            "int | Literal['split']",
            "out of memory: split (the default) = fewer rows at once, the same batch",
        ),
        infra=("int", "times a trial is run again after its worker or machine failed (count; 3 by default)"),
        error=("int", "times a trial is run again after an error of its own (count; 0 by default)"),
        hang=("float | str", "time without progress after which a worker is killed (45m, 2h, or s; 30m by default)"),
    ),
    "budget": _section(
        gpu_hours=("float", "GPU time of all its trials, after which it stops at a checkpoint (hours)"),
        wall=("float | str", "time in which its trials run, after which it stops at a checkpoint (9m, 1.5h, 2d, or s)"),
        max_trials=("int", "trainings it may begin (count)"),
    ),
    "asha": _section(
        grace_steps=("int", "updates before a suggestion can be pruned (count)"),
        reduction=("int", "one of this many goes on at each rung (count)"),
    ),
    "search": _section(
        sampler=("Literal['tpe', 'random', 'grid']", "how suggestions are made"),
        trials=("int", "suggestions a cell in all (count)"),
        select=("list[str]", "the training metric that picks the winner, as valid/accuracy; a list = several aims"),
        seeds=("int | Literal['same']", "search seeds a suggestion, or same = select on the report seeds"),
        parallel=("int", "suggestions of a round, made and trained together (count)"),
    ),
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a searched value is drawn from: `{log_uniform: [low, high]}`, `{values: [...]}`, ..."""

    kind: str
    items: tuple[Node, ...]
    node: Node

    @property
    def values(self) -> tuple[Any, ...]:
        """The choices, or the ends, as they are written."""
        return tuple([item.value for item in self.items])


def read(name: str, node: Node | None, problems: Problems, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The typed values of one section; unknown keys and misfits become problems."""
    if node is None:
        return {}
    if not node.is_map:
        problems.add(node.mark, f"{name} is a mapping of {', '.join(SECTIONS[name])}")
        return {}
    found = {}
    for key, child in node.value.items():
        if key in skip:
            continue
        param = SECTIONS[name].get(key)
        if param is None:
            problems.add(node.keys.get(key, child.mark), f"{name} has no key {key!r}{near(key, SECTIONS[name])}")
            continue
        try:
            is_word = param.type.is_list and isinstance(child.value, str)
            found[key] = param.type.convert(Node([child], child.mark) if is_word else child)
        except Misfit as error:
            problems.add(child.mark, f"{name}.{key}: {error}")
            continue
        try:
            found[key] = _checked(name, key, found[key])
        except ValueError as error:
            problems.add(child.mark, f"{name}.{key}: {error}")
    return found


def _checked(name: str, key: str, value: Any) -> Any:
    """A section's value within its bounds; a length of time in seconds. Raises `ValueError` in words."""
    if (name, key) in (("budget", "wall"), ("retry", "hang")):
        return durations.seconds(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    may_be_0 = name == "retry" or (name, key) == ("resources", "gpu")
    least = 0 if may_be_0 else 1 if isinstance(value, int) else 1e-9
    if value < least:
        raise ValueError(f"{show(value)} is less than {least:g}")
    if (name, key) == ("resources", "gpu") and value > 1 and value != int(value):
        near_by = f"{math.floor(value)} or {math.ceil(value)}"
        raise ValueError(f"{show(value)} is neither a share of one GPU (up to 1) nor a whole number: {near_by}")
    return value


def read_prune(node: Node | None, problems: Problems) -> dict[str, Any]:
    """`prune: {asha: {...}}`, the one pruner there is."""
    if node is None:
        return {}
    if not node.is_map or not node.value:
        problems.add(node.mark, "prune is a mapping: {asha: {grace_steps: N}}")
        return {}
    for key in node.value:
        if key != "asha":
            problems.add(node.keys[key], f"there is no pruner {key!r}{near(key, ['asha'])}")
    asha = node.get("asha")
    found = read("asha", asha, problems)
    if asha is not None and asha.is_map and "grace_steps" not in asha.value:
        problems.add(asha.mark, "asha needs grace_steps: updates before a suggestion can be pruned")
    if found.get("reduction") == 1:
        problems.add(asha.value["reduction"].mark, "asha.reduction: at least 2, as one of 1 would prune nothing")  # type: ignore[union-attr]
    return {"asha": found} if "grace_steps" in found else {}


def is_distribution(node: Node) -> bool:
    return node.is_map and bool(DISTRIBUTIONS & node.value.keys())


def is_generator(node: Node) -> bool:
    return node.is_map and bool(GENERATORS & node.value.keys())


def distribution(node: Node, problems: Problems) -> Distribution | None:
    """Read a distribution, or a generated list as its values."""
    if is_generator(node):
        items = generated(node, problems)
        return Distribution("values", tuple(items), node) if items else None
    if not is_distribution(node) or len(node.value) != 1:
        kinds = ", ".join(sorted(DISTRIBUTIONS | GENERATORS))
        problems.add(
            node.mark, f"{show(node.plain())} is no distribution: write one of {kinds} as {{log_uniform: [low, high]}}"
        )
        return None
    kind, child = next(iter(node.value.items()))
    if not child.is_list:
        problems.add(child.mark, f"{kind} takes a list, not {show(child.plain())}")
        return None
    found = Distribution(kind, tuple(child.value), node)
    inner = next((item for item in found.items if item.is_list or item.is_map), None)
    if inner is not None:
        what = "a list" if inner.is_list else "a mapping"
        problems.add(inner.mark, f"{kind} takes single values; {what} cannot be searched: make it an axis")
        return None
    values = found.values
    if kind == "values":
        if not values:
            problems.add(child.mark, "values is empty: give at least one value to try")
            return None
        return found
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    if len(values) != 2 or len(numbers) != 2 or not values[0] < values[1]:
        problems.add(child.mark, f"{kind} takes [low, high] with low < high, not {show(child.plain())}")
        return None
    if kind == "log_uniform" and values[0] <= 0:
        problems.add(child.mark, f"log_uniform begins above 0, not at {show(values[0])}")
        return None
    if kind == "int_uniform" and not all(isinstance(v, int) for v in values):
        problems.add(child.mark, f"int_uniform takes whole numbers, not {show(child.plain())}")
        return None
    return found


def generated(node: Node, problems: Problems) -> list[Node]:
    """The nodes of `{logspace: [first, last, n]}` or `{linspace: ...}`, rounded to six digits."""
    kind, child = next(iter(node.value.items()))
    wrong = f"{kind} takes [first, last, n] with n a whole number of at least 2, not {show(child.plain())}"
    values = [item.value for item in child.value] if child.is_list else []
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(node.value) != 1 or len(values) != 3 or len(numbers) != 3 or not isinstance(values[2], int):
        problems.add(node.mark, wrong)
        return []
    first, last, n = values
    if not 2 <= n <= 10_000 or (kind == "logspace" and (first <= 0 or last <= 0)):
        problems.add(node.mark, wrong + (" and ends above 0" if kind == "logspace" else ""))
        return []
    shares = [number / (n - 1) for number in range(n)]
    if kind == "logspace" and math.isfinite(last / first) and last / first > 0:
        raw = [first * (last / first) ** s for s in shares]
    elif kind == "logspace":  # ends further apart than any one number can say
        raw = [math.exp(math.log(first) * (1 - s) + math.log(last) * s) for s in shares[1:-1]]
        raw = [float(first), *raw, float(last)]
    elif math.isfinite(last - first):
        raw = [first + (last - first) * s for s in shares]
    else:
        raw = [first * (1 - s) + last * s for s in shares]
    rounded = [float(f"{value:.6g}") for value in raw]
    whole = isinstance(first, int) and isinstance(last, int) and all(value.is_integer() for value in rounded)
    return [Node(int(value) if whole else value, node.mark) for value in rounded]
