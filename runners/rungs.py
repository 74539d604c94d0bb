"""Successive halving without races: where a suggestion's training may be cut off, and whether it is.

Rungs stand at grace_steps * reduction^k updates, each taken at the first validation at or after it; no validation is
added for them, so the metrics do not depend on pruning. A suggestion is held against the scores that the suggestions
of earlier complete rounds, of its own cell and seed, had at the same rung. With n of them it goes on if it is among the
best floor((n + 1) / reduction) of them and itself; where that is less than one, and so in the first round, it goes on
anyway. Equal scores go on. The cut-offs are therefore numbers that are known before the training begins; they are kept
in the search's folder and obeyed by every resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runners.schema import Rungs, Status

MOST = 40
"""Rungs that are looked at: more than any training has, as each is at least twice as far as the one before."""


def steps(prune: Mapping[str, int]) -> Iterator[int]:
    """The updates at which the rungs of `prune` stand, rising."""
    for k in range(MOST):
        yield prune["grace_steps"] * prune["reduction"] ** k


def score_at(points: Sequence[tuple[int, float]], step: int) -> float | None:
    """The score of a training at a rung: of its first validation at or after `step`; None if it did not get there."""
    return next((value for at, value in points if at >= step), None)


def cut_off(scores: Sequence[float], reduction: int, direction: str) -> float | None:
    """What a suggestion must not be worse than, given the earlier `scores` at the rung; None = it goes on."""
    kept = (len(scores) + 1) // reduction
    if kept < 1:
        return None
    ranked = sorted(scores, reverse=direction == "max")
    return ranked[min(kept, len(ranked)) - 1]


def decide(rungs: Rungs, before: int, step: int, score: float) -> dict[str, Any] | None:
    """Whether a training ends at this validation: the decision in words for its result, or None if it goes on.

    The validation stands at `step`, the one before it at `before` (0 = none): it takes the rungs in between.
    """
    for rung, cut in rungs.cuts:
        if before < rung <= step and is_worse(score, cut, rungs.direction):
            found = {"step": step, "rung": rung, "metric": rungs.metric, "cut_off": cut}
            return found | {"score": score if math.isfinite(score) else None}
    return None


def is_worse(score: float, cut: float, direction: str) -> bool:
    """Whether a score is below its cut-off. One that is no number is."""
    return not (score >= cut if direction == "max" else score <= cut)


def stands(result: Mapping[str, Any], rungs: Rungs | None) -> bool:
    """Whether a pruned result still ends the trial: the same rung would cut it off again.

    It does not for a report trial, after `prune` was removed, or with rungs elsewhere: then the training goes on.
    """
    if result["status"] != Status.PRUNED:
        return True
    cut = dict(rungs.cuts).get(result["pruned"]["rung"]) if rungs is not None else None
    if rungs is None or cut is None:
        return False
    score = result["pruned"]["score"]
    return score is None or is_worse(score, cut, rungs.direction)
