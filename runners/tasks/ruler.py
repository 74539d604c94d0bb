"""RULER: needles, chains and counts in long texts that are made, at any length. Does the model find them?

A trained model is evaluated on it; nothing is trained. One row of `kind: single_1`, cut short, and what is wanted of a
greedy continuation:

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you [...]
    The grass is green. The sky is blue. [...] One of the special magic numbers for silent-river is: 4082731. [...]
    What is the special magic number for silent-river mentioned in the provided text? The special magic number for
    silent-river mentioned in the provided text is                                                        -> 4082731

    contains   mean share of a row's answers that are part of the continuation, capitals or not

    kind         haystack          needles
    single_1     five sentences    a number for a pair of words
    single_2     essay             likewise
    single_3     essay             a uuid for a pair of words
    multikey_1   essay             four, one of them asked for
    multikey_2   needles           as many as fit, one of them asked for
    multikey_3   needles           likewise, uuids for uuids
    multivalue   essay             four numbers for one pair of words, all asked for
    multiquery   essay             four, all asked for
    vt           five sentences    a chain of variables, VAR B = VAR A: which have its value?
    cwe          numbered words    ten stand there more often than the others: which?
    fwe          made-up words     their frequencies fall as rank^-2: the three after the first, which is dots

The haystack is as long as `seq_len` lets it be. Rows are the same for every seed and arm.

Source: RULER (Hsieh et al. 2024, arXiv 2404.06654) at c3f5e3b: templates, depths, scores. Choices: word lists and
essays are others; lengths are counted in our tokens, bytes, and continuations are as long for every kind; vt and cwe
have no worked example in front; of cwe the common words stand six times, the others once, at every length.
"""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from runners import documents, streams
from runners.reader import Reader
from runners.schema import Exit, UserError

