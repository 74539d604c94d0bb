"""MLflow as a projection: one run a trial, sent once, made again from the ledger, never in a trial's way."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
from engines import Fake
from mlflow.tracking import MlflowClient

from runners import driver, record, summary_run, tracking, trial
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Exit, Plan, Status, UserError
from runners.store import Store, write_json

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def launch(store: Store, fake: Fake, lines: list[str]) -> Callable[..., driver.Summary]:
    def run(plan: Plan, **arguments: Any) -> driver.Summary:
        return driver.launch(plan, store=store.root, executor="inline", say=lines.append, **arguments)

    return run


def runs(store: Store, sweep: str = "tiny") -> list[Any]:
    client = record.make_client(store.mlflow_uri)
    found = record.all_runs(client, client.get_experiment_by_name(sweep).experiment_id)
    return [run for run in found if run.data.tags["memsweep.kind"] == "trial"]


def test_each_trial_is_one_useful_run(store: Store, launch: Callable[..., driver.Summary], fake: Fake) -> None:
    fake.diverge = frozenset({1})
    plan = plans.plan(slices=(4, 8))
    summary = launch(plan)
    assert summary.backlog is None
    found = {run.data.tags["memsweep.trial_id"]: run for run in runs(store)}
    assert found.keys() == {m.trial.id for m in plan.members}
    member = plan.members[0]
    run = found[member.trial.id]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "lr-0.001 softmax seed=0"
    assert run.info.end_time >= run.info.start_time
    tags = {name.removeprefix("memsweep."): value for name, value in run.data.tags.items()}
    assert (tags["status"], tags["arm"], tags["seed"]) == ("complete", "lr-0.001", "0")
    assert "shared" not in tags
    params = run.data.params
    assert (params["arm"], params["seed"], params["train.lr"], params["mechanism.name"]) == (
        *("lr-0.001", "0", "0.001", "softmax"),
    )
    assert params["task.seq_len"] == "32"
    metrics = run.data.metrics
    assert metrics["state_bytes"] == 4096
    assert metrics["test/accuracy/n_pairs-4"] == pytest.approx(0.018 / 4)
    assert metrics["test/accuracy"] == pytest.approx((0.018 / 4 + 0.018 / 8) / 2)
    history = record.make_client(store.mlflow_uri).get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(s, pytest.approx(s * 1e-3)) for s in range(1, 7)]
    diverged = found[plan.members[1].trial.id]
    assert (diverged.info.status, diverged.data.tags["memsweep.status"]) == ("FINISHED", "diverged")
    assert diverged.data.metrics["test/accuracy"] == 2 / 64  # it scores chance


def test_sending_again_sends_nothing(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan())
    assert driver.sync(store.root) == {"tiny": 0}
    launch(plans.plan())
    assert len(runs(store)) == 4


def test_a_crash_between_points_and_mark_doubles_nothing(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan())
    client = record.make_client(store.mlflow_uri)
    run = runs(store)[0]
    client.set_tag(run.info.run_id, record.MARK, "2:torn")
    assert driver.sync(store.root) == {"tiny": 1}
    for name in ("train/loss", "test/accuracy", "state_bytes"):
        history = client.get_metric_history(run.info.run_id, name)
        assert len({point.step for point in history}) == len(history) == (6 if name == "train/loss" else 1)


def points(store: Store, run: Any) -> list[tuple[str, int]]:
    """(metric, step) of every point that the run has, as often as it has it."""
    client = record.make_client(store.mlflow_uri)
    return [
        (name, point.step) for name in run.data.metrics for point in client.get_metric_history(run.info.run_id, name)
    ]


def damage(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow hears only what a test sends, and what is left at the end: one driver at a time writes."""
    monkeypatch.setattr(record.Projector, "start", lambda _: None)


