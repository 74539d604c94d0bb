"""Lengths of time as people write them: the one reader for the spec and the command line, and the one writer."""

from __future__ import annotations

import math
import re

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)\s*([smhd])"


def seconds(text: str | float) -> float:
    """Seconds of `90`, `9m`, `1.5h`, `2d` or `1h30m`; a bare number is seconds. Raises `ValueError` in words."""
    if isinstance(text, str):
        whole = text.strip().lower()
        if re.fullmatch(rf"(?:{_PART}\s*)+", whole):
            found = sum(float(number) * UNITS[unit] for number, unit in re.findall(_PART, whole))
        else:
            try:
                found = float(whole)
            except ValueError:
                found = math.nan
    else:
        found = math.nan if isinstance(text, bool) else float(text)
    if not math.isfinite(found) or found <= 0:
        raise ValueError(
            f"{text!r} is no length of time above 0: write seconds, or numbers with s, m, h or d, "
            "as 90, 9m, 1.5h, 2d or 1h30m"
        )
    return found


def words(length_s: float) -> str:
    """`0.4 s`, `45 s`, `9 min`, `1.5 h`, `12 days`: two or three digits, for people."""
    if length_s < 99.5:
        return f"{length_s:.2g} s" if length_s < 9.95 else f"{length_s:.0f} s"
    for unit, name, most in ((60.0, "min", 89.5), (3600.0, "h", 72.0)):
        if length_s / unit < most:
            return f"{_three(length_s / unit)} {name}"
    return f"{_three(length_s / 86400)} days"


def _three(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:,.0f}"
