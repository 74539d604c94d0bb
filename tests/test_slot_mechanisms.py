"""What the mechanisms with slots are, beyond what every mechanism keeps: reductions, what a slot holds, routing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_kernels import assert_close
from test_mechanisms import D_MODEL, HEAD_DIM, HEADS, build, close, literals, tokens, values
from torch import Tensor

from kernels import slot_attention as op
from kernels.linear_attention import linear_attention
from kernels.slot_attention import slot_attention
from sweeps import formula


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(size)))


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float = 1.0) -> Tensor:
    """Softmax over the last `window` tokens, written out."""
    T = q.shape[1]
    x = torch.einsum("bihk,bjhk->bhij", q, k) * scale
    seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)
    return torch.einsum("bhij,bjhv->bihv", x.masked_fill(~seen, -torch.inf).softmax(-1), v)


# The op.


def test_the_backward_pass_of_slots() -> None:
    N, J, C, M, K, V = 3, 2, 3, 3, 3, 2
    f, s = -draw(N, J, C, M).abs(), draw(N, J, C, M, seed=1)
    inputs = [draw(N, J, C, K, seed=2), draw(N, J, C, K, seed=3), draw(N, J, C, V), f, s, draw(J, M, K + V)]
    inputs = [x.requires_grad_() for x in inputs]
    written = torch.rand(N, J, C, M, generator=torch.Generator().manual_seed(4)) < 0.7
    for mask in (None, written):
        assert torch.autograd.gradcheck(lambda *x, m=mask: op._Chunked.apply(*x, m, 0.7), inputs, fast_mode=True)


def test_parts_of_any_size_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = next(op.examples(65, torch.float64, torch.Generator().manual_seed(1)))
    found = []
    for size in (1, 8 * 16 * 16 * 6 * 2, 1 << 30):
        monkeypatch.setattr(op, "TILE", size)
        o, state = slot_attention(**inputs)
        found.append([o, *state])
    assert_close(found[0], found[2], 1e-15)
    assert_close(found[1], found[2], 1e-15)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_one_slot_a_token_is_a_window(impl: str) -> None:
    """Writes of 1 in turn: from token M - 1 on with empty slots read as zeros, from the first with them masked."""
    T, M = 40, 7
    q, k, v = (draw(2, T, 3, 4, seed=i) for i in range(3))
    turn = torch.arange(T)[:, None] % M == torch.arange(M)
    f = torch.where(turn, -torch.inf, 0.0).double()[None, :, None].expand(2, T, 3, M)
    expected = windowed(q, k, v, M, 0.5)
    masked, _ = slot_attention(q, k, v, f, scale=0.5, mask_empty=True, impl=impl)
    assert close(masked, expected)
    plain, _ = slot_attention(q, k, v, f, scale=0.5, impl=impl)
    assert close(plain[:, M - 1 :], expected[:, M - 1 :])
    assert not close(plain[:, : M - 1], expected[:, : M - 1])


def test_the_second_pass_is_linear_attention_with_a_decay_a_key_channel() -> None:
    """The softmax over slots as query, the writes as keys; and the first pass likewise, transposed."""
    T, M, K = 50, 5, 4
    q, k, v = (draw(2, T, 3, K, seed=i) for i in range(3))
    f = -draw(2, T, 3, M).abs()
    s = -torch.expm1(f)
    keys = torch.stack([linear_attention(s[:, :t], s[:, :t], k[:, :t], f[:, :t])[1] for t in range(1, T + 1)], 1)
    p = torch.einsum("bthmk,bthk->bthm", keys, q).softmax(-1)
    o, state = linear_attention(p, s, v, f)
    given, (end_k, end_v) = slot_attention(q, k, v, f)
    assert close(given, o)
    assert close(end_k, keys[:, -1])
    assert close(end_v, state)


def test_without_a_write_nothing_is_read() -> None:
    q = draw(1, 20, 1, 3)
    f = torch.zeros(1, 20, 1, 4, dtype=torch.float64).requires_grad_()
    for impl in ("reference", "chunked"):
        o, _ = slot_attention(q, q, q, f, mask_empty=True, impl=impl)
        assert (o == 0).all()
        assert torch.autograd.grad(o.sum(), f)[0].isfinite().all()


def test_packed_sequences_do_not_meet() -> None:
    inputs: dict[str, Any] = next(op.examples(65, torch.float64, torch.Generator().manual_seed(2)))
    inputs = {key: x[:1] if isinstance(x, Tensor) else x for key, x in inputs.items()}
    ends = [0, 1, 1, 30, 65]
    inputs["initial_state"] = tuple(draw(4, *x.shape[1:], seed=i) for i, x in enumerate(inputs["initial_state"]))
    o, state = slot_attention(**inputs, cu_seqlens=torch.tensor(ends))
    for n, (first, behind) in enumerate(itertools.pairwise(ends)):
        start = tuple(x[n : n + 1] for x in inputs["initial_state"])
        part = {key: x[:, first:behind] if isinstance(x, Tensor) else x for key, x in inputs.items()}
        alone = (o[:, :0], start) if first == behind else slot_attention(**{**part, "initial_state": start})
        assert_close([o[:, first:behind], *(x[n : n + 1] for x in state)], [alone[0], *alone[1]], 1e-12)


def test_wrong_shapes_name_the_tensor() -> None:
    x, f = torch.randn(2, 5, 2, 3), -torch.rand(2, 5, 2, 4)
    with pytest.raises(ValueError, match=r"f has shape .*: dimension 1 should be 5"):
        slot_attention(x, x, x, f[:, :4])
    with pytest.raises(ValueError, match="keys of initial_state has shape"):
        slot_attention(x, x, x, f, initial_state=(torch.zeros(2, 2, 3, 3), torch.zeros(2, 2, 4, 3)))
    with pytest.raises(ValueError, match="multiple of the second"):
        slot_attention(x, x, x[:, :, :1], f[:, :, :1])
    with pytest.raises(ValueError, match="batch of 1"):
        slot_attention(x, x, x, f, cu_seqlens=torch.tensor([0, 5]))


# The mechanisms.

SLOTS: dict[str, list[dict[str, int]]] = {"gsa": [{}, {"slots": 3}], "abc": [{}, {"slots": 3}]}


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("short_conv", [True, False])
def test_parameters_counted_are_parameters_stated(name: str, short_conv: bool) -> None:
    for settings in SLOTS[name]:
        mixer = build(name, settings, short_conv=short_conv)
        stated = formula.evaluate(literals(name)["PARAMS"], values(name, settings, 100, short_conv=short_conv))
        assert sum(p.numel() for p in mixer.parameters()) == stated


def test_a_slot_of_abc_is_a_softmax_over_the_past() -> None:
    T, M = 40, 5
    mixer = build("abc", {"slots": M})
    x = tokens(T)
    _, k, v, _ = mixer.project(x, None)
    c = mixer.control(x).unflatten(-1, (HEADS, M))
    for t in (1, 2, 17, T):
        weight = c[:, :t].softmax(1)
        _, state = mixer(x[:, :t])
        assert close(state["keys"], torch.einsum("bthm,bthk->bhmk", weight, k[:, :t]))
        assert close(state["values"], torch.einsum("bthm,bthk->bhmk", weight, v[:, :t]))
        assert close(state["total"], c[:, :t].exp().sum(1))


def test_abc_holds_scores_that_would_overflow() -> None:
    mixer = build("abc", {"slots": 5}).float()
    with torch.no_grad():
        mixer.control.weight.mul_(100.0)
    x = tokens(300).float().requires_grad_()
    y, state = mixer(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert all(part.isfinite().all() for part in (y, grad, *state.values()))


def test_slots_of_gsa_that_gate_alike_are_one_mean() -> None:
    """With one gate for all slots the softmax is uniform, whatever the query: a decaying mean of the values."""
    T = 50
    mixer = build("gsa", {"slots": 3})
    with torch.no_grad():
        mixer.forget.weight.zero_()  # a = 2^(-1/8)
    heads: dict[str, Tensor] = {}
    mixer.norm.register_forward_pre_hook(lambda _m, given: heads.update(o=given[0]))
    x = tokens(T)
    mixer(x)
    _, _, v, _ = mixer.project(x, None)
    a = 0.5**0.125
    age = torch.arange(T)[:, None] - torch.arange(T)
    weight = ((1 - a) * a ** age.clamp(min=0).double()).tril()
    expected = torch.einsum("ij,bjhv->bihv", weight, v)
    assert close(heads["o"], torch.nn.functional.silu(expected).flatten(2))
    assert heads["o"].shape == (2, T, HEADS * HEAD_DIM)
    assert D_MODEL == HEADS * HEAD_DIM
