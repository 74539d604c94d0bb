"""From the ledger's trial folders to one tidy table, statistics, figures and a report.

Everything here reads; nothing trains. `table` loads, `stats` and `compare` judge, `figures` draws, `report` tells,
`export` hands on, and `ui` opens MLflow on the right store. From Python:

    import dashboards
    trials = dashboards.load("capacity", store="memsweep-runs")                    # one row a trial
    curves = dashboards.load("capacity", store="memsweep-runs", table="curves")
    again = dashboards.read_csv("capacity.csv")                                    # what `sweep export` wrote
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.api import load

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load", "read_csv"]


def read_csv(path: str | Path) -> pd.DataFrame:
    """A CSV that `sweep export` or a report wrote, with the columns in their types (`dashboards.columns`)."""
    from dashboards import columns  # pandas takes a second to import, and commands import this package

    return columns.read_csv(path)
