"""One operation for `extends`, profiles and `--set`: a patch merged over a spec.

Mappings merge by key, dotted keys count as nested, `null` removes, `key+:` appends to a list, anything else replaces; a
block with another `name` replaces the block. A file on its own is a patch on nothing, so all keys come out in one form:

    task, model, train, ...   nested mappings without dots
    axes, evaluate grids      path -> value, a zip key as `(a, b)`; two zip keys with the same paths are the same key
    search                    path -> distribution
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from runners.schema import UserError
from sweeps import library
from sweeps.reader import Mark, Node, Problems, SpecError, mapping, near, read_file, read_text

MAX_CHAIN = 4
FORMS = {"ref", "match", "required", "logspace", "linspace", "log_uniform", "uniform", "int_uniform", "values"}
SPACES = FORMS - {"ref", "match", "required"}
"""What a searched or generated value is made of: one of these keys and a list."""
NAMED_LEVEL = {"mechanism": 1, "task": 1, "model": 2}
"""How deep below the top a mapping may be a named block: task itself, but mlp inside model."""


def zip_paths(key: str) -> tuple[str, ...] | None:
    """The paths of a zip key `(a, b)` in its own order; None for any other key."""
    if key.startswith("(") and key.endswith(")"):
        return tuple(part.strip() for part in key[1:-1].split(","))
    return None


def is_form(node: Node) -> bool:
    """Whether a mapping stands for a value: `{ref: ...}`, `{match: ...}`, a generated list, a distribution."""
    return node.is_map and bool(FORMS & node.value.keys())


def _of_space(key: str) -> tuple[str, str]:
    """`train.lr.values` as the path and the kind of its distribution; the kind is empty for any other key."""
    path, _, kind = key.rpartition(".")
    return (path, kind) if path and kind in SPACES else (key, "")


@dataclass(slots=True)
class Assembled:
    """A spec after its parents, profile and `--set`, still with positions."""

    tree: Node
    text: str
    file: str
    profile: str | None
    is_patched: bool
    folders: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Where the files are looked for that a spec names, by the spec's own name in messages."""


def assemble(spec: str, profile: str | None, sets: list[str]) -> Assembled:
    """Read a spec file and apply everything that changes it. Raises `SpecError` or `UserError`."""
    path, shown = library.find(spec)
    problems = Problems()
    chain, text, folders = _chain(path, shown)
    tree = mapping({}, Mark(shown, 1, 1))
    for number, node in enumerate(reversed(chain)):
        _Merge(problems, is_base=number == 0).apply(tree, node)
    tree.mark = chain[0].mark
    profiles = tree.get("profiles")
    if profiles is not None:
        _check_profiles(profiles, problems)
    problems.check()
    if profile is not None:
        _Merge(problems).apply(tree, _profile(profiles, profile, shown).copy("profile"))
    for text_set in sets:
        _Merge(problems).apply(tree, _parse_set(text_set))
    problems.check()
    return Assembled(tree, text, shown, profile, profile is not None or bool(sets), folders)


def _chain(path: Path, shown: str) -> tuple[list[Node], str, dict[str, tuple[Path, ...]]]:
    """The spec and its parents, child first; the child's text; and where each one's data files are looked for."""
    chain: list[Node] = []
    seen: list[Path] = []
    first_text = ""
    folders: dict[str, tuple[Path, ...]] = {}
    while True:
        node, text = read_file(path, shown)
        folders[shown] = (path.resolve().parent, library.SHIPPED)
        if not node.is_map:
            raise SpecError([(node.mark, "a spec is a mapping that begins with `sweep: NAME`")])
        first_text = first_text or text
        chain.append(node)
        seen.append(path.resolve())
        parent = node.get("extends")
        if parent is None:
            return chain, first_text, folders
        if not isinstance(parent.value, str):
            raise SpecError([(parent.mark, "extends takes the name of one spec")])
        try:
            path, shown = library.find(parent.value, beside=path.parent)
        except UserError as error:
            raise SpecError([(parent.mark, f"extends: {error}")]) from error
        if path.resolve() in seen:
            raise SpecError([(parent.mark, f"extends: {parent.value} comes back to itself")])
        if len(chain) >= MAX_CHAIN:
            raise SpecError([(parent.mark, f"extends: a chain has at most {MAX_CHAIN} specs")])


