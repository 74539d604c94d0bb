"""Multi-query associative recall (Zoology, Arora et al. 2023): which value came with this key?

One row of `n_pairs: 2, seq_len: 16` (keys k from the lower half of the vocabulary, values v from the upper half, `.` a
filler, `-` no label):

    tokens   k1 v1 k2 v2 |  .  .  k2  .  .  .  k1  .  .  .  .  .
    labels    -  -  -  - |  -  -  v2  -  -  -  v1  -  -  -  -  -

The label sits on the query itself: the model reads k2 and must say v2 at that position. Nothing is shifted, and the
value does not follow in the input. Queries stand at even distances 2g from the end of the pairs, g drawn without
replacement one key after the other with weights (g+1)^(power-1): `power: 0.01` asks most of them soon, 1 is uniform.

    updates: 1             k1 v1 k2 v2 k2 w2 | ...  some keys come again with another value, and the last one counts
    layout: compositional  a1 b1 v1 a1 b2 v2 a2 b1 v3 a2 b2 v4 | . . . a2 b1 . : a key is two tokens of a square grid,
                           so neither tells the value alone; in any order, labels on the second token
    layout: end            k1 v1 k2 v2 . . . k2 . k1 . : questions in any order over the last 2 n_pairs tokens, fillers
                           never 0; the longer the row, the longer all of them wait
    layout: vla            k1 v1 k2 v2 SEP q1 q2 ... : keys and values share one range, values and queries are drawn
                           with replacement, every position after SEP is a query

Sources: zoology `multiquery_ar`, `forgetting_mqar` and `compositional_mqar` at d88d6f5; Variational Linear Attention's
notebook 07 (vla); `train_mqar.py` of Adaptive Memory Decay at 3cc2d65 (end). Differences: fillers come from a stream of
their own, not torch's global generator; `num_passes` is left out (its reference raises); a new value differs from its
own key's first one (there from that of another key, so that it may be no update). A filler may equal a key or a value
of its row, as there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runners import streams
from runners.batch import SPLITS, Batch, label_scores
from runners.rows import distinct, integers, places, refuse, successive
from runners.schema import UserError

REVISION = 1
LIMITS = [
    "n_pairs >= 1",
    "seq_len >= 2",
    "power > 0",
    "examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
    "layout in ('vla', 'end') or seq_len % 2 == 0",
    "layout == 'vla' or 4 * n_pairs <= seq_len",
    "layout in ('vla', 'end') or vocab_size > seq_len",
    "layout not in ('zoology', 'end') or n_pairs <= vocab_size // 2 - 1",
    "layout != 'vla' or 2 * n_pairs + 2 <= seq_len",
    "layout != 'vla' or n_pairs <= vocab_size - 1",
    "updates >= 0",
    "updates <= n_pairs",
    "updates == 0 or layout == 'zoology'",
    "updates == 0 or 4 * n_pairs + 2 * updates <= seq_len",
    "layout != 'compositional' or n_pairs in (1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, 144, 169, 196, 225, 256)",
    "layout != 'compositional' or 6 * n_pairs <= seq_len",
    "layout != 'compositional' or n_pairs <= vocab_size // 3",
]
DERIVED = {"seq_len": "3 * n_pairs + 1 if layout == 'vla' else 64"}
SEGMENT = ["seq_len", "n_pairs", "examples"]
METRICS = {"accuracy": "max", "loss": "min"}
BOUNDS = {"accuracy": [0, 1]}
LABELS = "seq_len - 2*n_pairs - 1 if layout == 'vla' else n_pairs"
CHANCE = {
    "accuracy": "1 / vocab_size if layout == 'vla' else 2 / vocab_size if layout != 'compositional' "
    "else 1 / (vocab_size - vocab_size // 3 * 2)",
    "loss": "log(vocab_size)",
}
SELECT = "accuracy"
TRAINS = True


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of the training mixture."""

    seq_len: int
    n_pairs: int
    examples: int


