"""The YAML reader: the core schema of YAML 1.2, with positions and limits."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runners.schema import UserError
from sweeps.reader import SpecError, read_file, read_text


def value(text: str) -> object:
    return read_text(f"x: {text}", "f").plain()["x"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *[("1e-3", 1e-3), ("1E5", 1e5), ("1e+3", 1e3), (".5e-2", 0.005), ("1.", 1.0), ("-2.5", -2.5), ("1.0e10", 1e10)],
        *[("12", 12), ("-7", -7), ("+7", 7), ("0", 0), ("0x1F", 31), ("0o17", 15), ("9223372036854775807", 2**63 - 1)],
        *[("true", True), ("False", False), ("null", None), ("~", None), ("", None)],
        *[("no", "no"), ("off", "off"), ("Yes", "Yes"), ("on", "on"), ("y", "y"), ("none", "none")],
        *[
            ("12:30", "12:30"),
            ("1_000", "1_000"),
            ("2026-11-30", "2026-11-30"),
            ("=", "="),
            ("nan", "nan"),
            ("inf", "inf"),
        ],
        *[
            ('"017"', "017"),
            ("'1e-3'", "1e-3"),
            ('"true"', "true"),
            ("'null'", "null"),
            ("1e", "1e"),
            ("0.5.1", "0.5.1"),
        ],
    ],
)
def test_plain_text_means_what_the_core_schema_says(text: str, wanted: object) -> None:
    found = value(text)
    assert found == wanted
    assert type(found) is type(wanted)


def test_text_is_normalised_so_that_equal_words_are_equal() -> None:
    assert value("e\u0301") == "\u00e9"


def test_keys_are_text_whatever_they_look_like() -> None:
    assert read_text("no: 1\n1e-3: 2\ntrue: 3\n017: 4", "f").plain() == {"no": 1, "1e-3": 2, "true": 3, "017": 4}


def test_every_value_and_key_knows_its_place() -> None:
    node = read_text("a: 1\nb:\n  - {c: x,  d: [1, 2]}\n", "file.yaml")
    inner = node.value["b"].value[0]
    assert str(inner.keys["d"]) == "file.yaml:3:13"
    assert str(inner.value["d"].value[1].mark) == "file.yaml:3:20"


def test_merge_keys_are_legal_and_local_keys_win() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {x: 5, z: 3}\nc: {<<: *a, y: 9}\nd: {<<: [*a, *b], x: 0}\n"
    found = read_text(text, "f").plain()
    assert found["c"] == {"x": 1, "y": 9}
    assert found["d"] == {"x": 0, "y": 2, "z": 3}


def test_an_alias_is_the_value_again() -> None:
    assert read_text("a: &a [1, 2]\nb: *a\n", "f").plain() == {"a": [1, 2], "b": [1, 2]}


BAD = {
    "leading zero": ("a: 017", 1, 4, "does not begin with 0"),
    "leading zero 09": ("a: [1, 09]", 1, 8, "does not begin with 0"),
    "negative leading zero": ("a: -017", 1, 4, "does not begin with 0"),
    "nan": ("a: .nan", 1, 4, "finite"),
    "infinity": ("a: -.inf", 1, 4, "finite"),
    "overflowing float": ("a: 1e999", 1, 4, "too large"),
    "too long a number": ("a: 9223372036854775808", 1, 4, "64 bits"),
    "a very long number": ("a: " + "9" * 5000, 1, 4, "64 bits"),
    "duplicate key": ("a: 1\nb: 2\na: 3", 3, 1, "twice in this mapping (first in line 1)"),
    "nested duplicate": ("x:\n  - {a: 1, a: 2}", 2, 12, "twice"),
    "duplicate after merge": ("b: &b {x: 1}\na: {<<: *b, y: 1, y: 2}", 2, 19, "twice"),
    "tag": ("a: !!str 5", 1, 4, "tag"),
    "python tag": ("a: !!python/object/apply:os.system [ls]", 1, 4, "tag"),
    "local tag": ("a: !thing {b: 1}", 1, 4, "tag"),
    "second document": ("a: 1\n---\nb: 2", 2, 1, "second document"),
    "tab": ("a:\n\tb: 1", 2, 1, "tab"),
    "unclosed bracket": ("a: [1, 2\nb: 3", 2, 2, "not YAML"),
    "unclosed quote": ("a: 'x\nb: 3", 2, 5, "not YAML"),
    "bad indentation": ("a: 1\n  b: 2", 2, 4, "not YAML"),
    "unknown alias": ("a: *b", 1, 4, "no anchor"),
    "cyclic alias": ("a: &a [1, *a]", 1, 11, "inside its own anchor"),
    "cyclic mapping": ("a: &a {b: *a}", 1, 11, "inside its own anchor"),
    "anchor twice": ("a: &x 1\nb: &x 2", 2, 4, "already in use"),
    "list as key": ("? [a, b]\n: 1", 1, 3, "key is text"),
    "alias as key": ("a: &a x\n*a : 1", 2, 1, "as a key"),
    "empty key": ("{~: 1, : 2}", 1, 8, "not YAML"),
    "zip key inside braces": ("a: {(b, c): [1, 2]}", 1, 5, "quote a zip key"),
    "merge of a number": ("a: {<<: 3}", 1, 9, "<< takes a mapping"),
    "control character": ("a: x\nb: \x07", 2, 4, "U+0007"),
    "empty": ("", 1, 1, "nothing in this file"),
    "comments only": ("# a\n# b\n", 1, 1, "nothing in this file"),
    "deep flow": ("a: " + "[" * 2000, 1, 27, "nested deeper"),
    "deep blocks": ("\n".join(" " * i + "a:" for i in range(40)), 25, 25, "nested deeper"),
    "many anchors": ("\n".join(f"k{i}: &a{i} 1" for i in range(40)), 33, 6, "more than 32 anchors"),
    "many aliases": ("a: &a 1\nb: [" + "*a, " * 1100 + "]", 2, 4101, "more than 1024 aliases"),
    "too many values": ("a: &a [" + "1, " * 100 + "]\nb: [" + "*a, " * 1000 + "]", 2, 4, "values after aliases"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_sweep_cannot_mean_is_told_at_its_place(name: str) -> None:
    text, line, column, words = BAD[name]
    with pytest.raises(SpecError) as caught:
        read_text(text, "f.yaml")
    mark, message = caught.value.problems[0]
    assert words in message
    assert (mark.line, mark.column) == (line, column)
    assert str(caught.value).startswith(f"f.yaml:{line}:{column}: ")


def test_an_alias_bomb_is_counted_and_never_expanded() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(SpecError, match="values after aliases"):
        read_text("\n".join(lines), "f")


def test_depth_is_counted_through_aliases() -> None:
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 30)]
    with pytest.raises(SpecError, match="nested deeper"):
        read_text("\n".join(lines), "f")


def test_all_problems_come_in_one_report() -> None:
    with pytest.raises(SpecError) as caught:
        read_text("a: 017\nb: .nan\nc: !!int 3\na: 4", "f")
    assert [mark.line for mark, _ in caught.value.problems] == [1, 2, 3, 4]


def test_bytes_that_are_no_utf8_are_told_at_their_place(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: 1\nb: é".encode("latin-1"))
    with pytest.raises(SpecError, match=r"latin.yaml:2:4: byte 0xe9 is not UTF-8"):
        read_file(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_file(path)[0].plain() == {"a": 1}


def test_utf16_is_told(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_bytes("a: 1".encode("utf-16"))
    with pytest.raises(SpecError, match="not UTF-8"):
        read_file(path)


@pytest.mark.parametrize("make", ["folder", "missing", "too large"])
def test_what_is_no_readable_file_is_told(make: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    if make == "folder":
        path.mkdir()
    elif make == "too large":
        path.write_bytes(b"# " + b"x" * (5 << 20))
    with pytest.raises(UserError, match=r"x\.yaml"):
        read_file(path)


scalars = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz.", min_size=1, max_size=5), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), trees, min_size=1, max_size=4))
def test_json_is_read_as_it_was_written(tree: dict[str, object]) -> None:
    assert _close(read_text(json.dumps(tree), "f").plain(), tree)


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=4),
        st.lists(st.integers(-99, 99) | st.text("abc d", min_size=1), max_size=3),
        min_size=1,
    )
)
def test_block_style_is_read_as_pyyaml_reads_it(tree: dict[str, object]) -> None:
    text = yaml.safe_dump(tree)
    assert read_text(text, "f").plain() == yaml.safe_load(text)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    told = "f:"
    try:
        read_text(text, "f").plain()
    except SpecError as error:
        told = str(error)
    assert "f:" in told  # a problem has its place


def _close(a: object, b: object) -> bool:
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_close(a[k], b[k]) for k in b)
    if isinstance(b, list):
        return isinstance(a, list) and len(a) == len(b) and all(map(_close, a, b))
    if isinstance(b, float):
        return isinstance(a, int | float) and math.isclose(a, b, rel_tol=1e-15)
    return a == (unicodedata.normalize("NFC", b) if isinstance(b, str) else b)
