"""Detection: drawn boxes against their pixels, targets and losses against slow versions, precision, YOLO files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from runners import boxes, evaluate, extras, tasks, yolo
from runners import model as models
from runners.batch import NO_LABEL
from runners.boxes import PARTS, Grid, Objects, Precision
from runners.optimise import FlatAdam
from runners.schema import Exit, Trial, UserError
from runners.tasks import detection

coco = pytest.mark.skipif(not extras.installed("pycocotools"), reason="needs pycocotools (extra vision)")
SMALL = {"name": "detection", "image_size": 32, "patch": 8, "max_objects": 2, "max_size": 16, "min_size": 8}
GRID = Grid(4, 4, 8, 4)


def whole(task: Any, batch: Any) -> Tensor:
    """The images of a batch, pixels by place, grey levels."""
    side, patch = task.grid.rows, task.grid.patch
    grid = (batch.tokens_BT * 256).unflatten(2, (patch, patch)).unflatten(1, (side, side))
    return grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)


# what is drawn


@pytest.mark.parametrize("size", [{}, {"image_size": 48, "min_size": 5, "max_size": 9, "max_objects": 6, "patch": 4}])
def test_every_box_is_tight_and_there_is_nothing_else(size: dict[str, int]) -> None:
    task = tasks.build({"name": "detection", "noise": 0, "n_classes": 5, **size})
    rows = torch.arange(120)
    images, objects = whole(task, task.batch("train", rows, 3)), task.objects("train", rows, 3)
    seen = set()
    for image, kinds, found in zip(images, objects.kind_BN, objects.box_BN4 // PARTS, strict=True):
        rest = image.clone()
        for kind, (left, top, right, bottom) in zip(kinds.tolist(), found.tolist(), strict=True):
            if kind < 0:
                continue
            seen.add(kind)
            inside = image[top:bottom, left:right] >= 128
            for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
                assert edge.any(), f"a {detection.SHAPES[kind]} does not reach its box"
            rest[top:bottom, left:right] = 0
        assert not rest.any(), "pixels outside every box"
    assert seen == set(range(5))


def test_shapes_are_what_they_are_called() -> None:
    box_B4 = torch.tensor([[1, 1, 8, 8]]).expand(5, -1)
    drawn = detection.covered(torch.arange(5), box_B4, 9)[:, 1:8, 1:8].int()
    rows = [["".join(".#"[v] for v in row) for row in shape] for shape in drawn.tolist()]
    picture = dict(zip(detection.SHAPES, rows, strict=True))
    assert picture["square"] == ["#######"] * 7
    assert picture["disc"] == ["..###..", ".#####.", *["#######"] * 3, ".#####.", "..###.."]
    assert picture["cross"] == [*["..###.."] * 2, *["#######"] * 3, *["..###.."] * 2]
    assert picture["diamond"] == ["...#...", "..###..", ".#####.", "#######", ".#####.", "..###..", "...#..."]
    widths = [row.count("#") for row in picture["triangle"]]
    assert widths == sorted(widths)
    assert widths[0] <= 3
    assert widths[-1] == 7


def test_sizes_numbers_and_classes_are_uniform() -> None:
    task = tasks.build({"name": "detection"})
    rows = torch.arange(6000)
    kinds, found = task.objects("train", rows, 0)
    there = kinds >= 0
    sides = ((found[..., 2:] - found[..., :2]) // PARTS)[there].flatten()
    for values, of in ((there.sum(1) - 1, 4), (kinds[there], 4), (sides - 10, 11)):
        share = torch.bincount(values, minlength=of) / values.numel()
        assert share.shape == (of,)
        assert (share - 1 / of).abs().max() < 5 * (1 / of / values.numel()) ** 0.5
    assert found.min() >= 0
    assert found.max() <= 64 * PARTS


def test_the_noise_stays_below_the_objects() -> None:
    task = tasks.build({"name": "detection", "noise": 64})
    clean = tasks.build({"name": "detection", "noise": 0})
    batch = task.batch("valid", torch.arange(30), 0)
    images, objects = whole(task, batch), task.objects("valid", torch.arange(30))
    inside = torch.zeros_like(images, dtype=torch.bool)
    for n in range(4):
        inside |= detection.covered(objects.kind_BN[:, n], objects.box_BN4[:, n] // PARTS, 64)
    assert images[~inside].max() == 63
    assert images[inside].min() >= 128
    assert not torch.equal(clean.objects("valid", torch.arange(30)).box_BN4, objects.box_BN4)  # another law, other rows


# targets, answers, losses


def slow_targets(objects: Objects, grid: Grid) -> Tensor:
    made = torch.full((len(objects.kind_BN), grid.rows * grid.columns, 5), NO_LABEL)
    for b, (kinds, found) in enumerate(zip(objects.kind_BN.tolist(), objects.box_BN4.tolist(), strict=True)):
        largest_first = sorted(zip(kinds, found, strict=True), key=lambda o: -(o[1][2] - o[1][0]) * (o[1][3] - o[1][1]))
        for kind, (left, top, right, bottom) in largest_first:
            if kind >= 0:
                row = int((top + bottom) / 2 / PARTS // grid.patch)
                column = int((left + right) / 2 / PARTS // grid.patch)
                made[b, row * grid.columns + column] = torch.tensor([kind, left, top, right, bottom])
    return made


def random_objects(n: int = 50, size: int = 32) -> Objects:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, size * PARTS, (n, 6, 2, 2), generator=generator).sort(2).values
    edges[:, :, 1] += 1
    kind = torch.randint(-1, 4, (n, 6), generator=generator)
    return Objects(kind, edges.flatten(2))


def test_targets_are_those_of_the_slow_version() -> None:
    objects = random_objects()
    assert torch.equal(boxes.targets(objects, GRID), slow_targets(objects, GRID))


def perfect(target_BT5: Tensor, grid: Grid) -> Tensor:
    """Answers that say the targets."""
    B, T = target_BT5.shape[:2]
    there = target_BT5[..., 0] != NO_LABEL
    kinds = torch.where(target_BT5[..., :1] == torch.arange(grid.n_classes), 30.0, -30.0)
    edges = target_BT5[..., 1:].double() / PARTS / grid.patch
    at = torch.stack([torch.arange(T) % grid.columns, torch.arange(T) // grid.columns], -1)
    share = ((edges[..., :2] + edges[..., 2:]) / 2 - at).clamp(1e-6, 1 - 1e-6)
    said = torch.cat([share.logit(), (edges[..., 2:] - edges[..., :2]).clamp(min=1e-3).log()], -1)
    return torch.cat([kinds.double(), torch.where(there[..., None], said, torch.zeros(B, T, 4).double())], -1)


def test_a_perfect_answer_has_the_boxes_and_no_loss() -> None:
    task = tasks.build(SMALL)
    batch = task.batch("valid", torch.arange(20), 0)
    answer = perfect(batch.target_BQ, task.grid)
    there = batch.target_BQ[..., 0] != NO_LABEL
    edges = batch.target_BQ[there][:, 1:].double() / PARTS
    torch.testing.assert_close(boxes.boxes(answer, task.grid)[there], edges, rtol=1e-4, atol=1e-3)
    assert float(task.score(answer, batch)["loss"].max()) < 1e-3


def test_overlaps_of_known_boxes() -> None:
    a = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 4], [0, 0, 2, 2], [1, 1, 3, 3]])
    b = torch.tensor([[0.0, 0, 4, 4], [2, 0, 6, 4], [4, 0, 6, 2], [0, 0, 4, 4]])
    share, apart = boxes.overlap(a, b)
    torch.testing.assert_close(share, torch.tensor([1, 1 / 3, 0, 1 / 4]))
    torch.testing.assert_close(apart, torch.tensor([0, 0, 1 / 3, 0]))


def test_the_loss_is_that_of_each_patch_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    answer = torch.randn(3, 16, 8, generator=generator, requires_grad=True)
    target = boxes.targets(random_objects(3), GRID)
    total = torch.zeros(3)
    for b in range(3):
        for t in range(16):
            kind = int(target[b, t, 0])
            for c in range(4):
                p = (answer[b, t, c] + boxes.PRIOR).sigmoid()
                right, weight = (p, 0.25) if c == kind else (1 - p, 0.75)
                total[b] += -weight * (1 - right) ** 2 * right.log()
            if kind != NO_LABEL:
                x, y = (t % 4 + answer[b, t, 4].sigmoid()) * 8, (t // 4 + answer[b, t, 5].sigmoid()) * 8
                w, h = answer[b, t, 6].exp() * 8, answer[b, t, 7].exp() * 8
                own = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
                share, apart = boxes.overlap(own, target[b, t, 1:] / PARTS)
                total[b] += 1 - share + apart
    given = boxes.losses(answer, target, GRID)
    torch.testing.assert_close(given, total)
    slow, fast = (torch.autograd.grad(x.sum(), answer, retain_graph=True)[0] for x in (total, given))
    torch.testing.assert_close(fast, slow)


def test_a_batch_in_parts_has_the_loss_of_the_whole() -> None:
    from runners import micro

    of = Trial("t", 0, {"name": "ela"}, SMALL, {"d_model": 16, "short_conv": False, "causal": False}, None)
    model, batch = models.build(of), tasks.build(SMALL).batch("train", torch.arange(7), 0)
    found = []
    for rows in (None, 3):
        model.zero_grad()
        loss = micro.backward(model, batch, "fp32", rows)
        found.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# precision


def precision(shift: float = 0.0, classes: int = 4, wrong: int = 0) -> dict[str, float]:
    """Of a detector that finds every object of 40 images, its boxes `shift` of their width to the right."""
    task = tasks.build({"name": "detection"})
    measured = Precision(None, Grid(8, 8, 8, classes))
    for kinds, found in zip(*task.objects("test", torch.arange(40)), strict=True):
        own = found[kinds >= 0] / PARTS
        kinds = kinds[kinds >= 0]
        move = torch.zeros_like(own)
        move[:, ::2] = shift * (own[:, 2:3] - own[:, :1])
        score = torch.linspace(0.9, 0.5, len(kinds))
        measured.add_image(kinds, own, score, (kinds + wrong) % classes, own + move)
    return measured.metrics()


@coco
@pytest.mark.parametrize(("shift", "levels"), [(0.0, 10), (0.1, 7), (0.2, 4), (0.3, 1), (0.34, 0)])
def test_precision_of_shifted_boxes_is_known(shift: float, levels: int) -> None:
    """A box moved by a share s of its width overlaps by (1 - s) / (1 + s): here 0.818, 2/3, 0.538 and 0.493. It counts
    at the IoU levels 0.5, 0.55 .. 0.95 up to that."""
    found = precision(shift)
    assert found["map_50"] == pytest.approx(float(levels > 0))
    assert found["map_50_95"] == pytest.approx(levels / 10)


@coco
def test_precision_of_the_wrong_classes_and_of_nothing() -> None:
    assert precision(wrong=1) == {"map_50": 0.0, "map_50_95": 0.0}
    measured = Precision(None, GRID)
    none = torch.zeros(0)
    measured.add_image(torch.tensor([1]), torch.tensor([[0.0, 0, 4, 4]]), none, none, torch.zeros(0, 4))
    assert measured.metrics()["map_50"] == 0


@coco
def test_a_false_box_that_is_surer_halves_the_precision() -> None:
    measured = Precision(None, GRID)
    box = torch.tensor([[0.0, 0, 8, 8]])
    away = torch.tensor([[20.0, 20, 28, 28]])
    kind = torch.tensor([2])
    measured.add_image(kind, box, torch.tensor([0.9, 0.8]), torch.tensor([2, 2]), torch.cat([away, box]))
    assert measured.metrics() == pytest.approx({"map_50": 0.5, "map_50_95": 0.5})


@coco
def test_a_perfect_model_is_perfect_and_hidden_objects_count() -> None:
    task = tasks.build({**SMALL, "test_examples": 30})

    class Perfect(torch.nn.Module):
        def forward(self, tokens_BT: Tensor, position_BQ: Tensor) -> Tensor:
            return perfect(task.batch("test", torch.arange(30), 0).target_BQ, task.grid)

    found = evaluate.score(Perfect(), task, "test", torch.device("cpu"), "fp32")
    assert found["n"] == 30
    assert found["map_50_95"] == pytest.approx(1)
    twins = Objects(torch.tensor([[1, 2]]), torch.tensor([[[0, 0, 640, 640], [64, 64, 512, 512]]]))
    measured = Precision(lambda index_B: twins, task.grid)
    measured.add(torch.arange(1), perfect(boxes.targets(twins, task.grid), task.grid))
    assert measured.metrics()["map_50"] == pytest.approx(0.5), "an object whose patch tells another is missed"


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.of_task("detection") == {"pycocotools": "vision"}
    assert extras.of_task("mqar") == {}
    monkeypatch.setattr(extras, "installed", lambda module: False)
    with pytest.raises(UserError, match=r"needs pycocotools.*pip install 'memsweep\[vision\]'") as caught:
        extras.need(extras.of_task("detection"), "task detection")
    assert caught.value.exit_code == Exit.ENVIRONMENT


@coco
@pytest.mark.parametrize("mechanism", ["ela", pytest.param("conv", marks=pytest.mark.wide)])
def test_a_tiny_detector_learns_a_batch_by_heart(mechanism: str) -> None:
    task = tasks.build({**SMALL, "valid_examples": 4})
    model = {"d_model": 32, "n_layers": 2, "short_conv": False, "causal": False, "position": "learned"}
    built = models.build(Trial("t", 0, {"name": mechanism}, SMALL, model, None))
    adam = FlatAdam(built, built.no_decay(), optimizer="adam", betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, clip=None)
    batch = task.batch("valid", torch.arange(4), 0)
    assert isinstance(batch, boxes.Scenes)
    for step in range(100):
        adam.set_rate(1e-2 * min(1, (100 - step) / 70))
        loss = batch.mean_loss(built(batch.tokens_BT, batch.position_BQ))
        loss.backward()
        adam.step(loss.detach())
    assert evaluate.score(built, task, "valid", torch.device("cpu"), "fp32")["map_50_95"] > 0.9


# YOLO


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three splits of two pictures, 20 x 10: a white box on black, whose line its file has."""
    for split in ("train", "val", "test"):
        for number in range(2):
            pixels = np.zeros((10, 20, 3), np.uint8)
            pixels[2:6, 4 + number : 12 + number] = 255
            for room in ("images", "labels"):
                (tmp_path / "set" / room / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "set" / "images" / split / f"{number}.png")
            line = f"1 {(8 + number) / 20} {4 / 10} {8 / 20} {4 / 10}\n"
            (tmp_path / "set" / "labels" / split / f"{number}.txt").write_text(line)
    return tmp_path


