"""The ridge solve's Triton kernels against the law in fp64: values, states, every gradient.

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
from torch.nn.functional import normalize

pytest.importorskip("triton")

from kernels import _linear_walks, _ridge_solve
from kernels.ridge_solve import ridge_solve

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
LENGTHS = (0, 17, 1)
"""Of packed sequences; one more has what is left, and one behind it nothing."""


class Case(NamedTuple):
    T: int
    K: int
    options: str = ""
    """lam: a number, or of each head or channel; unit (not with head: the length of M then hardly counts, and the
    gradient of lam is what rounding leaves); start; alike (u that hardly differ), long (not of length 1 / sqrt(K));
    transposed or expanded (in memory); packed."""
    R: int | None = None
    """Tokens in a stretch; None: as chosen."""
    segments: int = 1
    """Of the linear attention in reversed time."""

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "+") for x in self if x)


CASES = [
    Case(1, 16, "unit start"),
    Case(2, 33, "head"),
    Case(17, 24, "channel unit transposed", R=16),
    Case(33, 16, "head start expanded", R=16, segments=2),
    Case(33, 9, "unit alike", R=32),
    Case(22, 16, "channel unit start packed", R=16),
]
WIDE = [
    Case(65, 16, "channel start long", R=32),
    Case(60, 16, "unit start packed alike", R=16, segments=2),
    Case(15, 8, "channel start transposed"),
    Case(16, 64, "unit long"),
    Case(63, 33, "unit alike start"),
    Case(65, 64, "unit start"),
    Case(65, 128, "channel unit", R=32),
    Case(100, 66, "start expanded", R=48),
    Case(129, 16, "channel unit alike", R=32, segments=3),
]
LONG = [
    Case(257, 64, "unit"),
    Case(1000, 128, "channel start transposed"),
    Case(1000, 64, "channel unit alike start", R=128, segments=4),
    Case(5000, 64, "unit alike"),
    Case(5000, 64, "channel unit start packed"),
    Case(16384, 32, "unit alike"),
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
    T, K, options = case[:3]
    generator = torch.Generator().manual_seed(T)
    packed = "packed" in options
    B, H = (1 if packed or T > 20 else 2), (2 if CARD else 1)
    ends = torch.tensor((0, *LENGTHS, T - sum(LENGTHS), 0)).cumsum(0) if packed else None

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    u = randn(B, T, H, K)
    if "alike" in options:
        u = randn(1, 1, H, K) + 1e-2 * u
    u = u if "long" in options else normalize(u, dim=-1) * K**-0.5
    lam = randn(H).exp() if "head" in options else randn(H, K).exp() if "channel" in options else None
    root = randn(B if ends is None else len(ends) - 1, H, K, K)
    start = root @ root.mT / K if "start" in options else None
    inputs: dict[str, Any] = {
        name: laid(x.to(DEVICE, dtype), options)
        for name, x in {"u": u, "x": normalize(randn(B, T, H, K), dim=-1)}.items()
    }
    for name, given in {"lam": lam, "initial_state": start, "cu_seqlens": ends}.items():
        inputs[name] = None if given is None else given.to(DEVICE)
    return {**inputs, "lam": 0.1 if lam is None else inputs["lam"], "unit": "unit" in options}


def run(inputs: dict[str, Any], impl: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """alpha, the state, and the gradients of a random projection of them, to every tensor given."""
    leaves = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            leaves[name] = (x if dtype is None else x.to(dtype)).detach().requires_grad_()
    outputs = ridge_solve(**leaves, impl=impl)
    generator = torch.Generator().manual_seed(1)
    # One weight for all tokens: the gradient that arrives has a stride of zero.
    weights = [torch.randn(x.shape[-1], generator=generator).to(x.device, x.dtype).expand(x.shape) for x in outputs]
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, wanted, weights)]


def assert_keeps_the_law(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    inputs = draw(case, dtype)
    found = run(inputs, "triton")
    exact = run(inputs, "chunked", torch.float64)
    with RoundedProducts(dtype):
        rounded = run(inputs, "chunked")
    for i, (x, y, e) in enumerate(zip(found, rounded, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        allowed = max(1.5 * error(y, e), FLOOR[dtype] * (1 if i < 2 else 2))
        assert error(x, e) <= allowed, f"tensor {i} of {len(exact)}: {error(x, e):.1e}, allowed {allowed:.1e}"
    return inputs, found


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stretches and segments as a case says, and NaN wherever nobody wrote."""
    blocks = _ridge_solve.blocks

    def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=like.device)

    def fix(case: Case) -> None:
        if case.R is not None:
            monkeypatch.setattr(_ridge_solve, "blocks", lambda *x: blocks(*x)._replace(R=case.R, C=16))
        monkeypatch.setattr(_linear_walks, "n_segments", lambda *_: case.segments)

    monkeypatch.setattr(_ridge_solve, "_scratch", scratch)
    return fix


@pytest.mark.skipif(CARD, reason="a card is here: the same cases run on it")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(x, marks=pytest.mark.wide) for x in WIDE)], ids=str)
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
@pytest.mark.parametrize("case", [LONG[2], LONG[4]], ids=str)
def test_a_call_is_captured_in_a_graph_and_waits_for_nothing(case: Case) -> None:
    inputs = draw(case, torch.bfloat16)
    eager = run(inputs, "triton")
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items() if isinstance(x, Tensor)
    }
    wanted = [x for x in leaves.values() if x.requires_grad]

    def call() -> list[Tensor]:
        alpha, M = ridge_solve(**{**inputs, **leaves}, impl="triton")
        weights = [torch.ones_like(alpha), torch.ones_like(M)]
        return [alpha, M, *torch.autograd.grad([alpha, M], wanted, weights)]

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


@pytest.mark.parametrize("reads", ["alpha", "M"])
def test_a_loss_may_read_any_output_alone(reads: str, fixed: Any) -> None:
    case = Case(9, 16, "channel unit start")
    fixed(case)
    inputs = draw(case, torch.float32)
    found = []
    for impl in ("triton", "chunked"):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
        outputs = ridge_solve(**{**inputs, **leaves}, impl=impl)
        loss = (outputs[("alpha", "M").index(reads)] ** 3).sum()
        found.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))
    for x, y in zip(*found, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_a_zero_vector_gives_zero_and_a_wide_head_says_what_fits() -> None:
    x = torch.zeros(1, 2, 1, 16, device=DEVICE)
    alpha, M = ridge_solve(x, x, 0.1, unit=True, impl="triton")
    assert not alpha.any()
    assert not M.any()
    wide = torch.zeros(1, 2, 1, 129, device=DEVICE)
    with pytest.raises(ValueError, match="ridge_solve takes heads of at most 128, not 129; use 'auto' or 'chunked'"):
        ridge_solve(wide, wide, 0.1, impl="triton")


def test_stretches_fill_the_card_and_are_never_long() -> None:
    def R(T: int, heads: int) -> int:
        return _ridge_solve.blocks(T, heads, 64, torch.float32, 132).R

    assert [R(T, 16) for T in (1, 4096, 8192, 16384, 131072)] == [64, 64, 128, 256, 512]
    assert R(2048, 128) == 256
    assert R(2**20, 64) == 512
