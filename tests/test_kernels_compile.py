"""Each Triton kernel, compiled for a Hopper card on a machine without one: what the interpreter forgives shows here.

Not covered: whether what it compiles to is right. That takes a card (`-m gpu`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
SHARED = 232_448
"""Bytes of shared memory that a program may have on a Hopper card."""

CASES: dict[str, list[dict[str, Any]]] = {
    "linear_attention": [
        {"K": 64, "V": 64, "dtype": "bfloat16", "decay": "none", "segments": 2},
    ],
    "delta_rule": [
        {"K": 64, "V": 64, "dtype": "bfloat16", "segments": 2},
    ],
    "log_linear_attention": [{"K": 16, "V": 16, "dtype": "float16", "beta": True, "T": 600, "C": 16}],
    "slot_attention": [{"M": 16, "K": 16, "V": 16, "dtype": "float16", "T": 16, "backward": False}],
    "cache_attention": [
        {"K": 64, "V": 64, "dtype": "bfloat16", "width": 16, "block": 32},
    ],
    "ridge_solve": [{"K": 64, "dtype": "bfloat16"}],
    "short_conv": [
        {"D": 384, "W": 4, "dtype": "bfloat16"},
    ],
}
WIDE: dict[str, list[dict[str, Any]]] = {
    "linear_attention": [
        {"K": 33, "V": 16, "dtype": "float16", "decay": "channel", "start": True, "T": 16},
        {"K": 33, "V": 16, "dtype": "float32", "decay": "channel", "start": True},
        {"K": 33, "V": 16, "dtype": "bfloat16", "decay": "token", "normalize": True, "start": True},
        {"K": 64, "V": 64, "dtype": "float32", "decay": "token", "normalize": True, "start": True},
        {"K": 128, "V": 128, "dtype": "bfloat16", "decay": "token", "segments": 2},
        {"K": 256, "V": 256, "dtype": "bfloat16", "decay": "none", "start": True},
        {"K": 256, "V": 256, "dtype": "float32", "decay": "token", "normalize": True},
        {"K": 256, "V": 256, "dtype": "float32", "decay": "channel", "normalize": True},
        {"K": 128, "V": 128, "dtype": "float16", "decay": "channel", "start": True},
    ],
    "delta_rule": [
        {"K": 33, "V": 16, "dtype": "float32", "gated": False, "apart": True},
        {"K": 64, "V": 64, "dtype": "bfloat16", "apart": True, "packed": True},
        {"K": 128, "V": 128, "dtype": "bfloat16", "gated": False, "segments": 2},
        {"K": 128, "V": 128, "dtype": "float16", "apart": True},
        {"K": 256, "V": 256, "dtype": "bfloat16"},
        {"K": 256, "V": 256, "dtype": "float32", "gated": False},
    ],
    "log_linear_attention": [
        {"K": 64, "V": 64, "dtype": "bfloat16"},
        {"K": 64, "V": 64, "dtype": "bfloat16", "beta": True, "T": 2100},
        {"K": 128, "V": 128, "dtype": "bfloat16", "beta": True},
        {"K": 128, "V": 128, "dtype": "float16"},
        {"K": 128, "V": 64, "dtype": "float32", "beta": True},
        {"K": 128, "V": 256, "dtype": "float32"},
    ],
    "slot_attention": [
        {"M": 16, "K": 16, "V": 16, "dtype": "float32"},
        {"M": 64, "K": 64, "V": 64, "dtype": "bfloat16"},
        {"M": 64, "K": 64, "V": 64, "dtype": "float32", "apart": True, "segments": 2},
        {"M": 64, "K": 128, "V": 128, "dtype": "bfloat16", "masked": True},
        {"M": 256, "K": 64, "V": 64, "dtype": "bfloat16", "segments": 2},
        {"M": 512, "K": 128, "V": 128, "dtype": "bfloat16"},
        {"M": 512, "K": 256, "V": 256, "dtype": "float32"},
        {"M": 512, "K": 128, "V": 128, "dtype": "float16"},
    ],
    "cache_attention": [
        {"K": 64, "V": 64, "dtype": "bfloat16"},
        {"K": 128, "V": 128, "dtype": "bfloat16"},
        {"K": 128, "V": 64, "dtype": "float16", "width": 256, "block": 300, "start": True},
        {"K": 33, "V": 16, "dtype": "float32", "width": 7, "block": 12, "select": "recent", "start": True},
        {"K": 128, "V": 128, "dtype": "float32", "width": 0, "select": "none"},
        {"K": 256, "V": 256, "dtype": "bfloat16", "start": True},
        {"K": 256, "V": 256, "dtype": "float32"},
    ],
    "ridge_solve": [
        {"K": 64, "dtype": "float32", "segments": 2},
        {"K": 9, "dtype": "float32", "packed": True},
        {"K": 128, "dtype": "float32"},
        {"K": 128, "dtype": "bfloat16", "unit": False, "segments": 2},
        {"K": 33, "dtype": "float16", "packed": True},
    ],
    "short_conv": [
        {"D": 33, "W": 8, "dtype": "float32", "start": True},
        {"D": 3072, "W": 8, "dtype": "bfloat16", "start": True},
        {"D": 128, "W": 1, "dtype": "float16", "silu": False, "start": True},
    ],
}
"""Minutes of compiling: run with MEMSWEEP_WIDE=1, after a change to a kernel."""


def compiled(op: str, cases: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """What each case compiled to, a kernel a row, by the case's number. One process for all: it takes long to start."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # another Triton, by hand
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    script = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), op, json.dumps(cases)]
    ran = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assembler, *kernels = (json.loads(line) for line in ran.stdout.splitlines())
    print(f"ptxas {assembler['assembler']}")
    return {number: [row for row in kernels if row["case"] == number] for number in range(len(cases))}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("cases", [CASES, pytest.param(WIDE, marks=pytest.mark.wide)], ids=["usual", "wide"])