REVISION = 1
LIMITS = [
    "seq_len >= 2048",
    "answer_len >= 1",
    "answer_len <= 512",
    "test_examples >= 1",
    "essay_files is not None or kind in ('single_1', 'multikey_2', 'multikey_3', 'vt', 'cwe', 'fwe')",
]
METRICS = {"contains": "max"}
BOUNDS = {"contains": [0, 1]}
CHANCE = {"contains": "0"}
SELECT = "contains"
TRAINS = False
EVALUATES = "text"

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ADJECTIVES = (
    "amber ancient bitter blue brave bright broken calm clever cold crimson curious distant eager early empty faint "
    "fierce frozen gentle golden grand green hidden hollow humble idle jolly keen late lively lonely loud mellow "
    "narrow noble patient proud quick quiet rapid restless rough royal rusty secret sharp silent silver simple "
    "sleepy smooth solemn steady strange sunny swift tender vivid warm wild wise wooden young"
)
NOUNS = (
    "anchor apple arrow basket beacon bell bottle branch bridge button candle canyon carpet castle chapel cloud "
    "comet copper corner cradle dagger desert eagle engine feather fiddle forest fountain garden glacier hammer "
    "harbor helmet island jacket kettle ladder lantern marble meadow mirror mountain needle oasis orchard paper "
    "pebble pillow planet pocket puzzle rabbit ribbon river saddle shadow spider temple ticket tunnel valley violin "
    "wagon window winter"
)
WORDS = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
DEPTHS = [round(100 * n / 39) for n in range(40)]
"""How far down a haystack needles may lie, in percent."""
NIAH: dict[str, tuple[str, str, str, int, int, int]] = {
    "single_1": ("noise", "words", "numbers", 1, 1, 1),
    "single_2": ("essay", "words", "numbers", 1, 1, 1),
    "single_3": ("essay", "words", "uuids", 1, 1, 1),
    "multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "multikey_2": ("needles", "words", "numbers", 1, 1, 1),
    "multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
    "multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
"""Haystack, what keys and values are, keys, values of a key, keys asked for."""

Row = tuple[str, list[str]]
"""What the model reads, and the answers it should give."""


class Task:
    """Needles, chains and counts in made texts.

    Args:
        kind: what is hidden, and where
        essay_files: text around the needles of kinds with an essay, from its beginning, as often as it takes; a path or
            a pattern
        answer_len: tokens of a continuation
        seq_len: tokens of a row, the continuation among them
        test_examples: rows (count)
    """

    def __init__(
        self,
        folder: str = ".",
        *,
        kind: Literal[
            "single_1",
            "single_2",
            "single_3",
            "multikey_1",
            "multikey_2",
            "multikey_3",
            "multivalue",
            "multiquery",
            "vt",
            "cwe",
            "fwe",
        ] = "single_1",
        essay_files: str | None = None,
        answer_len: int = 160,
        seq_len: int = 2048,
        test_examples: int = 100,
    ) -> None:
        self.vocab_size, self.seq_len = 257, seq_len
        self.kind, self.answer_len, self._rows = kind, answer_len, test_examples
        self._source = {"folder": folder, "data_files": essay_files, "column": ""}

    def documents(self) -> list[Row]:
        """Every row. Raises `UserError` where the essay is not there or no text."""
        try:
            essay = ""
            if self._source["data_files"] is not None:
                essay = " ".join(text for (text,) in documents.load(self._source))
            return [self._row(number, essay.split()) for number in range(self._rows)]
        except UserError as error:
            raise UserError(f"task ruler: {error}", Exit.ENVIRONMENT) from error

    def measure(self, model: Any, device: torch.device) -> dict[str, float]:
        """The metric, and `n`, the number of rows."""
        rows = self.documents()
        said = Reader(model, device, self.seq_len).generate([text for text, _ in rows], self.answer_len)
        shares = [
            sum(answer.lower() in text.lower() for answer in answers) / len(answers)
            for text, (_, answers) in zip(said, rows, strict=True)
        ]
        return {"contains": sum(shares) / len(shares), "n": len(rows)}

    def _row(self, number: int, essay: list[str]) -> Row:
        """The row with the longest haystack that fits; each length draws alike."""
        how = NIAH.get(self.kind)
        if how is not None and how[0] == "essay" and not essay:
            raise UserError(f"{self.kind} wants essay_files")

        def of(size: int) -> Row:
            draw = random.Random(streams.key("ruler", self.kind, number))
            return OTHERS[self.kind](draw, size) if how is None else _niah(draw, size, essay, *how)

        room = self.seq_len - self.answer_len - 1
        least, words = 1, len(WORDS) if self.kind in ("multikey_2", "cwe") else 1 << 30
        while len(of(2 * least)[0].encode()) <= room and 4 * least < words:
            least *= 2
        most = 2 * least
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if len(of(middle)[0].encode()) <= room else (least, middle)
        return of(least)


def _niah(
    draw: random.Random,
    size: int,
    essay: list[str],
    haystack: str,
    kind_k: str,
    kind_v: str,
    n: int,
    values: int,
    q: int,
) -> Row:
    """Needles in `size` words of an essay, times the five sentences, or other needles."""
    keys, held = _drawn(draw, kind_k, n), _drawn(draw, kind_v, n * values)
    wanted = {key: held[at * values : (at + 1) * values] for at, key in enumerate(keys)}
    asked = draw.sample(keys, q)
    needles = [_needle(kind_v, key, value) for key, found in wanted.items() for value in found]
    draw.shuffle(needles)
    depths = sorted(draw.sample(DEPTHS, len(needles)))
    if haystack == "essay":
        words = (essay * (size // len(essay) + 1))[:size]
        hay = re.split(r"(?<=[.!?]) ", " ".join(words))
    elif haystack == "noise":
        hay = [NOISE] * size
    else:
        others = zip(_drawn(draw, kind_k, size, keys), _drawn(draw, kind_v, size, held), strict=True)
        hay = [_needle(kind_v, key, value) for key, value in others]
    for at, (needle, depth) in enumerate(zip(needles, depths, strict=True)):
        hay.insert(at + (len(hay) - at) * depth // 100, needle)
    between = " " if haystack == "essay" else "\n"
    one = q * values == 1
    sort, names = kind_v[:-1] if one else kind_v, _listed(asked)
    text = (
        f"{'A' if one else 'Some'} special magic {sort} {'is' if one else 'are'} hidden within the following text. "
        f"Make sure to memorize it. I will quiz you about the {sort} afterwards.\n{between.join(hay)}\n"
        f"What {'is' if one else 'are all'} the special magic {sort} for {names} mentioned in the provided text? "
        f"The special magic {sort} for {names} mentioned in the provided text {'is' if one else 'are'}"
    )
    return text, [value for key in asked for value in wanted[key]]


def _vt(draw: random.Random, size: int) -> Row:
    """A chain of five variables in `size` times the five sentences."""
    names: list[str] = []
    while len(names) < 5:
        name = "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
        names += [name] if name not in names else []
    value = draw.randint(10000, 99999)
    links = [f"VAR {names[0]} = {value}"]
    links += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(names)]
    hay = [NOISE] * size
    for at, place in enumerate(sorted(draw.choices(range(size + 1), k=len(links)))):
        hay.insert(at + place, links[at])
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        + "\n".join(hay)
        + f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
    )
    return text, names


def _cwe(draw: random.Random, size: int) -> Row:
    """Ten common words and `size` others."""
    words = draw.sample(WORDS, min(size + 10, len(WORDS)))
    common = words[:10]
    listed = common * 6 + words[10:]
    draw.shuffle(listed)
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n"
        + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
        + "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:"
    )
    return text, common


def _fwe(draw: random.Random, size: int) -> Row:
    """Coded words whose numbers fall as rank^-2, the first of them dots; `size` stretches the numbers."""
    coded = ["....", *("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(11))]
    # The three asked for stand apart at every length: 4 : 2 : 1 and a half at least, against one of each other.
    counts = [
        max(least, 16 * size // rank**2) for rank, least in zip(range(1, 13), (5, 4, 3, 2, *[1] * 8), strict=True)
    ]
    listed = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    draw.shuffle(listed)
    text = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(listed)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    return text, coded[1:4]


OTHERS: dict[str, Callable[[random.Random, int], Row]] = {"vt": _vt, "cwe": _cwe, "fwe": _fwe}


def _drawn(draw: random.Random, kind: str, n: int, besides: Iterable[str] = ()) -> list[str]:
    """n names or values of a kind, unlike each other and those besides."""
    before = dict.fromkeys(besides)
    found: dict[str, None] = {}
    while len(found) < n:
        if kind == "words":
            one = draw.choice(WORDS)
        else:
            is_number = kind == "numbers"
            one = str(draw.randint(1000000, 9999999) if is_number else uuid.UUID(int=draw.getrandbits(128), version=4))
        if one not in before:
            found[one] = None
    return list(found)


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
