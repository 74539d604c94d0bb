"""Passwords stay out of what is printed, logged and kept: URLs of databases, servers and storage may hold one."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"//[^/@\s'\"]*@")
_VALUES = re.compile(r"(?i)([?&;\s](?:[\w-]*(?:password|passwd|pwd|token|secret|key))=)[^&;\s'\"]+")


def redact(text: str) -> str:
    """`text` without the users and passwords of URLs in it, and without what is called a password, token or key."""
    return _VALUES.sub(r"\1…", _USER_INFO.sub("//", text))


def has_secret(url: str) -> bool:
    """Whether showing `url` would show a password."""
    return redact(url) != url
