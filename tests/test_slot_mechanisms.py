"""What the mechanisms with slots are, beyond what every mechanism keeps: reductions, what a slot holds, routing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_kernels import assert_close
from test_mechanisms import D_MODEL, HEAD_DIM, HEADS, build, close, literals, tokens, values
from test_train import Log, fit, same, stop_after, trial
from torch import Tensor

from kernels import slot_attention as op
from kernels.blurry_window import blurry_window, near, write_weights
from kernels.linear_attention import linear_attention
from kernels.slot_attention import slot_attention
from mechanisms import raven
from mechanisms.blurry_window import resolutions
from runners import model as models
from runners.schema import Trial
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

SLOTS: dict[str, list[dict[str, Any]]] = {
    "abc": [{}, {"slots": 3}],
    "blurry_window": [{}, {"slots": 3, "qk_norm": True}],
    "gsa": [{}, {"slots": 3}],
    "raven": [{}, {"router": "mlp", "qk_norm": False}, {"slots": 40, "output_gate": False}],
}


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


RAVEN = {"slots": 9, "top_k": 3}


def read_of(mixer: Any, x: Tensor) -> Tensor:
    """silu of what Raven reads from its slots: what its output norm is given."""
    seen: dict[str, Tensor] = {}
    hook = mixer.read.norm.register_forward_pre_hook(lambda _m, given: seen.update(o=given[0]))
    mixer(x)
    hook.remove()
    return seen["o"]


@pytest.mark.parametrize("mask_empty", [False, True])
def test_raven_that_takes_slots_in_turn_and_forgets_at_once_is_a_window(
    mask_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, M = 40, 9
    mixer = build("raven", {**RAVEN, "mask_empty": mask_empty})
    turn = (torch.arange(T)[:, None] % M == torch.arange(M)).double()[None, :, None].expand(2, T, HEADS, M)
    monkeypatch.setattr(mixer, "route", lambda *_: turn)
    with torch.no_grad():
        mixer.decay.A_log.fill_(100.0)
    x = tokens(T)
    q, k, v, _ = mixer.project(x, None)
    expected = torch.nn.functional.silu(windowed(mixer.norm_q(q), mixer.norm_k(k), v, M))
    first = 0 if mask_empty else M - 1
    assert close(read_of(mixer, x)[:, first:], expected[:, first:])


def test_raven_that_picks_every_slot_alike_is_one_decaying_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """With r = 1 the slots are one: Gated Slot Attention whose gate is the head's decay."""
    T = 40
    mixer = build("raven", {**RAVEN, "top_k": 9})
    monkeypatch.setattr(mixer, "route", lambda x, _: x.new_ones(2, T, HEADS, 9))
    x = tokens(T)
    _, _, v, _ = mixer.project(x, None)
    G = mixer.decay(x).cumsum(1)
    write = -torch.expm1(mixer.decay(x))
    weight = torch.exp((G[:, :, None] - G[:, None]).clamp(max=0)) * write[:, None]
    weight = weight * torch.ones(T, T).tril()[None, :, :, None]
    assert close(read_of(mixer, x), torch.nn.functional.silu(torch.einsum("bijh,bjhv->bihv", weight, v)))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("router", ["linear", "mlp"])
def test_raven_routes_to_the_largest(score: str, router: str) -> None:
    T = 30
    x, at = tokens(T), torch.arange(T)[None]
    for alpha in (1.0, 4.0):
        mixer = build("raven", {**RAVEN, "score": score, "router": router, "alpha": alpha}).eval()
        r = mixer.route(x, at)
        hidden = x if mixer.hidden is None else torch.nn.functional.gelu(mixer.hidden(x))
        logits = mixer.router(hidden).unflatten(-1, (HEADS, 9))
        m = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
        largest = m.topk(3, -1)
        total = largest.values.sum(-1, keepdim=True) + 1e-9 / alpha if score == "sigmoid" else 1.0
        assert ((r > 0).sum(-1) == 3).all()
        assert close(r.gather(-1, largest.indices), largest.values / total / alpha)
        if score == "sigmoid":
            assert close(r.sum(-1), torch.full_like(r[..., 0], 1 / alpha), 1e-6)
        mixer.train()
        noisy = mixer.route(x, at)
        assert ((noisy > 0) != (r > 0)).any()
        assert ((noisy > 0).sum(-1) == 3).all()


