"""CONTRIBUTING.md adds a mechanism from its first line to a result: each step of it works as it stands there.

Not covered here: a launch of it in a process of its own, and on Ray.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_mechanisms as conformance

import mechanisms
from runners.schema import Exit
from runners.store import Store
from sweeps import catalog, cli

ROOT = Path(__file__).resolve().parent.parent
NAME = "gated_average"


def block(language: str) -> str:
    """The one block of `language` in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of our packages, with the file and the spec of CONTRIBUTING.md saved where it says."""
    folder = tmp_path_factory.mktemp("checkout")
    for room in ("sweeps", "dashboards", "runners", "mechanisms", "kernels"):
        shutil.copytree(ROOT / room, folder / room)  # with its bytecode: less to compile
    (folder / "mechanisms" / f"{NAME}.py").write_text(block("python"), encoding="utf-8")
    (folder / "average.yaml").write_text(block("yaml"), encoding="utf-8")
    return folder


@pytest.fixture
def moved_in(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process has its mechanisms in `checkout`: imports that take seconds are done here already."""
    rooms = [str(checkout / "mechanisms")]
    monkeypatch.setattr(mechanisms, "__file__", f"{rooms[0]}/__init__.py")
    monkeypatch.setattr(mechanisms, "__path__", rooms)
    monkeypatch.setattr(mechanisms.__spec__, "submodule_search_locations", rooms)
    monkeypatch.setattr(catalog, "__file__", str(checkout / "sweeps" / "catalog.py"))
    monkeypatch.chdir(checkout)
    yield checkout
    sys.modules.pop(f"mechanisms.{NAME}", None)
    vars(mechanisms).pop(NAME, None)


def test_it_is_short() -> None:
    assert len(block("python").splitlines()) < 60


def test_the_command_line_finds_it(checkout: Path) -> None:
    def sweep(*argv: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "sweeps", *argv]
        return subprocess.run(line, cwd=checkout, env={"PYTHONPATH": str(checkout)}, capture_output=True, text=True)

    listed = sweep("ls", "mechanisms").stdout
    assert f"  {NAME} " in listed
    assert "running mean of its values" in listed
    valid = sweep("validate", "average.yaml")
    assert valid.returncode == 0, valid.stderr
    assert "1 trial" in valid.stdout
    (checkout / "wrong.yaml").write_text(block("yaml").replace("a_max: 0.5", "a_mx: 0.5"), encoding="utf-8")
    wrong = sweep("validate", "wrong.yaml")
    assert wrong.returncode == Exit.USAGE
    assert re.search(r"wrong\.yaml:7:\d+: .*a_mx.*did you mean .?a_max", wrong.stderr), wrong.stderr


def test_a_spec_trains_it(
    moved_in: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["launch", "average.yaml", "--executor", "inline", "--store", str(store.root), "--no-report"]
    monkeypatch.setattr(sys, "argv", ["sweep", *argv])
    assert cli.main() == 0
    assert "Now: 1 complete" in capsys.readouterr().out
    (result,) = store.root.glob("trials/*/result.json")
    assert '"step": 2' in result.read_text(encoding="utf-8")


def test_the_tests_of_every_mechanism_pass(moved_in: Path) -> None:
    assert NAME in mechanisms.names()
    conformance.test_the_file_says_what_it_is(NAME)
    conformance.test_half_precision_keeps_gates_and_states_in_single(NAME)
    for test in (
        conformance.test_chunked_equals_the_law,
        conformance.test_no_token_reads_the_future_and_every_token_reads_the_past,
        conformance.test_gradients_are_finite_and_reach_every_parameter,
        conformance.test_same_seed_same_output,
    ):
        test(NAME, {})
    conformance.test_prefill_and_decode_are_the_whole(NAME, {}, short_conv=True)
    conformance.test_state_counted_is_state_stated(NAME, {}, short_conv=True)
