"""Results by other code than today's: told file by file, kept unless asked, and never half of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
from engines import Fake
from test_record import points, runs

from runners import checkpoints, driver, stale, stamp, trial
from runners.schema import Exit, Job, Status, Trial, UserError
from runners.store import Store, generation, read_json, read_sealed, seal, write_json

Launch = Callable[..., driver.Summary]


class Code:
    """The code as the tests would have it: `edit` changes one file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = {"mechanisms/softmax.py": "1", "runners/train.py": "1"}
        monkeypatch.setattr(stale, "code", lambda *_: dict(self.files))
        monkeypatch.setattr(stale, "fingerprint", lambda *_: self.fingerprint)

    @property
    def fingerprint(self) -> str:
        return "-".join(f"{name}:{version}" for name, version in sorted(self.files.items()))

    def edit(self, name: str) -> None:
        self.files[name] = self.files.get(name, "0") + "'"


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    return Code(monkeypatch)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(trial, "load_engine", made.engine)
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    return made


@pytest.fixture
def launch(store: Store, fake: Fake, lines: list[str]) -> Launch:
    def run(plan: Any, **arguments: Any) -> driver.Summary:
        lines.clear()
        return driver.launch(plan, store=store.root, executor="inline", say=lines.append, **arguments)

    return run


def test_done_trials_of_other_code_are_told_kept_or_made_again(
    launch: Launch, store: Store, fake: Fake, lines: list[str], code: Code
) -> None:
    plan = plans.plan(seeds=(0, 1), slices=(4, 8))
    one = plan.members[0].trial.id
    launch(plan)
    assert launch(plan).ran == 0
    assert not any("other code" in line for line in lines)
    code.edit("mechanisms/softmax.py")
    kept = launch(plan)
    assert (kept.ran, kept.skipped, kept.exit_code) == (0, 4, Exit.OK)
    told = "4 trials were made by other code (mechanisms/softmax.py changed): kept; --stale rerun trains afresh"
    assert told in lines
    before = store.result(one)
    first_runs = {run.data.tags["memsweep.trial_id"]: run.info.run_id for run in runs(store)}
    fake.step_s, fake.evaluated = 0.0, []
    fake.trained.clear()
    again = launch(plan, stale="rerun")
    assert (again.ran, again.skipped, again.counts, again.exit_code) == (4, 0, {"complete": 4}, Exit.OK)
    assert sorted(fake.trained) == sorted(m.trial.id for m in plan.members)
    assert len(fake.evaluated) == 8
    assert fake.started_at[-4:] == [0] * 4
    result = store.result(one)
    assert (result["attempt"], result["made_by"]) == (2, [code.fingerprint])
    aside = store.trial_folder(one) / "attempts" / "2" / "aside"
    assert read_sealed(aside / "result.json") == before
    assert len(list((aside / "evals").iterdir())) == 2
    assert (aside / "metrics").is_dir()
    assert launch(plan, stale="rerun").ran == 0
    assert not any("other code" in line for line in lines)
    # MLflow takes no point back: the old curve went with its run, the new one is whole.
    found = {run.data.tags["memsweep.trial_id"]: run for run in runs(store)}
    assert len(runs(store)) == len(found) == 4
    assert not {run.info.run_id for run in found.values()} & set(first_runs.values())
    assert {run.data.tags["memsweep.generation"] for run in found.values()} == {"2"}
    assert sorted(step for name, step in points(store, found[one]) if name == "train/loss") == [1, 2, 3, 4, 5, 6]
    # A new database, or a new ledger, makes neither run again.
    driver.sync(store.root)
    assert len(runs(store)) == 4
    for path in store.root.glob("ledger.db*"):
        path.unlink()
    driver.doctor(store.root, rebuild=True)
    driver.sync(store.root)
    assert {run.info.run_id for run in runs(store)} == {run.info.run_id for run in found.values()}


def test_unfinished_trials_go_on_under_other_code_and_the_result_says_so(
    launch: Launch, store: Store, fake: Fake, lines: list[str], code: Code
) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    one = plan.members[0].trial.id

    def die(_: Trial, step: int) -> None:
        if step == 5:
            raise SystemExit

    fake.before_step = die
    with pytest.raises(SystemExit):
        launch(plan)
    first = code.fingerprint
    code.edit("runners/train.py")
    code.edit("runners/micro.py")
    fake.before_step = lambda *_: None
    assert launch(plan).exit_code == Exit.OK
    names = "runners/micro.py, runners/train.py"
    said = f"1 unfinished trial was made by other code ({names} changed): gone on with; --stale rerun trains afresh"
    assert said in lines
    assert fake.started_at == [0, 4]
    assert store.result(one)["made_by"] == [first, code.fingerprint]
    assert "other code made the checkpoint" in (store.trial_folder(one) / "attempts" / "2" / "log.txt").read_text()
    launch(plan)
    assert any(line.startswith("1 trial was made by other code") for line in lines), "one half still is"
    launch(plan, stale="rerun")
    assert store.result(one)["made_by"] == [code.fingerprint]


def test_an_unfinished_one_is_begun_afresh_if_asked(launch: Launch, store: Store, fake: Fake, code: Code) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    fake.before_step = lambda _, step: (_ for _ in ()).throw(SystemExit) if step == 5 else None
    with pytest.raises(SystemExit):
        launch(plan)
    code.edit("runners/train.py")
    # Killed once more after it began afresh: that part is by today's code and is gone on with.
    with pytest.raises(SystemExit):
        launch(plan, stale="rerun")
    fake.before_step = lambda *_: None
    assert launch(plan, stale="rerun").exit_code == Exit.OK
    assert fake.started_at == [0, 0, 4]
    folder = store.trial_folder(plan.members[0].trial.id)
    assert generation(folder) == 2
    assert store.result(plan.members[0].trial.id)["made_by"] == [code.fingerprint]


