"""LAMBADA: the last word of a passage, which only the whole of it tells.

A trained model is evaluated on it; nothing is trained. One passage and what is asked:

    context   "Yes, it is a clear stone, and inside it is a guardian"        target   " angel"

    accuracy          share of passages whose target greedy decoding says, every token of it
    word_perplexity   exp(mean nats of a target): for each word, however many tokens it has

A word is what spaces alone part, so a target may hold a line break; spaces before it belong to it. Passages longer than
`seq_len` lose their beginning.

Source: Paperno et al. 2016, in OpenAI's version (columns text); lm-evaluation-harness 0.4.13, task lambada_openai,
whose scores these are (`perplexity` there is word_perplexity here).
"""

from __future__ import annotations

from typing import Any

import torch

from runners.documents import Documents, Row
from runners.reader import Reader, encode, likely

REVISION = 1
LIMITS = ["seq_len is None or seq_len >= 2", "test_examples is None or test_examples >= 1"]
OWNERS = [["data_files", "dataset"]]
METRICS = {"accuracy": "max", "word_perplexity": "min"}
BOUNDS = {"accuracy": [0, 1]}
CHANCE = {"accuracy": "0"}
SELECT = "accuracy"
TRAINS = False
EVALUATES = "text"


class Task(Documents):
    """The last word of passages. Exactly one of data_files and dataset.

    Args:
        data_files: passages, a path or a pattern: JSONL or Parquet by `column`, any other file is one passage
        dataset: data set by its name on the hub, or a folder of JSONL, Parquet or CSV files
        config: configuration of the data set; none = its own
        split: part of the data set
        column: column that holds a passage
        seq_len: tokens the model sees at once; none = the length it was trained at
        test_examples: passages at most, from the first on (count); none = all
    """

    NAME = "lambada"

    def __init__(
        self,
        folder: str = ".",
        *,
        data_files: str | None = None,
        dataset: str | None = None,
        config: str | None = None,
        split: str = "test",
        column: str = "text",
        seq_len: int | None = None,
        test_examples: int | None = None,
    ) -> None:
        source: dict[str, Any] = {"data_files": data_files, "dataset": dataset, "config": config, "split": split}
        source |= {"column": column, "seq_len": seq_len, "test_examples": test_examples}
        super().__init__({"folder": folder, **source})

    def wrong(self, row: Row) -> str | None:
        context, target = divided(row[0])
        return None if context and target.strip() else "it is too short: a word and those before it are wanted"

    def measure(self, model: Any, device: torch.device) -> dict[str, float]:
        """The metrics, and `n`, the number of passages."""
        pairs = [(encode(context), encode(target)[1:]) for context, target in (divided(r[0]) for r in self.documents())]
        scores = Reader(model, device, self.seq_len).likelihood(pairs)
        return {
            "accuracy": sum(is_greedy for _, is_greedy in scores) / len(scores),
            "word_perplexity": likely(-sum(nats for nats, _ in scores) / len(scores)),
            "n": len(scores),
        }


def divided(passage: str) -> tuple[str, str]:
    """Context and target of a passage: the last word, and the white space before it."""
    context = passage[: max(0, passage.rfind(" "))].rstrip()
    return context, passage[len(context) :]
