"""diff, gc, forget and doctor: what they say is so, and what they remove nobody needed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import stores as made
from engines import Fake
from test_record import runs

from runners import checkpoints, differ, driver, scratch
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Exit, Plan, Status, Trial, UserError
from runners.store import Store, seal, write_json
from sweeps import cli, environment

Sweep = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store; the folder for temporary files is the test's own."""
    short = tmp_path / "tmp"
    short.mkdir()
    monkeypatch.setattr(scratch, "places", lambda: {short})
    return made.make(tmp_path / "runs")


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Store) -> Sweep:
    """Runs the command line on the store: exit code, stdout, stderr."""
    monkeypatch.setenv("MEMSWEEP_STORE", str(store.root))

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["sweep", *argv])
        code = cli.main()
        return code, *capsys.readouterr()

    return run


def launch(store: Store, plan: Plan, **arguments: Any) -> driver.Summary:
    return driver.launch(plan, store=store.root, executor="inline", say=lambda _: None, **arguments)


def living(store: Store, trial_id: str, ledger: Ledger) -> Owner:
    """A driver that is at work on the trial: this very process."""
    me = Owner.me()
    ledger.register(me)
    assert ledger.claim(trial_id, me, above=store.last_attempt(trial_id))
    return me


# gc


def tree(root: Path) -> set[str]:
    """Every file but the databases', whose own come and go."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in files if ".db" not in path.name}


def test_gc_removes_what_nothing_needs_and_nothing_else(store: Store, fake: Fake, sweep: Sweep, tmp_path: Path) -> None:
    plan = plans.plan()

    def die(one: Trial, step: int) -> None:
        if one.id == plan.members[3].trial.id and step == 5:
            raise SystemExit

    fake.before_step = die
    with pytest.raises(SystemExit):
        launch(store, plan)
    done, cut = (store.trial_folder(plan.members[i].trial.id) for i in (0, 3))
    assert checkpoints.steps(cut / "checkpoints") == [2, 4]
    needed = tree(store.root)
    (done / "checkpoints" / "4").mkdir()
    (done / "checkpoints" / "4" / "tensors.safetensors").write_bytes(b"x" * 3000)
    (done / "checkpoints" / ".old-1a2b3c4d").mkdir()
    (done / "checkpoints" / ".old-1a2b3c4d" / "meta.json").write_text("{}")
    (done / ".result.json.1a2b3c4d").write_text("{")
    (cut / "metrics" / ".4-6.jsonl.0badf00d").write_text("{")
    (store.root / "sweeps" / "tiny" / ".9f9f9f9f").mkdir()
    (store.root / "trash" / "old-1").mkdir(parents=True)
    (store.root / "trash" / "old-1" / "result.json").write_text("{}")
    gone, alive = (tmp_path / "tmp" / f"memsweep-ray-{name}" for name in ("gone", "alive"))
    for folder, owner in ((gone, dataclasses.replace(Owner.me(), begun="1")), (alive, Owner.me())):
        write_json(folder / scratch.OWNER_FILE, dataclasses.asdict(owner))
    code, said, _ = sweep("gc", "--dry-run")
    assert code == 0
    assert "checkpoints of ended trials: 1, 2.9 KiB" in said
    assert "nothing was removed; `sweep gc --yes` removes" in said
    before = tree(store.root)
    assert before > needed
    code, said, _ = sweep("gc")  # no terminal: nothing without a yes
    assert (code, tree(store.root)) == (0, before)
    code, said, _ = sweep("gc", "--yes")
    assert (code, tree(store.root)) == (0, needed)
    assert "removed " in said
    assert (gone.exists(), alive.exists()) == (False, True)
    assert sweep("gc", "--yes")[1] == "nothing to remove\n"
    # And the sweep goes on from the checkpoint that was left alone.
    fake.before_step = lambda *_: None
    fake.started_at.clear()
    assert launch(store, plan).exit_code == Exit.OK
    assert fake.started_at == [4]


def test_gc_of_final_weights_says_what_it_costs(store: Store, fake: Fake, sweep: Sweep) -> None:
    plan = plans.plan(seeds=(0,))
    launch(store, plan)
    launch(store, plans.plan(sweep="other", seeds=(7,)))
    code, said, _ = sweep("gc", "tiny", "--finals", "--yes")
    assert code == 0
    assert "final weights: 2" in said
    assert "a new evaluation of these 2 trials trains them again" in said
    kept = [f for f in store.trial_ids() if (store.trial_folder(f) / "checkpoints" / "final").exists()]
    assert len(kept) == 2, "the other sweep's stay"
    assert launch(store, plan).ran == 0
    assert launch(store, plans.plan(seeds=(0,), slices=(4, 8))).ran == 2


def test_gc_leaves_alone_what_a_driver_holds_and_what_was_pruned(store: Store, fake: Fake, sweep: Sweep) -> None:
    plan = plans.plan(seeds=(0,))
    launch(store, plan)
    pruned, mine = (store.trial_folder(m.trial.id) for m in plan.members)
    for folder in (pruned, mine):
        (folder / "checkpoints" / "4").mkdir()
    row = json.loads((pruned / "result.json").read_text()) | {"status": Status.PRUNED.value}
    write_json(pruned / "result.json", seal(row))
    (store.root / ".store.json.1a2b3c4d").write_text("{")
    ledger = Ledger.open(store)
    living(store, mine.name, ledger)
    code, said, _ = sweep("gc", "--finals", "--yes")
    assert code == 0
    assert f"1 trials are in the hands of process {os.getpid()}" in said
    assert (mine / "checkpoints" / "final").exists()
    assert (pruned / "checkpoints" / "4").exists()
    assert (store.root / ".store.json.1a2b3c4d").exists(), "a driver may be writing it"


# forget


def test_forgotten_results_are_trained_again_and_their_runs_retired(
    store: Store, fake: Fake, sweep: Sweep, tmp_path: Path
) -> None:
    plan = plans.plan()
    launch(store, plan)
    launch(store, plans.plan(sweep="other", seeds=(0,)))
    before = {run.data.tags["memsweep.trial_id"]: run.info.run_id for run in runs(store)}
    forgotten = [m.trial.id for m in plan.members if m.trial.seed == 0]
    old = [store.result(one) for one in forgotten]
    code, _, noted = sweep("forget", "tiny", "--only", "seed: 0")
    assert (code, "no terminal to ask on, --yes agrees" in noted) == (Exit.USAGE, True)
    assert [store.result(one) for one in forgotten] == old
    code, said, _ = sweep("forget", "tiny", "--only", "seed: 0", "--yes")
    assert code == 0
    assert "2 of the 2 trials that meet this have results" in said
    assert "some are also in: other" in said
    assert [store.result(one) for one in forgotten] == [None, None]
    assert sorted(p.name for p in (store.root / "trash").iterdir()) == sorted(f"{one}-1" for one in forgotten)
    assert driver.status(store.root, "tiny")[0].counts == {"planned": 2, "complete": 2}
    # MLflow hears of it from whoever writes there next; the other results stay as they are.
    driver.sync(store.root)
    left = {run.data.tags["memsweep.trial_id"]: run.info.run_id for run in runs(store)}
    assert left == {one: run for one, run in before.items() if one not in forgotten}
    fake.trained.clear()
    assert launch(store, plan).ran == 2
    assert sorted(fake.trained) == sorted(forgotten)
    assert {store.result(one)["attempt"] for one in forgotten} == {2}
    found = {run.data.tags["memsweep.trial_id"]: run.info.run_id for run in runs(store)}
    assert found.keys() == before.keys()
    assert all((found[one] == before[one]) == (one not in forgotten) for one in before)
    assert sweep("forget", "tiny", "--only", "seed: 0", "--yes")[0] == 0
    sweep("gc", "--yes")
    assert not list((store.root / "trash").iterdir())


def test_a_lost_ledger_does_not_bring_the_forgotten_back(store: Store, fake: Fake, sweep: Sweep) -> None:
    plan = plans.plan(seeds=(0,))
    launch(store, plan)
    sweep("forget", "tiny", "--only", "train.lr: 0.001", "--yes")
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    driver.doctor(store.root, rebuild=True)
    assert driver.status(store.root, "tiny")[0].counts == {"planned": 1, "complete": 1}
    assert launch(store, plan).ran == 1
    assert store.last_attempt(plan.members[0].trial.id) == 2  # past what was forgotten


def test_what_a_driver_holds_is_not_forgotten(store: Store, fake: Fake, sweep: Sweep) -> None:
    plan = plans.plan(seeds=(0,))
    launch(store, plan)
    living(store, plan.members[0].trial.id, Ledger.open(store))
    code, _, noted = sweep("forget", "tiny", "--only", "seed: 0", "--yes")
    assert code == Exit.ENVIRONMENT
    assert "1 of these trials are in the hands of process" in noted
    assert not (store.root / "trash").exists() or not list((store.root / "trash").iterdir())


# diff


def test_trials_differ_by_setting_and_stamp(store: Store, fake: Fake, sweep: Sweep) -> None:
    plan = plans.plan(seeds=(0, 1))
    launch(store, plan)
    a, b = plan.members[0].trial, plan.members[3].trial
    path = store.trial_folder(b.id) / "result.json"
    row = json.loads(path.read_text())
    row["stamp"]["torch"] = "2.99"
    write_json(path, seal(row))
    code, said, _ = sweep("diff", a.id[:6], b.id)
    assert code == 0
    assert f"a: {a.id}\nb: {b.id}\n" in said
    assert "  seed: 0 -> 1\n" in said
    assert "  train.lr: 0.001 -> 0.003\n" in said
    assert "-> 2.99" in said
    assert "mechanism" not in said
    same = differ.diff(store, a.id, a.id)
    assert same.is_same
    assert "no difference" in sweep("diff", a.id, a.id)[1]
    found = json.loads(sweep("diff", a.id, b.id, "--json")[1])
    assert {d["path"] for d in found["settings"]} == {"seed", "train.lr"}


def test_sweeps_and_revisions_differ_by_spec_and_trials(store: Store, fake: Fake, sweep: Sweep) -> None:
    launch(store, plans.plan(sweep="tiny@paper", seeds=(0, 1)))
    launch(store, plans.plan(sweep="tiny@paper", seeds=(0, 1, 2), lrs=(1e-3, 2e-3)))
    launch(store, plans.plan(sweep="other", seeds=(0, 1)))
    code, said, _ = sweep("diff", "tiny@paper@1", "tiny@paper")
    assert code == 0
    assert "a: tiny@paper@1\nb: tiny@paper@2\n" in said
    assert "  seeds: [0,1] -> [0,1,2]\n" in said
    assert "  lr: [0.001,0.003] -> [0.001,0.002]\n" in said
    assert "2 trials are in both\nonly in a: 2 trials\n  lr-0.003 softmax: 2\n" in said
    assert "only in b: 4 trials\n  lr-0.001 softmax: 1\n  lr-0.002 softmax: 3\n" in said
    assert differ.diff(store, "other", "tiny@paper@1").shared == 4
    assert "  sweep: other -> tiny@paper\n" in sweep("diff", "other", "tiny@paper@1")[1]


def test_what_cannot_be_compared_is_told(store: Store, fake: Fake, sweep: Sweep) -> None:
    plan = plans.plan(seeds=range(40))
    for member in plan.members:
        store.check_settings(member.trial)
    store.freeze(plan)
    one = plan.members[0].trial.id
    with pytest.raises(UserError, match="a trial and a sweep"):
        differ.diff(store, one, "tiny")
    with pytest.raises(UserError, match=r"'tine' is neither a sweep of .* \(tiny; NAME@2"):
        differ.diff(store, "tine", "tiny")
    with pytest.raises(UserError, match="neither a sweep"):
        differ.diff(store, one[:3], one)
    with pytest.raises(UserError, match="revision 7"):
        differ.diff(store, "tiny@7", "tiny")
    write_json(store.trial_folder(f"{one[:8]}ffffffff") / "settings.json", plan.members[0].trial.settings())
    with pytest.raises(UserError, match=f"2 trials begin with {one[:8]}: "):
        differ.diff(store, one[:8], one)


# doctor


def test_doctor_shows_the_true_cause_of_a_broken_import(tmp_path: Path) -> None:
    """An ImportError deep inside a library reads as "not installed" where it is swallowed."""
    (tmp_path / "optuna").mkdir()
    cause = "/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found"
    (tmp_path / "optuna" / "__init__.py").write_text(f"raise ImportError({cause!r})\n")
    code = (
        "from sweeps.environment import _dependency as d; f = d('optuna', 'optuna'); print(f.level, f.what, f.remedy)"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parent.parent)])
    environ = os.environ | {"PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert ran.stdout.startswith(f"problem `import optuna` raises ImportError: {cause}")
    assert "pip install --force-reinstall" in ran.stdout


def test_doctor_tells_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = environment._kernels()
    assert found.level == "ok"
    assert f"the torch forms, without a card; Triton {triton.__version__}, assembler: ptxas" in found.what
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (environment._kernels().level, "TRITON_INTERPRET is set" in environment._kernels().what) == ("note", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert environment._kernels().level == "problem"
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    assert environment._assembler() == "/nowhere/ptxas (does not run) (TRITON_PTXAS_PATH)"


def test_assemblers_tell_their_version(tmp_path: Path) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    tool.chmod(0o755)
    assert environment._release(tool) == "12.8.93"
    tool.write_text("#!/bin/sh\necho hello\n")
    assert environment._release(tool) == "(of an unknown version)"


def test_doctor_tells_the_file_system(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("on a local file system" in f.what for f in driver.doctor(store.root))
    monkeypatch.setattr("runners.overview.shared_filesystem", lambda _: "nfs4")
    assert any("on a nfs4 file system, which machines can share" in f.what for f in driver.doctor(store.root))
