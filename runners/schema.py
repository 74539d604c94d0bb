"""The vocabulary every room shares: what a trial is, what a plan is, what a state is called.

Standard library only, and no effects: anything may import this file, and importing it costs nothing.

Terms
    trial       one training (and its evaluations) with every setting resolved; its id is a hash of those settings
    slice       one evaluation of a trained model on one task setting; its id is a hash of that task setting
    member      a trial as one sweep sees it: which arm, which cell, which slices
    cell        a member without its seed (and without searched values); seeds of a cell are repeats of it
    test        one comparison of a sweep: pairs of trials that share a seed and every setting not under test
    plan        members and tests of one sweep, frozen as a numbered revision at each launch
    search      how the searched values of one cell are found: numbered suggestions, made in rounds
    suggestion  one setting of the searched values; it is trained on the search's own seeds
    slot        a report trial of a searched cell: its id stands for the winner's, until the winner is known
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1
"""Version of every file and table in a store. A newer store is refused, an older one migrated."""

BLOCKS = ("mechanism", "task", "model", "train")
"""The settings that make a trial what it is, besides its seed."""

FILES = "_files"
"""How the name of a task's parameter ends whose value names files. Rules may read their size: data_bytes."""
FOLDER = "folder"
"""In a task's settings beside such parameters: where their relative paths begin. A place, no setting: it is in no id,
no random stream and no comparison of settings."""


class Status(StrEnum):
    """Where a trial stands. `interrupted` is also how `running` reads once its lease has expired."""

    PLANNED = "planned"
    RUNNING = "running"
    COMPLETE = "complete"
    DIVERGED = "diverged"
    PRUNED = "pruned"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def is_done(self) -> bool:
        """Nothing is left to run: the trial ended by its own rules, well or badly."""
        return self in (Status.COMPLETE, Status.DIVERGED, Status.PRUNED)


class Failure(StrEnum):
    """Why a trial failed. `oom` may be retried smaller, `infra` as it is, `error` needs a person."""

    OOM = "oom"
    ERROR = "error"
    INFRA = "infra"


class Exit:
    """Exit codes of the command line."""

    OK = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    STOPPED = 4
    INTERRUPTED = 130


