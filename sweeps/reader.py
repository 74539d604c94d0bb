"""YAML with a position for every value: the core schema of YAML 1.2 on PyYAML's parser.

PyYAML's own loader follows YAML 1.1 (`no` is false, `1e-3` is text, `017` is 15, the last of two equal keys wins). Here
its event stream alone is used; what the events mean is decided below, and everything a sweep cannot mean is an error.

Limits: 32 anchors, 1,024 aliases, depth 24, 100,000 values after aliases, 4 MiB of text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from runners.schema import UserError, normal

MAX_ANCHORS, MAX_ALIASES, MAX_DEPTH, MAX_VALUES, MAX_BYTES = 32, 1024, 24, 100_000, 4 << 20

NULLS = {"", "~", "null", "Null", "NULL"}
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INT = re.compile(r"[-+]?[0-9]+")
HEX_OR_OCTAL = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


class Mark(NamedTuple):
    """Where a value was written. `layer` tells the file itself ("file") from a profile and from `--set`."""

    file: str
    line: int
    column: int
    layer: str = "file"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(slots=True, eq=False)
class Node:
    """One YAML value: a scalar, a list of nodes or a mapping of text to nodes, with the marks of its keys."""

    value: Any
    mark: Mark
    keys: dict[str, Mark] = field(default_factory=dict)
    size: int = 1
    depth: int = 0

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def get(self, key: str) -> Node | None:
        return self.value.get(key) if self.is_map else None

    def plain(self) -> Any:
        """The value without positions."""
        if self.is_map:
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if self.is_list else self.value

    def copy(self, layer: str | None = None) -> Node:
        """A deep copy, so that a patch never changes what an alias shares; with `layer`, its marks carry that."""
        mark = replace_layer(self.mark, layer)
        if self.is_map:
            value: Any = {key: child.copy(layer) for key, child in self.value.items()}
        else:
            value = [child.copy(layer) for child in self.value] if self.is_list else self.value
        keys = {key: replace_layer(at, layer) for key, at in self.keys.items()}
        return replace(self, value=value, mark=mark, keys=keys)


def replace_layer(mark: Mark, layer: str | None) -> Mark:
    return mark if layer is None else mark._replace(layer=layer)


def mapping(items: dict[str, Node], mark: Mark) -> Node:
    """A mapping that no file holds as such: its keys stand where their values do."""
    return Node(dict(items), mark, {key: child.mark for key, child in items.items()})


class SpecError(UserError):
    """All that is wrong with a spec, one problem a line: `file:line:column: message`."""

    def __init__(self, problems: list[tuple[Mark, str]]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{mark}: {message}" for mark, message in problems))


class Problems:
    """Collects what is wrong, once for each place and message, in the order of the files."""

    def __init__(self) -> None:
        self._found: dict[tuple[Mark, str], None] = {}
        self._told = 0
        self.notes: dict[str, None] = {}

    def add(self, mark: Mark, message: str) -> None:
        self._told += 1
        self._found[mark, message] = None

    def again(self) -> None:
        """Something that was told already has come up once more."""
        self._told += 1

    def note(self, message: str) -> None:
        """Something to tell that does not stop the sweep."""
        self.notes[message] = None

    def messages(self) -> list[str]:
        """What was told so far, without its places."""
        return [message for _, message in self._found]

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        """How often something was wrong, told or told already: it grows whenever anything is."""
        return self._told

    def check(self) -> None:
        """Raises `SpecError` if there is any problem."""
        if self._found:
            raise SpecError(sorted(self._found, key=lambda p: (p[0].file, p[0].line, p[0].column)))


def near(word: Any, known: Any, say: str = "did you mean") -> str:
    """` (did you mean 'x'?)`, or what there is when nothing is near and the list is short; else nothing."""
    known = list(dict.fromkeys(str(k) for k in known))
    found = get_close_matches(str(word), known, n=1, cutoff=0.6)
    if found:
        return f" ({say} {found[0]!r}?)"
    return f" (there {'is' if len(known) == 1 else 'are'}: {', '.join(known)})" if 0 < len(known) <= 40 else ""


def read_file(path: Path, shown: str | None = None) -> tuple[Node, str]:
    """The tree and the text of a file. Raises `SpecError` for what is wrong in it, `UserError` if it cannot be read."""
    name = shown or str(path)
    try:
        if not path.is_file():
            raise UserError(f"{name}: {'a folder, not a file' if path.is_dir() else 'there is no such file'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"{name}: {size:,} bytes; a spec holds at most {MAX_BYTES:,}")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    text = _decode(data, name)
    return read_text(text, name), text


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        what = f"byte 0x{data[error.start]:02x} is not UTF-8: save the file as UTF-8"
        raise SpecError([(Mark(name, line, column), what)]) from error


def read_text(text: str, name: str) -> Node:
    """The tree of one YAML document. Raises `SpecError` with everything that is wrong in it."""
    composer = _Composer(name)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            composer.take(event)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        mark = Mark(name, before.count("\n") + 1, len(before) - before.rfind("\n"))
        composer.problems.add(mark, f"character U+{ord(text[error.position]):04X} is not allowed in YAML")
    except yaml.MarkedYAMLError as error:
        composer.problems.add(composer.mark(error.problem_mark or error.context_mark), _reason(error))
    except _Stop:
        pass
    composer.problems.check()
    if composer.root is None:
        raise SpecError([(Mark(name, 1, 1), "there is nothing in this file: a spec begins with `sweep: NAME`")])
    return composer.root


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem)
    if "'\\t'" in problem:
        return "a tab stands where YAML wants spaces"
    context = f" {error.context}" if error.context else ""
    since = f" (from line {error.context_mark.line + 1})" if error.context_mark else ""
    return f"not YAML{context}{since}: {problem}; look at indentation, brackets and quotes"


class _Stop(Exception):
    """The rest of the document is not worth reading."""


@dataclass(slots=True)
class _Frame:
    """A list or mapping that is still open."""

    node: Node
    key: str | None = None
    key_mark: Mark | None = None
    merges: list[Node] = field(default_factory=list)


class _Composer:
    """Events in, nodes out; no recursion, so no nesting can exhaust the stack."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems = Problems()
        self.root: Node | None = None
        self.stack: list[_Frame] = []
        self.anchors: dict[str, Node] = {}
        self.n_anchors = self.n_aliases = self.n_documents = 0

    def mark(self, mark: Any) -> Mark:
        return Mark(self.name, mark.line + 1, mark.column + 1) if mark else Mark(self.name, 1, 1)

    def stop(self, mark: Mark, message: str) -> None:
        self.problems.add(mark, message)
        raise _Stop

    def take(self, event: yaml.Event) -> None:
        at = self.mark(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            self.n_documents += 1
            if self.n_documents > 1:
                self.stop(at, "a second document begins here: a file holds one spec")
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event, at)
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, at)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open(event, at)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()

    def _anchor(self, event: Any, node: Node, at: Mark) -> None:
        if event.tag is not None:
            self.problems.add(at, f"the tag {event.tag!r}: a spec holds plain values only")
        if event.anchor is None:
            return
        self.n_anchors += 1
        if self.n_anchors > MAX_ANCHORS:
            self.stop(at, f"more than {MAX_ANCHORS} anchors")
        if event.anchor in self.anchors:
            self.problems.add(
                at, f"the anchor &{event.anchor} is already in use (line {self.anchors[event.anchor].mark.line})"
            )
        self.anchors[event.anchor] = node

    def _alias(self, event: yaml.AliasEvent, at: Mark) -> None:
        self.n_aliases += 1
        if self.n_aliases > MAX_ALIASES:
            self.stop(at, f"more than {MAX_ALIASES} aliases")
        node = self.anchors.get(event.anchor or "")
        if node is None:
            self.stop(at, f"*{event.anchor} has no anchor above it{near(event.anchor, self.anchors)}")
        assert node is not None
        if any(frame.node is node for frame in self.stack):
            self.stop(at, f"*{event.anchor} stands inside its own anchor (line {node.mark.line})")
        if self._wants_key():
            self.stop(at, f"*{event.anchor} as a key: write the key out")
        self._put(Node(node.value, at, node.keys, node.size, node.depth), at)

    def _scalar(self, event: yaml.ScalarEvent, at: Mark) -> None:
        half = next((letter for letter in event.value if "\ud800" <= letter <= "\udfff"), None)
        if half is not None:
            self.stop(at, f"\\u{ord(half):04x} is half a character: no file can hold it")
        if self._wants_key():
            self._key(event, at)
            return
        value = self._value(event.value, at) if event.style is None and event.tag is None else event.value
        node = Node(value, at)
        self._anchor(event, node, at)
        self._put(node, at)

    def _value(self, text: str, at: Mark) -> Any:
        """What plain text means in the core schema. Numbers that have no one meaning are problems."""
        if text in NULLS:
            return None
        if text in BOOLS:
            return BOOLS[text]
        if LEADING_ZERO.fullmatch(text):
            self.problems.add(at, f"{text}: a number does not begin with 0 (write {int(text[:30])}, or quote it)")
            return 0
        if NOT_FINITE.fullmatch(text):
            self.problems.add(at, f"{text}: numbers are finite here")
            return 0.0
        if INT.fullmatch(text) or HEX_OR_OCTAL.fullmatch(text):
            number = int(text, 0 if text[:2] in ("0x", "0o") else 10) if len(text) < 40 else 1 << 64
            if not -(1 << 63) <= number < 1 << 63:
                self.problems.add(at, f"{text[:40]}: whole numbers have at most 64 bits")
                return 0
            return number
        if FLOAT.fullmatch(text):
            value = float(text)
            if not math.isfinite(value):
                self.problems.add(at, f"{text[:40]}: too large for a number")
                return 0.0
            return value
        return normal(text)

    def _wants_key(self) -> bool:
        return bool(self.stack) and self.stack[-1].node.is_map and self.stack[-1].key is None

    def _key(self, event: yaml.ScalarEvent, at: Mark) -> None:
        frame, key = self.stack[-1], normal(event.value)
        if event.tag is not None or event.anchor is not None:
            self.problems.add(at, f"the key {key!r} has a tag or an anchor: write it plainly")
        frame.key, frame.key_mark = key, at
        if key == "" and event.style is None:
            self.problems.add(at, "a key is missing before ':'")
        elif event.style is None and key.count("(") != key.count(")"):
            self.problems.add(at, f'{key!r}: quote a zip key inside {{ }}: "(a, b)": [[1, 2], [3, 4]]')
        elif key in frame.node.keys:
            self.problems.add(at, f"{key!r} stands twice in this mapping (first in line {frame.node.keys[key].line})")
        elif not (key == "<<" and event.style is None):
            frame.node.keys[key] = at

    def _open(self, event: yaml.CollectionStartEvent, at: Mark) -> None:
        if self._wants_key():
            self.stop(at, "a list or mapping as a key: a key is text")
        if len(self.stack) >= MAX_DEPTH:
            self.stop(at, f"nested deeper than {MAX_DEPTH} levels")
        node = Node({} if isinstance(event, yaml.MappingStartEvent) else [], at)
        self._anchor(event, node, at)
        self.stack.append(_Frame(node))

    def _close(self) -> None:
        frame = self.stack.pop()
        node = frame.node
        for source in frame.merges:
            for key, child in source.value.items():
                if key not in node.value:
                    node.value[key], node.keys[key] = child, source.keys.get(key, child.mark)
        children = list(node.value.values() if node.is_map else node.value)
        node.size = 1 + sum(child.size for child in children)
        node.depth = 1 + max((child.depth for child in children), default=0)
        if node.size > MAX_VALUES:
            self.stop(node.mark, f"{node.size:,} values after aliases; a spec holds at most {MAX_VALUES:,}")
        self._put(node, node.mark)

    def _put(self, node: Node, at: Mark) -> None:
        if not self.stack:
            self.root = node
            return
        frame = self.stack[-1]
        if len(self.stack) + node.depth > MAX_DEPTH:
            self.stop(at, f"nested deeper than {MAX_DEPTH} levels")
        if frame.node.is_list:
            frame.node.value.append(node)
            return
        key, frame.key = frame.key, None
        assert key is not None
        if key == "<<" and "<<" not in frame.node.keys:
            self._merge(frame, node)
        elif key not in frame.node.value:
            frame.node.value[key] = node

    def _merge(self, frame: _Frame, node: Node) -> None:
        sources = node.value if node.is_list else [node]
        if all(source.is_map for source in sources):
            frame.merges.extend(sources)
        else:
            self.problems.add(node.mark, "<< takes a mapping or a list of mappings")
