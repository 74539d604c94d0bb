"""Care of a store: what can be removed without loss (`gc`), and what the user wants gone (`forget`).

Nothing that a driver holds is touched. What is forgotten goes to `trash/` first; only `gc` removes it for good.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runners import checkpoints, scratch
from runners.ledger import Ledger
from runners.schema import Exit, Status, UserError
from runners.store import ASIDE, Store, sync_folder

TRASH = "trash"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")
"""What a write that was cut short leaves: `.name.1a2b3c4d`."""


@dataclass(frozen=True)
class Waste:
    """One thing that `gc` removes. `trial` is set for final weights, which a later evaluation would want."""

    kind: str
    path: Path
    n_bytes: int
    trial: str | None = None


def held(store: Store, ledger: Ledger, trial_ids: Iterable[str]) -> dict[str, str]:
    """Which of the trials a driver holds that may be alive, and which driver."""
    alive = {owner.uuid: str(owner) for owner in ledger.drivers() if not owner.is_dead()}
    found = {}
    for trial_id in trial_ids:
        row = ledger.row(trial_id)
        if row is not None and row.owner in alive:
            found[trial_id] = alive[row.owner]
    return found


def waste(
    store: Store, ledger: Ledger, *, only: frozenset[str] | None = None, finals: bool = False
) -> tuple[list[Waste], dict[str, str]]:
    """What can go, and the trials that were left alone because a driver holds them.

    `only` = ids of trials to look at: then nothing but theirs. `finals` takes the final weights too.
    """
    ids = [trial_id for trial_id in store.trial_ids() if only is None or trial_id in only]
    busy = held(store, ledger, ids)
    found: list[Waste] = []
    for trial_id in ids:
        if trial_id not in busy:
            found += _of_trial(store, trial_id, finals)
    if only is None:
        found += [_waste("forgotten", path) for path in _children(store.root / TRASH)]
        found += [_waste("scratch of dead drivers", path) for path in scratch.dead()]
        if not any(not owner.is_dead() for owner in ledger.drivers()):
            tops = [store.root, *_children(store.root / "sweeps")]
            found += [_waste("cut short", path) for top in tops for path in _temporary(top)]
    return found, busy


def _of_trial(store: Store, trial_id: str, finals: bool) -> Iterator[Waste]:
    folder = store.trial_folder(trial_id)
    result = store.result(trial_id)
    for part in (folder, folder / "evals", folder / "metrics", folder / "checkpoints"):
        yield from (_waste("cut short", path) for path in _temporary(part))
    # A pruned trial goes on from its checkpoint if it is wanted after all.
    if result is None or result["status"] not in (Status.COMPLETE, Status.DIVERGED):
        return
    for step in checkpoints.steps(folder / "checkpoints"):
        yield _waste("checkpoints of ended trials", folder / "checkpoints" / str(step))
    if finals and (folder / "checkpoints" / checkpoints.FINAL).is_dir():
        yield _waste("final weights", folder / "checkpoints" / checkpoints.FINAL, trial_id)


def _waste(kind: str, path: Path, trial: str | None = None) -> Waste:
    return Waste(kind, path, size(path), trial)


def _children(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def _temporary(folder: Path) -> list[Path]:
    names = _children(folder) if folder.is_dir() else []
    is_checkpoint = folder.name == "checkpoints"
    return [p for p in names if _TEMPORARY.fullmatch(p.name) or (is_checkpoint and p.name.startswith("."))]


def size(path: Path) -> int:
    """Bytes on disk below `path`; what vanishes meanwhile counts as 0."""
    if not path.is_dir() or path.is_symlink():
        return _size(path)
    return sum(_size(Path(root, name)) for root, _, names in os.walk(path) for name in names)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def remove(found: Iterable[Waste]) -> list[str]:
    """Remove it; what could not be, in words."""
    problems = []
    for item in found:
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except OSError as error:
            problems.append(f"{item.path}: {error.strerror or error}")
    return problems


def forget(store: Store, ledger: Ledger, trial_ids: Iterable[str]) -> int:
    """Move the trials' results to `trash/` and plan them anew: how many there were. Raises for one that is held.

    What is left is an empty attempt of the last one's number: numbers go on rising, and MLflow's runs of the trial are
    retired when it is next written to.
    """
    ids = [trial_id for trial_id in trial_ids if store.last_attempt(trial_id)]
    busy = held(store, ledger, ids)
    if busy:
        raise UserError(
            f"{len(busy)} of these trials are in the hands of {next(iter(busy.values()))}: stop it first",
            Exit.ENVIRONMENT,
        )
    trash = store.root / TRASH
    trash.mkdir(exist_ok=True)
    for trial_id in ids:
        folder, last = store.trial_folder(trial_id), store.last_attempt(trial_id)
        os.rename(folder, trash / f"{trial_id}-{last}")
        (folder / "attempts" / str(last) / ASIDE).mkdir(parents=True)
        sync_folder(trash)
        ledger.forget_result(trial_id)
    return len(ids)
