"""What the documents promise: commands, options, files and specs that they name exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from sweeps import cli
from sweeps.plan import load

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "sweeps/SPEC.md", "dashboards/MLFLOW.md")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands() -> dict[str, set[str]]:
    """Every command of the command line with its options."""
    group = typer.main.get_command(cli.app)
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        options = {flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]}
        for sub in getattr(command, "commands", {}).values():
            options |= {flag for parameter in sub.params for flag in [*parameter.opts, *parameter.secondary_opts]}
        found[name] = options
    return found


def command_lines(document: str) -> list[str]:
    """Everything in code that starts with `sweep `, without its comment."""
    fenced = re.findall(r"```[a-z]*\n(.*?)```", text(document), re.DOTALL)
    outside = re.sub(r"```.*?```", "", text(document), flags=re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", outside)
    parts = [part.split("#")[0].strip() for line in lines for part in line.split("·")]
    return [part for part in parts if re.match(r"sweep [a-z]", part)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_options_named_exist(document: str) -> None:
    known = commands()
    shown = set()
    for line in command_lines(document):
        name = line.split()[1]
        shown.add(name)
        assert name in known, f"{document} names `{line}`"
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line):
            assert flag in known[name], f"{document}: `sweep {name}` has no {flag}"
    if document == "README.md":
        assert shown == set(known), "the README shows every command"


def test_the_readme_shows_a_spec_that_works(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", text("README.md"), re.DOTALL)
    assert blocks
    for index, block in enumerate(blocks):
        path = tmp_path / f"{index}.yaml"
        path.write_text(block, encoding="utf-8")
        assert load(str(path)).members


def test_make_targets_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text(document), re.MULTILINE):
            assert target in targets, f"{document} names `make {target}`"


def test_files_named_exist() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text(document)):
            assert (ROOT / document).parent.joinpath(link).exists(), f"{document} links to {link}"
    for room in re.findall(r"^([a-z]+)/ ", text("README.md"), re.MULTILINE):
        assert (ROOT / room).is_dir(), f"the README's tree names {room}/"


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_explains_itself(command: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "sweeps", command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "Usage:" in shown.stdout
    body = shown.stdout.split("Options:")[0].splitlines()
    assert any(line.strip() and "Usage:" not in line for line in body), "no word on what it does"


@pytest.mark.parametrize("path", sorted((ROOT / "mechanisms").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_mechanisms_say_what_they_compute(path: Path) -> None:
    """The order is a reader's: the idea, what is computed, whose it is, what it carries and costs, what it refuses."""
    doc = path.read_text(encoding="utf-8").split('"""')[1]
    places = [doc.find(f"\n{section}\n") for section in ("Recurrence", "Source", "State", "Cost", "Limits")]
    assert min(places) > 0, f"a section is missing in {path.name}"
    assert places == sorted(places)
    assert doc.strip().splitlines()[0].endswith((".", ":"))
