"""Hand a sweep's results on: the tidy table as CSV or Parquet, the cells as LaTeX or Markdown."""

from __future__ import annotations

from pathlib import Path

from runners.schema import Plan

FORMATS = ("csv", "parquet", "latex", "md")


def export(plan: Plan, store: Path, format: str) -> bytes:
    """The results of `plan` in `format`. Raises `UserError` for an unknown one."""
    raise NotImplementedError("export comes with the next change")
