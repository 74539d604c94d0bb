"""What a run in MLflow has, and what it should say about one trial: pure reading of the plan, ledger and folder."""

from __future__ import annotations

import base64
import getpass
import json
import math
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runners import checkpoints
from runners.inputs import Input, inputs
from runners.ledger import Row
from runners.names import cut, to_mlflow
from runners.schema import EvalSlice, Member, Plan, Status, canonical_json, digest
from runners.store import Store, generation

TAG = "memsweep."
MARK = TAG + "sent"
NOTE = "mlflow.note.content"
FORM = 2
"""Of what is sent; raised, `sweep sync` brings runs of an older form up to date."""


class State:
    """What a run should say about one member now."""

    def __init__(self, store: Store, member: Member, row: Row, slices: set[str], sweeps: list[str]) -> None:
        self.member, self.row, self.status, self._store = member, row, row.status, store
        self.folder = store.trial_folder(member.trial.id)
        self._slices = sorted({part.id for part in member.slices} & slices)
        self._sweeps = sweeps
        # Also of a trial that is evaluated now, or failed in it: its curves are whole.
        self._result = store.result(member.trial.id)
        found = checkpoints.steps(self.folder / "checkpoints") if self._result is None else []
        self.step: int | None = self._result["step"] if self._result else (found[-1] if found else None)
        facts = [FORM, row.status, row.attempt, row.error, self._slices, sweeps, member.arm, member.cell]
        if member.searched is not None:
            facts += [member.role, member.searched.number]
        self.mark = f"{-1 if self.step is None else self.step}:{digest(facts)}"

    @property
    def generation(self) -> int:
        """Points of two generations do not belong on one curve."""
        return generation(self.folder)

    @property
    def name(self) -> str:
        member = self.member
        if member.role == "search" and member.searched is not None:
            return f"{member.cell} suggestion={member.searched.number} seed={member.trial.seed}"
        return f"{member.cell} seed={member.trial.seed}"

    @property
    def started_ms(self) -> int:
        return _mtime_ms(self.folder / "settings.json") or int(time.time() * 1000)

    @property
    def ended_ms(self) -> int | None:
        times = [self.folder / "result.json", *(self.folder / "evals" / f"{part}.json" for part in self._slices)]
        times.append(self.folder / "attempts" / str(self.row.attempt) / "outcome.json")
        return max((moment for path in times if (moment := _mtime_ms(path))), default=None)

    def first_tags(self) -> dict[str, str]:
        member = self.member
        return {
            TAG + "kind": "trial",
            TAG + "trial_id": member.trial.id,
            TAG + "store": self._store.uuid,
            TAG + "generation": str(self.generation),
            "mlflow.source.name": "memsweep",
            "mlflow.source.type": "LOCAL",
            "mlflow.user": user(),
        }

    def tags(self) -> dict[str, str]:
        member, row = self.member, self.row
        tags = {"status": row.status.value, "arm": member.arm, "cell": member.cell, "seed": str(member.trial.seed)}
        tags |= {"attempt": str(row.attempt), "shared": ", ".join(self._sweeps) if len(self._sweeps) > 1 else ""}
        tags |= {"role": member.role} if member.searched is not None else {}
        tags |= {"failure": row.failure or "", "error": (row.error or "")[:1000]}
        finals = self._finals()
        odd = sorted(name for name, value in finals.items() if not math.isfinite(value))
        tags["not_finite"] = ", ".join(odd)[:1000]
        found = {TAG + name: value for name, value in tags.items()} | {NOTE: self._note()}
        found |= cut({**finals, **dict.fromkeys(member.varying)})
        if self._result:
            stamp = self._result["stamp"]
            found |= {TAG + name: str(stamp[name]) for name in ("device", "fingerprint", "memsweep") if stamp.get(name)}
            tried = ", ".join(map(str, self._result.get("oom_at") or ()))
            found[TAG + "oom_at_rows"] = tried
            if stamp.get("commit"):
                found["mlflow.source.git.commit"] = stamp["commit"].removesuffix("+changed")
        return found

    def _note(self) -> str:
        """What the run's page opens with."""
        member, row = self.member, self.row
        lines = [f"Trial `{member.trial.id}`: {self.name}, {row.status.value}."]
        lines.append(f"State of one sequence: {member.state_bytes:,} bytes.")
        if row.error:
            lines.append(f"Attempt {row.attempt} failed: `{row.error[:500].replace('`', '´')}`")
        return "\n\n".join(lines)

    def params(self) -> dict[str, str]:
        """What varies first, by its short name where that is clear, then every setting by its path."""
        member = self.member
        params = {"arm": member.arm, "seed": str(member.trial.seed)}
        params |= {to_mlflow(path): _param_value(value) for path, value in member.varying.items()}
        if member.searched is not None:
            params["suggestion"] = str(member.searched.number)
        for path, value in _flat(member.trial.settings()):
            if path not in ("id", "seed"):
                params.setdefault(to_mlflow(path), _param_value(value))
        return params

    def final_metrics(self) -> dict[str, float]:
        """What the run ends with, by the names that MLflow takes: numbers only, as NaN and infinity break its pages."""
        return {to_mlflow(name): value for name, value in self._finals().items() if math.isfinite(value)}

    def inputs(self) -> list[Input]:
        """The data sets that it was trained and evaluated on."""
        known = ((part, self._store.evaluation(self.member.trial.id, part.id)) for part in self.member.slices)
        return inputs(self.member.trial, self._result, [(part, row) for part, row in known if row])

    def _finals(self) -> dict[str, float]:
        """Size, cost and scores; the mean of a set and each of its slices."""
        metrics: dict[str, float] = {"state_bytes": float(self.member.state_bytes)}
        if self._result is None:
            return metrics
        for name in ("n_params", "tokens", "wall_s", "peak_mem_bytes", "micro_batch"):
            if self._result.get(name) is not None:
                metrics[name] = float(self._result[name])
        sets: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        for part in self.member.slices:
            sizes[part.set] = sizes.get(part.set, 0) + 1
            for name, value in self._scores(part).items():
                sets.setdefault(f"{part.set}/{name}", []).append(value)
                if part.label:
                    metrics[f"{part.set}/{name}/{part.label}"] = value
        # A mean over some of the slices would look like the mean over all.
        whole = {n: v for n, v in sets.items() if len(v) == sizes[n.partition("/")[0]]}
        return metrics | {name: sum(values) / len(values) for name, values in whole.items()}

    def _scores(self, part: EvalSlice) -> dict[str, float]:
        if self.status == Status.DIVERGED:
            return dict(part.chance)
        row = self._store.evaluation(self.member.trial.id, part.id) if part.id in self._slices else None
        return {name: value for name, value in row["metrics"].items() if name != "n"} if row else {}


