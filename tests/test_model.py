"""The model shell: its weights, its labelled positions, its decoding, and what it refuses."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from runners import model as models
from runners import streams
from runners.model import BaseConv, Model
from runners.schema import Trial, UserError
from sweeps import formula

TASK = {"name": "mqar", "vocab_size": 64, "seq_len": 32, "n_pairs": 4}
MODEL = {"d_model": 16, "n_layers": 2, "n_heads": 2}
SOFTMAX = {"name": "softmax"}


def trial(
    seed: int = 0, mechanism: dict[str, Any] = SOFTMAX, task: dict[str, Any] | None = None, **model: Any
) -> Trial:
    return Trial("t", seed, mechanism, {**TASK, **(task or {})}, {**MODEL, **model}, None)


def weights(of: Trial) -> dict[str, torch.Tensor]:
    return dict(models.build(of).state_dict())


def test_mechanisms_share_the_weights_they_share() -> None:
    softmax, other = weights(trial()), weights(trial(mechanism={"name": "linear"}))
    shared = [name for name in softmax if name in other and softmax[name].shape == other[name].shape]
    assert {"embedding.weight", "layers.0.mlp.up.weight", "layers.1.mlp.down.weight"} <= set(shared)
    for name in shared:
        assert torch.equal(softmax[name], other[name]), name


def test_seed_task_and_model_change_every_matrix() -> None:
    base = weights(trial())
    for changed in (trial(seed=1), trial(task={"n_pairs": 2}), trial(position="rope"), trial(n_heads=1)):
        other = weights(changed)
        assert not torch.equal(base["embedding.weight"], other["embedding.weight"])
        assert not torch.equal(base["layers.0.mlp.up.weight"], other["layers.0.mlp.up.weight"])


def test_no_two_matrices_are_alike_and_their_spread_is_stated() -> None:
    model = models.build(trial(d_model=64, n_heads=1))
    up = [layer.mlp.up.weight for layer in model.layers]  # type: ignore[union-attr]
    assert not torch.equal(up[0], up[1])
    for weight in up:
        assert float(weight.detach().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_streams_do_not_see_how_defaults_were_written() -> None:
    """Derived values, defaults written out and short block names are the same settings; train and mechanism do not
    count."""
    short = trial()
    long = Trial(
        "u",
        0,
        {"name": "linear"},
        {**TASK, "power": 0.01, "layout": "zoology", "segments": None, "order": "blocks"},
        {**MODEL, "head_dim": 8, "mlp": {"name": "gelu", "width": None}, "moe": {"name": "none"}, "size": None},
        {"steps": 3},
    )
    assert models.stream_settings(short) == models.stream_settings(long)
    assert models.stream_settings(short) != models.stream_settings(trial(mlp={"name": "gelu", "width": 8}))
    assert models.stream_settings(short) != models.stream_settings(trial(task={"power": 1.0}))


def test_kernels_are_compared_from_the_same_weights_and_rows() -> None:
    auto, other = trial(), trial(kernels="reference")
    assert models.stream_settings(auto) == models.stream_settings(other)
    assert {module.shape.impl for module in models.build(other).modules() if hasattr(module, "shape")} == {"reference"}


def test_sizes() -> None:
    for size, nominal in {"2m": 2e6, "5m": 5e6, "10m": 1e7, "20m": 2e7}.items():
        model = Model(256, 64, SOFTMAX, size=size, head_dim=64, mlp="swiglu")  # type: ignore[arg-type]
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(nominal, rel=0.15)


@pytest.mark.parametrize("given", [{}, {"size": "5m"}, {"size": "5m", "head_dim": 64}, {"d_model": 96, "n_heads": 3}])
def test_derived_values_are_those_the_planner_reads(given: dict[str, Any]) -> None:
    facts = importlib.import_module("runners.model")
    values: dict[str, Any] = {
        "size": None,
        "d_model": None,
        "n_layers": None,
        "n_heads": None,
        "head_dim": None,
        **given,
    }
    for name, text in facts.DERIVED.items():
        if values[name] is None:
            values[name] = formula.evaluate(text, values)
    model = Model(256, 64, SOFTMAX, **given)
    assert model.d_model == values["d_model"]
    assert len(model.layers) == values["n_layers"]
    resolved = models._resolved(given)
    assert (resolved["n_heads"], resolved["head_dim"]) == (values["n_heads"], values["head_dim"])


@pytest.mark.parametrize(
    "settings", [{}, {"norm": "post"}, {"norm_type": "rms"}, {"mlp": "none"}, {"mlp": "swiglu", "tied": False}]
)
def test_logits_at_labels_are_those_of_the_whole(settings: dict[str, Any]) -> None:
    model = models.build(trial(position="learned", layers=["base_conv", "mechanism"], **settings)).double()
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(64, (3, 20), generator=generator)
    position_BQ = torch.randint(20, (3, 5), generator=generator)
    whole_BTV = model(tokens_BT)
    assert whole_BTV.shape == (3, 20, 64)
    expected = torch.stack([whole_BTV[b, position_BQ[b]] for b in range(3)])
    torch.testing.assert_close(model(tokens_BT, position_BQ), expected, rtol=1e-12, atol=1e-12)


def assert_decoding_is_the_whole(model: Model, tokens_BT: Tensor, n_prefilled: int = 9) -> None:
    """Reading some tokens at once and the others one by one gives what reading all at once does."""
    whole_BTV = model(tokens_BT)
    logits, state = model.prefill(tokens_BT[:, :n_prefilled])
    torch.testing.assert_close(logits, whole_BTV[:, n_prefilled - 1], rtol=1e-10, atol=1e-10)
    for t in range(n_prefilled, tokens_BT.shape[1]):
        logits, state = model.step(tokens_BT[:, t], state)
        torch.testing.assert_close(logits, whole_BTV[:, t], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_prefill_and_decode_equal_the_whole(norm: str) -> None:
    model = models.build(trial(position="learned", layers=["base_conv", "mechanism"], norm=norm)).double()
    tokens_BT = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(2))
    assert_decoding_is_the_whole(model, tokens_BT)


def test_base_conv_against_its_law() -> None:
    conv = BaseConv(6).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=generator)
    y, state = conv(x)
    for b in range(2):
        for t in range(7):
            mixed = conv.bias.clone()
            for lag in range(3):
                if t - lag >= 0:
                    mixed = mixed + conv.taps[2 - lag] * x[b, t - lag]
            torch.testing.assert_close(y[b, t], mixed * (conv.project.weight @ x[b, t] + conv.project.bias) + x[b, t])
    assert state["past"].numel() == 2 * 2 * 6  # two inputs of width 6, two rows
    first, carried = conv(x[:, :4])
    second, _ = conv(x[:, 4:], carried)
    torch.testing.assert_close(torch.cat([first, second], 1), y)


def test_positions_past_the_trained_length_are_those_of_a_longer_table() -> None:
    short = models.build(trial(position="learned"))
    longer = models.build(trial(position="learned"))
    longer.positions = torch.nn.Parameter(longer._drawn_positions(0, 80))
    longer.seq_len = 80
    tokens_BT = torch.randint(64, (2, 80), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(short(tokens_BT), longer(tokens_BT))
    assert short.positions is not None
    assert torch.equal(short.positions, longer.positions[:32])


def test_only_matrices_and_embeddings_decay() -> None:
    model = models.build(
        trial(mechanism={"name": "gated_deltanet"}, position="learned", layers=["base_conv", "mechanism"])
    )
    decayed = {name for name, _ in model.named_parameters()} - model.no_decay()
    assert "embedding.weight" in decayed
    assert "layers.0.mlp.up.weight" in decayed
    assert all(dict(model.named_parameters())[name].dim() == 2 for name in decayed)
    for kept in (
        "positions",
        "norm.weight",
        "layers.0.mixer.taps",
        "layers.1.mixer.decay.A_log",
        "layers.0.mlp.up.bias",
    ):
        assert kept in model.no_decay()


def test_layers_repeat() -> None:
    model = models.build(trial(n_layers=4, layers=["base_conv", "mechanism"]))
    kinds = [type(layer.mixer).__name__ for layer in model.layers]
    assert kinds == ["BaseConv", "Mixer", "BaseConv", "Mixer"]


def test_a_hybrid_gives_each_layer_its_own_mixer_settings_and_positions() -> None:
    layers = ["mechanism", "base_conv", {"name": "sliding_window", "window": 5, "position": "rope"}, "softmax"]
    model = models.build(trial(mechanism={"name": "gated_deltanet", "expand_v": 2}, n_layers=5, layers=layers))
    mixers = [layer.mixer for layer in model.layers]
    kinds = [type(mixer).__module__.rpartition(".")[2] for mixer in mixers]
    assert kinds == ["gated_deltanet", "layers", "sliding_window", "softmax", "gated_deltanet"]
    assert [mixers[at].shape.position for at in (0, 2, 3)] == ["none", "rope", "none"]  # attention has none: NoPE
    assert mixers[2].window == 5
    assert mixers[0].project.sizes == mixers[4].project.sizes == [16, 16, 32]


HYBRID = ["mechanism", {"name": "sliding_window", "window": 5}, "softmax"]


@pytest.mark.parametrize("position", ["none", "learned"])
def test_a_hybrid_decodes_as_it_reads(position: str) -> None:
    layers = [*HYBRID, {"name": "softmax", "position": "rope"}]
    model = models.build(
        trial(mechanism={"name": "raven", "slots": 8, "top_k": 2}, n_layers=4, layers=layers, position=position)
    )
    model = model.double().eval()
    tokens_BT = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(2))
    assert_decoding_is_the_whole(model, tokens_BT)


def test_arms_share_the_weights_of_a_hybrids_other_layers() -> None:
    a, b = (weights(trial(mechanism={"name": name}, n_layers=3, layers=HYBRID)) for name in ("linear", "deltanet"))
    shared = [name for name in a if name.startswith(("layers.1.", "layers.2.", "embedding"))]
    assert len(shared) > 20
    assert all(torch.equal(a[name], b[name]) for name in shared)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lobe": "causal"}, "model.lobe causal wants model.block hyper_link"),
        ({"lobe": "bidirectional", "block": "hyper_link"}, "reads the tokens that a language model is to predict"),
        ({"block": "hyper_link", "norm": "post"}, "model.norm is pre"),
        ({"moe": {"name": "moe", "experts": 4}, "mlp": "none"}, "model.moe wants model.mlp"),
        ({"causal": False}, "model.causal: false is for tasks of images"),
        ({"layers": ["convolution"]}, "a layer is one of mechanism, base_conv, abc"),
        ({"mlp": "relu"}, "'relu' is none of none, gelu, swiglu"),
        ({"n_heads": 3}, "d_model 16 is not n_heads 3 times head_dim 5"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        models.build(trial(**settings))
    assert words in str(caught.value)


def test_loss_of_an_untrained_model_is_that_of_guessing() -> None:
    model = models.build(trial(d_model=64, n_heads=1))
    tokens_BT = torch.randint(64, (64, 32), generator=torch.Generator().manual_seed(5))
    target = streams.integers(streams.key("target"), torch.arange(64 * 32), 64)
    loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), target)
    assert float(loss.detach()) == pytest.approx(math.log(64), rel=0.02)
