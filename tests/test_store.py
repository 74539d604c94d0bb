"""The store folder: whole files or none, frozen plans, refusals in words."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plans
import pytest

from runners import store as stores
from runners.ledger import Ledger
from runners.overview import doctor
from runners.schema import Exit, Trial, UserError
from runners.store import (
    HEAD,
    HEAD_COPY,
    Store,
    read_json,
    read_points,
    read_sealed,
    seal,
    shared_filesystem,
    write_json,
)


def test_create_then_open_is_the_same_store(tmp_path: Path) -> None:
    made = Store.create(tmp_path / "runs")
    assert Store.create(tmp_path / "runs") == made
    assert Store.open(tmp_path / "runs").uuid == made.uuid


def test_makers_at_once_get_one_store(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: Store.create(tmp_path / "runs").uuid, range(8)))
    assert len(set(made)) == 1


def test_refuses_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("\\documentclass{book}")
    with pytest.raises(UserError, match="other things in it") as caught:
        Store.create(tmp_path)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    with pytest.raises(UserError, match="no memsweep store"):
        Store.open(tmp_path)
    with pytest.raises(UserError, match="cannot make a store"):
        Store.create(tmp_path / "thesis.tex" / "runs")


def test_refuses_a_newer_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    write_json(store.root / "store.json", {"uuid": store.uuid, "schema": 99})
    with pytest.raises(UserError, match=r"schema 99.*upgrade"):
        Store.open(store.root)


def test_a_moved_store_reads_the_same(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    plan = plans.plan()
    store.freeze(plan)
    shutil.move(store.root, tmp_path / "elsewhere")
    moved = Store.open(tmp_path / "elsewhere")
    assert moved.uuid == store.uuid
    assert moved.plan("tiny") == (1, plan)


def test_write_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        write_json(path, {"x": float("nan")})
    assert read_json(path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_first_writer_wins(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: write_json(path, {"by": i}, keep_existing=True), range(8)))
    assert sum(won) == 1
    assert read_json(path) == {"by": won.index(True)}


def test_checksum_tells_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, seal({"schema": 1, "metrics": {"loss": 0.1 + 0.2}, "text": "ü"}))
    assert read_sealed(path)["metrics"] == {"loss": 0.1 + 0.2}
    path.write_text(path.read_text().replace("0.30000000000000004", "0.3"))
    assert read_sealed(path) is None
    path.write_text(path.read_text()[:-20])
    assert read_sealed(path) is None
    write_json(path, seal({"schema": 99}))
    with pytest.raises(UserError, match="schema 99"):
        read_sealed(path)


def test_points_come_once_and_end_at_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()

    def write(name: str, *steps: int) -> None:
        lines = [json.dumps({"step": s, "metrics": {"loss": s / 2}}) for s in steps]
        (folder / name).write_text("\n".join(lines) + "\n")

    write("0-4.jsonl", 1, 2, 3, 4)
    write("2-6.jsonl", 3, 4, 5, 6)  # an attempt that resumed from step 2 beside another
    write("6-9.jsonl", 7, 8, 9)
    (folder / ".6-9.jsonl.tmp").write_text("torn")
    assert [step for step, _, _ in read_points(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [step for step, _, _ in read_points(tmp_path, up_to=6)] == [1, 2, 3, 4, 5, 6]
    (folder / "9-9.jsonl").write_text('{"step": 9, "metrics": {"loss": 7.0, "valid/accuracy": 0.5}}\n')
    assert [m for step, m, _ in read_points(tmp_path) if step == 9] == [{"loss": 4.5}, {"valid/accuracy": 0.5}]


def test_freeze_keeps_the_number_of_an_unchanged_plan(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    first, more = plans.plan(), plans.plan(seeds=(0, 1, 2))
    assert store.freeze(first) == (1, True)
    assert store.freeze(first) == (1, False)
    assert store.freeze(more) == (2, True)
    assert store.plan("tiny") == (2, more)
    assert store.plan("tiny", 1) == (1, first)
    assert (store.revision_folder("tiny", 1) / "spec.yaml").read_text() == first.source
    with pytest.raises(UserError, match=r"no sweep 'tinny'.*tiny"):
        store.plan("tinny")
    with pytest.raises(UserError, match=r"revision 7.*\[1, 2\]"):
        store.plan("tiny", 7)


def test_drivers_that_freeze_one_plan_at_once_get_one_revision(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: store.freeze(plans.plan())[0], range(6)))
    assert numbers == [1] * 6
    assert store.revisions("tiny") == [1]
    assert [p.name for p in (store.root / "sweeps" / "tiny").iterdir()] == ["0001"]


MOUNTS = """/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/me/fast ext4 rw 0 0
nas /mnt/my\\040disk cifs rw 0 0
fs /lustre lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/root/runs", None),
        ("/home/me/runs", "nfs4"),
        ("/home/me/fast/runs", None),
        ("/homework", None),
        ("/mnt/my disk/runs", "cifs"),
        ("/lustre/x", "lustre"),
    ],
)
def test_network_file_systems_are_told(path: str, kind: str | None) -> None:
    assert shared_filesystem(Path(path), MOUNTS) == kind


