"""Names that MLflow takes, and back.

MLflow refuses a parameter's or metric's name with other characters than letters, digits, `_ - . space /` and the colon,
one that reads like a relative path (`..`, `a//b`, `/a`), and one of more than 250. So a character that it would refuse
is written `:HEX:`, its code point, and the colon itself `:3a:`; every other name stays as it is. `test/acc@5` becomes
`test/acc:40:5`. A longer name keeps its start and `:cut:DIGEST`; the run's tag `memsweep.name.DIGEST` has all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from runners.schema import digest

LONGEST = 250
NAME_TAG = "memsweep.name."
"""Before the digest of a name that was cut: a tag of the run with the whole name."""
_CUT = ":cut:"
_DIGEST = 16


def to_mlflow(name: str) -> str:
    """`name` as MLflow takes it; different names stay different."""
    text = re.sub(r"[^\w\-./ ]", _escape, name)
    parts = text.split("/")
    if any(part in ("", ".", "..") for part in parts):
        text = text.replace("/", _code("/"))
        if text in ("", ".") or text.startswith(".."):
            text = text.replace(".", _code(".")) or "::"
    elif text.startswith(".."):
        text = _code(".") + text[1:]
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - len(_CUT) - _DIGEST] + _CUT + digest(name, _DIGEST)


def from_mlflow(name: str, tags: Mapping[str, str] | None = None) -> str:
    """The name that `to_mlflow` was given; `tags` are those of the run, for a name that was too long.

    Raises `KeyError` for a name that was cut and that the tags do not tell.
    """
    if _CUT in name:
        return (tags or {})[NAME_TAG + name.rpartition(_CUT)[2]]
    return re.sub(r":([0-9a-f]*):", lambda found: chr(int(found[1], 16)) if found[1] else "", name)


def cut(names: Mapping[str, object]) -> dict[str, str]:
    """The tags that tell the whole of those `names` that are too long."""
    return {NAME_TAG + to_mlflow(name).rpartition(_CUT)[2]: name for name in names if _CUT in to_mlflow(name)}


def _escape(found: re.Match[str]) -> str:
    return _code(found[0])


def _code(char: str) -> str:
    return f":{ord(char):x}:"