class Task:
    """Multi-query associative recall.

    Args:
        vocab_size: tokens in the vocabulary; zoology's layout takes keys from 1 .. V/2-1, values from V/2 .. V-1,
            the compositional one has a third each for first tokens, second tokens and values
        seq_len: length of a row (tokens); none = 64, and 3 n_pairs + 1 in the vla layout
        n_pairs: key-value pairs in a row (count)
        power: exponent a of the law of query distances, weights (g+1)^(a-1) (1 = uniform, small = soon)
        random_non_queries: fillers are random tokens of the whole vocabulary instead of token 0
        data: fixed = the same `examples` rows every epoch; fresh = every epoch draws new ones
        examples: training rows in an epoch (count)
        valid_examples: validation rows, of every segment (count)
        test_examples: test rows of an evaluation (count)
        segments: the training mixture in its order, each with any of seq_len, n_pairs, examples; none = one segment
        order: blocks = segments and rows in their order; mixed = rows and batches shuffled every epoch
        layout: zoology = pairs, then spread queries; vla = pairs, separator, queries back to back; compositional =
            zoology's with keys of two tokens, n_pairs a square number; end = all queries at the end of the row
        updates: keys that get another value after the pairs (count), drawn anew for each row
    """

    def __init__(
        self,
        *,
        vocab_size: int = 8192,
        seq_len: int | None = None,
        n_pairs: int = 4,
        power: float = 0.01,
        random_non_queries: bool = True,
        data: Literal["fixed", "fresh"] = "fixed",
        examples: int = 100000,
        valid_examples: int = 500,
        test_examples: int = 1000,
        segments: list[dict] | None = None,
        order: Literal["blocks", "mixed"] = "blocks",
        layout: Literal["zoology", "vla", "compositional", "end"] = "zoology",
        updates: int = 0,
    ) -> None:
        if seq_len is None:
            seq_len = 3 * n_pairs + 1 if layout == "vla" else 64
        self.vocab_size, self.power, self.random_non_queries = vocab_size, power, random_non_queries
        self.data, self.order, self.layout, self.updates = data, order, layout, updates
        self._own = Segment(seq_len, n_pairs, test_examples)
        self._rows = {"valid": valid_examples, "test": test_examples}
        self._segments = self._read_segments(segments, Segment(seq_len, n_pairs, examples))
        for segment in (self._own, *self._segments):
            self._check(segment)
        self.seq_len = max(segment.seq_len for segment in self._segments)

    def _read_segments(self, segments: list[dict] | None, own: Segment) -> list[Segment]:
        if segments is None:
            return [own]
        found = []
        for number, entry in enumerate(segments, 1):
            unknown = sorted(set(entry) - set(SEGMENT))
            if unknown:
                raise UserError(f"task.segments, entry {number}: {unknown[0]!r} is none of {', '.join(SEGMENT)}")
            found.append(Segment(**{name: int(entry.get(name, getattr(own, name))) for name in SEGMENT}))
        if not found:
            raise UserError("task.segments is empty: give at least one {seq_len, n_pairs, examples}, or leave it out")
        return found

    def _check(self, segment: Segment) -> None:
        """The rules of LIMITS once more, for each segment: the planner reads them for the task's own values only."""
        length, n, vocab, updates, layout = segment.seq_len, segment.n_pairs, self.vocab_size, self.updates, self.layout
        rules = {
            "n_pairs >= 1": n >= 1,
            "0 <= updates <= n_pairs": 0 <= updates <= n,
            "updates == 0 or layout == 'zoology'": updates == 0 or layout == "zoology",
        }
        if layout == "vla":
            rules["2 * n_pairs + 2 <= seq_len"] = 2 * n + 2 <= length
            rules["n_pairs <= vocab_size - 1"] = n <= vocab - 1
        elif layout != "end":
            rules["seq_len is even"] = length % 2 == 0
            rules["vocab_size > seq_len"] = vocab > length
        if layout in ("zoology", "end"):
            rules["4 * n_pairs <= seq_len"] = 4 * n <= length
            rules["4 * n_pairs + 2 * updates <= seq_len"] = 4 * n + 2 * updates <= length
            rules["n_pairs <= vocab_size // 2 - 1"] = n <= vocab // 2 - 1
        if layout == "compositional":
            rules["n_pairs is a square"] = math.isqrt(n) ** 2 == n
            rules["6 * n_pairs <= seq_len"] = 6 * n <= length
            rules["n_pairs <= vocab_size // 3"] = n <= vocab // 3
        refuse("mqar", rules, f"seq_len {length}, n_pairs {n}, vocab_size {vocab}, updates {updates}")

    # which rows there are

    def _parts(self, split: str) -> list[Segment]:
        """The test split has the task's own length and load; the mixture is for training, and validated on."""
        if split == "train":
            return self._segments
        rows = self._rows[split]
        parts = self._segments if split == "valid" else [self._own]
        return [Segment(part.seq_len, part.n_pairs, rows) for part in parts]

    def groups(self, split: str) -> list[range]:
        """Row numbers of one epoch, by segment."""
        found, first = [], 0
        for part in self._parts(split):
            found.append(range(first, first + part.examples))
            first += part.examples
        return found

    def n_examples(self, split: str) -> int | None:
        if split == "train" and self.data == "fresh":
            return None
        return sum(part.examples for part in self._parts(split))

    # what is in them

    def batch(self, split: str, index_B: Tensor, seed: int, device: torch.device | str = "cpu") -> Batch:
        """Rows `index_B` (int64, on the host, all of one segment), made on `device`.

        A fresh training row has a number past the first epoch: it is row `i % rows of an epoch` of its segment, drawn
        by its own number.
        """
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
        parts, groups = self._parts(split), self.groups(split)
        first, last = (int(index_B[at]) % groups[-1].stop for at in (0, -1))
        number = next(n for n, rows in enumerate(groups) if first in rows)
        if last not in groups[number]:
            raise ValueError(f"rows {int(index_B[0])} and {int(index_B[-1])} are of different segments")
        part = parts[number]
        # The law of a row, and nothing else: raising `valid_examples` or `test_examples` keeps the valid and test rows
        # there are. Training rows depend on every setting of the task through `seed`.
        law = {"V": self.vocab_size, "T": part.seq_len, "n": part.n_pairs, "power": self.power, "layout": self.layout}
        law["fill"] = self.random_non_queries
        if self.updates:
            law["updates"] = self.updates
        stream = streams.key("mqar", split, seed if split == "train" else None, number, law)
        row_B1 = index_B.to(device, non_blocking=True)[:, None]
        make = {"zoology": _zoology, "vla": _vla, "compositional": _compositional, "end": _end}[self.layout]
        return make(stream, row_B1, part, self)

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Accuracy and loss of each row: its mean over the row's queries."""
        return label_scores(logits_BQV, batch)


