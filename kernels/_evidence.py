"""What an op did on this machine: which implementation ran, how far from the law, and whether twice the same."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import _launch

SERIAL = 256
"""Tokens up to which the law itself is run; longer, the chunked form in fp64, which tests hold to the law at 1e-10."""


def evidence(op: str, inputs: dict[str, Any], impl: str = "auto") -> dict[str, Any]:
    """Errors of outputs, states and gradients of op `op` on `inputs` against fp64, and whether a second run is equal.

    An error is the RMS of the difference over the RMS of the exact; it is taken for a random projection of the outputs,
    the same for both. `repeatable`: equal bit for bit, gradients too.
    """
    run: Callable[..., Any] = getattr(importlib.import_module(f"kernels.{op}"), op)
    tensors = [x for x in _tensors(inputs) if x.is_floating_point()]
    longest = max(x.shape[1] for x in tensors if x.dim() >= 3)
    law = "reference" if longest <= SERIAL else "chunked"
    names, given = _outputs_and_gradients(run, inputs, impl, lambda x: x)
    _, again = _outputs_and_gradients(run, inputs, impl, lambda x: x)
    _, exact = _outputs_and_gradients(run, inputs, law, lambda x: x.double())
    device = tensors[0].device
    return {
        "op": op,
        "impl": _chosen(op, impl, inputs),
        "law": law,
        "dtype": str(tensors[0].dtype).removeprefix("torch."),
        "shapes": {name: list(x.shape) for name, x in inputs.items() if isinstance(x, Tensor)},
        "errors": {name: _error(x, e) for name, x, e in zip(names, given, exact, strict=True)},
        "repeatable": all(torch.equal(x, y) for x, y in zip(given, again, strict=True)),
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "assembler": _assembler() if device.type == "cuda" else None,
    }


class Call(NamedTuple):
    """A call of an op as a mechanism made it; `kind` is the same for all that differ in numbers and rows alone."""

    op: str
    inputs: dict[str, Any]
    impl: str
    kind: str

    def evidence(self) -> dict[str, Any]:
        """`kernels.evidence` of the op on these very inputs."""
        return evidence(self.op, self.inputs, self.impl)


@contextmanager
def heard() -> Iterator[list[Call]]:
    """See `kernels.heard`."""
    found: dict[str, Call] = {}
    calls: list[Call] = []

    def listen(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = getattr(importlib.import_module(f"kernels.{op}"), op)
        given = inspect.signature(run).bind(*args, **kwargs).arguments
        impl = given.pop("impl", "auto")
        rows = len(next(_tensors(given)))
        shapes = {name: _mapped(x, lambda t: (t.device.type, t.dtype, t.shape[1:])) for name, x in given.items()}
        kind = f"{op} {impl} {shapes}"
        if kind not in found:
            apart = None if given.get("cu_seqlens") is not None else rows  # packed: one row holds all
            kept = {name: _mapped(x, lambda t: _first(t, apart)) for name, x in given.items()}
            found[kind] = Call(op, kept, impl, kind)
            calls.append(found[kind])

    before, _launch.listener = _launch.listener, listen
    try:
        yield calls
    finally:
        _launch.listener = before


def _first(x: Tensor, rows: int | None) -> Tensor:
    """A copy: of the first row alone, where `x` has `rows` of them (numbers per head or channel have none)."""
    is_batch = rows is not None and x.dim() >= 3 and len(x) == rows
    return (x[:1] if is_batch else x).detach().clone()


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [_mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _outputs_and_gradients(
    run: Callable[..., Any], inputs: dict[str, Any], impl: str, change: Callable[[Tensor], Tensor]
) -> tuple[list[str], list[Tensor]]:
    """Outputs and states, then the gradient to each floating input: their names, and what they are."""

    def leaf(x: Tensor) -> Tensor:
        return change(x.detach()).requires_grad_() if x.is_floating_point() else x

    leaves = {name: _mapped(x, leaf) for name, x in inputs.items()}
    outputs = [x for x in _tensors(run(**leaves, impl=impl)) if x.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    wanted = {
        name + (f".{i}" if isinstance(x, tuple) else ""): part
        for name, x in leaves.items()
        for i, part in enumerate(_tensors(x))
        if part.requires_grad
    }
    graded = [(x, w) for x, w in zip(outputs, weights, strict=True) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for x, _ in graded], list(wanted.values()), [w for _, w in graded], allow_unused=True, materialize_grads=True
    )
    names = [f"output.{i}" for i in range(len(outputs))] + [f"gradient.{name}" for name in wanted]
    return names, [*(x.detach() for x in outputs), *grads]


def _error(x: Tensor, exact: Tensor) -> float:
    x, exact = x.double(), exact.double()
    size = exact.square().mean().sqrt()
    return float((x - exact).square().mean().sqrt() / size) if size > 0 else float(x.abs().max())


def _chosen(op: str, impl: str, inputs: dict[str, Any]) -> str:
    """What "auto" stands for with these inputs: the kernel's own answer, by whether it launches."""
    if impl != "auto":
        return impl
    module = importlib.import_module(f"kernels.{op}")
    if hasattr(module, "unfit"):
        return _launch.resolve(impl, op, module.unfit(**inputs))
    floats = [x for x in _tensors(inputs) if x.is_floating_point()]
    has_kernel = importlib.util.find_spec(f"kernels._{op}_triton") is not None
    widths = tuple(x.shape[-1] for x in floats if x.dim() == 4)
    widest = getattr(importlib.import_module(f"kernels.{op}"), "WIDEST", _launch.WIDEST)
    unfit = _launch.triton_unfit(*floats, heads=widths, widest=widest) if has_kernel else _launch.NO_KERNEL
    return _launch.resolve(impl, op, unfit)


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def _assembler() -> str | None:
    """The version of the assembler that Triton uses on this card: a wrong one makes wrong kernels."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        major, minor = torch.cuda.get_device_capability()
        return str(get_ptxas(10 * major + minor).version)
    except (ImportError, AttributeError) as error:  # it moves between versions of Triton
        return f"not told: {error}"
