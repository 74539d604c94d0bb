"""Memory mechanisms, one file each: the file's name is the name in a spec. The contract is in `_parts.py`."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any


def names() -> list[str]:
    """Every mechanism, by its file's name, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def get(name: str) -> Any:
    """The `Mixer` class of mechanism `name`. Raises ValueError, with the nearest name, if there is none."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no mechanism is called {name!r}{hint} There are: {', '.join(names())}")
    return importlib.import_module(f"mechanisms.{name}").Mixer
