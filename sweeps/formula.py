"""The rules and formulas of mechanisms, tasks and models: whole-number arithmetic in literal text, nothing else.

Names, numbers, text, None, True, False, `+ - * / // %`, comparisons, `and or not`, `a if c else b`, and the functions
min, max, log, len: no powers, attributes or other calls. A formula is checked once against this list and then compiled,
so that evaluating it is cheap and can do nothing but arithmetic.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

from runners import syntax
from runners.schema import UserError

FUNCTIONS = {"min": min, "max": max, "log": math.log, "len": len}
GLOBALS: dict[str, Any] = {"__builtins__": {}, **FUNCTIONS}

ALLOWED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.IfExp),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or),
    *(
        ast.Compare,
        ast.Eq,
        ast.NotEq,
        ast.Lt,
        ast.LtE,
        ast.Gt,
        ast.GtE,
        ast.Is,
        ast.IsNot,
        ast.In,
        ast.NotIn,
        ast.Tuple,
    ),
)


@cache
def parse(text: str) -> tuple[CodeType, frozenset[str]]:
    """Compiled formula and the names it reads. Raises `ValueError` for anything that is not on the list above."""
    try:
        tree = syntax.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a formula: {error}") from error
    names = set()
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            raise ValueError(f"{text!r}: {type(node).__name__} is not allowed in a formula")
        if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | str | None):
            raise ValueError(f"{text!r}: {node.value!r} is not allowed in a formula")
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
                raise ValueError(f"{text!r}: a formula calls {', '.join(FUNCTIONS)} and nothing else")
            called.add(id(node.func))
        elif isinstance(node, ast.Name):
            names.add(node)
    read = frozenset(node.id for node in names if id(node) not in called)
    return syntax.compiled(tree, "<formula>"), read


def names(text: str) -> frozenset[str]:
    """The names that a formula reads."""
    return parse(text)[1]


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The formula's value. Raises `UserError` for a name without a value, or where the arithmetic has no result."""
    try:
        return eval(parse(text)[0], GLOBALS, values)
    except NameError as error:
        raise UserError(f"{text!r} reads {error.name!r}, which is no parameter here") from error
    except (ArithmeticError, TypeError) as error:
        raise UserError(f"{text!r} has no value: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def all_hold(rules: tuple[str, ...], values: Mapping[str, Any]) -> bool:
    """Whether every rule holds; quick, because they are evaluated as one. A rule without a value does not hold."""
    if not rules:
        return True
    try:
        return bool(eval(_joined(rules), GLOBALS, values))
    except (ArithmeticError, TypeError, ValueError, NameError):
        return False


@cache
def _joined(rules: tuple[str, ...]) -> CodeType:
    for rule in rules:
        parse(rule)
    return compile(" and ".join(f"({rule.strip()})" for rule in rules), "<rules>", "eval")