def _has_task(evaluation: Node) -> bool:
    """Whether an evaluation names a task of its own, with settings that a later `task.seq_len` is one of."""
    task = evaluation.get("task")
    return task is not None and task.is_map


def _check_profiles(profiles: Node, problems: Problems) -> None:
    if not profiles.is_map:
        problems.add(profiles.mark, "profiles is a mapping: {NAME: {...}}")
        return
    for name, body in profiles.value.items():
        if not body.is_map:
            problems.add(body.mark, f"profile {name!r} is a mapping of what it changes")
        for key in ("profiles", "extends", "sweep") if body.is_map else ():
            if key in body.value:
                problems.add(body.keys[key], f"a profile cannot change {key!r}")


def _profile(profiles: Node | None, name: str, shown: str) -> Node:
    known = profiles.value if profiles is not None else {}
    if name not in known:
        raise UserError(f"{shown}: there is no profile {name!r}" + (near(name, known) or " (it has none)"))
    return known[name]


def _parse_set(text: str) -> Node:
    """`path=value` as a patch of one key; the value is YAML, so it is typed as in the file."""
    path, equals, value = text.partition("=")
    path, name = path.strip(), f"--set {text}"
    if not equals or not path:
        raise UserError(f"--set {text!r}: write PATH=VALUE, as in --set train.lr=1e-3")
    if not value.strip():
        raise UserError(f"--set {text!r}: a value is missing (null removes the key)")
    if path.split(".")[0].rstrip("+") in ("profiles", "extends"):
        raise UserError(f"--set {text!r}: {path.split('.')[0]} cannot be set on the command line")
    node = read_text(value, name).copy("set")
    return mapping({path: node}, node.mark)


