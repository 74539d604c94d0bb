"""Linear attention's Triton kernels against the law in fp64: values, states, every gradient.

Without a card they run in Triton's interpreter, in fp32; with one, in each dtype. How near is near: the error that the
chunked torch form makes when its products round as the kernel's do, or a small floor. Not covered here: speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounded import FLOOR, RoundedProducts, error
from torch import Tensor

pytest.importorskip("triton")

from kernels import _linear_walks
from kernels.linear_attention import linear_attention as attend

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"

# T, (H, Hk), (K, V), decay, normalize, start, how the tensors lie, segments (None: as chosen)
CASES: list[tuple[int, tuple[int, int], tuple[int, int], str, bool, bool, str, int | None]] = [
    (1, (2, 2), (16, 16), "none", False, True, "plain", None),
    (2, (2, 1), (8, 24), "token", True, True, "plain", None),
    (7, (2, 2), (33, 64), "channel", False, False, "plain", None),
    (15, (2, 2), (64, 33), "hard token", False, True, "transposed", None),
    (16, (2, 1), (64, 64), "none", True, False, "plain", None),
    (17, (2, 2), (24, 40), "hard channel", True, True, "transposed", None),
    (33, (1, 1), (66, 65), "token", False, False, "expanded", None),
    (63, (2, 2), (16, 80), "head", True, True, "plain", None),
    (64, (2, 1), (64, 64), "token", False, True, "transposed", None),
    (65, (2, 2), (100, 16), "none", False, True, "plain", 2),
    (65, (1, 1), (64, 100), "hard token", True, True, "expanded", 2),
    (100, (2, 2), (16, 24), "channel", True, True, "plain", 3),
    (129, (2, 1), (64, 64), "none", True, True, "plain", 3),
    (129, (2, 2), (16, 33), "token", True, False, "transposed", 3),
    (200, (2, 1), (33, 16), "token", False, True, "plain", 2),
    (257, (1, 1), (128, 64), "none", False, False, "expanded", None),
    (130, (1, 1), (16, 16), "hard channel", False, False, "plain", 4),
    (64, (1, 1), (200, 256), "none", True, True, "plain", None),
    (65, (1, 1), (256, 130), "token", False, True, "plain", None),
    (90, (2, 2), (16, 24), "none", True, True, "packed", None),
    (150, (2, 1), (24, 16), "token", True, True, "packed", None),
    (130, (1, 1), (16, 40), "token", False, False, "packed", 2),
    (60, (2, 1), (16, 16), "channel", False, True, "packed", 2),
]

LENGTHS = (0, 1, 0, 17, 1, 33, 2)
"""Of packed sequences; the last has what is left."""


def laid(x: Tensor, how: str) -> Tensor:
    """The same numbers, lying in memory in another way."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "expanded":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]  # the last stride is 2
    return x


