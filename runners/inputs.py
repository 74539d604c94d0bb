"""The data sets that a trial was trained and evaluated on, as MLflow wants to be told of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runners import corpus
from runners.schema import FOLDER, EvalSlice, Trial, digest

TRAINING, EVALUATION = "training", "evaluation"


@dataclass(frozen=True, slots=True)
class Input:
    """One data set. `source` and `profile` are JSON; `source_type` is MLflow's word for how to read `source`."""

    name: str
    digest: str
    context: str
    source_type: str
    source: str
    profile: str


def inputs(
    trial: Trial, result: Mapping[str, Any] | None, evaluated: Iterable[tuple[EvalSlice, Mapping[str, Any]]]
) -> list[Input]:
    """What is known by now: a made task when training begins, a text when its bytes were read.

    `evaluated` are slices with their committed evaluation. A made task is known by its settings; a text by its bytes.
    """
    found = []
    if trial.train is not None:
        content = _content(trial.task, result, digest({"training": trial.task}))
        found += [_input(trial.task, _title(trial.task), content, TRAINING)] if content else []
    for part, row in evaluated:
        name = " ".join(filter(None, [_title(part.task), part.set, part.label]))
        content = _content(part.task, row, part.id)
        found += [_input(part.task, name, content, EVALUATION)] if content else []
    return found


def _content(task: Mapping[str, Any], row: Mapping[str, Any] | None, made: str) -> str | None:
    """`made`, the digest of a task that is made; of a text the digest in the stamp of what read it."""
    if not corpus.has_text(task):
        return made
    told = (row or {}).get("stamp", {}).get("data")
    return str(told) if told else None


def _title(task: Mapping[str, Any]) -> str:
    """`mqar`, or `text wikitext-103`."""
    told = task.get("dataset") or task.get("data_files") or ""
    return " ".join(filter(None, [str(task["name"]), str(told).rsplit("/", 1)[-1]]))


def _input(task: Mapping[str, Any], name: str, content: str, context: str) -> Input:
    if task.get("dataset"):
        kind, source = "hugging_face", {"path": task["dataset"], "split": task.get("split")}
    elif task.get("data_files"):
        kind, source = "local", {"uri": str(task["data_files"])}
    else:
        kind, source = "code", {"tags": {"mlflow.source.name": f"runners/tasks/{task['name']}.py"}}
    profile = {key: value for key, value in task.items() if key != FOLDER and value is not None}
    return Input(name[:500], content[:36], context, kind, json.dumps(source), json.dumps(profile))
