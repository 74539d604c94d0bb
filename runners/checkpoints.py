"""Checkpoints of one trial: `checkpoints/<step>/{tensors.safetensors, meta.json}`, and `checkpoints/final/`.

A checkpoint is a folder made under a temporary name and renamed, so it is there whole or not at all; one that cannot
be read anyway (a bad disk, a hand) is passed over for the one before. `final` holds the weights to evaluate, which
`keep: best` makes another thing than the last step. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.schema import SCHEMA_VERSION
from runners.store import read_json, sync_folder

if TYPE_CHECKING:
    from torch import Tensor

FINAL = "final"
KEEP = 2
"""How many step checkpoints a running trial keeps: the newest, and one before it should the newest be torn."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: `meta` is what training put there, `wall_s` the seconds spent up to here, all attempts.

    `code` holds the fingerprints of all code that trained up to here.
    """

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    wall_s: float
    code: tuple[str, ...] = ()


def save(folder: Path, name: str, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` as `folder/name`, replacing one of that name."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        # clone(): the format refuses tensors that share memory, as a tied head does.
        tensors = {key: value.detach().cpu().contiguous().clone() for key, value in checkpoint.tensors.items()}
        with _system_errors():
            save_file(tensors, temporary / "tensors.safetensors")
        with open(temporary / "tensors.safetensors", "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        head = {"schema": SCHEMA_VERSION, "step": checkpoint.step, "sha256": checksum, "wall_s": checkpoint.wall_s}
        head["code"] = list(checkpoint.code)
        with open(temporary / "meta.json", "w", encoding="utf-8") as file:
            json.dump({**head, "meta": checkpoint.meta}, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        if (folder / name).exists():
            os.rename(folder / name, folder / f".old-{uuid.uuid4().hex[:8]}")
        os.rename(temporary, folder / name)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """The library tells of a full disk in an exception of its own: raise what the system said."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        found = re.search(r"(?:os error |code: )(\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def load(folder: Path, name: str) -> Checkpoint | None:
    """The checkpoint `folder/name`, or None if it is missing or not what was written."""
    from safetensors.torch import load_file

    head = read_json(folder / name / "meta.json")
    if not isinstance(head, dict):
        return None
    path = folder / name / "tensors.safetensors"
    try:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != head["sha256"]:
                return None
        code = tuple(head.get("code") or ())
        return Checkpoint(head["step"], load_file(path), head["meta"], head["wall_s"], code)
    except (OSError, KeyError):
        return None


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints below `folder`, rising, unread."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def newest(folder: Path) -> Checkpoint | None:
    """The checkpoint to resume from: that of the highest step that can be read."""
    return next((found for step in reversed(steps(folder)) if (found := load(folder, str(step)))), None)


def prune(folder: Path, keep: int = KEEP) -> None:
    """Drop all but the newest `keep` step checkpoints, and what crashes left behind. `final` stays."""
    old = steps(folder)
    names = [str(step) for step in old[: len(old) - keep]]
    names += [path.name for path in folder.iterdir() if path.name.startswith(".")] if folder.is_dir() else []
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
