"""What a trained language model says of text: log-likelihoods, whole documents, continuations. Our evaluations and the
adapter for lm-evaluation-harness (`runners/harness.py`) ask in the same words, and see the same windows of text:

    likelihood(pairs)     log p(continuation | context) and whether greedy decoding says it; of context + continuation
                          the last `window` + 1 tokens count
    rolling(texts)        log p(text), the whole of it: a window after the other, each token predicted once, from the
                          window's tokens before it; the last window is as long as the others, and begins earlier
    generate(texts, ...)  greedy continuations: a prefill, then the mechanism's own step, whose memory stays as it is

Windows are those of lm-evaluation-harness (0.4.13, `get_rolling_token_windows` with one token of context). A model of
text is trained on rows that begin with a token of their own, so what is encoded here begins with it too; where a
context is cut on the left it is cut away.

Letters: B rows, T time, Q labelled positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from runners.batch import NO_LABEL
from runners.schema import UserError

BOS = 256
"""The token that begins a row; the tokens below are bytes (`runners/tasks/text.py`)."""
TOKENS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
ROWS_AT_ONCE = 256

Tokens = list[int]


def encode(text: str) -> Tokens:
    """UTF-8 bytes, after the token that begins a row."""
    return [BOS, *text.encode("utf-8", "surrogatepass")]


def decode(tokens: Sequence[int]) -> str:
    """Text of tokens; what is no UTF-8 is replaced, what is no byte left out."""
    return bytes(token for token in tokens if token < BOS).decode("utf-8", "replace")


class Reader:
    """Reads with one model. `window` = tokens it sees at once; none = the length it was trained at."""

    def __init__(self, model: Any, device: torch.device, window: int | None = None) -> None:
        self.model, self.device = model.eval(), device
        self.window: int = window or model.seq_len

    # log-likelihoods

    def likelihood(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy) of each (context, continuation); a context has a token at least."""
        for context, continuation in pairs:
            if len(continuation) > self.window or not context:
                raise UserError(
                    f"a continuation of {len(continuation):,} tokens after {len(context):,} does not fit into a window "
                    f"of {self.window:,} (seq_len)"
                )
        rows = [(context + continuation)[-self.window - 1 :] for context, continuation in pairs]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for part in self._parts([len(row) for row in rows], TOKENS_AT_ONCE[self.device.type]):
            said = self._within(part, lambda some: self._score([(rows[n], len(pairs[n][1])) for n in some]))
            for number, score in zip(part, said, strict=True):
                found[number] = score
        return found

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text in nats."""
        windows = [list(self._windows(encode(text)[1:])) for text in texts]
        said = iter(self.likelihood([pair for pairs in windows for pair in pairs]))
        return [sum(next(said)[0] for _ in pairs) for pairs in windows]

    def _windows(self, tokens: Tokens) -> Iterator[tuple[Tokens, Tokens]]:
        """(context, continuation) whose continuations are `tokens`, one after the other."""
        if tokens:
            yield [BOS], tokens[: self.window]
        for first in range(self.window, len(tokens), self.window):
            last = min(first + self.window, len(tokens))
            yield tokens[last - self.window - 1 : first], tokens[first:last]

    @torch.inference_mode()
    def _score(self, rows: Sequence[tuple[Tokens, int]]) -> list[tuple[float, bool]]:
        """Of each row the last so many tokens, predicted from those before. Rows are filled up on the right, where
        nothing that is read looks."""
        length, most = max(len(row) for row, _ in rows) - 1, max(n for _, n in rows)
        tokens_BT = torch.full((len(rows), length), BOS)
        position_BQ, target_BQ = (
            torch.zeros(len(rows), most, dtype=torch.int64),
            torch.full((len(rows), most), NO_LABEL),
        )
        for at, (row, n) in enumerate(rows):
            tokens_BT[at, : len(row) - 1] = torch.tensor(row[:-1])
            position_BQ[at, :n] = torch.arange(len(row) - 1 - n, len(row) - 1)
            target_BQ[at, :n] = torch.tensor(row[-n:])
        target_BQ = target_BQ.to(self.device)
        logits_BQV = self.model(tokens_BT.to(self.device), position_BQ.to(self.device)).float()
        nats_BQ = F.cross_entropy(logits_BQV.flatten(0, 1), target_BQ.flatten(), reduction="none").view_as(target_BQ)
        right_B = ((logits_BQV.argmax(-1) == target_BQ) | (target_BQ == NO_LABEL)).all(1)
        return list(zip((-nats_BQ.double().sum(1)).tolist(), right_B.tolist(), strict=True))

    # continuations

    def generate(self, texts: Sequence[str], at_most: int, until: Sequence[str] = ()) -> list[str]:
        """Greedy continuations of `at_most` tokens, cut before the first of `until`, or ended by a token that is no
        byte. Of a text the last `window` - `at_most` tokens are read."""
        if at_most >= self.window:
            raise UserError(f"{at_most:,} tokens to generate leave no context in a window of {self.window:,} (seq_len)")
        prompts = [encode(text)[at_most - self.window :] for text in texts]
        found = [""] * len(texts)
        for part in self._parts([len(prompt) for prompt in prompts], TOKENS_AT_ONCE[self.device.type]):
            said = self._within(part, lambda some: self._continue([prompts[n] for n in some], at_most, until))
            for number, text in zip(part, said, strict=True):
                found[number] = text
        return found

    @torch.inference_mode()
    def _continue(self, prompts: Sequence[Tokens], at_most: int, until: Sequence[str]) -> list[str]:
        """Prompts of unlike lengths: the shortest is the prefill of all, the rest of the others goes step by step."""
        shortest = min(map(len, prompts))
        tokens_BT = torch.tensor([prompt[:shortest] for prompt in prompts], device=self.device)
        logits_BV, state = self.model.prefill(tokens_BT)
        answers = [_Answer(prompt, at_most, until) for prompt in prompts]
        while True:
            picked = logits_BV.argmax(-1).tolist()
            time = int(state["time"])
            token_B = [answer.next(time, token) for answer, token in zip(answers, picked, strict=True)]
            if all(answer.text is not None for answer in answers):
                return [answer.text or "" for answer in answers]
            logits_BV, state = self.model.step(torch.tensor(token_B, device=self.device), state)

    # batches

    def _parts(self, lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
        """Numbers of rows to be read at once, of like lengths, the longest first: memory runs out at once or never."""
        order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
        while order:
            at_once = max(1, min(ROWS_AT_ONCE, tokens // lengths[order[0]]))
            yield order[:at_once]
            order = order[at_once:]

    def _within(self, part: list[int], read: Callable[[list[int]], list[Any]]) -> list[Any]:
        """`read(part)`, in halves where memory does not hold it."""
        try:
            return read(part)
        except torch.OutOfMemoryError:
            if len(part) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(part) // 2
        return self._within(part[:half], read) + self._within(part[half:], read)


class _Answer:
    """The continuation of one prompt as it grows; `text` once it is whole."""

    def __init__(self, prompt: Tokens, at_most: int, until: Sequence[str]) -> None:
        self._prompt, self._at_most, self._until = prompt, at_most, until
        self._said: Tokens = []
        self.text: str | None = None

    def next(self, time: int, picked: int) -> int:
        """The token at `time`: the prompt's own, or `picked` after its end."""
        if time < len(self._prompt):
            return self._prompt[time]
        if self.text is None:
            self._say(picked)
        return min(picked, BOS)

    def _say(self, token: int) -> None:
        if token < BOS:
            self._said.append(token)
        text = decode(self._said)
        ends = [text.find(word) for word in self._until if word in text]
        if ends or token >= BOS or len(self._said) == self._at_most:
            self.text = text[: min(ends, default=len(text))]


def likely(nats: float) -> float:
    """exp(nats): the perplexity of a mean; infinite where it has no number."""
    return float(torch.tensor(nats, dtype=torch.float64).exp())
