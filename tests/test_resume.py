"""`sweep resume` and its kin: from any folder, by class of failure, and never as if all were well when it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import stores as made
from engines import Fake

from runners import driver, trial
from runners.schema import Exit, Plan, Status, Trial, UserError
from runners.store import Store
from sweeps import again, cli, stores

Sweep = Callable[..., tuple[int, str, str]]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder without a store, and a memory of stores of its own."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MEMSWEEP_STORE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Runs the command line: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["sweep", *argv])
        code = cli.main()
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    engine = Fake()
    monkeypatch.setattr(trial, "load_engine", engine.engine)
    return engine


def fill(root: Path, fake: Fake, plan: Plan, fails: Callable[[Trial, int], None] = lambda *_: None) -> Store:
    store = made.make(root)
    fake.before_step = fails
    driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    fake.before_step = lambda *_: None
    stores.remember(store.root)
    return store


def each_class(one: Trial, step: int) -> None:
    """One trial of each class of failure: seeds 0, 1 and 2."""
    problems = {0: MemoryError("no room"), 1: ConnectionError("gone"), 2: ValueError("a bug")}
    if step == 3 and one.seed in problems:
        raise problems[one.seed]


RESUME = ("--executor", "inline", "--no-report")


def test_failures_by_class_are_told_and_run_again_from_anywhere(
    tmp_path: Path, elsewhere: Path, fake: Fake, sweep: Sweep
) -> None:
    retry = {"oom": 0, "infra": 0}
    store = fill(tmp_path / "runs", fake, plans.plan(seeds=range(4), lrs=(1e-3,), retry=retry), each_class)
    code, said, noted = sweep("status", "tiny")
    assert (code, noted) == (0, f"store: {store.root}\n")
    for kind, error in (("oom", "no room"), ("infra", "gone"), ("error", "a bug")):
        assert f"failed ({kind}): 1" in said
        assert error in said
    assert said.count("      log: ") == 3
    assert "sweep resume tiny --failed" in said
    fake.trained.clear()
    code, said, _ = sweep("resume", "tiny", "--unfinished", *RESUME)
    assert (code, fake.trained) == (Exit.FAILED, [])
    assert "0 of 4 trials are unfinished and run again" in said
    assert "3 more are failed: `sweep resume tiny --failed` runs them" in said
    code, said, _ = sweep("resume", "tiny", "--failed", *RESUME)
    assert (code, len(fake.trained)) == (Exit.OK, 3)
    assert "3 of 4 trials are failed and run again" in said
    assert fake.started_at[-3:] == [2, 2, 2]
    assert "failed" not in sweep("status", "tiny")[1]


def test_a_failure_that_comes_again_is_told_again(tmp_path: Path, elsewhere: Path, fake: Fake, sweep: Sweep) -> None:
    fill(tmp_path / "runs", fake, plans.plan(seeds=range(4), lrs=(1e-3,), retry={"infra": 0, "oom": 0}), each_class)
    fake.before_step = each_class
    code, said, _ = sweep("resume", "tiny", *RESUME)
    assert code == Exit.FAILED
    assert "3 of 4 trials are failed or unfinished and run again" in said
    assert said.count("failed (error)") == 2  # at once, and in the summary
    assert "one of --failed" in sweep("resume", "tiny", "--failed", "--all")[2]


def test_which_store_is_meant(
    tmp_path: Path, elsewhere: Path, fake: Fake, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    one = fill(tmp_path / "one", fake, plan)
    assert stores.find(None, "tiny") == one.root
    assert stores.find(None) == one.root
    two = fill(tmp_path / "two", fake, plan)
    with pytest.raises(UserError, match=r"in 2 stores that you launched in") as caught:
        stores.find(None, "tiny")
    assert f"--store {one.root}" in str(caught.value)
    assert f"--store {two.root}" in str(caught.value)
    # The option, then the variable, then the folder here, then memory.
    here = fill(elsewhere / "memsweep-runs", fake, plans.plan(sweep="local", seeds=(0,), lrs=(1e-3,)))
    assert stores.find(None, "local").resolve() == here.root
    assert stores.find(Path("anything"), "tiny") == Path("anything")
    with pytest.raises(UserError, match="in 2 stores"):
        stores.find(None, "tiny")  # the store here has no such sweep
    assert sweep("status", "tiny", "--store", str(two.root))[0] == 0
    monkeypatch.setenv("MEMSWEEP_STORE", str(one.root))
    assert sweep("status", "tiny")[0] == 0
    code, _, noted = sweep("status", "tine")
    assert code == Exit.USAGE
    assert "no sweep 'tine'" in noted


def test_an_unknown_sweep_names_what_is_known(tmp_path: Path, elsewhere: Path, fake: Fake, sweep: Sweep) -> None:
    code, _, noted = sweep("resume", "tiny")
    assert code == Exit.USAGE
    assert f"no sweep 'tiny': there is no store at {elsewhere / 'memsweep-runs'}" in noted
    fill(tmp_path / "runs", fake, plans.plan(seeds=(0,), lrs=(1e-3,)))
    assert "those you launched in have: tiny" in sweep("report", "tine")[2]


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"stores": 3}', '{"stores": [1, null, "/nowhere"]}'])
def test_the_memory_may_be_torn(elsewhere: Path, tmp_path: Path, torn: str) -> None:
    file = tmp_path / "state" / "memsweep" / "stores.json"
    file.parent.mkdir(parents=True)
    file.write_text(torn)
    assert stores.remembered() == []
    store = made.make(tmp_path / "runs")
    stores.remember(store.root)
    assert stores.remembered() == [store.root]


def test_the_memory_may_be_out_of_reach(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    store = made.make(tmp_path / "runs")
    stores.remember(store.root)
    assert stores.remembered() == []
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stores.remember(store.root)
    listed = json.loads((tmp_path / "home/.local/state/memsweep/stores.json").read_text())
    assert listed == {"stores": [str(store.root)]}


def test_the_memory_is_bounded_and_the_last_comes_first(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "KEEP", 2)
    roots = [made.make(tmp_path / name).root for name in "abc"]
    for root in [*roots, roots[1]]:
        stores.remember(root)
    assert stores.remembered() == [roots[1], roots[2]]


def test_a_launch_is_remembered(
    elsewhere: Path, tmp_path: Path, fake: Fake, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec is not needed any more, nor the folder it was in."""
    made.make(elsewhere / "memsweep-runs")
    code, said, errors = sweep("launch", "smoke", *RESUME)
    assert code == Exit.OK, said + errors
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    code, said, noted = sweep("resume", "smoke", *RESUME)
    assert (code, noted) == (Exit.OK, f"store: {elsewhere / 'memsweep-runs'}\n")
    assert "0 of" in said
    assert sweep("export", "smoke")[0] == Exit.OK
    assert os.listdir(other) == []


def status_of(**counts: int) -> Any:
    trials = [
        driver.TrialStatus(f"{state}{i}", "arm", "cell", i, state, 1, None, None, None, None, {}, None)
        for state, n in counts.items()
        for i in range(n)
    ]
    return driver.SweepStatus("tiny", 1, "", dict(counts), trials, [], None)


def test_which_trials_run(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = status_of(complete=2, diverged=1, failed=2, planned=3, interrupted=1)

    def chosen(**flags: bool) -> dict[str, int]:
        found = again.choose(mixed, **({"failed": False, "unfinished": False, "everything": False} | flags))
        kinds = [name.rstrip("0123456789") for name in found]
        return {kind: kinds.count(kind) for kind in kinds}

    assert chosen() == chosen(everything=True) == {"failed": 2, "planned": 3, "interrupted": 1}
    assert chosen(failed=True) == {"failed": 2}
    assert chosen(unfinished=True) == {"planned": 3, "interrupted": 1}
    assert "2 more are failed" in capsys.readouterr().out
    assert Status.DIVERGED.is_done
