"""Detection: from boxes to what each patch is to say, from what it says to a loss, to boxes, and to their precision.

A grid of patches is one answer a patch, without anchors: the patch that holds an object's centre says its class, where
in the patch the centre is, and the size of the box. An answer is `n_classes` logits and 4 numbers t:

    centre = (column + sigmoid(t_0), row + sigmoid(t_1)) patch        size = (e^t_2, e^t_3) patch

    loss   focal loss of every class at every patch, a Bernoulli each (alpha 0.25, gamma 2), and 1 - GIoU of the box
           where an object's centre is; their sum over the objects' number
    boxes  a class at a patch whose score is not below those of its eight neighbours, the `MOST` best of an image

Sources: "Objects as Points" (Zhou et al. 2019, arXiv 1904.07850) for centres and peaks in the place of anchors and
non-maximum suppression; focal loss Lin et al. 2017 (1708.02002); GIoU Rezatofighi et al. 2019 (1902.09630). Choices:
other patches than the centre's are all negative, where that paper lessens their weight by distance; GIoU in the place
of its L1. Mean average precision is COCO's, by its own code (pycocotools).

Boxes are (left, top, right, bottom) in pixels, the right and bottom edge outside. Targets hold them as whole numbers of
1/64 pixel: `target_BQ` of a batch is (B, T, 5), class and box, class NO_LABEL where no centre is.

Letters: B images, N objects of an image, T patches, C classes.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from runners.batch import NO_LABEL, Batch
from runners.extras import need

PARTS = 64
"""Of a pixel: what boxes are rounded to."""
MOST = 100
"""Boxes of an image at most, the best: as many as COCO counts."""
PRIOR = -4.6
"""Added to every logit of a class: an untrained model finds an object in one patch of a hundred (Lin et al. 2017)."""
ALPHA, GAMMA = 0.25, 2.0
LARGEST = 4.0
"""Sizes are within e^-4 and e^4 patches."""
NEEDS = {"pycocotools": "vision"}


class Objects(NamedTuple):
    """What is in images; of fewer objects than N the rest has the class -1 and an empty box."""

    kind_BN: Tensor  # int64
    box_BN4: Tensor  # int64, in 1/64 pixel


@dataclass(frozen=True)
class Grid:
    """How an image is parted."""

    rows: int
    columns: int
    patch: int  # pixels
    n_classes: int


def targets(objects: Objects, grid: Grid) -> Tensor:
    """(B, T, 5): what each patch is to say. Of centres in one patch the smaller box counts, of equal ones the later."""
    kind_BN, box_BN4 = objects
    B, N = kind_BN.shape
    T, unit = grid.rows * grid.columns, grid.patch * PARTS
    size_BN2 = box_BN4[..., 2:] - box_BN4[..., :2]
    order_BN = (-size_BN2.prod(-1)).argsort(dim=1, stable=True)
    kind_BN = kind_BN.gather(1, order_BN)
    box_BN4 = box_BN4.gather(1, order_BN[..., None].expand(-1, -1, 4))
    at_BN2 = (box_BN4[..., :2] + box_BN4[..., 2:]) // (2 * unit)
    column_BN, row_BN = at_BN2[..., 0].clamp(0, grid.columns - 1), at_BN2[..., 1].clamp(0, grid.rows - 1)
    cell_BN = torch.where(kind_BN >= 0, row_BN * grid.columns + column_BN, T)
    found = torch.full((B, T + 1, 5), NO_LABEL, dtype=torch.int64, device=kind_BN.device)
    said_BN5 = torch.cat([kind_BN[..., None], box_BN4], -1)
    for n in range(N):  # one object at a time: of several writes to one place, any may win
        found.scatter_(1, cell_BN[:, n, None, None].expand(-1, 1, 5), said_BN5[:, n, None])
    return found[:, :T]


def boxes(answer_BTA: Tensor, grid: Grid) -> Tensor:
    """The box that each patch says, (B, T, 4), in pixels."""
    t_BT4 = answer_BTA[..., grid.n_classes :]
    index_T = torch.arange(grid.rows * grid.columns, device=answer_BTA.device)
    first_T2 = torch.stack([index_T % grid.columns, index_T // grid.columns], -1)
    centre_BT2 = first_T2 + t_BT4[..., :2].sigmoid()
    half_BT2 = t_BT4[..., 2:].clamp(-LARGEST, LARGEST).exp() / 2
    return torch.cat([centre_BT2 - half_BT2, centre_BT2 + half_BT2], -1) * grid.patch


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes (..., 4), and what GIoU takes off it: the share of the smallest box around both
    that neither covers."""
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    around = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner
    tiny = torch.finfo(a.dtype).tiny
    return inner / union.clamp(min=tiny), (around - union) / around.clamp(min=tiny)


def focal(logit: Tensor, is_there: Tensor) -> Tensor:
    """The focal loss of Bernoullis, nats each."""
    nats = F.binary_cross_entropy_with_logits(logit, is_there, reduction="none")
    wrong = torch.where(is_there > 0, (-logit).sigmoid(), logit.sigmoid())
    return torch.where(is_there > 0, ALPHA, 1 - ALPHA) * wrong**GAMMA * nats


