"""Trials made by other code or data than today's: found by the fingerprints in their folders, told file by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runners import checkpoints, corpus
from runners.schema import Trial
from runners.stamp import code, fingerprint, with_data
from runners.store import Store, read_json

CODE_FILE = "code.json"
"""In an attempt's folder: the fingerprint of the code that ran it, and a hash of each file behind that."""
CHOICES = ("keep", "rerun")
_SHOWN = 4


def record(trial: Trial) -> dict[str, Any]:
    """What an attempt notes of its code and of the files its data are in: `files` holds `data corpus.txt` too."""
    names, data = trial.uses, corpus.hashes(trial.task)
    files = {**code(*names), **{name: text[:12] for name, text in data.items()}}
    return {"fingerprint": with_data(fingerprint(*names), trial.task), "files": files}


def changes(store: Store, trial: Trial) -> tuple[str, ...] | None:
    """Files that changed since the code that made the trial's result or checkpoint; None if it was today's code.

    Empty where other code made it and which is not known.
    """
    folder = store.trial_folder(trial.id)
    mine = record(trial)
    others = [made for made in made_by(folder) if made != mine["fingerprint"]]
    if not others:
        return None
    found: set[str] = set()
    for theirs in _codes(folder, others):
        names = theirs.keys() | mine["files"].keys()
        found.update(name for name in names if theirs.get(name) != mine["files"].get(name))
    return tuple(sorted(found))


def made_by(folder: Path) -> list[str]:
    """Fingerprints of all code that trained what is in `folder`: its result, else its newest checkpoint."""
    result = read_json(folder / "result.json")
    if isinstance(result, dict):
        stamp = result.get("stamp") or {}
        return list(result.get("made_by") or filter(None, [stamp.get("fingerprint")]))
    steps = checkpoints.steps(folder / "checkpoints")
    head = read_json(folder / "checkpoints" / str(steps[-1]) / "meta.json") if steps else None
    return list(head.get("code") or ()) if isinstance(head, dict) else []


def _codes(folder: Path, fingerprints: list[str]) -> Iterable[dict[str, str]]:
    for path in (folder / "attempts").glob(f"*/{CODE_FILE}"):
        row = read_json(path)
        if isinstance(row, dict) and row.get("fingerprint") in fingerprints:
            yield row["files"]


def other_data(names: Iterable[str]) -> bool:
    """Whether data are among the files that changed."""
    return any(map(_is_data, names))


def _is_data(name: str) -> bool:
    return name.startswith("data ")


def words(found: Iterable[tuple[str, ...]], what: str) -> list[str]:
    """A line for each set of changed files: `12 trials were made by other code (mechanisms/hola.py changed)`."""
    lines = []
    for names, n in Counter(found).most_common():
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        head = f"{n} {what}trial was" if n == 1 else f"{n} {what}trials were"
        made = "made with other data" if names and all(map(_is_data, names)) else "made by other code"
        lines.append(f"{head} {made}" + (f" ({shown} changed)" if names else ""))
    return lines
