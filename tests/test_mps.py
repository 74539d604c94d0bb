"""NVIDIA's Multi-Process Service around a launch: a small script stands in for its program."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from pathlib import Path

import plans
import pytest
import stores
from test_packing import reading, trials

from runners import mps, scratch
from runners.cards import Cards
from runners.packing import Packer
from runners.resources import Share
from runners.schema import Failure, Outcome, Status

CONTROL = """\
#!/bin/sh
echo "$* $CUDA_MPS_PIPE_DIRECTORY" >> {log}
if [ "$1" = -d ]; then
  [ -e {log}.refuses ] && {{ echo 'no such luck' >&2; exit 1; }}
  sleep 30 &
  echo $! > "$CUDA_MPS_PIPE_DIRECTORY/control"
  exit 0
fi
read command
echo "$command" >> {log}
there="${{CUDA_MPS_PIPE_DIRECTORY:-{log}.usual}}/control"
[ -e "$there" ] || exit 1
case "$command" in quit*) kill "$(cat "$there")"; rm "$there";; esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calls of the program, a line each, and the commands it was given."""
    program, calls = tmp_path / "bin" / mps.CONTROL, tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(CONTROL.format(log=calls))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    for name in (mps.PIPES, mps.LOGS, mps.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return calls


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_it_runs_while_a_launch_does(log: Path) -> None:
    said: list[str] = []
    with mps.service(said.append) as overlapping:
        assert overlapping
        folder = Path(os.environ[mps.PIPES])
        assert os.environ[mps.LOGS] == str(folder)
        pid = int((folder / "control").read_text())
        assert alive(pid)
        assert json.loads((folder.parent / scratch.OWNER_FILE).read_text())["pid"] == os.getpid()
    assert not alive(pid)
    assert not folder.parent.exists()
    assert mps.PIPES not in os.environ
    assert said == []


def test_one_that_runs_already_is_used_and_left_alone(log: Path) -> None:
    usual = Path(f"{log}.usual")
    usual.mkdir()
    (usual / "control").write_text("1")
    with mps.service(print) as overlapping:
        assert overlapping
        assert mps.PIPES not in os.environ
    assert (usual / "control").exists()
    assert "-d" not in log.read_text()


def test_a_launch_goes_on_without_it(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    Path(f"{log}.refuses").touch()
    with mps.service(said.append) as overlapping:
        assert not overlapping
    assert said == [
        "trials that share a card take turns: NVIDIA's nvidia-cuda-mps-control does not start (no such luck)"
    ]
    monkeypatch.setenv(mps.VARIABLE, "0")
    with mps.service(said.append) as overlapping:
        assert not overlapping
    monkeypatch.setattr(mps, "find", lambda: None)
    monkeypatch.delenv(mps.VARIABLE)
    with mps.service(said.append) as overlapping:
        assert not overlapping
    assert len(said) == 1


def test_what_a_killed_launch_left_is_ended_by_the_next(log: Path) -> None:
    folder = scratch.make()
    owner = json.loads((folder / scratch.OWNER_FILE).read_text())
    (folder / scratch.OWNER_FILE).write_text(json.dumps(owner | {"begun": "1"}))  # its process is no more
    (folder / scratch.SERVICE).mkdir()
    environment = {**os.environ, mps.PIPES: str(folder / scratch.SERVICE)}
    subprocess.run([mps.find(), "-d"], env=environment, check=True)
    pid = int((folder / scratch.SERVICE / "control").read_text())
    with mps.service(print):
        assert not alive(pid)
        assert not folder.exists()


def test_more_trials_share_a_card_on_which_their_kernels_overlap() -> None:
    for overlapping, n in ((False, 1), (True, 8)):
        packer, some = Packer(1, 16), trials(12)
        packer.overlapping = overlapping
        packer.place(some[0])
        packer.learn(some[0].id, reading(4, 1.0))
        assert 1 + sum(packer.place(one) is not None for one in some[1:]) == n


@pytest.mark.parametrize(
    ("overlapping", "company", "failure", "error", "again"),
    [
        (True, True, Failure.ERROR, "AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        (True, False, Failure.ERROR, "AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        (False, True, Failure.ERROR, "AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        (True, True, Failure.ERROR, "ValueError: no", False),
        (False, True, Failure.OOM, "OutOfMemoryError: CUDA out of memory", True),
    ],
)
def test_a_trial_that_others_may_have_harmed_runs_again_alone(
    tmp_path: Path, overlapping: bool, company: bool, failure: Failure, error: str, again: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("runners.cards.card_name", lambda: "a card")
    some = plans.plan(seeds=[0, 1, 2]).members
    cards = Cards(Share(4, 1, 1, 1.0, packed=True), stores.make(tmp_path / "runs"))
    cards.begin(one.trial for one in some)
    cards.overlap(overlapping)
    queue = deque(some)
    first = cards.take(queue)
    assert first is not None
    assert cards._packer is not None
    cards._packer.learn(first.trial.id, reading(1, 0.1))
    if company:
        assert cards.take(queue) is not None
    why = cards.ended(Outcome(first.trial.id, 1, Status.FAILED, failure, error))
    assert (why is not None) == again
    queue.appendleft(first)
    taken = cards.take(queue)
    if again:
        assert taken is not None
        assert taken.trial.id != first.trial.id, "it waits for an empty card"
