"""What there is to sweep over: mechanisms, tasks, model and training, read from source without importing it.

A file's parameters are the keyword-only arguments of its class (`Mixer`, `Task`, `Model`, `Train`), their meaning
stands in the class docstring, and literals beside the class give the rules between them. Reading takes milliseconds;
importing would take seconds, because every such file imports torch.

Literals: REVISION, STATE, CACHE, PARAMS (parameters of a mixer, or of the parts of the model), LIMITS, INERT (when a
parameter has no effect), CAPS (a value above this one acts as this one; in order, each formula reads what is capped
before it), SAME_AS (mechanisms), METRICS, BOUNDS, CHANCE, SELECT, TRAINS, EVALUATES (the task whose models it is for:
then it stands in `evaluate` alone), LABELS (labelled positions of a row), PATCHES (`features` of a patch and `outputs`
of an answer: a task of images), NEEDS (modules and the extras that bring them) (tasks), BLOCKS (classes that may hold
LIMITS), LAYER (what a layer may be besides a mechanism), NOT_YET, SAME_STREAMS (parameters that change neither
training rows nor initial weights) (model), OWNERS (parameters of which at most one is given, the others follow),
DERIVED (what a parameter that is none stands for).

A task's parameter called `X_files` names files (`sweeps/files.py`); its LIMITS may read how long they are, `X_bytes`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from runners import syntax
from runners.schema import FILES, UserError
from sweeps import formula, types
from sweeps.reader import near
from sweeps.types import Type

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()
"""The default of a parameter that has none."""

KINDS = {
    "mechanism": ("mechanisms", "Mixer"),
    "task": ("runners/tasks", "Task"),
    "model": ("runners/model.py", "Model"),
    "train": ("runners/train.py", "Train"),
}


@dataclass(frozen=True, slots=True)
class Param:
    """One YAML parameter. `keys` are the types inside the mappings of a `list[dict]`, where the file declares them."""

    name: str
    type: Type
    default: Any
    meaning: str
    keys: Mapping[str, Type] | None = None

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


@dataclass(frozen=True, eq=False)
class Block:
    """One mechanism, task, model, training or sub-block of the model: its parameters and its rules."""

    kind: str
    name: str
    params: dict[str, Param]
    literals: dict[str, Any]
    summary: str
    doc: str
    path: str
    blocks: dict[str, dict[str, Block]] = field(default_factory=dict)

    @property
    def revision(self) -> int:
        return self.literals.get("REVISION", 1)

    @property
    def trains(self) -> bool:
        return self.literals.get("TRAINS", True)

    @property
    def evaluates(self) -> str | None:
        """The task whose trained models this one evaluates, and is for nothing else."""
        return self.literals.get("EVALUATES")

    @property
    def source(self) -> str:
        """The work that the section `Source` of the docstring names first; empty without one."""
        text = " ".join(self.doc.partition("\nSource\n")[2].split())
        found = re.match(r".{0,140}?arXiv [\d.]+(v\d+)?\)|[^:;.]*", text)
        return found[0] if found else ""

    @cached_property
    def own_limits(self) -> tuple[str, ...]:
        """The rules that read this block's parameters alone."""
        return tuple(rule for rule in self.literals.get("LIMITS", []) if formula.names(rule) <= self.params.keys())

    @cached_property
    def outer_limits(self) -> tuple[str, ...]:
        """The rules that read other blocks' parameters too."""
        return tuple(rule for rule in self.literals.get("LIMITS", []) if rule not in self.own_limits)

    @cached_property
    def limits(self) -> tuple[str, ...]:
        return self.own_limits + self.outer_limits

    @cached_property
    def derived(self) -> dict[str, str]:
        return dict(self.literals.get("DERIVED", {}))

    @cached_property
    def owners(self) -> list[list[str]]:
        """Groups of parameters of which one owns the others."""
        return [[name for name in group if name in self.params] for group in self.literals.get("OWNERS", [])]

    @cached_property
    def owned(self) -> frozenset[str]:
        return frozenset(name for group in self.owners for name in group)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The parameters whose values name files."""
        return tuple(name for name in self.params if name.endswith(FILES))

    @property
    def title(self) -> str:
        """`mechanism hola`, `train`: how messages call it."""
        return self.kind if self.kind in ("model", "train") else f"{self.kind} {self.name}"

    def state_elements(self, values: Mapping[str, Any]) -> tuple[int, int]:
        """Elements one layer carries for one sequence: (kept in fp32, kept in the activations' dtype)."""
        state, cache = (formula.evaluate(str(self.literals.get(name, "0")), values) for name in ("STATE", "CACHE"))
        return int(state), int(cache)


class Catalog:
    """The blocks below one root folder, each read on first use."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(__file__).resolve().parent.parent
        self._blocks: dict[tuple[str, str], Block] = {}
        self._names: dict[str, list[str]] = {}

    def names(self, kind: str) -> list[str]:
        """The names of all mechanisms or tasks: a file's name is its key."""
        if kind not in self._names:
            folder = self.root / KINDS[kind][0]
            self._names[kind] = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
        return self._names[kind]

    def block(self, kind: str, name: str = "") -> Block:
        """One block. Raises `UserError` with the nearest name if there is none, or if its file breaks the contract."""
        if (kind, name) not in self._blocks:
            where, class_name = KINDS[kind]
            if kind in ("mechanism", "task"):
                if name not in self.names(kind):
                    raise UserError(f"there is no {kind} {name!r}{near(name, self.names(kind))}")
                where = f"{where}/{name}.py"
            self._blocks[kind, name] = _read(self.root / where, where, kind, name or kind, class_name)
        return self._blocks[kind, name]


def _read(path: Path, shown: str, kind: str, name: str, class_name: str) -> Block:
    try:
        tree = syntax.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{shown} is missing: this installation is incomplete") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{shown} cannot be read: {error}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        raise UserError(f"{shown} has no class {class_name}: a {kind} file defines one")
    literals = _literals(tree, shown)
    doc = ast.get_docstring(tree) or ""
    params = _params(classes[class_name], literals, shown)
    blocks: dict[str, dict[str, Block]] = {}
    for param, options in literals.get("BLOCKS", {}).items():
        blocks[param] = {}
        for option, option_class in options.items():
            if option_class not in classes:
                raise UserError(f"{shown}: BLOCKS names the class {option_class}, which is not there")
            node = classes[option_class]
            own, rules = _params(node, {}, shown), _literals(node, shown)
            text = ast.get_docstring(node) or ""
            blocks[param][option] = Block(param, option, own, rules, _first_line(text), text, shown)
    return Block(kind, name, params, literals, _first_line(doc), doc, shown, blocks)


def _first_line(doc: str) -> str:
    return doc.strip().split("\n\n")[0].replace("\n", " ")


def _literals(tree: ast.Module | ast.ClassDef, shown: str) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id.isupper():
            try:
                found[target.id] = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError):
                continue  # a constant of the code's own, not one of the catalogue's literals
    for name in ("LIMITS", "INERT", "CAPS", "SAME_AS", "CHANCE", "DERIVED", "PARAMS", "LABELS", "PATCHES"):
        rules = found.get(name, [])
        rules = [rules] if isinstance(rules, str) else rules
        for rule in rules.values() if isinstance(rules, dict) else rules:
            try:
                formula.parse(str(rule))
            except ValueError as error:
                raise UserError(f"{shown}: {name}: {error}") from error
    return found


