"""Copying: say again, in order, what was said (Jelassi et al. 2024, "Repeat After Me", arXiv 2402.01032).

One row of `seq_len: 8` (letters a token of 0 .. V-2, `|` the separator V-1, `-` no label):

    tokens   c a f b | c a f
    labels   - - - - c a f b

The label sits where the model has to say it: on the separator, then on each letter that it follows. So the copied
letters are read as well, one late, as in generation by a model that is always right; `shown: false` puts separators
in their place, and a model has to know by itself how far it has come (the older copying task, Arjovsky et al. 2016).

    accuracy   share of right letters
    exact      share of rows without a mistake: whether greedy generation gives the string

Variational Linear Attention's notebook 07 has a task of this name whose labels stand on the very letters they ask for:
nothing is to be remembered there, and its accuracies of 1.000 say no more.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from runners.batch import Batch
from runners.rows import Rows, integers, places, refuse

REVISION = 1
LIMITS = [
    "vocab_size >= 3",
    "seq_len >= 2",
    "seq_len % 2 == 0",
    "examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
]
METRICS = {"accuracy": "max", "exact": "max", "loss": "min"}
BOUNDS = {"accuracy": [0, 1], "exact": [0, 1]}
LABELS = "seq_len // 2"
CHANCE = {"accuracy": "1 / (vocab_size - 1)", "exact": "0", "loss": "log(vocab_size)"}
SELECT = "accuracy"
TRAINS = True


class Task(Rows):
    """Copying.

    Args:
        vocab_size: tokens in the vocabulary: the letters, drawn with replacement, and the separator
        seq_len: length of a row (tokens): half of them are the string to copy
        shown: the model reads each copied letter before it says the next; false = separators there
        data: fixed = the same `examples` rows every epoch, shuffled; fresh = every epoch draws new ones
        examples: training rows in an epoch (count)
        valid_examples: validation rows (count)
        test_examples: test rows of an evaluation (count)
    """

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        seq_len: int = 64,
        shown: bool = True,
        data: Literal["fixed", "fresh"] = "fresh",
        examples: int = 10000,
        valid_examples: int = 500,
        test_examples: int = 1000,
    ) -> None:
        rules = {"vocab_size >= 3": vocab_size >= 3, "seq_len is even": seq_len >= 2 and seq_len % 2 == 0}
        refuse("copy", rules, f"seq_len {seq_len}, vocab_size {vocab_size}")
        law = {"V": vocab_size, "T": seq_len}
        rows = {"train": examples, "valid": valid_examples, "test": test_examples}
        super().__init__("copy", law, fresh=data == "fresh", rows=rows)
        self.vocab_size, self.seq_len, self.shown = vocab_size, seq_len, shown

    def make(self, stream: int, row_B1: Tensor, split: str) -> Batch:
        n, separator = self.seq_len // 2, self.vocab_size - 1
        said_BQ = integers(stream, "letters", row_B1, n, separator)
        again_BN = said_BQ[:, :-1] if self.shown else torch.full_like(said_BQ[:, :-1], separator)
        tokens_BT = torch.cat([said_BQ, torch.full_like(row_B1, separator), again_BN], dim=1)
        return Batch(tokens_BT, places(n, 2 * n, row_B1), said_BQ)
