"""The cost of a plan: each cell's and in all, measured where the store knows, estimated where it does not.

A number is `measured` when trials of the same shape ran on this kind of device (scaled by updates), and an estimate
otherwise: worked out from the settings, and corrected by how far off that is for trials that were measured. Where a
search decides what a trial costs, its time is the mean over what may be suggested, and everything else the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from runners.need import Need, need
from runners.resources import Machine, Share, cores, share
from runners.schema import Member, Plan, UserError
from runners.search import Searches
from runners.split import shape
from runners.store import Store
from sweeps import measured
from sweeps.catalog import Catalog
from sweeps.costs import CPU, GPU, Analyst, Work
from sweeps.could_be import Case, Cases
from sweeps.measured import Experience, Taken

ENOUGH = 200
"""Measured trials that are looked at to correct estimates of others."""


@dataclass(frozen=True, slots=True)
class CellCost:
    """One cell; `trials` counts its trainings, those of suggestions too.

    `seconds`, `memory_bytes` and `flops` are of one trial; None = it cannot be told.

    `basis` says where seconds and memory come from: `measured 3 trials`, `from 12 trials` or `estimated`.
    """

    cell: str
    trials: int
    to_run: int
    n_params: int | None
    steps: int | None
    tokens: int | None
    state_bytes: int
    flops: float | None
    seconds: float | None
    memory_bytes: int | None
    gpu: float
    basis: str
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least and most of what depends on searched values: any of n_params, steps, rows, state_bytes, seconds, ..."""

    @property
    def longest_s(self) -> float:
        """Seconds of its longest trial."""
        return self.ranges["seconds"][1] if "seconds" in self.ranges else self.seconds or 0.0

    @property
    def is_measured(self) -> bool:
        return self.basis.startswith("measured")


@dataclass(frozen=True)
class Bill:
    """The whole plan's cost. Hours count cards, or shares of them, on a GPU and cores on a CPU; `wall_s` is here."""

    device: str
    on_gpu: bool
    needs: dict[str, int]
    cells: tuple[CellCost, ...]
    hours: float | None
    hours_to_run: float | None
    wall_s: float | None
    at_once: float
    memory_bytes: int | None
    store: str | None = None
    notes: tuple[str, ...] = ()
    to_begin: int = 0
    """Trainings that were never begun, by any launch."""

    @property
    def unit(self) -> str:
        return "GPU-hours" if self.on_gpu else "CPU-hours"

    @property
    def is_measured(self) -> bool:
        return all(cell.is_measured for cell in self.cells)

    @property
    def to_run(self) -> int:
        return sum(n for word, n in self.needs.items() if word != Need.NOTHING)

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "cells"}
        return {"kind": "cost", "unit": self.unit, **fields, "cells": [asdict(cell) for cell in self.cells]}


@dataclass
class _Group:
    """The trainings of one cell, its suggestions' among them: what they still need, and how many were never begun."""

    first: Member
    needs: Counter[str] = field(default_factory=Counter)
    to_begin: int = 0


def make(
    plan: Plan,
    *,
    store: Path | None = None,
    only: frozenset[str] | None = None,
    jobs: int | None = None,
    catalog: Catalog | None = None,
) -> Bill:
    """The cost of `plan` (of the trials in `only`) here, with what the store at `store` knows, if there is one."""
    opened = Store.open(store) if store is not None and (store / "store.json").exists() else None
    name, cards = measured.device(plan.resources)
    known = Experience()
    if opened is not None:
        known = measured.read(opened, (member.trial.id for member in plan.members), name)
    groups = _grouped(plan, opened, only)
    given, notes = _share(plan, cards, jobs)
    analyst = Analyst(catalog or Catalog(), GPU if cards else CPU)
    corrections = _corrections(known, analyst)
    cases = Cases(plan, analyst.catalog)
    cells = tuple(
        _cell(cell, group, cases.of(group.first), known, analyst, corrections, given) for cell, group in groups.items()
    )
    needs: Counter[str] = Counter({word.value: 0 for word in Need})
    for group in groups.values():
        needs.update(group.needs)
    to_begin = sum(group.to_begin for group in groups.values())
    return _total(name, bool(cards), dict(needs), cells, given, opened, tuple(notes), to_begin)


