"""PostgreSQL as the ledger and behind MLflow: drivers of several hosts share it, and nobody is shown its password."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import plans
import postgres
import pytest
import sqlalchemy as sa
from test_faults import claim_all

from dashboards import report, ui
from runners import driver, record
from runners.ledger import Ledger
from runners.redact import redact, shown
from runners.schema import Exit, UserError
from runners.store import Store

ROOT = Path(__file__).resolve().parent.parent
SECRET = "correct-horse-battery"


def with_password(url: str) -> str:
    """The same database for a server that asks for no password."""
    return sa.engine.make_url(url).set(password=SECRET).render_as_string(hide_password=False)


@pytest.fixture
def database(postgres_server: str) -> Iterator[str]:
    with postgres.database(postgres_server) as url:
        yield with_password(url)


def test_four_drivers_claim_a_thousand_trials_each_once(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSWEEP_LEDGER", database)
    taken = claim_all(Store.create(tmp_path / "runs"), tmp_path, 1000, 4)
    assert sum(map(len, taken)) == 1000
    assert all(taken), "everyone got some"


def sweep(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sweeps", *arguments]
    if arguments[0] != "ls":
        command += ["--store", str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_ledger_and_mlflow_on_postgresql_and_no_password_anywhere(
    tmp_path: Path, postgres_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        ledger, mlflow = (with_password(stack.enter_context(postgres.database(postgres_server))) for _ in range(2))
        variables = {"MEMSWEEP_LEDGER": ledger, "MEMSWEEP_TRACKING_URI": mlflow}
        arguments = ["--executor", "inline", "--no-report", "--set", "train.steps=2"]
        ran = sweep(tmp_path, "launch", "specs/smoke.yaml", *arguments, "--only", "mechanism=linear", **variables)
        assert ran.returncode == Exit.OK, ran.stdout + ran.stderr
        said = ran.stdout + ran.stderr
        assert "2 complete" in said
        assert "MLflow is" not in said
        for command in (["status", "smoke"], ["sync"]):
            done = sweep(tmp_path, *command, **variables)
            assert done.returncode == Exit.OK, done.stdout + done.stderr
            said += done.stdout + done.stderr
        monkeypatch.setenv("MEMSWEEP_LEDGER", ledger)
        said += str(driver.doctor(tmp_path / "runs"))
        client = record.make_client(mlflow)
        experiment = client.get_experiment_by_name("smoke")
        found = client.search_runs([experiment.experiment_id])
        assert sorted(run.info.status for run in found) == ["FINISHED", "FINISHED"]
        rows = "".join(_dump(url) for url in (ledger, mlflow))
        assert "memsweep.trial_id" in rows
    assert SECRET not in rows, "in a database"
    assert SECRET not in said, "in what was printed"
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert not (tmp_path / "runs" / "ledger.db").exists()
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def _dump(url: str) -> str:
    """Every row of every table."""
    engine = sa.create_engine(url)
    tables = sa.MetaData()
    with engine.connect() as db:
        tables.reflect(db)
        found = "".join(
            f"{table.name} {row}\n" for table in tables.sorted_tables for row in db.execute(sa.select(table))
        )
    engine.dispose()
    return found


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"postgresql+psycopg2://me:{SECRET}@127.0.0.9:1/db", "Is the server up"),
        (f"postgresql+psycopg2://127.0.0.9:1/db?user=me&password={SECRET}", "password=…"),
        (f"postgresql+psycopg2://me:{SECRET}@host:port/db", "cannot be used"),
        (f"nonsense://me:{SECRET}@host/db", "cannot be used"),
        (f"me:{SECRET}@host", "cannot be used"),
    ],
)
def test_a_ledger_that_cannot_be_reached_is_told_without_its_password(
    tmp_path: Path, url: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words != "cannot be used":
        pytest.importorskip("psycopg2")
    store = Store.create(tmp_path / "runs")
    monkeypatch.setenv("MEMSWEEP_LEDGER", url)
    with pytest.raises(UserError, match=words) as caught:
        Ledger.open(store)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert SECRET not in str(caught.value)


def test_a_missing_driver_is_told_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    monkeypatch.setenv("MEMSWEEP_LEDGER", f"postgresql+psycopg2://me:{SECRET}@host/db")
    with pytest.raises(UserError, match=r"memsweep\[postgres\]") as caught:
        Ledger.open(Store.create(tmp_path / "runs"))
    assert SECRET not in str(caught.value)


def test_passwords_are_taken_out() -> None:
    for text in (
        f"postgresql://me:{SECRET}@host/db",
        f"API request to http://me:{SECRET}@host:5000/api failed",
        f"postgresql://host/db?user=me&password={SECRET}&sslmode=require",
        f"connection failed: host=h password={SECRET}",
        f"https://host/?aws_secret_access_key={SECRET}",
        f"two: http://a:{SECRET}@b/ and ftp://c:{SECRET}@d/",
        f"http://me:pa@{SECRET}@host:5000",
        f"http://me:12/{SECRET}@host:5000",
        f"mysql://me:p@ss:{SECRET}/@host/db?password={SECRET}",
        f"https://{SECRET}@host/p",
    ):
        assert SECRET not in redact(text)
    plain = "sqlite:////home/me/mlflow.db and http://host:5000 (user@example.org), keys=3"
    assert redact(plain) == plain


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"mysql://me:p@ss:{SECRET}/@host/db", f"invalid literal for int() with base 10: {SECRET!r}"),
        ("postgresql://me:s%40cret%2F1@host/db", "password s@cret/1 and cret"),
        (f"postgresql://host/db?password={SECRET}", f"no {SECRET} here"),
        (f"postgresql://me:it's {SECRET}@host/db", f"it's {SECRET}, {SECRET}"),
    ],
)
def test_a_known_password_is_taken_out_of_what_errors_say(url: str, said: str) -> None:
    for text in (redact(said, url), shown(url)):
        assert not any(piece in text for piece in (SECRET, "cret"))
    assert redact("the pool is up: p", "http://u:p@host") == "the pool is up: …", "a short one only as a word"


def test_an_unreachable_ledger_is_told_by_what_only_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg2")
    store = Store.create(tmp_path / "runs")
    revision, _new = store.freeze(plans.plan())
    monkeypatch.setenv("MEMSWEEP_LEDGER", f"postgresql+psycopg2://me:{SECRET}@127.0.0.9:1/db")
    for read in (
        lambda: driver.status(store.root),
        lambda: report.known(store.root, "tiny", revision),
        lambda: report.build(plans.plan(), store.root, f"{revision:04d}", tmp_path / "out"),
    ):
        with pytest.raises(UserError, match="Is the server up") as caught:
            read()
        assert caught.value.exit_code == Exit.ENVIRONMENT
        assert SECRET not in str(caught.value)


def test_an_empty_ledger_is_told_with_what_fills_it(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    store.freeze(plans.plan())
    (store.root / "ledger.db").touch()
    with pytest.raises(UserError, match="doctor --rebuild"):
        driver.status(store.root)


def test_mlflow_ui_gets_a_password_unseen(tmp_path: Path) -> None:
    uri = f"postgresql://me:{SECRET}@host/db"
    line, extra = ui.command(tmp_path, tracking_uri=uri)
    assert SECRET not in " ".join(line)
    assert extra["MLFLOW_BACKEND_STORE_URI"] == uri
    with pytest.raises(UserError) as caught:
        ui.command(tmp_path, tracking_uri=f"http://me:{SECRET}@host:5000")
    assert SECRET not in str(caught.value)
