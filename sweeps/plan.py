"""Spec -> plan: everything a launch and a report need, and nothing of the YAML it came from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from runners.schema import Member, Plan, Search, Searched, Trial, UserError
from sweeps import conditions
from sweeps.catalog import Catalog
from sweeps.compare import Comparer
from sweeps.conditions import MISSING, Universe
from sweeps.expand import Cell, Expander, identify
from sweeps.parse import Reader
from sweeps.patch import assemble
from sweeps.reader import Problems, SpecError, read_text
from sweeps.searches import Searches
from sweeps.slices import Evaluation

__all__ = ["SpecError", "load", "not_there_yet", "select"]


def load(
    spec: str,
    *,
    profile: str | None = None,
    sets: list[str] | None = None,
    only: str | None = None,
    catalog: Catalog | None = None,
) -> Plan:
    """The plan of a spec file (a path, or the name of a shipped spec).

    Raises `SpecError` with everything that is wrong, or `UserError` for a file, a profile or a `--set` that is not
    there. `only` is checked here and applied by `select`: it changes neither ids nor plan.
    """
    catalog = catalog or Catalog()
    problems = Problems()
    assembled = assemble(spec, profile, sets or [])
    reader = Reader(assembled, catalog, problems)
    read = reader.read()
    if not reader.is_sound:
        problems.check()
    expander = Expander(read, catalog, problems, assembled.is_patched, assembled.folders)
    expansion = expander.expand()
    if not expansion.cells:
        problems.check()
    searches = Searches(reader, read).add(expansion.cells)
    trials = identify(expansion.cells, read.seeds, problems)
    before = len(problems)
    evaluation = Evaluation(reader, expander.resolver, expansion.cells, assembled.is_patched)
    for cell in expansion.cells:
        cell.slices = evaluation.slices(cell)
    if not reader.is_sound or len(problems) > before:
        problems.check()  # what is wrong with a slice would be told again by each comparison on it
    tests = Comparer(expansion, evaluation, catalog, assembled.is_patched).tests(assembled.tree.get("compare"))
    _note_searches(read.search, searches, expansion.cells, problems)
    _note_unevaluated(expansion.cells, problems)
    problems.check()
    plain = {key: node.plain() for key, node in assembled.tree.value.items() if key != "profiles"}
    plan = Plan(
        sweep=read.name,
        question=read.question,
        spec=plain,
        source=assembled.text,
        members=tuple([_member(cell, seed, trial) for cell, seed, trial in trials]),
        tests=tests,
        metrics=_of_tasks("METRICS", expansion.cells, evaluation),
        bounds=_of_tasks("BOUNDS", expansion.cells, evaluation),
        resources=read.resources,
        retry=read.retry,
        budget=read.budget,
        notes=tuple(problems.notes),
        searches=searches,
    )
    if only is not None:
        select(plan, only)
    return plan


def _member(cell: Cell, seed: int, trial: str) -> Member:
    blocks = cell.blocks
    train = blocks.get("train")
    settings = Trial(
        trial,
        seed,
        blocks["mechanism"].settings,
        blocks["task"].settings,
        blocks["model"].settings,
        train.settings if train is not None else None,
    )
    searched = Searched(cell.search.key, slot=trial) if cell.search is not None else None
    return Member(settings, cell.arm, cell.name, cell.varying, cell.state_bytes, cell.slices, searched)


def _of_tasks(literal: str, cells: list[Cell], evaluation: Evaluation) -> dict[str, Any]:
    """What every task of the sweep, trained or evaluated, says of its metrics."""
    blocks = {id(cell.blocks["task"].block): cell.blocks["task"].block for cell in cells}
    blocks |= {id(task.block): task.block for task in evaluation.resolved.values()}
    found: dict[str, Any] = {}
    for block in blocks.values():
        found.update(block.literals.get(literal, {}))
    return found


def _note_searches(search: dict[str, Any], searches: tuple[Search, ...], cells: list[Cell], problems: Problems) -> None:
    paths = {path: None for one in searches for path in one.space}
    for path in search:
        if cells and path not in paths:
            problems.note(f"search: {path} is given in every arm, so nothing is searched")
    for one in searches:
        if one.is_same:
            problems.note("search.seeds: same: winners are selected on the seeds they are reported on; marked so")
            break


def _note_unevaluated(cells: list[Cell], problems: Problems) -> None:
    bare = [cell.name for cell in cells if not cell.slices]
    if bare:
        problems.note(f"{len(bare)} cells have no evaluation, as {bare[0]}: no set's `if` matches them")


def not_there_yet(plan: Plan, catalog: Catalog | None = None) -> list[str]:
    """What the spec language has and launching has not: one line each, empty if the plan can be launched."""
    found = []
    later = (catalog or Catalog()).block("model").literals.get("NOT_YET", {})
    models = {id(member.trial.model): member.trial.model for member in plan.members}
    for name, values in later.items():
        for model in models.values():
            value = model.get(name)
            value = value.get("name") if isinstance(value, dict) else value
            line = f"model.{name}: {str(value).lower() if isinstance(value, bool) else value}"
            if value in values and line not in found:
                found.append(line)
    return found


def select(plan: Plan, only: str) -> frozenset[str]:
    """Ids of the trials that meet a condition: `mechanism: hola, seed: [0, 1]`, or `mechanism=hola,seed=[0,1]`.

    Raises `SpecError` if it is no condition, or if no trial of the plan can meet it.
    """
    node = read_text(_as_yaml(only), f"--only {only}")
    problems = Problems()
    condition = conditions.read(node, problems, "--only")
    problems.check()
    assert condition is not None
    searched = {search.key: search.space for search in plan.searches}
    flats = {member.trial.id: _flat(member, searched) for member in plan.members}
    Universe(flats.values()).check(condition, problems)
    problems.check()
    found = frozenset(id_ for id_, flat in flats.items() if condition.holds(lambda path, f=flat: f.get(path, MISSING)))  # type: ignore[misc]
    if not found:
        raise UserError(f"--only {only}: no trial meets all of it")
    return found


def _as_yaml(only: str) -> str:
    """A condition of the command line as a YAML mapping: with or without braces, `=` as well as `:`."""
    text = only.strip()
    text = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [re.sub(r"^(\s*[A-Za-z_][\w.]*)\s*=\s*(?=\S)", r"\1: ", part) for part in parts]
    if not all(re.match(r"\s*[\"'A-Za-z_][^:=]*:\s", part) for part in parts):
        raise UserError(
            f"--only {only!r}: write path: value or path=value, several separated by commas, a list of values in "
            "brackets: --only 'mechanism: hola' or --only 'mechanism=hola, seed=[0, 1]'"
        )
    return "{" + ",".join(parts) + "}"


def _flat(member: Member, searched: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """A member's settings by path, as conditions name them; several words for one trial's arms are one value each.

    What is searched (paths by the search's key) has no value before there is a winner.
    """
    found: dict[str, Any] = {"arm": member.arm, "seed": member.trial.seed, "cell": member.cell}
    for kind in ("mechanism", "task", "model", "train"):
        for name, value in (getattr(member.trial, kind) or {}).items():
            if name == "name":
                found[kind] = value
            elif isinstance(value, dict):
                found[f"{kind}.{name}"] = value.get("name")
                found.update({f"{kind}.{name}.{k}": v for k, v in value.items() if k != "name"})
            else:
                found[f"{kind}.{name}"] = value
    if member.is_open and member.searched is not None:
        for path in searched[member.searched.key]:
            found.pop(path, None)
    return found
