"""`model.layers`: reading its entries, and which mixer with which values stands in each layer.

An entry is `mechanism` (the one under test), another place that the model knows, or any mechanism, by its name or as a
mapping with its settings. In a trial entries have one form: what equals a default is left out, and what has no settings
left is bare text, so that equal models have equal ids whatever was written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runners.schema import UserError
from sweeps import formula
from sweeps.catalog import Block, Catalog, Param, with_derived
from sweeps.reader import Node, near
from sweeps.types import Misfit, Type

POSITION = Param("position", Type(choices=("none", "rope")), "none", "positions of this layer, if not the model's")
"""What every layer of its own may set besides its mechanism's parameters."""


def read(node: Node, model: Block, catalog: Catalog) -> list[Any]:
    """The entries of the list `node`. Raises `Misfit`, with the mark of what does not fit."""
    return [_entry(child, model.literals.get("LAYER", []), catalog) for child in node.value]


def _entry(node: Node, places: list[str], catalog: Catalog) -> Any:
    name_node = node.get("name") if node.is_map else node
    if name_node is None:
        raise Misfit("a layer of its own has a name: {name: sliding_window, window: 64}", node.mark)
    name, known = name_node.value, [*places, *catalog.names("mechanism")]
    if name not in known:
        raise Misfit(f"no layer is called {name!r}{near(name, known)}", name_node.mark)
    given = {key: child for key, child in node.value.items() if key != "name"} if node.is_map else {}
    if name in places:
        if given:
            mark = node.keys[next(iter(given))]
            raise Misfit(f"{name} has no settings here; those of the mechanism stand under `mechanism`", mark)
        return name
    params = {**catalog.block("mechanism", name).params, "position": POSITION}
    settings = {}
    for key, child in given.items():
        if key not in params:
            raise Misfit(f"mechanism {name} has no parameter {key!r}{near(key, params)}", node.keys[key])
        try:
            settings[key] = params[key].type.convert(child)
        except Misfit as error:
            raise Misfit(f"{key}: {error}", child.mark) from error
    missing = [key for key, param in params.items() if param.is_required and key not in settings]
    if missing:
        raise Misfit(f"mechanism {name} needs {missing[0]!r}", node.mark)
    return _short(name, {k: v for k, v in settings.items() if k == "position" or v != params[k].default})


def _short(name: str, settings: Mapping[str, Any]) -> Any:
    return {"name": name, **settings} if settings else name


def named(entry: Any) -> tuple[str, dict[str, Any]]:
    """Name and settings of an entry."""
    if isinstance(entry, str):
        return entry, {}
    return entry["name"], {key: value for key, value in entry.items() if key != "name"}


def settled(entries: list[Any], mechanism: str, position: str) -> list[Any] | None:
    """Entries as a trial of `mechanism` has them: the model's own position is left out; where none is called
    `mechanism`, those that bear its name alone are it; what repeats stands once; and none if all are the mechanism."""
    found = []
    for entry in entries:
        name, settings = named(entry)
        if settings.get("position") == position:
            del settings["position"]
        found.append(_short(name, settings))
    if "mechanism" not in found:
        found = ["mechanism" if entry == mechanism else entry for entry in found]
    n = len(found)
    period = next((p for p in range(1, n + 1) if n % p == 0 and found == found[:p] * (n // p)), 0)
    return None if found[:period] == ["mechanism"] else found[:period]


def identity(entries: list[Any], catalog: Catalog) -> list[Any]:
    """Entries as an id holds them: with the REVISION of each layer's own mechanism."""
    found = []
    for entry in entries:
        name, settings = named(entry)
        if name in catalog.names("mechanism"):
            entry = {"REVISION": catalog.block("mechanism", name).revision, "name": name, **settings}
        found.append(entry)
    return found


def placed(catalog: Catalog, mechanism: Block, env: Mapping[str, Any]) -> Iterator[tuple[str, Block | None, Any]]:
    """For each layer: what it is called, its mechanism (None: it has none) and the values its formulas read.

    `env` are the values of a whole trial, those of the mechanism under test among them.
    """
    entries = env.get("layers") or ["mechanism"]
    for number in range(env.get("n_layers") or 1):
        name, settings = named(entries[number % len(entries)])
        if name == "mechanism":
            yield name, mechanism, env
        elif name in catalog.names("mechanism"):
            block = catalog.block("mechanism", name)
            own = {key: param.default for key, param in block.params.items()}
            yield name, block, {**env, **with_derived(block, {**own, **settings}, env)}
        else:
            yield name, None, env


def state_elements(block: Block | None, values: Mapping[str, Any]) -> tuple[int, int]:
    """Elements that one layer carries: (kept in fp32, kept in the activations' dtype)."""
    return block.state_elements(values) if block is not None else (0, 2 * values.get("d_model", 0))


def n_params(name: str, block: Block | None, values: Mapping[str, Any], parts: Mapping[str, str]) -> int:
    """Parameters of one layer's mixer. Raises `UserError` where a file does not say how to count them."""
    text = parts.get(name) if block is None else block.literals.get("PARAMS")
    if text is None:
        raise UserError(f"the parameters of {name} are not counted")
    return int(formula.evaluate(text, values))
