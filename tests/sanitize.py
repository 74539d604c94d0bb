"""Every kernel on small shapes, forward and backward, for NVIDIA's compute-sanitizer; not a test that pytest collects.

    export PYTHONPATH=.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py [OP ...]
    compute-sanitizer --tool racecheck --racecheck-report all python tests/sanitize.py [OP ...]

Without PyTorch's cache each tensor is an allocation of its own, so that reading one number past it is seen. Says how
many calls ran; the sanitizer's summary is the verdict.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch

MOST = int(os.environ.get("MEMSWEEP_SANITIZE_CASES", "6"))
"""Cases an op: a sanitizer slows each kernel a hundred times and more."""


def inputs(module: Any, case: Any) -> dict[str, Any]:
    """What the op's tests draw for a case, in bf16."""
    seed = [0] if "seed" in inspect.signature(module.draw).parameters else []
    return module.draw(case, torch.bfloat16, *seed)


def main(ops: list[str]) -> None:
    for op in ops:
        module = importlib.import_module(f"test_{op}_triton")
        step = max(1, len(module.CASES) // MOST)
        for case in module.CASES[::step]:
            module.run(inputs(module, case), "triton")
        torch.cuda.synchronize()
        print(f"{op}: {len(module.CASES[::step])} calls and their gradients", flush=True)


if __name__ == "__main__":
    here = Path(__file__).parent.glob("test_*_triton.py")
    found = sorted(path.stem.removeprefix("test_").removesuffix("_triton") for path in here)
    main(sys.argv[1:] or found)
