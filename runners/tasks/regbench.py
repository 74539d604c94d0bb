"""RegBench: learn a language from a few of its strings (Akyurek et al. 2024, arXiv 2401.12973).

Every row is about a random automaton of its own. From state 0 it writes strings, at each state one of its one to three
symbols, all as likely; a model that has seen some of them should know what may come next. One row of `seq_len: 12`
(`|` ends a string, `.` fills the row up, `-` no label):

    tokens   a c a | a c b a | a c .
    labels   c a - a c b a - a c - -

Separators and what fills up are not asked for. What is scored is not the symbol that came, for several may come:

    accuracy          share of positions whose likeliest token may come there
    total_variation   half the sum over tokens of |p of the model - p of the automaton|, mean over positions: 0 = equal
    loss              nats a symbol that came; never below the automaton's own entropy

The automaton, as in the paper's code: `edges`+1 .. `nodes` states; an alphabet of `edges`+1 .. `symbols` symbols; at
each state 1 .. `edges` of them, all different, that lead to as many different other states. All states accept.

Languages of train, valid and test are disjoint: a fingerprint of a language, the same whatever automaton writes it,
says which split it belongs to, and a row takes the first of `CANDIDATES` automata that belongs to its own (two rows of
a million find none, and take the last). Drawn apart they would not be: one automaton of fifty only writes abab...

Source: seq_icl at 9b9223d, `src/dataloaders/dfa.py` and `eval.py`. Differences: there no two automata compare equal, so
that splits share small languages; its `model_dfa_diff` is twice the total variation, over the places of separators too.
Accuracy is the mean of rows, there of all positions of a batch (choice).

Letters: M automata, N states, E edges of a state, S strings of a row, L symbols of a string.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from runners import streams
from runners.batch import NO_LABEL, SPLITS, Batch
from runners.rows import Rows, distinct, draw, integers, places, refuse

REVISION = 1
LIMITS = [
    "edges >= 1",
    "edges < nodes",
    "edges < symbols",
    "symbols <= 60",
    "vocab_size >= symbols + 2",
    "min_strings >= 1",
    "min_strings <= max_strings",
    "max_len >= 1",
    "seq_len >= 2",
    "examples >= 1",
    "valid_examples >= 1",
    "test_examples >= 1",
]
DERIVED = {"seq_len": "max_strings * (max_len + 1) - 2"}
METRICS = {"accuracy": "max", "total_variation": "min", "loss": "min"}
BOUNDS = {"accuracy": [0, 1], "total_variation": [0, 1]}
LABELS = "seq_len"
CHANCE = {
    "accuracy": "(1 + edges) / (2 * symbols)",
    "total_variation": "1 - (1 + edges) / (2 * vocab_size)",
    "loss": "log(vocab_size)",
}
SELECT = "accuracy"
TRAINS = True

CANDIDATES = 32
"""Automata that are drawn for a row: each belongs to its split with one chance in three."""
DEPTH = 6
"""Languages with the same strings of up to so many symbols belong to the same split."""


@dataclass(frozen=True, slots=True)
class Judged(Batch):
    """Rows with what may come at each label: bit s is set where symbol s may."""

    legal_BQ: Tensor  # int64


@dataclass(frozen=True, slots=True)
class Automata:
    """Symbol and next state of each edge, and whether it is there; 0 is the state that strings begin in."""

    symbol_MNE: Tensor
    next_MNE: Tensor
    there_MNE: Tensor

    def __getitem__(self, which: Tensor) -> Automata:
        return Automata(self.symbol_MNE[which], self.next_MNE[which], self.there_MNE[which])


class Task(Rows):
    """In-context learning of regular languages.

    Args:
        nodes: most states of an automaton (count)
        edges: most symbols that may come at a state (count)
        symbols: letters there are, of which each automaton has an alphabet (count)
        vocab_size: tokens in the vocabulary: the letters, the separator, and what fills a row up
        min_strings: fewest strings in a row (count)
        max_strings: most strings in a row (count)
        max_len: length of the longest string (symbols); lengths are uniform from 1
        seq_len: length of a row (tokens), cut or filled up to it; none = what holds the longest
        data: fixed = the same `examples` rows every epoch, shuffled; fresh = every epoch draws new ones
        examples: training rows in an epoch, each about an automaton of its own (count)
        valid_examples: validation rows (count)
        test_examples: test rows of an evaluation (count)
    """

    def __init__(
        self,
        *,
        nodes: int = 12,
        edges: int = 3,
        symbols: int = 18,
        vocab_size: int = 20,
        min_strings: int = 10,
        max_strings: int = 19,
        max_len: int = 49,
        seq_len: int | None = None,
        data: Literal["fixed", "fresh"] = "fixed",
        examples: int = 5000,
        valid_examples: int = 250,
        test_examples: int = 250,
    ) -> None:
        seq_len = max_strings * (max_len + 1) - 2 if seq_len is None else seq_len
        rules = {
            "1 <= edges < min(nodes, symbols)": 1 <= edges < min(nodes, symbols),
            "symbols <= 60": symbols <= 60,
            "vocab_size >= symbols + 2": vocab_size >= symbols + 2,
            "1 <= min_strings <= max_strings": 1 <= min_strings <= max_strings,
            "max_len >= 1": max_len >= 1,
            "seq_len >= 2": seq_len >= 2,
        }
        sizes = f"nodes {nodes}, edges {edges}, symbols {symbols}, vocab_size {vocab_size}"
        refuse("regbench", rules, f"{sizes}, {min_strings} to {max_strings} strings, max_len {max_len}")
        law: dict[str, Any] = {"nodes": nodes, "edges": edges, "symbols": symbols}
        law |= {"strings": [min_strings, max_strings], "max_len": max_len}
        rows = {"train": examples, "valid": valid_examples, "test": test_examples}
        super().__init__("regbench", law, fresh=data == "fresh", rows=rows)
        self.nodes, self.edges, self.symbols, self.vocab_size, self.seq_len = nodes, edges, symbols, vocab_size, seq_len
        self.strings, self.max_len = (min_strings, max_strings), max_len

    def make(self, stream: int, row_B1: Tensor, split: str) -> Batch:
        automata = self._automata(stream, row_B1, split)
        symbol_BSL, legal_BSL = _walk(stream, row_B1, automata, self.strings[1], self.max_len)
        least, most = self.strings
        n_B1 = least + integers(stream, "strings", row_B1, 1, most - least + 1)
        length_BS = 1 + integers(stream, "lengths", row_B1, most, self.max_len)
        text, legal = self._join(symbol_BSL, legal_BSL, length_BS, n_B1)
        target_BQ = torch.where(legal[:, 1:] > 0, text[:, 1:], NO_LABEL)
        return Judged(text[:, :-1], places(0, self.seq_len, row_B1), target_BQ, legal[:, 1:])

    def _automata(self, stream: int, row_B1: Tensor, split: str) -> Automata:
        """The first candidate of each row whose language belongs to the split."""
        candidate_C = torch.arange(CANDIDATES, device=row_B1.device)
        found = self._draw(stream, (row_B1 * CANDIDATES + candidate_C).reshape(-1, 1))
        fits_BC = ((fingerprint(found) >> 8) % len(SPLITS) == SPLITS.index(split)).view(-1, CANDIDATES)
        first_B = candidate_C.where(fits_BC, CANDIDATES - 1).amin(1)
        return found[torch.arange(len(first_B), device=first_B.device) * CANDIDATES + first_B]

    def _draw(self, stream: int, row_M1: Tensor) -> Automata:
        nodes, edges, symbols = self.nodes, self.edges, self.symbols
        n_M1 = edges + 1 + integers(stream, "nodes", row_M1, 1, nodes - edges)
        size_M1 = edges + 1 + integers(stream, "alphabet", row_M1, 1, symbols - edges)
        letter_MS = distinct(stream, "letters", row_M1, symbols, symbols)
        which_MNE = _choices(stream, "symbols", row_M1, nodes, edges, size_M1)
        other_MNE = _choices(stream, "next", row_M1, nodes, edges, n_M1 - 1)
        state_N1, edge_E = (torch.arange(size, device=row_M1.device) for size in (nodes, edges))
        degree_MN = 1 + integers(stream, "edges", row_M1, nodes, edges)
        return Automata(
            letter_MS.gather(1, which_MNE.flatten(1)).view_as(which_MNE),
            other_MNE + (other_MNE >= state_N1[:, None]),
            edge_E < degree_MN[..., None],
        )

    def _join(self, symbol_BSL: Tensor, legal_BSL: Tensor, length_BS: Tensor, n_B1: Tensor) -> tuple[Tensor, Tensor]:
        """The strings in a row of seq_len + 1 tokens with separators between them, and what may come at each."""
        end, device = self.seq_len + 1, n_B1.device
        string_S, offset_L = (torch.arange(size, device=device) for size in symbol_BSL.shape[1:])
        start_BS = (length_BS + 1).cumsum(1) - length_BS - 1
        is_there_BS = string_S < n_B1
        at_BSL = start_BS[..., None] + offset_L
        at_BSL = at_BSL.where(is_there_BS[..., None] & (offset_L < length_BS[..., None]), end).clamp(max=end)
        gap_BS = (start_BS + length_BS).where(string_S < n_B1 - 1, end).clamp(max=end)
        text = torch.full((len(n_B1), end + 1), self.symbols + 1, dtype=torch.int64, device=device)
        text.scatter_(1, at_BSL.flatten(1), symbol_BSL.flatten(1))
        text.scatter_(1, gap_BS, torch.full_like(gap_BS, self.symbols))
        legal = torch.zeros_like(text).scatter_(1, at_BSL.flatten(1), legal_BSL.flatten(1))
        return text[:, :end], legal[:, :end]

    def score(self, logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Of each row: its mean over the row's labels."""
        assert isinstance(batch, Judged)
        logits_BQV = logits_BQV.float()
        bit_V = torch.arange(logits_BQV.shape[2], device=logits_BQV.device).clamp(max=62)
        legal_BQV = (batch.legal_BQ[..., None] >> bit_V) & 1
        asked_BQ = batch.target_BQ != NO_LABEL
        right_BQ = legal_BQV.gather(2, logits_BQV.argmax(-1, keepdim=True))[..., 0].float()
        truth_BQV = legal_BQV / legal_BQV.sum(-1, keepdim=True).clamp(min=1)
        apart_BQ = (logits_BQV.softmax(-1) - truth_BQV).abs().sum(-1) / 2
        loss_BQ = F.cross_entropy(logits_BQV.transpose(1, 2), batch.target_BQ, reduction="none")
        share_BQ = asked_BQ / asked_BQ.sum(1, keepdim=True).clamp(min=1)
        scores = {"accuracy": right_BQ, "total_variation": apart_BQ, "loss": loss_BQ}
        return {name: (value_BQ * share_BQ).sum(1) for name, value_BQ in scores.items()}