def test_compiles_for_a_hopper_card(op: str, cases: dict[str, list[dict[str, Any]]]) -> None:
    for number, kernels in compiled(op, cases[op]).items():
        case = cases[op][number]
        assert len(kernels) >= 2, f"{case}: a forward and a backward launch at least"
        for made in kernels:
            where = f"{case}: {made['kernel']}"
            print(f"{where}: {made['registers']} registers, {made['stack']} bytes of stack, {made['shared']} shared")
            assert made["shared"] <= SHARED, where
            assert not made["narrow"], f"{where}: offsets of 32 bits: {made['narrow']}"
            assert not made["unwritten"], f"{where} reads registers that nothing wrote: {made['unwritten']}"
            assert len(made["grid"]) == 1, "the second and third dimension of a grid end at 65,535"
            assert op != "short_conv" or made["stack"] == 0, f"{where} keeps tokens in memory, not in registers"
        if case["dtype"] == "bfloat16" and op != "short_conv":  # which multiplies no matrices
            assert any(made["wgmma"] for made in kernels), f"{case}: the card's own matrix instructions"


def test_the_checks_above_can_fail() -> None:
    """A pointer's offset made of a program's number in 32 bits; a register that is read before it is written."""
    lines = """
    %pid = tt.get_program_id x : i32
    %c = arith.constant 64 : i32
    %range = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>
    %row = arith.muli %pid, %c : i32
    %at = tt.addptr %x, %row : !tt.ptr<f32>, i32
    %fixed = tt.addptr %base, %range : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %wide = arith.extsi %row : i32 to i64
    %far = tt.addptr %x, %wide : !tt.ptr<f32>, i64
    """
    sass = """
    /*1590*/    USHF.R.U32.HI UR36, URZ, 0x4, UR49 ;
    /*16d0*/    UIADD3 UR58, UP0, UR58, 0x20, URZ ;
    /*16e0*/    UIADD3.64 UR56, UR36, 0x7e, URZ ;
    /*16f0*/    HGMMA.64x16x16.F32.BF16 R64, gdesc[UR56].tnspA.tnspB, R64 ;
    """
    script = """
import sys; sys.path.insert(0, "tests")
from compile_kernels import narrow_offsets, unwritten
print(len(narrow_offsets(sys.argv[1])), len(unwritten(sys.argv[2])))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", script, lines, sass], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert ran.stdout.split() == ["1", "2"], ran.stderr  # UR49 and UR58
