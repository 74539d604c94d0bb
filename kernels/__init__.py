"""The shared ops that carry every mechanism: one file an op, its name the key.

Each op file reads from top to bottom: the recurrence in plain torch (the law), the chunked form in torch, and one
public function with `impl="auto" | "reference" | "chunked" | "triton"`. Where an op has Triton kernels, its private
twins hold them (`_op_triton.py`) and their launches (`_op.py`); "auto" takes them on a card. Importing this
package imports no op and no torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def names() -> list[str]:
    """Every op, by its file's name, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def get(name: str) -> Callable[..., Any]:
    """The public function of op `name`. Raises ValueError, with the nearest name, if there is none."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no op is called {name!r}{hint} There are: {', '.join(names())}")
    op: Callable[..., Any] = getattr(importlib.import_module(f"kernels.{name}"), name)
    return op


def heard() -> AbstractContextManager[list[Any]]:
    """Within: the calls of ops, each kind of call once, as `Call(op, inputs, impl, kind)` with an `evidence()`.

    Of a batch its first row is kept, in memory of its own: the law in fp64 is slow, and rows do not mix.
    """
    from kernels import _evidence

    return _evidence.heard()


def evidence(op: str, inputs: dict[str, Any], impl: str = "auto") -> dict[str, Any]:
    """How op `op` does on `inputs` here: its implementation, its errors against fp64, whether it repeats itself."""
    from kernels import _evidence

    get(op)
    return _evidence.evidence(op, inputs, impl)