def _grouped(plan: Plan, store: Store | None, only: frozenset[str] | None) -> dict[str, _Group]:
    """The plan's trainings by cell. A search counts with all its suggestions, the ones not made yet too."""
    groups: dict[str, _Group] = {}
    asked: set[str] = set()
    for slot in plan.members:
        if only is None or slot.trial.id in only:
            groups.setdefault(slot.cell, _Group(slot))
            if slot.searched is not None:
                asked.add(slot.searched.key)
    searches = Searches(plan, store) if store is not None and plan.searches else None
    for member in searches.view().members if searches else plan.members:
        group = groups.get(member.cell)
        if group is not None and _counts(member, plan, only, asked):
            what = Need.TRAIN if store is None or member.is_open else need(store, member)
            group.needs[what.value] += 1
            group.to_begin += what == Need.TRAIN and (store is None or not store.last_attempt(member.trial.id))
    for search in plan.searches:
        if search.key in asked:
            state = searches.state(search.key) if searches else None
            made = len(state.suggestions) if state else 0
            left = 0 if state and state.is_over else (search.trials - made) * len(search.seeds)
            groups[search.cell].needs[Need.TRAIN.value] += left
            groups[search.cell].to_begin += left
    return groups


def _counts(member: Member, plan: Plan, only: frozenset[str] | None, asked: set[str]) -> bool:
    """Whether a member is a training of the ones asked for; with `seeds: same` an open slot is none of its own."""
    searched = member.searched
    if searched is not None and member.is_open and any(s.is_same for s in plan.searches if s.key == searched.key):
        return False
    if only is None or member.trial.id in only:
        return True
    return searched is not None and (searched.slot in only or (not searched.slot and searched.key in asked))


def _share(plan: Plan, cards: int, jobs: int | None) -> tuple[Share, list[str]]:
    """What a launch here would give each trial; what this machine lacks is noted and planned for all the same."""
    try:
        return share(plan.resources, "ray", jobs, Machine(cores(), cards)), []
    except UserError as error:
        gpu = plan.resources.get("gpu")
        wanted = float(gpu) if isinstance(gpu, int | float) else 1.0
        return Share(1, int(plan.resources.get("cpu") or 1), cards, wanted), [f"this machine cannot run it: {error}"]


