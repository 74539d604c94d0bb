"""How two trials, or two sweeps, differ: in what was asked, and in what ran."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runners.schema import Member, Plan, Trial, UserError, canonical_json
from runners.store import Store, read_json

_LEAST = 4
"""Characters of an id that name a trial."""


@dataclass(frozen=True)
class Difference:
    """One thing that differs: where, and both values as text; None where a side does not have it."""

    path: str
    a: str | None
    b: str | None


@dataclass
class Diff:
    """What differs between `a` and `b`. The trials' lists are of cells, with their numbers of trials."""

    a: str
    b: str
    settings: list[Difference] = field(default_factory=list)
    stamps: list[Difference] = field(default_factory=list)
    only_a: dict[str, int] = field(default_factory=dict)
    only_b: dict[str, int] = field(default_factory=dict)
    shared: int | None = None
    """Trials in both; None between two trials."""

    @property
    def is_same(self) -> bool:
        return not (self.settings or self.stamps or self.only_a or self.only_b)


def diff(store: Store, a: str, b: str) -> Diff:
    """Compare two trials (ids, or enough of their start) or two sweeps (`NAME`, or `NAME@REVISION`).

    Raises `UserError` for a name that is neither, and for a trial against a sweep.
    """
    left, right = _find(store, a), _find(store, b)
    if isinstance(left, Trial) and isinstance(right, Trial):
        settings = list(_between(left.settings(), right.settings(), skip={"id"}))
        return Diff(left.id, right.id, settings, _stamps(store, [left.id], [right.id]))
    if isinstance(left, Trial) or isinstance(right, Trial):
        raise UserError(f"{a} and {b} are a trial and a sweep: compare two of a kind")
    (name_a, plan_a), (name_b, plan_b) = left, right
    mine, theirs = ({m.trial.id: m for m in plan.members} for plan in (plan_a, plan_b))
    return Diff(
        name_a,
        name_b,
        list(_between(plan_a.spec, plan_b.spec)),
        _stamps(store, list(mine), list(theirs)),
        _cells(mine, theirs),
        _cells(theirs, mine),
        len(mine.keys() & theirs.keys()),
    )


def _find(store: Store, name: str) -> Trial | tuple[str, Plan]:
    sweeps = store.sweeps()
    head, at, number = name.rpartition("@")
    if name in sweeps:
        revision, plan = store.plan(name)
        return f"{name}@{revision}", plan
    if at and head in sweeps and number.isdecimal():
        return name, store.plan(head, int(number))[1]
    if len(name) >= _LEAST and re.fullmatch("[0-9a-f]+", name):
        ids = [trial_id for trial_id in store.trial_ids() if trial_id.startswith(name)]
        if len(ids) > 1:
            raise UserError(f"{len(ids)} trials begin with {name}: {', '.join(ids[:4])}; give more of the id")
        settings = read_json(store.trial_folder(ids[0]) / "settings.json") if ids else None
        if isinstance(settings, dict):
            return Trial.from_settings(settings)
    raise UserError(
        f"{name!r} is neither a sweep of {store.root} ({', '.join(sweeps) or 'it has none'}; NAME@2 for its second "
        f"revision) nor a trial there (at least {_LEAST} digits of its id, as `sweep status NAME` shows it)"
    )


def _between(a: Any, b: Any, at: str = "", skip: frozenset[str] | set[str] = frozenset()) -> Iterator[Difference]:
    """Every leaf that differs, in the order of side a."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            path = f"{at}.{key}" if at else str(key)
            if path in skip:
                continue
            if key in a and key in b:
                yield from _between(a[key], b[key], path)
            else:
                yield Difference(path, *(_text(side[key]) if key in side else None for side in (a, b)))
    elif canonical_json(a) != canonical_json(b):
        yield Difference(at, _text(a), _text(b))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _cells(mine: Mapping[str, Member], theirs: Mapping[str, Member]) -> dict[str, int]:
    return dict(Counter(member.cell for trial_id, member in mine.items() if trial_id not in theirs))


def _stamps(store: Store, a: list[str], b: list[str]) -> list[Difference]:
    """Names of the stamp whose values differ between the sides, each with all its values there."""
    sides = [_values(store, ids) for ids in (a, b)]
    names = dict.fromkeys(name for side in sides for name in side)
    found = []
    for name in names:
        left, right = (sorted(side.get(name, set())) for side in sides)
        if left != right and left and right:
            found.append(Difference(name, ", ".join(left), ", ".join(right)))
    return found


def _values(store: Store, ids: list[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for trial_id in ids:
        for name, value in ((store.result(trial_id) or {}).get("stamp") or {}).items():
            found.setdefault(name, set()).add(str(value))
    return found
