"""A real `mlflow server` that is killed in the middle of a sweep: trials go on, and every point is there once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import plans
import pytest
import s3
from engines import Fake

from dashboards import ui
from runners import driver, record, summary_run, trial
from runners.schema import Exit, Trial
from runners.store import Store, read_points

OUTAGE_S = float(os.environ.get("MEMSWEEP_TEST_OUTAGE_S", "2"))
"""By hand with 60: MEMSWEEP_TEST_OUTAGE_S=60 pytest tests/test_mlflow_server.py"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Server:
    """`mlflow server` on a port of its own, to be killed and started again. `artifacts` is where they go."""

    def __init__(self, folder: Path, artifacts: str) -> None:
        self.folder, self.artifacts, self.port = folder, artifacts, ui._any_free()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        line = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        line += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--workers", "1"]
        line += ["--artifacts-destination", self.artifacts]
        with open(self.folder / "server.log", "ab") as log:
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "process_group": 0}
            variables = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self._process = subprocess.Popen(line, cwd=self.folder, env=variables, **quiet)
        end = time.monotonic() + 180
        while not self.is_up():
            assert self._process.poll() is None and time.monotonic() < end, (self.folder / "server.log").read_text()  # noqa: PT018
            time.sleep(0.1)

    def is_up(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """With its artifacts in a bucket, where the tests have one."""
    bucket = None if s3.missing() else request.getfixturevalue("s3_bucket")
    made = Server(tmp_path, f"{bucket}/mlflow" if bucket else str(tmp_path / "artifacts"))
    made.start()
    try:
        yield made
    finally:
        made.kill()


def test_a_server_killed_in_the_middle(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store, plan = Store.create(tmp_path / "runs"), plans.plan(seeds=(0, 1, 2), steps=12)
    ids = [member.trial.id for member in plan.members]
    lines: list[str] = []

    def outage(one: Trial, step: int) -> None:
        """Runs of the first trials are there; the server goes in the middle of the third and is back in the fifth."""
        if (one.id, step) == (ids[2], 5):
            wait_for(lambda: len(list(runs())) >= 2)
            server.kill()
            wait_for(lambda: any("MLflow is not up to date" in line for line in lines))
        elif (one.id, step) == (ids[4], 5):
            time.sleep(OUTAGE_S)
            server.start()

    def runs() -> Iterator[Any]:
        experiment = client.get_experiment_by_name("tiny")
        return iter(client.search_runs([experiment.experiment_id]) if experiment else [])

    fake = Fake(before_step=outage, step_s=0.02)
    monkeypatch.setattr(trial, "load_engine", fake.engine)
    client = record.make_client(server.uri)
    summary = driver.launch(plan, store=store.root, executor="inline", tracking_uri=server.uri, say=lines.append)
    assert (summary.exit_code, summary.counts, summary.failures) == (Exit.OK, {"complete": 6}, [])
    if summary.backlog:  # it came back too late for the launch itself
        driver.sync(store.root, tracking_uri=server.uri, say=lines.append)
    found = {run.data.tags["memsweep.trial_id"]: run for run in runs()}
    assert sorted(found) == sorted(ids)
    assert len(list(runs())) == len(ids)
    for trial_id, run in found.items():
        assert run.info.status == "FINISHED"
        expected = Counter(
            (name, step) for step, metrics, _ in read_points(store.trial_folder(trial_id)) for name in metrics
        )
        there: Counter[tuple[str, int]] = Counter()
        for name in {name for name, _ in expected}:
            there.update((name, point.step) for point in client.get_metric_history(run.info.run_id, name))
        assert there == expected, "every point once"
        assert sum(expected.values()) >= 12

    report = tmp_path / "report"
    report.mkdir()
    (report / "report.html").write_text("<p>The answer.</p>")
    assert summary_run.log_report(store, plan, 1, report, tracking_uri=server.uri) is None
    if server.artifacts.startswith("s3:"):
        names = [name for name in fsspec.filesystem("s3").find(server.artifacts) if name.endswith("report.html")]
        assert len(names) == 1, "the report is in the bucket"


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
