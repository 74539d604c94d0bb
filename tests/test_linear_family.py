"""Mechanisms on the linear attention op, against the sums over all earlier tokens that their papers state."""

from __future__ import annotations

import pytest
import torch
from test_mechanisms import HEAD_DIM, build, close, tokens
from torch import Tensor

from mechanisms.based import taylor

T = 40


def causal_read(weight_BHTS: Tensor, v_BTHV: Tensor, normalise: bool = False) -> Tensor:
    """Each token's sum of the values before and at it, by the given weights; over the sum of the weights if asked."""
    weight = weight_BHTS.tril()
    if normalise:
        weight = weight / weight.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshv->bthv", weight, v_BTHV)


def test_mamba2_is_its_masked_attention() -> None:
    """y = (L * C B^T) (dt x) + D x, with L_ts = exp(-sum over (s, t] of A dt); two heads read a group."""
    mixer, x = build("mamba2", {"d_state": 5, "groups": 2}), tokens(T)
    c_BTGN, b_BTGN, inner_BTHP, _, _ = mixer.inputs(x, None)
    dt = torch.nn.functional.softplus(x @ mixer.decay.proj.weight.T + mixer.decay.dt_bias)
    passed_BHT = (mixer.decay.A_log.exp() * dt).cumsum(1).mT
    group = torch.tensor([0, 0, 1, 1])
    scores = torch.einsum("bthn,bshn->bhts", c_BTGN[:, :, group], b_BTGN[:, :, group])
    weight = scores * (passed_BHT[:, :, None] - passed_BHT[..., None]).clamp(max=0).exp()
    y = causal_read(weight, dt[..., None] * inner_BTHP)
    assert close(mixer(x)[0], mixer.read(y, inner_BTHP, x))
    skip = mixer.D[:, None] * inner_BTHP
    gated = (y + skip).flatten(2) * torch.nn.functional.silu(mixer.gate(x))
    halves = [part * (part.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for part in gated.chunk(2, -1)]
    assert close(mixer(x)[0], mixer.out(torch.cat(halves, -1)))


def test_gla_keeps_of_each_channel_the_sixteenth_root_of_its_gate() -> None:
    mixer, x = build("gla", {}), tokens(T)
    q, k, v, _ = mixer.project(x, None)
    assert q.shape[-1] == k.shape[-1] == HEAD_DIM // 2
    keep = mixer.gate_up(mixer.gate_down(x)).sigmoid() ** (1 / 16)
    keep_BTHK = keep.unflatten(-1, q.shape[2:])
    S, out = torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1], dtype=torch.float64), []
    for t in range(T):
        S = keep_BTHK[:, t, ..., None] * S + k[:, t, ..., None] * v[:, t, :, None]
        out.append((q[:, t, :, None] @ S).squeeze(2) / (HEAD_DIM // 2) ** 0.5)
    assert close(mixer(x)[0], mixer.read(torch.stack(out, 1), x))


def test_retention_turns_by_the_distance_and_fades_by_its_head() -> None:
    mixer, x, half = build("retnet", {}), tokens(T), HEAD_DIM // 2
    q, k, v, _ = mixer.project(x, None)
    q, k = (torch.complex(part[..., :half], part[..., half:]) for part in (q, k))
    time = torch.arange(T, dtype=torch.float64)
    apart = time[:, None] - time
    rate_K = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(T, T, half, dtype=torch.float64), apart[..., None] * rate_K)
    scores = torch.einsum("bthk,bshk,tsk->bhts", q, k.conj(), turn).real
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=torch.float64)
    o = causal_read(scores * gamma[:, None, None] ** apart.clamp(min=0), v) / HEAD_DIM**0.5
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    gate = torch.nn.functional.silu(mixer.gate(x))
    assert close(mixer(x)[0], mixer.out(o.flatten(2) * gate))


@pytest.mark.parametrize("D", [1, 2, 5, 16])
def test_taylor_features_hold_each_pair_once(D: int) -> None:
    q, k = torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(D))
    s = (q * k).sum(-1) / D**0.5
    assert taylor(q).shape == (7, 1 + D + D * (D + 1) // 2)
    assert close((taylor(q) * taylor(k)).sum(-1), 1 + s + s**2 / 2)


def test_based_weighs_tokens_by_the_series() -> None:
    mixer, x = build("based", {"feature_dim": 5}), tokens(T)
    q, k, v, _ = mixer.project(x, None)
    s = torch.einsum("bthk,bshk->bhts", q, k) / 5**0.5
    assert close(mixer(x)[0], mixer.out(causal_read(1 + s + s**2 / 2, v, normalise=True).flatten(2)))


def ela_weights(kernel: str, q: Tensor, k: Tensor) -> Tensor:
    q, k = q.transpose(1, 2)[:, :, :, None], k.transpose(1, 2)[:, :, None]
    if kernel == "hadamard_exp":
        return (q + k).exp().sum(-1)
    if kernel == "modulated_dot":
        return ((q * k).sum(-1) + 1) * (q.square().sum(-1) + 1) * (k.square().sum(-1) + 1)
    return (q + k if kernel == "sum_squared" else q - k).square().sum(-1)


@pytest.mark.parametrize("kernel", ["hadamard_exp", "sum_squared", "difference_squared", "modulated_dot"])
def test_ela_weighs_tokens_by_its_kernel(kernel: str) -> None:
    mixer, x = build("ela", {"kernel": kernel}), tokens(T)
    q, k, v, _ = mixer.project(x, None)
    q, k = mixer._normalised(q, k)
    weight = ela_weights(kernel, q, k)
    assert (weight >= 0).all()
    assert close(mixer(x)[0], mixer.out(causal_read(weight, v, normalise=True).flatten(2)))


def test_ela_differences_are_sums_with_q_turned() -> None:
    one, other = (build("ela", {"kernel": f"{name}_squared", "qk_norm": False}) for name in ("sum", "difference"))
    with torch.no_grad():
        other.project.qkv.weight[: one.project.sizes[0]].neg_()
    assert close(one(tokens(T))[0], other(tokens(T))[0])


@pytest.mark.parametrize("scale", [1.0, 40.0, 400.0])
def test_ela_takes_logits_of_any_size_in_single_precision(scale: float) -> None:
    """Against log-weights in fp64: at 40, and with one maximum a head in place of one a channel, all is lost."""
    mixer = build("ela", {"qk_norm": False}).float()
    with torch.no_grad():
        mixer.project.qkv.weight[: 2 * mixer.project.sizes[0]].mul_(scale)
    x = tokens(100).float().requires_grad_()
    q, k, v, _ = (part.double() if isinstance(part, Tensor) else part for part in mixer.project(x, None))
    log_BHTS = (q.transpose(1, 2)[:, :, :, None] + k.transpose(1, 2)[:, :, None]).logsumexp(-1)
    ahead = torch.ones(100, 100).triu(1).bool()
    law = causal_read(log_BHTS.masked_fill(ahead, -torch.inf).softmax(-1), v).flatten(2)
    heads: dict[str, Tensor] = {}
    mixer.out.register_forward_pre_hook(lambda _m, given: heads.update(o=given[0]))
    y, state = mixer(x)
    error = (heads["o"].double() - law).abs().max().item() / law.abs().max().item()
    assert error < 3e-7 * max(10.0, scale)  # what rounding a logit of that size costs
    assert all(part.isfinite().all() for part in (y, *state.values()))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.isfinite().all()
