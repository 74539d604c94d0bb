"""A sweep's results as a DataFrame, for notebooks and scripts."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from runners.schema import Exit, UserError
from runners.store import DEFAULT_FOLDER, STORE_VARIABLE, Store

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("trials", "evaluations", "curves")


def load(
    sweep: str, *, store: str | Path | None = None, table: str = "trials", revision: int | None = None
) -> pd.DataFrame:
    """The results of `sweep` as they stand in its store, finished or not; nothing is written.

    `store` is the folder that holds them: without it MEMSWEEP_STORE, else ./memsweep-runs. `revision` counts the
    sweep's specs from 1; without it the latest. `table` says what a row is:

        trials        one trial: trial, arm, cell, seed, status, its settings that vary (by path: `task.seq_len`),
                      state_bytes (of one sequence), n_params, tokens, wall_s (seconds), step, peak_mem_bytes, error,
                      `stamp.*` (versions, device, commit), and its scores: `SET/metric` is the mean over the slices of
                      an evaluation set, `SET/metric/label` one slice
        evaluations   one trial and slice: set, slice, label, `eval.*` (the task it was tested on), a column a metric
        curves        one trial, step and metric: value, as logged in training

    The types are those of `dashboards.columns`. A diverged trial scores chance; a failed one has no score.
    Raises `UserError` where there is no such store, sweep, revision or table.
    """
    if table not in TABLES:
        near = difflib.get_close_matches(table, TABLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"table={table!r}: it is {', '.join(map(repr, TABLES))}{hint}")
    opened = _open(store)
    if sweep not in opened.sweeps() and (near := difflib.get_close_matches(sweep, opened.sweeps(), n=1)):
        raise UserError(f"no sweep {sweep!r} in the store {opened.root}; did you mean {near[0]!r}?")
    # Only now: the errors above take no second of imports.
    from dashboards import columns
    from dashboards import table as tables
    from dashboards.report import known
    from runners.search import Searches

    number, plan = opened.plan(sweep, revision)
    plan = Searches(plan, opened).view().plan
    results = tables.load(plan, opened.root, known(opened.root, sweep, number))
    if table == "curves":
        return columns.typed(results.curves, {})
    return columns.trials(plan, results) if table == "trials" else columns.evaluations(plan, results)


def _open(store: str | Path | None) -> Store:
    folder = Path(store or os.environ.get(STORE_VARIABLE) or DEFAULT_FOLDER).expanduser()
    if not (folder / "store.json").is_file() and not (folder / ".store.json").is_file():
        raise UserError(
            f"no store at {folder.resolve()}: pass store=FOLDER, the folder that a launch printed, or set "
            f"{STORE_VARIABLE}",
            Exit.ENVIRONMENT,
        )
    return Store.open(folder)
