"""Images: patches, models that read both ways, the convolution, digits from scikit-learn or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_mechanisms import D_MODEL, HEAD_DIM, HEADS, close, initialise, tokens

import mechanisms
from mechanisms._parts import Base, Shape
from runners import layers, tasks, vision
from runners import model as models
from runners.schema import Trial, UserError
from sweeps import costs
from sweeps.catalog import Catalog
from sweeps.plan import load
from sweeps.reader import SpecError

PLAIN = {"d_model": 16, "n_layers": 2, "n_heads": 2, "short_conv": False}
KERNELS = ("hadamard_exp", "sum_squared", "difference_squared", "modulated_dot")


def mixer(name: str, impl: str = "auto", causal: bool = False, **settings: Any) -> Base:
    shape = Shape(D_MODEL, HEADS, HEAD_DIM, 35, False, "none", impl, causal, (5, 7))
    return initialise(mechanisms.get(name)(shape, **settings))


def trial(mechanism: str = "ela", task: dict[str, Any] | None = None, **model: Any) -> Trial:
    settings = {"name": "digits", "patch": 2, **(task or {})}
    return Trial("t", 0, {"name": mechanism}, settings, {**PLAIN, "causal": False, **model}, None)


def test_patches_hold_their_pixels() -> None:
    image = torch.arange(2 * 3 * 6 * 6.0).view(2, 3, 6, 6)
    made = vision.patches(image, 2)
    assert made.shape == (2, 9, 12)
    for row in range(3):
        for column in range(3):
            own = image[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(made[:, 3 * row + column], own.flatten(1))


# models that read both ways


@pytest.mark.parametrize("kernel", KERNELS)
def test_ela_weighs_every_token_where_it_is_not_causal(kernel: str) -> None:
    """Against the paper's weights, each query and key alone; and the sums are the last ones of the causal mixer."""
    own, causal = mixer("ela", kernel=kernel), mixer("ela", causal=True, kernel=kernel)
    x_BTD = tokens(35)
    q, k, v, _ = own.project(x_BTD, None)
    q, k = own._normalised(q, k)
    pairs = q[:, :, None], k[:, None]  # B T S H K
    if kernel == "hadamard_exp":
        w = (pairs[0] + pairs[1]).exp().sum(-1)
    elif kernel == "modulated_dot":
        sizes = [p.square().sum(-1) + 1 for p in pairs]
        w = ((pairs[0] * pairs[1]).sum(-1) + 1) * sizes[0] * sizes[1]
    else:
        w = (pairs[0] + (pairs[1] if kernel == "sum_squared" else -pairs[1])).square().sum(-1)
    law = torch.einsum("btsh,bshv->bthv", w / w.sum(2, keepdim=True), v).flatten(2)
    y, state = own(x_BTD)
    assert close(y, own.out(law))
    last = causal(x_BTD)[1]
    assert all(close(state[name], last[name]) for name in last)


def test_ela_stands_keys_of_any_size() -> None:
    own = mixer("ela", qk_norm=False).float()
    y, _ = own(300 * tokens(35).float())
    assert y.isfinite().all()


def test_softmax_reads_every_token_where_it_is_not_causal() -> None:
    x = tokens(35)
    y, _ = mixer("softmax")(x)
    assert close(y, mixer("softmax", "reference")(x)[0])
    assert close(mixer("softmax")(x.flip(1))[0], y.flip(1))  # a set, not a sequence
    assert not close(y, mixer("softmax", causal=True)(x)[0])


