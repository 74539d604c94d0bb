"""Documents that a trained model is evaluated on, one after the other: found, read, checked. No torch, as in `corpus`.

    data_files     a path, or a pattern whose files are read in their order: JSONL (.jsonl, .json) and Parquet hold a
                   document a row, any other file is one document
    dataset        instead: a data set by its hub name, or a folder of JSONL, Parquet or CSV files, read by `datasets`
    split          its part, as `test`
    X_column       column of a document that holds what the task calls X; `column` where it wants one alone
    test_examples  documents at most, from the first on

A task of documents is one whose text is not divided into parts to train, validate and test on.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runners import corpus
from runners.schema import FOLDER, Exit, UserError

Task = Mapping[str, Any]
"""The settings of a task."""
Row = tuple[str, ...]
"""A document: the text of each of its columns."""
Parted = Callable[[str], list[str]]
ROWS = (".jsonl", ".json", ".parquet")


def reads(task: Task) -> bool:
    """Whether a task reads documents."""
    return corpus.has_text(task) and "valid_share" not in task


def columns(task: Task) -> list[str]:
    """The columns that are read, in the order of their parameters."""
    return [value for name, value in task.items() if name == "column" or name.endswith("_column")]


def size(task: Task) -> int | None:
    """Bytes of all documents; None where that takes reading them: a data set of the hub."""
    if task.get("data_files") is None:
        return None
    try:
        return corpus.measure(corpus.find(task["data_files"], task.get(FOLDER, ".")))
    except UserError:
        return None


def fingerprint(task: Task) -> str | None:
    """16 hex digits over what is read."""
    if task.get("dataset") is None:
        return corpus.fingerprint(task)
    total = hashlib.sha256()
    for row in load(task):
        total.update(json.dumps(row).encode() + b"\n")
    return total.hexdigest()[:16]


def check(task: Task) -> None:
    """Raises `UserError` if the documents of a task are not there or not as it wants them, before a trial begins."""
    from runners import tasks  # imports torch, which a launch without documents does without here

    try:
        corpus.ask_hub(task)
    except UserError as error:
        raise UserError(f"task {task['name']}: {error}", Exit.ENVIRONMENT) from error
    tasks.build(dict(task)).check()


def load(task: Task, parted: Parted = lambda text: [text]) -> list[Row]:
    """Every document, read once in a process; a file that is no table is `parted` into some.

    Raises `UserError`, in one line, where something is not there or no text.
    """
    if task.get("dataset") is not None:
        own: Any = tuple(task.get(name) for name in ("dataset", "config", "split", FOLDER))
    else:
        own = tuple(map(corpus.version, corpus.find(task["data_files"], task.get(FOLDER, "."))))
    wanted = {name: task.get(name) for name in ("dataset", "config", "split", "data_files", FOLDER)}
    found = _load(own, tuple(wanted.items()), tuple(columns(task)), parted)
    at_most = task.get("test_examples")
    return found if at_most is None else found[:at_most]


@functools.lru_cache(maxsize=8)
def _load(_: Any, source: tuple[tuple[str, Any], ...], wanted: tuple[str, ...], parted: Parted) -> list[Row]:
    task = dict(source)
    if task["dataset"] is not None:
        rows = _of_dataset(task, wanted)
    else:
        files = corpus.find(task["data_files"], task[FOLDER] or ".")
        rows = (row for path in files for row in _of_file(path, wanted, parted))
    found = list(rows)
    if not found:
        raise UserError(f"{task['dataset'] or task['data_files']} holds no document")
    return found


def _of_file(path: Path, wanted: tuple[str, ...], parted: Parted) -> Iterator[Row]:
    if path.suffix in ROWS:
        rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
        yield from (_row(row, wanted, where) for where, row in rows)
    elif len(wanted) > 1:
        raise UserError(f"{path.name} is no table: the columns {', '.join(wanted)} want {', '.join(ROWS)}")
    else:
        yield from ((part,) for part in parted(_text(path)))


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}: byte {error.start:,} is not UTF-8, which documents are read as") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield f"{path.name}, line {number}", json.loads(line)
            except ValueError as error:
                raise UserError(f"{path.name}, line {number}: no JSON: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path.name} is no Parquet: {str(error).splitlines()[0]}") from error
    yield from ((f"{path.name}, row {number}", row) for number, row in enumerate(rows, 1))


def _of_dataset(task: Task, wanted: tuple[str, ...]) -> Iterator[Row]:
    name, split = task["dataset"], task["split"]
    splits = corpus.splits(task)
    if split not in splits:
        raise UserError(f"dataset {name} has no split {split!r}{_near(split, splits)}; it has {', '.join(splits)}")
    for number, row in enumerate(splits[split], 1):
        yield _row(row, wanted, f"dataset {name}, {split} row {number}")


def _row(row: Any, wanted: tuple[str, ...], where: str) -> Row:
    """The wanted columns of one document."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: a document is a mapping of columns, not {type(row).__name__}")
    for name in wanted:
        if name not in row:
            raise UserError(f"{where}: there is no column {name!r}{_near(name, row)}; it has {', '.join(row)}")
        if not isinstance(row[name], str):
            raise UserError(f"{where}: {name} is text, not {json.dumps(row[name], default=str)[:40]}")
    return tuple(row[name] for name in wanted)


def _near(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class Documents:
    """What tasks of documents share. A task says its columns, and what is wrong with a row (`wrong`)."""

    NAME = ""

    def __init__(self, settings: dict[str, Any], parted: Parted = lambda text: [text]) -> None:
        """`settings`: the task's own parameters and `folder`; `parted`: the documents of a file that is no table."""
        self.vocab_size = 257
        self.seq_len: int | None = settings["seq_len"]
        self._settings, self._parted = settings, parted
        if sum(settings[source] is not None for source in ("data_files", "dataset")) != 1:
            raise UserError(f"task {self.NAME} wants one of data_files and dataset")

    def check(self) -> None:
        """Raises `UserError` where a launch would meet one later."""
        self.documents()

    def documents(self) -> list[Row]:
        """Every document, checked. Raises `UserError`, one line, with the document that is wrong."""
        try:
            found = load(self._settings, self._parted)
            for number, row in enumerate(found, 1):
                if problem := self.wrong(row):
                    raise UserError(f"document {number}: {problem}")
        except UserError as error:
            raise UserError(f"task {self.NAME}: {error}", Exit.ENVIRONMENT) from error
        return found

    def wrong(self, row: Row) -> str | None:
        """What is wrong with a document, such as that there is nothing to predict in it."""
        return None if row[0].strip() else "it is empty"
