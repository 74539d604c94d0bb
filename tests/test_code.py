"""Our code on another machine: recognised wherever its packages lie, and told apart when it differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runners import code, stamp
from runners.stamp import DRIVER_VARIABLE, ROOMS

ROOT = Path(__file__).resolve().parent.parent
ASK = """
import json
from runners import code, stamp
print(json.dumps([code.here()["code"], stamp.fingerprint("hola", "mqar"), stamp.code("hola", "mqar")]))
code.check()
"""


def ask(folders: list[Path], variable: str = "") -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, folders))
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", DRIVER_VARIABLE: variable}
    line = [sys.executable, "-c", ASK]
    return subprocess.run(line, env=environment, cwd=folders[0], capture_output=True, text=True, check=False)


@pytest.fixture
def elsewhere(tmp_path: Path) -> list[Path]:
    """Each package in a folder of its own, as Ray unpacks them on a node."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / f"for-{room}" / room, ignore=shutil.ignore_patterns("__pycache__"))
    return [tmp_path / f"for-{room}" for room in ROOMS]


def test_the_same_code_has_the_same_names_everywhere(elsewhere: list[Path]) -> None:
    here = [code.here()["code"], stamp.fingerprint("hola", "mqar"), stamp.code("hola", "mqar")]
    ran = ask(elsewhere, json.dumps(code.here()))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == here
    assert {"mechanisms/hola.py", "runners/train.py", "runners/tasks/mqar.py"} <= here[2].keys()


def test_other_code_is_told_with_both(elsewhere: list[Path]) -> None:
    changed = elsewhere[ROOMS.index("mechanisms")] / "mechanisms" / "hola.py"
    changed.write_text(changed.read_text() + "# another day\n")
    ran = ask(elsewhere, json.dumps({"code": code.here()["code"], "memsweep": "2026.12.0", "commit": "0123456789"}))
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert "OtherCodeError: this node has memsweep" in last
    assert f"the driver has memsweep 2026.12.0 (code {code.here()['code']}, commit 01234567)" in last
    assert json.loads(ran.stdout)[0] in last
    assert ask(elsewhere).returncode == 0, "without a driver's word there is nothing to compare"


def test_a_stamp_on_a_node_names_the_driver_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRIVER_VARIABLE, json.dumps({"code": "c", "memsweep": "1.2.3", "commit": "abc+changed"}))
    import plans

    found = stamp.stamp(plans.trial(), "cpu")
    assert (found["memsweep"], found["commit"]) == ("1.2.3", "abc+changed")
