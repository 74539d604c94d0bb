"""What a sweep is about, without the import of a plotting library."""

from __future__ import annotations

from runners.schema import Plan


def main_metric(plan: Plan) -> tuple[str, str]:
    """The evaluation set and metric the sweep is about: that of its first test, else the first set and score."""
    sets = list(dict.fromkeys(piece.set for member in plan.members for piece in member.slices))
    for test in plan.tests:
        if test.set in sets:
            return test.set, test.metric
    scores = [name for name, direction in plan.metrics.items() if direction == "max"] or list(plan.metrics)
    return (sets[0] if sets else "valid"), (scores[0] if scores else "accuracy")
