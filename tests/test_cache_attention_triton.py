"""Cache attention's Triton kernels against the law in fp64: values, what is kept, every gradient.

Without a card they run in Triton's interpreter, in fp32; with one, in each dtype. What is kept has to be the same
tokens in the same slots. How near is near: 1.5 times the error that the chunked torch form makes with its products
rounded as the kernel's are, or a small floor. Scratch and outputs start as NaN, or a row that is not there. Not covered
here: speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from rounded import FLOOR, RoundedProducts, error
from torch import Tensor

pytest.importorskip("triton")

from kernels import _cache_attention
from kernels.cache_attention import CacheState, cache_attention

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"


class Case(NamedTuple):
    T: int
    K: int
    V: int
    width: int
    block: int
    options: str = ""
    """recent or none; ties (of scores), start (from a state, two of different lengths), open (no sink), transposed or
    expanded (in memory)."""
    tile: int | None = None
    """Queries and keys of a tile; None: as chosen."""

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "+") for x in self if x != "")


CASES = [
    Case(2, 8, 24, 3, 4, "recent"),
    Case(17, 16, 16, 4, 8, "ties"),
    Case(15, 24, 40, 0, 8, "none start open transposed"),
    Case(24, 64, 33, 20, 12, "open expanded"),
    Case(20, 16, 16, 3, 16, "recent start"),
    Case(33, 33, 66, 5, 16, "ties start transposed"),
    Case(50, 16, 16, 18, 32, "", tile=16),
]
WIDE = [
    Case(65, 16, 16, 18, 64, "ties start", tile=16),
    Case(9, 16, 16, 2, 1, "start"),
    Case(16, 100, 8, 40, 4, "ties open"),
    Case(100, 64, 64, 16, 16, "ties"),
    Case(129, 128, 64, 33, 48, "start expanded", tile=32),
    Case(64, 256, 130, 64, 16, "recent start"),
    Case(70, 16, 256, 200, 32, "ties transposed"),
    Case(100, 32, 32, 0, 33, "none"),
]
LONG = [
    Case(257, 64, 64, 16, 64),
    Case(1000, 128, 128, 64, 256, "start"),
    Case(1000, 256, 256, 64, 256, "ties start transposed"),
    Case(2048, 128, 128, 64, 256, "ties"),
    Case(3000, 64, 128, 256, 300, "start expanded open"),
    Case(5000, 64, 64, 32, 32, "recent start"),
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
    T, K, V, width, block, options = case[:6]
    generator = torch.Generator().manual_seed(T)
    B, H = (2, 2) if CARD else (2, 1) if "start" in options else (1, 2)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def tokens(B: int, T: int) -> dict[str, Tensor]:
        m = randn(B, T, H).abs()
        unit = [torch.nn.functional.normalize(randn(B, T, H, K), dim=-1) for _ in range(2)]
        return {"q": unit[0], "k": unit[1], "v": randn(B, T, H, V), "m": (3 * m).round() if "ties" in options else m}

    def carried(x: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the device, in the dtype but for scores."""
        return {name: t.to(DEVICE, torch.float32 if name == "m" else dtype) for name, t in x.items()}

    sink = torch.full((H,), -torch.inf) if "open" in options else randn(H)
    settings: dict[str, Any] = {
        "width": width,
        "block": block,
        "gain": (2 + randn(K)).to(DEVICE),
        "sink": sink.to(DEVICE),
    }
    settings["select"] = next((x for x in ("recent", "none") if x in options), "top")
    state = None
    if "start" in options:
        ends = [cache_attention(**carried(tokens(1, n)), **settings, impl="chunked")[1] for n in (2 * block + 3, block)]
        state = CacheState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    x = {name: laid(t, options) for name, t in carried(tokens(B, T)).items()}
    return {**x, **settings, "initial_state": state}


