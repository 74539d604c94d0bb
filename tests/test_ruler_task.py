"""RULER's rows: what they hide, where, and how long they are."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from runners import tasks
from runners.schema import UserError
from runners.tasks import ruler

ESSAY = "A sentence of the essay number %d, which goes on for a while."
KINDS = get_args(
    ruler.Task.__init__.__kwdefaults__ and __import__("typing").get_type_hints(ruler.Task.__init__)["kind"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("essays")
    (made / "essay.txt").write_text("\n\n".join(ESSAY % n for n in range(20)))
    return made


def rows(folder: Path, kind: str, n: int = 6, **settings: Any) -> list[ruler.Row]:
    own = {"folder": str(folder), "essay_files": "essay.txt", "test_examples": n, **settings}
    return tasks.build({"name": "ruler", "kind": kind, **own}).documents()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2048, 5001])
def test_rows_are_as_long_as_they_may_be_and_always_the_same(kind: str, length: int, folder: Path) -> None:
    found = rows(folder, kind, seq_len=length)
    assert found == rows(folder, kind, 9, seq_len=length)[:6]
    assert len({text for text, _ in found}) == 6
    for text, _ in found:
        assert length - 160 - 1 - 700 < len(text.encode()) <= length - 160 - 1


@pytest.mark.parametrize("kind", ruler.NIAH)
def test_the_answers_are_the_values_of_the_keys_asked_for(kind: str, folder: Path) -> None:
    haystack, _, sort, n, values, asked = ruler.NIAH[kind]
    depths = []
    for text, answers in rows(folder, kind, 20, seq_len=4096):
        hidden, _, question = text.rpartition("\nWhat ")
        needles = re.findall(rf"One of the special magic {sort} for (\S+) is: (\S+)\.", hidden)
        names = set(re.split(r", and |, ", re.search(r"for (.*?) mentioned", question)[1]))  # type: ignore[index]
        assert len(names) == asked
        assert sorted(answers) == sorted(value for key, value in needles if key in names)
        assert len(answers) == asked * values
        assert haystack == "needles" or len(needles) == n * values
        assert haystack != "needles" or len(needles) > 15
        assert ("is the special magic" in question) == (asked * values == 1)
        depths.append(hidden.index(answers[0]) / len(hidden))
    assert min(depths) < 0.25
    assert max(depths) > 0.75


def test_a_chain_of_variables_can_be_followed(folder: Path) -> None:
    for text, answers in rows(folder, "vt"):
        value = re.search(r"assigned the value (\d+) in", text)[1]  # type: ignore[index]
        held: dict[str, str] = {}
        for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
            held[name] = number or held[other]
        assert sorted(name for name, number in held.items() if number == value) == sorted(answers)
        assert len(answers) == 5


@pytest.mark.parametrize("length", [2048, 6000])
def test_common_and_frequent_words_can_be_counted(length: int, folder: Path) -> None:
    for text, answers in rows(folder, "cwe", seq_len=length):
        counts = Counter(re.findall(r"\d+\. ([a-z]+-[a-z]+)", text))
        assert {word for word, n in counts.items() if n == 6} == set(answers)
        assert {n for word, n in counts.items() if word not in answers} == {1}
    for text, answers in rows(folder, "fwe", seq_len=length):
        counts = Counter(text.partition("coded words. ")[2].partition("\nQ")[0].split())
        ranked = [word for word, _ in counts.most_common(5)]
        assert ranked[:4] == ["....", *answers]
        assert counts[ranked[3]] > counts[ranked[4]]


def test_an_essay_that_is_not_there_is_told_and_only_where_one_is_wanted(folder: Path) -> None:
    assert rows(folder, "vt", essay_files=None)
    with pytest.raises(UserError, match="task ruler: single_2 wants essay_files"):
        rows(folder, "single_2", essay_files=None)
    with pytest.raises(UserError, match=r"task ruler: there is no file esay\.txt .*did you mean essay\.txt\?"):
        rows(folder, "single_2", essay_files="esay.txt")