def test_of_equal_scores_the_slot_of_lower_number_is_picked() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(-3, 4, (200, 12), generator=generator).double() / 3
    for k in (1, 4, 12):
        picked = raven.top(scores, k)
        for row, given in zip(scores.tolist(), picked.tolist(), strict=True):
            expected = sorted(range(12), key=lambda j: (-row[j], j))[:k]
            assert [j for j in range(12) if given[j]] == sorted(expected)


def uniform(noise: Any, weight: Tensor, at: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise(weight, at, 4, 16).double()))


def test_the_noise_is_gumbel() -> None:
    noise, weight, at = raven.Noise(), torch.ones(64, 8), torch.arange(2048)[None]
    noise.draw(torch.Generator().manual_seed(6))
    u = uniform(noise, weight, at)
    assert u.shape == (1, 2048, 4, 16)
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, bins=64, min=0, max=1) / u.numel() * 64
    assert (counts - 1).abs().max() < 0.1  # 2048 a bin: five deviations
    later = uniform(noise, weight + 1e-6, at)
    noise.draw(torch.Generator().manual_seed(7))
    other = uniform(noise, weight + 1e-6, at)
    neighbours = (u[:, :-1] - u[:, 1:], u[:, :, :-1] - u[:, :, 1:], u[..., :-1] - u[..., 1:])
    for difference in (*neighbours, u - later, later - other):  # in time, heads, slots, updates and streams
        assert abs(difference.var().item() * 6 - 1) < 0.03


def test_an_update_is_counted_once_whatever_passes_it_is_made_of() -> None:
    """As many passes as a batch has parts, and weights that rounding has moved: the noise is that of the update."""
    at, weight = torch.arange(9)[None], torch.ones(4, 4)
    whole, parts = raven.Noise(), raven.Noise()
    for update in range(3):
        expected = uniform(whole, weight + update, at)
        for _ in range(update + 1):
            assert torch.equal(uniform(parts, weight + update + 1e-6, at), expected)
    resumed = raven.Noise()
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(uniform(resumed, weight + 3, at), uniform(whole, weight + 3, at))
    assert torch.equal(uniform(whole, weight + 3, at[:, 5:]), uniform(parts, weight + 3, at)[:, 5:])


def test_the_noise_is_there_in_training_alone_and_is_new_with_each_update() -> None:
    mixer, x = build("raven", RAVEN), tokens(30)
    one = mixer(x)[0]
    assert torch.equal(mixer(x)[0], one), "the same weights give the same noise"
    assert close(mixer(x[1:])[0], one[1:]), "rows share it, so a batch in parts is the batch"
    with torch.no_grad():
        mixer.router.weight.mul_(1 + 1e-12)
    assert not close(mixer(x)[0], one, 1e-3)
    quiet = build("raven", {**RAVEN, "noise": False})
    before = mixer.noise.update.clone()
    assert torch.equal(build("raven", RAVEN).eval()(x)[0], quiet(x)[0])
    assert torch.equal(mixer.noise.update, before)
    assert not close(quiet(x)[0], one, 1e-3)


def test_raven_writes_what_half_precision_would_lose() -> None:
    """1 - e^f for f = -1e-3: bf16 gives 0."""
    f = torch.full((1, 1, 1, 2), -1e-3)
    x = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    _, (keys, _) = slot_attention(x, x, x, f)
    assert (keys - 9.995e-4).abs().max() < 1e-7


def test_a_resumed_training_of_raven_sees_the_same_noise() -> None:
    of = trial(mechanism="raven", steps=6, batch_size=4, warmup=1, eval_every=6)
    of = Trial(of.id, of.seed, of.mechanism | RAVEN, of.task, of.model, of.train)
    log = Log()
    assert fit(of, should_stop=stop_after(3), log=log).status == "interrupted"
    same(fit(of), fit(of, start=log.snapshots[-1]))
    named = models.build(of).state_dict()
    streams = [value for name, value in named.items() if name.endswith("noise.stream")]
    assert len(streams) == 2
    assert streams[0] != streams[1], "each layer has its own"


