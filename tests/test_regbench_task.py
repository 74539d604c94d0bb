"""RegBench, read as a person would: automata as dictionaries, languages as sets of strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runners import tasks
from runners.batch import NO_LABEL
from runners.schema import UserError
from runners.tasks.regbench import DEPTH, Automata, Task, fingerprint

Graph = list[dict[int, int]]
"""For each state: symbol -> next state."""


def build(**settings: Any) -> Any:
    return tasks.build({"name": "regbench", **settings})


def graphs(automata: Automata) -> list[Graph]:
    edges = zip(*(x.tolist() for x in (automata.symbol_MNE, automata.next_MNE, automata.there_MNE)), strict=True)
    return [
        [{s: n for s, n, there in zip(*state, strict=True) if there} for state in zip(*one, strict=True)]
        for one in edges
    ]


def reached(graph: Graph) -> set[int]:
    found, new = {0}, {0}
    while new:
        new = {after for state in new for after in graph[state].values()} - found
        found |= new
    return found


def language(graph: Graph, length: int) -> frozenset[tuple[int, ...]]:
    """Every string of `length` symbols that may be written."""
    words: dict[tuple[int, ...], int] = {(): 0}
    for _ in range(length):
        words = {(*word, s): after for word, state in words.items() for s, after in graph[state].items()}
    return frozenset(words)


def drawn(task: Task, n: int) -> list[Graph]:
    return graphs(task._draw(7, torch.arange(n)[:, None]))


def test_automata_are_as_the_paper_draws_them() -> None:
    found = drawn(build(), 1500)
    size, degree, alphabet = [], [], []
    for graph in found:
        assert all(1 <= len(state) <= 3 for state in graph)
        for number, state in enumerate(graph):
            assert number not in state.values()
            assert len(set(state.values())) == len(state)
        degree += [len(state) for state in graph]
        known = reached(graph)
        size.append(max(known) + 1)
        alphabet.append(len({s for state in known for s in graph[state]}))
    assert max(size) == 12
    assert stats.chisquare(np.bincount(degree, minlength=4)[1:]).pvalue > 1e-3
    assert max(alphabet) <= 18
    starts = [s for graph in found for s in graph[0]]
    assert stats.chisquare(np.bincount(starts, minlength=18)).pvalue > 1e-3


def test_sizes_are_uniform() -> None:
    """A state's targets lie among the automaton's own states: with one edge each, the second of 4 states is 1 of 3."""
    task = build(nodes=3, edges=1, symbols=2, vocab_size=4)
    after = [graph[0][next(iter(graph[0]))] for graph in drawn(task, 8000)]
    counts = np.bincount(after, minlength=3)
    assert counts[0] == 0
    # 2 states: always state 1; 3 states: 1 or 2 as likely.
    assert stats.chisquare(counts[1:], [6000, 2000]).pvalue > 1e-3


def test_alphabets_are_uniform_in_size() -> None:
    """Of 3 letters an automaton has 2 or 3, so that two states with one symbol each share it with 1/2 or 1/3."""
    found = drawn(build(nodes=3, edges=1, symbols=3, vocab_size=5), 8000)
    shared = sum(graph[0].keys() == graph[1].keys() for graph in found)
    assert stats.binomtest(shared, len(found), 5 / 12).pvalue > 1e-3


def test_the_fingerprint_is_of_the_language() -> None:
    task = build(nodes=4, edges=2, symbols=3, vocab_size=5)
    automata = task._draw(3, torch.arange(400)[:, None])
    by_language: dict[frozenset[tuple[int, ...]], set[int]] = {}
    for graph, mark in zip(graphs(automata), fingerprint(automata).tolist(), strict=True):
        by_language.setdefault(language(graph, DEPTH), set()).add(mark)
    assert all(len(marks) == 1 for marks in by_language.values())
    assert len({mark for marks in by_language.values() for mark in marks}) == len(by_language)
    assert 50 < len(by_language) < 390, "nothing to tell apart, or nothing the same"


def test_the_fingerprint_sees_no_names_and_no_doubled_states() -> None:
    ring = {0: {0: 1}, 1: {1: 0}}  # writes abab...
    double = {0: {0: 1}, 1: {1: 2}, 2: {0: 3}, 3: {1: 0}}
    other = {0: {0: 1}, 1: {1: 2}, 2: {0: 3}, 3: {2: 0}}

    def mark(graph: dict[int, dict[int, int]]) -> int:
        found = Automata(torch.zeros(1, 4, 1).long(), torch.zeros(1, 4, 1).long(), torch.ones(1, 4, 1).bool())
        for state, edges in graph.items():
            for symbol, after in edges.items():
                found.symbol_MNE[0, state, 0], found.next_MNE[0, state, 0] = symbol, after
        return int(fingerprint(found))

    assert mark(ring) == mark(double) != mark(other)


def test_languages_of_the_splits_are_disjoint() -> None:
    """Small enough that, drawn apart, the splits would share most of them."""
    task = build(nodes=3, edges=2, symbols=3, vocab_size=5)
    found = {}
    for split in ("train", "valid", "test"):
        automata = task._automata(1, torch.arange(300)[:, None], split)
        found[split] = {language(graph, DEPTH) for graph in graphs(automata)}
        assert len(found[split]) > 20
    for a, b in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not found[a] & found[b]


def test_rows_are_strings_of_their_automaton() -> None:
    task = build(max_len=9, min_strings=3, max_strings=6)
    index_B1 = torch.arange(80)[:, None]
    batch = task.make(5, index_B1, "train")
    counts, lengths = [], []
    for graph, row, target, legal in zip(
        graphs(task._automata(5, index_B1, "train")),
        batch.tokens_BT.tolist(),
        batch.target_BQ.tolist(),
        batch.legal_BQ.tolist(),
        strict=True,
    ):
        whole = [*row, target[-1] if target[-1] != NO_LABEL else 19]
        text = whole[: whole.index(19)] if 19 in whole else whole
        assert set(whole[len(text) :]) <= {19}
        state, strings = 0, [[]]
        for at, token in enumerate(text):
            if token == 18:
                state = 0
                strings.append([])
                assert at == 0 or target[at - 1] == NO_LABEL
                continue
            if at:
                assert target[at - 1] == token
                assert legal[at - 1] == sum(1 << s for s in graph[state])
            strings[-1].append(token)
            state = graph[state][token]
        assert all(label == NO_LABEL for label in target[len(text) - 1 + (len(text) == len(whole)) :])
        counts.append(len(strings))
        lengths += [len(string) for string in strings]
    assert stats.chisquare(np.bincount(counts, minlength=7)[3:]).pvalue > 1e-3
    assert stats.chisquare(np.bincount(lengths, minlength=10)[1:]).pvalue > 1e-3


def test_a_shorter_row_is_the_beginning_of_the_longer() -> None:
    long, short = build(max_strings=12), build(max_strings=12, seq_len=100)
    a, b = (task.batch("test", torch.arange(20), 0) for task in (long, short))
    assert torch.equal(a.tokens_BT[:, :100], b.tokens_BT)
    assert torch.equal(a.target_BQ[:, :100], b.target_BQ)


def test_scores_by_hand() -> None:
    """The automaton itself scores 1 and 0; likeliest tokens and distances of two made-up distributions."""
    task = build(max_len=5, max_strings=10)
    batch = task.batch("valid", torch.arange(3), 0)
    shape = (*batch.target_BQ.shape, 20)
    truth, some = (
        torch.zeros(shape, dtype=torch.float64),
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
    )
    for (r, q), mask in np.ndenumerate(batch.legal_BQ.numpy()):
        legal = [s for s in range(18) if mask >> s & 1]
        truth[r, q, legal] = 1 / max(1, len(legal))
    scores = task.score(truth.clamp(min=1e-30).log(), batch)
    torch.testing.assert_close(scores["accuracy"], torch.ones(3))
    torch.testing.assert_close(scores["total_variation"], torch.zeros(3), atol=1e-6, rtol=0)
    scores = task.score(some, batch)
    for r in range(3):
        asked = [q for q in range(shape[1]) if batch.target_BQ[r, q] != NO_LABEL]
        p = some[r, asked].double().softmax(-1)
        right = truth[r, asked, p.argmax(-1)] > 0
        apart = (p - truth[r, asked]).abs().sum(-1) / 2
        loss = -p[range(len(asked)), batch.target_BQ[r, asked]].log()
        for name, value in (("accuracy", right), ("total_variation", apart), ("loss", loss)):
            assert float(scores[name][r]) == pytest.approx(float(value.double().mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"edges": 12}, "1 <= edges < min(nodes, symbols)"),
        ({"symbols": 19}, "vocab_size >= symbols + 2"),
        ({"min_strings": 20}, "1 <= min_strings <= max_strings"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError) as caught:
        build(**settings)
    assert rule in str(caught.value)