def test_conv_sees_the_patches_around() -> None:
    own = mixer("conv")
    x = tokens(35)
    u = own.up(x).view(2, 5, 7, -1)
    law = torch.zeros_like(u)
    for row in range(5):
        for column in range(7):
            for tap, weight in enumerate(own.taps.T):
                r, c = row + tap // 3 - 1, column + tap % 3 - 1
                if 0 <= r < 5 and 0 <= c < 7:
                    law[:, row, column] += weight * u[:, r, c]
    assert close(own(x)[0], own.down(torch.nn.functional.silu(law)).flatten(1, 2))


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel_size", [3, 5])
def test_conv_is_as_large_as_attention(width: int, kernel_size: int) -> None:
    shape = Shape(width, 4, width // 4, 16, False, causal=False, grid=(4, 4))
    own = mechanisms.get("conv")(shape, kernel_size=kernel_size)
    n_params = sum(p.numel() for p in own.parameters())
    assert 0.98 < n_params / (4 * width * width) <= 1


@pytest.mark.parametrize("block", ["pre_norm", "hyper_link"])
def test_other_mechanisms_run_both_ways_with_one_set_of_weights(block: str) -> None:
    one, both = (models.build(trial("gated_deltanet", block=block, causal=causal)).double() for causal in (True, False))
    assert {n: p.shape for n, p in one.named_parameters()} == {n: p.shape for n, p in both.named_parameters()}
    layer: Any = both.layers[0]
    x = torch.randn(2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forwards, backwards = layer.mixer(x)[0], layer.mixer(x.flip(1))[0].flip(1)
    given, _ = layers.sequence(layer.mixer, x, None, layer.both_ways)
    assert torch.equal(given, forwards + backwards)
    assert close(layer(x.flip(1))[0], layer(x)[0].flip(1))
    later = x.clone()
    later[:, 9] += 1
    assert (layer(later)[0] != layer(x)[0]).any(-1).all(), "a token does not see what comes after it"


def test_a_lobe_may_read_both_ways() -> None:
    model = models.build(trial(block="hyper_link", lobe="bidirectional")).double()
    layer: Any = model.layers[0]
    x = torch.randn(2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert close(layer.lobe(x.flip(1))[0], layer.lobe(x)[0].flip(1))
    with pytest.raises(UserError, match="reads the tokens that a language model is to predict"):
        models.build(trial(block="hyper_link", lobe="bidirectional", causal=True))


def test_a_model_that_is_not_causal_does_not_decode() -> None:
    model = models.build(trial())
    with pytest.raises(ValueError, match="reads whole rows"):
        model.prefill(torch.zeros(1, 16, 4))


@pytest.mark.parametrize("task", [{}, {"name": "detection", "image_size": 32, "max_objects": 1}])
@pytest.mark.parametrize("mechanism", ["ela", "softmax", "conv", "gated_deltanet"])
def test_parameters_of_models_of_images_are_counted(mechanism: str, task: dict[str, Any], tmp_path: Path) -> None:
    settings = {"name": "digits", "patch": 2, **({} if not task else {"patch": 8}), **task}
    spec = f"""sweep: images
task: {{{", ".join(f"{k}: {v}" for k, v in settings.items())}}}
model: {{d_model: 16, n_layers: 2, n_heads: 2, short_conv: false, causal: false, position: learned}}
train: {{steps: 2, batch_size: 2}}
mechanism: {mechanism}
"""
    path = tmp_path / "images.yaml"
    path.write_text(spec)
    found = load(str(path)).members[0].trial
    built = models.build(found)
    counted = costs.Analyst(Catalog(), costs.CPU).work(found).n_params
    assert counted == sum(p.numel() for p in built.parameters())
    answers = built(tasks.build(found.task).batch("valid", torch.arange(2), 0).tokens_BT)
    assert answers.shape == (2, 1 if not task else 16, 10 if not task else 8)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("task: mqar\nmodel: {causal: false, short_conv: false}", "model wants causal or images"),
        ("task: digits\nmodel: {causal: false}", "mechanism ela wants causal or not short_conv"),
        ("task: {name: digits, patch: 3}", "task digits wants image_size % patch == 0"),
        ("task: {name: digits, image_size: 28}", "wants image_files is not None or image_size == 8"),
        ("task: {name: detection, max_objects: 10}", "max_objects <= (image_size // max_size)"),
    ],
)
def test_specs_that_cannot_be(lines: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"sweep: wrong\nmechanism: ela\ntrain: {{steps: 2, batch_size: 2}}\n{lines}\n")
    with pytest.raises(SpecError) as caught:
        load(str(path))
    assert words in str(caught.value)


# digits


def test_every_digit_is_in_one_split_and_for_every_seed_the_same() -> None:
    task = tasks.build({"name": "digits"})
    seen = torch.cat([task._parts[split] for split in ("train", "valid", "test")])
    assert torch.equal(seen.sort().values, torch.arange(1797))
    assert [task.n_examples(split) for split in ("train", "valid", "test")] == [1197, 300, 300]
    a, b = (task.batch("train", torch.arange(20), seed) for seed in (0, 1))
    assert torch.equal(a.tokens_BT, b.tokens_BT)
    assert a.tokens_BT.shape == (20, 64, 1)
    assert a.tokens_BT.max() == 1
    assert a.target_BQ.shape == (20, 1)


@pytest.mark.wide
def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    own, theirs = vision.digits(), load_digits()
    assert np.array_equal(own.image_NSS.numpy() * 16, theirs.images)
    assert np.array_equal(own.label_N.numpy(), theirs.target)


def test_classes_one_by_one_are_all_of_them() -> None:
    task = tasks.build({"name": "digits"})
    whole = task.batch("test", torch.arange(300), 0).target_BQ
    rows = 0
    for digit in range(10):
        own = tasks.build({"name": "digits", "only": digit})
        n = own.n_examples("test")
        assert own.batch("test", torch.arange(n), 0).target_BQ.eq(digit).all()
        assert n == whole.eq(digit).sum()
        rows += n
    assert rows == 300


def archive(path: Path, **arrays: Any) -> dict[str, Any]:
    np.savez(path / "some.npz", **arrays)
    return {"name": "digits", "folder": str(path), "image_files": "some.npz", "image_size": 4, "n_classes": 3} | {
        "valid_examples": 2,
        "test_examples": 3,
    }


def test_a_file_of_images(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 4, 4), dtype=np.uint8)
    pixels[0, 0, 0] = 255
    labels = np.arange(20) % 3
    task = tasks.build(archive(tmp_path, images=pixels, labels=labels))
    for split in ("train", "valid", "test"):
        made = task.batch(split, torch.arange(2), 0)
        for row, label in zip(made.tokens_BT[..., 0], made.target_BQ[:, 0], strict=True):
            (at,) = np.flatnonzero((pixels.reshape(20, 16) / 255 - row.numpy().round(6)).__abs__().max(1) < 1e-5)
            assert labels[at] == label
    assert task.n_examples("train") == 15
    both = {"x_train": pixels[:12], "y_train": labels[:12], "x_test": pixels[12:], "y_test": labels[12:]}
    own = tasks.build(archive(tmp_path, **both))
    assert own._parts["test"].min() >= 12
    assert torch.cat([own._parts["train"], own._parts["valid"]]).max() < 12
    assert own.n_examples("train") == 10


