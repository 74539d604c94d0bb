"""A store with made-up results, written as workers write it: for tests of everything that reads one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runners import store as stores
from runners.schema import EvalSlice, Member, Pair, Plan, Test, Trial, digest

ARMS: dict[str, dict[str, Any]] = {
    "softmax": {"name": "softmax"},
    "linear": {"name": "linear"},
    "hola, residual": {"name": "hola", "cache": 16, "admission": "residual"},
    "hola, recency": {"name": "hola", "cache": 16, "admission": "recency"},
}
SKILL = {"softmax": 0.97, "linear": 0.35, "hola, residual": 0.9, "hola, recency": 0.84}
STATE = {"softmax": 512, "linear": 16384, "hola": 24576}
TASKS = ({"seq_len": 32, "n_pairs": 4}, {"seq_len": 64, "n_pairs": 16})
STAMP = {
    "memsweep": "2026.12.0",
    "commit": "0123abc",
    "python": "3.11.7",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "device": "cpu",
    "dtype": "fp32",
    "fingerprint": "f00d",
}


def make_plan(
    seeds: int = 3,
    *,
    tests: bool = True,
    margin: float | None = None,
    grid: tuple[int, ...] = (),
    tasks: Sequence[dict[str, int]] = TASKS,
) -> Plan:
    """A plan like the capacity sweep's. `grid` adds an evaluation set `load` over these numbers of pairs."""
    members = [_member(arm, task, seed, grid) for arm in ARMS for task in tasks for seed in range(seeds)]
    found = (_test("test", members, margin),) if tests else ()
    if tests and grid:
        found += (_test("load", members, margin),)
    return Plan(
        sweep="capacity",
        question="Which mechanism keeps the most key-value pairs per byte of state?",
        spec={"sweep": "capacity", "seeds": seeds, "margin": margin},
        source="sweep: capacity\n",
        members=tuple(members),
        tests=found,
        metrics={"accuracy": "max", "loss": "min"},
        resources={},
        retry={},
        bounds={"accuracy": [0.0, 1.0]},
    )


def _member(arm: str, task: dict[str, int], seed: int, grid: tuple[int, ...]) -> Member:
    mechanism = ARMS[arm]
    settings = {"name": "mqar", "vocab_size": 512, **task}
    chance = {"accuracy": 2 / 512, "loss": math.log(512)}
    slices = [EvalSlice(digest(settings), "test", settings, {}, chance)]
    for n_pairs in grid:
        at = {**settings, "seq_len": 4 * n_pairs, "n_pairs": n_pairs}
        slices.append(EvalSlice(digest(at), "load", at, {"task.n_pairs": n_pairs}, chance))
    model, train = {"d_model": 64, "n_layers": 2}, {"steps": 200, "batch_size": 32}
    blocks = {"mechanism": mechanism, "task": settings, "model": model, "train": train}
    trial = Trial(digest([seed, blocks]), seed, mechanism, settings, model, train)
    varying: dict[str, Any] = {"mechanism": mechanism["name"]}
    if "admission" in mechanism:
        varying["mechanism.admission"] = mechanism["admission"]
    varying |= {f"task.{name}": value for name, value in task.items()}
    state = STATE[mechanism["name"]] * (task["seq_len"] if mechanism["name"] == "softmax" else 1)
    cell = " · ".join([mechanism["name"], *(f"{p.rsplit('.', 1)[-1]} {v}" for p, v in list(varying.items())[1:])])
    return Member(trial, mechanism["name"], cell, varying, state, tuple(slices))


def _test(name: str, members: list[Member], margin: float | None) -> Test:
    sides: dict[str, dict[tuple[str, int], Member]] = {"residual": {}, "recency": {}}
    for member in members:
        side = member.varying.get("mechanism.admission")
        if side:
            block = f"seq_len {member.trial.task['seq_len']}, n_pairs {member.trial.task['n_pairs']}"
            sides[side][block, member.trial.seed] = member
    pairs = tuple(Pair(*key, (sides["residual"][key].trial.id,), (b.trial.id,)) for key, b in sides["recency"].items())
    ids = tuple(dict.fromkeys(s.id for m in members for s in m.slices if s.set == name))
    return Test(
        name=f"admission residual vs admission recency ({name})",
        a="admission residual",
        b="admission recency",
        set=name,
        metric="accuracy",
        direction="max",
        bounded=True,
        scale="difference",
        margin=margin,
        step=None,
        slices=ids,
        pairs=pairs,
        unpaired_a=0,
        unpaired_b=0,
    )


