"""The delta rule's Triton kernels against the law in fp64: values, states, every gradient.

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

from kernels import _delta_rule
from kernels.delta_rule import delta_rule

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
LENGTHS = (0, 1, 0, 17, 1, 33, 2)
"""Of packed sequences; one more has what is left, and one behind it nothing."""


class Case(NamedTuple):
    T: int
    K: int
    V: int
    options: str = ""
    """beta, g or hard (some of it -1e3 and -inf), apart (b is not a), start, norm or full, grouped, transposed or
    expanded (in memory), packed."""
    C: int | None = None
    """Tokens in a chunk; None: as chosen."""
    segments: int | None = None

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "+") for x in self if x)


CASES = [
    Case(1, 16, 16, "beta g start full"),
    Case(2, 8, 24, "apart grouped"),
    Case(7, 33, 64, "beta start norm"),
    Case(15, 64, 33, "hard apart transposed"),
    Case(16, 64, 64, "beta grouped full"),
    Case(17, 24, 40, "beta hard apart start expanded", C=16),
    Case(33, 66, 65, "g norm", C=16),
    Case(33, 16, 16, "beta apart start transposed", C=16),
    Case(63, 16, 80, "beta g full"),
    Case(64, 64, 64, "beta start"),
    Case(65, 64, 64, "beta hard grouped norm"),
    Case(65, 100, 16, "g apart start expanded"),
    Case(65, 16, 128, "beta hard start full", C=32, segments=2),
    Case(80, 16, 24, "beta apart start norm transposed", C=16, segments=3),
    Case(100, 64, 16, "g", C=32, segments=2),
    Case(129, 16, 16, "beta hard apart start"),
    Case(65, 128, 64, "beta g apart start norm"),
    Case(64, 128, 128, "beta transposed", C=32, segments=2),
    Case(33, 256, 130, "apart full"),
    Case(70, 16, 24, "beta g apart start full packed", C=16),
    Case(90, 16, 40, "beta grouped norm packed", C=16, segments=2),
]
LONG = [
    Case(257, 64, 64, "beta"),
    Case(20, 200, 256, "beta g start", C=16),
    Case(257, 256, 256, "beta hard apart start grouped norm"),
    Case(1000, 128, 128, "beta g start transposed", segments=4),
    Case(1000, 128, 64, "beta apart expanded full", segments=2),
    Case(5000, 64, 128, "beta g norm"),
    Case(5000, 64, 64, "beta hard apart start full packed"),
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
    packed = "packed" in options
    B, H = (1 if packed or T > 32 else 2), (2 if CARD or "grouped" in options or T < 32 else 1)
    Hk = 1 if "grouped" in options else H
    ends = torch.tensor((0, *LENGTHS, T - sum(LENGTHS), 0)).cumsum(0) if packed else None

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def unit(*size: int) -> Tensor:
        return torch.nn.functional.normalize(randn(*size), dim=-1)

    g = -randn(B, T, H).abs() * 0.5 if "g" in options.split() or "hard" in options else None
    if g is not None and "hard" in options:
        g[torch.rand(g.shape, generator=generator) < 0.1] = -1e3
        g[torch.rand(g.shape, generator=generator) < 0.05] = -torch.inf
    beta = (randn(B, T, H).sigmoid() * 1.4 - 0.2).clamp(0, 1) if "beta" in options else None  # some 0, some 1
    b = unit(B, T, Hk, K) if "apart" in options else None
    start = randn(B if ends is None else len(ends) - 1, H, K, V) if "start" in options else None
    half = {"q": randn(B, T, Hk, K), "a": unit(B, T, Hk, K), "b": b, "v": randn(B, T, H, V)}
    inputs = {name: None if x is None else laid(x.to(DEVICE, dtype), options) for name, x in half.items()}
    for name, x in {"beta": beta, "g": g, "initial_state": start, "cu_seqlens": ends}.items():
        inputs[name] = None if x is None else x.to(DEVICE)
    residual = next((x for x in ("norm", "full") if x in options), None)
    return {**inputs, "scale": 0.37, "residual": residual}


def run(inputs: dict[str, Any], impl: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """o, the state, the residual, and the gradients of a random projection of them, to every tensor given."""
    leaves = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            leaves[name] = (x if dtype is None else x.to(dtype)).detach().requires_grad_()
    outputs = [x for x in delta_rule(**leaves, impl=impl) if x is not None]
    into = [x for x in outputs if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    # One weight for all tokens: the gradient that arrives has a stride of zero.
    weights = [torch.randn(x.shape[-1], generator=generator).to(x.device, x.dtype).expand(x.shape) for x in into]
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(into, wanted, weights)]


def assert_keeps_the_law(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    inputs = draw(case, dtype)
    found = run(inputs, "triton")
    exact = run(inputs, "chunked", torch.float64)
    with RoundedProducts(dtype):
        rounded = run(inputs, "chunked")
    n_values = 2 + (inputs["residual"] is not None)
    for i, (x, y, e) in enumerate(zip(found, rounded, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        allowed = max(1.5 * error(y, e), FLOOR[dtype] * (1 if i < n_values else 2))
        assert error(x, e) <= allowed, f"tensor {i} of {len(exact)}: {error(x, e):.1e}, allowed {allowed:.1e}"
    return inputs, found


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiles and segments as a case says, and NaN wherever nobody wrote."""
    blocks = _delta_rule.blocks

    def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=like.device)

    def fix(case: Case) -> None:
        if case.C is not None:
            monkeypatch.setattr(_delta_rule, "blocks", lambda *x: blocks(*x)._replace(C=case.C))
        if case.segments is not None:
            monkeypatch.setattr(_delta_rule, "n_segments", lambda *_: case.segments)

    monkeypatch.setattr(_delta_rule, "_scratch", scratch)
    return fix


