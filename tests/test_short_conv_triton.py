"""The short convolution's Triton kernels against the law in fp64: values, the carried state, every gradient.

Without a card they run in Triton's interpreter, in fp32; with one, in each dtype. How near is near: the error that the
chunked torch form makes in the same dtype, or a small floor. Not covered here: speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from rounded import FLOOR, error
from torch import Tensor

pytest.importorskip("triton")

from kernels import _short_conv
from kernels.short_conv import short_conv

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"


class Case(NamedTuple):
    T: int
    D: int
    W: int
    activation: str | None
    start: bool
    lies: str = "plain"
    tokens: int | None = None  # that a program walks over; None: as chosen
    master: bool = False  # w in fp32 whatever x is, as training has it


CASES = [
    Case(1, 1, 4, "silu", False),
    Case(1, 5, 4, "silu", True),
    Case(2, 130, 4, None, True, "transposed"),
    Case(3, 33, 4, "silu", True, "sliced", master=True),
    Case(7, 128, 1, "silu", False),
    Case(7, 128, 1, "silu", True),
    Case(5, 127, 8, "silu", True, "strided"),
    Case(15, 257, 2, None, False, "sliced"),
    Case(16, 64, 4, "silu", True, "expanded"),
    Case(17, 16, 3, "silu", False, "transposed", master=True),
    Case(26, 36, 4, None, True, "transposed", tokens=16),  # twice what a walk of 16 makes
    Case(29, 31, 8, None, False, "strided"),
    Case(33, 100, 5, "silu", True),
    Case(41, 129, 4, "silu", True, "sliced", tokens=16),
    Case(64, 128, 4, "silu", False, tokens=64),
    Case(70, 48, 4, "silu", True, tokens=64),
]
LONG = [
    Case(2048, 384, 4, "silu", False, "sliced", master=True),
    Case(1000, 3072, 4, "silu", True),
    Case(513, 1000, 7, None, True, "transposed", tokens=32),
    Case(300, 96, 8, "silu", True, tokens=128, master=True),
]


def laid(x: Tensor, how: str) -> Tensor:
    """The same numbers, lying in memory in another way."""
    if how == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]  # the last stride is 2
    if how == "sliced":
        nan = torch.full_like(x[..., :3], torch.nan)
        return torch.cat([nan, x, nan], -1)[..., 3:-3]
    if how == "expanded":
        return x[:1].expand_as(x)
    return x


def draw(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return laid(torch.randn(*size, generator=generator).to(DEVICE, dtype), case.lies if len(size) == 3 else "plain")

    x, w = randn(2, case.T, case.D), randn(case.D, case.W)
    state = randn(2, case.W - 1, case.D) if case.start else None
    return {"x_BTD": x, "w_DW": w.float() if case.master else w, "state": state, "activation": case.activation}


def run(inputs: dict[str, Any], impl: str, change: Any = lambda x: x) -> list[Tensor]:
    """y, the last tokens, and the gradients of a random projection of both, to every tensor given."""
    leaves = {k: change(x.detach()).requires_grad_() if isinstance(x, Tensor) else x for k, x in inputs.items()}
    outputs = short_conv(**leaves, impl=impl)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    wanted = [x for x in leaves.values() if isinstance(x, Tensor)]
    graded = [(x, y) for x, y in zip(outputs, weights, strict=True) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for x, _ in graded], wanted, [y for _, y in graded], allow_unused=True, materialize_grads=True
    )
    return [*(x.detach() for x in outputs), *grads]


def assert_keeps_the_law(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    inputs = draw(case, dtype)
    found, torch_form = run(inputs, "triton"), run(inputs, "chunked")
    exact = run(inputs, "reference", lambda x: x.double())
    for i, (x, y, e) in enumerate(zip(found, torch_form, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        if x.numel() == 0:
            continue
        allowed = max(1.5 * error(y, e), FLOOR[dtype] * (1 if i < 2 else 2))
        assert error(x, e) <= allowed, f"tensor {i} of {len(exact)}: {error(x, e):.1e}, allowed {allowed:.1e}"
    return inputs, found


def fix(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    if case.tokens is not None:
        monkeypatch.setattr(_short_conv, "walk_length", lambda *_: case.tokens)


@pytest.mark.skipif(CARD, reason="a card is here: the same cases run on it")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernels_keep_the_law(case: Case, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    fix(monkeypatch, case)
    assert_keeps_the_law(case, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOOR, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_kernels_on_the_card_keep_the_law(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    fix(monkeypatch, case)
    inputs, first = assert_keeps_the_law(case, dtype)
    for _ in range(9):
        assert all(torch.equal(x, y) for x, y in zip(first, run(inputs, "triton"), strict=True)), "not the same twice"


@pytest.mark.gpu
def test_a_call_is_captured_in_a_graph_and_waits_for_nothing() -> None:
    inputs = draw(LONG[1], torch.bfloat16)
    leaves = {k: x.detach().requires_grad_() if isinstance(x, Tensor) else x for k, x in inputs.items()}

    def call() -> list[Tensor]:
        y, last = short_conv(**leaves, impl="triton")
        wanted = [x for x in leaves.values() if isinstance(x, Tensor)]
        return [y, last, *torch.autograd.grad([y, last], wanted, [torch.ones_like(y), torch.ones_like(last)])]

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


@pytest.mark.gpu
def test_more_numbers_than_an_int_counts() -> None:
    """The end of a tensor of 2^31 numbers and more is what it is by itself, the state before it carried."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory on the card")
    T, D, n = 2_100_000, 1024, 100
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    w = torch.randn(D, 4, device="cuda", generator=generator)
    end = x.detach()[:, -n:].clone().requires_grad_()
    dy = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16, generator=generator)
    y, last = short_conv(x, w, "silu", impl="triton")
    y_end, last_end = short_conv(end, w, "silu", x.detach()[:, -n - 3 : -n], impl="triton")
    assert torch.equal(y[:, -n:], y_end)
    assert torch.equal(last, last_end)
    (dx,) = torch.autograd.grad(y, [x], dy)
    (dx_end,) = torch.autograd.grad(y_end, [end], dy[:, -n:])
    assert torch.equal(dx[:, -n:], dx_end)


