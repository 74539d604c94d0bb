"""WikiText, or any text by its documents: how likely is each of them, from its first word to its last?

A trained model is evaluated on it; nothing is trained. One document, as it lies in the file and as it is scored:

    = Robert Boulter =  \\n  Robert Boulter is an English film , television and theatre actor .
    = Robert Boulter =\\n Robert Boulter is an English film, television and theatre actor.

Its log-likelihood is that of all its tokens, in windows of `seq_len` (`runners/reader.py`), the first after the token
that begins a row. All scores follow from sums over the documents, none is a mean of scores:

    word_perplexity    exp(nats / words), words as white space parts the document in the file
    byte_perplexity    exp(nats / bytes), UTF-8 bytes of the document in the file
    bits_per_byte      log2 of it
    token_perplexity   exp(nats / tokens), tokens of the document as it is scored

Only the first three compare models of unlike tokens. A file that is no table (`runners/documents.py`) is parted where a
line is a heading, `= Like this =`: wikitext-2's test text gives the 62 documents of EleutherAI/wikitext_document_level.

Source: Merity et al. 2016; lm-evaluation-harness 0.4.13, task wikitext, whose scores these are.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from runners.documents import Documents
from runners.reader import Reader, encode, likely

REVISION = 1
LIMITS = ["seq_len is None or seq_len >= 2", "test_examples is None or test_examples >= 1"]
OWNERS = [["data_files", "dataset"]]
METRICS = {"word_perplexity": "min", "byte_perplexity": "min", "bits_per_byte": "min", "token_perplexity": "min"}
CHANCE = {"byte_perplexity": "257", "bits_per_byte": "log(257) / log(2)", "token_perplexity": "257"}
SELECT = "word_perplexity"
TRAINS = False
EVALUATES = "text"

_SCORED = [
    *((re.compile(pattern), by) for pattern, by in ((r"s '", "s'"), (r"/' [0-9]/", "/'[0-9]/"))),
    *((re.compile(f" @{mark}@ "), mark[-1]) for mark in ("-", ",", r"\.")),
    *((re.compile(f" {mark} "), f"{mark[-1]} ") for mark in (":", ";", r"\.", "!", r"\?", ",")),
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    *((re.compile(" ".join("=" * n)), "=" * n) for n in (4, 3, 2)),
    *((re.compile(pattern), by) for pattern, by in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "))),
    (re.compile(" 's"), "'s"),
]
"""What the file's tokenisation did, undone in this order, one after the other: the harness's wikitext_detokenizer."""


class Task(Documents):
    """Perplexities of whole documents. Exactly one of data_files and dataset.

    Args:
        data_files: documents, a path or a pattern: JSONL or Parquet by `column`, any other file parted at its headings
        dataset: data set by its name on the hub, or a folder of JSONL, Parquet or CSV files
        config: configuration of the data set; none = its own
        split: part of the data set
        column: column that holds a document
        seq_len: tokens the model sees at once; none = the length it was trained at
        test_examples: documents at most, from the first on (count); none = all
    """

    NAME = "wikitext"

    def __init__(
        self,
        folder: str = ".",
        *,
        data_files: str | None = None,
        dataset: str | None = None,
        config: str | None = None,
        split: str = "test",
        column: str = "page",
        seq_len: int | None = None,
        test_examples: int | None = None,
    ) -> None:
        source: dict[str, Any] = {"data_files": data_files, "dataset": dataset, "config": config, "split": split}
        source |= {"column": column, "seq_len": seq_len, "test_examples": test_examples}
        super().__init__({"folder": folder, **source}, parted=pages)

    def measure(self, model: Any, device: torch.device) -> dict[str, float]:
        """The metrics, and `n`, the number of documents."""
        found = [page for (page,) in self.documents()]
        scored = [as_scored(page) for page in found]
        nats = -sum(Reader(model, device, self.seq_len).rolling(scored))
        words = sum(len(re.split(r"\s+", page)) for page in found)
        size = sum(len(encode(page)) - 1 for page in found)
        return {
            "word_perplexity": likely(nats / words),
            "byte_perplexity": likely(nats / size),
            "bits_per_byte": nats / size / math.log(2),
            "token_perplexity": likely(nats / sum(len(encode(text)) - 1 for text in scored)),
            "n": len(found),
        }


def pages(text: str) -> list[str]:
    """The documents of a text: each begins with a line `= Title =`; more signs head a section. None is blank."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if not "".join(found[-1]).strip():
                found.pop()
            found.append([])
        found[-1].append(line)
    return ["\n".join(lines) for lines in found]


def as_scored(page: str) -> str:
    """A document as the model reads it."""
    for pattern, by in _SCORED:
        page = pattern.sub(by, page)
    return page
