"""How a trial ended before its time, in one line. `result` is the content of its result.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def why_pruned(result: Mapping[str, Any]) -> str:
    """Where a search cut it off, and for what."""
    cut = result["pruned"]
    return f"pruned at step {result['step']}: {cut['metric']} is worse than {cut['cut_off']:.4g}"


def where_diverged(result: Mapping[str, Any]) -> str:
    """Where it diverged; `runners/diagnose.py` says what is known of it. Empty where nothing is."""
    found = result.get("diverged") or {}
    if "where" not in found:
        return f"not finite at step {found['step']}" if "step" in found else ""
    what, where = found.get("what", "value"), found["where"]
    place = what if what == where else f"{what} of {where}"
    return f"not finite at step {found.get('step', '?')}: {place}"
