"""What the tests of the spec language share: a small catalogue that no other change touches, and specs from text."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from runners.schema import Member, Plan
from sweeps.catalog import Catalog
from sweeps.plan import load
from sweeps.reader import SpecError

DATA = Path(__file__).parent / "data"
FAKE = Catalog(DATA / "catalog")

BASE = """\
sweep: base
task: {name: recall, vocab_size: 512, seq_len: 64, n_pairs: 4}
model: {d_model: 32}
train: {steps: 10, batch_size: 4, lr: 1e-3}
"""


def plan(text: str, tmp_path: Path, *, catalog: Catalog = FAKE, **options: Any) -> Plan:
    """The plan of a spec given as text."""
    path = tmp_path / "spec.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load(str(path), catalog=catalog, **options)


def problems(text: str, tmp_path: Path, **options: Any) -> list[tuple[int, int, str]]:
    """(line, column, message) of everything that is wrong with a spec; empty if nothing is."""
    try:
        plan(text, tmp_path, **options)
    except SpecError as error:
        return [(mark.line, mark.column, message) for mark, message in error.problems]
    return []


def values(found: Plan, *paths: str) -> list[tuple[Any, ...]]:
    """The values of some paths, for each trial in order."""
    return [tuple(value(member, path) for path in paths) for member in found.members]


def value(member: Member, path: str) -> Any:
    if path in ("arm", "cell", "state_bytes"):
        return getattr(member, path)
    if path == "seed":
        return member.trial.seed
    block, *rest = path.split(".")
    at = getattr(member.trial, block)
    for key in rest or ["name"]:
        at = at.get(key) if isinstance(at, dict) else None
    return at
