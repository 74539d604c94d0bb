"""Mechanisms on the linear attention op, against the sums over all earlier tokens that their papers state."""

from __future__ import annotations

import torch
from test_mechanisms import HEAD_DIM, build, close, tokens
from torch import Tensor

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
    inner_BTHP, b_BTGN, c_BTGN, _ = mixer._inputs(x, None)
    dt = torch.nn.functional.softplus(x @ mixer.decay.proj.weight.T + mixer.decay.dt_bias)
    passed_BHT = (mixer.decay.A_log.exp() * dt).cumsum(1).mT
    group = torch.tensor([0, 0, 1, 1])
    scores = torch.einsum("bthn,bshn->bhts", c_BTGN[:, :, group], b_BTGN[:, :, group])
    weight = scores * (passed_BHT[:, :, None] - passed_BHT[..., None]).clamp(max=0).exp()
    y = causal_read(weight, dt[..., None] * inner_BTHP)
    assert close(mixer(x)[0], mixer._read(y, inner_BTHP, x))
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
    turn = torch.polar(torch.ones(T, T, half).double(), apart[..., None] * 1e4 ** (-torch.arange(half) / half))
    scores = torch.einsum("bthk,bshk,tsk->bhts", q, k.conj(), turn).real
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=torch.float32).double()
    o = causal_read(scores * gamma[:, None, None] ** apart.clamp(min=0), v) / HEAD_DIM**0.5
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    gate = torch.nn.functional.silu(mixer.gate(x))
    assert close(mixer(x)[0], mixer.out(o.flatten(2) * gate), 1e-6)  # gamma is kept in single precision
