"""Blocks of the model around a mixer: mixtures of experts, Hyper-Link, the Memory Lobe. Each against its law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_model import assert_decoding_is_the_whole
from torch import Tensor

from runners import micro
from runners import model as models
from runners.batch import NO_LABEL, Batch
from runners.model import GeluMlp, Model, Moe
from runners.schema import Trial

TASK = {"name": "mqar", "vocab_size": 64, "seq_len": 32, "n_pairs": 4}
LINK = {"block": "hyper_link"}
LOBE = {"block": "hyper_link", "lobe": "causal"}
EXPERTS = {"moe": {"name": "moe", "experts": 5, "top_k": 2, "bias": "outer"}}
OPTIONS = {"link": LINK, "lobe": LOBE, "experts": EXPERTS, "all": LOBE | EXPERTS, "no mlp": LOBE | {"mlp": "none"}}


def built(mechanism: str = "gated_deltanet", **model: Any) -> Model:
    settings = {"d_model": 16, "n_layers": 2, "n_heads": 2, **model}
    return models.build(Trial("t", 0, {"name": mechanism}, TASK, settings, None)).double()


def tokens(T: int, batch: int = 3) -> Tensor:
    return torch.randint(64, (batch, T), generator=torch.Generator().manual_seed(T))


# --- experts ----------------------------------------------------------------------------------------------------


def experts(bias: str, top_k: int = 2) -> Moe:
    moe = Moe(6, lambda: GeluMlp(6, width=7), experts=4, top_k=top_k, bias=bias, balance=0.3).double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(generator=generator)
    return moe


def moe_law(moe: Moe, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """One token at a time, only through the experts it is sent to; and the balance of each row."""
    rows, losses = [], []
    E = len(moe.experts)
    for x_TD in x_BTD:
        outputs, picks, scores = [], torch.zeros(E, dtype=x_TD.dtype), torch.zeros(E, dtype=x_TD.dtype)
        for x_D in x_TD:
            g_E = (moe.router.weight @ x_D).softmax(0)
            chosen = sorted(range(E), key=lambda e: (-g_E[e].item(), e))[: moe.top_k]
            y_D = torch.zeros_like(x_D)
            for e in chosen:
                S, B_D = g_E[e] / g_E[chosen].sum(), moe.router.weight[e]
                inner = moe.experts[e](x_D) + (B_D if moe.bias == "inner" else 0)
                y_D = y_D + S * inner + (B_D if moe.bias == "outer" else 0)
                picks[e] += 1 / (moe.top_k * len(x_TD))
            outputs.append(y_D)
            scores = scores + g_E / len(x_TD)
        rows.append(torch.stack(outputs))
        losses.append(moe.balance * E * (picks * scores).sum())
    return torch.stack(rows), torch.stack(losses)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("bias", ["none", "outer", "inner"])
def test_experts_against_their_law(bias: str, top_k: int) -> None:
    moe = experts(bias, top_k)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    wanted = [x, *moe.parameters()]
    weight = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y, given = moe(x), moe.take_loss()
    law, balance = moe_law(moe, x)
    torch.testing.assert_close(y, law, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(given, balance, rtol=1e-12, atol=1e-12)
    sums = ((y * weight).sum() + given.sum(), (law * weight).sum() + balance.sum())
    for a, b in zip(*(torch.autograd.grad(total, wanted, allow_unused=True) for total in sums), strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moe.eval()(x[:, 3]), y[:, 3], rtol=1e-12, atol=1e-12)  # a token alone, as in decoding


def test_equal_scores_go_to_the_lower_number_and_an_even_load_costs_its_weight() -> None:
    moe = experts("none")
    with torch.no_grad():
        moe.router.weight.zero_()
    picked, share, _ = moe.route(torch.randn(2, 3, 6, dtype=torch.float64))
    assert picked[..., :2].all()
    assert not picked[..., 2:].any()
    assert torch.equal(share, picked / 2)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(4, 6) * 50)
    moe(torch.eye(4, 6, dtype=torch.float64)[None] + torch.eye(4, 6, dtype=torch.float64).roll(1, 0)[None])
    assert float(moe.take_loss().detach()) == pytest.approx(
        0.3
    )  # the least there is: each expert has a quarter of the picks
    moe(torch.eye(4, 6, dtype=torch.float64)[None, :1].expand(1, 8, 6) * 2)
    assert float(moe.take_loss().detach()) == pytest.approx(
        0.3 * 4 / 2
    )  # one expert has half of the picks and all of the score


def test_a_batch_in_parts_has_the_gradient_of_the_whole_and_shows_the_loss_at_labels() -> None:
    model = built(**EXPERTS).train()
    positions = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(b))[:6] for b in range(5)])
    batch = Batch(tokens(20, 5), positions, tokens(6, 5))
    batch.target_BQ[1, 2:] = NO_LABEL
    found = {}
    for rows in (None, 2):
        model.zero_grad(set_to_none=True)
        shown = micro.backward(model, batch, "fp32", rows)
        found[rows] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        logits = model.eval()(batch.tokens_BT, batch.position_BQ).float()
        plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target_BQ.flatten())
        torch.testing.assert_close(shown, plain.detach(), rtol=1e-6, atol=1e-6)
        model.train()
    for name, whole in found[None].items():
        torch.testing.assert_close(found[2][name], whole, rtol=1e-5, atol=1e-8)
    routers = {name: grad for name, grad in found[None].items() if "router" in name}
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.balance = 0.0  # type: ignore[union-attr]
    model.zero_grad(set_to_none=True)
    micro.backward(model, batch, "fp32", None)
    without = dict(model.named_parameters())
    assert all(not torch.allclose(without[name].grad, grad, rtol=1e-3) for name, grad in routers.items())  # type: ignore[arg-type]


# --- whole layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["gated_deltanet", "softmax"])
@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_and_decode_are_the_whole(name: str, mechanism: str) -> None:
    assert_decoding_is_the_whole(built(mechanism, **OPTIONS[name]).eval(), tokens(24))


@pytest.mark.parametrize("name", OPTIONS)
def test_no_token_reads_the_future_and_the_lobe_mixes_tokens(name: str) -> None:
    model, tokens_BT = built(**OPTIONS[name]).eval(), tokens(24)
    edited = tokens_BT.clone()
    edited[:, 11] = (edited[:, 11] + 1) % 64
    changed = (model(edited) != model(tokens_BT)).any(-1)
    assert not changed[:, :11].any()
    assert changed[:, 11:].all()


def test_hyper_link_is_one_block_a_layer_and_the_lobe_a_sum_over_the_past() -> None:
    """The layer again, from its matrices: the lobe's weights are sum_d e^{q_d + k_d}, one head of the model's width."""
    layer: Any = built(**LOBE).layers[0]
    x_BTD = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    y_BTD, _ = layer(x_BTD)
    unit = x_BTD / (x_BTD.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    a_BTD, _ = layer.mixer(unit)
    flow = a_BTD + layer.mlp.down(torch.nn.functional.gelu(layer.mlp.up(a_BTD)))
    q, k, v = layer.lobe.project.qkv(flow).split(16, -1)
    weight_BTS = torch.einsum("btd,bsd->bts", q.exp(), k.exp()).tril()
    recalled = weight_BTS / weight_BTS.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(y_BTD, x_BTD + flow + recalled, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_learns_in_half_precision_too(name: str) -> None:
    model = built(**OPTIONS[name]).float().train()
    batch = Batch(tokens(32), torch.arange(32).expand(3, 32), tokens(32).roll(-1, 1))
    norms = {}
    for dtype in ("fp32", "bf16"):
        model.zero_grad(set_to_none=True)
        loss = micro.backward(model, batch, dtype, None)
        assert loss.isfinite()
        norms[dtype] = {n: 0.0 if p.grad is None else float(p.grad.norm()) for n, p in model.named_parameters()}
        assert all(norm > 0 for norm in norms[dtype].values()), [n for n, norm in norms[dtype].items() if not norm > 0]
