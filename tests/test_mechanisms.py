"""What every mechanism keeps, found by its file: law, causality, decoding, size of its state. And HOLA's reductions."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mechanisms
from mechanisms._parts import Base, Shape
from sweeps import formula

D_MODEL, HEADS, HEAD_DIM = 12, 2, 6
LENGTHS = [1, 2, 63, 64, 65, 100]
FP32_SUMS = ("ela", "mesanet", "preconditioned_gated_deltanet")
"""Mechanisms whose linear attention sums squares, or for a solve; it rounds products as its values are."""
SMALL: dict[str, dict[str, int]] = {
    "abc": {"slots": 5},
    "gsa": {"slots": 5},
    "blurry_window": {"slots": 5, "resolution": 8},
    "raven": {"slots": 9, "top_k": 3},
    "sliding_window": {"window": 7},
    "based": {"feature_dim": 4},
    "conv": {"kernel_size": 4},
    "gated_deltanet": {"expand_v": 2},
    "hola": {"cache": 5, "block": 8},
    "mamba2": {"d_state": 5, "groups": 2},
    "log_linear": {"d_state": 5},
}
"""Values small enough that the lengths above reach past them. A mechanism that is not here is tested as it comes."""

FP64 = 1e-11


def literals(name: str) -> dict[str, Any]:
    """The module-level literals of a mechanism, read as the planner reads them."""
    tree = ast.parse((Path(mechanisms.__file__).parent / f"{name}.py").read_text())
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return {
        node.targets[0].id: ast.literal_eval(node.value) for node in assigned if isinstance(node.targets[0], ast.Name)
    }


def values(name: str, settings: dict[str, Any], seq_len: int, **around: Any) -> dict[str, Any]:
    """Every name that a rule or formula of the mechanism may read."""
    signature = inspect.signature(mechanisms.get(name).__init__)
    defaults = {k: p.default for k, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    model = {"d_model": D_MODEL, "n_heads": HEADS, "head_dim": HEAD_DIM, "seq_len": seq_len, "position": "none"}
    model["short_conv"] = around.pop("short_conv", True)
    return {**model, "conv": 3 if model["short_conv"] else 0, "causal": True, **around, **defaults, **settings}


def variants(name: str) -> Iterator[dict[str, Any]]:
    """Settings that use every choice of every parameter once, the others as they are; those LIMITS forbids left out."""
    base, seen = SMALL.get(name, {}), []
    signature = inspect.signature(mechanisms.get(name).__init__)
    hints = typing.get_type_hints(mechanisms.get(name).__init__)
    for key, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            choices = (False, True) if hints[key] is bool else typing.get_args(hints[key])
            seen += [{**base, key: choice} for choice in choices if isinstance(choice, bool | str)]
    if name == "hola":
        seen.append({**base, "cache": 0, "admission": "none"})
    if name == "linear":
        seen.append({"normaliser": False, "feature_map": "identity", "unit_keys": True})
    kept: list[dict[str, Any]] = []
    for settings in [dict(base), *seen]:
        allowed = formula.all_hold(tuple(literals(name)["LIMITS"]), values(name, settings, 64))
        resolved = values(name, settings, 64)
        if allowed and all(resolved != values(name, other, 64) for other in kept):
            kept.append(settings)
    yield from kept


CASES = [
    pytest.param(name, settings, id="-".join([name, *(f"{key}={value}" for key, value in settings.items())]))
    for name in mechanisms.names()
    for settings in variants(name)
]


def initialise(mixer: Base, seed: int = 0) -> Base:
    """Weights as the model draws them, each from its name alone, but large enough that every part matters; fp64."""

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed * 1_000_003 + sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)

    with torch.no_grad():
        for name, module in mixer.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, 0.5, generator=generator(f"{name}.weight"))
                if module.bias is not None:
                    module.bias.normal_(0, 0.5, generator=generator(f"{name}.bias"))
        mixer.init_special(generator)
        for name, parameter in mixer.named_parameters():
            if parameter.dim() > 1 and not parameter.any():  # a matrix that starts as zero hides what is before it
                parameter.normal_(0, 0.5, generator=generator(name))
    return mixer.double()


def build(name: str, settings: dict[str, Any], seq_len: int = 100, seed: int = 0, **shape: Any) -> Base:
    whole = Shape(**{"d_model": D_MODEL, "n_heads": HEADS, "head_dim": HEAD_DIM, "seq_len": seq_len, **shape})
    return initialise(mechanisms.get(name)(whole, **settings), seed)


def tokens(T: int, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, T, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1000 * T))


def close(given: Tensor, expected: Tensor, tolerance: float = FP64) -> bool:
    """Within `tolerance` of the larger of 1 and the largest expected value. False for NaN."""
    assert given.shape == expected.shape
    if expected.numel() == 0:
        return True
    scale = max(1.0, expected.abs().max().item())
    return (given - expected).abs().max().item() <= tolerance * scale


def outcome(mixer: Base, x: Tensor) -> dict[str, Tensor]:
    """Output, input gradient and every parameter's gradient, of a fixed projection of the output."""
    x = x.clone().requires_grad_()
    y, _ = mixer(x)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(99)).to(y.device)
    wanted = dict(mixer.named_parameters())
    grads = torch.autograd.grad((y * weight).sum(), [x, *wanted.values()], allow_unused=True)
    zero = [torch.zeros_like(p) for p in [x, *wanted.values()]]
    named = zip(["x", *wanted], grads, zero, strict=True)
    return {"y": y.detach(), **{k: z if g is None else g for k, g, z in named}}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_chunked_equals_the_law(name: str, settings: dict[str, Any]) -> None:
    fast, law = build(name, settings), build(name, settings, impl="reference")
    for T in LENGTHS:
        x = tokens(T)
        given, expected = outcome(fast, x), outcome(law, x)
        wrong = [k for k in expected if not close(given[k], expected[k])]
        assert not wrong, f"T {T}: {wrong}"


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_no_token_reads_the_future_and_every_token_reads_the_past(name: str, settings: dict[str, Any]) -> None:
    mixer, T, s = build(name, settings), 70, 37
    x = tokens(T)
    y, _ = mixer(x)
    edited = x.clone()
    edited[:, s] = tokens(1, seed=5)[:, 0]
    changed = (mixer(edited)[0] != y).any(-1)
    assert not changed[:, :s].any(), "an output before the edited token changed"
    assert changed[:, s : s + 4].all(), "the outputs just after the edited token did not change"
    reach = s + settings.get("window", settings.get("kernel_size", T - s))
    assert changed[:, s:reach].all(), "an output that should read the edited token did not change"

    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(mixer(x)[0][:, s].sum(), x)
    assert (grad[:, s + 1 :] == 0).all()
    assert (grad[:, max(0, s - 3) : s + 1] != 0).any(-1).all()


