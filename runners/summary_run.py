"""The run of a sweep that is no trial: its report, figures and frozen spec, its verdicts as metrics and in words.

It is made with the first report, and again by `sweep sync` from the report that lies in the store. The experiment's
own note says the question and the answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runners import record
from runners.names import to_mlflow
from runners.run_state import FORM, MARK, NOTE, TAG, user
from runners.schema import Plan
from runners.store import Store, read_json
from runners.tracking import command, explain, resolve_uri

OUTCOME_FILE = "report.json"
"""In the folder of a report: what it found, in numbers. See `dashboards/outcome.py`."""
LONGEST = 5000
"""Characters of a tag that every server takes."""


def log_report(store: Store, plan: Plan, revision: int, folder: Path, *, tracking_uri: str | None = None) -> str | None:
    """Put the report in `folder` on the sweep's summary run (made if missing). None, or why it could not be."""
    uri = resolve_uri(store, tracking_uri)
    try:
        client = record.make_client(uri)
        experiment = client.get_experiment_by_name(plan.sweep)
        if experiment is None or experiment.lifecycle_stage == "deleted":
            return f"there is no MLflow experiment {plan.sweep!r}, {command(store, uri, 'sync')} makes it"
        with record.set_up_lock(uri):
            run = _summary_run(client, experiment.experiment_id)
        _send(client, run, plan, revision, folder)
        outcome = read_json(folder / OUTCOME_FILE) or {}
        told = "\n\n".join(filter(None, [plan.question, outcome.get("answer")]))
        client.set_experiment_tag(experiment.experiment_id, NOTE, told[:LONGEST])
    except Exception as error:
        return explain(error, uri, store)
    return None


def _send(client: Any, run: Any, plan: Plan, revision: int, folder: Path) -> None:
    outcome, run_id = read_json(folder / OUTCOME_FILE) or {}, run.info.run_id
    client.log_artifacts(run_id, str(folder), "report")
    client.log_text(run_id, plan.source, "spec/spec.yaml")
    client.log_text(run_id, json.dumps(plan.spec, indent=2, ensure_ascii=False), "spec/resolved.json")
    for name, value in _metrics(outcome):
        if math.isfinite(value) and run.data.metrics.get(name) != value:
            client.log_metric(run_id, name, value, step=revision)
    told = {"revision": str(revision), "spec_hash": plan.spec_hash, "answer": str(outcome.get("answer", ""))}
    told |= {f"verdict.{i}": f"{one['name']}: {one['verdict']}" for i, one in enumerate(outcome.get("verdicts", ()), 1)}
    for name, text in told.items():
        client.set_tag(run_id, TAG + name, text[:LONGEST])
    for name in run.data.tags.keys() - {TAG + name for name in told}:
        if name.startswith(TAG + "verdict."):
            client.delete_tag(run_id, name)
    client.set_tag(run_id, NOTE, _note(plan, outcome)[:LONGEST])
    client.set_terminated(run_id, "FINISHED")
    client.set_tag(run_id, MARK, _mark(revision, folder))  # last: everything before it may be sent again


def _metrics(outcome: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Trials by status, and of every comparison its effect, interval and adjusted p.

    MLflow makes a section of charts for each name before a slash: one, which sorts behind those of the trials.
    """
    for status, n in outcome.get("counts", {}).items():
        yield f"verdict/trials {status}", float(n)
    for one in outcome.get("verdicts", ()):
        name = one["name"].replace("/", " ")
        for key in ("effect", "low", "high", "p_adjusted"):
            if one.get(key) is not None:
                yield to_mlflow(f"verdict/{name} {key}"), float(one[key])


def _note(plan: Plan, outcome: Mapping[str, Any]) -> str:
    """Markdown: the question, the answer, a row for each verdict, what to beware of."""
    parts = [f"**{plan.question}**" if plan.question else "", outcome.get("answer", "")]
    rows = [
        f"| {_cell(one['name'])} | {_cell(one['effect_text'])} | {one['pairs']} | {_cell(one['verdict'])} |"
        for one in outcome.get("verdicts", ())
    ]
    if rows:
        parts.append("\n".join(["| comparison | effect | pairs | verdict |", "|---|---|---|---|", *rows]))
    parts.append("\n".join(f"- {note}" for note in outcome.get("warnings", ())))
    parts.append("The report is below Artifacts: `report/report.html`; the spec is in `spec/`.")
    return "\n\n".join(filter(None, parts))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _mark(revision: int, folder: Path) -> str:
    """What a run says that has this report."""
    return f"{FORM}:{revision}:{hashlib.sha256((folder / 'report.html').read_bytes()).hexdigest()[:16]}"


def _summary_run(client: Any, experiment_id: str) -> Any:
    found = client.search_runs([experiment_id], f"tags.`{TAG}kind` = 'summary'", max_results=1)
    if found:
        return found[0]
    tags = {TAG + "kind": "summary", "mlflow.source.name": "memsweep", "mlflow.source.type": "LOCAL"}
    return client.create_run(experiment_id, tags=tags | {"mlflow.user": user()}, run_name="summary")


def put_report_back(
    store: Store, plan: Plan, revision: int, *, tracking_uri: str | None = None, restore: bool = False
) -> str | None:
    """Hang the report that lies in the store on the summary run, if it has not this one: None, or why it could not be.

    A run that was deleted in the UI stays deleted, unless `restore`.
    """
    folder = store.revision_folder(plan.sweep, revision) / "report"
    uri = resolve_uri(store, tracking_uri)
    if not (folder / "report.html").exists():
        return None
    try:
        client = record.make_client(uri)
        experiment = client.get_experiment_by_name(plan.sweep)
        runs = record.all_runs(client, experiment.experiment_id, f"tags.`{TAG}kind` = 'summary'") if experiment else []
        active = [run for run in runs if run.info.lifecycle_stage == "active"]
        if runs and not active:
            if not restore:
                return None
            client.restore_run(runs[0].info.run_id)
            active = runs[:1]
        if active and active[0].data.tags.get(MARK) == _mark(revision, folder):
            return None
    except Exception as error:
        return explain(error, uri, store)
    return log_report(store, plan, revision, folder, tracking_uri=tracking_uri)


def view_path(store: Store, sweep: str, *, tracking_uri: str | None = None) -> str | None:
    """Where the MLflow UI shows the sweep with its columns chosen: the part of the address after host and port.

    None if the sweep has no experiment there.
    """
    experiment = record.make_client(resolve_uri(store, tracking_uri)).get_experiment_by_name(sweep)
    return f"/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={record.VIEW}" if experiment else None