def draw(case: tuple[Any, ...], dtype: torch.dtype, seed: int) -> dict[str, Any]:
    T, (H, Hk), (K, V), decay, normalize, start, how, _ = case
    generator = torch.Generator().manual_seed(seed)
    packed = how == "packed"
    B = 2 if T < 64 and not packed else 1
    ends = torch.tensor((0, *LENGTHS, T - sum(LENGTHS), 0)).cumsum(0) if packed else None
    N = B if ends is None else len(ends) - 1

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    q, k, v = randn(B, T, Hk, K), randn(B, T, Hk, K), randn(B, T, H, V)
    if normalize:
        q, k = q.sigmoid(), k.sigmoid()
    shape = {"none": None, "head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}[decay.removeprefix("hard ")]
    g = None if shape is None else -randn(*shape).abs() * 0.5
    if g is not None and decay.startswith("hard"):
        g[torch.rand(g.shape, generator=generator) < 0.1] = -1e3
        g[torch.rand(g.shape, generator=generator) < 0.05] = -torch.inf
    state: Any = randn(N, H, K, V) if start else None
    if start and normalize:
        state = (state, randn(N, H, K).abs())
    q, k, v = (laid(x.to(DEVICE, dtype), how) for x in (q, k, v))
    given = {"q": q, "k": k, "v": v, "g": g, "initial_state": state, "cu_seqlens": ends}
    moved = {name: moved_to(x, DEVICE) for name, x in given.items()}
    return {**moved, "scale": 0.37, "normalize": normalize}


def moved_to(x: Any, device: str) -> Any:
    return tuple(part.to(device) for part in x) if isinstance(x, tuple) else None if x is None else x.to(device)


def flat(x: Any) -> list[Tensor]:
    """The tensors inside, but for integers."""
    if isinstance(x, tuple | list):
        return [part for y in x for part in flat(y)]
    return [x] if isinstance(x, Tensor) and x.is_floating_point() else []


def run(inputs: dict[str, Any], impl: str, change: Any = lambda x: x) -> list[Tensor]:
    """o, states, and the gradients of a random projection of them all, to every tensor given."""

    def leaf(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(leaf(part) for part in x)
        return change(x.detach()).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    leaves = {name: leaf(x) for name, x in inputs.items()}
    outputs = flat(attend(**leaves, impl=impl))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, flat(list(leaves.values())), weights)]


def assert_as_good_as_torch(given: list[Tensor], inputs: dict[str, Any], dtype: torch.dtype, label: Any) -> None:
    exact = run(inputs, "chunked", lambda x: x.double())
    with RoundedProducts(dtype):
        rounded = run(inputs, "chunked")
    n_values = len(exact) - len(flat(list(inputs.values())))
    for i, (x, y, e) in enumerate(zip(given, rounded, exact, strict=True)):
        assert x.shape == e.shape
        assert x.dtype == y.dtype
        floor = FLOOR[dtype] * (1 if i < n_values else 2)
        found, allowed = error(x, e), max(1.5 * error(y, e), floor)
        assert found <= allowed, f"{label}: tensor {i} of {len(exact)}: {found:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernels_keep_the_law(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    if CARD:
        pytest.skip("a card is here: the same cases run on it")
    force_segments(monkeypatch, case[-1])
    inputs = draw(case, torch.float32, seed=0)
    assert_as_good_as_torch(run(inputs, "triton"), inputs, torch.float32, case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOOR, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_the_card_keep_the_law(
    case: tuple[Any, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    force_segments(monkeypatch, case[-1])
    inputs = draw(case, dtype, seed=0)
    first = run(inputs, "triton")
    assert_as_good_as_torch(first, inputs, dtype, case)
    for _ in range(9):
        assert all(torch.equal(x, y) for x, y in zip(first, run(inputs, "triton"), strict=True)), "not the same twice"


def force_segments(monkeypatch: pytest.MonkeyPatch, wanted: int | None) -> None:
    if wanted is not None:
        monkeypatch.setattr(_linear_walks, "n_segments", lambda *_: wanted)


def test_gradients_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of the state alone, of the output alone, with g and the state held fixed: each is the law's."""
    inputs = draw(CASES[8], torch.float32, seed=3)
    for of in (0, 1):
        grads = []
        for impl in ("triton", "chunked"):
            leaves = {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}
            wanted = [leaves[name].requires_grad_() for name in ("q", "k", "v")]
            loss = flat(attend(**leaves, impl=impl))[of].square().sum()
            grads.append(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
        for x, y in zip(*grads, strict=True):
            assert error(x, y) < 1e-5 or (not y.any() and not x.any())


def test_the_card_is_not_asked_for_what_it_cannot_do() -> None:
    x = torch.randn(1, 4, 1, 300, device=DEVICE)
    with pytest.raises(ValueError, match="heads of at most 256, not 300"):
        attend(x, x, x, impl="triton")
    assert flat(attend(x, x, x))[0].shape == x.shape  # auto takes another way