class UserError(Exception):
    """Something the user can mend. Printed as it is, without a traceback.

    `exit_code` is `Exit.USAGE` for a wrong spec or command line and `Exit.ENVIRONMENT` for a machine that
    cannot run it.
    """

    def __init__(self, message: str, exit_code: int = Exit.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Finding:
    """One thing that `sweep doctor` looked at. `level` is ok, note or problem."""

    level: str
    what: str
    remedy: str = ""


def normal(value: Any) -> Any:
    """`value` in its one canonical form: text NFC, -0.0 as 0.0, tuples as lists; NaN and infinity are refused."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no canonical form")
        return value + 0.0
    if isinstance(value, Mapping):
        return {normal(k): normal(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [normal(v) for v in value]
    return value


def canonical_json(value: Any) -> str:
    """The one text of a value: sorted keys, no spaces, UTF-8 as it is. Equal values give equal text everywhere."""
    return json.dumps(normal(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any, length: int = 16) -> str:
    """The first `length` hex digits of SHA-256 over `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def trial_ids(texts: Mapping[str, str], seeds: Iterable[int]) -> Iterator[str]:
    """The id of a trial at each seed. `texts` is the canonical JSON of its blocks, minus defaults, plus REVISION."""
    start = hashlib.sha256(f'{{"mechanism":{texts["mechanism"]},"model":{texts["model"]},"seed":'.encode())
    end = f',"task":{texts["task"]},"train":{texts.get("train", "null")}}}'
    for seed in seeds:
        whole = start.copy()
        whole.update(f"{seed}{end}".encode())
        yield whole.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Trial:
    """One training, every setting resolved and every default written out.

    `id` is a digest of the seed and the blocks minus each parameter that equals its declared default, plus each
    block's REVISION; the planner computes it. `train` is None for a task that has nothing to train.
    """

    id: str
    seed: int
    mechanism: dict[str, Any]
    task: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any] | None

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of the mechanism and the task, and of whatever layers of the model hold beside the mechanism (a Memory
        Lobe is exact linear attention)."""
        entries = [entry if isinstance(entry, str) else entry["name"] for entry in self.model.get("layers") or ()]
        entries += ["ela"] if self.model.get("lobe") not in (None, "none") else []
        return (self.mechanism["name"], self.task["name"], *sorted(set(entries) - {"mechanism"}))

    def settings(self) -> dict[str, Any]:
        """The trial as plain JSON values: the content of its `settings.json`."""
        return {"id": self.id, "seed": self.seed, **{block: getattr(self, block) for block in BLOCKS}}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Trial:
        return cls(settings["id"], settings["seed"], *(settings[block] for block in BLOCKS))


@dataclass(frozen=True, slots=True)
class EvalSlice:
    """One evaluation: the trained model on `task` (resolved in full), counted under the set's name.

    `id` is `digest(task)` with the task's REVISION, so two sweeps that ask for the same slice share its result.
    `at` holds the paths that the evaluation grid wrote ({"task.seq_len": 1024}; empty for a set without a grid).
    `chance` is the score of guessing, by metric; a diverged trial scores it.
    """

    id: str
    set: str
    task: dict[str, Any]
    at: dict[str, Any] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`seq_len-1024/n_pairs-64`: the metric-name suffix of this slice; empty without a grid."""
        return "/".join(f"{path.rsplit('.', 1)[-1]}-{value}" for path, value in self.at.items())


@dataclass(frozen=True, slots=True)
class Space:
    """What a searched value is drawn from. `values` are the choices, or [low, high] (both included).

    `kind` is values, uniform, log_uniform (of logarithms), int_uniform or log_int_uniform (whole numbers).
    """

    kind: str
    values: tuple[Any, ...]

    @property
    def size(self) -> float:
        """How many different values there are; infinite for real numbers."""
        if self.kind == "values":
            return len(self.values)
        return self.values[1] - self.values[0] + 1 if "int" in self.kind else math.inf


@dataclass(frozen=True, slots=True)
class Search:
    """How the searched values of one cell are found.

    `key` is a digest of all that decides the suggestions: the cell's settings, the spaces, the sampler, the search
    seeds and what selects. `trials` (how many suggestions in all), `parallel` and `prune` are not in it: changing them
    goes on with the same search. Two sweeps with the same key share its suggestions.
    """

    key: str
    cell: str
    space: dict[str, Space]
    sampler: str  # tpe | random | grid
    trials: int
    select: tuple[str, ...]
    """Metrics of a suggestion, the first one picks the winner: valid/accuracy, train/loss, state_bytes, n_params."""
    directions: tuple[str, ...]  # "max" | "min", for each of `select`
    chance: dict[str, float]
    """What a diverged run scores, for each of `select` that is measured in training."""
    seeds: tuple[int, ...]
    """What suggestions are trained on; with `is_same` the report's own seeds."""
    is_same: bool
    parallel: int
    prune: dict[str, int] = field(default_factory=dict)
    """{"grace_steps": n, "reduction": n}; empty = nothing is pruned."""

    @property
    def n_trainings(self) -> int:
        """Trainings of all suggestions, at most; with `is_same` the report's are among them."""
        return self.trials * len(self.seeds)


@dataclass(frozen=True, slots=True)
class Rungs:
    """Where a suggestion's training may be cut off: `metric` at the first validation at or after each step of `cuts`.

    It ends as pruned where it is worse than the cut-off there. The cut-offs were fixed before the training began.
    """

    metric: str
    direction: str
    cuts: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Searched:
    """What a member of a searched cell is.

    A report trial has its slot's id in `slot`, and the winning suggestion's `number` and `values` once there is one. A
    training of a suggestion has no `slot`. `is_selected`: the winner was chosen on this very result (seeds: same).
    """

    key: str
    slot: str = ""
    number: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    rungs: Rungs | None = None
    is_selected: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """A trial as one sweep sees it.

    `varying` maps each path that varies in the sweep (axis order; `mechanism` gives the name) to this trial's value,
    where it has one. `state_bytes` is what decoding carries for one sequence of the trial's length, all layers.
    `searched` is None outside searched cells.
    """

    trial: Trial
    arm: str
    cell: str
    varying: dict[str, Any]
    state_bytes: int
    slices: tuple[EvalSlice, ...]
    searched: Searched | None = None

    @property
    def is_open(self) -> bool:
        """A slot whose winner is not known yet: there is nothing to train under its id."""
        return self.searched is not None and bool(self.searched.slot) and self.searched.number is None

    @property
    def role(self) -> str:
        """`search` for a training of a suggestion, else `report`: only those are in tables and comparisons."""
        return "search" if self.searched is not None and not self.searched.slot else "report"

    @property
    def rungs(self) -> Rungs | None:
        return self.searched.rungs if self.searched is not None else None


@dataclass(frozen=True, slots=True)
class Pair:
    """What one pair of a test compares: trial ids, more than one on a side where sub-axes are averaged first."""

    block: str
    seed: int
    a: tuple[str, ...]
    b: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Test:
    """One comparison of a sweep: is side a better than side b on `metric` of evaluation set `set`?

    `set` is an evaluation set, or `valid`/`train` for a training metric (then `slices` is empty and `step` may pick
    the step; None = the last). `slices` are the slice ids averaged with equal weights, by side: they may differ
    between trials (each trial averages those of its own slices that are listed).
    """

    __test__ = False  # not a pytest class

    name: str
    a: str
    b: str
    set: str
    metric: str
    direction: str  # "max" | "min"
    bounded: bool
    scale: str  # "difference" | "ratio"
    margin: float | None
    step: int | None
    slices: tuple[str, ...]
    pairs: tuple[Pair, ...]
    unpaired_a: int
    unpaired_b: int
    at_equal: str | None = None
    """`state_bytes`: side b holds several sizes; each trial of a is compared with b interpolated to its own size."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a launch needs and everything a report needs, and nothing of the YAML it came from."""

    sweep: str
    question: str
    spec: dict[str, Any]
    """The spec after `extends`, profile and `--set`, as plain values."""
    source: str
    """The spec file's own text."""
    members: tuple[Member, ...]
    tests: tuple[Test, ...]
    metrics: dict[str, str]
    """Direction of every metric name of the sweep's tasks: {"accuracy": "max", "loss": "min"}."""
    resources: dict[str, Any]
    retry: dict[str, Any]
    notes: tuple[str, ...] = ()
    bounds: dict[str, list[float]] = field(default_factory=dict)
    """Range of every metric that has one: {"accuracy": [0, 1]}. Intervals are cut to it."""
    budget: dict[str, Any] = field(default_factory=dict)
    """What the sweep may spend: `gpu_hours`, `wall` (seconds), `max_trials`; a missing one is no limit."""
    searches: tuple[Search, ...] = ()

    @property
    def n_trainings(self) -> int:
        """Trainings in all, those of suggestions that are not made yet too."""
        slots = {search.key: 0 for search in self.searches if search.is_same}
        for member in self.members:
            if member.searched is not None and member.searched.key in slots:
                slots[member.searched.key] += 1
        return len(self.members) + sum(s.n_trainings - slots.get(s.key, 0) for s in self.searches)

    @property
    def spec_hash(self) -> str:
        return digest(self.spec)

    def to_lines(self) -> Iterator[str]:
        """The plan as JSON lines: a header, then the searches, the members and the tests."""
        head = {
            "kind": "plan",
            "schema": SCHEMA_VERSION,
            "sweep": self.sweep,
            "question": self.question,
            "spec": self.spec,
            "spec_hash": self.spec_hash,
            "source": self.source,
            "metrics": self.metrics,
            "bounds": self.bounds,
            "resources": self.resources,
            "retry": self.retry,
            **({"budget": self.budget} if self.budget else {}),
            "notes": list(self.notes),
        }
        yield json.dumps(head, ensure_ascii=False)
        for search in self.searches:
            yield json.dumps({"kind": "search", **asdict(search)}, ensure_ascii=False)
        for member in self.members:
            yield json.dumps({"kind": "member", **_member_to_json(member)}, ensure_ascii=False)
        for test in self.tests:
            fields = {name: getattr(test, name) for name in Test.__dataclass_fields__}
            fields["pairs"] = [[p.block, p.seed, p.a, p.b] for p in test.pairs]
            yield json.dumps({"kind": "test", **fields}, ensure_ascii=False)

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Plan:
        """Read what `to_lines` wrote. Raises `UserError` for a plan of a newer schema."""
        head: dict[str, Any] = {}
        members: list[Member] = []
        tests: list[Test] = []
        searches: list[Search] = []
        for line in lines:
            row = json.loads(line)
            kind = row.pop("kind")
            if kind == "plan":
                if row["schema"] > SCHEMA_VERSION:
                    raise UserError(
                        f"this plan has schema {row['schema']}; this memsweep reads up to {SCHEMA_VERSION}: upgrade it",
                        Exit.ENVIRONMENT,
                    )
                head = row
            elif kind == "member":
                members.append(_member_from_json(row))
            elif kind == "search":
                searches.append(_search_from_json(row))
            elif kind == "test":
                pairs = tuple(Pair(block, seed, tuple(a), tuple(b)) for block, seed, a, b in row.pop("pairs"))
                tests.append(Test(**{**row, "slices": tuple(row["slices"]), "pairs": pairs}))
        names = ("sweep", "question", "spec", "source", "metrics", "resources", "retry")
        return cls(
            **{name: head[name] for name in names},
            members=tuple(members),
            tests=tuple(tests),
            notes=tuple(head["notes"]),
            bounds=head.get("bounds", {}),
            budget=head.get("budget", {}),
            searches=tuple(searches),
        )


def _search_from_json(row: Mapping[str, Any]) -> Search:
    space = {path: Space(one["kind"], tuple(one["values"])) for path, one in row["space"].items()}
    lists = {name: tuple(row[name]) for name in ("select", "directions", "seeds")}
    return Search(**{**row, **lists, "space": space})


def _member_to_json(member: Member) -> dict[str, Any]:
    slices = [{name: getattr(s, name) for name in EvalSlice.__dataclass_fields__} for s in member.slices]
    row = {
        "trial": member.trial.settings(),
        "arm": member.arm,
        "cell": member.cell,
        "varying": member.varying,
        "state_bytes": member.state_bytes,
        "slices": slices,
    }
    return row if member.searched is None else row | {"search": member.searched.key}


def _member_from_json(row: Mapping[str, Any]) -> Member:
    slices = tuple(EvalSlice(**s) for s in row["slices"])
    trial = Trial.from_settings(row["trial"])
    searched = Searched(row["search"], slot=trial.id) if "search" in row else None
    return Member(trial, row["arm"], row["cell"], row["varying"], row["state_bytes"], slices, searched)


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is asked to do: bring one trial's folder up to date. Pure data, safe to send to another machine.

    The worker trains if `folder` holds no result yet, then runs each of `slices` that has no result there. It writes
    below `folder` and nowhere else. `device` is "cpu", "cuda" (the card the worker was given) or "cuda:1". `gpu` is
    what the job counts for: cards, or the share of one.
    """

    trial: Trial
    attempt: int
    slices: tuple[EvalSlice, ...]
    folder: str
    device: str
    threads: int
    checkpoint_every_s: float = 60.0
    micro_batch: int | None = None
    """Rows to train at once, after memory ran out at more; None = the whole batch."""
    fresh: bool = False
    """Set aside what is there, which other code made, and train from the start."""
    gpu: float = 0.0
    measure: str = ""
    """What the worker measures of a card: `memory`, or `steps` too; nothing by default."""
    rungs: Rungs | None = None
    """Where the training may be cut off; None = it is trained to its end."""
    workers: int = 1
    """Processes that train it together, each with `threads` threads and, on a card, a card of its own."""
    sharded: bool = False
    """Weights, gradients and moments are cut among them instead of being held by each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `status` is complete, diverged, failed or interrupted; `error` is the last line of a failure.

    `seconds` is the time from the worker's first word to its last; None where that is not known.
    """

    """How a job ended: complete, diverged, pruned, failed or interrupted. `error` is the last line of a failure."""

    trial_id: str
    attempt: int
    status: Status
    failure: Failure | None = None
    error: str | None = None
    micro_batch: int | None = None
    """Of a training that ran out of memory: the rows it held at once."""
    seconds: float | None = None
