"""The columns of a sweep's tables, and the type of each: the same from `dashboards.load`, in a CSV and in Parquet.

whole numbers   Int64, which can be missing: seed, step, bytes, counts
other numbers   float64, missing = NaN: every score, every time in seconds
words           string: names, status, versions; lists and mappings as JSON
settings        what varies: Int64, float64, boolean or string, whichever holds all of its values; a setting that is
                a word here and a number there is a string
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dashboards.table import STAMP_FIELDS, Results
from runners.schema import Plan, canonical_json

TEXT, WHOLE, REAL, SWITCH = "string", "Int64", "float64", "boolean"

_TEXTS = ("trial", "arm", "cell", "status", "stopped_by", "diverged", "error", "set", "slice", "label", "metric")
_WHOLES = ("seed", "step", "state_bytes", "suggestion", "n_params", "tokens", "peak_mem_bytes", "attempt")

DTYPES: dict[str, str] = {
    **dict.fromkeys((*_TEXTS, *(f"stamp.{name}" for name in STAMP_FIELDS)), TEXT),
    **dict.fromkeys(_WHOLES, WHOLE),
    **dict.fromkeys(("wall_s", "value"), REAL),
}
"""The type of every column that has the same name in each sweep, in the words of `DataFrame.astype`.

`pandas.read_csv(path, dtype=DTYPES)` takes it as it is. The columns that a sweep names itself are its settings (the
paths that vary, `eval.NAME` in the table of evaluations) and its scores (`SET/metric`, `SET/metric/label`: float64).
"""


Kinds = Mapping[str, set[type]]
"""By setting: the types of the values that it has in a sweep."""


def kinds(settings: Iterable[Mapping[str, Any]]) -> dict[str, set[type]]:
    """The types of each setting's values."""
    found: dict[str, set[type]] = {}
    for values in settings:
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, set()).add(type(value))
    return found


def trials(plan: Plan, results: Results) -> pd.DataFrame:
    """One row a trial of the plan."""
    settings = [member.varying for member in plan.members]
    settings += [member.searched.values for member in plan.members if member.searched is not None]
    return typed(results.members, kinds(settings))


def evaluations(plan: Plan, results: Results) -> pd.DataFrame:
    """One row a trial and slice of an evaluation set; `eval.NAME` is the task setting it was tested at."""
    tested_at = [{f"eval.{k}": v for k, v in s.task.items()} for member in plan.members for s in member.slices]
    return typed(results.scores, kinds([*(member.varying for member in plan.members), *tested_at]))


def csv(frame: pd.DataFrame) -> str:
    """`frame` as CSV, what is missing left empty; `read_csv` reads it in the same types."""
    return str(frame.to_csv(index=False, lineterminator="\n"))


def typed(frame: pd.DataFrame, settings: Kinds) -> pd.DataFrame:
    """`frame` with every column in its type; what is neither in `DTYPES` nor among the settings is a score."""
    columns = {name: _typed(frame[name], str(name), settings.get(str(name))) for name in frame}
    return pd.DataFrame(columns, index=frame.index)


def read_csv(path: str | Path) -> pd.DataFrame:
    """A CSV that `sweep export` or the report wrote, in the types that it had.

    Only of a setting whose values are all words that read as numbers nothing in the file tells that they are words.
    """
    read = pd.read_csv(path, dtype=TEXT, keep_default_na=False, na_values=[""])
    return pd.DataFrame({name: _parsed(read[name], str(name)) for name in read}, index=read.index)


def _typed(values: pd.Series[Any], name: str, types: set[type] | None) -> pd.Series[Any]:
    if name in DTYPES or types is None:
        return _cast(values, DTYPES.get(name, REAL))
    if types in ({bool}, {int}):
        return _cast(values, SWITCH if types == {bool} else WHOLE)
    if types <= {int, float}:
        return _cast(values, REAL)
    return _cast(values.map(_word), TEXT)


def _cast(values: pd.Series[Any], kind: Any) -> pd.Series[Any]:
    return values.astype(kind)


def _word(value: object) -> object:
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return pd.NA
    return value if isinstance(value, str) else canonical_json(value)


def _parsed(words: pd.Series[Any], name: str) -> pd.Series[Any]:
    """One column of a CSV, read as text, in its type."""
    if name in DTYPES:
        return _cast(words, DTYPES[name])
    told = words.dropna()
    if len(told) and told.isin(["True", "False"]).all():
        return _cast(words.map({"True": True, "False": False}), SWITCH)
    if len(told) and told.str.fullmatch(r"-?\d+").all():
        return _cast(words, WHOLE)
    try:
        return _cast(words, REAL)
    except ValueError:
        return words
