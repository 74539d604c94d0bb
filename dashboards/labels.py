"""What figures and tables call things: families, conditions, short names, human numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from dashboards.compare import Comparison
from dashboards.stats import Verdict
from dashboards.table import varying_paths
from runners.schema import Member, Plan

VAGUE_WORDS = ("none", "auto", "all", "off", "on")
"""Values that say nothing without the name of what they are a value of."""


def is_number(value: Any) -> bool:
    """Whether `value` can stand on an axis (a switch cannot)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def name_value(path: str, value: Any) -> str:
    """`n_pairs 16`, or the bare word where it speaks for itself (`residual`)."""
    name = path.rsplit(".", 1)[-1]
    if isinstance(value, str) and value not in VAGUE_WORDS:
        return value
    return f"{name} {value:g}" if is_number(value) else f"{name} {value}"


def side(text: str) -> str:
    """A side of a test, or its name, as people say it: `admission residual`, not `mechanism.admission: residual`."""
    return re.sub(r"\b(?:mechanism|task|model|train)\.(\w+): ", r"\1 ", re.sub(r"\b(?:arm|mechanism): ", "", text))


class Labels:
    """Names for the members of one plan.

    A family is what one colour and one mark stand for: the arm and its varying settings that are words. A series adds
    the numbers that vary inside a family (one line of a figure). A condition is the task setting a member trained at.
    """

    def __init__(self, plan: Plan) -> None:
        self.paths = [path for path in varying_paths(plan) if path != "mechanism"]
        self._by_arm: dict[str, dict[str, set[str]]] = {}
        for member in plan.members:
            seen = self._by_arm.setdefault(member.arm, {})
            for path in self.paths:
                if path in member.varying:
                    seen.setdefault(path, set()).add(repr(member.varying[path]))
        self.families = list(dict.fromkeys(self.family(member) for member in plan.members))
        self.conditions = list(dict.fromkeys(self.condition(member) for member in plan.members))

    def _own(self, member: Member) -> list[str]:
        """Paths that vary within the member's arm, the task's left out."""
        seen = self._by_arm[member.arm]
        return [p for p in self.paths if len(seen.get(p, ())) > 1 and not p.startswith("task") and p in member.varying]

    def family(self, member: Member) -> str:
        """`hola, residual`."""
        words = [p for p in self._own(member) if not is_number(member.varying[p])]
        return ", ".join([member.arm, *(name_value(p, member.varying[p]) for p in words)])

    def series(self, member: Member) -> str:
        """`hola, residual, cache 16`."""
        return ", ".join([self.family(member), *filter(None, [self.size(member)])])

    def size(self, member: Member) -> str:
        """`cache 16`: the numbers that vary inside the member's family."""
        numbers = [p for p in self._own(member) if is_number(member.varying[p])]
        return ", ".join(name_value(p, member.varying[p]) for p in numbers)

    def condition(self, member: Member) -> str:
        """`seq_len 64, n_pairs 16`; empty where the task does not vary."""
        paths = [p for p in self.paths if p.startswith("task") and p in member.varying]
        return ", ".join(name_value(p, member.varying[p]) for p in paths)


def nearly(value: float | None, digits: int = 3) -> str:
    """A number for people: three decimals below 100, a dash for nothing."""
    if value is None or math.isnan(value):
        return "–"
    if abs(value) < 1e-9:
        value = 0.0  # what is left of rounding
    if value != 0 and (abs(value) < 10**-digits or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference: with its sign, and a true minus."""
    if value is None or math.isnan(value):
        return "–"
    text = nearly(abs(value), digits)
    return text if float(text.replace(",", "")) == 0 else ("+" if value > 0 else "−") + text


def p_text(p: float | None) -> str:
    """`0.031`, `< 0.001`, or a dash."""
    if p is None or math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def bytes_text(n: float | None) -> str:
    """`16 KiB`."""
    if n is None or math.isnan(n):
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"


def counted(n: int, word: str) -> str:
    """`1 pair`, `3 pairs`."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def verdict_text(found: Comparison) -> str:
    """The verdict with the sides' own names."""
    if found.verdict == Verdict.A_BETTER:
        return f"{side(found.test.a)} better"
    if found.verdict == Verdict.B_BETTER:
        return f"{side(found.test.b)} better"
    return str(found.verdict)


def effect_text(found: Comparison, percent: bool = True) -> str:
    """`+0.031 (95 % interval −0.010 to +0.072)`; a ratio as `× 1.20`."""
    show = (lambda v: "× " + nearly(v)) if found.test.scale == "ratio" else signed
    if found.low is None or found.high is None:
        return f"{show(found.effect)} (no interval)"
    return f"{show(found.effect)} ({'95 % interval ' if percent else ''}{show(found.low)} to {show(found.high)})"
