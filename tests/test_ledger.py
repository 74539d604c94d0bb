"""Leases and the index: one holder a trial, numbers that fence, rows that come back from the folders.

Everything runs on SQLite and on PostgreSQL: on a server that the tests start, or on that of MEMSWEEP_TEST_POSTGRES, a
URL where databases may be made: postgresql+psycopg2://user@/postgres?host=/socket/folder
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import plans
import postgres
import pytest
import sqlalchemy as sa

from runners import ledger as ledgers
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Exit, Failure, Outcome, Plan, Status, UserError
from runners.store import Store, seal, write_json
from runners.trial import write_outcome

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(params=["sqlite", "postgresql"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store; the ledger in it, or in a new database of the server."""
    if request.param == "sqlite":
        yield Store.create(tmp_path / "runs")
        return
    with postgres.database(request.getfixturevalue("postgres_server")) as url:
        monkeypatch.setenv("MEMSWEEP_LEDGER", url)
        yield Store.create(tmp_path / "runs")


sqlite_only = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger.open(store)


def known(ledger: Ledger, **changes: object) -> tuple[Plan, str]:
    """A plan in the ledger, and its first trial's id."""
    plan = plans.plan(**changes)
    ledger.record_plan(plan, 1)
    return plan, plan.members[0].trial.id


def expire(ledger: Ledger, trial_id: str) -> None:
    with ledger._write() as db:
        db.execute(sa.update(ledgers.trial_t).where(ledgers.trial_t.c.id == trial_id).values(expires=1.0))


def test_a_trial_has_one_holder(ledger: Ledger) -> None:
    _, trial_id = known(ledger)
    me, other = Owner.me(), Owner.me()
    assert ledger.claim(trial_id, me) == 1
    assert ledger.claim(trial_id, other) is None
    assert ledger.claim(trial_id, me) is None
    assert ledger.claim("no such trial", me) is None
    row = ledger.row(trial_id)
    assert (row.status, row.attempt, row.owner) == (Status.RUNNING, 1, me.uuid)


def test_many_drivers_share_without_overlap(store: Store) -> None:
    ids = [m.trial.id for m in plans.plan(seeds=range(20)).members]
    known(Ledger.open(store), seeds=range(20))
    barrier = threading.Barrier(6)

    def take(_: int) -> list[str]:
        ledger, owner = Ledger.open(store), Owner.me()  # a connection of its own, as another process has
        barrier.wait()
        return [trial_id for trial_id in ids if ledger.claim(trial_id, owner)]

    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(take, range(6)))
    assert sorted(trial_id for part in taken for trial_id in part) == sorted(ids)


def test_first_opening_by_many_at_once(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: list(Ledger.open(store).drivers()), range(8)))
    assert found == [[]] * 8, "every opener reads a whole, empty ledger"


def test_an_expired_lease_reads_interrupted_and_is_free(ledger: Ledger) -> None:
    _, trial_id = known(ledger)
    slow, next_one = Owner.me(), Owner.me()
    ledger.claim(trial_id, slow)
    expire(ledger, trial_id)
    assert (ledger.row(trial_id).status, ledger.row(trial_id).owner) == (Status.INTERRUPTED, None)
    assert ledger.claim(trial_id, next_one) == 2
    # The first comes back: too late for its result and for its lease.
    assert ledger.renew(slow) == set()
    assert not ledger.finish(Outcome(trial_id, 1, Status.COMPLETE))
    assert ledger.row(trial_id).status == Status.RUNNING
    assert ledger.finish(Outcome(trial_id, 2, Status.COMPLETE), ["slice"])
    assert ledger.row(trial_id).status == Status.COMPLETE
    assert ledger.evaluations([trial_id]) == {trial_id: {"slice"}}
    assert [(row["number"], row["status"]) for row in ledger.attempts(trial_id)] == [
        (1, "interrupted"),
        (2, "complete"),
    ]


def test_renewing_keeps_a_lease(ledger: Ledger) -> None:
    _, trial_id = known(ledger)
    me = Owner.me()
    ledger.claim(trial_id, me)
    expire(ledger, trial_id)
    assert ledger.renew(me) == {trial_id}
    assert ledger.claim(trial_id, Owner.me()) is None


def test_failures_are_kept_with_their_attempt(ledger: Ledger) -> None:
    _, trial_id = known(ledger)
    me = Owner.me()
    ledger.claim(trial_id, me)
    ledger.finish(Outcome(trial_id, 1, Status.FAILED, Failure.OOM, "OutOfMemoryError: 2 GiB"))
    row = ledger.row(trial_id)
    assert (row.status, row.failure, row.error) == (Status.FAILED, "oom", "OutOfMemoryError: 2 GiB")
    assert ledger.claim(trial_id, me) == 2
    assert ledger.row(trial_id).error is None
    assert ledger.attempts(trial_id)[0]["error"] == "OutOfMemoryError: 2 GiB"


def test_attempts_rise_past_what_the_folder_has(ledger: Ledger) -> None:
    _, trial_id = known(ledger)
    assert ledger.claim(trial_id, Owner.me(), above=7) == 8


