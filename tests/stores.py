"""Stores for tests, with MLflow's database already set up: making one takes seconds, copying it none."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from runners import record
from runners.store import Store, read_points


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="memsweep-test-"))
    record.make_client(f"sqlite:///{folder / 'mlflow.db'}")
    return folder


def make(root: Path) -> Store:
    """A new store at `root`."""
    store = Store.create(root)
    shutil.copy(_template() / "mlflow.db", store.root / "mlflow.db")
    return store


def points(store: Store, trial_id: str) -> list[tuple[int, dict[str, float], float]]:
    """The committed points of a trial."""
    return list(read_points(store.trial_folder(trial_id)))
