"""Trial folders and a plan in, three tidy tables out.

members   one row a member of the plan, run or not: who it is, how it stands, every varying path, what it scored
scores    one row a member and evaluation slice, for what varies inside a set
curves    one row a trial, step and metric, as committed with the checkpoints

The folders are the truth; nothing is read from MLflow. A file that is torn or fails its checksum counts as not there,
and is named in `Results.warnings`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dashboards.kept import kept
from runners.schema import EvalSlice, Member, Plan, Status, Trial, canonical_json, digest
from runners.store import last_attempt, read_json, read_points, read_sealed

ID_COLUMNS = ("trial", "arm", "cell", "seed", "status")
"""What every table says first about a row."""

RESULT_FIELDS = ("n_params", "tokens", "wall_s", "step", "stopped_by", "peak_mem_bytes", "attempt")
STAMP_FIELDS = ("memsweep", "commit", "python", "torch", "triton", "device", "dtype", "fingerprint", "data")
CURVE_COLUMNS = ("trial", "arm", "cell", "seed", "step", "metric", "value")
COMPARED_STAMPS = tuple(name for name in STAMP_FIELDS if name != "dtype")
"""What should be alike in a comparison; the number format is a setting, which a sweep may vary on purpose."""
NOT_SCORES = ("n",)
"""Keys of an evaluation that count something instead of scoring it."""


@dataclass(frozen=True)
class Results:
    """A sweep's results as tables; `evals` holds the metrics of (trial id, slice id), chance where a trial diverged."""

    members: pd.DataFrame
    scores: pd.DataFrame
    curves: pd.DataFrame
    stamps: dict[str, dict[str, Any]] = field(default_factory=dict)
    evals: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    code: dict[str, dict[str, str]] = field(default_factory=dict)
    """By trial: the files that trained it, each with a hash of its content. Results from before have none."""
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By trial: what it measured of its ops on its own numbers (`runners.kernel_evidence.brief`)."""

    def shared_code(self, trials: Iterable[str]) -> dict[str, str]:
        """By trial: one digest of those files that all of `trials` used. Those whose files are unknown are left out."""
        known = {trial: self.code[trial] for trial in trials if trial in self.code}
        if not known:
            return {}
        common = sorted(set.intersection(*(set(files) for files in known.values())))
        return {trial: digest([files[name] for name in common], 8) for trial, files in known.items()}

    def counts(self) -> dict[str, int]:
        """How many members stand where: every status that occurs, most common first."""
        return {str(status): int(n) for status, n in self.members["status"].value_counts().items()}


Known = Mapping[str, tuple[Status, str | None]]
"""Status and last error of a trial id, as the ledger has them."""


def load(plan: Plan, store: Path, known: Known | None = None) -> Results:
    """Read every member of `plan` from the trial folders of `store`.

    `known`, from the ledger, tells what folders cannot: running, pruned, and workers that died without a word. It is
    believed only for trials that are not done on disk.
    """
    return kept(plan, store, known or {}, lambda: _read(plan, store, known or {}))


def _read(plan: Plan, store: Path, known: Known) -> Results:
    reader = _Reader(store / "trials", known)
    rows, scores = [], []
    # Long sweeps have millions of points: columns, not a mapping for each.
    curves: dict[str, list[Any]] = {name: [] for name in CURVE_COLUMNS}
    for member in plan.members:
        row = reader.member(member)
        rows.append(row)
        scores.extend(reader.scores(member, row))
        reader.add_curve(member, row, curves)
    return Results(
        members=_frame(rows, _member_columns(plan)),
        scores=_frame(scores, (*ID_COLUMNS, "set", "slice", "label", "state_bytes")),
        curves=pd.DataFrame(curves),
        stamps=reader.stamps,
        evals=reader.evals,
        warnings=tuple(reader.warnings),
        code=reader.code,
        kernels=reader.kernels,
    )


def varying_paths(plan: Plan) -> list[str]:
    """Every path that varies in the sweep, in axis order."""
    return list(dict.fromkeys(path for member in plan.members for path in member.varying))


def chance(slices: Iterable[EvalSlice], metric: str, task: str | None = None) -> float:
    """The mean score of guessing over `slices` (those of task `task`, if given); NaN where it is not known."""
    known = [s.chance.get(metric, math.nan) for s in slices if task in (None, s.task.get("name"))]
    return sum(known) / len(known) if known else math.nan


class _Reader:
    """Reads trial folders one member at a time, keeping what later steps look up by id."""

    def __init__(self, trials: Path, known: Known) -> None:
        self.trials = trials
        self.known = known
        self.stamps: dict[str, dict[str, Any]] = {}
        self.code: dict[str, dict[str, str]] = {}
        self.evals: dict[tuple[str, str], dict[str, float]] = {}
        self.kernels: dict[str, list[dict[str, Any]]] = {}
        self.warnings: list[str] = []
        self._files: dict[tuple[str, ...], dict[str, str]] = {}

    def member(self, member: Member) -> dict[str, Any]:
        """The member's row, and its evaluations put into `evals`."""
        trial = member.trial
        folder = os.path.join(self.trials, trial.id)  # text: of tens of thousands of Paths, making them takes longest
        result = self._read(f"{folder}/result.json") or {}
        diverged = result.get("status") == Status.DIVERGED
        for piece in member.slices:
            self._evaluation(folder, member, piece, diverged)
        status, error = self._status(Path(folder), member, result)
        row: dict[str, Any] = {"trial": trial.id, "arm": member.arm, "cell": member.cell, "seed": trial.seed}
        row |= {"status": str(status), **member.varying, "state_bytes": member.state_bytes}
        if member.searched is not None:
            row |= {"suggestion": member.searched.number, **member.searched.values}
        row |= {name: result.get(name) for name in RESULT_FIELDS}
        stamp = dict(result.get("stamp") or {})
        if stamp:
            # Begun by one code and ended by another: neither alone made it.
            stamp["fingerprint"] = "+".join(result.get("made_by") or [str(stamp.get("fingerprint"))])
            self._code(folder, trial.id, result)
            if result.get("kernels"):
                self.kernels[trial.id] = result["kernels"]
            self.stamps[trial.id] = {name: stamp.get(name) for name in STAMP_FIELDS}
        row |= {"diverged": _text(result.get("diverged")), "error": error}
        row |= {f"stamp.{name}": stamp.get(name) for name in STAMP_FIELDS}
        row |= {name: _number(value) for name, value in (result.get("metrics") or {}).items()}
        return row | self._set_metrics(member)

    def _code(self, folder: str, trial_id: str, result: Mapping[str, Any]) -> None:
        made_by = tuple(result.get("made_by") or ())
        files = self._files.get(made_by)
        if files is None:
            row = read_json(f"{folder}/attempts/{result.get('attempt')}/code.json")
            files = row["files"] if isinstance(row, dict) else None
            if files is not None and len(made_by) == 1:  # the fingerprint of these files, which many trials share
                self._files[made_by] = files
        if files is not None:
            self.code[trial_id] = files

    def _evaluation(self, folder: str, member: Member, piece: EvalSlice, diverged: bool) -> None:
        if diverged:
            self.evals[member.trial.id, piece.id] = dict(piece.chance)
            return
        found = self._read(f"{folder}/evals/{piece.id}.json")
        if found is not None:
            metrics = {k: _number(v) for k, v in found["metrics"].items() if k not in NOT_SCORES}
            self.evals[member.trial.id, piece.id] = metrics

    def _set_metrics(self, member: Member) -> dict[str, float]:
        """`SET/metric` (mean over the set's slices, equal weights) and `SET/metric/label`; a set counts when whole."""
        row: dict[str, float] = {}
        for name in dict.fromkeys(piece.set for piece in member.slices):
            pieces = [piece for piece in member.slices if piece.set == name]
            found = [self.evals.get((member.trial.id, piece.id)) for piece in pieces]
            whole = [metrics for metrics in found if metrics is not None]
            for metric in dict.fromkeys(key for metrics in whole for key in metrics):
                values = [metrics.get(metric, math.nan) for metrics in whole]
                row[f"{name}/{metric}"] = sum(values) / len(values) if len(whole) == len(pieces) else math.nan
                row |= {
                    f"{name}/{metric}/{piece.label}": metrics.get(metric, math.nan)
                    for piece, metrics in zip(pieces, found, strict=True)
                    if metrics is not None and piece.label
                }
        return row

    def _status(self, folder: Path, member: Member, result: dict[str, Any]) -> tuple[Status, str | None]:
        """Where the member stands, and its last error line if it failed."""
        if result.get("status") == Status.DIVERGED:
            return Status.DIVERGED, None
        if result.get("status") == Status.COMPLETE and all(
            (member.trial.id, piece.id) in self.evals for piece in member.slices
        ):
            return Status.COMPLETE, None
        known, last = self.known.get(member.trial.id, (None, None))
        if known in (Status.RUNNING, Status.PRUNED, Status.FAILED):
            return known, (last or "no message") if known == Status.FAILED else None
        attempt = last_attempt(folder)
        error = folder / "attempts" / str(attempt) / "error.txt"
        if error.is_file():
            lines = [line.strip() for line in error.read_text(encoding="utf-8", errors="replace").splitlines()]
            return Status.FAILED, next((line for line in reversed(lines) if line), "no message")
        return (Status.INTERRUPTED if attempt or result else Status.PLANNED), None

    def scores(self, member: Member, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The member's rows of the long table, one a slice: `eval.NAME` is the task setting it was tested at."""
        rows = []
        for piece in member.slices:
            metrics = self.evals.get((member.trial.id, piece.id))
            if metrics is None:
                continue
            base = {name: row[name] for name in ID_COLUMNS} | member.varying
            base |= {"set": piece.set, "slice": piece.id, "label": piece.label, "state_bytes": member.state_bytes}
            tested_at = {f"eval.{k}": v for k, v in piece.task.items() if isinstance(v, int | float | str)}
            rows.append(base | tested_at | metrics)
        return rows

    def add_curve(self, member: Member, row: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        """Append every committed point of the trial up to its result's step."""
        before = len(columns["step"])
        try:
            for step, metrics, _time in read_points(self.trials / member.trial.id, row["step"]):
                columns["step"] += [step] * len(metrics)
                columns["metric"] += map(sys.intern, metrics)
                columns["value"] += map(_number, metrics.values())
        except (OSError, ValueError, KeyError) as error:
            self.warnings.append(f"curve of {member.trial.id} cut at a torn line: {error}")
        n = len(columns["step"]) - before
        for name in ("trial", "arm", "cell", "seed"):
            columns[name] += [row[name]] * n

    def _read(self, path: str) -> dict[str, Any] | None:
        found = read_sealed(path)
        if found is None and os.path.exists(path):
            name = Path(path).relative_to(self.trials.parent)
            self.warnings.append(f"{name} is torn or was altered: counted as not there")
        return found


def speaks_of(field: str, trial: Trial) -> str:
    """Among which trials a field of the stamp is the same by right; empty = among all.

    A fingerprint covers what a trial's mechanisms and task import and read, `data` one text.
    """
    source = trial.task.get("data_files") or trial.task.get("dataset")
    if field == "fingerprint":
        mechanism, task, *others = trial.uses
        return f"{' with '.join([mechanism, *others])} on {task}" + (f" ({source})" if source else "")
    return f"{source or 'no file'}" if field == "data" else ""


def _member_columns(plan: Plan) -> tuple[str, ...]:
    """Columns that are there even when nothing has run."""
    stamps = tuple(f"stamp.{name}" for name in STAMP_FIELDS)
    return (*ID_COLUMNS, *varying_paths(plan), "state_bytes", *RESULT_FIELDS, "diverged", "error", *stamps)


def _frame(rows: list[dict[str, Any]], first: Iterable[str]) -> pd.DataFrame:
    columns = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    return pd.DataFrame(rows, columns=columns)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _text(value: Any) -> str | None:
    return None if value is None else canonical_json(value)
