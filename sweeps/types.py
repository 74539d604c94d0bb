"""The types of YAML parameters: what an annotation accepts, and how a value that does not fit is told.

Annotations: int, float, bool, str, Literal[...], list[int | float | str | dict | Literal[...]], a dict, and `|`; and
list[str | dict], which holds names, bare or as mappings with settings. A parameter takes one value or a list, never
both, so that a list can be read without guessing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from runners import syntax
from sweeps.reader import Node, near

NAMED = "named"
"""Items of a list whose entries are names, bare or as mappings with settings."""


class Misfit(ValueError):
    """A value that its type does not accept; the text says what was given and what would be accepted.

    A second argument is where that stands, if not at the value as a whole: a `Mark`.
    """

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Type:
    """One annotation: names of scalar types, literal values, type of a list's items, whether none is a value.

    A list's items are its `choices`, if it has any.
    """

    scalars: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    item: str | None = None
    optional: bool = False

    @property
    def is_list(self) -> bool:
        return self.item is not None

    @property
    def is_number(self) -> bool:
        return bool({"int", "float"} & set(self.scalars))

    def __str__(self) -> str:
        words = [*self.scalars, *(str(c) for c in self.choices)]
        if self.item:
            words = [f"list of {' | '.join(words) or ('names' if self.item == NAMED else self.item)}"]
        return " | ".join([*words, "none"] if self.optional else words)

    def convert(self, node: Node) -> Any:
        """The typed value of `node`. Raises `Misfit`."""
        if node.value is None:
            raise Misfit(f"a value is missing (wanted: {self}){'; write none' if self.optional else ''}")
        if self.optional and node.value == "none":
            return None
        if self.item:
            return self._list(node)
        if node.is_list:
            raise Misfit(f"a list where one value is wanted ({self}): to sweep over it, move it to axes")
        if node.is_map:
            raise Misfit(f"a mapping where one value is wanted ({self})")
        return self._scalar(node.value, self.scalars)

    def _list(self, node: Node) -> list[Any]:
        assert self.item is not None
        if not node.is_list:
            raise Misfit(f"{show(node.value)} is not a list (wanted: {self}); write [{show(node.value)}]")
        if self.item == "dict":
            return [self._dict(child) for child in node.value]
        if self.item == NAMED:
            return [self._named(child) for child in node.value]
        for child in node.value:
            if child.is_list or child.is_map:
                raise Misfit(f"a {'list' if child.is_list else 'mapping'} inside the list (wanted: {self})")
        return [self._scalar(child.value, () if self.choices else (self.item,)) for child in node.value]

    def _dict(self, node: Node) -> dict[str, Any]:
        if not node.is_map:
            raise Misfit(f"{show(node.value)} is not a mapping (wanted: {self})")
        return node.plain()

    def _named(self, node: Node) -> Any:
        if not isinstance(node.value, str) and not node.is_map:
            raise Misfit(f"{show(node.plain())} is no name, and no mapping with one (wanted: {self})", node.mark)
        return node.plain()

    def _scalar(self, value: Any, scalars: tuple[str, ...]) -> Any:
        for choice in self.choices:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        kind = type(value).__name__
        if kind in scalars:
            return value
        if kind == "int" and "float" in scalars:
            return float(value)
        raise Misfit(self._why_not(value, scalars))

    def _why_not(self, value: Any, scalars: tuple[str, ...]) -> str:
        if "int" in scalars and isinstance(value, float):
            whole = f"write {int(value)}" if value == int(value) else f"nearest: {round(value)}"
            return f"{value!r} is not a whole number ({whole})"
        if "bool" in scalars and not self.choices:
            hint = {"no": "false", "off": "false", "yes": "true", "on": "true"}.get(str(value).lower())
            return f"{show(value)} is not true or false" + (f" (write {hint})" if hint else "")
        if scalars == ("str",) and not self.choices:
            return f'{show(value)} is not text: quote it ("{show(value)}")'
        return f"{show(value)} does not fit: wanted {self}" + (near(value, self.choices) if self.choices else "")


def show(value: Any) -> str:
    """A value as YAML would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(show(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def from_annotation(node: ast.expr) -> Type:
    """The type of an annotation. Raises `ValueError` for one that no YAML value could fill."""
    parts = _union(node)
    scalars: list[str] = []
    choices: list[Any] = []
    members: list[Any] = []
    item, optional = None, False
    for part in parts:
        if isinstance(part, ast.Constant) and part.value is None:
            optional = True
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            return from_annotation(syntax.parse(part.value, mode="eval").body)
        elif isinstance(part, ast.Name) and part.id in ("int", "float", "bool", "str"):
            scalars.append(part.id)
        elif isinstance(part, ast.Name) and part.id in ("dict", "list"):
            item = "dict" if part.id == "list" else item
            scalars += ["dict"] if part.id == "dict" else []
        elif isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name):
            name, inner = part.value.id, part.slice
            if name == "Literal":
                choices += _choices(inner)
            elif name in ("list", "Sequence", "tuple"):
                item, members = _item(inner)
            elif name == "dict":
                scalars.append("dict")
            else:
                raise ValueError(f"{ast.unparse(part)} is no type of a parameter")
        else:
            raise ValueError(f"{ast.unparse(part)} is no type of a parameter")
    if item and (scalars or choices):
        raise ValueError(f"{ast.unparse(node)}: a parameter takes one value or a list, not both")
    return Type(tuple(scalars), tuple(choices or members), item, optional)


def _choices(inner: ast.expr) -> list[Any]:
    return [ast.literal_eval(e) for e in (inner.elts if isinstance(inner, ast.Tuple) else [inner])]


def _union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(node.left) + _union(node.right)
    return [node]


def _item(node: ast.expr) -> tuple[str, list[Any]]:
    """The type of a list's items, and the values it is limited to, if it is."""
    if isinstance(node, ast.Tuple):
        node = node.elts[0]
    if isinstance(node, ast.BinOp):
        if [_item(part)[0] for part in _union(node)] == ["str", "dict"]:
            return NAMED, []
        raise ValueError(f"list[{ast.unparse(node)}] is no type of a parameter")
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
        return "str", _choices(node.slice)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        node = node.value
    if isinstance(node, ast.Name) and node.id in ("int", "float", "str", "bool", "dict", "Mapping"):
        return "dict" if node.id == "Mapping" else node.id, []
    raise ValueError(f"list[{ast.unparse(node)}] is no type of a parameter")


def parse(text: str) -> Type:
    """The type that `text` writes as an annotation."""
    return from_annotation(syntax.parse(text, mode="eval").body)