@pytest.mark.parametrize("of", [0, 1], ids=["y", "last"])
def test_a_loss_may_read_either_output_alone(of: int) -> None:
    inputs = draw(Case(6, 9, 4, "silu", True), torch.float32)
    found = []
    for impl in ("triton", "chunked"):
        leaves = {k: x.detach().requires_grad_() if isinstance(x, Tensor) else x for k, x in inputs.items()}
        wanted = [x for x in leaves.values() if isinstance(x, Tensor)]
        loss = short_conv(**leaves, impl=impl)[of].square().sum()
        found.append(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    for x, y in zip(*found, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_no_token_at_all_hands_the_state_on() -> None:
    state = torch.randn(2, 3, 5, device=DEVICE)
    y, last = short_conv(state[:, :0], torch.ones(5, 4, device=DEVICE), "silu", state, impl="triton")
    assert y.shape == (2, 0, 5)
    assert torch.equal(last, state)


def test_a_width_that_registers_do_not_hold_is_refused() -> None:
    x, w = torch.randn(1, 20, 3, device=DEVICE), torch.randn(3, 9, device=DEVICE)
    with pytest.raises(ValueError, match="a width of at most 8 in its Triton kernel, not 9"):
        short_conv(x, w, impl="triton")
    assert short_conv(x, w)[0].shape == x.shape  # auto takes another way


def test_walks_are_short_where_there_is_little_to_do() -> None:
    length = _short_conv.walk_length
    assert length(1, 256, 132) == _short_conv.SHORTEST
    assert length(1, 131072, 132) == 32  # 4096 programs
    assert length(8 * 24, 2048, 132) == 128