@pytest.mark.skipif(CARD, reason="a card is here: the same cases run on it")
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")  # chunks nobody reads
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernels_keep_the_law(case: Case, fixed: Any) -> None:
    fixed(case)
    assert_keeps_the_law(case, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOOR, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_kernels_on_the_card_keep_the_law(case: Case, dtype: torch.dtype, fixed: Any) -> None:
    fixed(case)
    inputs, first = assert_keeps_the_law(case, dtype)
    for _ in range(9):
        assert all(torch.equal(x, y) for x, y in zip(first, run(inputs, "triton"), strict=True)), "not the same twice"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LONG[0], LONG[-1]], ids=str)
def test_a_call_is_captured_in_a_graph_and_waits_for_nothing(case: Case) -> None:
    inputs = draw(case, torch.bfloat16)
    eager = run(inputs, "triton")
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items() if isinstance(x, Tensor)
    }
    wanted = [x for x in leaves.values() if x.requires_grad]

    def call() -> list[Tensor]:
        o, S, _ = delta_rule(**{**inputs, **leaves}, impl="triton")
        return [o, S, *torch.autograd.grad([o, S], wanted, [torch.ones_like(o), torch.ones_like(S)])]

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


@pytest.mark.parametrize("reads", ["o", "S", "residual"])
def test_a_loss_may_read_any_output_alone(reads: str, fixed: Any) -> None:
    case = Case(33, 16, 16, "beta g apart start full", C=16)
    fixed(case)
    inputs = draw(case, torch.float32)
    found = []
    for impl in ("triton", "chunked"):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
        outputs = delta_rule(**{**inputs, **leaves}, impl=impl)
        loss = outputs[("o", "S", "residual").index(reads)].square().sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        found.append(grads)
    for x, y in zip(*found, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_equal_keys_and_full_writes_keep_the_last_value() -> None:
    """The hardest system to solve: L is all ones below the diagonal, and its powers reach 1e18."""
    T, K = 64, 16
    key = torch.nn.functional.normalize(torch.ones(1, T, 1, K, device=DEVICE), dim=-1)
    v = torch.randn(1, T, 1, K, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    o, _, _ = delta_rule(key, key, None, v, torch.ones(1, T, 1, device=DEVICE), scale=1.0, impl="triton")
    assert (o - v).abs().max().item() < 1e-5


def test_segments_fill_the_card_and_no_more() -> None:
    n = _delta_rule.n_segments
    assert n(128, 16, 64, 132) == 8  # 8,192 tokens, 16 heads
    assert n(2048, 16, 64, 132) == 8
    assert n(2048, 1, 64, 132) == 32
    assert n(32, 1, 64, 132) == 1  # too short
    assert n(2048, 128, 64, 132) == 1  # heads enough
    assert n(2048, 16, 256, 132) == 1  # the transition is too wide to chain
