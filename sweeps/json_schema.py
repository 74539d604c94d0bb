"""The JSON Schema of a spec, for editors: completion, hover texts and early red lines.

It accepts every spec that `validate` accepts and cannot know everything `validate` does: rules between parameters,
conditions, pairs and repeated paths are left to `sweep validate`.
"""

from __future__ import annotations

from typing import Any

from sweeps.catalog import Block, Catalog, Param
from sweeps.sections import DISTRIBUTIONS, GENERATORS, SECTIONS
from sweeps.spec import KEYS
from sweeps.types import NAMED, Type, show

Schema = dict[str, Any]
SCALARS = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object"}
TEXT_OR_NUMBER: Schema = {"type": ["string", "number", "boolean"]}


def build(catalog: Catalog) -> Schema:
    """The schema, made from the catalogue as it is installed here."""
    blocks = {kind: [catalog.block(kind, name) for name in catalog.names(kind)] for kind in ("mechanism", "task")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memsweep spec",
        "type": "object",
        "required": ["sweep"],
        "additionalProperties": False,
        "properties": {key: {"description": text, **_key(key, catalog)} for key, text in KEYS.items()},
        # A child, a profile and --set write dotted paths and `key+`, wherever they like.
        "patternProperties": {r"^[a-z_]+\+$|^[a-z_]+\..+$": {}},
        "$defs": {
            "form": _form(),
            "condition": {"type": "object"},
            **{kind: _named(kind, found, is_item=False) for kind, found in blocks.items()},
            **{f"{kind}_item": _named(kind, found, is_item=True) for kind, found in blocks.items()},
            **{kind: _plain(catalog.block(kind)) for kind in ("model", "train")},
        },
    }


_SELECT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
    "description": SECTIONS["search"]["select"].meaning,
}


def _key(key: str, catalog: Catalog) -> Schema:
    conditions = {"type": ["array", "null"], "items": {"$ref": "#/$defs/condition"}}
    found: dict[str, Schema] = {
        "sweep": {"type": "string", "pattern": "^[a-z0-9_-]+$"},
        "question": {"type": "string"},
        "extends": {"type": "string"},
        "axes": _axes(catalog),
        "when": {"type": ["array", "null"], "items": {"type": "object", "required": ["if", "set"]}},
        "exclude": conditions,
        "seeds": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": {"type": "integer"}}]},
        "search": {"type": ["object", "null"], "properties": {**_properties(SECTIONS["search"]), "select": _SELECT}},
        "prune": {"type": ["object", "null"], "properties": {"asha": _section("asha")}, "additionalProperties": False},
        "evaluate": {"type": ["object", "null"]},
        "compare": {"type": ["array", "null"], "items": _comparison()},
        "profiles": {"type": "object", "additionalProperties": {"type": "object"}},
    }
    if key in ("mechanism", "task", "model", "train"):
        return {"$ref": f"#/$defs/{key}"}
    return found.get(key) or _section(key)


def _section(name: str) -> Schema:
    return {"type": ["object", "null"], "properties": _properties(SECTIONS[name]), "additionalProperties": False}


def _comparison() -> Schema:
    paths = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    properties: Schema = {
        **{word: {"type": "object"} for word in ("a", "b", "if", "at")},
        **{word: paths for word in ("each", "mean", "pair")},
        "metric": {"type": "string", "description": "SET/metric"},
        "margin": {"type": "number", "exclusiveMinimum": 0, "description": "the smallest difference that matters"},
        "scale": {"enum": ["difference", "ratio"]},
        "at_equal": {"enum": ["state_bytes"]},
    }
    return {"type": "object", "required": ["b"], "properties": properties, "additionalProperties": False}


def _form() -> Schema:
    keys = ["ref", "match", "required"]
    return {"type": "object", "anyOf": [{"required": [key]} for key in keys]}


def _type(type_: Type) -> Schema:
    if type_.item is not None:
        kinds = ["string", "object"] if type_.item == NAMED else SCALARS[type_.item]
        item = {"enum": list(type_.choices)} if type_.choices else {"type": kinds}
        found: list[Schema] = [{"type": "array", "items": item}]
    else:
        found = [{"type": SCALARS[name]} for name in type_.scalars]
        found += [{"enum": list(type_.choices)}] if type_.choices else []
    found += [{"const": "none"}] if type_.optional else []
    return found[0] if len(found) == 1 else {"anyOf": found}


def _properties(params: dict[str, Param]) -> Schema:
    found = {}
    for name, param in params.items():
        default = "" if param.is_required or param.default is None else f" (default: {show(param.default)})"
        found[name] = {"anyOf": [_type(param.type), {"$ref": "#/$defs/form"}], "description": param.meaning + default}
    return found


def _sub_blocks(block: Block) -> Schema:
    found = {}
    for name, options in block.blocks.items():
        properties: Schema = {"name": {"enum": [*options, "none"]}}
        for sub in options.values():
            properties.update(_properties(sub.params))
        found[name] = {
            "description": block.params[name].meaning if name in block.params else "",
            "anyOf": [
                {"enum": [*options, "none"]},
                {"type": "object", "properties": properties, "additionalProperties": False},
            ],
        }
    return found


def _plain(block: Block) -> Schema:
    """model or train: a mapping of its parameters, dotted keys allowed."""
    return {
        "type": "object",
        "properties": {**_properties(block.params), **_sub_blocks(block)},
        "patternProperties": {r"\.|\+$": {}},
        "additionalProperties": False,
    }


def _named(kind: str, blocks: list[Block], *, is_item: bool) -> Schema:
    """A mechanism or a task: its name, or a mapping with it; in an item lists are axes and full paths are allowed."""
    names = [block.name for block in blocks]
    options: list[Schema] = [{"enum": names, "description": f"a {kind}"}]
    for block in blocks:
        own = _properties(block.params)
        if is_item:
            own = {name: {**schema, "anyOf": [*schema["anyOf"], *_many(schema)]} for name, schema in own.items()}
        properties = {"name": {"const": block.name, "description": block.summary}, "arm": {"type": "string"}, **own}
        extra: Schema = {"patternProperties": {r"\.|^\(|\+$": {}}}
        options.append(
            {"type": "object", "required": ["name"], "properties": properties, **extra, "additionalProperties": False}
        )
    if is_item:
        options.append({"type": "object", "not": {"required": ["name"]}})
    return {"anyOf": options}


def _many(schema: Schema) -> list[Schema]:
    words = sorted(DISTRIBUTIONS | GENERATORS)
    return [
        {"type": "array", "items": {"anyOf": schema["anyOf"]}},
        {"type": "object", "anyOf": [{"required": [word]} for word in words]},
    ]


def _axes(catalog: Catalog) -> Schema:
    lists: Schema = {"anyOf": [{"type": "array", "minItems": 1}, {"type": "object"}]}
    properties: Schema = {}
    for kind in ("mechanism", "task"):
        properties[kind] = {"type": "array", "items": {"$ref": f"#/$defs/{kind}_item"}, "minItems": 1}
    for kind in ("model", "train"):
        for name, param in catalog.block(kind).params.items():
            properties[f"{kind}.{name}"] = {**lists, "description": param.meaning}
    for name in catalog.names("task"):
        for param in catalog.block("task", name).params.values():
            properties[f"task.{param.name}"] = {**lists, "description": param.meaning}
    pattern = r"^(mechanism|task|model|train)\.|^\(|\+$"
    return {
        "type": ["object", "null"],
        "properties": properties,
        "patternProperties": {pattern: {}},
        "additionalProperties": False,
    }
