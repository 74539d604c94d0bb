"""Every op against its law, the plain recurrence over time: values, states, gradients. A new op is tested at once.

Not covered here: speed, and what only a GPU shows (bf16 products, races).
"""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.cache_attention import _Read, cache_attention
from kernels.delta_rule import _Chunked, delta_rule
from kernels.linear_attention import linear_attention
from kernels.short_conv import _Shifted, short_conv

OPS = kernels.names()
TORCH_ONLY = ("kda", "mesa_solve")
"""Ops without a Triton kernel."""
LENGTHS = [1, 2, 63, 64, 65, 100]

FP64 = 1e-10
"""Largest error of a value or a gradient, over the largest value or gradient of its kind, in fp64."""


def module(op: str) -> ModuleType:
    return importlib.import_module(f"kernels.{op}")


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors inside nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every floating tensor inside it changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def run(op: str, inputs: dict[str, Any], impl: str, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of a random projection of all of them, final states too, to every floating input."""
    leaves = mapped(inputs, lambda x: x.detach().clone().requires_grad_())
    outputs = [x for x in tensors(kernels.get(op)(**leaves, impl=impl))]
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        loss = loss + (x.double() * weight).sum() if x.requires_grad else loss
    wanted = [x for x in tensors(leaves) if x.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [x.detach() for x in outputs], [
        torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)
    ]


def assert_close(given: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Each within `tolerance` of the largest among `expected`, so that a true zero may be rounding noise."""
    assert len(given) == len(expected)
    for i, (a, b) in enumerate(zip(given, expected, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if b.numel() == 0:
            continue
        scale = max(1.0, b.double().abs().max().item())
        error = (a.double() - b.double()).abs().max().item() / scale
        assert error <= tolerance, f"tensor {i} of shape {tuple(b.shape)}: {error:.1e}"  # False for NaN too


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_chunked_equals_the_law(op: str, T: int) -> None:
    generator = torch.Generator().manual_seed(T)
    n = 0
    for inputs in module(op).examples(T, torch.float64, generator):
        law, fast = run(op, inputs, "reference"), run(op, inputs, "chunked")
        assert_close(fast[0], law[0], FP64)
        assert_close(fast[1], law[1], FP64)
        n += 1
    assert n >= 2


@pytest.mark.parametrize("op", OPS)
def test_every_output_is_written(op: str, poisoned_memory: None) -> None:
    for inputs in module(op).examples(65, torch.float64, torch.Generator().manual_seed(1)):
        outputs, grads = run(op, inputs, "chunked")
        assert all(x.isfinite().all() for x in [*outputs, *grads] if x.is_floating_point())


@pytest.mark.parametrize("op", OPS)
def test_single_precision_stays_near_the_law(op: str) -> None:
    for inputs in module(op).examples(100, torch.float64, torch.Generator().manual_seed(2)):
        single = mapped(inputs, lambda x: x.float())
        exact = mapped(single, lambda x: x.double())  # the same numbers, so that the choice of a cache is the same
        law, fast = run(op, exact, "reference"), run(op, single, "chunked")
        for given, expected, tolerance in zip(fast, law, (2e-5, 1e-4), strict=True):
            assert_close([x.double() for x in given], [x.double() for x in expected], tolerance)


@pytest.mark.parametrize("op", OPS)
def test_half_precision_inputs_keep_states_in_single(op: str) -> None:
    for inputs in module(op).examples(65, torch.float32, torch.Generator().manual_seed(3)):
        rounded = mapped(inputs, lambda x: x.bfloat16())
        o, *rest = tensors(kernels.get(op)(**rounded))
        assert o.dtype == torch.bfloat16
        law, *_ = tensors(kernels.get(op)(**mapped(rounded, lambda x: x.float()), impl="reference"))
        assert ((o.float() - law).abs().max() / law.abs().max()).item() < 5e-3 * (4 if op == "short_conv" else 1)
        if op in ("blurry_window", "delta_rule", "linear_attention", "slot_attention"):
            assert all(x.dtype == torch.float32 for x in rest if x.is_floating_point())


@pytest.mark.parametrize("op", OPS)
def test_two_halves_with_the_carried_state_are_the_whole(op: str) -> None:
    state_name = "state" if op == "short_conv" else "initial_state"
    for inputs in module(op).examples(65, torch.float64, torch.Generator().manual_seed(4)):
        whole = list(kernels.get(op)(**inputs))
        over_time = {k for k, x in inputs.items() if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[1] == 65}
        first = {k: x[:, :30] if k in over_time else x for k, x in inputs.items()}
        o1, state, *_ = kernels.get(op)(**first)
        rest = {k: x[:, 30:] if k in over_time else x for k, x in inputs.items()}
        o2, state, *_ = kernels.get(op)(**{**rest, state_name: state})
        assert_close([torch.cat([o1, o2], 1), *tensors(state)], [whole[0], *tensors(whole[1])], FP64)


@pytest.mark.parametrize("op", OPS)
def test_autocast_does_not_reach_inside(op: str) -> None:
    inputs = next(module(op).examples(65, torch.float32, torch.Generator().manual_seed(5)))
    plain = list(tensors(kernels.get(op)(**inputs)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = list(tensors(kernels.get(op)(**inputs)))
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_backward_passes_written_by_hand() -> None:
    generator = torch.Generator().manual_seed(6)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator).requires_grad_()

    N, J, C, K, V = 3, 2, 3, 3, 2
    beta, g = draw(N, J, C, 1).detach().sigmoid().requires_grad_(), (-draw(N, J, C, 1).detach().abs()).requires_grad_()
    delta = (draw(N, J, C, K), draw(N, J, C, K), draw(N, J, C, K), draw(N, J, C, V), beta, g, draw(J, K, V))
    assert torch.autograd.gradcheck(lambda *x: _Chunked.apply(*x, 0.7), delta, fast_mode=True)

    row = torch.tensor([[[0, 1, 2], [2, 2, 4]], [[5, 1, 0], [3, 4, 5]]])
    hidden = torch.zeros(2, 2, 4, 3, dtype=torch.bool)
    hidden[:, :, 0, 2] = True
    read = (draw(2, 2, 4, K), draw(2, 6, K), draw(2, 6, V), draw(2))
    assert torch.autograd.gradcheck(lambda *x: _Read.apply(*x, row, hidden), read, fast_mode=True)

    assert torch.autograd.gradcheck(lambda x, w: _Shifted.apply(x, w, "silu"), (draw(2, 9, 3), draw(3, 4)))


def test_equal_keys_and_full_writes_keep_the_last_value() -> None:
    """The hardest system to solve: L is all ones below the diagonal, and its powers reach 1e18."""
    T, K = 64, 8
    key = torch.nn.functional.normalize(torch.ones(1, T, 1, K), dim=-1)
    v = torch.randn(1, T, 1, K, generator=torch.Generator().manual_seed(7))
    o, _, m = delta_rule(key, key, None, v, torch.ones(1, T, 1), scale=1.0, residual="norm")
    assert (o - v).abs().max().item() < 1e-5
    change = (v - torch.cat([torch.zeros_like(v[:, :1]), v[:, :-1]], 1)).norm(dim=-1)
    assert m is not None
    assert (m - change).abs().max().item() < 1e-5


def test_the_residual_is_the_size_of_the_write() -> None:
    inputs = list(module("delta_rule").examples(9, torch.float64, torch.Generator().manual_seed(8)))[-1]
    inputs.update(residual="norm", b=None, g=None, a=torch.nn.functional.normalize(inputs["a"], dim=-1))
    _, _, m = delta_rule(**inputs)
    states = [inputs["initial_state"]]
    for t in range(1, 10):
        part = {k: x[:, :t] if isinstance(x, Tensor) and k != "initial_state" else x for k, x in inputs.items()}
        states.append(delta_rule(**part)[1])
    writes = torch.stack([(b - a).flatten(2).norm(dim=-1) for a, b in itertools.pairwise(states)], 1)
    assert m is not None
    assert_close([m], [writes], FP64)
    assert not m.requires_grad


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_minus_infinity_forgets_everything_before(impl: str) -> None:
    T = 70
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(1, T, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = torch.zeros(1, T, 2, dtype=torch.float64)
    g[:, 50] = -torch.inf
    for whole, after in (
        (linear_attention(q, k, v, g, impl=impl), linear_attention(q[:, 50:], k[:, 50:], v[:, 50:], impl=impl)),
        (
            delta_rule(q, k, None, v, None, g, scale=1.0, impl=impl),
            delta_rule(q[:, 50:], k[:, 50:], None, v[:, 50:], scale=1.0, impl=impl),
        ),
    ):
        assert_close([whole[0][:, 50:], whole[1]], [after[0], after[1]], 1e-14)  # e^-40 = 4e-18 of what was


def test_the_cache_holds_the_largest_scores_and_of_equals_the_older() -> None:
    T, width, block = 41, 6, 4
    generator = torch.Generator().manual_seed(10)
    m = torch.randint(0, 5, (1, T, 1), generator=generator).float()
    x = torch.nn.functional.normalize(torch.randn(1, T, 1, 3, generator=generator), dim=-1)
    settings: dict[str, Any] = {"width": width, "block": block, "gain": torch.ones(3), "sink": torch.zeros(1)}
    for impl in ("reference", "chunked"):
        _, state = cache_attention(x, x, x, m, **settings, impl=impl)
        done = T // block * block
        expected = sorted(range(done), key=lambda t: (-m[0, t, 0].item(), t))[:width]
        assert set(state.position[0, :width, 0].tolist()) == set(expected)
        assert state.position[0, width:, 0].tolist() == [*range(done, T), -1, -1, -1]
        assert state.length.item() == T
        for slot, position in enumerate(state.position[0, :, 0].tolist()):
            assert torch.equal(state.k[0, slot, 0], x[0, position, 0] if position >= 0 else torch.zeros(3))


def test_what_the_exact_read_sees() -> None:
    """A value is read by exactly the tokens after it in its block, and later by those whose cache holds it."""
    T, width, block = 12, 1, 4
    m = torch.tensor([0, 9, 0, 0, 0, 5, 0, 0, 0, 0, 10, 0.0]).view(1, T, 1)
    q = torch.ones(1, T, 1, 1)
    v = torch.eye(T).view(1, T, 1, T)
    none = torch.tensor([-torch.inf])
    o, _ = cache_attention(q, q, v, m, width=width, block=block, gain=torch.ones(1), sink=none)
    seen = [[j for j in range(T) if o[0, i, 0, j] > 0] for i in range(T)]
    blocks = [list(range(i // block * block, i + 1)) for i in range(T)]
    assert seen == [blocks[i] if i < block else [1, *blocks[i]] for i in range(T)]
    half, _ = cache_attention(q, q, v, m, width=width, block=block, gain=torch.ones(1), sink=torch.ones(1))
    assert half[0, 0, 0, 0].item() == pytest.approx(0.5)  # logit 1 against a sink of 1


def test_wrong_shapes_name_the_tensor() -> None:
    x, gate = torch.randn(2, 5, 2, 3), torch.rand(2, 5, 2)
    with pytest.raises(ValueError, match=r"k has shape .*: dimension 1 should be 5"):
        linear_attention(x, x[:, :4], x)
    with pytest.raises(ValueError, match="beta has shape"):
        delta_rule(x, x, None, x, gate[..., :1], scale=1.0)
    with pytest.raises(ValueError, match="multiple of the second"):
        delta_rule(x, x, None, x[:, :, :1], scale=1.0)
    with pytest.raises(ValueError, match="the pair"):
        linear_attention(x, x, x, normalize=True, initial_state=torch.zeros(2, 2, 3, 3))
    settings: dict[str, Any] = {"width": 2, "gain": torch.ones(3), "sink": torch.zeros(2)}
    _, state = cache_attention(x, x, x, gate, block=2, **settings)
    with pytest.raises(ValueError, match=r"initial_state\.k has shape"):
        cache_attention(x, x, x, gate, block=3, **settings, initial_state=state)
    with pytest.raises(ValueError, match="0 with select 'none'"):
        cache_attention(x, x, x, gate, width=1, block=2, gain=torch.ones(3), sink=torch.zeros(2), select="none")
    with pytest.raises(ValueError, match="activation='relu'"):
        short_conv(x[..., 0], torch.zeros(2, 4), "relu")


@pytest.mark.parametrize("op", OPS)
def test_an_implementation_that_is_not_there_is_refused(op: str) -> None:
    inputs = next(module(op).examples(2, torch.float64, torch.Generator().manual_seed(11)))
    why = "has no Triton kernel" if op in TORCH_ONLY else "does not take float64"
    with pytest.raises(ValueError, match=f"{op} {why}"):
        kernels.get(op)(**inputs, impl="triton")
    with pytest.raises(ValueError, match=f"{op} knows auto, reference, chunked"):
        kernels.get(op)(**inputs, impl="fast")


def test_looking_ops_up() -> None:
    assert {"cache_attention", "delta_rule", "linear_attention", "short_conv"} <= set(OPS)
    with pytest.raises(ValueError, match="did you mean 'delta_rule'"):
        kernels.get("delta_rul")
    light = "import kernels, mechanisms, sys; kernels.names(), mechanisms.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True)
