"""Text that trials train on: found, measured, hashed, read. No torch: plans and launches look at it too.

    data_files     text as it lies on disk, byte for byte: a path, or a pattern whose files are joined in their order
    valid_files    validation text of its own, written in the same way; test_files likewise
    dataset        instead of data_files: a data set by its hub name, or a folder of JSONL, Parquet or CSV files, read
                   by the `datasets` library. Its documents are joined, each ending in a line break; its splits
                   `validation` and `test`, if it has them, are the valid and the test part
    valid_share    the part of the text, before its last part, that is for validation where nothing else is
    test_share     the last part of the text, likewise

A trial's id holds what the spec says; what lies under it may change. So every trial notes a hash of the bytes it saw,
and a path is relative to the task's `folder`, a place and no setting: that of the spec's file (`sweeps/files.py`).
`$STDLIB/*.py` is the library of the Python that runs, a text that every machine has.

Not covered: text that does not fit into memory.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import os
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.schema import FILES, FOLDER, Exit, UserError, digest

Task = Mapping[str, Any]
"""The settings of a task."""
PARTS = ("train", "valid", "test")
_OWN = {"train": "data_files", "valid": "valid_files", "test": "test_files"}
_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_CHUNK = 1 << 20
STDLIB = "$STDLIB"
"""In a path: the folder of Python's own library, whose *.py are a text that is always there."""
HUB_S = 5.0
"""How long the hub is waited for."""


@dataclass(frozen=True)
class Corpus:
    """All text of a task in one buffer, and where each part of it begins and ends (bytes)."""

    text: bytearray
    parts: dict[str, tuple[int, int]]


def find(pattern: str, folder: str | Path) -> list[Path]:
    """The files of one parameter, in order. Raises `UserError` in words where there are none, or nothing in them."""
    library = sysconfig.get_path("stdlib")
    wanted = Path(pattern.replace(STDLIB, glob.escape(library))).expanduser()
    path = Path(folder) / Path(pattern.replace(STDLIB, library)).expanduser()
    try:
        if path.is_dir():
            inside = pattern.rstrip("/")
            raise UserError(f"{pattern} is a folder: name its files, as {inside}/*.txt, or {inside}/** for all in it")
        below = os.path.join(glob.escape(str(folder)), wanted)
        names = [path] if path.is_file() else sorted(glob.glob(below, recursive=True))
        found = [one for one in map(Path, names) if one.is_file()]
        if not found:
            raise UserError(f"there is no file {pattern} in {Path(folder)}{_near(path)}")
        if not measure(found):
            raise UserError(f"{pattern} is empty")
        for one in found:
            with open(one, "rb"):
                pass
    except (OSError, ValueError) as error:
        raise UserError(f"{pattern} cannot be read: {getattr(error, 'strerror', error)}") from error
    return found


