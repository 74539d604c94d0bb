"""The pages of `sweep dashboard` without a browser: what they hold, whom they answer, what they never give away."""

from __future__ import annotations

import gzip
import http.client
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_store
import pytest
import sqlalchemy as sa
from moving import Moving

from dashboards import live_site
from dashboards.live import Follower
from dashboards.live_curves import Curves, axis, thin
from dashboards.live_server import Server
from dashboards.live_site import Site
from runners import store as stores
from runners.ledger import trial_t
from runners.schema import Failure, UserError
from runners.store import Store

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = 'ValueError: <script>alert(1)</script> & "quotes" \'}}'


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    made = Moving(tmp_path / "runs", fake_store.make_plan(2))
    yield made
    made.ledger.close()


@pytest.fixture
def site(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(live_site, "LOOK_EVERY_S", 0.0)
    return Site(moving.store)


def page(site: Site, target: str, status: int = 200) -> str:
    answer = site.answer(target)
    assert answer.status == status
    return answer.body.decode()


def test_a_sweep_fills_in(moving: Moving, site: Site) -> None:
    first, second, third = moving.plan.members[:3]
    before = page(site, "/sweep/capacity")
    assert moving.plan.question in before
    assert "No trial has a score yet" in before
    moving.finish(first)
    moving.start(second)
    moving.tell(second, 50, **{"train/loss": 3.0})
    moving.fail(third, "OSError: gone", Failure.INFRA)
    after = page(site, "/sweep/capacity")
    assert 'aria-label="Trials: 1 complete, 1 running, 1 failed, 13 waiting"' in after
    assert f"<b>{fake_store.accuracy(first, 4):.4g}</b>" in after
    assert "50/200 steps" in after
    assert "worker or machine" in after
    assert f"/sweep/capacity/trial/{third.trial.id}" in after


def test_errors_are_text(moving: Moving, site: Site) -> None:
    member = moving.plan.members[0]
    moving.fail(member, HOSTILE)
    for target in ("/sweep/capacity", f"/sweep/capacity/trial/{member.trial.id}", "/sweep/<script>alert(1)"):
        body = site.answer(target).body.decode()
        assert "<script>alert" not in body
        assert "&lt;script&gt;alert(1)" in body


def test_pages_run_nothing_inline(moving: Moving, site: Site) -> None:
    """The policy forbids it, and a page that needs it would break under its own policy."""
    moving.finish(moving.plan.members[0])
    for target in ("/", "/sweep/capacity", f"/sweep/capacity/trial/{moving.plan.members[0].trial.id}"):
        body = page(site, target)
        assert not re.search(r"<script(?! src=)|\son\w+=|\sstyle=|<style|https?://", body)


def test_a_trial(moving: Moving, site: Site) -> None:
    member = moving.plan.members[0]
    moving.fail(member, "ValueError: the first")
    moving.fail(member, "ValueError: the second")
    target = f"/sweep/capacity/trial/{member.trial.id}"
    newest, earlier = page(site, target), page(site, f"{target}?attempt=1")
    assert "the second" in newest
    assert "the first" not in newest
    assert "Traceback" in newest
    assert "the first" in earlier
    assert "mechanism.name" in newest
    assert page(site, f"{target}?attempt=../../../../etc") == newest, "an attempt is a number that there is"
    moving.finish(member)
    assert "n_params" in page(site, target)


def test_a_long_log_is_cut(moving: Moving, site: Site) -> None:
    member = moving.plan.members[0]
    moving.start(member)
    (moving.attempt(member) / "log.txt").write_text("old\n" + "x" * 60 + "\n" * 40_000 + "new\n")
    body = page(site, f"/sweep/capacity/trial/{member.trial.id}")
    assert "new\n" in body
    assert "old\n" not in body
    assert "bytes before" in body
    assert len(body) < 2 * live_site.TAIL_BYTES


@pytest.mark.parametrize(
    "target",
    [
        "/../../etc/passwd",
        "/live.css/../../pyproject.toml",
        "/live.py",
        "/sweep/..%2f..%2fetc",
        "/sweep/%2e%2e/trial/x",
        "/sweep/capacity/trial/..%2f..%2fledger.db",
        "/sweep/capacity/trial/%00",
        "/sweep/nosuch",
        "/sweep",
        "//evil.example/",
        "/%",
    ],
)
def test_paths_lead_nowhere_else(site: Site, target: str) -> None:
    assert "root:" not in page(site, target, 404)


def test_a_log_that_leads_out_of_the_store_is_not_shown(moving: Moving, site: Site, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret")
    member = moving.plan.members[0]
    moving.start(member)
    log = moving.attempt(member) / "log.txt"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    assert "the secret" not in page(site, f"/sweep/capacity/trial/{member.trial.id}")


def test_the_list(moving: Moving, site: Site) -> None:
    moving.finish(moving.plan.members[0])
    body = page(site, "/")
    assert "1 complete" in body
    assert 'href="/sweep/capacity"' in body
    empty = Site(Store.create(moving.store.root.parent / "empty"))
    assert "No sweeps yet" in page(empty, "/")


def test_a_store_that_cannot_be_read_is_told(moving: Moving, site: Site) -> None:
    (moving.store.root / "ledger.db").write_bytes(b"not a database" * 100)
    for beside in ("ledger.db-wal", "ledger.db-shm"):
        (moving.store.root / beside).unlink(missing_ok=True)
    assert "cannot open the ledger" in page(site, "/sweep/capacity", 503)


def test_sweeps_looked_at_long_ago_are_let_go_of(moving: Moving, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_site, "FOLLOWED", 2)
    for name in ("a", "b", "c"):
        moving.store.freeze(replace(moving.plan, sweep=name))
        page(site, f"/sweep/{name}")
    assert list(site._followed) == ["b", "c"]


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_ten_thousand_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page within a second of processor time while results are read, and after; the first one once it is open."""
    monkeypatch.setattr(live_site, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(stores, "sync_folder", lambda folder: None)
    moving = Moving(tmp_path / "runs", fake_store.make_plan(1250))
    with moving.ledger._write() as db:
        for member in moving.plan.members[:9000]:
            fake_store.finish(moving.store, member)
            db.execute(sa.update(trial_t).where(trial_t.c.id == member.trial.id).values(status="complete", attempt=1))
    site, took, body = Site(moving.store), [], "still to be read"
    site.open("capacity")
    while "still to be read" in body:
        began = time.process_time()
        body = page(site, "/sweep/capacity")
        took.append(time.process_time() - began)
    assert "<b>9,000</b> complete" in body
    began = time.process_time()
    assert "9,000 complete" in page(site, "/")
    took.append(time.process_time() - began)
    assert max(took) < 1.0, took
    moving.ledger.close()


# ---- curves --------------------------------------------------------------------------------------------------------


def test_curves_are_of_the_best_and_of_what_runs(moving: Moving) -> None:
    follower = Follower(moving.store, "capacity")
    curves, last = Curves(follower), [m for m in moving.plan.members if m.trial.task["seq_len"] == 64]
    for member in last[:4]:  # both seeds of softmax and of linear
        moving.finish(member)
    runs = last[4]
    moving.start(runs)
    for step in (10, 20, 30):
        moving.tell(
            runs, step, when=time.time() + step, **{"train/loss": 6.0 - step / 10, "valid/accuracy": step / 100}
        )
        found = follower.look()
    chart = curves.draw(found)
    assert chart is not None
    assert chart.metric == "valid/accuracy"
    best = max(last[:2], key=lambda member: fake_store.accuracy(member, 16))
    assert [one.trial for one in chart.curves][::2] == [best.trial.id, runs.trial.id]
    assert [one.is_running for one in chart.curves] == [False, False, True]
    assert chart.curves[-1].points == [(10, 0.1), (20, 0.2), (30, 0.3)]
    assert [one.colour for one in chart.curves] == [0, 1, 2], "an arm's colour is its place in the plan"
    assert "3 curves" in chart.summary
    loss = curves.draw(found, "train/loss")
    assert loss is not None
    assert loss.metric == "train/loss"
    bad = curves.draw(found, "../../x")
    assert bad is not None
    assert bad.metric == "valid/accuracy"


def test_a_thinned_curve_keeps_its_spikes() -> None:
    line = [(step, math.sin(step / 500)) for step in range(100_000)]
    line[41_234] = (41_234, 99.0)
    found = thin(line)
    assert len(found) <= 2 * 100 + 2
    assert (found[0], found[-1]) == (line[0], line[-1])
    assert (41_234, 99.0) in found
    assert thin(line[:50]) == line[:50]


@pytest.mark.parametrize("values", [[0.0, 1.0], [3.0, 3.0], [0.0, 0.0], [-1e-9, 2e-9], [1.0, 123456.0], [5.01, 5.02]])
def test_an_axis_holds_its_values(values: list[float]) -> None:
    found = axis(values, 5)
    assert found.ticks[0] <= min(values)
    assert found.ticks[-1] >= max(values)
    assert 2 <= len(found.ticks) <= 12
    assert all(0 <= found.at(value) <= 1 for value in values)


# ---- the server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(site: Site) -> Iterator[Server]:
    with Server(site, port=0) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(5)


def ask(server: Server, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    try:
        connection.putrequest(method, target, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_over_http(server: Server, moving: Moving) -> None:
    moving.finish(moving.plan.members[0])
    status, headers, body = ask(server, "/sweep/capacity", Accept_Encoding="gzip")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"capacity" in gzip.decompress(body)
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"
    known = ask(server, "/sweep/capacity", If_None_Match=headers["etag"])
    assert (known[0], known[2]) == (304, b""), "a page that did not change is not sent again"
    assert ask(server, "/sweep/capacity", "HEAD")[2] == b""
    assert ask(server, "/live.css")[1]["content-type"].startswith("text/css")
    assert ask(server, "/live.js")[1]["content-type"].startswith("text/javascript")
    assert ask(server, "/", "POST")[0] == 501


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:80", "LOCALHOST.", "10.1.2.3:8270"])
def test_hosts_that_are_answered(server: Server, host: str) -> None:
    assert server.allows(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8270", "", None, "127.0.0.1.evil.example", "localhost.evil"]
)
def test_names_from_elsewhere_are_refused(server: Server, host: str | None) -> None:
    assert not server.allows(host)


def test_a_rebound_name_gets_nothing(server: Server) -> None:
    status, _, body = ask(server, "/sweep/capacity", Host="evil.example")
    assert status == 403
    assert b"capacity" not in body


def test_ports(server: Server, site: Site) -> None:
    taken = server.server_address[1]
    with pytest.raises(UserError, match=f"--port {taken} cannot be had"):
        Server(site, port=taken)
    with pytest.raises(UserError, match="up to 65535"):
        Server(site, port=70000)
    with pytest.raises(UserError, match=r"--host no\.such\.host\.invalid"):
        Server(site, "no.such.host.invalid")
    assert not server.is_open
    with Server(site, "0.0.0.0", 0) as other:
        assert other.is_open
        assert other.url.startswith("http://127.0.0.1:")


def test_the_command(moving: Moving) -> None:
    command = [
        sys.executable,
        "-m",
        "sweeps",
        "dashboard",
        "capacity",
        "--store",
        str(moving.store.root),
        "--port",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        first, tunnel = process.stdout.readline(), process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)/sweep/capacity", first)
        assert address, first
        assert f"ssh -L {address[1]}:127.0.0.1:{address[1]}" in tunnel
        connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=10)
        connection.request("GET", "/sweep/capacity")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