def _fillers(stream: int, row_B1: Tensor, length: int, task: Task) -> Tensor:
    """A row before anything is put into it."""
    if task.random_non_queries and task.layout == "end":
        return 1 + integers(stream, "fillers", row_B1, length, task.vocab_size - 1)
    if task.random_non_queries:
        return integers(stream, "fillers", row_B1, length, task.vocab_size)
    return torch.zeros(len(row_B1), length, dtype=torch.int64, device=row_B1.device)


def _asked(stream: int, row_B1: Tensor, first: int, part: Segment, every: int, power: float) -> Tensor:
    """Where the queries begin, one for each pair: at places `every` tokens apart from position `first` on."""
    weights = [(g + 1.0) ** (power - 1) for g in range((part.seq_len - first) // every)]
    return first + every * successive(stream, "gaps", row_B1, part.n_pairs, weights)


def _zoology(stream: int, row_B1: Tensor, part: Segment, task: Task) -> Batch:
    n, m, half = part.n_pairs, task.updates, task.vocab_size // 2
    key_BQ = 1 + distinct(stream, "keys", row_B1, n, half - 1)
    value_BQ = half + distinct(stream, "values", row_B1, n, task.vocab_size - half)
    context = [key_BQ, value_BQ]
    if m:
        which_BM = distinct(stream, "updates", row_B1, m, n)
        other_BM = 1 + integers(stream, "new values", row_B1, m, task.vocab_size - half - 1)
        new_BM = half + (value_BQ.gather(1, which_BM) - half + other_BM) % (task.vocab_size - half)
        context = [torch.cat([key_BQ, key_BQ.gather(1, which_BM)], 1), torch.cat([value_BQ, new_BM], 1)]
        value_BQ = value_BQ.scatter(1, which_BM, new_BM)
    position_BQ = _asked(stream, row_B1, 2 * (n + m), part, 2, task.power)
    tokens_BT = _fillers(stream, row_B1, part.seq_len, task)
    tokens_BT[:, : 2 * (n + m)] = torch.stack(context, dim=2).flatten(1)
    tokens_BT.scatter_(1, position_BQ, key_BQ)
    return Batch(tokens_BT, position_BQ, value_BQ)


def _compositional(stream: int, row_B1: Tensor, part: Segment, task: Task) -> Batch:
    n, third, side = part.n_pairs, task.vocab_size // 3, math.isqrt(part.n_pairs)
    cell_BQ = distinct(stream, "order", row_B1, n, n)
    first_BQ = 1 + distinct(stream, "first", row_B1, side, third - 1).gather(1, cell_BQ // side)
    second_BQ = third + distinct(stream, "second", row_B1, side, third).gather(1, cell_BQ % side)
    value_BQ = 2 * third + distinct(stream, "values", row_B1, n, task.vocab_size - 2 * third)
    start_BQ = _asked(stream, row_B1, 3 * n, part, 3, task.power)
    tokens_BT = _fillers(stream, row_B1, part.seq_len, task)
    tokens_BT[:, : 3 * n] = torch.stack([first_BQ, second_BQ, value_BQ], dim=2).flatten(1)
    tokens_BT.scatter_(1, start_BQ, first_BQ).scatter_(1, start_BQ + 1, second_BQ)
    return Batch(tokens_BT, start_BQ + 1, value_BQ)


def _end(stream: int, row_B1: Tensor, part: Segment, task: Task) -> Batch:
    n, half, first = part.n_pairs, task.vocab_size // 2, part.seq_len - 2 * part.n_pairs
    key_BN = 1 + distinct(stream, "keys", row_B1, n, half - 1)
    value_BN = half + distinct(stream, "values", row_B1, n, task.vocab_size - half)
    asked_BQ = distinct(stream, "order", row_B1, n, n)
    tokens_BT = _fillers(stream, row_B1, part.seq_len, task)
    tokens_BT[:, : 2 * n] = torch.stack([key_BN, value_BN], dim=2).flatten(1)
    tokens_BT[:, first::2] = key_BN.gather(1, asked_BQ)
    return Batch(tokens_BT, places(first, part.seq_len, row_B1, 2), value_BN.gather(1, asked_BQ))


def _vla(stream: int, row_B1: Tensor, part: Segment, task: Task) -> Batch:
    n, separator = part.n_pairs, task.vocab_size - 1
    queries = part.seq_len - 2 * n - 1
    key_BN = distinct(stream, "keys", row_B1, n, separator)
    value_BN = integers(stream, "values", row_B1, n, separator)
    chosen_BQ = integers(stream, "queries", row_B1, queries, n)
    pairs_BT = torch.stack([key_BN, value_BN], dim=2).flatten(1)
    tokens_BT = torch.cat([pairs_BT, torch.full_like(row_B1, separator), key_BN.gather(1, chosen_BQ)], dim=1)
    return Batch(tokens_BT, places(2 * n + 1, part.seq_len, row_B1), value_BN.gather(1, chosen_BQ))