def _near(path: Path) -> str:
    from difflib import get_close_matches

    there = [one.name for one in path.parent.iterdir() if one.is_file()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, there, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def measure(paths: list[Path]) -> int:
    """Bytes of all of them."""
    return sum(path.stat().st_size for path in paths)


def _files(task: Task) -> Iterator[tuple[str, list[Path]]]:
    """(parameter, its files) for each that names some."""
    for name, pattern in task.items():
        if name.endswith(FILES) and pattern is not None:
            yield name, find(pattern, task.get(FOLDER, "."))


def has_text(task: Task) -> bool:
    return task.get("dataset") is not None or any(name.endswith(FILES) and task[name] is not None for name in task)


def check(task: Task) -> None:
    """Raises `UserError` if the text of a task is not there or too short, before anything is trained on it."""
    try:
        ask_hub(task)
        for part, (first, last) in _measured(task).items():
            if last - first < task["seq_len"]:
                raise UserError(f"the {part} part has {last - first:,} bytes, a row {task['seq_len']:,} (seq_len)")
    except UserError as error:
        raise UserError(f"task {task['name']}: {error}", Exit.ENVIRONMENT) from error


def _measured(task: Task) -> dict[str, tuple[int, int]]:
    """Where each part begins and ends. A data set is read for that, as it has to be later."""
    if task.get("dataset") is not None:
        return _dataset(task).parts
    sizes = {name: measure(paths) for name, paths in _files(task)}
    return _parts(task, {part: sizes[name] for part, name in _OWN.items() if name in sizes})


def rows(task: Task, part: str) -> int | None:
    """How many rows there are in an epoch of training, or in the validation or test of a task: what its settings say,
    or what its files hold. None where that takes reading them: a data set of the hub."""
    said = task.get({"train": "examples", "valid": "valid_examples", "test": "test_examples"}[part])
    if task.get("data_files") is None:
        return said
    try:
        first, last = _measured(task)[part]
    except UserError:
        return said
    held = (last - first) // task["seq_len"]
    return held if said is None else said if part == "train" else min(said, held)


def identity(task: Task) -> tuple[Any, ...]:
    """Equal for equal text, as far as names, sizes and times of change can tell: a key for what was read."""
    if task.get("dataset") is not None:
        own: Any = tuple(task[name] for name in ("dataset", "config", "column", FOLDER))
    else:
        own = tuple((name, *map(version, paths)) for name, paths in _files(task))
    return (own, task["valid_share"], task["test_share"])


def hashes(task: Task) -> dict[str, str]:
    """SHA-256 of the files of each parameter, by how the spec calls them: `data corpus.txt`. Of missing ones a dash.

    Nothing for a data set: reading it takes longer than a launch should. `fingerprint` has it.
    """
    found = {}
    for name, pattern in task.items():
        if name.endswith(FILES) and pattern is not None:
            try:
                paths = find(pattern, task.get(FOLDER, "."))
                found[f"data {pattern}"] = _joined(tuple(map(version, paths)))
            except (UserError, OSError):
                found[f"data {pattern}"] = "-"
    return found


def fingerprint(task: Task) -> str | None:
    """16 hex digits over the bytes that training and evaluation read; None for a task without text."""
    if not has_text(task):
        return None
    if task.get("dataset") is not None:
        return hashlib.sha256(_dataset(task).text).hexdigest()[:16]
    return digest({name.removesuffix(FILES): _joined(tuple(map(version, paths))) for name, paths in _files(task)})


def load(task: Task) -> Corpus:
    """All of a task's text, read now. Raises `UserError` if some of it is not there."""
    if task.get("dataset") is not None:
        return _dataset(task)
    own = dict(_files(task))
    return _divide(task, {part: _read(own[name]) for part, name in _OWN.items() if name in own})


def version(path: Path) -> tuple[str, int, int]:
    """A file as it is now: equal while nobody writes to it."""
    at = path.stat()
    return str(path), at.st_size, at.st_mtime_ns


@functools.lru_cache(maxsize=256)
def _joined(files: tuple[tuple[str, int, int], ...]) -> str:
    """SHA-256 of files one after the other, computed once for each version of them."""
    total = hashlib.sha256()
    for path, _, _ in files:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return total.hexdigest()


def _read(paths: list[Path]) -> bytearray:
    text = bytearray()
    for path in paths:
        with open(path, "rb") as file:
            text += file.read()
    return text


def _divide(task: Task, own: dict[str, bytearray]) -> Corpus:
    parts, text = _parts(task, {part: len(found) for part, found in own.items()}), own["train"]
    for part in PARTS[1:]:
        text += own.get(part, b"")
    return Corpus(text, parts)


def _parts(task: Task, own: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Where each part begins and ends, from the bytes of those with text of their own, which lie one after the other.

    The others are cut off the end of the training text.
    """
    cut = {part: int(own["train"] * task[f"{part}_share"]) for part in PARTS[1:] if part not in own}
    sizes = {"train": own["train"] - sum(cut.values()), **cut, **{p: own[p] for p in PARTS[1:] if p in own}}
    ends = list(itertools.accumulate(sizes.values()))
    return {part: (end - size, end) for (part, size), end in zip(sizes.items(), ends, strict=True)}


# data sets


def ask_hub(task: Task) -> None:
    """Ask the hub whether it has a task's data set, so that no trial waits for a network that is away.

    Once in a process, for `HUB_S` at most; not for a folder, nor where HF_HUB_OFFLINE says that it should not be asked.
    """
    name = task.get("dataset")
    if name is None or _offline() or (Path(task.get(FOLDER, ".")) / Path(name).expanduser()).is_dir():
        return
    problem = _asked(name)
    if problem is not None:
        raise UserError(
            f"dataset {name}: {problem}. See to its name and the network; HF_HUB_OFFLINE=1 takes what was read before, "
            "data_files a file",
            Exit.ENVIRONMENT,
        )


@functools.cache
def _asked(name: str) -> str | None:
    """What the hub has against a data set, in words."""
    from huggingface_hub import HfApi

    said: list[str | None] = []

    def ask() -> None:
        try:
            HfApi().dataset_info(name, timeout=HUB_S)
            said.append(None)
        except Exception as error:  # what that library and those below it raise
            said.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")

    # In a thread, because looking up the hub's address heeds no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_S)
    return said[0] if said else f"the hub did not answer within {HUB_S:g} s"


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def splits(task: Task) -> Mapping[str, Any]:
    """The splits of a data set, not yet read. Whatever `datasets` raises is told in one line."""
    name = task["dataset"]
    local = Path(task.get(FOLDER, ".")) / Path(name).expanduser()
    try:
        import datasets

        datasets.disable_progress_bars()
        found = datasets.load_dataset(str(local) if local.is_dir() else name, task.get("config"))
    except Exception as error:  # what that library and those below it raise when a name, a hub or a file is not there
        told = (str(error).strip().splitlines() or [""])[0]
        offline = " (HF_HUB_OFFLINE is set)" if _offline() else ""
        raise UserError(
            f"dataset {name}: {type(error).__name__}: {told}{offline}. It is neither a folder in "
            f"{Path(task.get(FOLDER, '.'))} nor a data set that can be had here: see to its name, to `config`, and to "
            "the network; or give data_files",
            Exit.ENVIRONMENT,
        ) from error
    return found


def _dataset(task: Task) -> Corpus:
    found, own, name, column = splits(task), {}, task["dataset"], task["column"]
    if "train" not in found:
        raise UserError(f"dataset {name} has no split train, but {', '.join(found)}")
    if column not in found["train"].column_names:
        there = ", ".join(found["train"].column_names)
        raise UserError(f"dataset {name}: there is no column {column!r}; it has {there}: say `column`")
    for part, split in _SPLITS.items():
        if split in found:
            text = own[part] = bytearray()
            for document in found[split][task["column"]]:
                line = str(document).encode("utf-8", "surrogatepass")
                text += line if line.endswith(b"\n") else line + b"\n"
    return _divide(task, own)
