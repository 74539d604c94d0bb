"""Recall of pairs."""

from typing import Literal

REVISION = 1
LIMITS = ["n_pairs >= 1", "4 * n_pairs <= seq_len", "vocab_size > seq_len"]
DERIVED = {"seq_len": "16 * n_pairs"}
SEGMENT = ["seq_len", "n_pairs", "examples"]
METRICS = {"accuracy": "max", "loss": "min"}
BOUNDS = {"accuracy": [0, 1]}
CHANCE = {"accuracy": "2 / vocab_size", "loss": "log(vocab_size)"}
SELECT = "accuracy"


class Task:
    """Recall of pairs.

    Args:
        vocab_size: tokens (count)
        seq_len: length of a row (tokens); none = 16 tokens a pair
        n_pairs: pairs in a row (count)
        examples: rows of an epoch (count)
        segments: the training mixture
        data: where rows come from
    """

    def __init__(
        self,
        *,
        vocab_size: int = 8192,
        seq_len: int | None = None,
        n_pairs: int = 4,
        examples: int = 1000,
        segments: list[dict] | None = None,
        data: Literal["fixed", "fresh"] = "fixed",
    ) -> None: ...
