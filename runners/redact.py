"""Passwords stay out of what is printed, logged and kept: URLs of databases, servers and storage may hold one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

# To the last @, whatever a password holds, / and @ too: `//user:` may begin one, and rather a host is hidden than a
# piece of a password shown. Without a colon the user ends before the first /.
_USER_INFO = re.compile(r"//(?:[^/@:\s'\"]*:[^\s'\"]*|[^/\s'\"]*)@")
_SECRET_NAME = r"[\w-]*(?:password|passwd|passphrase|pwd|token|secret|key)"
_VALUES = re.compile(rf"(?i)([?&;\s](?:{_SECRET_NAME})=)[^&;\s'\"]+")
_SHORT = 6
"""A piece of a password of fewer characters is only taken out where it is a word: `p` is in every other one."""


def redact(text: str, url: str = "") -> str:
    """`text` without the users and passwords of URLs in it, and without what is called a password, token or key.

    `url` is one whose password is not to be said in any other way either, nor any piece of it: errors quote what they
    could not read.
    """
    text = _VALUES.sub(r"\1…", _USER_INFO.sub("//", text))
    for secret in sorted(set(_secrets(url)), key=len, reverse=True):
        is_word = len(secret) < _SHORT
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)" if is_word else re.escape(secret), "…", text)
    return text


def shown(url: str) -> str:
    """`url` without its password, also one with blanks or quotes in it."""
    return redact(url, url)


def has_secret(url: str) -> bool:
    """Whether showing `url` would show a password."""
    return shown(url) != url


def _secrets(url: str) -> Iterator[str]:
    """The passwords in `url`, as written and as meant, whole and in the pieces that a bad parser may make of them."""
    found = [match[2] for match in re.finditer(rf"(?i)([?&;](?:{_SECRET_NAME})=)([^&;#]+)", url)]
    info = url.partition("//")[2].rpartition("@")[0]
    if ":" in info or "/" not in info:
        found.append(info.partition(":")[2] or info)
    for secret in filter(None, found):
        for form in (secret, unquote(secret), quote(unquote(secret), safe="")):
            yield form
            yield from (piece for piece in re.split(r"[@:/?#&=\s'\"]", form) if len(piece) > 2)
