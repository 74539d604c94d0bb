"""The report's table of searches: how each cell was tuned, and what won."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboards.labels import counted, nearly
from runners.schema import Status
from runners.search import State


def rows(states: Mapping[str, State]) -> list[dict[str, Any]]:
    """A row of the report's table for each search."""
    return [_row(state) for state in states.values()]


def _row(state: State) -> dict[str, Any]:
    search = state.search
    winner = state.winner if state.is_over else None
    score = state.scores[winner] if winner is not None else None
    values = state.suggestions[winner].values if winner is not None else {}
    bad = [(state.count(what), what) for what in (Status.DIVERGED, Status.PRUNED, "refused")]
    seeds = "the report's seeds" if search.is_same else counted(len(search.seeds), "seed") + " of its own"
    return {
        "cell": search.cell,
        "sampler": search.sampler,
        "suggestions": f"{state.n_ended} of {search.trials}" if not state.is_over else str(search.trials),
        "seeds": seeds,
        "bad": ", ".join(f"{n} {what}" for n, what in bad if n),
        "select": ", ".join(search.select),
        "winner": "not known yet" if winner is None else f"suggestion {winner}",
        "values": ", ".join(f"{path} {_shown(value)}" for path, value in values.items()),
        "score": ", ".join(map(nearly, score.values)) if score is not None else "",
    }


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
