"""What `validate`, `plan` and `ls` print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from runners import corpus
from runners.schema import Member, Plan, Search, UserError
from runners.suggest import makers
from sweeps import show_bill
from sweeps.bill import Bill, CellCost
from sweeps.blocks import longest_row
from sweeps.catalog import Block, Catalog, Param
from sweeps.reader import near
from sweeps.types import show

MAX_ROWS = 60


def headline(plan: Plan) -> str:
    """`30 trials (10 cells x 3 seeds), 30 evaluations, 1 comparison`; with a search, all trainings first."""
    cells = len({member.cell for member in plan.members})
    seeds = len({member.trial.seed for member in plan.members})
    evaluations = sum(len(member.slices) for member in plan.members)
    trials = f"{_count(len(plan.members), 'trial')} ({_count(cells, 'cell')} x {_count(seeds, 'seed')})"
    if plan.searches:
        more = _count(sum(search.n_trainings for search in plan.searches), "training")
        trials = f"{_count(plan.n_trainings, 'training')}: {trials}, {more} of suggestions"
    parts = [
        trials,
        _count(evaluations, "evaluation"),
        _count(len(plan.tests), "comparison"),
    ]
    return ", ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def plan(
    found: Plan, selected: frozenset[str] | None, later: list[str], bill: Bill, *, everything: bool = False
) -> None:
    """The whole plan for a person: cells, comparisons, notes."""
    print(f"{found.sweep}: {found.question}" if found.question else found.sweep)
    print(headline(found))
    members = [m for m in found.members if selected is None or m.trial.id in selected]
    if selected is not None:
        print(f"--only takes {len(members):,} of {len(found.members):,} trials")
    print()
    costs = {cell.cell: cell for cell in bill.cells}
    _cells(members, found, costs, None if everything else MAX_ROWS).print()
    if found.tests:
        print()
        _tests(found).print()
    print()
    for line in show_bill.totals(bill):
        print(line)
    for note in [*found.notes, *_first_round(found)]:
        print(f"note: {note}")
    for line in later:
        print(f"not there yet: {line}")


def _first_round(found: Plan) -> list[str]:
    """What a plan with a search cannot know yet."""
    if not found.searches:
        return []
    paths = ", ".join(dict.fromkeys(path for search in found.searches for path in search.space))
    first = sum(min(search.parallel, search.trials) * len(search.seeds) for search in found.searches)
    return [
        f"{paths}: searched inside each cell. The first round of suggestions, {_count(first, 'training')}, can be made "
        "now; later rounds and the winners' trials follow from results"
    ]


class _Table:
    """Aligned columns. Rich would wrap and colour them, and takes longer to import than a plan takes to make."""

    def __init__(self, *columns: str, right: Iterable[str] = ()) -> None:
        self.right = [column in right for column in columns]
        self.rows: list[tuple[str, ...]] = [columns]

    def add(self, *row: str) -> None:
        self.rows.append(row)

    def print(self) -> None:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        for row in self.rows:
            cells = zip(row, widths, self.right, strict=True)
            print("  ".join(f"{c:>{w}}" if right else f"{c:<{w}}" for c, w, right in cells).rstrip())


def _cells(members: list[Member], found: Plan, costs: Mapping[str, CellCost], limit: int | None) -> _Table:
    """One row a cell: what varies, units that follow from others, state, search, what a trial costs, and its trials."""
    rows: dict[str, list[Member]] = {}
    for member in members:
        rows.setdefault(member.cell, []).append(member)
    searches = {search.key: search for search in found.searches}
    right = ("params", "state bytes", "slices", "a trial", "memory")
    columns = ("cell", "heads", "steps", *right[:3], *(("search",) if searches else ()), "seeds", *right[3:], "from")
    table = _Table(*columns, "trial", right=right)
    for number, (cell, group) in enumerate(rows.items()):
        if limit is not None and number == limit:
            table.add(f"... {len(rows) - limit:,} cells more: --all shows them", *[""] * len(columns))
            break
        first, cost = group[0], costs[cell]
        seeds = _ranges([member.trial.seed for member in group])
        own = searches.get(first.searched.key) if first.searched else None
        sizes = (_span(cost, "n_params", cost.n_params), _span(cost, "state_bytes", first.state_bytes))
        search = (_suggestions(own),) if searches else ()
        bill = (show_bill.time_of(cost), show_bill.memory_of(cost), cost.basis)
        trial = "the winner's" if first.is_open else first.trial.id
        row = (
            cell,
            _heads(first, own),
            _steps(first, cost),
            *sizes,
            str(len(first.slices)),
            *search,
            seeds,
            *bill,
            trial,
        )
        table.add(*row)
    return table


def _suggestions(search: Search | None) -> str:
    """`4 random (TPE begins after 8)`, `12 (8 random, 4 TPE) x 2 seeds`, or `6 grid, same seeds`."""
    if search is None:
        return "none"
    more = ", same seeds" if search.is_same else f" x {len(search.seeds)} seeds" if len(search.seeds) > 1 else ""
    return f"{search.trials} {makers(search)}{more}"


def _ranges(seeds: list[int]) -> str:
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}..{seeds[-1]}"
    return ",".join(map(str, seeds))


def _span(cost: CellCost, name: str, value: int | None) -> str:
    """`1,024`, or `512..4,096` where searched values decide it."""
    if name in cost.ranges:
        return "..".join(f"{end:,.0f}" for end in cost.ranges[name])
    return "?" if value is None else f"{value:,}"


def _heads(member: Member, search: Search | None) -> str:
    """`2 x 32`: heads and their width, whichever of them the spec gives."""
    model = member.trial.model
    if search is not None and {"model.d_model", "model.n_heads", "model.head_dim"} & search.space.keys():
        return "searched"
    width, heads, head = model.get("d_model"), model.get("n_heads"), model.get("head_dim")
    if not isinstance(width, int):
        return ""
    if heads is None:
        heads = width // head if head else 1
    return f"{heads} x {head or width // heads}"


def _steps(member: Member, cost: CellCost) -> str:
    """Updates and the batch in rows, where they follow without building the model; else the unit that is given."""
    train, task = member.trial.train, member.trial.task
    if train is None:
        return "none"
    rows = train.get("batch_size") or max(1, (train.get("batch_tokens") or 0) // (longest_row(task) or 1))
    for unit in ("steps", "epochs", "tokens", "tokens_per_param"):
        if train.get(unit) is not None:
            number = _span(cost, "steps", train[unit]).replace(",", "") if unit == "steps" else show(train[unit])
            count = "..".join(f"{end:.0f}" for end in cost.ranges["rows"]) if "rows" in cost.ranges else rows
            told = f"{number}{'' if unit == 'steps' else ' ' + unit.replace('_', ' ')} x {count}"
            own = corpus.rows(task, "train")
            if unit.startswith("tokens") and own and cost.steps and not task.get("segments") and not cost.ranges:
                told += f", {cost.steps * rows / own:.2g} epochs"
            return told
    return ""


def _tests(found: Plan) -> _Table:
    columns = ("comparison", "metric", "blocks", "pairs", "verdict", "slices", "unpaired")
    table = _Table(*columns, right=("blocks", "pairs", "slices"))
    for test in found.tests:
        blocks = len({pair.block for pair in test.pairs})
        unpaired = f"{test.unpaired_a} of a, {test.unpaired_b} of b" if test.unpaired_a or test.unpaired_b else ""
        step = f" at step {test.step}" if test.step is not None else ""
        name = test.name.removesuffix(f" on {test.set}/{test.metric}")
        row = (
            name,
            f"{test.set}/{test.metric}{step}",
            str(blocks),
            str(len(test.pairs)),
            show_bill.verdict_of(found, test),
            str(len(test.slices)),
            unpaired,
        )
        table.add(*row)
    return table


# --- ls ---------------------------------------------------------------------------------------------------------

KINDS = {"mechanisms": "mechanism", "tasks": "task", "model": "model", "train": "train", "specs": "spec"}


def listing(kind: str | None, name: str | None, *, as_json: bool = False, catalog: Catalog | None = None) -> None:
    """Print what there is, or one of it."""
    catalog = catalog or Catalog()
    if kind is not None and kind not in KINDS and kind + "s" not in KINDS:
        if name is None and (found := _anything(kind, catalog)):
            _one(found, as_json)
            return
        raise UserError(f"there is nothing to list under {kind!r}{near(kind, KINDS)}")
    kinds = [kind if kind in KINDS else f"{kind}s"] if kind is not None else ["mechanisms", "tasks", "specs"]
    if kinds[0] in ("model", "train"):
        _one(catalog.block(kinds[0]), as_json)
    elif name is not None and kinds[0] == "specs":
        from sweeps import library

        path, _ = library.find(name)
        print(path.read_text(encoding="utf-8"), end="")
    elif name is not None:
        _one(catalog.block(KINDS[kinds[0]], name), as_json)
    else:
        _all(kinds, catalog, as_json)


def _anything(name: str, catalog: Catalog) -> Block | None:
    for kind in ("mechanism", "task"):
        if name in catalog.names(kind):
            return catalog.block(kind, name)
    return None


def _all(kinds: list[str], catalog: Catalog, as_json: bool) -> None:
    lists = {kind: _specs() if kind == "specs" else _blocks(KINDS[kind], catalog) for kind in kinds}
    if as_json:
        print(json.dumps(lists if len(lists) > 1 else lists[kinds[0]], indent=1, ensure_ascii=False))
        return
    for number, (kind, entries) in enumerate(lists.items()):
        if len(lists) > 1:
            print(("\n" if number else "") + kind)
        width = max((len(name) for name in entries), default=0)
        for name, summary in entries.items():
            print(f"  {name:<{width}}  {summary}".rstrip())
            if kinds == ["mechanisms"]:
                _sources(catalog.block("mechanism", name), " " * (width + 4))


def _sources(block: Block, margin: str) -> None:
    """Where a mechanism comes from, and what one layer of it carries for one sequence, in elements."""
    carried = [
        f"{block.literals[word]} {kept}"
        for word, kept in (("STATE", "in fp32"), ("CACHE", "in the activations' dtype"))
        if str(block.literals.get(word, 0)) != "0"
    ]
    if block.source:
        print(f"{margin}source: {block.source}")
    print(f"{margin}state, elements a layer: {' + '.join(carried) or 'none'}")


def _blocks(kind: str, catalog: Catalog) -> dict[str, str]:
    return {name: catalog.block(kind, name).summary for name in catalog.names(kind)}


def _specs() -> dict[str, str]:
    from sweeps import library
    from sweeps.reader import read_file

    found = {}
    for name in library.names():
        node, _ = read_file(library.SHIPPED / f"{name}.yaml", f"specs/{name}.yaml")
        question = node.get("question")
        found[name] = str(question.value) if question is not None else ""
    return found


def _one(block: Block, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(block), indent=1, ensure_ascii=False))
        return
    print(f"{block.title}: {block.summary}\n")
    _params(block.params)
    for param, options in block.blocks.items():
        for name, sub in options.items():
            print(f"\n{block.kind}.{param}: {{name: {name}}}  {sub.summary}")
            _params(sub.params)
    for word, text in (("STATE", "state, fp32 elements a layer"), ("CACHE", "cache, activation elements a layer")):
        if word in block.literals:
            print(f"\n{text}: {block.literals[word]}", end="")
    if block.limits:
        print("\nrules: " + "\n       ".join(block.limits), end="")
    if block.literals.get("METRICS"):
        words = [f"{m} ({'higher' if d == 'max' else 'lower'} is better)" for m, d in block.literals["METRICS"].items()]
        print(f"\nmetrics: {', '.join(words)}", end="")
    print(f"\n\nsource: {block.path}")


def _params(params: dict[str, Param]) -> None:
    if not params:
        print("  no parameters")
        return
    table = _Table("  parameter", "type", "default", "meaning")
    for name, param in params.items():
        default = "required" if param.is_required else show(param.default)
        table.add(f"  {name}", str(param.type), default, param.meaning)
    table.print()


def _as_json(block: Block) -> dict[str, Any]:
    def params(found: dict[str, Param]) -> list[dict[str, Any]]:
        return [
            {
                "name": p.name,
                "type": str(p.type),
                "required": p.is_required,
                "default": None if p.is_required else p.default,
                "meaning": p.meaning,
            }
            for p in found.values()
        ]

    known = (
        "REVISION",
        "STATE",
        "CACHE",
        "LIMITS",
        "INERT",
        "CAPS",
        "SAME_AS",
        "METRICS",
        "BOUNDS",
        "CHANCE",
        "SELECT",
        "TRAINS",
        "EVALUATES",
    )
    return {
        "kind": block.kind,
        "name": block.name,
        "summary": block.summary,
        "params": params(block.params),
        "blocks": {p: {n: params(s.params) for n, s in o.items()} for p, o in block.blocks.items()},
        "literals": {word: block.literals[word] for word in known if word in block.literals},
        "source": block.path,
    }
