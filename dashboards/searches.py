"""The report's table of searches: how each cell was tuned, and what won."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from dashboards.labels import counted, nearly
from runners.schema import Space, Status
from runners.search import State
from runners.suggest import tpe_begins


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
        "sampler": _makers(state),
        "space": ", ".join(f"{path} {_space(space)}" for path, space in search.space.items()),
        "suggestions": f"{state.n_ended} of {search.trials}" if not state.is_over else str(search.trials),
        "seeds": seeds,
        "bad": ", ".join(f"{n} {what}" for n, what in bad if n),
        "select": ", ".join(search.select),
        "winner": "not known yet" if winner is None else f"suggestion {winner}",
        "values": ", ".join(f"{path} {_shown(value)}" for path, value in values.items()),
        "score": ", ".join(map(nearly, score.values)) if score is not None else "",
    }


def _makers(state: State) -> str:
    """Who made the suggestions, as their files have it; before there are two makers, who is going to."""
    made = Counter(one.made_by.partition(" ")[0] for one in state.suggestions)
    n_tpe = made["optuna"]
    if state.search.sampler != "tpe" or not state.suggestions or made[""]:
        return state.search.sampler
    if not n_tpe:
        return f"random (TPE begins after {tpe_begins(state.search)})"
    return f"({made['random']} random, {n_tpe} TPE)" if made["random"] else "TPE"


def _space(space: Space) -> str:
    """`log_uniform 0.001 to 0.1`, or the choices."""
    if space.kind == "values":
        return "of " + " | ".join(map(_shown, space.values))
    return f"{space.kind} {_shown(space.values[0])} to {_shown(space.values[1])}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
