"""The files that a spec names, as `task.data_files`: where they are and how long, from the spec's place on disk.

A relative path begins in the folder of the spec that writes it (a parent's in that of the parent, one of `--set` in the
current folder); if nothing is there, among the texts shipped with memsweep. All files of one task come from one folder,
which goes into its settings, so that workers and a later resume find them wherever they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners import corpus
from runners.schema import FILES, UserError
from sweeps import library
from sweeps.blocks import Raw
from sweeps.reader import Problems

Folders = Mapping[str, tuple[Path, ...]]
"""Where files are looked for, by the name of the spec that names them."""


class Files:
    """Finds the files of blocks; what is wrong goes to `problems`, at the value."""

    def __init__(self, problems: Problems, folders: Folders) -> None:
        self.problems, self.folders = problems, folders

    def find(self, raw: Raw, settings: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
        """The folder of a block's files, and how many bytes each parameter names (`data_bytes` for `data_files`)."""
        wanted = {name: settings[name] for name in raw.block.files if settings[name] is not None}
        marks = {name: raw.marks[f"{raw.kind}.{name}"] for name in wanted}
        usual = (Path.cwd(), library.SHIPPED)
        folders = list(dict.fromkeys(f for mark in marks.values() for f in self.folders.get(mark.file, usual))) or usual
        sizes = {_bytes(name): 0 for name in raw.block.files}
        problems: dict[str, str] = {}
        for folder in folders:
            found, told = {}, {}
            for name, pattern in wanted.items():
                try:
                    found[_bytes(name)] = corpus.measure(corpus.find(pattern, folder))
                except UserError as error:
                    told[name] = str(error)
            if not told:
                return str(folder), sizes | found
            problems = problems or told
        for name, text in problems.items():
            self.problems.add(marks[name], f"{raw.kind}.{name}: {text}")
        return str(folders[0]), sizes | {_bytes(name): 1 << 62 for name in wanted}


def _bytes(name: str) -> str:
    return name.removesuffix(FILES) + "_bytes"