def fingerprint(automata: Automata) -> Tensor:
    """A hash of each language, (M,) int64: of the set of its strings of up to `DEPTH` symbols, whatever the states are
    called and however many of them say the same. Languages that differ later only are one here, and share a split.
    """
    hash_MN = torch.zeros_like(automata.next_MNE[..., 0])
    edge, state = streams.key("regbench edge"), streams.key("regbench state")
    for _ in range(DEPTH):
        after_MNE = hash_MN.gather(1, automata.next_MNE.flatten(1)).view_as(automata.next_MNE)
        step_MNE = streams.bits(edge, (after_MNE << 6) + automata.symbol_MNE)
        hash_MN = streams.bits(state, (step_MNE * automata.there_MNE).sum(-1))
    return hash_MN[:, 0]


def _choices(stream: int, name: str, row_M1: Tensor, N: int, E: int, of_M1: Tensor) -> Tensor:
    """E numbers of 0 .. of-1, all different, in uniformly random order, N times for each row: (M, N, E).

    The next is one of those left: a number below their count, raised by one for each smaller number that is gone.
    """
    word_MNE = (streams.bits(*draw(stream, name, row_M1, N * E)) & ((1 << 62) - 1)).unflatten(1, (N, E))
    chosen: list[Tensor] = []
    gone: list[Tensor] = []  # the same in rising order
    for e in range(E):
        x_MN = word_MNE[..., e] % (of_M1 - e)
        for taken_MN in gone:
            x_MN = x_MN + (x_MN >= taken_MN)
        chosen.append(x_MN)
        for at, taken_MN in enumerate(gone):
            gone[at], x_MN = torch.minimum(taken_MN, x_MN), torch.maximum(taken_MN, x_MN)
        gone.append(x_MN)
    return torch.stack(chosen, dim=2)


def _walk(stream: int, row_B1: Tensor, automata: Automata, S: int, L: int) -> tuple[Tensor, Tensor]:
    """S strings of L symbols that each row's automaton writes, and which symbols it might have written: (B, S, L)."""
    E = automata.next_MNE.shape[2]
    degree_BN, legal_BN = automata.there_MNE.sum(-1), (automata.there_MNE.long() << automata.symbol_MNE).sum(-1)
    word_BSL = (streams.bits(*draw(stream, "walk", row_B1, S * L)) & ((1 << 62) - 1)).unflatten(1, (S, L))
    symbol_BX, next_BX = automata.symbol_MNE.flatten(1), automata.next_MNE.flatten(1)
    state_BS = torch.zeros_like(word_BSL[..., 0])
    symbols, legal = [], []
    for step in range(L):
        legal.append(legal_BN.gather(1, state_BS))
        edge_BS = state_BS * E + word_BSL[..., step] % degree_BN.gather(1, state_BS)
        symbols.append(symbol_BX.gather(1, edge_BS))
        state_BS = next_BX.gather(1, edge_BS)
    return torch.stack(symbols, 2), torch.stack(legal, 2)
