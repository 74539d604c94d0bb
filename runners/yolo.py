"""Images with boxes from a folder in YOLO's format: pictures, and beside each a text file with its objects.

    images/train/a.jpg     labels/train/a.txt     a line an object: class, then centre and size of its box, x before y,
    images/val/b.png       labels/val/b.txt       as shares of the picture's sides: `0 0.512 0.25 0.1 0.08`
    images/test/c.jpg      labels/test/c.txt

A folder on the way to a picture says its split: train; val, valid or validation; test. Labels lie in a folder `labels`
where the picture lies in `images`, or else beside it; a picture without such a file has no object. Pictures are scaled
to a square, sides apart, and their boxes with them. Everything is read once in a process, and held in memory.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runners import corpus
from runners.boxes import PARTS, Objects
from runners.extras import need
from runners.schema import UserError

PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
SPLITS = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test"}
NEEDS = {"PIL": "vision"}

Object = tuple[int, float, float, float, float]
"""Class, and (left, top, right, bottom) as shares of the sides."""


@dataclass(frozen=True)
class Scenery:
    """The pictures of one split, 0 .. 255 (uint8), and what is in them."""

    image_NCSS: Tensor
    objects: Objects


def load(pattern: str, folder: str, size: int, channels: int, n_classes: int) -> dict[str, Scenery]:
    """Each split. Raises `UserError`, one line, that names the file and line that is wrong."""
    need(NEEDS, "task detection with yolo_files")
    files = tuple(map(corpus.version, corpus.find(pattern, folder)))
    return _load(files, str(Path(folder)), pattern, size, channels, n_classes)


@functools.lru_cache(maxsize=4)
def _load(
    files: tuple[tuple[str, int, int], ...], folder: str, pattern: str, size: int, channels: int, n_classes: int
) -> dict[str, Scenery]:
    paths = [Path(path) for path, _, _ in files]
    labels = {path for path in paths if path.suffix == ".txt"}
    found: dict[str, list[Path]] = {"train": [], "valid": [], "test": []}
    for path in paths:
        if path.suffix.lower() in PICTURES and (split := _split(path, Path(folder))):
            found[split].append(path)
    empty = [split for split in found if not found[split]]
    if empty:
        raise UserError(f"{pattern} names no picture to {empty[0]} on: they lie in folders train, val, test (YOLO)")
    if not any(_labels(path) in labels for split in found.values() for path in split):
        first = _shown(_labels(found["train"][0]), folder)
        raise UserError(f"{pattern} names no file of labels, as {first}: it is to match pictures and labels")
    made = {}
    for split, pictures in found.items():
        objects = [_objects(_labels(path), folder, n_classes) if _labels(path) in labels else [] for path in pictures]
        if not any(objects):
            raise UserError(f"{pattern}: no picture of {split} has an object in it")
        made[split] = Scenery(torch.stack([_picture(path, size, channels) for path in pictures]), pack(objects, size))
    return made


def _split(path: Path, folder: Path) -> str | None:
    parts = path.parts[len(folder.parts) :] if path.is_relative_to(folder) else path.parts
    return next((SPLITS[part] for part in reversed(parts[:-1]) if part in SPLITS), None)


def _labels(path: Path) -> Path:
    """Where the labels of a picture are: the last folder `images` on the way is `labels`."""
    parts = list(path.with_suffix(".txt").parts)
    for at in reversed(range(len(parts) - 1)):
        if parts[at] == "images":
            parts[at] = "labels"
            break
    return Path(*parts)


def _shown(path: Path, folder: str) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _objects(path: Path, folder: str, n_classes: int) -> list[Object]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(read_line(line, n_classes))
            except ValueError as error:
                raise UserError(f"{_shown(path, folder)}, line {number}: {error}") from error
    return found


def read_line(line: str, n_classes: int) -> Object:
    """One object. Raises `ValueError` in words."""
    fields = line.split()
    if len(fields) != 5:
        raise ValueError(f"an object is class, x, y, width, height: five numbers, not {len(fields)}")
    try:
        kind, (x, y, w, h) = int(fields[0]), map(float, fields[1:])
    except ValueError:
        raise ValueError(f"{line.strip()!r} is not a whole number and four others") from None
    if not 0 <= kind < n_classes:
        raise ValueError(f"class {kind} is none of 0 to {n_classes - 1}: say n_classes")
    if not all(math.isfinite(v) and 0 <= v <= 1 for v in (x, y, w, h)) or not (w and h):
        raise ValueError(f"centre and size are shares of the picture's sides, 0 to 1, not {' '.join(fields[1:])}")
    edges = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    left, top, right, bottom = (min(1.0, max(0.0, edge)) for edge in edges)
    return kind, left, top, right, bottom


def _picture(path: Path, size: int, channels: int) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            scaled = picture.convert("L" if channels == 1 else "RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is no picture that can be read: {error}") from error
    return torch.from_numpy(np.array(scaled, dtype=np.uint8).reshape(size, size, channels)).permute(2, 0, 1)


def pack(objects: list[list[Object]], size: int) -> Objects:
    """Lists of objects as tensors, in an image of `size` pixels; at least 1/64 pixel wide and high."""
    most = max(1, max(map(len, objects)))
    kind_BN = torch.full((len(objects), most), -1)
    box_BN4 = torch.zeros(len(objects), most, 4, dtype=torch.int64)
    for b, own in enumerate(objects):
        for n, (kind, *edges) in enumerate(own):
            left, top, right, bottom = (round(edge * size * PARTS) for edge in edges)
            kind_BN[b, n] = kind
            box_BN4[b, n] = torch.tensor([left, top, max(right, left + 1), max(bottom, top + 1)])
    return Objects(kind_BN, box_BN4)
