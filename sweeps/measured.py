"""What a store's finished trials took, to tell what planned ones will: time, memory and share of a card.

Reads trial folders only, no ledger. Results of another kind of device are passed over: they say little about this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.schema import Trial
from runners.split import shape
from runners.stamp import device_name
from runners.store import Store, read_json

MOST_OTHERS = 300
"""Trials outside the plan that are read at most: enough to know a device."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one trial took. `seconds` is all of it, evaluations included; `gpu` what it counted for of a card."""

    folder: Path
    trial: Trial
    seconds: float
    steps: int
    memory_bytes: int | None
    gpu: float | None


def evaluated(taken: Taken) -> tuple[dict[str, Any], ...]:
    """The task settings that a trial was evaluated on."""
    rows = (read_json(path) for path in taken.folder.glob("evals/*.json"))
    return tuple([row["task"] for row in rows if isinstance(row, dict) and isinstance(row.get("task"), dict)])


class Experience:
    """The measurements of a store that were made on this kind of device."""

    def __init__(self, taken: Iterable[Taken] = ()) -> None:
        self.taken = list(taken)
        self.by_shape: dict[str, list[Taken]] = {}
        self.by_mechanism: dict[str, list[Taken]] = {}
        for one in self.taken:
            self.by_shape.setdefault(shape(one.trial), []).append(one)
            self.by_mechanism.setdefault(one.trial.mechanism["name"], []).append(one)


def read(store: Store, planned: Iterable[str], device: str) -> Experience:
    """From the trials of a plan first, then from others of the store."""
    first = list(dict.fromkeys(planned))
    others = [trial_id for trial_id in store.trial_ids() if trial_id not in set(first)]
    ids = [*first, *others[:MOST_OTHERS]]
    found = (_taken(store.trial_folder(trial_id), device) for trial_id in ids)
    return Experience(one for one in found if one is not None)


def _taken(folder: Path, device: str) -> Taken | None:
    result = read_json(folder / "result.json")
    if not isinstance(result, dict) or (result.get("stamp") or {}).get("device") != device:
        return None
    settings = read_json(folder / "settings.json")
    steps, wall_s = result.get("step"), result.get("wall_s")
    if not isinstance(settings, dict) or not steps or not isinstance(wall_s, int | float):
        return None
    trial = Trial.from_settings(settings)
    outcomes = [read_json(path) for path in sorted(folder.glob("attempts/*/outcome.json"))]
    rows = [row for row in outcomes if isinstance(row, dict)]
    shares = [row["gpu"] for row in rows if row.get("gpu") is not None]
    # One whole attempt took its evaluations too; of several nobody knows what the last one began with.
    whole = rows[0].get("seconds") if len(rows) == 1 else None
    seconds = float(whole if isinstance(whole, int | float) and whole > wall_s else wall_s)
    return Taken(folder, trial, seconds, int(steps), result.get("peak_mem_bytes"), shares[-1] if shares else None)


def device(resources: Mapping[str, Any]) -> tuple[str, int]:
    """The device that trials of these resources would run on here, by its name in stamps, and how many GPUs there are.

    Without PyTorch, which takes seconds to import: the driver's own files name the cards.
    """
    cards = list(_cards())
    if resources.get("gpu") == 0 or not cards:
        return device_name("cpu"), 0
    return cards[0], len(cards)


def _cards(folder: Path = Path("/proc/driver/nvidia/gpus")) -> Iterator[str]:
    for path in sorted(folder.glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                yield value.strip()
