"""The commands that care for a store: diff, gc, forget. Thin, as those in sweeps/operate.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from runners.schema import Exit, UserError
from sweeps import stores
from sweeps.operate import JsonOption, NameArgument, StoreOption

if TYPE_CHECKING:
    from runners.differ import Diff, Difference
    from runners.ledger import Ledger
    from runners.store import Store

OneArgument = Annotated[str, typer.Argument(help="Trial id (its start will do), sweep, or sweep@REVISION.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
_SHOWN = 12


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands on the command line."""
    for command in (diff, gc, forget):
        app.command()(command)


def diff(a: OneArgument, b: OneArgument, as_json: JsonOption = False, store: StoreOption = None) -> None:
    """Show how two trials, two sweeps or two revisions of one differ: settings, trials, versions, devices, code."""
    from runners import differ
    from runners.store import Store

    found = differ.diff(Store.open(stores.find(store, _sweep_of(a))), a, b)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    _print_diff(found)


def _sweep_of(name: str) -> str | None:
    """The sweep that a name may mean, to find its store by; None for what looks like a trial."""
    head, at, number = name.rpartition("@")
    return head if at and number.isdecimal() else None if set(name) <= set("0123456789abcdef") else name


def _print_diff(found: Diff) -> None:
    print(f"a: {found.a}\nb: {found.b}")
    if found.is_same:
        print("no difference" + ("" if found.shared is None else f": {found.shared} trials, all the same"))
        return
    _print_table("settings" if found.shared is None else "spec", found.settings)
    _print_table("what ran", found.stamps)
    if found.shared is None:
        return
    print(f"{found.shared} trials are in both")
    for side, cells in (("a", found.only_a), ("b", found.only_b)):
        if cells:
            print(f"only in {side}: {sum(cells.values())} trials")
            for cell, n in list(cells.items())[:_SHOWN]:
                print(f"  {cell}: {n}")
            if len(cells) > _SHOWN:
                print(f"  and {len(cells) - _SHOWN} more cells")


def _print_table(title: str, rows: list[Difference]) -> None:
    if rows:
        print(f"{title}:")
    for row in rows:
        a, b = ("(none)" if value is None else value for value in (row.a, row.b))
        print(f"  {row.path}: {a} -> {b}")


def gc(
    name: Annotated[str | None, typer.Argument(help="Only trials of this sweep.", show_default=False)] = None,
    finals: Annotated[bool, typer.Option("--finals", help="Final weights too: new evaluations then retrain.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: YesOption = False,
    store: StoreOption = None,
) -> None:
    """Remove what nothing needs: checkpoints of ended trials, cut-short files, scratch of dead drivers, the trash."""
    from runners import care
    from runners.search import Searches
    from runners.store import Store

    opened = Store.open(stores.find(store, name))
    only = frozenset(m.trial.id for m in Searches(opened.plan(name)[1], opened).view().members) if name else None
    with _ledger(opened) as ledger:
        found, busy = care.waste(opened, ledger, only=only, finals=finals)
    kinds: dict[str, list[int]] = {}
    for item in found:
        kinds.setdefault(item.kind, []).append(item.n_bytes)
    for kind, sizes in kinds.items():
        print(f"{kind}: {len(sizes)}, {_bytes(sum(sizes))}")
    n_finals = sum(item.trial is not None for item in found)
    if n_finals:
        print(f"  without their final weights, a new evaluation of these {n_finals} trials trains them again")
    if busy:
        print(f"{len(busy)} trials are in the hands of {next(iter(busy.values()))}: left alone")
    if not found:
        print("nothing to remove")
        return
    total = _bytes(sum(item.n_bytes for item in found))
    if dry_run or not (yes or _agrees(f"remove {total}?")):
        print(f"nothing was removed; `sweep gc{' --finals' if finals else ''} --yes` removes {total}")
        return
    problems = care.remove(found)
    print(f"removed {total}" if not problems else f"could not remove {len(problems)} of {len(found)}")
    for problem in problems[:_SHOWN]:
        print(f"  {problem}")
    if problems:
        raise typer.Exit(Exit.ENVIRONMENT)


def forget(
    name: NameArgument,
    only: Annotated[str, typer.Option("--only", metavar="COND", help="Which trials: 'mechanism: hola, seed: 0'.")],
    yes: YesOption = False,
    store: StoreOption = None,
) -> None:
    """Drop results of trials, so that the next launch trains them again. They stay in trash/ until `sweep gc`."""
    from runners import care
    from runners.search import Searches
    from runners.store import Store
    from sweeps import plan as planning

    opened = Store.open(stores.find(store, name))
    ids = planning.select(Searches(opened.plan(name)[1], opened).view().plan, only)
    there = [trial_id for trial_id in ids if opened.trial_folder(trial_id).is_dir() and opened.last_attempt(trial_id)]
    with _ledger(opened) as ledger:
        others = sorted({sweep for found in ledger.sweeps_of(there).values() for sweep in found} - {name})
        print(f"{len(there)} of the {len(ids)} trials that meet this have results or checkpoints")
        if others:
            print(f"some are also in: {', '.join(others)}")
        if not there:
            return
        if not (yes or _agrees(f"forget {len(there)} trials?")):
            if not sys.stdin.isatty():
                raise UserError("nothing was forgotten: there is no terminal to ask on, --yes agrees")
            print("nothing was forgotten")
            return
        n = care.forget(opened, ledger, there)
    print(f"{n} trials forgotten: their results lie in {opened.root / care.TRASH} until `sweep gc`, the next launch")
    print("trains them again, and MLflow lets go of their runs when it is next written to")


def _agrees(question: str) -> bool:
    """Whether the person at the terminal says yes; False where there is none."""
    return sys.stdin.isatty() and typer.confirm(question, default=False)


@contextmanager
def _ledger(store: Store) -> Iterator[Ledger]:
    from runners.ledger import Ledger

    ledger = Ledger.open(store)
    try:
        ledger.release_dead()
        yield ledger
    finally:
        ledger.close()


def _bytes(n: int) -> str:
    """`312 B`, `1.5 MiB`."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