@pytest.mark.parametrize("short_conv", [True, False])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_blurry_window_of_resolution_1_is_a_sliding_window(impl: str, short_conv: bool) -> None:
    for window in (1, 2, 7, 8, 16, 100):
        sharp = build("sliding_window", {"window": window}, short_conv=short_conv)
        blurry = build("blurry_window", {"slots": window, "resolution": 1}, short_conv=short_conv, impl=impl)
        blurry.load_state_dict(sharp.state_dict())
        x = tokens(50)
        given, state = blurry(x)
        expected, ring = sharp(x)
        assert close(given, expected)
        late, _ = blurry(tokens(9, seed=1), state)
        assert close(late, sharp(tokens(9, seed=1), ring)[0])


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("resolution", [1, 2, 3, 8])
def test_what_the_ring_is_written_with(slots: int, resolution: int) -> None:
    """Weights that sum to 1, one slot alone each time the write meets it, and a table that turns with the write."""
    window = slots * resolution
    t = torch.arange(3 * window)
    r = write_weights(t, slots, (resolution,))[:, 0]
    assert close(r.sum(-1), torch.ones_like(r[:, 0]), 1e-12)
    assert close(r[window:], r[:-window], 1e-12)
    assert close(r[resolution:], r[:-resolution].roll(1, -1), 1e-12)
    met = r[::resolution]
    assert torch.equal(met, torch.eye(slots, dtype=torch.float64).repeat(3, 1)), "exactly"
    assert r.max() <= 1
    assert r.min() > (-0.22 if slots > 6 else -0.334)
    harmonics = torch.arange(-((slots - 1) // 2), (slots - 1) // 2 + 1)
    if slots % 2:
        lag = torch.arange(slots) - t[:, None].double() / resolution
        dirichlet = torch.cos(2 * torch.pi * lag[..., None] * harmonics / slots).sum(-1) / slots
        assert close(r, dirichlet, 1e-12)
    assert near(t[window:], slots, (resolution,)).all()
    assert torch.equal(near(t[:1], slots, (1,))[0, 0], torch.arange(slots) < 1)


def test_a_blurry_window_forgets_all_that_is_older_and_nothing_else() -> None:
    slots, R, T = 5, 4, 70
    q, k, v = (draw(1, T, 2, 3, seed=i) for i in range(3))
    settings: dict[str, Any] = {"slots": slots, "resolution": (R, R), "scale": 0.5}
    whole, end = blurry_window(q, k, v, **settings)
    for since in (20, 40):  # from zero, but at the same place on the ring
        late, late_end = blurry_window(q[:, since:], k[:, since:], v[:, since:], **settings)
        seen = slice(since + slots * R, T)
        assert close(late[:, slots * R :], whole[:, seen])
        assert close(late_end.keys, end.keys)
    for s in (28, 30, 31):  # a token is read until the write is back at the slot that it last met
        edited = v.clone()
        edited[:, s] += 1.0
        changed = (blurry_window(q, k, edited, **settings)[0] != whole).any(-1).all(-1)[0]
        assert changed.nonzero().squeeze(1).tolist() == list(range(s, s // R * R + slots * R))


def test_resolutions_of_the_heads() -> None:
    assert resolutions(8, 6, "halving") == (8, 4, 2, 1, 8, 4)
    assert resolutions(6, 4, "halving") == (6, 3, 1, 6)
    assert resolutions(8, 3, "same") == (8, 8, 8)
    inert = literals("blurry_window")["INERT"]["spread"]
    for resolution, heads in ((1, 4), (8, 1), (8, 2)):
        around = {"n_heads": heads}
        known = values("blurry_window", {"resolution": resolution}, 100, **around)
        alike = resolutions(resolution, heads, "same") == resolutions(resolution, heads, "halving")
        assert formula.evaluate(inert, known) == alike


def test_wrong_rings_are_refused() -> None:
    x = torch.randn(2, 5, 2, 3)
    with pytest.raises(ValueError, match="2 whole numbers"):
        blurry_window(x, x, x, slots=4, resolution=(1,))
    with pytest.raises(ValueError, match="2 whole numbers"):
        blurry_window(x, x, x, slots=4, resolution=(1, 0))
    with pytest.raises(ValueError, match="0 slots"):
        blurry_window(x, x, x, slots=0, resolution=(1, 1))
    _, state = blurry_window(x, x, x, slots=4, resolution=(1, 1))
    with pytest.raises(ValueError, match=r"initial_state\.keys has shape"):
        blurry_window(x, x, x, slots=5, resolution=(1, 1), initial_state=state)
