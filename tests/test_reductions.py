"""Settings under which one of the newer baselines is an older mechanism, or an op that was proved apart."""

from __future__ import annotations

import pytest
import torch
from test_mechanisms import HEAD_DIM, build, close, same, tokens
from torch import Tensor

from kernels import mesa_solve as mesa
from kernels.delta_rule import delta_rule
from kernels.kda import examples as kda_examples
from kernels.kda import kda
from kernels.mesa_solve import mesa_solve
from kernels.ridge_solve import ridge_solve
from mechanisms._parts import unit_norm


def test_preconditioned_gated_deltanet_without_scaling_is_gated_deltanet() -> None:
    plain = build("gated_deltanet", {"expand_v": 2})
    assert same(build("preconditioned_gated_deltanet", {"expand_v": 2, "squash": 1.0}), plain)
    assert not same(build("preconditioned_gated_deltanet", {"expand_v": 2}), plain)


def test_preconditioned_gated_deltanet_token_by_token() -> None:
    """Against the recurrence of its docstring, written out here."""
    mixer, x = build("preconditioned_gated_deltanet", {}), tokens(30)
    q, k, v, _ = mixer.project(x, None)
    q, k = unit_norm(q), unit_norm(k)
    beta, alpha = mixer.write(x), mixer.decay(x).exp()
    b, c = mixer.curvature_write(x), mixer.curvature_decay(x).exp()
    S, A, out = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), []
    for t in range(30):
        A = c[:, t, :, None] * A + b[:, t, :, None] * k[:, t] ** 2
        r = torch.log(A + 1e-6) - mixer.center  # -0.2, in fp32
        M = 1.5 ** -(r / (1 + r.abs()))
        S = alpha[:, t, :, None, None] * S
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, :, None]).sum(2))
        S = S + (M * k[:, t])[..., None] * u[:, :, None]
        out.append((S * q[:, t, :, :, None]).sum(2) * HEAD_DIM**-0.5)
    heads: list[Tensor] = []
    mixer.read.norm.register_forward_pre_hook(lambda _module, given: heads.append(given[0]))
    _, state = mixer(x)
    assert close(heads[0], torch.stack(out, 1))
    assert close(state["S"], S)
    assert close(state["A"][:, :, 0], A)


def test_a_channel_is_scaled_within_its_bounds_and_the_less_the_more_it_was_used() -> None:
    mixer, x = build("preconditioned_gated_deltanet", {"squash": 2.0}), tokens(40)
    k = torch.nn.functional.normalize(mixer.project(x, None)[1], dim=-1)
    written, A = mixer._precondition(k, x, None)
    scale = written / k
    assert scale.min() > 0.5
    assert scale.max() < 2
    used = torch.stack([mixer._precondition(k[:, :t], x[:, :t], None)[1][:, :, 0] for t in range(1, 41)], 1)
    assert close(A[:, :, 0], used[:, -1])
    by_use = scale.flatten()[used.flatten().argsort()]
    assert by_use.diff().max() < 1e-12  # one center for all heads at first, so one falling curve


def test_kda_with_equal_decays_is_gated_deltanet() -> None:
    """Of the ops, and of what the mixers hand to their output gates, which differ."""
    for inputs in kda_examples(65, torch.float64, torch.Generator().manual_seed(0)):
        g = inputs.pop("g")[..., :1]
        q, k, v, beta = (inputs.pop(name) for name in ("q", "k", "v", "beta"))
        o, S = kda(q, k, v, beta, g.expand_as(k), **inputs)
        expected, expected_S, _ = delta_rule(q, k, None, v, beta, g[..., 0], **inputs)
        assert close(o, expected)
        assert close(S, expected_S)

    plain, mixer, x = build("gated_deltanet", {}), build("kda", {}), tokens(50)
    mixer.project.load_state_dict(plain.project.state_dict())
    mixer.write.load_state_dict(plain.write.state_dict())
    mixer.decay.forward = lambda x: plain.decay(x)[..., None].expand(-1, -1, -1, HEAD_DIM)
    heads: list[Tensor] = []
    for norm in (plain.read.norm, mixer.norm):
        norm.register_forward_hook(lambda _module, _given, out: heads.append(out))
    plain(x), mixer(x)
    assert close(*heads)


def test_mesa_solve_without_decay_is_ridge_solve() -> None:
    for inputs in mesa.examples(65, torch.float64, torch.Generator().manual_seed(1)):
        q, k, beta, lam, start = (inputs[name] for name in ("q", "k", "beta", "lam", "initial_state"))
        y, H = mesa_solve(q, k, beta, torch.zeros_like(beta), lam, initial_state=start)
        expected, expected_H = ridge_solve(beta.sqrt()[..., None] * k, q, lam, initial_state=start)
        assert close(y, expected)
        assert close(H, expected_H)


def test_mesanet_answers_with_the_ridge_regression_of_values_on_keys() -> None:
    """By the normal equations of the weighted squares, for the last token."""
    mixer, x = build("mesanet", {"keep": 0.9}), tokens(30)
    q, k, _ = mixer._keys(x, None)
    beta, g = mixer._gates(x)
    v = mixer.v(x).unflatten(-1, (mixer.shape.n_heads, -1))
    weight = beta * (g.sum(1, keepdim=True) - g.cumsum(1)).exp()
    lam = torch.nn.functional.softplus(mixer.ridge) + 0.25
    heads: list[Tensor] = []
    mixer.norm.register_forward_pre_hook(lambda _module, given: heads.append(given[0]))
    mixer(x)
    kk, kv = (torch.einsum("bth,bthk,bthv->bhkv", weight, k, values) for values in (k, v))
    W = torch.linalg.solve(kk + torch.diag_embed(lam), kv)
    assert close(heads[0][:, -1], torch.einsum("bhkv,bhk->bhv", W, q[:, -1]))


def test_the_mesa_solve_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = next(mesa.examples(100, torch.float64, torch.Generator().manual_seed(2)))
    whole, _ = mesa_solve(**inputs)
    monkeypatch.setattr(mesa, "TILE", 1)
    assert torch.equal(mesa_solve(**inputs)[0], whole)