def test_an_unfinished_one_never_goes_on_with_other_data(
    launch: Launch, store: Store, fake: Fake, code: Code, lines: list[str]
) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    fake.before_step = lambda _, step: (_ for _ in ()).throw(SystemExit) if step == 5 else None
    with pytest.raises(SystemExit):
        launch(plan)
    code.edit("data corpus.txt")
    fake.before_step = lambda *_: None
    assert launch(plan).exit_code == Exit.OK
    assert fake.started_at == [0, 0]
    assert "1 unfinished trial was made with other data (data corpus.txt changed): trained afresh" in lines
    assert store.result(plan.members[0].trial.id)["made_by"] == [code.fingerprint]


def test_a_failure_after_the_start_afresh_is_retried_from_its_checkpoint(
    launch: Launch, fake: Fake, code: Code, store: Store
) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    launch(plan)
    code.edit("runners/train.py")
    problems = iter([ConnectionError("gone")])

    def fail(_: Trial, step: int) -> None:
        if step == 3 and (problem := next(problems, None)):
            raise problem

    fake.before_step = fail
    assert launch(plan, stale="rerun").exit_code == Exit.OK
    assert fake.started_at == [0, 0, 2]
    assert generation(store.trial_folder(plan.members[0].trial.id)) == 2


@pytest.mark.parametrize("moves", range(4))
def test_cut_short_while_setting_aside_no_old_part_joins_a_new_one(
    tmp_path: Path, fake: Fake, code: Code, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    member = plans.member(plans.trial(), slices=(4, 8))

    def job(attempt: int, *, fresh: bool = False) -> Job:
        return Job(member.trial, attempt, member.slices, str(tmp_path), "cpu", 1, fresh=fresh)

    trial.run_job(job(1))
    old = read_sealed(tmp_path / "result.json")
    code.edit("runners/train.py")
    left, real = [moves], trial.os.replace

    def replace(source: Any, target: Any) -> None:
        if "aside" in str(target):
            if not left[0]:
                raise SystemExit
            left[0] -= 1
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(trial.os, "replace", replace)
        if moves < 3:
            with pytest.raises(SystemExit):
                trial.run_job(job(2, fresh=True))
        else:
            trial.run_job(job(2, fresh=True))
    assert trial.run_job(job(3)).status == Status.COMPLETE
    result = read_sealed(tmp_path / "result.json")
    evals = [read_sealed(path)["attempt"] for path in (tmp_path / "evals").iterdir()]
    if moves < 2:  # the old training is still there whole; what it lost is evaluated again
        assert (result, len(evals)) == (old, 2)
        assert set(evals) <= {1, 3}
    else:
        assert result["made_by"] == [code.fingerprint]
        assert not {1} & {result["attempt"], *evals}


def test_results_from_before_the_files_were_noted(launch: Launch, store: Store, lines: list[str], code: Code) -> None:
    plan = plans.plan(seeds=(0,), lrs=(1e-3,))
    launch(plan)
    folder = store.trial_folder(plan.members[0].trial.id)
    row = json.loads((folder / "result.json").read_text())
    del row["made_by"]
    write_json(folder / "result.json", seal(row))
    (folder / "attempts" / "1" / stale.CODE_FILE).unlink()
    launch(plan)
    assert "1 trial was made by other code: kept; --stale rerun trains afresh" in lines
    row["stamp"]["fingerprint"] = code.fingerprint
    write_json(folder / "result.json", seal(row))
    launch(plan)
    assert not any("other code" in line for line in lines)


def test_only_the_trials_that_use_a_file_are_told() -> None:
    """By the real imports: a change in one mechanism is none for another."""
    softmax, hola = stamp.code("softmax", "mqar"), stamp.code("hola", "mqar")
    assert "mechanisms/softmax.py" in softmax
    assert "mechanisms/softmax.py" not in hola
    assert {"mechanisms/hola.py", "mechanisms/_parts.py", "runners/train.py", "runners/tasks/mqar.py"} <= hola.keys()
    assert {"kernels/delta_rule.py", "runners/micro.py"} <= hola.keys()
    assert not {name for name in hola if name.startswith(("sweeps", "dashboards"))}
    hybrid = stamp.code("hola", "mqar", "base_conv", "softmax")
    assert hybrid.keys() == hola.keys() | {"mechanisms/softmax.py"}
    noted = stale.record(plans.trial())
    assert noted == {"fingerprint": stamp.fingerprint("softmax", "mqar"), "files": softmax}


def test_words_say_how_many_and_which() -> None:
    many = tuple(f"kernels/{letter}.py" for letter in "abcdef")
    assert stale.words([("a.py",), ("a.py",), (), many], "") == [
        "2 trials were made by other code (a.py changed)",
        "1 trial was made by other code",
        "1 trial was made by other code (kernels/a.py, kernels/b.py, kernels/c.py, kernels/d.py and 2 more changed)",
    ]


def test_another_word_is_refused(launch: Launch) -> None:
    with pytest.raises(UserError, match="--stale 'redo': it is keep or rerun"):
        launch(plans.plan(), stale="redo")


def test_a_checkpoint_from_before_is_read(tmp_path: Path, fake: Fake, code: Code) -> None:
    member = plans.member(plans.trial())
    job = Job(member.trial, 1, member.slices, str(tmp_path), "cpu", 1)
    trial.run_job(job, should_stop=lambda: (tmp_path / "checkpoints" / "4").exists())
    meta = tmp_path / "checkpoints" / "4" / "meta.json"
    head = read_json(meta)
    assert head["code"] == [code.fingerprint]
    del head["code"]
    write_json(meta, head)
    found = checkpoints.newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.step, found.code) == (4, ())
