"""The tasks, found by their file names: `mqar.py` is the task `mqar`. A new task is one new file."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from runners.schema import UserError


def names() -> list[str]:
    """Every task there is, in order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def get(name: str) -> Any:
    """The class `Task` of one task file. Raises `UserError` with the nearest name for one that does not exist."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"there is no task {name!r}{hint} There are: {', '.join(names())}")
    return importlib.import_module(f"runners.tasks.{name}").Task


def build(settings: dict[str, Any]) -> Any:
    """The task that a trial's or a slice's `task` block describes. Values it cannot hold raise `UserError`."""
    return get(settings["name"])(**{key: value for key, value in settings.items() if key != "name"})
