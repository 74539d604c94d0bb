"""NVIDIA's Multi-Process Service (MPS): kernels of trials that share a card run side by side.

Without it, processes take turns on a card, and a trial of small kernels leaves most of it empty in its turn. Updates a
second in all on one H200, updates as CUDA graphs, bf16, MQAR (2 layers, d 64, T 64, batch 64, softmax):

    trials at once       1      4      8
    taking turns      1002   1017   1016
    side by side       931   2243   2965

A large model gains little (4 layers, d 512, T 1024: 1.1 times with two) and loses nothing.

The price: a kernel that fails for good, as one that reads memory that is not there, ends every process that shares the
card. So trials that ended by a CUDA error beside others are run again, each with a card to itself.

Source: NVIDIA, Multi-Process Service (docs.nvidia.com/deploy/mps). Not covered: Ray clusters, whose nodes' owner starts
the service there, and machines whose service somebody else runs: that one is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from runners import scratch

CONTROL = "nvidia-cuda-mps-control"
PLACES = (None, "/usr/local/nvidia/bin", "/usr/bin")
"""Where the program is: on the path, or beside nvidia-smi as containers mount it."""
VARIABLE = "MEMSWEEP_MPS"
"""Environment variable: 0 leaves trials to take turns."""
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_TIMEOUT_S = 20.0


@contextlib.contextmanager
def service(say: Callable[[str], None]) -> Iterator[bool]:
    """While it lasts, what is started is a client of the service: whether there is one. Never a reason to fail."""
    control = find()
    if control is None or os.environ.get(VARIABLE) == "0":
        yield False
        return
    if _ask(control, "get_server_list") is None:
        yield True  # somebody runs it already, and clients find it as this process did
        return
    folder, problem = scratch.make() / scratch.SERVICE, None
    folder.mkdir()
    before = {name: os.environ.get(name) for name in (PIPES, LOGS)}
    os.environ.update(dict.fromkeys(before, str(folder)))
    try:
        problem = _run([control, "-d"])
        if problem:
            say(f"trials that share a card take turns: NVIDIA's {CONTROL} does not start ({problem})")
        yield problem is None
    finally:
        if problem is None:
            _ask(control, "quit -t 1")
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder.parent, ignore_errors=True)


def find() -> str | None:
    """The program that starts and asks the service."""
    return next((found for place in PLACES if (found := shutil.which(CONTROL, path=place))), None)


def end_left(folder: Path) -> None:
    """End the service that a launch which died has left running with its pipes in `folder`."""
    control = find()
    if control is not None and folder.exists():
        _ask(control, "quit -t 1", {PIPES: str(folder), LOGS: str(folder)})


def _ask(control: str, command: str, variables: dict[str, str] | None = None) -> str | None:
    """What is wrong with asking the running service; None if it took the command."""
    return _run([control], command + "\n", variables)


def _run(line: list[str], given: str = "", variables: dict[str, str] | None = None) -> str | None:
    # What it says goes to a file: a service would hold a pipe open for as long as it lives.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            done = subprocess.run(
                line,
                input=given,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=said,
                timeout=_TIMEOUT_S,
                env={**os.environ, **(variables or {})},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return str(problem)
        said.seek(0)
        return None if done.returncode == 0 else said.read().strip() or f"exit code {done.returncode}"
