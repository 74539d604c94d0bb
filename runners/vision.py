"""Images as rows of patches, and sets of labelled images from files. No detection: see `runners/boxes.py`.

A file of images is a NumPy archive (.npz) with `images` (count, side, side), numbers from 0 on, and `labels` (count,),
classes from 0 on. One with a set to test on has both twice, as `train_images`, `train_labels`, `test_images`,
`test_labels`, or as Keras calls them, `x_train`, `y_train`, `x_test`, `y_test`.

Letters: B images, N images of a set, C channels, S side of an image (pixels), R rows and columns of patches, T patches.
"""

from __future__ import annotations

import functools
import importlib.util
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runners import corpus, streams
from runners.extras import need
from runners.schema import UserError

KEYS = [
    ("images", "labels"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
]
"""What the arrays of a file are called: a set, or one to train and one to test on."""


@dataclass(frozen=True)
class Images:
    """Labelled images, fp32 from 0 to 1; `n_test` of them, the last ones, are the file's own set to test on."""

    image_NSS: Tensor
    label_N: Tensor
    n_test: int = 0


def patches(image_BCSS: Tensor, patch: int) -> Tensor:
    """An image as a grid of patches, row by row, each with its channels' pixels, row by row: (B, T, C patch^2)."""
    grid_BCRpRp = image_BCSS.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))
    return grid_BCRpRp.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def read(pattern: str, folder: str) -> Images:
    """The images of one .npz file, read once in a process. Raises `UserError` in one line where it is not as above."""
    paths = corpus.find(pattern, folder)
    if len(paths) > 1:
        raise UserError(f"{pattern} names {len(paths)} files: one holds the images")
    return _read(corpus.version(paths[0]))


@functools.lru_cache(maxsize=4)
def _read(version: tuple[str, int, int]) -> Images:
    path = Path(version[0])
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path.name} is no NumPy archive (.npz): {str(error).splitlines()[0]}") from error
    names = next((names for names in KEYS if set(names) <= arrays.keys()), None)
    if names is None:
        there = ", ".join(arrays) or "nothing"
        raise UserError(f"{path.name} has {there}; a set of images is {' or '.join(', '.join(n) for n in KEYS)}")
    for pixels, labels in zip(names[::2], names[1::2], strict=True):
        _check(path.name, pixels, arrays[pixels], labels, arrays[labels])
    every = np.concatenate([arrays[name] for name in names[::2]])
    label_N = torch.from_numpy(np.concatenate([arrays[name].reshape(-1) for name in names[1::2]]).astype(np.int64))
    top = float(every.max()) or 1.0
    image_NSS = torch.from_numpy(every.astype(np.float32) / np.float32(top))
    return Images(image_NSS, label_N, len(arrays[names[2]]) if len(names) > 2 else 0)


def _check(file: str, name: str, pixels: Any, labels_name: str, labels: Any) -> None:
    numbers = np.issubdtype(pixels.dtype, np.number) and np.issubdtype(labels.dtype, np.integer)
    if pixels.ndim != 3 or pixels.shape[1] != pixels.shape[2] or not numbers:
        raise UserError(f"{file}: {name} is (count, side, side) of numbers, {labels_name} whole numbers")
    if len(pixels) == 0 or labels.size != len(pixels):
        raise UserError(f"{file} has {len(pixels):,} {name} and {labels.size:,} {labels_name}: as many, and some")
    if not np.isfinite(pixels).all() or pixels.min() < 0 or labels.min() < 0:
        raise UserError(f"{file}: {name} and {labels_name} are finite, and none is below 0")


@functools.cache
def digits() -> Images:
    """The 1797 handwritten digits of 8 x 8 pixels that scikit-learn comes with (UCI, Alpaydin and Kaynak 1998)."""
    need({"sklearn": "vision"}, "task digits without image_files")
    found = importlib.util.find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    # What load_digits reads. Importing sklearn.datasets takes seconds, and every trial's process would.
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    image_NSS = torch.from_numpy(table[:, :-1].reshape(-1, 8, 8).astype(np.float32) / 16)
    return Images(image_NSS, torch.from_numpy(table[:, -1].copy()))


def parted(found: Images, n_valid: int, n_test: int, at_most: int | None) -> dict[str, Tensor]:
    """Which images train, validate and test: disjoint, and the same for every seed. A file's own set to test on is
    where those to test come from; of the others, in an order drawn once, the first are tested on, then validated on."""
    n = len(found.label_N) - found.n_test
    order = streams.permutation(streams.key("images"), n)
    own = n + streams.permutation(streams.key("test images"), found.n_test)
    test, rest = (own[:n_test], order) if found.n_test else (order[:n_test], order[n_test:])
    valid, train = rest[:n_valid], rest[n_valid:][:at_most]
    if len(test) < n_test or len(valid) < n_valid or not len(train):
        raise UserError(
            f"{len(found.label_N):,} images, {found.n_test:,} of them set apart to test on, are too few for "
            f"valid_examples {n_valid:,}, test_examples {n_test:,} and some to train on"
        )
    return {"train": train, "valid": valid, "test": test}


@functools.lru_cache(maxsize=16)
def on(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)