def _corrections(known: Experience, analyst: Analyst) -> dict[str, tuple[float, float, int]]:
    """By mechanism, and "" for all: measured over worked out, of seconds and of memory, and from how many trials."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    for one in known.taken[:ENOUGH]:
        work = analyst.work(one.trial, measured.evaluated(one))
        if work.seconds and work.memory_bytes and work.steps:
            seconds = one.seconds / (work.seconds * one.steps / work.steps)
            memory = one.memory_bytes / work.memory_bytes if one.memory_bytes else 1.0
            for key in ("", one.trial.mechanism["name"]):
                ratios.setdefault(key, []).append((seconds, memory))
    return {key: (median(r[0] for r in some), median(r[1] for r in some), len(some)) for key, some in ratios.items()}


def _cell(
    cell: str,
    group: _Group,
    cases: list[Case],
    known: Experience,
    analyst: Analyst,
    corrections: Mapping[str, tuple[float, float, int]],
    given: Share,
) -> CellCost:
    slices = tuple([part.task for part in group.first.slices])
    rows: list[dict[str, Any]] = []
    alike: dict[Path, Taken] = {}
    basis = ""
    for case in cases:
        work = analyst.work(case.trial, slices)
        like = known.by_shape.get(shape(case.trial), []) if known.taken else []
        seconds, memory, basis = _told(work, case.trial.mechanism["name"], like, corrections)
        alike.update((one.folder, one) for one in like)
        batch = (case.trial.train or {}).get("batch_size")
        told = {"seconds": seconds, "memory_bytes": memory, "state_bytes": case.state_bytes, "rows": batch}
        rows.append(told | {name: getattr(work, name) for name in ("n_params", "steps", "tokens", "flops")})
    shares = [one.gpu for one in alike.values() if one.gpu] if given.packed else []
    ranges = _ranges(rows)
    if basis.startswith("measured") and {"seconds", "memory_bytes"} & ranges.keys():
        basis = f"from {len(alike)} trial{'s' if len(alike) > 1 else ''}"  # of these shapes, and of no such mean
    most = {name: None if any(row[name] is None for row in rows) else max(r[name] for r in rows) for name in rows[0]}
    drawn = [row["seconds"] for row, case in zip(rows, cases, strict=True) if case.is_draw]
    return CellCost(
        cell,
        group.needs.total(),
        sum(n for word, n in group.needs.items() if word in (Need.TRAIN, Need.RETRAIN)),
        most["n_params"],
        most["steps"],
        most["tokens"],
        max(case.state_bytes for case in cases),
        most["flops"],
        None if most["seconds"] is None else fmean(drawn),
        most["memory_bytes"],
        fmean(shares) if shares else given.gpu,
        basis,
        ranges,
    )


def _ranges(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Least and most of each column that is not the same in all rows."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    known = {name: [v for v in column if v is not None] for name, column in columns.items()}
    return {name: (min(some), max(some)) for name, some in known.items() if some and min(some) < max(some)}


def _told(
    work: Work, mechanism: str, alike: list[Taken], corrections: Mapping[str, tuple[float, float, int]]
) -> tuple[float | None, int | None, str]:
    """Seconds and memory of a trial, and where they come from."""
    if alike and work.steps:
        seconds = fmean(one.seconds / one.steps for one in alike) * work.steps
        peaks = [one.memory_bytes for one in alike if one.memory_bytes]
        count = f"measured {len(alike)} trial{'s' if len(alike) > 1 else ''}"
        return seconds, max(peaks) if peaks else work.memory_bytes, count
    by_seconds, by_memory, n = corrections.get(mechanism) or corrections.get("") or (1.0, 1.0, 0)
    basis = f"from {n} trial{'s' if n > 1 else ''}" if n else "estimated"
    told = None if work.seconds is None else work.seconds * by_seconds
    return told, None if work.memory_bytes is None else int(work.memory_bytes * by_memory), basis


def _total(
    name: str,
    on_gpu: bool,
    needs: dict[str, int],
    cells: tuple[CellCost, ...],
    given: Share,
    store: Store | None,
    notes: tuple[str, ...],
    to_begin: int,
) -> Bill:
    def hours(counts: list[tuple[CellCost, int]]) -> float | None:
        known = [(cell.seconds, cell.gpu, n) for cell, n in counts if n]
        if any(seconds is None for seconds, _, _ in known):
            return None
        return sum((s or 0.0) * (gpu if on_gpu else given.threads * given.workers) * n for s, gpu, n in known) / 3600

    in_all, to_run = hours([(c, c.trials) for c in cells]), hours([(c, c.to_run) for c in cells])
    busiest = [cell.gpu for cell in cells if cell.to_run] or [given.gpu]
    at_once = float(given.slots)
    if given.packed:
        at_once = min(at_once, given.gpus / max(fmean(busiest), 1e-3))
    wall_s = None
    if to_run is not None:
        work_s = sum((cell.seconds or 0.0) * cell.to_run for cell in cells)
        longest = max((cell.longest_s for cell in cells if cell.to_run), default=0.0)
        wall_s = max(longest, work_s / max(at_once, 1.0))
    peaks = [cell.memory_bytes for cell in cells]
    peak = None if any(p is None for p in peaks) else max((p for p in peaks if p is not None), default=None)
    where = str(store.root) if store is not None else None
    return Bill(name, on_gpu, needs, cells, in_all, to_run, wall_s, at_once, peak, where, notes, to_begin)
