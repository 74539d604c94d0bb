"""Detection: what is in the image, and where? Shapes on a noisy ground, or any pictures in YOLO's format by path.

One image of `image_size: 16, patch: 4, max_objects: 2, max_size: 8` (grey levels; here # for an object's):

    . : . . . : . . . . : . . . . .      a row    16 patches of 16 numbers, left to right and top to bottom
    : . # # # # . : . . . . . : . .      objects  square  left 2, top 1, right 6, bottom 5
    . . # # # # . . . : . . . . . :               cross   left 9, top 8, right 14, bottom 15
    . . # # # # : . . . . . : . . .
    . : # # # # . . . . . . . . . .      What a patch answers, and how that is trained, read and scored, is in
    . . . . . : . . : . . . . : . .      `runners/boxes.py`: the patch that holds an object's centre tells its class
    . . . . . . . . . . . : . . . .      and its box.
    : . . . . : . . . . . . . . . :
    . . : . . . . . . . . # . . . .          map_50      mean average precision: found where the boxes share half
    . . . . . . : . . . . # . . : .                      of what they cover (IoU 0.5)
    . : . . . . . . . . . # . . . .          map_50_95   mean of those at IoU 0.5, 0.55 .. 0.95 (COCO's AP)
    . . . . . : . . . # # # # # . .          loss        of an image, by object
    . . : . . . . . . . . # . . . .
    . . . . . . . . : . . # . : . .      Each object lies in a cell of its own of the `max_size` grid, so none covers
    : . . : . . . . . . . # . . . .      another, and every box is the tightest around its pixels. Their number is
    . . . . . . . . . . . . . : . .      uniform on 1 .. max_objects, sizes and places within a cell are uniform.

Training images are new in every epoch; those to validate and test on come from streams of their own. All is whole
numbers, so that an image is the same on every device. Source: none; it is made for ELA's claim about detectors (Exact
Linear Attention, arXiv 2605.18848), whose data are not released.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from runners import boxes, vision, yolo
from runners.batch import SPLITS, Batch, Patches
from runners.boxes import PARTS, Grid, Objects, Precision, Scenes
from runners.rows import Rows, distinct, integers, refuse
from runners.schema import Exit, UserError

REVISION = 1
LIMITS = [
    "image_size >= 1",
    "patch >= 1",
    "image_size % patch == 0",
    "seq_len == (image_size // patch) * (image_size // patch)",
    "channels in (1, 3)",
    "n_classes >= 1",
    "yolo_files is not None or n_classes <= 5",
    "yolo_files is not None or channels == 1",
    "yolo_files is not None or min_size >= 4",
    "yolo_files is not None or max_size >= min_size and max_size <= 2 * min_size",
    "yolo_files is not None or max_objects >= 1",
    "yolo_files is not None or max_objects <= (image_size // max_size) * (image_size // max_size)",
    "noise >= 0 and noise <= 128",
    "examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
]
DERIVED = {"seq_len": "(image_size // patch) * (image_size // patch)"}
PATCHES = {"features": "channels * patch * patch", "outputs": "n_classes + 4"}
NEEDS = {"pycocotools": "vision"}
METRICS = {"map_50_95": "max", "map_50": "max", "loss": "min"}
BOUNDS = {"map_50_95": [0, 1], "map_50": [0, 1]}
CHANCE = {"map_50_95": "0", "map_50": "0"}
SELECT = "map_50_95"
TRAINS = True

SHAPES = ("square", "disc", "diamond", "cross", "triangle")
"""The classes of objects that are drawn, in their order."""


@dataclass(frozen=True)
class Drawing:
    """How images are drawn: see `Task`."""

    size: int
    n_classes: int
    max_objects: int
    min_size: int
    max_size: int
    noise: int


class Task(Rows):
    """Detection of objects in images.

    Args:
        yolo_files: pictures and labels in YOLO's format, a pattern that matches both, as cells/**; None = drawn shapes
        image_size: side of an image (pixels); pictures are scaled to it
        patch: side of a patch, which is a token (pixels)
        seq_len: patches of an image; it follows from the two
        channels: colours of a pixel, 1 = grey or 3; drawn shapes are grey
        n_classes: classes (count); of shapes the first of square, disc, diamond, cross, triangle
        max_objects: shapes of an image at most (count)
        min_size: smallest side of a shape (pixels)
        max_size: largest side, and the side of the cell that each lies in (pixels)
        noise: grey levels of the noise on every pixel, of 256; 0 = none
        examples: training images of an epoch, each epoch new ones; of pictures at most so many (count)
        valid_examples: validation images; of pictures at most (count)
        test_examples: test images, likewise (count)
    """

    vocab_size = 0

    def __init__(
        self,
        folder: str = ".",
        *,
        yolo_files: str | None = None,
        image_size: int = 64,
        patch: int = 8,
        seq_len: int | None = None,
        channels: int = 1,
        n_classes: int = 4,
        max_objects: int = 4,
        min_size: int = 10,
        max_size: int = 20,
        noise: int = 64,
        examples: int = 10000,
        valid_examples: int = 100,
        test_examples: int = 500,
    ) -> None:
        side = image_size // patch if patch > 0 else 0
        drawing = Drawing(image_size, n_classes, max_objects, min_size, max_size, noise)
        rules = {
            "image_size % patch == 0": side > 0 and image_size == side * patch,
            "seq_len == (image_size // patch) * (image_size // patch)": seq_len in (None, side * side),
            "channels in (1, 3)": channels in (1, 3),
        }
        if yolo_files is None:
            fit = (image_size // max_size) ** 2 if max_size > 0 else 0
            rules |= {
                "n_classes <= 5": 1 <= n_classes <= len(SHAPES) and channels == 1,
                "min_size <= max_size <= 2 * min_size": 4 <= min_size <= max_size <= 2 * min_size,
                "max_objects <= (image_size // max_size) * (image_size // max_size)": 1 <= max_objects <= fit,
                "noise <= 128": 0 <= noise <= 128,
            }
        refuse("detection", rules, f"image_size {image_size}, patch {patch}, {drawing}")
        rows = {"train": examples, "valid": valid_examples, "test": test_examples}
        super().__init__("detection", vars(drawing), fresh=yolo_files is None, rows=rows)
        self.seq_len, self.grid = side * side, Grid(side, side, patch, n_classes)
        self.patches = Patches(channels * patch * patch, (side, side), n_classes + 4, pooled=False)
        self._drawing, self._channels, self._files, self._folder = drawing, channels, yolo_files, folder

    @functools.cached_property
    def _pictures(self) -> dict[str, yolo.Scenery]:
        assert self._files is not None
        size, classes = self._drawing.size, self.grid.n_classes
        return yolo.load(self._files, self._folder, size, self._channels, classes)

    def check(self) -> None:
        """Raises `UserError` where the pictures are not there, or not in YOLO's format."""
        try:
            _ = self._files and self._pictures
        except UserError as error:
            raise UserError(f"task detection: {error}", Exit.ENVIRONMENT) from error

    def groups(self, split: str) -> list[range]:
        """Row numbers of one epoch: one group."""
        rows = self._rows[split]
        return [range(rows if self._files is None else min(rows, len(self._pictures[split].image_NCSS)))]

    def n_examples(self, split: str) -> int | None:
        return None if split == "train" and self._fresh else self.groups(split)[0].stop

    def batch(self, split: str, index_B: Tensor, seed: int, device: torch.device | str = "cpu") -> Batch:
        """Rows `index_B` (int64, on the host), made on `device`."""
        if self._files is None:
            return super().batch(split, index_B, seed, device)
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
        device, own = torch.device(device), self._pictures[split]
        at_B = index_B.to(device, non_blocking=True)
        image, kind, box = (vision.on(x, device)[at_B] for x in (own.image_NCSS, *own.objects))
        return self._scenes(image, Objects(kind, box))

    def make(self, stream: int, row_B1: Tensor, split: str) -> Batch:
        objects = draw_objects(stream, row_B1, self._drawing)
        return self._scenes(paint(stream, row_B1, objects, self._drawing)[:, None], objects)

    def _scenes(self, image_BCSS: Tensor, objects: Objects) -> Batch:
        """`image_BCSS` in 0 .. 255; what the model reads is 1/256 of it, which is exact."""
        target_BT5 = boxes.targets(objects, self.grid)
        patch_BTP = vision.patches(image_BCSS.float() / 256, self.grid.patch)
        at_BT = torch.arange(self.seq_len, device=target_BT5.device).expand(len(target_BT5), -1)
        return Scenes(patch_BTP, at_BT, target_BT5, self.grid)

    def objects(self, split: str, index_B: Tensor, seed: int = 0) -> Objects:
        """What is in the images `index_B`, on the host: every object, also one that shares its centre's patch."""
        if self._files is not None:
            return Objects(*(x[index_B] for x in self._pictures[split].objects))
        return draw_objects(self.stream(split, seed), index_B[:, None], self._drawing)

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The loss of each image by its objects."""
        n_B = (batch.target_BQ[..., 0] >= 0).sum(1).clamp(min=1)
        return {"loss": boxes.losses(logits_BQV, batch.target_BQ, self.grid) / n_B}

    def gather(self, split: str) -> Precision:
        return Precision(lambda index_B: self.objects(split, index_B), self.grid)


def draw_objects(stream: int, row_B1: Tensor, law: Drawing) -> Objects:
    """What is in the images: classes and boxes, whole pixels."""
    N, cells = law.max_objects, law.size // law.max_size
    n_B1 = 1 + integers(stream, "count", row_B1, 1, N)
    kind_BN = integers(stream, "classes", row_B1, N, law.n_classes)
    cell_BN = distinct(stream, "cells", row_B1, N, cells * cells)
    span = law.max_size - law.min_size + 1
    size_BN2 = law.min_size + integers(stream, "sizes", row_B1, 2 * N, span).unflatten(1, (N, 2))
    # Any place in the cell has the same chance; the remainder of a large number by so few is as good as uniform.
    shift_BN2 = integers(stream, "places", row_B1, 2 * N, 1 << 40).unflatten(1, (N, 2)) % (law.max_size - size_BN2 + 1)
    first_BN2 = torch.stack([cell_BN % cells, cell_BN // cells], -1) * law.max_size + shift_BN2
    there_BN = torch.arange(N, device=row_B1.device) < n_B1
    box_BN4 = torch.cat([first_BN2, first_BN2 + size_BN2], -1) * PARTS
    return Objects(torch.where(there_BN, kind_BN, -1), torch.where(there_BN[..., None], box_BN4, 0))


def paint(stream: int, row_B1: Tensor, objects: Objects, law: Drawing) -> Tensor:
    """The images, grey levels 0 .. 255, (B, S, S)."""
    S = law.size
    noise_BSS: Tensor | int = 0
    if law.noise:
        noise_BSS = integers(stream, "noise", row_B1, S * S, law.noise).unflatten(1, (S, S))
    light_BN = 128 + integers(stream, "light", row_B1, law.max_objects, 128 - law.noise + 1).clamp(max=127)
    image_BSS = torch.zeros(len(row_B1), S, S, dtype=torch.int64, device=row_B1.device)
    for n in range(law.max_objects):  # none covers another
        inside_BSS = covered(objects.kind_BN[:, n], objects.box_BN4[:, n] // PARTS, S)
        image_BSS = torch.where(inside_BSS, light_BN[:, n, None, None], image_BSS)
    return (image_BSS + noise_BSS).clamp(max=255)


def covered(kind_B: Tensor, box_B4: Tensor, size: int) -> Tensor:
    """The pixels of one object of each image, (B, S, S). Every shape touches all four sides of its box."""
    left, top, right, bottom = (edge[:, None, None] for edge in box_B4.unbind(-1))
    w, h = right - left, bottom - top
    pixel = torch.arange(size, device=kind_B.device)
    u, v = 2 * (pixel - left) - (w - 1), 2 * (pixel[:, None] - top) - (h - 1)  # from the centre, in half pixels
    a, b = u.abs(), v.abs()
    shapes = (
        torch.ones_like(a + b, dtype=torch.bool),
        (a * h) ** 2 + (b * w) ** 2 <= (w * h) ** 2,
        a * h + b * w <= w * h + (w - h).abs(),
        (3 * a <= w) | (3 * b <= h),
        2 * a * h <= (v + h) * w + 2 * h,
    )
    inside = (a < w) & (b < h)
    kind = kind_B[:, None, None]
    drawn = torch.stack([(kind == number) & shape for number, shape in enumerate(shapes)]).any(0)
    return inside & drawn
