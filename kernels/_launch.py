"""Which implementation of an op runs, and in which precision. Shared by every op file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

IMPLS = ("auto", "reference", "chunked")
WITH_TRITON: tuple[str, ...] = ()
"""The ops that have a Triton kernel."""

F = TypeVar("F", bound=Callable[..., Any])


def resolve(impl: str, op: str) -> str:
    """`impl` with "auto" replaced by what runs here. Raises ValueError for one that `op` does not have."""
    if impl == "triton" and op not in WITH_TRITON:
        have = ", ".join(WITH_TRITON) or "none yet"
        raise ValueError(
            f"impl='triton': {op} has no Triton kernel (ops that have one: {have}); use 'auto' or 'chunked'"
        )
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r}: {op} knows {', '.join(IMPLS)}")
    return "chunked" if impl == "auto" else impl


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype of states, gates and sums: fp64 if any input is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def full_precision(op: F) -> F:
    """Runs `op` with autocast off: an op's own upcasts decide its precision, whatever region it is called from."""

    @functools.wraps(op)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(device.type, enabled=False):
            return op(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def check(op: str, name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError, naming the tensor and the first dimension that differs, unless shapes agree."""
    if given.shape == expected:
        return
    where = next((i for i, (a, b) in enumerate(zip(given.shape, expected, strict=False)) if a != b), None)
    rule = (
        f"dimension {where} should be {expected[where]}"
        if where is not None
        else f"it needs {len(expected)} dimensions"
    )
    raise ValueError(f"{op}: {name} has shape {tuple(given.shape)}, expected {tuple(expected)}: {rule}")
