"""What `sweep doctor` checks about the installation and the machine. Reads; changes nothing.

Each dependency is imported by itself, so that the report shows the true exception: an ImportError deep inside one
library is otherwise often told as "that library is not installed".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from runners.schema import Finding

ROOMS = ("sweeps", "dashboards", "runners", "mechanisms", "kernels")
DEPENDENCIES = {
    "altair": "altair",
    "datasets": "datasets",
    "jinja2": "jinja2",
    "mlflow": "mlflow",
    "numpy": "numpy",
    "optuna": "optuna",
    "pandas": "pandas",
    "ray.tune": "ray",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sqlalchemy": "sqlalchemy",
    "statsmodels": "statsmodels",
    "torch": "torch",
    "triton": "triton",
    "typer": "typer",
    "vl_convert": "vl-convert-python",
    "yaml": "pyyaml",
}
"""Module to import, and the distribution that brings it."""


def check() -> Iterator[Finding]:
    """Every finding about Python, this package, its dependencies and the machine, as they are made."""
    yield Finding("ok", f"Python {platform.python_version()} ({sys.executable}) on {platform.platform()}")
    yield from _rooms()
    # torch first, as in a worker: libraries that clash with those it brings then fail here too.
    for module in sorted(DEPENDENCIES, key=lambda name: name != "torch"):
        yield _dependency(module, DEPENDENCIES[module])
    yield from _devices()
    yield _kernels()
    yield _disk(Path.cwd())


def _rooms() -> Iterator[Finding]:
    """`kernels` and `sweeps` exist on the package index too: all rooms have to come from one folder."""
    home = Path(__file__).resolve().parent.parent
    for room in ROOMS:
        found = Path(importlib.import_module(room).__file__ or "").resolve()
        if home not in found.parents:
            yield Finding(
                "problem",
                f"`{room}` is imported from {found.parent}, not from {home}",
                f"another distribution brings a module of that name: `pip uninstall {room}`, or use a virtual "
                "environment of its own",
            )
    yield Finding("ok", f"memsweep {version()} in {home}")


def version() -> str:
    """The installed version, or the word `checkout` if it runs from a folder without an install."""
    try:
        return importlib.metadata.version("memsweep")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


def _dependency(module: str, distribution: str) -> Finding:
    try:
        importlib.import_module(module)
    except Exception as error:
        return Finding(
            "problem",
            f"`import {module}` raises {type(error).__name__}: {error}",
            f"pip install --force-reinstall -c constraints.txt {distribution}",
        )
    try:
        return Finding("ok", f"{distribution} {importlib.metadata.version(distribution)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding("ok", f"{distribution} (version unknown)")


def _devices() -> Iterator[Finding]:
    yield Finding("ok", f"{len(os.sched_getaffinity(0))} CPU cores for this process")
    try:
        import torch
    except Exception:
        return  # told above
    if not torch.cuda.is_available():
        yield Finding("note", "no CUDA card: trials run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{total / 2**30:.0f} GiB, {free / 2**30:.0f} of them free"
        yield Finding("ok", f"GPU {index}: {card.name}, {memory}, compute capability {card.major}.{card.minor}")
    yield Finding("ok", f"NVIDIA driver {_driver()}")
    yield Finding("ok", f"CUDA {torch.version.cuda}")


def _kernels() -> Finding:
    """Which form of the kernels `impl: auto` runs here, and what compiles it."""
    try:
        import torch
        import triton
    except Exception:
        return Finding("note", "kernels: the torch forms alone (Triton does not import)")
    what = f"Triton {triton.__version__}, assembler: {_assembler()}"
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes"):
        slow = "it runs them thousands of times slower, and bf16 wrongly"
        level = "problem" if torch.cuda.is_available() else "note"
        return Finding(level, f"kernels: TRITON_INTERPRET is set: {what}", f"{slow}: unset it but for tests")
    if not torch.cuda.is_available():
        return Finding("ok", f"kernels: the torch forms, without a card; {what}")
    from kernels import _launch

    unfit = _launch.triton_unfit(torch.empty(1, device="cuda"))
    if unfit:
        return Finding("note", f"kernels: the torch forms: an op {unfit}; {what}")
    chosen = _launch.choose_assembler(_launch.newest_cuda())
    return Finding("ok", f"kernels: compiled for the card, by ptxas {chosen}; {what}")


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel module's version, by its own word."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[0] if found else "of an unknown version"


def _assembler() -> str:
    """The ptxas that Triton calls: reports of wrong Hopper code name the one that its wheel carries."""
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    if chosen:
        return f"{chosen} {_release(Path(chosen))} (TRITON_PTXAS_PATH)"
    try:
        import triton
    except Exception:
        return "none (Triton does not import)"
    carried = sorted(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*"))
    shown = [f"{path.name} {_release(path)}" for path in carried]
    return ", ".join(shown) + " (in its wheel)" if shown else "none found"


def _release(ptxas: Path) -> str:
    """The version that an assembler tells: `12.8.93`."""
    try:
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "(does not run)"
    found = re.search(r"V(\d[\d.]*)", said)
    return found[1] if found else "(of an unknown version)"


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free at {folder}"
    return Finding("ok", text) if free > 2**30 else Finding("problem", text, "a sweep needs about 1 GiB: free some")