def losses(answer_BTA: Tensor, target_BT5: Tensor, grid: Grid) -> Tensor:
    """The loss of each image, summed over its objects, (B,)."""
    answer_BTA = answer_BTA.float()
    kind_BT, box_BT4 = target_BT5[..., 0], target_BT5[..., 1:].float() / PARTS
    there_BT = kind_BT != NO_LABEL
    is_BTC = kind_BT[..., None] == torch.arange(grid.n_classes, device=kind_BT.device)
    class_B = focal(answer_BTA[..., : grid.n_classes] + PRIOR, is_BTC.float()).sum((1, 2))
    # Where nothing is, the box is compared with itself: 0, and so is its gradient.
    said_BT4 = boxes(answer_BTA, grid)
    share_BT, apart_BT = overlap(said_BT4, torch.where(there_BT[..., None], box_BT4, said_BT4.detach()))
    return class_B + torch.where(there_BT, 1 - share_BT + apart_BT, 0.0).sum(1)


@dataclass(frozen=True, slots=True)
class Scenes(Batch):
    """Images whose labels are boxes."""

    grid: Grid

    def __getitem__(self, rows: slice) -> Scenes:
        return Scenes(self.tokens_BT[rows], self.position_BQ[rows], self.target_BQ[rows], self.grid)

    def loss(self, logits_BQV: Tensor) -> Tensor:
        return losses(logits_BQV, self.target_BQ, self.grid).sum()

    def mean_loss(self, logits_BQV: Tensor) -> Tensor:
        return self.loss(logits_BQV) / self.n_labels()

    def n_labels(self) -> Tensor:
        """Objects; 1 for a batch without any."""
        return (self.target_BQ[..., 0] != NO_LABEL).sum().clamp(min=1)


def detect(answer_BTA: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, classes and boxes of the `MOST` best peaks of each image, best first: (B, n), (B, n), (B, n, 4)."""
    answer_BTA = answer_BTA.float()
    score_BCT = (answer_BTA[..., : grid.n_classes] + PRIOR).sigmoid().transpose(1, 2)
    best_BCRR = F.max_pool2d(score_BCT.unflatten(-1, (grid.rows, grid.columns)), 3, stride=1, padding=1)
    peak_BCT = torch.where(best_BCRR.flatten(-2) == score_BCT, score_BCT, 0.0)
    T = peak_BCT.shape[-1]
    score_BN, at_BN = peak_BCT.flatten(1).topk(min(MOST, grid.n_classes * T), dim=1)
    box_BN4 = boxes(answer_BTA, grid).gather(1, (at_BN % T)[..., None].expand(-1, -1, 4))
    return score_BN, at_BN // T, box_BN4


class Precision:
    """Gathers the detections of a set of images; then COCO's mean average precision of them."""

    def __init__(self, truth: Any, grid: Grid) -> None:
        """`truth(index_B)`: the `Objects` of the images with these numbers."""
        need(NEEDS, "task detection")
        self._truth, self._grid = truth, grid
        self._boxes: list[dict[str, Any]] = []
        self._found: list[Tensor] = []
        self._n = 0

    def add(self, index_B: Tensor, answer_BTA: Tensor) -> None:
        kind_BN, box_BN4 = (x.cpu() for x in self._truth(index_B))
        score_BN, found_BN, box_BM4 = (x.double().cpu() for x in detect(answer_BTA, self._grid))
        for b in range(len(index_B)):
            self.add_image(kind_BN[b], box_BN4[b] / PARTS, score_BN[b], found_BN[b], box_BM4[b])

    def add_image(self, kind_N: Tensor, box_N4: Tensor, score_M: Tensor, found_M: Tensor, box_M4: Tensor) -> None:
        """One image: what is there, and what was found. Boxes in pixels; a score of 0 is no detection."""
        self._n += 1
        there, found = kind_N >= 0, score_M > 0
        for kind, (x, y, w, h) in zip(kind_N[there].tolist(), _sized(box_N4[there]).tolist(), strict=True):
            number = len(self._boxes) + 1
            self._boxes.append(
                {"id": number, "image_id": self._n, "category_id": kind, "bbox": [x, y, w, h], "area": w * h}
                | {"iscrowd": 0}
            )
        image_M = torch.full_like(score_M, self._n)
        columns = [image_M[:, None], _sized(box_M4), score_M[:, None], found_M[:, None]]
        self._found.append(torch.cat([x.double() for x in columns], 1)[found])

    def metrics(self) -> dict[str, float]:
        """`map_50` and `map_50_95`; 0 where nothing is found."""
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        found = torch.cat(self._found)
        if not len(found) or not self._boxes:
            return {"map_50": 0.0, "map_50_95": 0.0}
        with contextlib.redirect_stdout(io.StringIO()):  # it tells its progress there
            truth = COCO()
            truth.dataset = {
                "images": [{"id": number} for number in range(1, self._n + 1)],
                "categories": [{"id": kind} for kind in range(self._grid.n_classes)],
                "annotations": self._boxes,
            }
            truth.createIndex()
            scored = COCOeval(truth, truth.loadRes(found.numpy()), "bbox")
            scored.evaluate()
            scored.accumulate()
            scored.summarize()
        return {"map_50": float(scored.stats[1]), "map_50_95": float(scored.stats[0])}


def _sized(box_N4: Tensor) -> Tensor:
    """(left, top, width, height), as COCO writes boxes."""
    return torch.cat([box_N4[..., :2], box_N4[..., 2:] - box_N4[..., :2]], -1)
