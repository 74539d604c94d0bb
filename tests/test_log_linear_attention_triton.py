"""Log-linear attention's Triton kernels against the law in fp64: values, states, every gradient.

Without a card they run in Triton's interpreter, in fp32; with one, in each dtype. How near is near: 1.5 times the error
that the chunked torch form makes with its products rounded as the kernel's are, or a small floor. Scratch and outputs
start as NaN. Not covered here: speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from rounded import FLOOR, RoundedProducts, error
from torch import Tensor

pytest.importorskip("triton")

from kernels import _log_linear_attention, _log_linear_call
from kernels.log_linear_attention import log_linear_attention, n_levels

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"


class Case(NamedTuple):
    T: int
    K: int
    V: int
    options: str = ""
    """beta, hard (some of g -1e3 and -inf), grouped, few or many (levels), transposed or expanded (in memory)."""
    C: int | None = None
    """Tokens in a chunk; None: as chosen."""
    span: int | None = None
    """Log2 of the chunks whose readings a program sums; None: as chosen."""

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "+") for x in self if x)


CASES = [
    Case(1, 16, 16),
    Case(17, 24, 40, "beta hard expanded", C=16),
    Case(33, 16, 16, "grouped few transposed", C=16),
    Case(65, 33, 20, "hard"),
    Case(65, 20, 33, "beta"),
    Case(65, 16, 16, "beta few", C=16, span=0),
    Case(70, 16, 16, "many", C=16, span=0),
]
WIDE = [
    Case(65, 20, 33, "beta grouped"),
    Case(100, 16, 16, "many", C=16, span=1),
    Case(1, 16, 16, "beta"),
    Case(2, 8, 24, "beta grouped"),
    Case(17, 24, 40, "hard", C=16),
    Case(33, 16, 16, "beta many transposed", C=16),
    Case(64, 40, 256, "expanded"),
    Case(63, 40, 256, "beta"),
    Case(100, 128, 128, "beta"),
    Case(129, 128, 64, "grouped"),
    Case(150, 16, 24, "beta hard", C=16, span=1),
    Case(150, 16, 80, "many", C=16, span=0),
    Case(257, 64, 64, "beta hard grouped"),
    Case(257, 64, 64, "hard expanded"),
    Case(500, 16, 16, "beta", C=16, span=2),
    Case(500, 16, 16, "few", C=16, span=2),
]
LONG = [
    Case(2049, 64, 64, "beta hard"),
    Case(2049, 128, 64, "hard grouped"),
    Case(5000, 128, 128, "beta grouped", span=1),
    Case(5000, 64, 128, "few", span=1),
]
"""For a card."""


def laid(x: Tensor, options: str) -> Tensor:
    """The same numbers, lying in memory in another way."""
    if "transposed" in options:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if "expanded" in options:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]  # the last stride is 2
    return x


def draw(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    T, K, V, options = case[:4]
    generator = torch.Generator().manual_seed(T)
    B, H = (2 if T < 16 else 1), (2 if CARD or "grouped" in options else 1)
    Hk = 1 if "grouped" in options else H
    L = 3 if "few" in options else n_levels(T) + 2 * ("many" in options)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    g = -randn(B, T, H).abs() * 0.1
    if "hard" in options:
        g[torch.rand(g.shape, generator=generator) < 0.05] = -1e3
        g[torch.rand(g.shape, generator=generator) < 0.03] = -torch.inf
    beta = (randn(B, T, H).sigmoid() * 1.4 - 0.2).clamp(0, 1) if "beta" in options else None  # some 0, some 1
    k = torch.nn.functional.normalize(randn(B, T, Hk, K), dim=-1)
    half = {"q": randn(B, T, Hk, K), "k": k, "v": randn(B, T, H, V)}
    inputs = {name: laid(x.to(DEVICE, dtype), options) for name, x in half.items()}
    for name, x in {"g": g, "lam": randn(B, T, H, L).abs(), "beta": beta}.items():
        inputs[name] = None if x is None else x.to(DEVICE)
    return {**inputs, "scale": 0.37}


def run(inputs: dict[str, Any], impl: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """o, S, and the gradients of a random projection of them, to every tensor given."""
    leaves = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            leaves[name] = (x if dtype is None else x.to(dtype)).detach().requires_grad_()
    o, (S, length) = log_linear_attention(**leaves, impl=impl)
    assert length.tolist() == [o.shape[1]] * len(o)
    generator = torch.Generator().manual_seed(1)
    # One weight for all tokens: the gradient that arrives has a stride of zero.
    weights = [torch.randn(x.shape[-1], generator=generator).to(x.device, x.dtype).expand(x.shape) for x in (o, S)]
    wanted = [x for x in leaves.values() if isinstance(x, Tensor)]
    return [o.detach(), S.detach(), *torch.autograd.grad([o, S], wanted, weights)]


def assert_keeps_the_law(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    inputs = draw(case, dtype)
    found = run(inputs, "triton")
    exact = run(inputs, "chunked", torch.float64)
    with RoundedProducts(dtype):
        rounded = run(inputs, "chunked")
    for i, (x, y, e) in enumerate(zip(found, rounded, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        if not e.any():  # the gradient of the only token's gate: what follows is rounding
            assert x.abs().max() <= 20 * FLOOR[dtype]
            continue
        allowed = max(1.5 * error(y, e), FLOOR[dtype] * (1 if i < 2 else 2))
        assert error(x, e) <= allowed, f"tensor {i} of {len(exact)}: {error(x, e):.1e}, allowed {allowed:.1e}"
    return inputs, found


@pytest.fixture(autouse=True)
def interpreted_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a kernel calls finds Triton's language as the kernel's launch has changed it: not again here."""
    from triton.runtime.interpreter import InterpretedFunction

    called = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.fn.__module__.startswith("kernels.")
        return self.rewrite()(*args, **kwargs) if ours else called(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiles as a case says, and NaN wherever nobody wrote."""
    blocks = _log_linear_attention.blocks

    def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=like.device)

    def fix(case: Case) -> None:
        chosen = {name: x for name, x in (("C", case.C), ("span", case.span)) if x is not None}
        monkeypatch.setattr(_log_linear_attention, "blocks", lambda *x: blocks(*x)._replace(**chosen))

    monkeypatch.setattr(_log_linear_call, "scratch", scratch)
    return fix


@pytest.mark.skipif(CARD, reason="a card is here: the same cases run on it")
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)], ids=str)
def test_interpreted_kernels_keep_the_law(case: Case, fixed: Any) -> None:
    fixed(case)
    assert_keeps_the_law(case, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOOR, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", [*CASES, *WIDE, *LONG], ids=str)
def test_kernels_on_the_card_keep_the_law(case: Case, dtype: torch.dtype, fixed: Any) -> None:
    fixed(case)
    inputs, first = assert_keeps_the_law(case, dtype)
    for _ in range(9):
        assert all(torch.equal(x, y) for x, y in zip(first, run(inputs, "triton"), strict=True)), "not the same twice"


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG[:2], ids=str)
def test_a_call_is_captured_in_a_graph_and_waits_for_nothing(case: Case) -> None:
    inputs = draw(case, torch.bfloat16)
    eager = run(inputs, "triton")
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}

    def call() -> list[Tensor]:
        o, (S, _) = log_linear_attention(**{**inputs, **leaves}, impl="triton")
        return [o, S, *torch.autograd.grad([o, S], list(leaves.values()), [torch.ones_like(o), torch.ones_like(S)])]

    stream = torch.cuda.Stream()  # autograd stays on the stream on which it first saw a leaf: that of the capture
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            once = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(once, captured, strict=True))
    assert torch.equal(eager[0], once[0])


@pytest.mark.parametrize("reads", ["o", "S"])
def test_a_loss_may_read_either_output_alone(reads: str, fixed: Any) -> None:
    case = Case(17, 16, 16, "beta" if reads == "S" else "", C=16)
    fixed(case)
    inputs = draw(case, torch.float32)
    found = []
    for impl in ("triton", "chunked"):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
        o, (S, _) = log_linear_attention(**{**inputs, **leaves}, impl=impl)
        loss = (o if reads == "o" else S).square().sum()
        found.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))
    for x, y in zip(*found, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_wide_keys_stay_with_the_torch_form() -> None:
    inputs = draw(Case(2, 130, 16), torch.float32)
    with pytest.raises(ValueError, match="takes keys of at most 128 in its Triton kernels, not 130"):
        log_linear_attention(**inputs, impl="triton")
    assert torch.equal(log_linear_attention(**inputs)[0], log_linear_attention(**inputs, impl="chunked")[0])


def test_a_call_that_continues_goes_token_by_token() -> None:
    inputs = draw(Case(5, 16, 16, "beta"), torch.float32)
    _, state = log_linear_attention(**inputs, impl="triton")
    o, (S, length) = log_linear_attention(**inputs, initial_state=state, impl="triton")
    o_law, (S_law, _) = log_linear_attention(**inputs, initial_state=state, impl="reference")
    assert torch.equal(o, o_law)
    assert torch.equal(S, S_law)
    assert length.tolist() == [10, 10]
