"""What computed a result: versions, device, commit, and a fingerprint of the sources that this trial used.

A stamp is told, never part of a trial's id. The fingerprint covers the files that the trial's settings reach by
imports, so a change in another mechanism leaves it as it is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners import corpus, documents, syntax
from runners.schema import Trial, digest

ROOMS = ("kernels", "mechanisms", "runners")
DRIVER_VARIABLE = "MEMSWEEP_DRIVER"
"""Environment variable of workers on a cluster, which have our code without its repository: what the driver knows of it
(see `runners/code.py`), in JSON."""
_HOME = Path(__file__).resolve().parent.parent


def stamp(trial: Trial, device: str, task: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The stamp of a trial that runs here on `device` ("cpu" or "cuda"), or of its evaluation on other settings `task`.

    `data` is there for a task that reads some: 16 hex digits over its bytes.
    """
    driver, task = driver_code(), task or trial.task
    return {
        "memsweep": driver["memsweep"] if driver else version("memsweep"),
        "commit": driver["commit"] if driver else commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
        "device": device_name(device),
        "dtype": (trial.train or {}).get("dtype", "fp32"),
        "fingerprint": with_data(fingerprint(*trial.uses), trial.task),
        **(
            {"data": (documents if documents.reads(task) else corpus).fingerprint(task)}
            if corpus.has_text(task)
            else {}
        ),
    }


def driver_code() -> dict[str, str | None]:
    """What the driver of this worker said of its code; empty where the worker shares the driver's own files."""
    return json.loads(os.environ.get(DRIVER_VARIABLE) or "{}")


def room(name: str) -> Path:
    """The folder of one of our packages. A cluster may unpack each into a place of its own."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {name!r}")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


@functools.cache
def version(distribution: str) -> str | None:
    from importlib import metadata  # takes longer to import than a small plan takes to make

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def commit() -> str | None:
    """The git commit of this code, "+changed" if tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        # A repository that merely contains an installed copy of us says nothing about our code.
        command = ["git", "-C", str(_HOME), *arguments]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, env=environment).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != _HOME:
            return None
        changed = "+changed" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
        return git("rev-parse", "HEAD").strip() + changed
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


@functools.cache
def fingerprint(mechanism: str, task: str, *others: str) -> str:
    """16 hex digits over the sources that training `mechanism`, and `others` in its layers, on `task` imports from our
    rooms."""
    found = _sources(mechanism, task, *others)
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode() + b"\0" + found[name].read_bytes() + b"\0")
    return total.hexdigest()[:16]


def with_data(fingerprint: str, task: Mapping[str, Any]) -> str:
    """`fingerprint` of the code, together with the hashes of the files that `task` names, if it names any."""
    data = corpus.hashes(task)
    return digest([fingerprint, data]) if data else fingerprint


@functools.cache
def code(mechanism: str, task: str, *others: str) -> dict[str, str]:
    """The files behind `fingerprint`, as `mechanisms/hola.py`, and 12 hex digits of each one's SHA-256."""
    found = _sources(mechanism, task, *others)
    names = {_named(module.split(".")[0], path): path for module, path in found.items()}
    return {name: hashlib.sha256(names[name].read_bytes()).hexdigest()[:12] for name in sorted(names)}


def _named(first: str, path: Path) -> str:
    """A source of the package `first` by its path in the repository, wherever that package lies here."""
    return f"{first}/{path.relative_to(room(first)).as_posix()}"


def _sources(mechanism: str, task: str, *others: str) -> dict[str, Path]:
    """Modules that training `mechanism` and `others` on `task` imports from our rooms, and their files."""
    found: dict[str, Path] = {}
    for start in (
        "runners.train",
        "runners.evaluate",
        "runners.model",
        *(f"mechanisms.{name}" for name in (mechanism, *others)),
        f"runners.tasks.{task}",
    ):
        _collect(start, found)
    return found


def _collect(module: str, found: dict[str, Path]) -> None:
    path = _source(module)
    if path is None or module in found:
        return
    found[module] = path
    for name in sorted(_imports(path)):
        _collect(name, found)


def _source(module: str) -> Path | None:
    first, *rest = module.split(".")
    if first not in ROOMS:
        return None
    stem = room(first).joinpath(*rest)
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Modules of our rooms that the file at `path` may import, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(syntax.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(name for name in names if name.split(".")[0] in ROOMS)
