"""In-context retrieval: a text that breaks off where it repeats what it said. Does the model go on with it?

A trained model is evaluated on it; nothing is trained. One document of FDA, SWDE or SQuAD in completions' form:

    text    "... The device is a clear stone. Manufacturer: Angel Ltd. [...]  Manufacturer:"        value   "Angel Ltd"

    contains   share of documents whose greedy continuation, up to a line break, holds the value, capitals or not

The continuation is a prefill and then the mechanism's own step, whose memory stays as large as it is. Of a text longer
than `seq_len - answer_len` the beginning is lost, and often what is asked for with it: scores at different lengths are
different scores. A token of bytes is a letter: 48 of them, the count of the papers, may be shorter than a value, which
can then not be had (raise `answer_len`).

Source: Arora et al. 2024 (arXiv 2402.18668), data sets hazyresearch/based-fda, based-swde-v2 and based-squad;
lm-evaluation-harness 0.4.13, tasks fda and swde, whose scores these are. (Its squad_completion goes on for 256 tokens
and up to a blank line there: it reads the harness's defaults where it means to set its own.)
"""

from __future__ import annotations

import re
from typing import Any

import torch

from runners.documents import Documents, Row
from runners.reader import Reader

REVISION = 1
LIMITS = [
    "answer_len >= 1",
    "seq_len is None or seq_len > answer_len",
    "test_examples is None or test_examples >= 1",
]
OWNERS = [["data_files", "dataset"]]
METRICS = {"contains": "max"}
BOUNDS = {"contains": [0, 1]}
CHANCE = {"contains": "0"}
SELECT = "contains"
TRAINS = False
EVALUATES = "text"


class Task(Documents):
    """Values that a continuation should hold. Exactly one of data_files and dataset.

    Args:
        data_files: texts and values, a path or a pattern of JSONL or Parquet files
        dataset: data set by its name on the hub, or a folder of JSONL, Parquet or CSV files
        config: configuration of the data set; none = its own
        split: part of the data set
        text_column: column that holds the text to go on with
        value_column: column that holds the value
        answer_len: tokens of a continuation
        seq_len: tokens the model sees at once, the continuation among them; none = the length it was trained at
        test_examples: documents at most, from the first on (count); none = all
    """

    NAME = "completion"

    def __init__(
        self,
        folder: str = ".",
        *,
        data_files: str | None = None,
        dataset: str | None = None,
        config: str | None = None,
        split: str = "validation",
        text_column: str = "text",
        value_column: str = "value",
        answer_len: int = 48,
        seq_len: int | None = None,
        test_examples: int | None = None,
    ) -> None:
        source: dict[str, Any] = {"data_files": data_files, "dataset": dataset, "config": config, "split": split}
        source |= {"text_column": text_column, "value_column": value_column}
        super().__init__({"folder": folder, **source, "seq_len": seq_len, "test_examples": test_examples})
        self.answer_len = answer_len

    def wrong(self, row: Row) -> str | None:
        return None if all(part.strip() for part in row) else "its text or its value is empty"

    def measure(self, model: Any, device: torch.device) -> dict[str, float]:
        """The metric, and `n`, the number of documents."""
        rows = self.documents()
        reader = Reader(model, device, self.seq_len)
        said = reader.generate([text.strip() for text, _ in rows], self.answer_len, until=["\n"])
        right = sum(holds(answer, value.strip()) for answer, (_, value) in zip(said, rows, strict=True))
        return {"contains": right / len(rows), "n": len(rows)}


def holds(answer: str, value: str) -> bool:
    """Whether `value` is part of `answer`, capitals or not."""
    return re.search(re.escape(value), answer, re.IGNORECASE) is not None