@pytest.mark.parametrize("short_conv", [True, False])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_prefill_and_decode_are_the_whole(name: str, settings: dict[str, Any], short_conv: bool) -> None:
    mixer, T = build(name, settings, short_conv=short_conv), 41
    x = tokens(T)
    y, final = mixer(x)
    for cut in (0, 1, 13, 16, 33):  # inside, on and behind a border of HOLA's blocks
        state = mixer(x[:, :cut])[1] if cut else mixer.initial_state(2, x.device, x.dtype)
        parts = []
        for t in range(cut, T):
            o, state = mixer.step(x[:, t], state)
            parts.append(o)
        assert close(torch.stack(parts, 1), y[:, cut:]), f"decode after {cut} tokens"
        assert state.keys() == final.keys()
        wrong = [
            k for k in final if state[k].dtype != final[k].dtype or not close(state[k].double(), final[k].double())
        ]
        assert not wrong, f"state after {cut} tokens and {T - cut} steps: {wrong}"
        if cut:
            late, state = mixer(x[:, cut:], mixer(x[:, :cut])[1])
            assert close(late, y[:, cut:]), f"two parts, cut at {cut}"
            wrong = [k for k in final if not close(state[k].double(), final[k].double())]
            assert not wrong, f"state of two parts, cut at {cut}: {wrong}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_packed_sequences_are_each_by_itself(name: str, settings: dict[str, Any], device: str) -> None:
    mixer = build(name, settings).to(device)
    lengths = (5, 0, 33, 1, 18)
    ends = torch.tensor((0, *lengths), device=device).cumsum(0)
    x = tokens(sum(lengths), batch=1).to(device).requires_grad_()
    alone = torch.cat([mixer(part)[0] for part in x.split(lengths, dim=1) if part.shape[1]], dim=1)
    together = mixer.packed(x, ends, max(lengths))
    assert close(together, alone)
    weight = torch.randn(alone.shape, dtype=alone.dtype, generator=torch.Generator().manual_seed(3)).to(device)
    wanted = [x, *mixer.parameters()]
    grads = [
        torch.autograd.grad((y * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
        for y in (together, alone)
    ]
    assert all(close(given, expected) for given, expected in zip(*grads, strict=True))


@pytest.mark.parametrize("short_conv", [True, False])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_state_counted_is_state_stated(name: str, settings: dict[str, Any], short_conv: bool) -> None:
    said = literals(name)
    for T, position in ((5, "none"), (40, "none"), (40, "rope")):
        known = values(name, settings, T, short_conv=short_conv, position=position)
        if not formula.all_hold(tuple(said["LIMITS"]), known):
            continue
        mixer = build(name, settings, seq_len=T, short_conv=short_conv, position=position).float()
        state = mixer.initial_state(1, torch.device("cpu"), torch.bfloat16)
        wide = {torch.float32, torch.int32}
        assert {x.dtype for x in state.values()} <= {*wide, torch.bfloat16}
        kept = {k: x.dtype in wide for k, x in state.items()}
        _, state = mixer(tokens(T, batch=1).float())
        counted = {w: sum(x.numel() for k, x in state.items() if kept[k] == w) for w in (True, False)}
        assert counted[True] == formula.evaluate(said["STATE"], known)
        assert counted[False] == formula.evaluate(said["CACHE"], known)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_gradients_are_finite_and_reach_every_parameter(name: str, settings: dict[str, Any]) -> None:
    found = outcome(build(name, settings), tokens(65))
    assert all(x.isfinite().all() for x in found.values())
    dead = [k for k, x in found.items() if not (x != 0).any()]
    assert not dead


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_ops_run_in_the_precision_of_the_activations(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One input that is wider would take a kernel to fp32, where it is ten times slower. Solves are in fp32 anyway, and
    sums of squared keys."""
    module, seen = importlib.import_module(f"mechanisms.{name}"), set()

    def told(op: Any, *given: Any, **options: Any) -> Any:
        seen.update(x.dtype for x in given[:3] if x is not None)
        return op(*given, **options)

    for op in ("delta_rule", "slot_attention", "cache_attention", "log_linear_attention", "kda", "linear_attention"):
        if hasattr(module, op) and not (op == "linear_attention" and name in FP32_SUMS):
            monkeypatch.setattr(module, op, functools.partial(told, getattr(module, op)))
    mixer = build(name, settings).float()
    with torch.autocast("cpu", torch.bfloat16):
        mixer(tokens(17).float())
    assert seen <= {torch.bfloat16}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_same_seed_same_output(name: str, settings: dict[str, Any]) -> None:
    x = tokens(65)
    one, two, other = (outcome(build(name, settings, seed=seed), x) for seed in (3, 3, 4))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(one["y"], other["y"])


@pytest.mark.parametrize("name", mechanisms.names())
def test_half_precision_keeps_gates_and_states_in_single(name: str) -> None:
    mixer = build(name, SMALL.get(name, {})).float()
    x = tokens(33).float()
    law, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    start = mixer.initial_state(2, x.device, torch.bfloat16)
    assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in start.items()}
    assert ((y.float() - law).norm() / law.norm()).item() < 0.05
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in mixer.parameters())


@pytest.mark.parametrize("name", mechanisms.names())
def test_the_file_says_what_it_is(name: str) -> None:
    said, mixer = literals(name), mechanisms.get(name)
    assert said["REVISION"] >= 1
    doc = (Path(mechanisms.__file__).parent / f"{name}.py").read_text().split('"""')[1]
    where = [doc.find(f"\n{part}\n") for part in ("Recurrence", "Source", "State", "Cost", "Limits")]
    assert -1 not in where
    assert where == sorted(where)
    known = values(name, {}, 64)
    for text in [
        said["STATE"],
        said["CACHE"],
        *said["LIMITS"],
        *said.get("INERT", {}).values(),
        *said.get("CAPS", {}).values(),
    ]:
        assert formula.names(text) <= known.keys()
    assert set(said.get("SAME_AS", {})) <= set(mechanisms.names())
    parameters = list(inspect.signature(mixer.__init__).parameters.values())[2:]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    assert all(f"{p.name}: " in (mixer.__doc__ or "") for p in parameters)


def test_a_typo_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'gated_deltanet'"):
        mechanisms.get("gated_delta_net")


# Reductions: settings under which one mechanism is another.


def same(a: Base, b: Base, T: int = 50) -> bool:
    """Equal outputs from equal weights, for the parameters they share."""
    a.load_state_dict(b.state_dict(), strict=False)
    return close(a(tokens(T))[0], b(tokens(T))[0])


@pytest.mark.parametrize("name", [n for n in mechanisms.names() if literals(n).get("SAME_AS")])
def test_same_as_is_the_same(name: str) -> None:
    for other, condition in literals(name)["SAME_AS"].items():
        for T in (6, 7, 8, 50):
            holds = formula.evaluate(condition, values(name, SMALL.get(name, {}), T))
            position = "rope" if T == 6 else "none"
            own = SMALL.get(name, {})
            twins = (build(n, s, position=position) for n, s in ((name, own), (other, {})))
            assert same(*twins, T=T) == holds


def test_inert_settings_change_nothing() -> None:
    condition = literals("hola")["INERT"]["admission"]
    for T, cache, block in (
        (40, 5, 8),
        (40, 32, 8),
        (41, 32, 8),
        (41, 40, 8),
        (8, 1, 8),
        (9, 1, 8),
        (9, 8, 8),
        (40, 0, 8),
    ):
        x = tokens(T)
        reads = {}
        for admission in ("residual", "recency", "random"):
            mixer = build("hola", {"cache": cache, "block": block, "admission": admission}, seq_len=T)
            reads[admission] = mixer(x)[0].detach()
        inert = formula.evaluate(condition, values("hola", {"cache": cache, "block": block}, T))
        differ = any(not close(y, reads["residual"]) for y in reads.values())
        assert inert == (not differ), f"T {T}, cache {cache}, block {block}"


def test_a_value_above_its_cap_acts_as_the_cap_and_one_below_does_not() -> None:
    caps = literals("hola")["CAPS"]
    for T, cache, block in ((40, 5, 8), (40, 32, 8), (40, 50, 8), (41, 39, 8), (41, 40, 8), (9, 8, 8), (9, 3, 20)):
        x = tokens(T)

        def read(cache: int, block: int, x: Tensor = x) -> Tensor:
            return build("hola", {"cache": cache, "block": block}, seq_len=len(x[0]))(x)[0].detach()

        capped = min(block, formula.evaluate(caps["block"], values("hola", {"block": block}, T)))
        most = formula.evaluate(caps["cache"], values("hola", {"cache": cache, "block": capped}, T))
        assert close(read(cache, block), read(min(cache, most), capped)), f"T {T}, cache {cache}, block {block}"
        if most > 0:
            assert close(read(most, block), read(most + 9, block))
            assert not close(read(most, block), read(most - 1, block))
    assert close(read(0, T), read(0, T + 5))
    assert not close(read(0, T), read(0, T - 1))


def test_hola_without_cache_and_gate_is_gated_deltanet() -> None:
    hola, plain = build("hola", {"cache": 0, "block": 8, "admission": "none"}), build("gated_deltanet", {})
    assert not same(hola, plain)
    with torch.no_grad():
        hola.gate.fill_(-torch.inf)  # sigmoid gives exactly 0
    assert same(hola, plain)


def test_gated_deltanet_without_decay_and_gate_is_deltanet() -> None:
    gated, plain = build("gated_deltanet", {}), build("deltanet", {})
    with torch.no_grad():
        gated.decay.A_log.fill_(-torch.inf)
        gated.read.gate.weight.zero_()
    gated.project.load_state_dict(plain.project.state_dict())
    gated.write.load_state_dict(plain.write.state_dict())
    gated.read.norm.load_state_dict(plain.norm.state_dict())
    gated.read.out.load_state_dict(plain.out.state_dict())
    x = tokens(50)
    heads: dict[str, Tensor] = {}
    gated.read.norm.register_forward_hook(lambda _m, _i, out: heads.update(gated=out))
    plain.norm.register_forward_hook(lambda _m, _i, out: heads.update(plain=out))
    gated(x), plain(x)
    assert close(heads["gated"], heads["plain"])


def exact_read(mixer: Base, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v of unit q and k, and what HOLA's exact read alone gives."""
    from mechanisms._parts import unit_norm

    q, k, v, _ = mixer.project(x, None)
    heads: dict[str, Tensor] = {}
    with torch.no_grad():
        mixer.gate.fill_(torch.inf)  # weight 1
        mixer.read.norm.register_forward_pre_hook(lambda _m, given: heads.update(both=given[0]))
        mixer(x)
        mixer.gate.fill_(-torch.inf)
        both = heads["both"]
        mixer(x)
    return unit_norm(q), unit_norm(k), v, both - heads["both"]


def softmax_read(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("admission", ["residual", "recency", "error", "value", "random"])
@pytest.mark.parametrize("read", ["rms", "l2"])
def test_hola_that_keeps_everything_reads_as_softmax(admission: str, read: str) -> None:
    T = 50
    mixer = build("hola", {"cache": T, "block": 8, "admission": admission, "read": read})
    with torch.no_grad():
        mixer.sink.fill_(-torch.inf)
    q, k, v, given = exact_read(mixer, tokens(T))
    expected = softmax_read(q, k, v, HEAD_DIM**0.5 if read == "rms" else 1.0)
    assert close(given, expected)


def test_hola_that_keeps_nothing_reads_its_block_as_softmax() -> None:
    block = 8
    mixer = build("hola", {"cache": 0, "block": block, "admission": "none"})
    with torch.no_grad():
        mixer.sink.fill_(-torch.inf)
    q, k, v, given = exact_read(mixer, tokens(44))
    for start in range(0, 44, block):
        part = slice(start, start + block)
        assert close(given[:, part], softmax_read(q[:, part], k[:, part], v[:, part], HEAD_DIM**0.5))


@pytest.mark.parametrize("admission", ["residual", "error", "value", "recency", "random"])
def test_hola_keeps_what_its_admission_says(admission: str) -> None:
    """The cache after the sequence, against scores computed here from the recurrence, token by token."""
    T, cache, block = 45, 5, 8
    mixer = build("hola", {"cache": cache, "block": block, "admission": admission})
    x = tokens(T)
    _, k, v, _ = mixer.project(x, None)
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, alpha = mixer.write(x), mixer.decay(x).exp()
    S = torch.zeros(2, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    scores = []
    for t in range(T):
        S = S * alpha[:, t, :, None, None]
        e = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + beta[:, t, :, None, None] * k[:, t, :, :, None] * e[:, :, None]
        sizes = {"residual": beta[:, t] * e.norm(dim=-1), "error": e.norm(dim=-1)}
        sizes |= {"value": beta[:, t] * v[:, t].norm(dim=-1), "recency": torch.full((2, HEADS), float(t))}
        scores.append(sizes.get(admission, torch.zeros(2, HEADS)))
    position = mixer(x)[1]["position"][:, :cache]
    if admission == "random":
        assert torch.equal(position[0], position[1])  # of position and head alone, not of the data
        assert torch.equal(position, mixer(tokens(T, seed=1))[1]["position"][:, :cache])
        assert not torch.equal(position[0, :, 0].sort().values, torch.arange(35, 40, dtype=torch.int32))
        return
    done = T // block * block
    expected = torch.stack(scores, 1)[:, :done].topk(cache, 1).indices
    assert torch.equal(position.long().sort(1).values, expected.sort(1).values)


def test_random_admission_is_uniform() -> None:
    from mechanisms.hola import position_hash

    u = position_hash(torch.arange(4096)[None], 4).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.01
    counts = torch.histc(u, bins=16, min=0, max=1) / u.numel() * 16
    assert (counts - 1).abs().max() < 0.15
    lag = torch.corrcoef(torch.stack([u[0, :-1, 0], u[0, 1:, 0]]))[0, 1]
    assert lag.abs() < 0.06


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_on_a_card(name: str, settings: dict[str, Any]) -> None:
    """The law's values in fp64, the same bits each time, and no wait for the card within a step."""
    on_card, law = build(name, settings).cuda(), build(name, settings, impl="reference")
    for T in (1, 65, 100):
        x = tokens(T)
        expected = outcome(law, x)
        given = {k: v.cpu() for k, v in outcome(on_card, x.cuda()).items()}
        wrong = [k for k in expected if not close(given[k], expected[k])]
        assert not wrong, f"T {T}: {wrong}"

    single, x = build(name, settings).float().cuda(), tokens(100).float().cuda().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            runs = [single(x)[0] for _ in range(2)]
        grads = [torch.autograd.grad(y.float().sum(), [x, *single.parameters()], allow_unused=True) for y in runs]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(*runs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None)