@pytest.mark.usefixtures("by_hand")
def test_trained_again_has_no_point_twice(store: Store, launch: Callable[..., driver.Summary], fake: Fake) -> None:
    """Its files are new, so are their times; and the server hears of it while it trains."""
    plan = plans.plan(seeds=(0,))
    launch(plan)
    before = {run.info.run_id: sorted(points(store, run)) for run in runs(store)}
    one = plan.members[0].trial
    damage(store.trial_folder(one.id) / "result.json")
    fake.before_step = lambda *_: _projection(store)
    fake.trained.clear()
    assert launch(plan).ran == 1
    assert fake.trained == [one.id]
    assert {run.info.run_id: sorted(points(store, run)) for run in runs(store)} == before
    driver.sync(store.root)
    for run in runs(store):
        assert len(set(points(store, run))) == len(points(store, run))
        assert run.data.tags["memsweep.status"] == "complete"


@pytest.mark.usefixtures("by_hand")
def test_evaluated_again_has_no_point_of_a_curve_twice(
    store: Store, launch: Callable[..., driver.Summary], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(plans.plan(seeds=(0,)))
    real = fake.evaluate

    def evaluate(*arguments: Any, **options: Any) -> dict[str, float]:
        _projection(store)
        return real(*arguments, **options)

    monkeypatch.setattr(fake, "evaluate", evaluate)
    for path in store.root.glob("trials/*/metrics/*.jsonl"):
        path.touch()  # a copied store has new times
    assert launch(plans.plan(seeds=(0,), slices=(4, 8))).evaluated == 2
    for run in runs(store):
        told = [point for point in points(store, run) if point[0] != "test/accuracy"]  # its mean is over two now
        assert sorted(set(told)) == sorted(told)
        assert run.data.metrics["test/accuracy"] < run.data.metrics["test/accuracy/n_pairs-4"]


def test_a_call_that_fails_half_way_doubles_nothing(
    store: Store, launch: Callable[..., driver.Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes the points, the answer is lost, and the trial is trained again before the next try."""
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    launch(plan)
    run = runs(store)[0]
    projection = _projection(store)
    record.make_client(store.mlflow_uri).set_tag(run.info.run_id, record.MARK, "-1:torn")
    projection._adopt(projection._client)
    projection._seen.clear()
    real = projection._client.log_batch

    def log_batch(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise ConnectionError("the answer is lost")

    before = sorted(points(store, run))
    with monkeypatch.context() as patch:
        patch.setattr(projection._client, "log_batch", log_batch)
        with pytest.raises(ConnectionError):
            projection.project()
    for path in store.root.glob("trials/*/metrics/*.jsonl"):
        path.touch()
    assert projection.project() == 1
    assert sorted(points(store, run)) == before


def test_a_deleted_run_stays_deleted_until_asked(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan())
    client = record.make_client(store.mlflow_uri)
    gone = runs(store)[0].info.run_id
    client.delete_run(gone)
    summary = launch(plans.plan(seeds=(0, 1, 2)))
    assert summary.ran == 2
    alive = [run.info.run_id for run in runs(store) if run.info.lifecycle_stage == "active"]
    assert len(alive) == 5
    assert gone not in alive
    driver.sync(store.root, restore=True)
    alive = [run.info.run_id for run in runs(store) if run.info.lifecycle_stage == "active"]
    assert len(alive) == 6
    assert gone in alive


def test_a_deleted_experiment_is_left_alone_until_asked(
    store: Store, launch: Callable[..., driver.Summary], lines: list[str]
) -> None:
    launch(plans.plan())
    client = record.make_client(store.mlflow_uri)
    client.delete_experiment(client.get_experiment_by_name("tiny").experiment_id)
    summary = launch(plans.plan(seeds=(0, 1, 2)))
    assert summary.exit_code == Exit.OK
    assert "was deleted" in (summary.backlog or "")
    assert sum("was deleted" in line for line in lines) == 1
    assert driver.status(store.root, "tiny")[0].backlog == summary.backlog
    driver.sync(store.root, restore=True)
    assert sum(run.info.lifecycle_stage == "active" for run in runs(store)) == 6
    assert driver.status(store.root, "tiny")[0].backlog is None


def _projection(store: Store) -> record.Projection:
    revision, plan = store.plan("tiny")
    projection = record.Projection(store, Ledger.open(store), plan, revision, store.mlflow_uri)
    projection.project()
    return projection


def _fresh_client(uri: str) -> Any:
    """A client whose connection is not the one that this process already holds: another spelling of the path."""
    return MlflowClient(tracking_uri=uri.replace("sqlite:////", "sqlite://///"))


def test_mlflow_wiped_is_made_again(
    store: Store, launch: Callable[..., driver.Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(plans.plan())
    before = {run.data.tags["memsweep.trial_id"]: run.data for run in runs(store)}
    projection = _projection(store)
    (store.root / "mlflow.db").unlink()
    with pytest.raises(FileNotFoundError, match="was deleted"):
        projection.project()
    # MLflow keeps the deleted file open in this process, so do it in another, as the command line does.
    code = f"from pathlib import Path; from runners import driver; print(driver.sync(Path({str(store.root)!r})))"
    sent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert sent.stdout == "{'tiny': 4}\n"
    monkeypatch.setattr(record, "make_client", _fresh_client)
    after = {run.data.tags["memsweep.trial_id"]: run.data for run in runs(store)}
    assert after.keys() == before.keys()
    for trial_id, data in after.items():
        assert (data.metrics, data.params) == (before[trial_id].metrics, before[trial_id].params)
        assert data.tags["memsweep.status"] == "complete"


def _sync_elsewhere(store: Store) -> subprocess.CompletedProcess[str]:
    """Sync in a process of its own: MLflow keeps a deleted database open in this one."""
    code = f"from pathlib import Path; from runners import driver; print(driver.sync(Path({str(store.root)!r})))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


def test_mlflow_wiped_gets_its_report_back(
    store: Store, launch: Callable[..., driver.Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.plan(seeds=(0,))
    launch(plan)
    folder = store.revision_folder("tiny", 1) / "report"
    folder.mkdir()
    (folder / "report.html").write_text("<p>kept")
    assert summary_run.log_report(store, plan, 1, folder) is None
    (store.root / "mlflow.db").unlink()
    shutil.rmtree(store.mlflow_artifacts)
    for sent in ("{'tiny': 2}\n", "{'tiny': 0}\n"):
        assert _sync_elsewhere(store).stdout == sent
    monkeypatch.setattr(record, "make_client", _fresh_client)
    client = record.make_client(store.mlflow_uri)
    which = [client.get_experiment_by_name("tiny").experiment_id], "tags.`memsweep.kind`='summary'"
    (summary,) = client.search_runs(*which)
    assert (summary.info.status, summary.data.tags["memsweep.revision"]) == ("FINISHED", "1")
    (found,) = store.mlflow_artifacts.glob("tiny/*/artifacts/report/report.html")
    assert found.read_text() == "<p>kept"
    client.delete_run(summary.info.run_id)
    assert summary_run.put_report_back(store, plan, 1) is None
    assert client.search_runs(*which) == []  # the user deleted it
    assert summary_run.put_report_back(store, plan, 1, restore=True) is None
    assert [run.info.run_id for run in client.search_runs(*which)] == [summary.info.run_id]


def test_a_damaged_database_is_named_with_its_cure(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan(seeds=(0,)))
    path = store.root / "mlflow.db"
    path.write_bytes(b"no database" * 1000)
    failed = _sync_elsewhere(store)
    assert failed.returncode != 0
    told = f"{path} is damaged (file is not a database): move it away, then run `sweep sync --store {store.root}`"
    assert told in failed.stderr
    error = RuntimeError("(sqlite3.DatabaseError) database disk image is malformed\n[SQL: select 1]")
    assert tracking.explain(error, store.mlflow_uri).startswith(f"{path} is damaged (database disk image is malformed)")
    assert "damaged" not in tracking.explain(error, "http://127.0.0.1:5000")


def test_a_lost_ledger_finds_its_runs_again(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan())
    ids = sorted(run.info.run_id for run in runs(store))
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    assert launch(plans.plan()).ran == 0
    assert sorted(run.info.run_id for run in runs(store)) == ids


def test_server_away_is_a_backlog_and_one_line(
    store: Store, launch: Callable[..., driver.Summary], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = "http://me:secret@127.0.0.1:9"
    summary = launch(plans.plan(), tracking_uri=away)
    assert (summary.counts, summary.exit_code) == ({"complete": 4}, Exit.OK)
    assert summary.backlog == (
        f"http://127.0.0.1:9 cannot be reached (connection refused); `sweep sync --store {store.root}` with "
        "MEMSWEEP_TRACKING_URI set to http://127.0.0.1:9 and its password catches up"
    )
    assert sum("MLflow is not up to date" in line for line in lines) == 1
    assert driver.status(store.root, "tiny")[0].backlog == summary.backlog
    with pytest.raises(UserError, match="MLflow") as caught:
        driver.sync(store.root, tracking_uri=away)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert driver.sync(store.root) == {"tiny": 4}
    assert b"secret" not in (store.root / "ledger.db").read_bytes()


def test_the_command_that_catches_up_means_this_server_and_this_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, server = f"--store {store.root}", "http://127.0.0.1:5000"
    assert tracking.command(store, store.mlflow_uri, "sync") == f"`sweep sync {here}`"
    assert tracking.command(store, server, "sync") == f"`sweep sync --tracking-uri {server} {here}`"
    monkeypatch.setenv("MEMSWEEP_TRACKING_URI", "http://me:secret@h")
    assert tracking.command(store, "http://me:secret@h", "sync") == f"`sweep sync {here}`", "the variable says it"
    monkeypatch.setenv("MEMSWEEP_STORE", str(store.root))
    assert tracking.command(store, server, "report", "a") == f"`sweep report a --tracking-uri {server}`"
    monkeypatch.delenv("MEMSWEEP_STORE")
    monkeypatch.chdir(store.root.parent)
    default = Store.create("memsweep-runs")
    assert tracking.command(default, default.mlflow_uri, "sync") == "`sweep sync`"


def test_a_database_that_cannot_be_used_is_told_before_anything_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, package in (("psycopg2", r"'memsweep\[postgres\]'"), ("MySQLdb", "mysqlclient")):
        monkeypatch.setitem(sys.modules, module, None)
        scheme = "mysql" if module == "MySQLdb" else "postgresql+psycopg2"
        with pytest.raises(UserError, match=f"needs {module}: pip install {package}") as caught:
            tracking.resolve_uri(store, f"{scheme}://me:secret@host/db")
        assert caught.value.exit_code == Exit.ENVIRONMENT
        assert "secret" not in str(caught.value)
    with pytest.raises(UserError, match="@ is written %40") as caught:
        tracking.resolve_uri(store, "mysql://me:p@ss:secret/@host/db?password=secret")
    assert "secret" not in str(caught.value)


def test_what_is_said_of_a_server_is_one_short_sentence() -> None:
    api = "API request to http://me:secret@h:1/api/2.0/mlflow/experiments/search failed with "
    for text, said in (
        (api + "exception HTTPConnectionPool(…): Max retries exceeded (… [Errno 111] Connection refused)", "refused"),
        ("(psycopg2.OperationalError) connection to server at h failed: timeout expired\n[SQL: …]", "timeout expired"),
        (api + "error code 401 != 200. Response body: 'secret'", "error 401"),
        ("something secret " + "long " * 100, "long …"),
    ):
        told = tracking.explain(RuntimeError(text), "http://me:secret@h:1")
        assert said in told
        assert "secret" not in told
        assert len(told) < 200


def test_a_dead_database_server_is_given_up_at_once(store: Store) -> None:
    pytest.importorskip("psycopg2")
    began = time.monotonic()
    store.freeze(plans.plan())
    with pytest.raises(UserError, match=r"MLflow: postgresql\+psycopg2://127.0.0.1:9/db cannot be reached \("):
        driver.sync(store.root, tracking_uri="postgresql+psycopg2://me:secret@127.0.0.1:9/db")
    assert time.monotonic() - began < 20


def test_nothing_is_left_running_once_its_lease_is_gone(store: Store, launch: Callable[..., driver.Summary]) -> None:
    """A driver claims, projects `running`, and dies; even if the next plan has dropped the trial."""
    plan = plans.plan()
    revision, _ = store.freeze(plan)
    ledger, gone = Ledger.open(store), Owner("gone", *[getattr(Owner.me(), n) for n in ("host", "pid")], "1", "here")
    ledger.register(gone)
    ledger.record_plan(plan, revision)
    for member in plan.members[:2]:
        store.check_settings(member.trial)
        ledger.claim(member.trial.id, gone)
    record.Projection(store, ledger, plan, revision, store.mlflow_uri).project()
    assert [run.info.status for run in runs(store)] == ["RUNNING"] * 2
    ledger.close()
    summary = launch(plans.plan(seeds=(1,)))
    assert summary.ran == 2
    statuses = {run.data.tags["memsweep.trial_id"]: run.info.status for run in runs(store)}
    assert statuses[plan.members[0].trial.id] == "KILLED"
    assert statuses[plan.members[1].trial.id] == "FINISHED"
    assert len(statuses) == len(runs(store)) == 3


def test_failed_then_mended_is_the_same_run(store: Store, launch: Callable[..., driver.Summary], fake: Fake) -> None:
    def fail(one: Any, step: int) -> None:
        if one.seed == 1 and step == 3:
            raise ValueError("not this one")

    fake.before_step = fail
    assert launch(plans.plan()).exit_code == Exit.FAILED
    failed = [run for run in runs(store) if run.info.status == "FAILED"]
    assert len(failed) == 2
    assert failed[0].data.tags["memsweep.error"] == "ValueError: not this one"
    fake.before_step = lambda *_: None
    launch(plans.plan())
    found = runs(store)
    assert {run.info.status for run in found} == {"FINISHED"}
    assert not any(run.data.tags.get("memsweep.error") for run in found)
    assert {run.info.run_id for run in failed} <= {run.info.run_id for run in found}
    client = record.make_client(store.mlflow_uri)
    history = client.get_metric_history(failed[0].info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]


def test_shared_trials_are_in_each_experiment(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan())
    summary = launch(plans.plan(sweep="other@paper", seeds=(0, 1, 2)))
    assert (summary.ran, summary.skipped) == (2, 4)
    found = runs(store, "other@paper")
    assert len(found) == 6
    assert sorted(run.data.tags.get("memsweep.shared", "") for run in found) == ["", "", *["other@paper, tiny"] * 4]
    assert driver.sync(store.root) == {"other@paper": 0, "tiny": 4}  # the tag is new there


def test_one_driver_writes_at_a_time(
    store: Store, launch: Callable[..., driver.Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PATIENCE_S", 0.5)
    ledger, other = Ledger.open(store), Owner.me()
    ledger.claim_projector("store", "tiny", other)
    said: list[str] = []
    assert driver.sync(store.root, say=said.append) == {}
    backlog = launch(plans.plan(seeds=(0,))).backlog
    assert backlog == f"another driver is writing to MLflow; `sweep sync --store {store.root}` catches up"
    record.Projection(store, ledger, plans.plan(seeds=(0,)), 1, store.mlflow_uri).project()
    assert len(runs(store)) == 2


@pytest.mark.parametrize("uri", ["./mlruns", "file:./mlruns", "file:///tmp/mlruns", "mlruns", "ftp://host/x", ""])
def test_folders_are_refused_before_anything_runs(store: Store, uri: str) -> None:
    with pytest.raises(UserError, match="--tracking-uri"):
        driver.launch(plans.plan(), store=store.root, executor="inline", tracking_uri=uri, say=lambda _: None)
    assert not (store.root / "ledger.db").exists()


def test_uris_are_absolute(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracking.resolve_uri(store, None) == f"sqlite:///{store.root}/mlflow.db"
    assert tracking.resolve_uri(store, "sqlite:///x.db") == f"sqlite:///{tmp_path}/x.db"
    assert tracking.resolve_uri(store, "http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_the_report_hangs_on_one_summary_run(
    store: Store, launch: Callable[..., driver.Summary], tmp_path: Path
) -> None:
    plan = plans.plan(seeds=(0,))
    launch(plan)
    folder = tmp_path / "report"
    (folder / "figures").mkdir(parents=True)
    (folder / "report.html").write_text("<p>first")
    (folder / "figures" / "a.png").write_bytes(b"png")
    assert summary_run.log_report(store, plan, 1, folder) is None
    (folder / "report.html").write_text("<p>second")
    assert summary_run.log_report(store, plan, 2, folder) is None
    client = record.make_client(store.mlflow_uri)
    found = client.search_runs([client.get_experiment_by_name("tiny").experiment_id], "tags.`memsweep.kind`='summary'")
    assert len(found) == 1
    assert found[0].info.status == "FINISHED"
    assert found[0].data.tags["memsweep.revision"] == "2"
    assert (store.mlflow_artifacts / "tiny" / found[0].info.run_id / "artifacts/report/report.html").read_text() == (
        "<p>second"
    )
    assert driver.sync(store.root) == {"tiny": 0}  # the summary is no trial
    problem = summary_run.log_report(store, plan, 1, folder, tracking_uri="http://127.0.0.1:9")
    assert problem


def test_awkward_values_do_not_stop_a_run(store: Store, launch: Callable[..., driver.Summary]) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    one = plan.members[0]
    odd = {"mechanism": "softmax", "task.x[0]=é": "v" * 9000, "model.layers": ["a", "b"] * 400}
    member = type(one)(one.trial, "arm, 1", "cell (a=b)", odd, 10**12, one.slices)
    launch(plans.plan(seeds=(0,), lrs=(1e-3,), members=(member,), tests=()))
    params = runs(store)[0].data.params
    assert params["task.x:5b:0:5d::3d:é"].startswith("vvv")
    assert "sha256" in params["task.x:5b:0:5d::3d:é"]
    assert len(params["model.layers"]) <= 500
    assert runs(store)[0].data.metrics["state_bytes"] == 10**12


def test_the_ui_has_a_view_with_useful_columns(store: Store, launch: Callable[..., driver.Summary]) -> None:
    launch(plans.plan())
    client = record.make_client(store.mlflow_uri)
    experiment = client.get_experiment_by_name("tiny")
    path = summary_run.view_path(store, "tiny")
    assert path == f"/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=memsweep"
    assert summary_run.view_path(store, "unknown") is None
    packed = experiment.tags["mlflow.sharedViewState.memsweep"].removeprefix("deflate;")
    view = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`test/accuracy`", False)
    run = runs(store)[0].data
    for column in view["selectedColumns"]:
        kind, name = column.split(".", 1)
        assert kind == "attributes" or name.strip("`") in getattr(run, kind)


def test_live_points_are_sent_while_it_trains(store: Store, fake: Fake) -> None:
    """Only committed ones, and with a run that says RUNNING."""
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    revision, _ = store.freeze(plan)
    ledger, me = Ledger.open(store), Owner.me()
    ledger.record_plan(plan, revision)
    one = plan.members[0].trial
    store.check_settings(one)
    ledger.claim(one.id, me)
    projection = record.Projection(store, ledger, plan, revision, store.mlflow_uri)
    seen: list[tuple[str, int]] = []

    def look(_: Any, step: int) -> None:
        if step in (3, 5):
            projection.project()
            run = runs(store)[0]
            client = record.make_client(store.mlflow_uri)
            steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
            seen.append((run.info.status, max(steps)))

    fake.before_step = look
    job = trial.Job(one, 1, plan.members[0].slices, str(store.trial_folder(one.id)), "cpu", 1)
    ledger.finish(trial.run_job(job), [part.id for part in plan.members[0].slices])
    projection.project()
    assert seen == [("RUNNING", 2), ("RUNNING", 4)]
    assert runs(store)[0].info.status == "FINISHED"


def test_a_result_taken_away_reads_planned(store: Store, launch: Callable[..., driver.Summary]) -> None:
    plan = plans.plan(seeds=(0,))
    launch(plan)
    (store.trial_folder(plan.members[0].trial.id) / "result.json").unlink()
    write_json(store.root / "note.json", {"time": time.time()})
    assert driver.status(store.root, "tiny")[0].counts == {Status.PLANNED: 1, Status.COMPLETE: 1}
    assert launch(plan).ran == 1
