"""Selective copying: say in order the letters that were scattered among noise (Gu and Dao 2023, arXiv 2312.00752).

One row of `n_data: 3, seq_len: 12` (letters 1 .. V-2, `.` noise, token 0, `?` the marker V-1, `-` no label):

    tokens   . c . . a . . . b ? ? ?
    labels   - - - - - - - - - c a b

Letters are drawn with replacement, their places are a uniform choice among all before the markers. Distances vary, so
that no convolution of fixed length solves it: what is kept has to depend on what is read.

    layout: spread   . c . a . . . b | ? ? ?   letters all different, noise as varied as they are, one separator, then
                     blanks: tokens 1 separator, 2 blank, 3 .. V/2+1 letters, V/2+3 .. V-1 noise (Adaptive Memory
                     Decay, code of arXiv 2605.06946)

    accuracy   share of right letters
    exact      share of rows without a mistake

The copied letters are never read: a model has to know by itself how far it has come. Sources: the S4 repository's
`copying` with `variable: true`, which Mamba's paper builds on (its own code is not released); `train_selective_copy.py`
at 3cc2d65 for `spread`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from runners.batch import Batch
from runners.rows import Rows, distinct, integers, places, refuse

REVISION = 1
LIMITS = [
    "n_data >= 1",
    "layout == 'spread' or vocab_size >= 3",
    "layout == 'spread' or 2 * n_data <= seq_len",
    "layout == 'mamba' or vocab_size >= 8",
    "layout == 'mamba' or n_data <= vocab_size // 2 - 1",
    "layout == 'mamba' or 2 * n_data + 1 <= seq_len",
    "examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
]
METRICS = {"accuracy": "max", "exact": "max", "loss": "min"}
BOUNDS = {"accuracy": [0, 1], "exact": [0, 1]}
LABELS = "n_data"
CHANCE = {
    "accuracy": "1 / (vocab_size - 2) if layout == 'mamba' else 1 / (vocab_size // 2 - 1)",
    "exact": "0",
    "loss": "log(vocab_size)",
}
SELECT = "accuracy"
TRAINS = True


class Task(Rows):
    """Selective copying.

    Args:
        vocab_size: tokens in the vocabulary, noise and markers among them
        n_data: letters to copy (count)
        seq_len: length of a row (tokens), the places for the answers included
        layout: mamba = one noise token, a marker for each answer; spread = many noise tokens, different letters
        data: fixed = the same `examples` rows every epoch, shuffled; fresh = every epoch draws new ones
        examples: training rows in an epoch (count)
        valid_examples: validation rows (count)
        test_examples: test rows of an evaluation (count)
    """

    def __init__(
        self,
        *,
        vocab_size: int = 16,
        n_data: int = 16,
        seq_len: int = 4096,
        layout: Literal["mamba", "spread"] = "mamba",
        data: Literal["fixed", "fresh"] = "fresh",
        examples: int = 10000,
        valid_examples: int = 500,
        test_examples: int = 1000,
    ) -> None:
        spread = layout == "spread"
        rules = {
            "n_data >= 1": n_data >= 1,
            f"vocab_size >= {8 if spread else 3}": vocab_size >= (8 if spread else 3),
            "n_data <= vocab_size // 2 - 1": not spread or n_data <= vocab_size // 2 - 1,
            f"2 * n_data{' + 1' * spread} <= seq_len": 2 * n_data + spread <= seq_len,
        }
        refuse("selective_copy", rules, f"seq_len {seq_len}, n_data {n_data}, vocab_size {vocab_size}")
        law = {"V": vocab_size, "T": seq_len, "n": n_data, "layout": layout}
        rows = {"train": examples, "valid": valid_examples, "test": test_examples}
        super().__init__("selective_copy", law, fresh=data == "fresh", rows=rows)
        self.vocab_size, self.seq_len, self.n_data, self.layout = vocab_size, seq_len, n_data, layout

    def make(self, stream: int, row_B1: Tensor, split: str) -> Batch:
        n, half = self.n_data, self.vocab_size // 2
        spread = self.layout == "spread"
        body = self.seq_len - n - spread
        if spread:
            data_BQ = 3 + distinct(stream, "letters", row_B1, n, half - 1)
            noise_BT = half + 3 + integers(stream, "noise", row_B1, body, self.vocab_size - half - 3)
        else:
            data_BQ = 1 + integers(stream, "letters", row_B1, n, self.vocab_size - 2)
            noise_BT = torch.zeros(len(row_B1), body, dtype=torch.int64, device=row_B1.device)
        place_BQ = distinct(stream, "places", row_B1, n, body).sort(1).values
        parts = [noise_BT.scatter(1, place_BQ, data_BQ)]
        parts += [torch.full_like(row_B1, 1)] if spread else []
        parts += [torch.full_like(data_BQ, 2 if spread else self.vocab_size - 1)]
        return Batch(torch.cat(parts, dim=1), places(self.seq_len - n, self.seq_len, row_B1), data_BQ)