def family(member: Member) -> str:
    """The key of ARMS that made the member."""
    admission = member.varying.get("mechanism.admission")
    return f"{member.arm}, {admission}" if admission else member.arm


def accuracy(member: Member, n_pairs: int) -> float:
    """A made-up score: skill falls with load, and seeds differ."""
    generator = np.random.default_rng([member.trial.seed, n_pairs, len(family(member))])
    skill = SKILL[family(member)] - (1 - SKILL[family(member)]) * 0.4 * math.log2(n_pairs / 4)
    return float(np.clip(skill + generator.normal(0, 0.02), 0.01, 1.0))


def fill(root: Path, plan: Plan, *, skip: int = 0) -> stores.Store:
    """Write a finished folder for every member of `plan` but the last `skip`, and freeze the plan."""
    store = stores.Store.create(root)
    store.freeze(plan)
    for member in plan.members[: len(plan.members) - skip]:
        finish(store, member)
    return store


def finish(store: stores.Store, member: Member, *, stamp: dict[str, Any] | None = None) -> None:
    """Write the folder of a complete trial: settings, curve, evaluations, result."""
    folder = store.trial_folder(member.trial.id)
    stores.write_json(folder / "settings.json", member.trial.settings(), durable=False)
    final = accuracy(member, member.trial.task["n_pairs"])
    lines = []
    for step in range(0, 201, 20):
        done = 1 - math.exp(-step / 50)
        metrics = {"train/loss": math.log(512) * (1 - 0.9 * done * final), "valid/accuracy": final * done}
        lines.append(f'{{"step": {step}, "metrics": {str(metrics).replace(chr(39), chr(34))}}}')
    stores.write_text(folder / "metrics" / "0-200.jsonl", "\n".join(lines) + "\n", durable=False)
    for piece in member.slices:
        score = accuracy(member, piece.task["n_pairs"])
        metrics = {"accuracy": score, "loss": 6.2 * (1 - score), "n": 1000}
        _seal(
            folder / "evals" / f"{piece.id}.json",
            member,
            {"slice": piece.id, "task": piece.task, "metrics": metrics, "stamp": stamp or STAMP},
        )
    _result(folder, member, "complete", {"train/loss": 0.1, "valid/accuracy": final}, stamp or STAMP)


def diverge(store: stores.Store, member: Member) -> None:
    """Write the folder of a trial that diverged at step 60."""
    _result(store.trial_folder(member.trial.id), member, "diverged", {}, STAMP)


def fail(store: stores.Store, member: Member, message: str = "ValueError: no such thing") -> None:
    """Write the folder of a trial whose second attempt failed."""
    for attempt, text in ((1, "MemoryError\n"), (2, f"Traceback (most recent call last):\n  ...\n{message}\n")):
        path = store.trial_folder(member.trial.id) / "attempts" / str(attempt) / "error.txt"
        stores.write_text(path, text, durable=False)


def _result(folder: Path, member: Member, status: str, metrics: dict[str, float], stamp: dict[str, Any]) -> None:
    fields = {
        "status": status,
        "step": 60 if status == "diverged" else 200,
        "metrics": metrics,
        "n_params": 123456,
        "tokens": 400000,
        "wall_s": 12.5,
        "stopped_by": "steps",
        "diverged": {"step": 60, "layer": 1} if status == "diverged" else None,
        "peak_mem_bytes": 10**8,
        "stamp": stamp,
    }
    _seal(folder / "result.json", member, fields)


def _seal(path: Path, member: Member, fields: dict[str, Any]) -> None:
    body = {"schema": 1, "trial": member.trial.id, "attempt": 1, **fields}
    stores.write_json(path, stores.seal(body), durable=False)


def without(plan: Plan, **changes: Any) -> Plan:
    """The plan with some fields replaced."""
    return replace(plan, **changes)
