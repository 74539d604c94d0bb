"""Which implementation of an op runs, and in which precision. Shared by every op file."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

IMPLS = ("auto", "reference", "chunked", "triton")

NO_KERNEL = "has no Triton kernel"

WIDEST = 256
"""Numbers in a head, at most, in a Triton kernel: a wider state does not fit a multiprocessor."""

F = TypeVar("F", bound=Callable[..., Any])


def resolve(impl: str, op: str, unfit: str | None = NO_KERNEL) -> str:
    """`impl` with "auto" replaced by what runs here. Raises ValueError for one that `op` does not have.

    `unfit`: why a Triton kernel cannot take these inputs (`triton_unfit`), None where it can.
    """
    if impl not in IMPLS:
        known = [name for name in IMPLS if name != "triton" or unfit != NO_KERNEL]
        raise ValueError(f"impl={impl!r}: {op} knows {', '.join(known)}")
    if impl == "triton" and unfit is not None:
        raise ValueError(f"impl='triton': {op} {unfit}; use 'auto' or 'chunked'")
    if impl == "auto":
        return "triton" if unfit is None and not interpreted() else "chunked"
    return impl


def triton_unfit(*tensors: Tensor | None, heads: tuple[int, ...] = ()) -> str | None:
    """Why a Triton kernel cannot take these tensors with heads this wide, to be read after the op's name; None: it can.

    Without a card kernels run in Triton's interpreter, if TRITON_INTERPRET is set: for tests, and in fp32 alone
    (its bf16 products are wrong without a word).
    """
    given = [x for x in tensors if x is not None]
    first = given[0]
    if wide := next((width for width in heads if width > WIDEST), None):
        return f"takes heads of at most {WIDEST}, not {wide}"
    allowed = (torch.float32,) if interpreted() else (torch.float32, torch.bfloat16, torch.float16)
    if odd := next((x.dtype for x in given if x.dtype not in allowed), None):
        return f"does not take {str(odd).removeprefix('torch.')} in its Triton kernel"
    if not _has_triton():
        return "needs Triton, which is not installed here"
    if interpreted():
        return None
    if first.device.type != "cuda":
        return f"needs tensors on a CUDA card for its Triton kernel, not on {first.device.type}"
    if _capability(first.device.index) < (8, 0):
        return "needs a card of compute capability 8.0 or more for its Triton kernel"
    return None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: as Triton itself does, by the variable."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(card: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(card)


def multiprocessors(x: Tensor) -> int:
    """How many multiprocessors the card of `x` has; in the interpreter, an H200's 132."""
    return _multiprocessors(x.device.index) if x.is_cuda else 132


@functools.cache
def _multiprocessors(card: int) -> int:
    return torch.cuda.get_device_properties(card).multi_processor_count


def padded(width: int) -> int:
    """The width of the tile that holds `width` numbers: a power of two, and what a product needs at least."""
    return max(16, 1 << (width - 1).bit_length())


def rows_contiguous(x: Tensor) -> Tensor:
    """`x`, copied only if the numbers of its last dimension do not lie side by side; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


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
