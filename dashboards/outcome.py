"""What a report found, as plain values for machines: `report.json` beside it, and MLflow's summary run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from dashboards.compare import Comparison
from dashboards.labels import effect_text, side, verdict_text
from runners.schema import Plan


def outcome(
    plan: Plan, revision: str, answer: str, counts: dict[str, int], found: Sequence[Comparison], warnings: Sequence[str]
) -> str:
    """JSON. `effect`, `low` and `high` are in the metric's own units, or ratios a / b; null where there is none."""
    told = {
        "sweep": plan.sweep,
        "revision": int(revision),
        "spec_hash": plan.spec_hash,
        "question": plan.question,
        "answer": answer,
        "counts": counts,
        "verdicts": [_verdict(comparison) for comparison in found],
        "warnings": list(warnings),
    }
    return json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _verdict(found: Comparison) -> dict[str, Any]:
    test = found.test
    numbers = {name: getattr(found, name) for name in ("effect", "low", "high", "p", "p_adjusted", "mean_a", "mean_b")}
    return {
        "name": side(test.name),
        "a": side(test.a),
        "b": side(test.b),
        "set": test.set,
        "metric": test.metric,
        "scale": test.scale,
        "margin": test.margin,
        **{name: None if value is None or not math.isfinite(value) else value for name, value in numbers.items()},
        "effect_text": effect_text(found),
        "pairs": len(found.pairs),
        "planned": len(test.pairs),
        "verdict": verdict_text(found),
        "reason": found.reason,
    }
