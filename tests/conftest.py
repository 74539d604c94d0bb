"""What every test shares: one thread, the Triton interpreter where there is no card, poisoned memory on request."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch: small operations run ten times slower when threads share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before anything asks a hub: no test may touch the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Commands remember the stores that they launch in: not those of tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="memsweep-test-state-")

import browser
import postgres
import pytest
import s3
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it has to be set before any kernel file is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import stores
from engines import Fake

from runners import trial, usage
from runners.store import Store

RAY = ("test_ray.py", "test_cluster.py", "test_cluster_files.py", "test_chaos.py", "test_overhead.py", "test_team.py")
"""Files whose tests start Ray's processes, which slow each other most."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With two workers, one runs every test that starts Ray, from the first moment, and the other the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class RayInOneWorker(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.split("::")[0].endswith(RAY) else nodeid

    return RayInOneWorker(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_card = pytest.mark.skip(reason="needs a CUDA card; none here")
    too_long = pytest.mark.skip(reason="takes minutes and repeats what shorter tests say: set MEMSWEEP_WIDE=1")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_card)
        if "wide" in item.keywords and not os.environ.get("MEMSWEEP_WIDE"):
            item.add_marker(too_long)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new store, with MLflow's database set up."""
    return stores.make(tmp_path / "runs")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A small engine in place of the one that trains."""
    made = Fake()
    monkeypatch.setattr(trial, "load_engine", made.engine)
    monkeypatch.setattr(usage, "EVERY_S", 1e6)  # how long a trial takes here must not show in what it writes
    return made


@pytest.fixture
def lines() -> list[str]:
    """What a launch says."""
    return []


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (or the largest integer), so that an element nobody wrote shows in the result."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory, "torch no longer fills by default"
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL server to make databases in: MEMSWEEP_TEST_POSTGRES, else one started for the tests."""
    given = os.environ.get("MEMSWEEP_TEST_POSTGRES")
    if given:
        yield given
        return
    why_not = postgres.missing()
    if why_not:
        pytest.skip(why_not)
    with postgres.server() as url:
        yield url


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """The URL of an empty bucket on an S3-compatible server of the tests' own."""
    why_not = s3.missing()
    if why_not:
        pytest.skip(why_not)
    with s3.server() as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    """A real browser; the test is skipped where Playwright or Chromium is missing."""
    why_not = browser.missing()
    if why_not:
        pytest.skip(why_not)
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real text and evaluation sets, from MEMSWEEP_DATA; the test is skipped without it."""
    folder = os.environ.get("MEMSWEEP_DATA")
    if not folder:
        pytest.skip("MEMSWEEP_DATA is not set: tests on real data are skipped")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"MEMSWEEP_DATA is {folder}, which is no folder")
    return path
