"""Digits: which of ten classes is in the image? Handwritten digits of 8 x 8 pixels, or any labelled images by path.

One image of `patch: 4` is a row of 4 patches of 16 numbers from 0 to 1, left to right and top to bottom:

    . . 5 d|9 1 . .      patches  1 2      row  1 2 3 4       label  0
    . . d f|a f 5 .               3 4
    . 3 f 2|. b 8 .      The model reads patches through a matrix, and answers once: from the mean over the patches of
    . 4 c .|. 8 8 .      what its last layer says. So a mixer may see the whole image (`model.causal: false`), or only
    -------+-------      what comes before a patch.
    . 5 8 .|. 9 8 .
    . 4 b .|1 c 7 .          accuracy   share of right images
    . 2 e 5|a c . .          loss       nats an image
    . . 6 d|a . . .

Every image belongs to one of training, validation and test, by an order drawn once; the seed draws the order in which
training sees its own. `only` tests images of one class: an evaluation over it is the accuracy of each class, as in
`evaluate: {classes: {task.only: [0, 1, 2]}}`.

Source: scikit-learn's digits (the test set of UCI's Optical Recognition of Handwritten Digits, Alpaydin and Kaynak
1998). Patches and the mean over them: Vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929) as simplified by
Beyer et al. 2022 (arXiv 2205.01580). Choice: no augmentation.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from runners import vision
from runners.batch import SPLITS, Batch, Patches, label_scores
from runners.rows import refuse
from runners.schema import Exit, UserError

REVISION = 1
LIMITS = [
    "image_size >= 1",
    "patch >= 1",
    "image_size % patch == 0",
    "seq_len == (image_size // patch) * (image_size // patch)",
    "n_classes >= 2",
    "only is None or only >= 0 and only < n_classes",
    "examples is None or examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
    "image_files is not None or image_size == 8",
]
DERIVED = {"seq_len": "(image_size // patch) * (image_size // patch)"}
PATCHES = {"features": "patch * patch", "outputs": "n_classes"}
METRICS = {"accuracy": "max", "loss": "min"}
BOUNDS = {"accuracy": [0, 1]}
LABELS = "1"
CHANCE = {"accuracy": "1 / n_classes", "loss": "log(n_classes)"}
SELECT = "accuracy"
TRAINS = True


class Task:
    """Classification of small images.

    Args:
        image_files: images and labels, an .npz file; from the folder of the spec's file. None = scikit-learn's digits
        image_size: side of an image (pixels)
        patch: side of a patch, which is a token (pixels)
        seq_len: patches of an image; it follows from the two
        n_classes: classes (count)
        only: test images of this class alone; none = of all
        examples: training images at most (count); none = all that are left
        valid_examples: validation images (count)
        test_examples: test images (count)
    """

    order = "mixed"
    vocab_size = 0

    def __init__(
        self,
        folder: str = ".",
        *,
        image_files: str | None = None,
        image_size: int = 8,
        patch: int = 1,
        seq_len: int | None = None,
        n_classes: int = 10,
        only: int | None = None,
        examples: int | None = None,
        valid_examples: int = 300,
        test_examples: int = 300,
    ) -> None:
        side = image_size // patch if patch > 0 else 0
        rules = {
            "image_size % patch == 0": side > 0 and image_size == side * patch,
            "seq_len == (image_size // patch) * (image_size // patch)": seq_len in (None, side * side),
            "only < n_classes": only is None or 0 <= only < n_classes,
        }
        refuse("digits", rules, f"image_size {image_size}, patch {patch}, seq_len {seq_len}, only {only}")
        self.seq_len, self.patches = side * side, Patches(patch * patch, (side, side), n_classes, pooled=True)
        self._files, self._folder, self._size, self._patch, self._only = image_files, folder, image_size, patch, only
        self._at_most = (valid_examples, test_examples, examples)

    @functools.cached_property
    def _images(self) -> vision.Images:
        found = vision.digits() if self._files is None else vision.read(self._files, self._folder)
        size, classes = found.image_NSS.shape[-1], int(found.label_N.max()) + 1
        if size != self._size:
            raise UserError(f"the images are {size} x {size} pixels: say image_size: {size}, not {self._size}")
        if classes > self.patches.outputs:
            raise UserError(f"there are labels up to {classes - 1}: say n_classes: {classes}")
        return found

    @functools.cached_property
    def _parts(self) -> dict[str, Tensor]:
        """The images of each split, by number."""
        parts = vision.parted(self._images, *self._at_most)
        if self._only is not None:
            parts["test"] = parts["test"][self._images.label_N[parts["test"]] == self._only]
            if not len(parts["test"]):
                raise UserError(f"no image to test on is of the class {self._only} (only)")
        return parts

    def check(self) -> None:
        """Raises `UserError` where the images are not there, or not as the settings say."""
        try:
            _ = self._parts
        except UserError as error:
            raise UserError(f"task digits: {error}", Exit.ENVIRONMENT) from error

    def groups(self, split: str) -> list[range]:
        """Row numbers of one epoch: one group."""
        return [range(len(self._parts[split]))]

    def n_examples(self, split: str) -> int | None:
        return len(self._parts[split])

    def batch(self, split: str, index_B: Tensor, seed: int, device: torch.device | str = "cpu") -> Batch:
        """Rows `index_B` (int64, on the host) of a split, on `device`."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
        device, found = torch.device(device), self._images
        at_B = self._parts[split][index_B].to(device, non_blocking=True)
        image_BSS, label_B = (vision.on(x, device)[at_B] for x in (found.image_NSS, found.label_N))
        patch_BTP = vision.patches(image_BSS[:, None], self._patch)
        return Batch(patch_BTP, torch.zeros_like(label_B)[:, None], label_B[:, None])

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Accuracy and loss of each image."""
        return label_scores(logits_BQV, batch)
