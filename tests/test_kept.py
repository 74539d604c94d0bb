"""What is kept from one report to the next: as if it were made anew, whatever happens to the store or the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_store import fail, fill, make_plan

from dashboards import kept, table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "FROM", 2)
    return tmp_path / "cache" / "memsweep" / "reports"


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each reading of trial folders."""
    seen: list[int] = []
    real = table._read
    monkeypatch.setattr(table, "_read", lambda *args: (seen.append(1), real(*args))[1])
    return seen


def same(a: table.Results, b: table.Results) -> None:
    for name in ("members", "scores", "curves"):
        pd.testing.assert_frame_equal(getattr(a, name), getattr(b, name))
    assert (a.stamps, a.evals, a.warnings, a.code) == (b.stamps, b.evals, b.warnings, b.code)


def test_the_second_look_reads_nothing_until_something_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(2)
    store = fill(tmp_path / "store", plan, skip=1)
    seen = reads(monkeypatch)
    first = table.load(plan, store.root)
    same(first, table.load(plan, store.root))
    assert len(seen) == 1
    last = plan.members[-1]
    assert first.members.set_index("trial").status[last.trial.id] == "planned"

    fail(store, last)
    assert table.load(plan, store.root).members.set_index("trial").status[last.trial.id] == "failed"
    result = store.trial_folder(plan.members[0].trial.id) / "result.json"
    result.write_text(result.read_text().replace('"step": 200', '"step": 201'))
    assert "torn or was altered" in table.load(plan, store.root).warnings[0]
    assert len(seen) == 3
    # What the ledger says of a trial that is not done counts too.
    assert table.load(plan, store.root, {last.trial.id: ("running", None)}) is not None
    assert len(seen) == 4


def test_what_is_torn_or_not_ours_is_made_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(2)
    store = fill(tmp_path / "store", plan)
    seen = reads(monkeypatch)
    first = table.load(plan, store.root)
    (path,) = folder.glob("*.pickle")
    path.write_bytes(path.read_bytes()[:100])
    same(first, table.load(plan, store.root))
    assert len(seen) == 2
    os.chmod(folder, 0o777)  # anybody may have put a pickle there
    same(first, table.load(plan, store.root))
    assert len(seen) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    same(first, table.load(plan, store.root))
    assert len(seen) == 4


def test_a_text_is_made_once_and_few_are_kept(folder: Path) -> None:
    made: list[Any] = []
    for _ in range(2):
        assert kept.kept_text("a-1.js", lambda: (made.append(1), "x")[1]) == "x"
    assert len(made) == 1
    for n in range(kept.MOST + 3):
        kept.kept_text(f"b-{n}.js", lambda: "y")
    assert len(list(folder.iterdir())) == kept.MOST