class Run:
    """What a run on the server has."""

    def __init__(self, run_id: str, *, status: str = "RUNNING", deleted: bool = False, gone: bool = False) -> None:
        self.id, self.status, self.deleted, self.gone = run_id, status, deleted, gone
        self.mark = ""
        self.generation = 0
        self.params: dict[str, str] = {}
        self.latest: dict[str, float] = {}
        self.tags: set[str] = set()
        self.inputs: set[tuple[str, str]] = set()
        """Name and digest of each data set."""
        self.steps: dict[str, set[int]] = {}
        self.has_past = False
        """Whether the server may have points that `steps` does not tell."""

    def forget(self) -> None:
        self.steps, self.has_past = {}, True

    @classmethod
    def read(cls, run: Any) -> Run:
        found = cls(run.info.run_id, status=run.info.status, deleted=run.info.lifecycle_stage == "deleted")
        found.mark = run.data.tags.get(MARK, "")
        found.generation = int(run.data.tags.get(TAG + "generation", 0))
        found.params, found.latest = dict(run.data.params), dict(run.data.metrics)
        found.tags = set(run.data.tags)
        told = run.inputs.dataset_inputs if run.inputs else []
        found.inputs = {(one.dataset.name, one.dataset.digest) for one in told}
        found.has_past = True
        return found

    @property
    def sent_step(self) -> int:
        """The last step whose points were sent in full; -1 if none was."""
        head = self.mark.partition(":")[0]
        return int(head) if head.lstrip("-").isdecimal() else -1


def shared_view(plan: Plan) -> str:
    """The UI's table with the columns that matter, in the form that its "share view" keeps: scores, state, what varies.

    Left alone, the table shows no parameter and no metric.
    """
    sets = list(dict.fromkeys(part.set for member in plan.members for part in member.slices))
    scores = [to_mlflow(f"{name}/{metric}") for name in sets for metric in plan.metrics]
    paths = list(dict.fromkeys(path for member in plan.members for path in member.varying))
    columns = ["attributes.`Created`", "attributes.`Duration`"]
    columns += [f"metrics.`{name}`" for name in [*scores[:6], "state_bytes"]]
    columns += [f"params.`{name}`" for name in ["arm", *(to_mlflow(path) for path in paths[:6]), "seed"]]
    state: dict[str, Any] = {"selectedColumns": columns}
    if scores:
        is_max = plan.metrics[scores[0].rpartition("/")[2]] == "max"
        state |= {"orderByKey": f"metrics.`{scores[0]}`", "orderByAsc": not is_max}
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{at}.{key}" if at else str(key))
    else:
        yield at, value


def _param_value(value: Any) -> str:
    """Canonical text; a long one keeps its start and a digest of the whole, so that equal means equal."""
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= 500 else f"{text[:460]}… sha256 {digest(text)}"


def _mtime_ms(path: Path) -> int | None:
    try:
        return int(path.stat().st_mtime * 1000)
    except FileNotFoundError:
        return None


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