@dataclass(slots=True)
class _Merge:
    """Applies one patch. `written` catches a value given twice in it, as `train.lr` and as `train: {lr: ...}`."""

    problems: Problems
    is_base: bool = False
    written: dict[tuple[str, ...], Mark] = field(default_factory=dict)

    def apply(self, tree: Node, patch: Node) -> None:
        for key, child in patch.value.items():
            if key != "extends":
                self._put(tree, (), key, child, patch.keys.get(key, child.mark))

    def _put(self, target: Node, at: tuple[str, ...], key: str, child: Node, mark: Mark) -> None:
        """Put `child` under `key` of the mapping `target`, which stands at path `at`."""
        append = key.endswith("+")
        key = key.removesuffix("+").strip()
        paths = zip_paths(key) or ()
        if append and any(
            set(zip_paths(k) or ()) == set(paths) != set() and zip_paths(k) != paths for k in target.value
        ):
            self.problems.add(mark, f"{key}+ names its paths in another order than the rows it appends to")
            return
        first, rest = self._split(target, at, key)
        if rest:
            if not append and target.get(first) is not None and target.value[first].is_list:
                self._item(target.value[first], (*at, first), rest, child, mark)
                return
            child = mapping({rest + ("+" if append else ""): child}, child.mark)
            child.keys = dict.fromkeys(child.keys, mark)
            append = False
        old = target.get(first)
        here = (*at, first)
        space = _of_space(first) if at == ("search",) else (first, "")
        if space[1]:
            self._space(target, space, child, append, mark)
        elif at == ("profiles",):
            self._profile_body(target, first, child, mark)
        elif child.value is None:
            self._remove(target, here, mark)
        elif append:
            self._append(target, first, child, mark)
        elif old is not None and old.is_list and child.is_map and not is_form(child) and at == ("axes",):
            for arm, body in child.value.items():
                self._item(old, here, arm, body, child.keys.get(arm, body.mark))
        elif child.is_map and not is_form(child) and (at == ("axes",) or (at == ("search",) and _is_block(first))):
            for inner, body in child.value.items():
                self._put(target, at, f"{key}.{inner}", body, child.keys.get(inner, body.mark))
        elif child.is_map and not is_form(child) and self._is_merged(here):
            self._merge(target, here, child, mark)
        else:
            self._replace(target, here, child, mark)

    def _space(self, target: Node, space: tuple[str, str], child: Node, append: bool, mark: Mark) -> None:
        """`search.train.lr.values=[...]`: the whole distribution of that path, or more of its values."""
        path, kind = space
        old = target.get(path)
        if append and old is not None and old.is_map and kind in old.value:
            self._append(old, kind, child, mark)
        elif child.value is None:
            self._remove(target, ("search", path), mark)
        else:
            self._replace(target, ("search", path), mapping({kind: child}, child.mark), mark)

    def _split(self, target: Node, at: tuple[str, ...], key: str) -> tuple[str, str]:
        """The key that is meant here, as the target spells it, and the rest of a dotted key."""
        if at and at[0] in ("search", "profiles"):
            return key, ""
        paths = zip_paths(key)
        if at == ("axes",) or (at and at[0] == "evaluate" and (len(at) > 1 or _is_grid_key(key))):
            if paths:
                return _respelled(target, paths), ""
            if at[0] == "evaluate" and not self.is_base and key not in target.value and _has_task(target):
                first, _, rest = key.partition(".")
                return (first, rest) if first == "task" else (key, "")
            if key in target.value or at != ("axes",):
                return key, ""
            longest = [k for k in target.value if key.startswith(f"{k}.") and target.value[k].is_list]
            axis = max((k for k in longest if _arms(target.value[k])), key=len, default=None)
            if axis and key[len(axis) + 1 :].split(".")[0] in _arms(target.value[axis]):
                return axis, key[len(axis) + 1 :]
            return key, ""
        if paths:
            return key, ""
        first, _, rest = key.partition(".")
        return first, rest

    def _is_merged(self, here: tuple[str, ...]) -> bool:
        """Whether a mapping at this path is made of keys, rather than being one value."""
        if here[0] in ("axes", "search"):
            return len(here) == 1
        return here[0] not in ("when", "exclude", "compare", "seeds")

    def _merge(self, target: Node, here: tuple[str, ...], child: Node, mark: Mark) -> None:
        key = here[-1]
        old = target.get(key)
        if old is not None and isinstance(old.value, str) and NAMED_LEVEL.get(here[0]) == len(here):
            old = mapping({"name": old}, old.mark)
        named, name = child.get("name"), old.get("name") if old is not None and old.is_map else None
        is_block = NAMED_LEVEL.get(here[0]) == len(here)
        changed = is_block and named is not None and name is not None and named.value != name.value
        if old is None or not old.is_map or is_form(old) or changed:
            old = Node({}, child.mark)
            target.keys[key] = mark
        target.value[key] = old
        target.keys.setdefault(key, mark)
        for inner, value in child.value.items():
            self._put(old, here, inner, value, child.keys.get(inner, value.mark))

    def _replace(self, target: Node, here: tuple[str, ...], child: Node, mark: Mark) -> None:
        key = here[-1]
        # A zip key is the same in whichever order it names its paths.
        once = (*here[:-1], *sorted(zip_paths(key) or (key,)))
        before = self.written.get(once)
        if before is not None:
            self.problems.add(mark, f"{'.'.join(here)!r} is given twice (first in line {before.line})")
        self.written[once] = mark
        old = target.get(key)
        same_block = NAMED_LEVEL.get(here[0]) == len(here) and old is not None and old.is_map and not is_form(old)
        if same_block and old is not None and old.get("name") is not None and old.value["name"].value == child.value:
            return
        target.value[key] = child.copy()
        target.keys[key] = mark

    def _profile_body(self, target: Node, name: str, child: Node, mark: Mark) -> None:
        """A profile stays as it is written until it is applied; a child's profile adds to its parent's, key by key."""
        old = target.get(name)
        if old is not None and old.is_map and child.is_map:
            old.value.update(child.copy().value)
            old.keys.update(child.keys)
        else:
            target.value[name], target.keys[name] = child.copy(), mark

    def _append(self, target: Node, key: str, child: Node, mark: Mark) -> None:
        old = target.get(key)
        if not child.is_list or (old is not None and not old.is_list):
            self.problems.add(mark, f"{key}+ appends a list to a list")
        elif old is None:
            target.value[key], target.keys[key] = child.copy(), mark
        else:
            target.value[key] = Node([*old.value, *child.copy().value], old.mark)

    def _remove(self, target: Node, here: tuple[str, ...], mark: Mark) -> None:
        key = here[-1]
        if self.is_base:
            self.problems.add(mark, f"{'.'.join(here)} has no value (`none` is a value; null removes, in a patch)")
        elif key not in target.value:
            self.problems.add(mark, f"{'.'.join(here)}: there is nothing to remove{near(key, target.value)}")
        else:
            del target.value[key]
            target.keys.pop(key, None)

    def _item(self, axis: Node, here: tuple[str, ...], key: str, child: Node, mark: Mark) -> None:
        """Patch the item of an axis that `key` names by its arm: `hola.cache`, or `hola` with a mapping."""
        arm, _, rest = key.partition(".")
        found = [number for number, item in enumerate(axis.value) if _arm(item) == arm]
        if not found:
            self.problems.add(mark, f"{'.'.join(here)} has no item {arm!r}{near(arm, _arms(axis))}")
            return
        if len(found) > 1:
            self.problems.add(mark, f"{len(found)} items of {'.'.join(here)} are called {arm!r}: give each its `arm`")
            return
        at, item = found[0], axis.value[found[0]]
        if child.value is None and not rest:
            del axis.value[at]
            return
        if not item.is_map:
            item = axis.value[at] = mapping({"name": item}, item.mark)
        body = child.value if child.is_map and not rest else {rest or "name": child}
        for inner, value in body.items():
            inner, kind = _of_space(inner)
            value = mapping({kind: value}, value.mark) if kind and value.value is not None else value
            paths = zip_paths(inner)
            same = [k for k in item.value if paths and set(zip_paths(k) or ()) == set(paths)]
            inner = same[0] if same else inner
            if value.value is None:
                if item.value.pop(inner, None) is None:
                    self.problems.add(mark, f"{arm}.{inner}: there is nothing to remove{near(inner, item.value)}")
            else:
                item.value[inner], item.keys[inner] = value.copy(), mark


def _respelled(target: Node, paths: tuple[str, ...]) -> str:
    """The zip key of these paths, in this order. A key of the same paths in another order gets the new spelling in its
    old place: the rows of a patch are in the patch's own order."""
    new = f"({', '.join(paths)})"
    old = next((key for key in target.value if set(zip_paths(key) or ()) == set(paths)), new)
    if old != new:
        target.value = {new if key == old else key: child for key, child in target.value.items()}
        target.keys = {new if key == old else key: mark for key, mark in target.keys.items()}
    return new


def _is_block(key: str) -> bool:
    """Whether a key of `search` begins a path rather than being a setting of the search."""
    return key.partition(".")[0] in ("mechanism", "model", "train", "task")


def _is_grid_key(key: str) -> bool:
    return key in ("task", "if") or key.startswith(("task.", "("))


def _arm(item: Node) -> str | None:
    if item.is_map:
        node = item.get("arm") or item.get("name")
        return str(node.value) if node is not None else None
    return item.value if isinstance(item.value, str) else None


def _arms(axis: Node) -> list[str]:
    return [arm for arm in map(_arm, axis.value) if arm] if axis.is_list else []
