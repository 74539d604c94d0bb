"""Modules that come with an extra of ours: what wants one says so before anything is trained. No torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from runners import syntax, tasks
from runners.schema import Exit, UserError


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def need(modules: Mapping[str, str], title: str) -> None:
    """Raises `UserError` for the first of `modules` that is not there, with the extra that brings it."""
    for module, extra in modules.items():
        if not installed(module):
            raise UserError(
                f"{title} needs {module}, which is not installed: pip install 'memsweep[{extra}]'", Exit.ENVIRONMENT
            )


@functools.cache
def of_task(name: str) -> dict[str, str]:
    """What a task's literal NEEDS says, {module: extra}, read without importing the task."""
    path = Path(tasks.__file__).parent / f"{name}.py"
    for node in syntax.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NEEDS":
            return ast.literal_eval(node.value)
    return {}