def test_ledger_on_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(tmp_path / "runs")
    assert store.ledger_url() == f"sqlite:///{store.root}/ledger.db"
    monkeypatch.setattr(stores, "shared_filesystem", lambda path: "nfs4" if path.is_relative_to(tmp_path) else None)
    with pytest.raises(UserError, match=r"nfs4.*local disk.*PostgreSQL"):
        store.ledger_url()
    monkeypatch.setenv(stores.LEDGER_VARIABLE, "sqlite:////var/local/x.db")
    assert store.ledger_url() == "sqlite:////var/local/x.db"
    monkeypatch.setenv(stores.LEDGER_VARIABLE, "postgresql+psycopg2://me@host/sweeps")
    assert store.ledger_url().startswith("postgresql")


def test_equal_id_with_other_settings_stops(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    trial = plans.trial()
    store.check_settings(trial)
    assert Trial.from_settings(read_json(store.trial_folder(trial.id) / "settings.json")) == trial
    store.check_settings(trial)
    # A parameter added later, with a default that keeps the old behaviour, leaves the id as it is.
    more = Trial(trial.id, trial.seed, trial.mechanism, trial.task, trial.model | {"tied": True}, trial.train)
    store.check_settings(more)
    other = Trial(trial.id, trial.seed, trial.mechanism, trial.task, trial.model, trial.train | {"lr": 0.5})
    with pytest.raises(UserError, match=rf"{trial.id}: train\.lr differs"):
        store.check_settings(other)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"uuid": 5, "schema": 1}'])
def test_a_torn_head_is_read_from_its_copy_and_written_again(tmp_path: Path, text: str) -> None:
    store = Store.create(tmp_path / "runs")
    store.keep_shared("file:///scratch")
    os.chmod(store.root / HEAD, 0o600)
    Store.create(store.root).keep_shared("file:///other")
    assert (store.root / HEAD_COPY).stat().st_mode & 0o777 == 0o600, "it may hold a password, as store.json"
    (store.root / HEAD).write_text(text)
    assert (Store.open(store.root).uuid, Store.open(store.root).shared) == (store.uuid, "file:///other")
    assert (store.root / HEAD).read_text() == text, "open only reads"
    told = [found.what for found in doctor(store.root)]
    assert any("store.json is torn; its copy" in line for line in told), told
    Store.create(store.root)
    assert read_json(store.root / HEAD) == read_json(store.root / HEAD_COPY)
    assert read_json(store.root / HEAD)["uuid"] == store.uuid


@pytest.mark.parametrize("is_there", [True, False], ids=["torn", "gone"])
def test_a_store_with_nothing_but_its_ledger_finds_its_uuid(tmp_path: Path, is_there: bool) -> None:
    store = Store.create(tmp_path / "a store")
    store.freeze(plans.plan())
    Ledger.open(store).close()
    for name in (HEAD, HEAD_COPY):
        (store.root / name).unlink()
    if is_there:
        (store.root / HEAD).write_text("{")
    for opener in (Store.open, Store.create, doctor):
        with pytest.raises(UserError, match=r"torn or gone: `sweep doctor --rebuild --store '.*a store'`") as caught:
            opener(store.root)
        assert caught.value.exit_code == Exit.ENVIRONMENT
    assert any("the uuid that the ledger knows" in found.what for found in doctor(store.root, rebuild=True))
    assert Store.open(store.root).uuid == store.uuid
    assert not any("torn" in found.what for found in doctor(store.root, rebuild=True))


def test_a_torn_store_without_a_ledger_gets_a_new_uuid(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    (store.root / HEAD).write_text("")
    (store.root / HEAD_COPY).unlink()
    assert any("a new uuid" in found.what for found in doctor(store.root, rebuild=True))
    assert Store.open(store.root).uuid != store.uuid


def test_an_unreadable_ledger_makes_no_new_uuid(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs")
    (store.root / "ledger.db").write_bytes(b"no database" * 1000)
    (store.root / HEAD).write_text("")
    (store.root / HEAD_COPY).unlink()
    with pytest.raises(UserError, match="cannot open the ledger"):
        doctor(store.root, rebuild=True)
    assert (store.root / HEAD).read_text() == ""
