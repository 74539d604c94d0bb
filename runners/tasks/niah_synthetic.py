"""A needle in a haystack, small enough to train on: which value came with this key, and where in the row was it?

One row of `n_needles: 2, value_len: 2, seq_len: 18` (`!` begins a needle, `?` a question; k a key, a and b tokens of
values, `.` hay, `-` no label):

    tokens   . . . . ! k1 a1 b1 . . . . ! k2 a2 b2 | ? k1 a1
    labels   - - - - -  -  -  - - - - - -  -  -  - | - a1 b1

The first needle is the one that is asked for; the others differ from it by their keys. The answer's tokens but the last
are read, one late, as in generation by a model that is always right, so `exact` is what greedy generation would score.

    depth      how far down the haystack the first needle lies, 0 its beginning, 1 its end. Training draws it evenly;
               an evaluation over task.seq_len and task.depth is the well-known map of length by depth
    haystack   noise: the same few tokens over and over, as RULER's repeated sentences
               random: tokens of a vocabulary of their own, as an essay
               needles: nothing but needles, of which one is asked for

RULER's kinds in these words: single_1 is noise; single_2 random; multikey_1 random with `n_needles: 4`; multikey_2
haystack needles; multiquery random with `n_needles: 4, n_queries: 4`.

Source: RULER (Hsieh et al. 2024, arXiv 2404.06654) at c3f5e3b. Choices: tokens in place of words, so that nothing
depends on a tokenizer; needles begin at multiples of their own length; depths are of the needle asked for alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from runners import streams
from runners.batch import Batch
from runners.rows import Rows, distinct, draw, integers, places, refuse

REVISION = 1
LIMITS = [
    "value_len >= 1",
    "n_queries >= 1",
    "n_needles >= n_queries",
    "vocab_size >= 8",
    "haystack == 'needles' or (value_len + 2)*n_needles + (value_len + 1)*n_queries <= seq_len",
    "haystack == 'needles' or n_needles <= vocab_size // 4",
    "haystack != 'needles' or (value_len + 2)*n_queries + (value_len + 1)*n_queries <= seq_len",
    "haystack != 'needles' or (seq_len - (value_len + 1)*n_queries) // (value_len + 2) <= vocab_size // 4",
    "depth is None or depth >= 0",
    "depth is None or depth <= 1",
    "depth is None or n_queries == 1",
    "examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
]
METRICS = {"accuracy": "max", "exact": "max", "loss": "min"}
BOUNDS = {"accuracy": [0, 1], "exact": [0, 1]}
LABELS = "n_queries * value_len"
CHANCE = {"accuracy": "1 / (vocab_size // 4)", "exact": "0", "loss": "log(vocab_size)"}
SELECT = "accuracy"
TRAINS = True

NEEDLE, QUESTION = 0, 1
NOISE = 25
"""Tokens of the noise before it repeats itself: about those of RULER's five sentences."""


