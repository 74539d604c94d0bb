"""How right the ops of a trial were on the trial's own numbers: against fp64, once a process for each kind of call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import kernels

EVIDENCE_FILE = "kernels.json"
"""In an attempt's folder."""
_known: dict[str, dict[str, Any]] = {}


class Witness:
    """Listens to the first update of a training, and tells at its end what the ops did there."""

    def __init__(self) -> None:
        self._calls: list[Any] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Around an update: hears the first one."""
        if self._calls is not None:
            yield
            return
        with kernels.heard() as self._calls:
            yield

    def tell(self) -> list[dict[str, Any]]:
        """One row for each kind of call. A check that cannot be made says why; no training fails of it."""
        found = []
        for call in self._calls or []:
            if call.kind not in _known:
                try:
                    _known[call.kind] = call.evidence()
                except Exception as problem:
                    _known[call.kind] = {"op": call.op, "problem": f"{type(problem).__name__}: {problem}"[:300]}
            found.append(_known[call.kind])
        self._calls = []
        return found


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row goes into a trial's result: op, implementation, largest error, whether it repeats itself."""
    if "problem" in row:
        return row
    return {
        "op": row["op"],
        "impl": row["impl"],
        "error": max(row["errors"].values()),
        "repeatable": row["repeatable"],
        "assembler": row["assembler"],
    }


def words(row: dict[str, Any]) -> str:
    """A line for an attempt's log."""
    if "problem" in row:
        return f"op {row['op']} could not be checked: {row['problem']}"
    told = brief(row)
    same = "the same twice" if told["repeatable"] else "NOT THE SAME TWICE"
    return f"op {told['op']}: {told['impl']}, {row['dtype']}, error {told['error']:.1e} against fp64, {same}"
