"""Which implementation of an op runs, and in which precision. Shared by every op file."""

from __future__ import annotations

import ctypes
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

SOUND = (12, 9)
"""The oldest assembler (ptxas) of which no wrong code for Hopper cards is known here."""

F = TypeVar("F", bound=Callable[..., Any])


def resolve(impl: str, op: str, unfit: str | None = NO_KERNEL) -> str:
    """`impl` with "auto" replaced by what runs here. Raises ValueError for one that `op` does not have.

    `unfit`: why a Triton kernel cannot take these inputs (`triton_unfit`), None where it can. "auto" is "triton" on
    every card that can, and "chunked" elsewhere: in Triton's interpreter too, which is there for tests.
    """
    if impl not in IMPLS:
        known = [name for name in IMPLS if name != "triton" or unfit != NO_KERNEL]
        raise ValueError(f"impl={impl!r}: {op} knows {', '.join(known)}")
    if impl == "triton" and unfit is not None:
        raise ValueError(f"impl='triton': {op} {unfit}; use 'auto' or 'chunked'")
    if impl == "auto":
        return "triton" if unfit is None and not interpreted() else "chunked"
    return impl


def triton_unfit(*tensors: Tensor | None, heads: tuple[int, ...] = (), widest: int = WIDEST) -> str | None:
    """Why a Triton kernel cannot take these tensors with heads this wide, to be read after the op's name; None: it can.

    `widest`: numbers in a head, at most, that this op's kernel takes.

    Without a card kernels run in Triton's interpreter, if TRITON_INTERPRET is set: for tests, and in fp32 alone
    (its bf16 products are wrong without a word).
    """
    given = tuple(x.dtype for x in tensors if x is not None)
    device = next(x.device for x in tensors if x is not None)
    if wide := next((width for width in heads if width > widest), None):
        return f"takes heads of at most {widest}, not {wide}"
    return _unfit(given, device.type, device.index, interpreted())


@functools.cache
def _unfit(dtypes: tuple[torch.dtype, ...], device: str, card: int | None, interpreting: bool) -> str | None:
    allowed = (torch.float32,) if interpreting else (torch.float32, torch.bfloat16, torch.float16)
    if odd := next((dtype for dtype in dtypes if dtype not in allowed), None):
        return f"does not take {str(odd).removeprefix('torch.')} in its Triton kernel"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed here"
    if interpreting:
        return None
    if device != "cuda":
        return f"needs tensors on a CUDA card for its Triton kernel, not on {device}"
    major, _ = torch.cuda.get_device_capability(card)
    if major < 8:
        return "needs a card of compute capability 8.0 or more for its Triton kernel"
    assembler = choose_assembler(newest_cuda())
    if major == 9 and _release(assembler) < SOUND:
        return f"needs ptxas {'.'.join(map(str, SOUND))} or newer on this card for its Triton kernel, not {assembler}"
    return None


def newest_cuda() -> int:
    """The newest CUDA that this machine's driver runs, by CUDA's number: 13000 for 13.0; 0 without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


@functools.cache
def choose_assembler(driver: int) -> str:
    """Makes Triton assemble with the newer of the two that its wheel carries; returns the version it now uses.

    The default of Triton 3.6 and 3.7 on cards before Blackwell, ptxas 12.8, can read a register that nothing wrote:
    seen in the state update of linear attention, where it took the addresses of three quarters of an operand from
    one, and the result was wrong without a word. On an H200, 101 of 162 tests of the kernels failed with it (most
    after one of them had read memory that is not there), and none for that reason with the wheel's other one, 12.9.
    `driver` is the newest CUDA that the driver runs (`newest_cuda`): an assembler of a later major version stays
    unused. So does the choice, if TRITON_PTXAS_PATH makes another.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    ours, newer = knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", knobs.nvidia.ptxas)
    fits = int(newer.version.split(".")[0]) <= driver // 1000
    if os.environ.get("TRITON_PTXAS_PATH") or not fits or _release(newer.version) <= _release(ours.version):
        return str(ours.version)
    knobs.nvidia.ptxas = newer.path
    compiler.get_ptxas_version.cache_clear()  # part of the key under which compiled kernels are kept
    return str(newer.version)


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: as Triton itself does, by the variable."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def multiprocessors(x: Tensor) -> int:
    """How many multiprocessors the card of `x` has; in the interpreter, an H200's 132."""
    return _multiprocessors(x.device.index) if x.is_cuda else 132


@functools.cache
def _multiprocessors(card: int) -> int:
    return torch.cuda.get_device_properties(card).multi_processor_count


_BOUND: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, by all that Triton compiles for; and the compile-time values in the kernel's order."""


def launch(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any], **options: int) -> None:
    """`kernel` on a line of `programs`: run-time `args` in order, then compile-time `constants` by name.

    The first launch of its kind goes through Triton, which takes longer to look at so many arguments than a small
    kernel runs; the next ones go straight to what that compiled.
    """
    if programs == 0:
        return
    first = next(x for x in args if isinstance(x, Tensor))
    if first.is_cuda and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            launch(kernel, programs, args, constants, **options)
        return
    if not first.is_cuda:
        kernel[(programs,)](*args, **constants, **options)
        return
    seen = tuple((x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in args)
    key = (kernel, first.device.index, seen, *constants.values(), *options.values())
    bound = _BOUND.get(key)
    if bound is not None:
        compiled, values = bound
        compiled[(programs, 1, 1)](*args, *values)
        return
    compiled = kernel[(programs,)](*args, **constants, **options)
    if len(_BOUND) > 10_000:  # lengths that never come again
        _BOUND.clear()
    _BOUND[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def padded(width: int) -> int:
    """The width of the tile that holds `width` numbers: a power of two, and what a product needs at least."""
    return max(16, 1 << (width - 1).bit_length())


def rows_contiguous(x: Tensor) -> Tensor:
    """`x`, copied only if the numbers of its last dimension do not lie side by side; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype of states, gates and sums: fp64 if any input is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


listener: Callable[[str, tuple[Any, ...], dict[str, Any]], None] | None = None
"""Told of each call of an op, by its name and arguments, while `kernels.heard` listens."""


def full_precision(op: F) -> F:
    """Runs `op` with autocast off: an op's own upcasts decide its precision, whatever region it is called from."""

    @functools.wraps(op)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if listener is not None:
            listener(op.__name__, args, kwargs)
        device = next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not torch.is_autocast_enabled(device.type):
            return op(*args, **kwargs)
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