class Task(Rows):
    """A needle in a haystack of tokens.

    Args:
        vocab_size: tokens in the vocabulary: two marks, a quarter each for keys and values, the rest is hay
        seq_len: length of a row (tokens), the questions and their answers included
        n_needles: needles in a row (count), each with another key; without effect where all is needles
        n_queries: needles that are asked for, one after the other (count)
        value_len: length of a value (tokens)
        haystack: what is around the needles; needles = as many needles as fit
        depth: where the needle asked for lies, from 0, the beginning, to 1, the end; none = anywhere, evenly
        data: fixed = the same `examples` rows every epoch, shuffled; fresh = every epoch draws new ones
        examples: training rows in an epoch (count)
        valid_examples: validation rows (count)
        test_examples: test rows of an evaluation (count)
    """

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        seq_len: int = 256,
        n_needles: int = 1,
        n_queries: int = 1,
        value_len: int = 4,
        haystack: Literal["noise", "random", "needles"] = "noise",
        depth: float | None = None,
        data: Literal["fixed", "fresh"] = "fresh",
        examples: int = 10000,
        valid_examples: int = 500,
        test_examples: int = 500,
    ) -> None:
        self.vocab_size, self.seq_len, self.n_queries, self.value_len = vocab_size, seq_len, n_queries, value_len
        self.haystack, self.depth = haystack, depth
        self.body = seq_len - n_queries * (value_len + 1)
        self.slots = self.body // (value_len + 2)
        self.n_needles = self.slots if haystack == "needles" else n_needles
        self._check()
        # Without the depth: a map by depth shows the same needles in the same hay, at other places.
        law: dict[str, Any] = {
            "V": vocab_size,
            "T": seq_len,
            "n": self.n_needles,
            "queries": n_queries,
            "value": value_len,
        }
        law["haystack"] = haystack
        rows = {"train": examples, "valid": valid_examples, "test": test_examples}
        super().__init__("niah_synthetic", law, fresh=data == "fresh", rows=rows)

    def _check(self) -> None:
        rules = {
            "value_len >= 1": self.value_len >= 1,
            "n_needles >= n_queries >= 1": self.n_needles >= self.n_queries >= 1,
            "(value_len + 2)*n_needles + (value_len + 1)*n_queries <= seq_len": self.n_needles <= self.slots,
            "vocab_size >= 8": self.vocab_size >= 8,
            "n_needles <= vocab_size // 4": self.n_needles <= self.vocab_size // 4,
            "0 <= depth <= 1": self.depth is None or 0 <= self.depth <= 1,
            "depth is None or n_queries == 1": self.depth is None or self.n_queries == 1,
        }
        at = f"seq_len {self.seq_len}, n_needles {self.n_needles}, n_queries {self.n_queries}, depth {self.depth}"
        refuse("niah_synthetic", rules, f"{at}, value_len {self.value_len}, vocab_size {self.vocab_size}")

    def make(self, stream: int, row_B1: Tensor, split: str) -> Batch:
        n, length, quarter = self.n_needles, self.value_len, self.vocab_size // 4
        key_BN1 = 2 + distinct(stream, "keys", row_B1, n, quarter)[..., None]
        value_BNL = 2 + quarter + integers(stream, "values", row_B1, n * length, quarter).unflatten(1, (n, length))
        needle_BNW = torch.cat([torch.full_like(key_BN1, NEEDLE), key_BN1, value_BNL], dim=2)
        offset_W = torch.arange(length + 2, device=row_B1.device)
        place_BNW = self._slot(stream, row_B1)[..., None] * (length + 2) + offset_W
        body_BT = self._hay(stream, row_B1).scatter(1, place_BNW.flatten(1), needle_BNW.flatten(1))
        asked_BQ1, answer_BQL = key_BN1[:, : self.n_queries], value_BNL[:, : self.n_queries]
        question_BQW = torch.cat([torch.full_like(asked_BQ1, QUESTION), asked_BQ1, answer_BQL[..., :-1]], dim=2)
        tokens_BT = torch.cat([body_BT, question_BQW.flatten(1)], dim=1)
        position_BT = places(self.body, self.seq_len, row_B1).unflatten(1, (self.n_queries, length + 1))
        return Batch(tokens_BT, position_BT[..., 1:].flatten(1), answer_BQL.flatten(1))

    def _slot(self, stream: int, row_B1: Tensor) -> Tensor:
        """The slots of the needles, (B, N), all different; the first is at `depth`, where that is given."""
        words_BS = streams.bits(*draw(stream, "slots", row_B1, self.slots))
        if self.depth is not None:
            words_BS[:, int(self.depth * (self.slots - 1) + 0.5)] = torch.iinfo(torch.int64).max  # the first of all
        return words_BS.topk(self.n_needles, dim=1).indices

    def _hay(self, stream: int, row_B1: Tensor) -> Tensor:
        first = 2 + 2 * (self.vocab_size // 4)
        kinds = self.vocab_size - first
        if self.haystack == "random":
            return first + integers(stream, "hay", row_B1, self.body, kinds)
        noise_T = first + torch.arange(self.body, device=row_B1.device) % min(NOISE, kinds)
        return noise_T.repeat(len(row_B1), 1)

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Of each row; `exact` is the share of its answers that are right in every token."""
        right_BQL = (logits_BQV.argmax(-1) == batch.target_BQ).unflatten(1, (self.n_queries, self.value_len))
        return {**super().score(logits_BQV, batch), "exact": right_BQL.all(2).float().mean(1)}
