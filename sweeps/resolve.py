"""From what a spec writes to what a trial is: types, defaults, owners of units, `ref` and `match`, rules, identity.

Everything is done once for each different block, not once for each trial: ten thousand trials share a few dozen blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runners.schema import FOLDER, UserError, canonical_json
from sweeps import layers
from sweeps.blocks import Form, Raw, Resolved
from sweeps.catalog import REQUIRED, Block, Catalog, Param, with_derived
from sweeps.files import Files, Folders
from sweeps.patch import is_form
from sweeps.reader import Mark, Node, Problems, near
from sweeps.rules import Rules
from sweeps.spec import Written, head
from sweeps.types import NAMED, Misfit, show

MATCH_LIMIT = 1 << 24
"""The largest value that `match` tries."""


LARGEST = 1 << 63
"""Whole numbers have 64 bits, as in the file."""


class Resolver:
    """Types and settles blocks; what does not fit goes to `problems`, once for each place."""

    def __init__(self, catalog: Catalog, problems: Problems, origin: Mark, folders: Folders | None = None) -> None:
        self.catalog, self.problems, self.origin = catalog, problems, origin
        self.files = Files(problems, folders or {})
        self.rules = Rules(catalog, problems, origin)
        self._typed: dict[tuple[int, int], Any] = {}
        self._misfits: set[tuple[int, int]] = set()
        self._keep: list[Any] = []  # ids below are of objects that must not go away

    # --- typing -------------------------------------------------------------------------------------------------

    def raw(self, kind: str, written: Mapping[str, Written], late: frozenset[str]) -> Raw | None:
        """Type one block's written values; None if some do not fit."""
        name = ""
        if kind in ("mechanism", "task"):
            if kind not in written:
                self.problems.add(self.origin, f"there is no {kind}: name one, or make it an axis")
                return None
            name = written[kind].node.value
        try:
            block = self.catalog.block(kind, name)
        except UserError as error:
            self.problems.add(written[kind].node.mark if kind in written else self.origin, str(error))
            return None
        raw = Raw(kind, block, {}, {}, {}, late)
        before = len(self.problems)
        for path, w in written.items():
            if path == kind:
                raw.marks[path], raw.keys[path] = w.node.mark, w.key
            else:
                self._type(raw, path, w, written)
        self._check_owners(raw)
        for name, param in block.params.items():
            if param.is_required and f"{kind}.{name}" not in written:
                where = written[kind].node.mark if kind in written else min(raw.keys.values(), default=self.origin)
                self.problems.add(where, f"{block.title} needs {name!r}: {param.meaning or param.type}")
        return raw if len(self.problems) == before else None

    def _type(self, raw: Raw, path: str, written: Written, all_written: Mapping[str, Written]) -> None:
        parts = path.split(".")[1:]
        blocks = raw.block.blocks
        raw.marks[path], raw.keys[path] = written.node.mark, written.key
        if parts[0] in blocks and len(parts) == 1:
            name = written.node.value
            if not isinstance(name, str) or (name != "none" and name not in blocks[parts[0]]):
                known = [*blocks[parts[0]], "none"]
                self.problems.add(
                    written.node.mark, f"{path}: there is no {show(written.node.plain())}{near(name, known)}"
                )
            raw.values[path] = None if name == "none" else name
            return
        if len(parts) == 2 and parts[0] in blocks:
            top = all_written.get(f"{raw.kind}.{parts[0]}")
            name = top.node.value if top is not None else _default_name(raw.block.params.get(parts[0]))
            if name == "none" or name is None:
                self.problems.add(written.key, f"{path}: model.{parts[0]} is none here, so it has no {parts[1]!r}")
                return
            sub = blocks[parts[0]].get(name) if isinstance(name, str) else None
            if sub is None:
                return  # told at the name
            param, title = sub.params.get(parts[1]), sub.title
            known = list(sub.params)
        else:
            param, title = (raw.block.params.get(parts[0]) if len(parts) == 1 else None), raw.block.title
            known = list(raw.block.params)
        if param is None:
            wrong = ".".join(parts[-1:] if len(parts) == 2 and parts[0] in blocks else parts)
            self.problems.add(written.key, f"{title} has no parameter {wrong!r}{near(wrong, known)}")
            return
        value = self.typed(path, written.node, param)
        if (id(written.node), id(param)) in self._misfits:
            raw.misfits.add(path)
        if isinstance(value, Form):
            raw.forms[path] = value
        raw.values[path] = value

    def typed(self, path: str, node: Node, param: Param) -> Any:
        """The typed value, or `Form`, of a node for a parameter; what does not fit is told and becomes None."""
        memo = (id(node), id(param))
        if memo in self._misfits:
            self.problems.again()
        if memo not in self._typed:
            self._keep += [node, param]
            self._typed[memo] = None
            try:
                self._typed[memo] = self._form(path, node, param) if is_form(node) else self._convert(node, param)
            except Misfit as error:
                self._misfits.add(memo)
                self.problems.add(error.args[1] if len(error.args) > 1 else node.mark, f"{path}: {error}")
        return self._typed[memo]

    def _convert(self, node: Node, param: Param) -> Any:
        value = param.type.convert(node)
        if param.type.item == NAMED and value is not None:
            return layers.read(node, self.catalog.block("model"), self.catalog)
        if param.keys is None or value is None:
            return value
        entries = []
        for child in node.value:
            entry = {}
            for name, inner in child.value.items():
                if name not in param.keys:
                    raise Misfit(f"{param.name} has no key {name!r}{near(name, param.keys)} (line {inner.mark.line})")
                entry[name] = param.keys[name].convert(inner)
            entries.append(entry)
        return entries

    def _form(self, path: str, node: Node, param: Param) -> Any:
        get = {name: child.value for name, child in node.value.items()}
        if "required" in get:
            raise Misfit(wanted(path, node).removeprefix(f"{path}: "))
        if "ref" in get:
            allowed, number = {"ref", "times", "plus", "round"}, get.get("times", 1)
            target = get["ref"]
        elif "match" in get:
            allowed, number = {"match", "to"}, get.get("to")
            target = get["match"]
            if target != "state_bytes":
                raise Misfit(f"match: {show(node.value['match'].plain())}: only state_bytes can be matched")
            if not param.type.is_number or "int" not in param.type.scalars:
                raise Misfit("match finds whole numbers; this parameter is none")
        else:
            word = next(iter(node.value))
            raise Misfit(f"{word} makes a list or a distribution: it stands in axes, in an item or in search")
        for name in node.value:
            if name not in allowed:
                raise Misfit(f"{name!r} is no part of {{{', '.join(sorted(allowed))}}}")
        for name in ("times", "plus", "to"):
            if name in get and (isinstance(get[name], bool) or not isinstance(get[name], int | float)):
                raise Misfit(f"{name} is a number, not {show(node.value[name].plain())}")
        if not isinstance(target, str) or number is None:
            raise Misfit("write {ref: path} or {match: state_bytes, to: N}")
        if get.get("round", "down") not in ("down", "even"):
            raise Misfit(f"round is down or even, not {show(node.value['round'].plain())}")
        return Form(
            "ref" if "ref" in get else "match",
            target,
            number,
            get.get("plus", 0),
            get.get("round", ""),
            node.mark,
            param,
        )

    def _check_owners(self, raw: Raw) -> None:
        for group in raw.block.owners:
            given = [name for name in group if raw.values.get(f"{raw.kind}.{name}") is not None]
            if len(given) > 1:
                last = max((raw.keys[f"{raw.kind}.{name}"] for name in given), key=lambda m: (m.line, m.column))
                words = ", ".join(given)
                self.problems.add(
                    last, f"{raw.kind}: one of {' | '.join(group)} is given, the others follow; here: {words}"
                )
            has_own = any(raw.block.params[name].default is not None or name in raw.block.derived for name in group)
            if not given and not has_own and not any(f"{raw.kind}.{name}" in raw.misfits for name in group):
                where = min(raw.keys.values(), default=self.origin, key=lambda m: (m.line, m.column))
                self.problems.add(where, f"{raw.kind} needs one of {' | '.join(group)}")

    def changed(self, raw: Raw, settings: Mapping[str, Written], which: tuple[Any, ...]) -> Raw | None:
        """The block with the values of some `when` entries over it; `which` names them for the next time."""
        if which not in raw.changed:
            new = Raw(
                raw.kind, raw.block, dict(raw.values), dict(raw.marks), dict(raw.keys), raw.late | settings.keys()
            )
            new.forms = {path: form for path, form in raw.forms.items() if path not in settings}
            before = len(self.problems)
            names = {
                p: Written(Node(v if v is not None else "none", raw.marks[p]), raw.keys[p])
                for p, v in raw.values.items()
            }
            for path in settings:
                group = next((g for g in raw.block.owners if path.rpartition(".")[2] in g), [])
                for name in group:
                    new.values.pop(f"{raw.kind}.{name}", None)
            for path, written in settings.items():
                self._type(new, path, written, {**names, **settings})
            self._check_owners(new)
            raw.changed[which] = new if len(self.problems) == before else None
        return raw.changed[which]

    def with_values(
        self, blocks: Mapping[str, Resolved], marks: Mapping[str, Mark], values: Mapping[str, Any]
    ) -> dict[str, Resolved] | None:
        """A trial's blocks with some values replaced, told at `marks`; None if something has no value then."""
        raws: dict[str, Raw] = {}
        for kind, block in blocks.items():
            plain = {path: "none" if v is None else v for path, v in values.items() if head(path) == kind}
            own = {path: Written(Node(value, marks[path]), marks[path]) for path, value in plain.items()}
            raw = self.changed(block.raw, own, ("values", canonical_json(plain))) if own else block.raw
            if raw is None:
                return None
            raws[kind] = raw
        return self.settle(raws)

    # --- settling -----------------------------------------------------------------------------------------------

    def settle(self, raws: Mapping[str, Raw]) -> dict[str, Resolved] | None:
        """Decide every setting of a trial's blocks; None if a form has no value (which is told)."""
        raws = self._placed(raws)
        found: dict[str, Resolved] = {}
        for kind, raw in raws.items():
            if raw.forms or () not in raw.settled:
                break
            found[kind] = raw.settled[()]
        else:
            return found
        forms = {path: form for raw in raws.values() for path, form in raw.forms.items()}
        values: dict[str, Any] = {}
        if forms:
            try:
                values = self._settle_forms(raws, forms)
            except Misfit as error:
                form = error.args[1] if len(error.args) > 1 else next(iter(forms.values()))
                self.problems.add(form.mark, str(error.args[0]))
                return None
        for kind, raw in raws.items():
            own = tuple(values[path] for path in raw.forms)
            if own not in raw.settled:
                raw.settled[own] = self._resolve(raw, dict(zip(raw.forms, own, strict=True)))
            found[kind] = raw.settled[own]
        return found

    @staticmethod
    def _placed(raws: Mapping[str, Raw]) -> Mapping[str, Raw]:
        """Blocks with the layers as this mechanism has them (`layers.settled`)."""
        model, mechanism = raws.get("model"), raws.get("mechanism")
        given = model.values.get("model.layers") if model is not None else None
        if model is None or mechanism is None or given is None or model.block.params["layers"].type.item != NAMED:
            return raws
        found = layers.settled(given, mechanism.block.name, model.values.get("model.position", "none"))
        if found == given:
            return raws
        memo = ("layers", mechanism.block.name)
        if memo not in model.changed:
            values = {**model.values, "model.layers": found}
            model.changed[memo] = replace(model, values=values, settled={}, changed={})
        changed = model.changed[memo]
        return {**raws, "model": changed} if changed is not None else raws

    def _settle_forms(self, raws: Mapping[str, Raw], forms: Mapping[str, Form]) -> dict[str, Any]:
        done: dict[str, Any] = {}
        for path, form in forms.items():
            if form.kind == "ref":
                self._ref(path, form, raws, forms, done, ())
        matches = {path: form for path, form in forms.items() if form.kind == "match"}
        if len(matches) > 1:
            raise Misfit("a trial has one match at most", list(matches.values())[1])
        for path, form in matches.items():
            done[path] = self._match(path, form, raws, done)
        return done

    def _ref(
        self,
        path: str,
        form: Form,
        raws: Mapping[str, Raw],
        forms: Mapping[str, Form],
        done: dict[str, Any],
        above: tuple[str, ...],
    ) -> Any:
        if path in done:
            return done[path]
        if path in above:
            raise Misfit(f"{path}: ref goes in a circle: {' -> '.join([*above[above.index(path) :], path])}", form)
        target = forms.get(form.path)
        if target is not None and target.kind == "match":
            raise Misfit(f"{path}: ref to {form.path}, which is matched", form)
        if target is not None:
            value = self._ref(form.path, target, raws, forms, done, (*above, path))
        else:
            raw = raws.get(head(form.path))
            flat = self._resolve(raw, {p: done.get(p) for p in raw.forms}).flat if raw is not None else {}
            if form.path not in flat:
                raise Misfit(
                    f"{path}: ref to {form.path!r}, which this trial does not have{near(form.path, flat)}", form
                )
            value = flat[form.path]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Misfit(f"{path}: ref to {form.path}, which is {show(value)} and no number", form)
        try:
            result = value * form.number + form.plus
        except OverflowError:
            result = math.inf
        if not -LARGEST < result < LARGEST and (isinstance(result, int) or not math.isfinite(result) or form.round):
            raise Misfit(f"{path}: {form.path} of {show(value)} gives a number that is too large", form)
        if form.round:
            result = math.floor(result) if form.round == "down" else math.floor(result / 2) * 2
        is_whole = isinstance(result, float) and result.is_integer() and abs(result) < LARGEST
        if "int" in form.param.type.scalars and is_whole:
            result = int(result)
        try:
            done[path] = form.param.type.convert(Node(result, form.mark))
        except Misfit as error:
            raise Misfit(f"{path}: {error}; `round: down` makes it one", form) from error
        return done[path]

    def _match(self, path: str, form: Form, raws: Mapping[str, Raw], done: dict[str, Any]) -> int:
        """The largest whole number whose state is not above the target and that the rules allow."""

        def at(value: int) -> dict[str, Resolved]:
            values = {**done, path: value}
            return {kind: self._resolve(raw, {p: values.get(p) for p in raw.forms}) for kind, raw in raws.items()}

        def size(value: int) -> int:
            return self.rules.size(at(value))

        if size(1) > form.number:
            raise Misfit(f"{path}: at 1 the state already holds {size(1):,} bytes, more than {form.number:,.0f}", form)
        high = 1
        while high < MATCH_LIMIT and size(high * 2) <= form.number:
            high *= 2
        if high >= MATCH_LIMIT:
            raise Misfit(f"{path}: the state does not grow with it, so it cannot be matched", form)
        low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(middle) <= form.number else (low, middle)
        for value in range(low, max(0, low - 256), -1):
            blocks = at(value)
            if not any(True for owner in blocks.values() for _ in self.rules.broken(blocks, owner)):
                reached = size(value)
                if reached < 0.95 * form.number:
                    short = f"{100 * (1 - reached / form.number):.0f} % below {form.number:,.0f}"
                    self.problems.note(f"{form.mark}: {path} {value} reaches {reached:,} bytes of state, {short}")
                return value
        raise Misfit(f"{path}: no value near {low} that the rules allow reaches {form.number:,.0f} bytes", form)

    def _resolve(self, raw: Raw, formed: Mapping[str, Any]) -> Resolved:
        kind, block = raw.kind, raw.block
        values = {**raw.values, **formed}
        settings: dict[str, Any] = {"name": block.name} if kind in ("mechanism", "task") else {}
        minimal: dict[str, Any] = {"REVISION": block.revision, **settings}
        flat: dict[str, Any] = {kind: block.name} if settings else {}
        owned_away = {
            name
            for group in block.owners
            if any(values.get(f"{kind}.{given}") is not None for given in group)
            for name in group
            if values.get(f"{kind}.{name}") is None
        }
        for name, param in block.params.items():
            path = f"{kind}.{name}"
            if name in block.blocks:
                settings[name], short = self._sub_block(raw, name, param, values, flat)
                if short != self._sub_default(block, name, param):
                    minimal[name] = short
                continue
            if path in values:
                settings[name] = values[path]
            elif name in owned_away:
                settings[name] = None
            else:
                settings[name] = param.default
        env = with_derived(block, settings, {})
        for name, param in block.params.items():
            if name in block.blocks:
                continue
            flat[f"{kind}.{name}"] = env[name]
            if name not in block.owned:
                settings[name] = env[name]
            if settings[name] != param.default and not self._is_derived(block, name, settings):
                is_named = param.type.item == NAMED and settings[name] is not None
                minimal[name] = layers.identity(settings[name], self.catalog) if is_named else settings[name]
        if block.files:
            folder, sizes = self.files.find(raw, settings)
            settings[FOLDER] = folder
            env |= sizes
        return Resolved(raw, settings, flat, env, canonical_json(minimal))

    @staticmethod
    def _is_derived(block: Block, name: str, settings: dict[str, Any]) -> bool:
        """Whether the value is what none would have stood for: then writing it out changes no identity."""
        if name not in block.derived or name in block.owned:
            return False
        return with_derived(block, {**settings, name: None}, {}).get(name) == settings[name]

    def _sub_block(
        self, raw: Raw, name: str, param: Param, values: Mapping[str, Any], flat: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, Any]:
        """Settings of one block inside the model, and the same without its defaults."""
        path = f"{raw.kind}.{name}"
        chosen = values[path] if path in values else _default_name(param)
        chosen = None if chosen == "none" else chosen
        flat[path] = chosen
        if chosen is None:
            return None, None
        default = param.default if isinstance(param.default, dict) and param.default.get("name") == chosen else {}
        settings: dict[str, Any] = {"name": chosen}
        short: dict[str, Any] = {"name": chosen}
        for inner, sub in raw.block.blocks[name][chosen].params.items():
            value = values.get(f"{path}.{inner}", default.get(inner, sub.default))
            settings[inner] = flat[f"{path}.{inner}"] = value
            if value != sub.default:
                short[inner] = value
        return settings, short

    @staticmethod
    def _sub_default(block: Block, name: str, param: Param) -> Any:
        if isinstance(param.default, dict):
            return param.default
        chosen = _default_name(param)
        return None if chosen in (None, "none") else {"name": chosen}


def wanted(path: str, node: Node) -> str:
    """What to say where a form `{required: text}` still stands at `path`."""
    what = show(node.value["required"].plain())
    return f"{path}: a value is wanted: {what}. Give it with --set {path}=..., or in a profile"


def _default_name(param: Param | None) -> str | None:
    if param is None or param.default in (None, REQUIRED):
        return None
    return param.default.get("name") if isinstance(param.default, dict) else param.default