def test_a_dead_driver_is_proved_and_freed_at_once(ledger: Ledger) -> None:
    plan, trial_id = known(ledger)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = Owner.me()
    begun = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    theirs = replace(here, uuid="theirs", pid=process.pid, begun=begun)
    away = replace(here, uuid="away", host="another machine", pid=1)
    for owner in (here, theirs, away):
        ledger.register(owner)
    for owner, member in zip((theirs, away, here), plan.members, strict=False):
        ledger.claim(member.trial.id, owner)
    assert ledger.release_dead() == []
    process.kill()
    process.wait()
    assert ledger.release_dead() == [theirs]
    statuses = [ledger.row(m.trial.id).status for m in plan.members[:3]]
    assert statuses == [Status.INTERRUPTED, Status.RUNNING, Status.RUNNING]
    assert ledger.claim(trial_id, here) == 2
    # A process id that was given to somebody else is no proof of life.
    assert replace(here, begun="12345").is_dead()


def test_leaving_gives_everything_back(ledger: Ledger) -> None:
    _, trial_id = known(ledger)
    me = Owner.me()
    ledger.register(me)
    ledger.claim(trial_id, me)
    assert ledger.claim_projector("store", "tiny", me)
    assert not ledger.claim_projector("store", "tiny", Owner.me())
    ledger.leave(me)
    assert ledger.row(trial_id).status == Status.INTERRUPTED
    assert ledger.drivers() == []
    assert ledger.claim_projector("store", "tiny", Owner.me())


def test_plans_share_trials(ledger: Ledger) -> None:
    first, trial_id = known(ledger)
    second = plans.plan(sweep="other", seeds=(0,))
    ledger.record_plan(second, 1)
    ledger.record_plan(first, 1)
    assert ledger.sweeps_of([trial_id]) == {trial_id: ["other", "tiny"]}
    assert list(ledger.rows("tiny", 1)) == [m.trial.id for m in first.members]  # plan order


def test_rebuild_from_the_folders(store: Store, ledger: Ledger) -> None:
    plan = plans.plan(seeds=(0, 1), slices=(4, 8))
    store.freeze(plan)
    done, failed, cut, fresh = (m.trial for m in plan.members)
    for one in (done, failed, cut):
        store.check_settings(one)
    base = {"schema": 1, "trial": done.id, "attempt": 2}
    write_json(store.trial_folder(done.id) / "result.json", seal(base | {"status": "complete", "step": 6}))
    part = plan.members[0].slices[1].id
    write_json(store.trial_folder(done.id) / "evals" / f"{part}.json", seal(base | {"slice": part}))
    write_outcome(
        store.trial_folder(failed.id) / "attempts" / "3", Outcome(failed.id, 3, Status.FAILED, Failure.OOM, "too big")
    )
    (store.trial_folder(cut.id) / "attempts" / "1").mkdir(parents=True)
    assert ledger.rebuild(store) == {"sweeps": 1, "revisions": 1, "trials": 3}
    rows = ledger.rows("tiny", 1)
    found = [(rows[t.id].status, rows[t.id].attempt) for t in (done, failed, cut, fresh)]
    assert found == [(Status.COMPLETE, 0), (Status.FAILED, 3), (Status.INTERRUPTED, 1), (Status.PLANNED, 0)]
    assert (rows[failed.id].failure, rows[failed.id].error) == ("oom", "too big")
    assert ledger.evaluations([done.id]) == {done.id: {part}}


def test_no_rebuild_under_a_driver(store: Store, ledger: Ledger) -> None:
    ledger.register(Owner.me())
    with pytest.raises(UserError, match="while process"):
        ledger.rebuild(store)


@sqlite_only
def test_a_damaged_ledger_is_told_with_the_way_out(store: Store) -> None:
    (store.root / "ledger.db").write_bytes(b"not a database, " * 100)
    with pytest.raises(UserError, match="doctor --rebuild") as caught:
        Ledger.open(store)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_a_ledger_of_another_store_is_refused(store: Store, ledger: Ledger) -> None:
    ledger.close()
    with pytest.raises(UserError, match="belongs to another store"):
        Ledger.open(replace(store, uuid="other"))
    Ledger.open(store).close()  # the stranger left nothing in it


@sqlite_only
def test_read_only_sees_a_live_ledger_and_writes_nothing(store: Store, ledger: Ledger) -> None:
    plan, trial_id = known(ledger)
    ledger.claim(trial_id, Owner.me())
    reader = Ledger.open(store, read_only=True)
    assert reader.rows("tiny", 1)[trial_id].status == Status.RUNNING
    with pytest.raises(sa.exc.OperationalError, match="readonly"):
        reader.claim(plan.members[1].trial.id, Owner.me())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody without write permission")
def test_status_without_write_permission(tmp_path: Path) -> None:
    """`sweep status` on a colleague's store: every file readable, none writable."""
    store = Store.create(tmp_path / "runs")
    plan = plans.plan()
    store.freeze(plan)
    ledger = Ledger.open(store)
    known(ledger)
    ledger.close()
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); sys.path += {sys.path!r}; import runners.driver as d;"
        f"os.setgid(65534); os.setuid(65534); from pathlib import Path;"
        f"print(d.status(Path({str(store.root)!r}))[0].counts)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "{'planned': 4}", run.stderr
    assert not list(store.root.glob("ledger.db-*"))


def test_ten_thousand_trials_are_quick(ledger: Ledger) -> None:
    """Not a benchmark: only that nothing is quadratic."""
    plan, _ = known(ledger, seeds=range(5000))
    assert len(ledger.rows("tiny", 1)) == len(plan.members) == 10_000
    assert len(ledger.evaluations([m.trial.id for m in plan.members])) == 10_000
