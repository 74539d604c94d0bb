"""What follows a failure: the trial again, smaller or as it is, or nothing. The plan's `retry` says how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runners.schema import Failure, Outcome, Trial
from runners.split import Sizes, halved
from runners.store import Store

DEFAULTS: dict[str, Any] = {"oom": "split", "infra": 3, "error": 0, "hang": 1800.0}
"""What a spec need not say: an error of the trial's own would only come again, everything else may not."""

_NO_SPACE = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded")


def is_disk_full(outcome: Outcome) -> bool:
    """Whether the trial failed for want of disk space or quota: then every other one is about to."""
    return outcome.failure == Failure.INFRA and bool(_NO_SPACE.search(outcome.error or ""))


class Retries:
    """The decisions of one launch. Counts are of this launch: a later one may try as often again."""

    def __init__(self, retry: Mapping[str, Any]) -> None:
        self.rules = DEFAULTS | dict(retry)
        self.sizes = Sizes()
        self._tries: Counter[tuple[str, Failure]] = Counter()

    @property
    def splits(self) -> bool:
        return bool(self.rules["oom"] == "split")

    def learn(self, store: Store, trained: Iterable[Trial]) -> None:
        """Trials are to begin at the size that trained ones of their shape have needed."""
        for trial in trained:
            self.sizes.learn(trial, (store.result(trial.id) or {}).get("micro_batch"))

    def again(self, trial: Trial, outcome: Outcome) -> str | None:
        """How the trial is tried again, in words; None if it stays failed."""
        kind = outcome.failure or Failure.ERROR
        if is_disk_full(outcome):
            return None
        if kind == Failure.OOM and self.splits:
            return self._smaller(trial, outcome.micro_batch)
        allowed = self.rules[kind.value]
        if self._tries[trial.id, kind] >= allowed:
            return None
        self._tries[trial.id, kind] += 1
        return f"trying again ({self._tries[trial.id, kind]} of {allowed})"

    def _smaller(self, trial: Trial, rows: int | None) -> str | None:
        """The training that held `rows` at once is tried with half of them; without rows it was the evaluation."""
        half = halved(rows) if rows else None
        if half is None:
            return None
        self.sizes.learn(trial, half)
        return f"trying again with {half} rows at once instead of {rows}, the same batch in all"

    def rows(self, trial: Trial, folder: Path) -> int | None:
        """Rows at once that the trial's next attempt begins with; None = its whole batch, or as it went before."""
        return self.sizes.first(trial, folder) if self.splits else None