def run(inputs: dict[str, Any], impl: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """o, the state, and the gradients of a random projection of them, to every tensor given that may have one."""

    def leaf(x: Any) -> Any:
        if isinstance(x, CacheState):
            return CacheState(*map(leaf, x))
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return (x if dtype is None else x.to(dtype)).detach().requires_grad_()

    leaves = {name: leaf(x) for name, x in inputs.items()}
    o, state = cache_attention(**leaves, impl=impl)
    outputs = [o, *state]
    into = [x for x in outputs if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    # One weight for all tokens: the gradient that arrives has a stride of zero.
    weights = [torch.randn(x.shape[-1], generator=generator).to(x.device, x.dtype).expand(x.shape) for x in into]
    start = leaves["initial_state"]
    wanted = [leaves[name] for name in ("q", "k", "v", "gain", "sink")] + ([] if start is None else [start.k, start.v])
    return [*(x.detach() for x in outputs), *torch.autograd.grad(into, wanted, weights)]


def assert_keeps_the_law(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    inputs = draw(case, dtype)
    found = run(inputs, "triton")
    exact = run(inputs, "chunked", torch.float64)
    with RoundedProducts(dtype):
        rounded = run(inputs, "chunked")
    for i, (x, y, e) in enumerate(zip(found, rounded, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        if not x.is_floating_point():
            assert torch.equal(x, e), f"tensor {i}: other tokens are kept"
            continue
        allowed = max(1.5 * error(y, e), FLOOR[dtype] * (1 if i < 6 else 2))
        assert error(x, e) <= allowed, f"tensor {i} of {len(exact)}: {error(x, e):.1e}, allowed {allowed:.1e}"
    return inputs, found


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiles as a case says; NaN, or a row that is not there, wherever nobody wrote."""
    blocks = _cache_attention.blocks

    def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else 2**30, dtype=dtype, device=like.device)

    def fix(case: Case) -> None:
        def smaller(*of: Any) -> Any:
            chosen = blocks(*of)
            tiles = [tile._replace(M=case.tile, N=case.tile) for tile in chosen[:3]]
            return _cache_attention.Blocks(*tiles, chosen.precision)

        if case.tile is not None:
            monkeypatch.setattr(_cache_attention, "blocks", smaller)

    monkeypatch.setattr(_cache_attention, "_scratch", scratch)
    return fix


@pytest.mark.skipif(CARD, reason="a card is here: the same cases run on it")
@pytest.mark.filterwarnings("ignore:divide by zero encountered", "ignore:invalid value encountered")  # blocks of none
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
@pytest.mark.parametrize("case", [LONG[0], LONG[1]], ids=str)
def test_a_call_is_captured_in_a_graph_and_waits_for_nothing(case: Case) -> None:
    inputs = draw(case, torch.bfloat16)
    wanted = [inputs[name].requires_grad_() for name in ("q", "k", "v", "gain", "sink")]

    def call() -> list[Tensor]:
        o, state = cache_attention(**inputs, impl="triton")
        into = [o, state.k, state.v]
        return [o, *state, *torch.autograd.grad(into, wanted, [torch.ones_like(x) for x in into])]

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


@pytest.mark.parametrize("cuts", [(13, 14)], ids=str)
def test_a_sequence_read_in_parts_is_the_whole(cuts: tuple[int, ...]) -> None:
    """The middle part is one token, which takes the step. The same tokens are kept, and in the same slots."""
    case = Case(20, 16, 16, 3, 8, "ties")
    inputs = draw(case, torch.float32)
    whole, end = cache_attention(**inputs, impl="triton")
    parts, state = [], None
    for first, behind in zip((0, *cuts), (*cuts, case.T), strict=True):
        part = {name: inputs[name][:, first:behind] for name in ("q", "k", "v", "m")}
        o, state = cache_attention(**{**inputs, **part, "initial_state": state}, impl="triton")
        parts.append(o)
    assert error(torch.cat(parts, 1), whole) < 1e-6
    assert state is not None
    assert all(torch.equal(x, y) for x, y in zip(state, end, strict=True))


@pytest.mark.parametrize("reads", ["o", "k"])
def test_a_loss_may_read_one_output_alone(reads: str, fixed: Any) -> None:
    inputs = draw(Case(7, 8, 8, 2, 4), torch.float32)
    found = []
    for impl in ("triton", "chunked"):
        leaves = {name: inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "gain", "sink")}
        o, state = cache_attention(**{**inputs, **leaves}, impl=impl)
        loss = {"o": o, "k": state.k}[reads].square().sum()
        found.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))
    for x, y in zip(*found, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_a_cache_that_registers_do_not_hold_is_refused() -> None:
    inputs = draw(Case(3, 8, 8, 300, 4), torch.float32)
    with pytest.raises(ValueError, match="a width of at most 256 in its Triton kernel, not 300"):
        cache_attention(**inputs, impl="triton")
    assert cache_attention(**inputs)[0].shape == inputs["v"].shape  # auto takes another way