def _params(node: ast.ClassDef, literals: dict[str, Any], shown: str) -> dict[str, Param]:
    init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    if init is None:
        return {}
    meanings = _meanings(ast.get_docstring(node) or "")
    found: dict[str, Param] = {}
    for arg, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        try:
            if arg.annotation is None:
                raise ValueError("it has no annotation")
            kind = types.from_annotation(arg.annotation)
            value = REQUIRED if default is None else ast.literal_eval(default)
        except ValueError as error:
            raise UserError(f"{shown}:{arg.lineno}: parameter {arg.arg}: {error}") from error
        value = float(value) if type(value) is int and "float" in kind.scalars and "int" not in kind.scalars else value
        value = list(value) if isinstance(value, tuple) else value
        found[arg.arg] = Param(arg.arg, kind, value, meanings.get(arg.arg, ""))
    for name, param in found.items():
        inside = literals.get(name.removesuffix("s").upper())
        if param.type.item == "dict" and isinstance(inside, list):
            keys = {key: found[key].type for key in inside if key in found}
            found[name] = Param(name, param.type, param.default, param.meaning, keys)
    return found


def _meanings(doc: str) -> dict[str, str]:
    """The lines `name: meaning` of a docstring, with their continuation lines."""
    found: dict[str, str] = {}
    last, indent = "", 0
    for line in doc.splitlines():
        start = re.match(r"(\s*)(\w+): +(\S.*)", line)
        if start and (not last or len(start[1]) <= indent):
            last, indent = start[2], len(start[1])
            found[last] = start[3].strip()
        elif last and line.strip() and len(line) - len(line.lstrip()) > indent:
            found[last] += " " + line.strip()
        else:
            last = ""
    return found


def with_derived(block: Block, values: Mapping[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a block with every parameter that is none and has a DERIVED formula filled in, where it can be.

    `around` are the values of other blocks that a formula may read.
    """
    filled = dict(values)
    for _ in range(2):  # a formula may read another's result, whichever stands first
        for name, text in block.derived.items():
            if filled.get(name) is None and name in filled:
                try:
                    filled[name] = formula.evaluate(text, {**around, **filled})
                except UserError:
                    continue
    return filled
