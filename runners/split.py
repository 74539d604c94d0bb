"""How many rows a trial trains at once after memory ran out: halved each time, learned for others of its shape.

The global batch stays what the settings say, so this is no setting and no part of the trial's id. What was tried is in
the attempts of the trial's folder and in its result; nothing else is kept, and a launch learns it from there again.
"""

from __future__ import annotations

from pathlib import Path

from runners import checkpoints
from runners.schema import Trial, digest
from runners.store import read_json

_NO_MEMORY = {
    *("lr", "steps", "epochs", "tokens", "tokens_per_param", "max_epochs", "warmup", "schedule"),
    *("beta1", "beta2", "weight_decay", "clip", "keep", "stop_above", "eval_every", "probe"),
}
"""Training settings that do not change what an update needs of memory."""


def shape(trial: Trial) -> str:
    """A key that trials share whose updates need the same memory: everything but the seed, the rate and the length."""
    train = {name: value for name, value in (trial.train or {}).items() if name not in _NO_MEMORY}
    return digest([trial.mechanism, trial.task, trial.model, train])


def halved(rows: int) -> int | None:
    """Half of `rows`, rounded up; None if one row was already too much."""
    return -(-rows // 2) if rows > 1 else None


def smaller(*rows: int | None) -> int | None:
    """The smallest that is given; None is the whole batch."""
    return min((n for n in rows if n is not None), default=None)


def tried(folder: Path) -> list[int]:
    """Rows at once at which the trial in `folder` has run out of memory, in the order of its attempts."""
    try:
        attempts = sorted((p for p in (folder / "attempts").iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    except FileNotFoundError:
        return []
    outcomes = [read_json(path / "outcome.json") for path in attempts]
    return [row["micro_batch"] for row in outcomes if isinstance(row, dict) and row.get("micro_batch")]


class Sizes:
    """What one launch knows about sizes that fit, by shape. Not safe for threads by itself."""

    def __init__(self) -> None:
        self._fits: dict[str, int] = {}

    def learn(self, trial: Trial, rows: int | None) -> None:
        """Trials of this shape are not to begin with more than `rows` (None = nothing is known)."""
        if rows is not None:
            key = shape(trial)
            self._fits[key] = min(rows, self._fits.get(key, rows))

    def first(self, trial: Trial, folder: Path) -> int | None:
        """Rows to begin the next attempt with; None = the whole batch, or that of the checkpoint it goes on from.

        What others learned counts for a trial that begins anew: one that has begun keeps its size unless it runs out
        of memory itself, so that a resume gives the same bits.
        """
        own = tried(folder)
        half = (halved(own[-1]) or 1) if own else None
        return half if checkpoints.steps(folder / "checkpoints") else smaller(half, self._fits.get(shape(trial)))
