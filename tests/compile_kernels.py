"""Compiles for a Hopper card, without one, each kernel that calls of an op launch: a line of JSON for each.

    python tests/compile_kernels.py linear_attention '[{"K": 64, "V": 64, "dtype": "bfloat16", "decay": "token"}]'

Run by test_kernels_compile.py in a process of its own, as Triton's interpreter has to be off, and in the tests it is
on. The op runs on CPU tensors; each launch is compiled as Triton would for the card, and not run, so that what comes
back holds nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import (
    _delta_rule,
    _launch,
    _linear_walks,
    _log_linear_attention,
    _log_linear_call,
    cache_attention,
    delta_rule,
    linear_attention,
    log_linear_attention,
    ridge_solve,
    short_conv,
    slot_attention,
)

TRITON_RUN = JITFunction.run
NEWEST_DRIVER = 99_000
CASE = 0
"""The number of the case that is being compiled."""


class Hopper:
    """The part of a Triton driver that compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def narrow_offsets(ttir: str) -> list[str]:
    """Pointer offsets of 32 bits that do not come from constants alone: those overflow on a large tensor."""
    made, lines = {}, ttir.splitlines()
    for line in lines:
        if match := re.match(r"\s*(%[\w#:]+) = ([\w.]+)(.*)", line):
            made[match[1]] = match[2], match[3].split(" : ")[0]

    def constant(name: str) -> bool:
        op, operands = made.get(name, ("", ""))  # not made by a line: an argument, or a loop's variable
        if op in ("arith.constant", "tt.make_range"):
            return True
        names = re.findall(r"%[\w#]+", operands)
        return bool(names) and op not in ("tt.load", "tt.get_program_id") and all(map(constant, names))

    offsets = (re.search(r"tt\.addptr %[\w#]+, (%[\w#]+) .*(?:, i32|i32>) ?(?:loc.*)?$", line) for line in lines)
    return [match[0] for match in offsets if match and not constant(match[1])]


TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def told_by(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack, where what does not fit them is kept: as the assembler chose."""
    told = told_by("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return {"registers": int(found[1]), "stack": int(found[2])}


def unwritten(sass: str) -> list[str]:
    """Instructions that read a uniform register which no instruction before them, in the order of the code, wrote.

    ptxas 12.8 makes such code. It keeps to the order in which code stands, so a register that is written only further
    down, in a loop, would be named too: no assembler was seen to do that.
    """
    written, bad = {63}, []  # UR63 reads as zero
    for line in sass.splitlines():
        match = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)\s+(.*?) ;", line)
        if not match:
            continue
        name, operands = match[1], match[2].split(",")
        writes = re.match(r"U[A-Z]|R2UR|S2UR|REDUX|VOTEU", name) and re.match(r"\s*UR(\d+)", operands[0])
        read = re.findall(r"\bUR(\d+)", ",".join(operands[1:] if writes else operands))
        if name.startswith("HGMMA") and re.match(r"\s*R\d+", operands[1]):
            read = [str(int(register) + 2) for register in read]  # the left factor is in registers: no address of it
        if any(int(register) not in written for register in read):
            bad.append(match[0].strip())
        if writes:
            first = int(writes[1])
            written |= {first, first + 1} if ".64" in name or ".WIDE" in name else {first}
    return bad


def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
    """In the place of a launch."""
    made = TRITON_RUN(kernel, *args, grid=grid, warmup=True, **constants)
    told = {
        "case": CASE,
        "kernel": kernel.fn.__name__,
        "grid": list(grid),
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "narrow": narrow_offsets(made.asm["ttir"]),
        "wgmma": "wgmma" in made.asm["ptx"],
        "unwritten": unwritten(told_by("nvdisasm", "-c", made.asm["cubin"])),
        **resources(made.asm["cubin"]),
    }
    print(json.dumps(told), flush=True)
    return made


def draw(dtype: str, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), requires_grad=True)


def run_linear_attention(
    K: int,
    V: int,
    dtype: str,
    decay: str,
    normalize: bool = False,
    start: bool = False,
    T: int = 100,
    segments: int = 1,
) -> None:
    B, H, Hk = 1, 2, 1
    _linear_walks.n_segments = lambda *_: segments
    shape = {"none": None, "token": (B, T, H), "channel": (B, T, H, K)}[decay]
    state = (draw("float32", B, H, K, V), draw("float32", B, H, K)) if normalize else draw("float32", B, H, K, V)
    q, k, v = draw(dtype, B, T, Hk, K), draw(dtype, B, T, Hk, K), draw(dtype, B, T, H, V)
    o, end = linear_attention.linear_attention(
        q, k, v, None if shape is None else draw("float32", *shape),
        scale=0.5, normalize=normalize, initial_state=state if start else None, impl="triton",
    )  # fmt: skip
    (o.sum() + sum(x.sum() for x in (end if isinstance(end, tuple) else (end,)))).backward()


def run_delta_rule(
    K: int, V: int, dtype: str, gated: bool = True, apart: bool = False, segments: int = 1, packed: bool = False
) -> None:
    B, T, H, Hk = 1, 100, 2, 1
    _delta_rule.n_segments = lambda *_: segments
    q, a, b = (draw(dtype, B, T, Hk, K) for _ in range(3))
    beta, g = draw("float32", B, T, H), draw("float32", B, T, H) if gated else None
    o, S, _ = delta_rule.delta_rule(
        q, a, b if apart else None, draw(dtype, B, T, H, V), beta, g, scale=0.5, residual="norm", impl="triton",
        cu_seqlens=torch.tensor([0, 40, T]) if packed else None,
    )  # fmt: skip
    (o.sum() + S.sum()).backward()


def run_cache_attention(
    K: int, V: int, dtype: str, width: int = 64, block: int = 256, select: str = "top", start: bool = False
) -> None:
    B, T, H = 1, 600, 2
    q, k, v = draw(dtype, B, T, H, K), draw(dtype, B, T, H, K), draw(dtype, B, T, H, V)
    state = None
    if start:
        state = cache_attention.empty_state(
            B, H, K, V, width=width, block=block, device=q.device, dtype=getattr(torch, dtype)
        )
    o, _ = cache_attention.cache_attention(
        q, k, v, draw("float32", B, T, H), width=width, block=block, gain=draw("float32", K), sink=draw("float32", H),
        select=select, initial_state=state, impl="triton",
    )  # fmt: skip
    o.sum().backward()


def run_ridge_solve(K: int, dtype: str, unit: bool = True, segments: int = 1, packed: bool = False) -> None:
    B, T, H = 1, 100, 2
    _linear_walks.n_segments = lambda *_: segments
    alpha, M = ridge_solve.ridge_solve(
        draw(dtype, B, T, H, K), draw(dtype, B, T, H, K), draw("float32", H, K), unit=unit, impl="triton",
        cu_seqlens=torch.tensor([0, 40, T]) if packed else None,
    )  # fmt: skip
    (alpha.sum() + M.sum() if segments > 1 else alpha.sum()).backward()


def run_short_conv(D: int, W: int, dtype: str, silu: bool = True, start: bool = False) -> None:
    B, T = 2, 100
    y, last = short_conv.short_conv(
        draw(dtype, B, T, D), draw("float32", D, W), "silu" if silu else None,
        draw(dtype, B, W - 1, D) if start else None, impl="triton",
    )  # fmt: skip
    (y.sum() + last.sum() if start else y.sum()).backward()


def run_log_linear_attention(
    K: int, V: int, dtype: str, beta: bool = False, T: int = 150, C: int | None = None
) -> None:
    B, H, Hk = 1, 2, 1
    if C is not None:  # smaller tiles compile sooner
        _log_linear_attention.blocks = lambda *x: _log_linear_call.blocks(*x)._replace(C=C)
    o, _ = log_linear_attention.log_linear_attention(
        draw(dtype, B, T, Hk, K), draw(dtype, B, T, Hk, K), draw(dtype, B, T, H, V), draw("float32", B, T, H),
        draw("float32", B, T, H, 12), draw("float32", B, T, H) if beta else None, scale=0.5, impl="triton",
    )  # fmt: skip
    o.sum().backward()


def run_slot_attention(
    M: int,
    K: int,
    V: int,
    dtype: str,
    apart: bool = False,
    masked: bool = False,
    segments: int = 1,
    T: int = 100,
    backward: bool = True,
) -> None:
    B, H, Hk = 1, 2, 1
    _linear_walks.n_segments = lambda *_: segments
    q, k, v = draw(dtype, B, T, Hk, K), draw(dtype, B, T, Hk, K), draw(dtype, B, T, H, V)
    f, s = (draw("float32", B, T, H, M) for _ in range(2))
    o, (keys, values) = slot_attention.slot_attention(
        q, k, v, f, s if apart else None, scale=0.5, mask_empty=masked, impl="triton"
    )
    if backward:
        (o.sum() + keys.sum() + values.sum()).backward()


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.run = compile_only
    _launch._unfit = lambda *_: None  # CPU tensors will do: nothing runs
    print(json.dumps({"assembler": _launch.choose_assembler(NEWEST_DRIVER)}))
    torch.set_num_threads(1)
    run = globals()[f"run_{sys.argv[1]}"]
    for number, given in enumerate(json.loads(sys.argv[2])):
        CASE = number
        run(**given)
