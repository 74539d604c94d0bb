"""The Triton kernels of slot attention and of the blurry window against the law in fp64: values, states, gradients.

Without a card they run in Triton's interpreter, in fp32; with one, in each dtype. How near is near: the error that the
chunked torch form makes when its products round as the kernel's do, or a small floor. Not covered here: speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from rounded import FLOOR, RoundedProducts, error
from torch import Tensor

pytest.importorskip("triton")

from kernels import _linear_walks
from kernels.blurry_window import BlurryState, blurry_window
from kernels.slot_attention import slot_attention

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
LENGTHS = (0, 1, 0, 17, 1, 20, 2)
"""Of packed sequences; one more has what is left, and one behind it nothing."""


class Case(NamedTuple):
    T: int
    M: int
    K: int
    V: int
    options: str = ""
    """apart (s is not 1 - e^f), hard (some of f -1e3 and -inf), sparse (most of f and s is 0), masked, start, grouped,
    transposed or expanded (in memory), packed."""
    segments: int | None = None
    """None: as chosen."""

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "+") for x in self if x)


CASES = [
    Case(2, 8, 16, 24, "start grouped"),
    Case(7, 33, 24, 16, "hard apart"),
    Case(17, 16, 33, 40, "sparse masked transposed"),
    Case(33, 24, 16, 65, "apart start expanded"),
]
WIDE = [
    Case(50, 16, 16, 16, "hard start", segments=2),
    Case(44, 5, 16, 16, "sparse masked start packed"),
    Case(15, 64, 64, 64),
    Case(16, 64, 100, 16, "grouped apart start"),
    Case(63, 100, 64, 33, "hard apart transposed"),
    Case(64, 64, 64, 64, "start"),
    Case(65, 33, 128, 64, "sparse masked apart start grouped"),
    Case(65, 200, 16, 130, "hard", segments=2),
    Case(100, 64, 16, 24, "grouped start expanded", segments=3),
    Case(129, 130, 24, 16, "sparse masked start", segments=4),
    Case(90, 16, 64, 16, "apart hard packed", segments=2),
    Case(130, 64, 64, 64, "grouped packed"),
]
CARD_ONLY = [
    Case(300, 256, 64, 64, "sparse"),
    Case(257, 512, 128, 128, "sparse masked"),
    Case(200, 512, 256, 256, "start"),
    Case(2100, 64, 64, 64, "start"),
    Case(2100, 64, 64, 64, "packed masked sparse"),
    Case(3000, 32, 128, 128, "hard apart grouped"),
]


class Window(NamedTuple):
    """A case of the blurry window: for each head the tokens to a slot."""

    T: int
    M: int
    K: int
    V: int
    resolution: tuple[int, ...]
    start: bool = False
    segments: int | None = None

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "") for x in self if x)


WINDOWS = [Window(21, 5, 16, 24, (8, 1), start=True)]
WIDE_WINDOWS = [Window(50, 33, 33, 16, (8, 8)), Window(100, 6, 16, 16, (1, 3), start=True, segments=3)]
CARD_WINDOWS = [Window(1100, 64, 64, 64, (8, 8)), Window(2000, 64, 128, 64, (8, 4, 2, 1), start=True)]


def laid(x: Tensor, options: str) -> Tensor:
    """The same numbers, lying in memory in another way."""
    if "transposed" in options:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if "expanded" in options:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]  # the last stride is 2
    return x


def gates(case: Case, B: int, H: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    size = (B, case.T, H, case.M)
    f = -torch.randn(*size, generator=generator).abs() * 0.5
    s = torch.randn(*size, generator=generator) if "apart" in case.options else None
    if "hard" in case.options:
        f[torch.rand(size, generator=generator) < 0.1] = -1e3
        f[torch.rand(size, generator=generator) < 0.05] = -torch.inf
    if "sparse" in case.options:
        rest = torch.rand(size, generator=generator) < 0.9
        rest[..., -1] = True  # one slot that nothing ever writes
        f = f.masked_fill(rest, 0.0)
        s = s if s is None else s.masked_fill(rest, 0.0)
    return f, s


def draw(case: Case, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    T, M, K, V, options, _ = case
    generator = torch.Generator().manual_seed(seed)
    packed = "packed" in options
    B, H = (1 if packed or T > 16 or "grouped" in options else 2), (2 if "grouped" in options or CARD else 1)
    ends = torch.tensor((0, *LENGTHS, T - sum(LENGTHS), 0)).cumsum(0) if packed else None
    N = B if ends is None else len(ends) - 1

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    Hk = 1 if "grouped" in options else H
    q, k, v = (laid(x.to(DEVICE, dtype), options) for x in (randn(B, T, Hk, K), randn(B, T, Hk, K), randn(B, T, H, V)))
    f, s = gates(case, B, H, generator)
    state = None
    if "start" in options:
        state = randn(N, H, M, K).to(DEVICE), randn(N, H, M, V).to(DEVICE)
        if "masked" in options:
            state = tuple(x.index_fill(2, torch.tensor([M - 1], device=DEVICE), 0.0) for x in state)
    return {
        "q": q,
        "k": k,
        "v": v,
        "f": laid(f.to(DEVICE), options),
        "s": None if s is None else laid(s.to(DEVICE), options),
        "initial_state": state,
        "cu_seqlens": None if ends is None else ends.to(DEVICE),
        "scale": 0.37,
        "mask_empty": "masked" in options,
    }


def draw_window(case: Window, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    T, M, K, V, resolution, start, _ = case
    generator = torch.Generator().manual_seed(seed)
    B, H = 2, len(resolution)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    state = None
    if start:
        length = torch.tensor([3, 50], dtype=torch.int32, device=DEVICE)
        state = BlurryState(randn(B, H, M, K), randn(B, H, M, V), length)
    q, k, v = (randn(B, T, H, size).to(dtype) for size in (K, K, V))
    return {"q": q, "k": k, "v": v, "slots": M, "resolution": resolution, "scale": 0.37, "initial_state": state}


def flat(x: Any) -> list[Tensor]:
    """The tensors inside, but for integers."""
    if isinstance(x, tuple | list):
        return [part for y in x for part in flat(y)]
    return [x] if isinstance(x, Tensor) and x.is_floating_point() else []


def run(inputs: dict[str, Any], impl: str, change: Any = lambda x: x) -> list[Tensor]:
    """o, states, and the gradients of a random projection of them all, to every tensor given."""

    def leaf(x: Any) -> Any:
        if isinstance(x, tuple):
            parts = [leaf(part) for part in x]
            return type(x)(*parts) if isinstance(x, BlurryState) else tuple(parts)
        return change(x.detach()).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    leaves = {name: leaf(x) for name, x in inputs.items()}
    op = blurry_window if "resolution" in inputs else slot_attention
    outputs = flat(op(**leaves, impl=impl))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, flat(list(leaves.values())), weights)]


def assert_as_good_as_torch(given: list[Tensor], inputs: dict[str, Any], dtype: torch.dtype, label: Any) -> None:
    exact = run(inputs, "chunked", lambda x: x.double())
    with RoundedProducts(dtype):
        rounded = run(inputs, "chunked")
    for i, (x, y, e) in enumerate(zip(given, rounded, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        found, allowed = error(x, e), max(1.5 * error(y, e), FLOOR[dtype] * (1 if i < 3 else 2))
        assert found <= allowed, f"{label}: tensor {i} of {len(exact)}: {found:.1e}, allowed {allowed:.1e}"


def force_segments(monkeypatch: pytest.MonkeyPatch, wanted: int | None) -> None:
    if wanted is not None:
        monkeypatch.setattr(_linear_walks, "n_segments", lambda *_: wanted)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)], ids=str)
def test_interpreted_kernels_keep_the_law(case: Case, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    if CARD:
        pytest.skip("a card is here: the same cases run on it")
    force_segments(monkeypatch, case.segments)
    inputs = draw(case, torch.float32, seed=0)
    assert_as_good_as_torch(run(inputs, "triton"), inputs, torch.float32, case)


@pytest.mark.parametrize(
    "case", [*WINDOWS, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE_WINDOWS)], ids=str
)
def test_interpreted_kernels_keep_the_law_of_windows(
    case: Window, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    if CARD:
        pytest.skip("a card is here: the same cases run on it")
    force_segments(monkeypatch, case.segments)
    inputs = draw_window(case, torch.float32, seed=0)
    assert_as_good_as_torch(run(inputs, "triton"), inputs, torch.float32, case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOOR, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", [*CASES, *WIDE, *CARD_ONLY, *WINDOWS, *WIDE_WINDOWS, *CARD_WINDOWS], ids=str)
def test_kernels_on_the_card_keep_the_law(
    case: Case | Window, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    force_segments(monkeypatch, case.segments)
    inputs = draw(case, dtype, seed=0) if isinstance(case, Case) else draw_window(case, dtype, seed=0)
    first = run(inputs, "triton")
    assert_as_good_as_torch(first, inputs, dtype, case)
    for _ in range(9):
        assert all(torch.equal(x, y) for x, y in zip(first, run(inputs, "triton"), strict=True)), "not the same twice"


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_is_captured_in_a_graph_and_waits_for_nothing(packed: bool) -> None:
    inputs = draw(Case(1100, 32, 64, 64, "sparse masked start" + " packed" * packed), torch.bfloat16, seed=0)
    eager = run(inputs, "triton")
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items() if isinstance(x, Tensor)
    }
    wanted = [x for x in leaves.values() if x.requires_grad]

    def call() -> list[Tensor]:
        outputs = flat(slot_attention(**{**inputs, **leaves}, impl="triton"))
        return [*outputs, *torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs])]

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


def test_a_loss_may_read_any_output_alone() -> None:
    """The output, the keys or the values at the end; with f and the state held fixed."""
    inputs = draw(Case(18, 5, 16, 16, "start"), torch.float32, seed=3)
    for of in range(3):
        grads = []
        for impl in ("triton", "chunked"):
            wanted = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
            outputs = flat(slot_attention(**{**inputs, **dict(zip(("q", "k", "v"), wanted, strict=True))}, impl=impl))
            loss = outputs[of].square().sum()
            grads.append(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
        for x, y in zip(*grads, strict=True):
            assert error(x, y) < 1e-5 or (not y.any() and not x.any())


def test_the_card_is_not_asked_for_what_it_cannot_do() -> None:
    x, f = torch.randn(1, 4, 1, 8, device=DEVICE), -torch.rand(1, 4, 1, 513, device=DEVICE)
    with pytest.raises(ValueError, match="takes at most 512 slots in its Triton kernel, not 513"):
        slot_attention(x, x, x, f, impl="triton")
    assert slot_attention(x, x, x, f)[0].shape == x.shape  # auto takes another way
    with pytest.raises(ValueError, match="heads of at most 256, not 300"):
        blurry_window(*(torch.randn(1, 4, 1, 300, device=DEVICE),) * 3, slots=4, resolution=(1,), impl="triton")
