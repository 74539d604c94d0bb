"""Log-linear attention against its definition, each token's trace kept apart; and where it is its base."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_mechanisms import build, close, literals, tokens, values
from torch import Tensor

from kernels import log_linear_attention as op
from kernels.log_linear_attention import log_linear_attention, n_levels
from mechanisms._parts import Base
from mechanisms.log_linear import ONE, LevelWeights
from sweeps import formula


def fenwick(t: int) -> dict[int, int]:
    """The level of every s <= t, by the rule of the partition: the token, then blocks as large as the count allows."""
    level, behind = {t: 0}, t
    while behind:
        size = behind & -behind
        level.update(dict.fromkeys(range(behind - size, behind), size.bit_length()))
        behind -= size
    return level


def drawn(T: int, L: int, gated: bool, H: int = 2, K: int = 4, V: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(T + L)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    inputs = {"q": draw(1, T, H, K), "k": torch.nn.functional.normalize(draw(1, T, H, K), dim=-1)}
    inputs |= {"v": draw(1, T, H, V), "g": -0.1 * draw(1, T, H).abs(), "lam": draw(1, T, H, L).abs()}
    return {**inputs, "beta": draw(1, T, H).sigmoid() if gated else None}


def defined(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, beta: Tensor | None) -> Tensor:
    """o_t = sum over s of lam^{level(t, s)} q_t^T (what is left at t of k_s v_s^T): no blocks, T traces."""
    T, L, out = q.shape[1], lam.shape[-1], []
    traces = torch.zeros(T, *k.shape[2:], v.shape[-1], dtype=v.dtype)
    for t in range(T):
        traces = traces * g[0, t].exp()[:, None, None]
        write = k[0, t]
        if beta is not None:
            write = write * beta[0, t, :, None]
            traces = traces - write[..., None] * (k[0, t, :, None] @ traces)
        traces[t] = write[..., None] * v[0, t, :, None]
        level = torch.tensor([min(at, L - 1) for _, at in sorted(fenwick(t).items())])
        out.append(torch.einsum("shkv,hk,hs->hv", traces[: t + 1], q[0, t], lam[0, t][:, level]))
    return torch.stack(out)[None]


def test_levels_are_the_bit_length_of_the_exclusive_or() -> None:
    for t in range(200):
        assert fenwick(t) == {s: (t ^ s).bit_length() for s in range(t + 1)}
        assert max(fenwick(t).values()) < n_levels(t + 1)
    assert [n_levels(T) for T in (1, 2, 3, 4, 5, 16, 17, 16384)] == [1, 2, 3, 3, 4, 5, 6, 15]


@pytest.mark.parametrize("L", [8, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_are_the_definition(gated: bool, L: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 4, so that a tree of 32 is read at every depth; with L = 4 the top level holds what lies beyond."""
    monkeypatch.setattr(op, "LONGEST", 4)
    inputs = drawn(101, L, gated)
    expected = defined(**inputs)
    assert close(log_linear_attention(**inputs)[0], expected)
    assert close(log_linear_attention(**inputs, impl="reference")[0], expected)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_through_a_deep_tree_and_its_end_are_the_laws(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "LONGEST", 4)
    inputs = {name: None if x is None else x.requires_grad_() for name, x in drawn(59, 7, gated).items()}
    leaves, found = [x for x in inputs.values() if x is not None], []
    for impl in ("reference", "chunked"):
        o, (S, _) = log_linear_attention(**inputs, impl=impl)
        weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).sin() for x in (o, S)]
        found.append(torch.autograd.grad((o * weights[0]).sum() + (S * weights[1]).sum(), leaves))
    assert all(close(fast, law) for law, fast in zip(*found, strict=True))


def test_the_state_holds_a_block_for_every_bit_of_the_position() -> None:
    for T in (1, 2, 7, 8, 12, 13):
        _, (S, length) = log_linear_attention(**drawn(T, 6, gated=True))
        alive = {level for level in range(6) if S[0, 0, level].any()}
        assert alive == {0} | {bit + 1 for bit in range(5) if (T - 1) >> bit & 1}
        assert length.tolist() == [T]


def test_the_top_level_takes_what_lies_beyond_it() -> None:
    """Decoding far past `max_len`: the state keeps its size, and the whole is what forward gives."""
    mixer, x = build("log_linear", {"d_state": 5, "max_len": 8, "lam": "mlp"}), tokens(70, batch=1)
    y, _ = mixer(x)
    _, state = mixer(x[:, :5])
    assert state["S"].shape[2] == 4
    for t in range(5, 70):
        o, state = mixer.step(x[:, t], state)
        assert close(o, y[:, t])
    assert state["S"].shape[2] == 4


@pytest.mark.parametrize("lam", ["constant", "linear_one", "mlp"])
@pytest.mark.parametrize("base", ["mamba2", "gated_deltanet"])
def test_at_its_start_it_is_its_base(base: str, lam: str) -> None:
    settings = {"d_state": 5} if base == "mamba2" else {"expand_v": 2}
    mixer, plain, x = build("log_linear", {"base": base, "lam": lam, **settings}), build(base, settings), tokens(100)
    mixer.block.load_state_dict(plain.state_dict())
    assert (lam == "constant") == close(mixer(x)[0], plain(x)[0], 1e-6)
    unlearnt(mixer)
    assert close(mixer(x)[0], plain(x)[0])


def unlearnt(mixer: Base) -> None:
    """The weights as they start: matrices of zeros, which `build` fills, and ln(e - 1), which fp32 rounds."""
    with torch.no_grad():
        for name, parameter in mixer.weights.named_parameters():
            if name in ("L", "W2"):
                parameter.zero_()
            if name in ("b", "b2"):
                parameter.fill_(ONE)


@pytest.mark.parametrize(
    ("lam", "start"),
    [("linear", math.log(2)), ("softmax", 1 / 7), ("mlp", 1.0), ("linear_one", 1.0), ("constant", 1.0)],
)
def test_weights_start_where_the_papers_start_them(lam: str, start: float) -> None:
    weights = LevelWeights(12, 2, 7, lam)
    given = weights(torch.zeros(1, 3, 12))
    assert given.shape == (1, 3, 2, 7)
    assert torch.allclose(given, torch.full_like(given, start))


@pytest.mark.parametrize("max_len", [None, 1, 64, 65, 16384])
@pytest.mark.parametrize("base", ["mamba2", "gated_deltanet"])
def test_parameters_and_levels_counted_are_those_stated(base: str, max_len: int | None) -> None:
    settings = {"base": base, "lam": "mlp", "max_len": max_len, "d_state": 5, "expand_v": 2}
    mixer, said, known = build("log_linear", settings), literals("log_linear"), values("log_linear", settings, 100)
    assert sum(p.numel() for p in mixer.parameters()) == formula.evaluate(said["PARAMS"], known)
    state = mixer.initial_state(1, torch.device("cpu"), torch.float32)
    assert state["S"].shape[2] == n_levels(max_len or 100)
    assert state["S"].numel() + 1 == formula.evaluate(said["STATE"], known)


def test_wrong_shapes_name_the_tensor() -> None:
    inputs = drawn(5, 3, gated=True)
    with pytest.raises(ValueError, match=r"beta has shape .*: dimension 1 should be 5"):
        log_linear_attention(**{**inputs, "beta": inputs["beta"][:, :4]})
    _, state = log_linear_attention(**inputs)
    with pytest.raises(ValueError, match=r"S of initial_state has shape .*: dimension 2 should be 2"):
        log_linear_attention(**{**inputs, "lam": inputs["lam"][..., :2]}, initial_state=state)
