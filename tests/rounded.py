"""What a kernel's error is held against: the same arithmetic in torch, its products rounded as the kernel's are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FLOOR = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6}
"""An error that any kernel may have, by the dtype of its inputs; a gradient twice that."""


FACTORS = {
    torch.ops.aten.mm: (0, 1),
    torch.ops.aten.bmm: (0, 1),
    torch.ops.aten.addmm: (1, 2),
    torch.ops.aten.baddbmm: (1, 2),
    torch.ops.aten.baddbmm_: (1, 2),
}
"""Where a product's factors are among its arguments."""


class RoundedProducts(TorchDispatchMode):
    """Inside, matrix products take their factors rounded to `dtype`, and add in the factors' own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounded = list(args)
        for i in FACTORS.get(func.overloadpacket, ()):
            rounded[i] = args[i].to(self.dtype).to(args[i].dtype)
        return func(*rounded, **(kwargs or {}))


def error(found: Tensor, exact: Tensor) -> float:
    """RMS of the difference over the RMS of the exact; over 1e-30, if that is zero."""
    found, exact = found.double(), exact.double()
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-30))