PIXELS = np.ones((20, 4, 4))


@pytest.mark.parametrize(
    ("arrays", "settings", "words"),
    [
        ({"pictures": PIXELS}, {}, "some.npz has pictures; a set of images is images, labels or"),
        ({"images": PIXELS, "labels": np.zeros(19, int)}, {}, "has 20 images and 19 labels"),
        ({"images": PIXELS[:, :3], "labels": np.zeros(20, int)}, {}, "images is (count, side, side)"),
        ({"images": PIXELS, "labels": np.full(20, 3)}, {}, "labels up to 3: say n_classes: 4"),
        ({"images": -PIXELS, "labels": np.zeros(20, int)}, {}, "none is below 0"),
        ({"images": PIXELS, "labels": np.zeros(20, int)}, {"image_size": 8}, "say image_size: 4"),
        ({"images": PIXELS, "labels": np.zeros(20, int)}, {"test_examples": 19}, "are too few for valid_examples 2"),
        ({"images": PIXELS, "labels": np.zeros(20, int)}, {"only": 2}, "no image to test on is of the class 2"),
        ({}, {"image_files": "sme.npz"}, "there is no file sme.npz"),
    ],
)
def test_files_that_are_wrong(arrays: dict[str, Any], settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        tasks.build({**archive(tmp_path, **arrays), **settings}).check()
    assert words in str(caught.value)
    assert str(caught.value).startswith("task digits: ")


def test_conv_wants_images_of_the_trained_size() -> None:
    with pytest.raises(ValueError, match="conv reads images of 5 x 7 patches"):
        mixer("conv")(tokens(36))


@pytest.mark.parametrize(
    ("file", "settings", "train"),
    [
        ("digits8x8_sklearn", {"image_size": 8}, 1197),
        ("mnist_5k", {"image_size": 28, "patch": 4}, 4400),
        ("fashion_mnist_6k", {"image_size": 28, "patch": 7, "test_examples": 1000}, 4700),
    ],
)
def test_real_images(file: str, settings: dict[str, Any], train: int, real_data: Path) -> None:
    path = {"folder": str(real_data), "image_files": f"vision/{file}.npz"}
    task = tasks.build({"name": "digits", **path, **settings})
    task.check()
    assert task.n_examples("train") == train
    batch = task.batch("test", torch.arange(200), 0)
    assert batch.target_BQ.unique().tolist() == list(range(10))
    assert batch.tokens_BT.max() == 1
    if file == "digits8x8_sklearn":
        usual = tasks.build({"name": "digits"}).batch("test", torch.arange(200), 0)
        assert torch.equal(usual.tokens_BT, batch.tokens_BT)
        assert torch.equal(usual.target_BQ, batch.target_BQ)


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    settings = archive(tmp_path)
    (tmp_path / "some.npz").write_text("pixels")
    with pytest.raises(UserError, match=r"some\.npz is no NumPy archive"):
        tasks.build(settings).check()