def of_files(folder: Path, **settings: Any) -> Any:
    own = {"yolo_files": "set/**", "image_size": 40, "patch": 8, "n_classes": 2, "folder": str(folder)}
    return tasks.build({"name": "detection", **own, **settings})


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_in_yolos_format(folder: Path, channels: int) -> None:
    task = of_files(folder, channels=channels)
    task.check()
    assert [task.n_examples(split) for split in ("train", "valid", "test")] == [2, 2, 2]
    kinds, found = task.objects("valid", torch.arange(2))
    assert kinds.tolist() == [[1], [1]]
    assert (found / PARTS).tolist() == [[[8, 8, 24, 24]], [[10, 8, 26, 24]]]
    batch = task.batch("valid", torch.arange(2), 0)
    assert batch.tokens_BT.shape == (2, 25, 64 * channels)
    patch = (batch.tokens_BT * 256).view(2, 5, 5, channels, 8, 8)
    pixels = patch.permute(0, 3, 1, 4, 2, 5).reshape(2, channels, 40, 40)
    assert pixels[0, :, 10:22, 10:22].min() == 255
    assert pixels[0, :, :5].max() == 0


def test_a_picture_without_labels_has_no_object(folder: Path) -> None:
    (folder / "set" / "labels" / "train" / "1.txt").unlink()
    kinds, _ = of_files(folder).objects("train", torch.arange(2))
    assert sorted(kinds.flatten().tolist()) == [-1, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0 0.5 0.5 0.1", "five numbers, not 4"),
        ("cell 0.5 0.5 0.1 0.1", "is not a whole number and four others"),
        ("2 0.5 0.5 0.1 0.1", "class 2 is none of 0 to 1: say n_classes"),
        ("0 12 0.5 0.1 0.1", "shares of the picture's sides, 0 to 1, not 12 0.5 0.1 0.1"),
        ("0 0.5 0.5 0 0.1", "shares of the picture's sides"),
        ("0 nan 0.5 0.1 0.1", "shares of the picture's sides"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, folder: Path) -> None:
    path = folder / "set" / "labels" / "val" / "1.txt"
    path.write_text(f"{path.read_text()}\n{line}\n")
    with pytest.raises(UserError) as caught:
        of_files(folder).check()
    assert str(caught.value).startswith("task detection: set/labels/val/1.txt, line 3: ")
    assert words in str(caught.value)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_folders_that_are_wrong(folder: Path) -> None:
    def told(**settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            of_files(folder, **settings).check()
        return str(caught.value)

    assert "there is no file cells/**" in told(yolo_files="cells/**")
    assert "set is a folder: name its files, as set/*.txt, or set/** for all in it" in told(yolo_files="set")
    assert "names no file of labels, as set/labels/train/0.txt" in told(yolo_files="set/images/**")
    assert "names no picture to valid on" in told(yolo_files="set/*/t*/*")
    for path in (folder / "set" / "labels" / "test").iterdir():
        path.write_text("")
    assert "no picture of test has an object in it" in told()
    (folder / "set" / "images" / "val" / "0.png").write_text("pixels")
    assert "0.png is no picture that can be read" in told()


def test_blood_cells(real_data: Path, tmp_path: Path) -> None:
    """BCCD, of which each split gives ten pictures: every cell of the file is there, at its place."""
    with zipfile.ZipFile(real_data / "vision" / "bccd_320.zip") as file:
        known = json.loads(file.read("annotations.json"))
        few = [item for split in ("train", "val", "test") for item in known["items"] if item["split"] == split]
        few = [item for split in ("train", "val", "test") for item in [i for i in few if i["split"] == split][:10]]
        for item in few:
            picture = tmp_path / item["split"] / Path(item["image"]).name
            picture.parent.mkdir(exist_ok=True)
            picture.write_bytes(file.read(item["image"]))
            lines = []
            for cell in item["objects"]:
                left, top, right, bottom = cell["box_xyxy"]
                x, y, w, h = (left + right) / 640, (top + bottom) / 480, (right - left) / 320, (bottom - top) / 240
                lines.append(f"{known['classes'].index(cell['cls'])} {min(x, 1)} {min(y, 1)} {min(w, 1)} {min(h, 1)}")
            picture.with_suffix(".txt").write_text("\n".join(lines))
    task = of_files(tmp_path, yolo_files="*/*", image_size=128, channels=3, n_classes=3)
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test")):
        own = sorted((item for item in few if item["split"] == name), key=lambda item: item["image"])
        kinds, found = task.objects(split, torch.arange(10))
        for item, kind_N, box_N4 in zip(own, kinds, found / PARTS, strict=True):
            n = len(item["objects"])
            assert (kind_N >= 0).sum() == n
            edges = torch.tensor([cell["box_xyxy"] for cell in item["objects"]]) * torch.tensor([0.4, 128 / 240] * 2)
            assert (box_N4[:n] - edges.clamp(0, 128)).abs().max() < 0.05
    assert task.batch("test", torch.arange(10), 0).tokens_BT.shape == (10, 256, 192)


def test_a_box_over_the_edge_is_cut() -> None:
    assert yolo.read_line("0 0.1 0.5 0.4 1", 1) == (0, 0.0, 0.0, pytest.approx(0.3), 1.0)
