"""Python's own parser, one thread at a time: before 3.11.8 and 3.12.2 two at once end in a SystemError (gh-106905)."""

from __future__ import annotations

import ast
import threading
from types import CodeType
from typing import Any

_one = threading.Lock()


def parse(source: str | bytes, mode: str = "exec") -> Any:
    """`ast.parse`."""
    with _one:
        return ast.parse(source, mode=mode)


def compiled(tree: ast.Expression, name: str) -> CodeType:
    """The code of an expression's tree."""
    with _one:
        return compile(tree, name, "eval")
