"""One self-contained report of a sweep: the question, the answer, the verdicts, figures, tables and provenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runners.schema import Plan


@dataclass(frozen=True)
class Report:
    """What `build` wrote. `answer` is the one sentence the report opens with; `files` are all files written."""

    html: Path
    files: tuple[Path, ...]
    answer: str
    counts: dict[str, int]
    warnings: tuple[str, ...]


def build(plan: Plan, store_path: Path, revision: str, out: Path, looks: int = 1) -> Report:
    """Write the report of `plan` from the trial folders of the store into `out` (made if missing).

    `looks` is the number of times this sweep's seeds were looked at before adding some, this time included: p values are
    multiplied by it.
    """
    raise NotImplementedError("the report comes with the next change")
