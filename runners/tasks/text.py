"""Language modelling on text, byte by byte: which byte comes next?

One row of `seq_len: 8` in a text that goes on "in hunger ..." (# begins a row: token 256):

    tokens   #  i  n  _  h  u  n  g
    labels   i  n  _  h  u  n  g  e

The text is a file, several, or a data set of the hub (`runners/corpus.py`). Training rows begin anywhere in the
training part, drawn by the row's number: the stream has no state, so a resume sees what it would, and no row twice but
by chance. The valid and the test part are cut into rows from their beginning, the same for every seed and arm; every
byte of them is predicted once, from those of its own row before it, and what is shorter than a row at the end is left
out. So a longer `seq_len` in an evaluation gives the same text more context.

    loss           nats a byte
    bits_per_byte  loss / ln 2
    perplexity     exp(loss), a byte: that of the mean loss over all rows, not a mean of perplexities

Perplexities of words or of subwords are other numbers; bits per byte compares models of the same text.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from runners import corpus, streams
from runners.batch import SPLITS, Batch, label_scores
from runners.schema import UserError

REVISION = 1
LIMITS = [
    "vocab_size >= 257",
    "seq_len >= 2",
    "valid_share > 0",
    "test_share > 0",
    "valid_share + test_share < 1",
    "examples is None or examples >= 1",
    "valid_examples is None or valid_examples >= 1",
    "test_examples is None or test_examples >= 1",
    "config is None or dataset is not None",
    "data_files is not None or valid_files is None and test_files is None",
    "data_files is None or seq_len <= data_bytes * (1 - valid_share * (valid_files is None)"
    " - test_share * (test_files is None))",
    "data_files is None or"
    " seq_len <= min(valid_bytes or data_bytes * valid_share, test_bytes or data_bytes * test_share)",
]
OWNERS = [["data_files", "dataset"]]
METRICS = {"loss": "min", "perplexity": "min", "bits_per_byte": "min"}
LABELS = "seq_len"
CHANCE = {"loss": "log(vocab_size)", "perplexity": "vocab_size", "bits_per_byte": "log(vocab_size) / log(2)"}
SELECT = "loss"
TRAINS = True

BOS = 256
"""The token that begins a row: the one that is no byte."""
ON_THE_CARD = 1 << 30
"""Bytes of text that may lie on a card. Rows of a longer one are cut out on the host."""


class Task:
    """Language modelling on text. Exactly one of data_files and dataset.

    Args:
        vocab_size: rows of the embedding; 257 are used, for the bytes and the token that begins a row
        seq_len: length of a row (bytes to predict)
        data_files: text, a path or a pattern as books/*.txt; from the folder of the spec's file, or one shipped with it
        valid_files: text to validate on, likewise; none = a share of data_files
        test_files: text to test on, likewise; none = a share of data_files
        dataset: data set by its name on the hub, or a folder of JSONL, Parquet or CSV files
        config: configuration of the data set; none = its own
        column: column of the data set that holds the text
        tokenizer: what a token is; bytes = each byte of the text is one
        valid_share: share of the text that is for validation, before that for testing, where there is none of its own
        test_share: share of the text, its end, that is for testing, where there is none of its own
        examples: training rows of an epoch (count); none = as many as fit into the training part
        valid_examples: validation rows, from the beginning of that part, at most (count); none = all of it
        test_examples: test rows, likewise
    """

    order = "blocks"

    def __init__(
        self,
        folder: str = ".",
        *,
        vocab_size: int = 257,
        seq_len: int = 256,
        data_files: str | None = None,
        valid_files: str | None = None,
        test_files: str | None = None,
        dataset: str | None = None,
        config: str | None = None,
        column: str = "text",
        tokenizer: Literal["bytes"] = "bytes",
        valid_share: float = 0.1,
        test_share: float = 0.1,
        examples: int | None = None,
        valid_examples: int | None = 200,
        test_examples: int | None = None,
    ) -> None:
        if (data_files is None) == (dataset is None):
            raise UserError("task text wants one of data_files and dataset")
        if vocab_size <= BOS:
            raise UserError(f"task text with vocab_size {vocab_size} breaks the rule vocab_size >= {BOS + 1}")
        if tokenizer != "bytes":
            raise UserError(f"task text with tokenizer {tokenizer!r}: there is bytes alone")
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self._source: dict[str, Any] = {
            "folder": folder,
            "data_files": data_files,
            "valid_files": valid_files,
            "test_files": test_files,
            "dataset": dataset,
            "config": config,
            "column": column,
            "valid_share": valid_share,
            "test_share": test_share,
        }
        self._at_most = {"train": examples, "valid": valid_examples, "test": test_examples}

    @functools.cached_property
    def _text(self) -> Mapping[str, Tensor]:
        """Each part as bytes (uint8) on the host; read once in a process."""
        parts = _read(corpus.identity(self._source), tuple(self._source.items()))
        for part, text in parts.items():
            if len(text) < self.seq_len:
                raise UserError(f"task text: the {part} part has {len(text)} bytes, a row {self.seq_len} (seq_len)")
        return parts

    def groups(self, split: str) -> list[range]:
        """Row numbers of one epoch: one group."""
        rows, wanted = len(self._text[split]) // self.seq_len, self._at_most[split]
        if wanted is not None:
            rows = wanted if split == "train" else min(rows, wanted)
        return [range(rows)]

    def n_examples(self, split: str) -> int | None:
        return None if split == "train" else self.groups(split)[0].stop

    def batch(self, split: str, index_B: Tensor, seed: int, device: torch.device | str = "cpu") -> Batch:
        """Rows `index_B` (int64, on the host), cut out on `device`, or on the host for a text that is too long."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
        text = self._text[split]
        if text.numel() <= ON_THE_CARD:
            text = _on(text, torch.device(device))
        start_B = index_B.to(text.device, non_blocking=True)
        if split == "train":
            start_B = streams.integers(streams.key("text", seed), start_B, len(text) - self.seq_len + 1)
        else:
            start_B = start_B * self.seq_len
        offset_T = torch.arange(self.seq_len, device=text.device)
        target_BT = text[start_B[:, None] + offset_T].to(device, non_blocking=True).long()
        tokens_BT = torch.cat([torch.full_like(target_BT[:, :1], BOS), target_BT[:, :-1]], dim=1)
        return Batch(tokens_BT, offset_T.to(device).expand_as(target_BT), target_BT)

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Loss and bits per byte of each row: their means over its bytes."""
        loss_B = label_scores(logits_BQV, batch)["loss"]
        return {"loss": loss_B, "bits_per_byte": loss_B / math.log(2)}

    def of_means(self, means: Mapping[str, float]) -> dict[str, float]:
        """The perplexity of a whole part."""
        return {"perplexity": math.inf if means["loss"] > 700 else math.exp(means["loss"])}


@functools.lru_cache(maxsize=4)
def _read(_: tuple[Any, ...], source: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    found = corpus.load(dict(source))
    text = torch.frombuffer(found.text, dtype=torch.uint8)
    return {part: text[first:last] for part, (first, last) in found.parts.items()}


@functools.lru_cache(maxsize=8)
def _on(text: Tensor, device: torch.device) -> Tensor:
    return text.to(device)
