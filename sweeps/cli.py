"""The command line. Thin: parse, call, print; everything heavy is imported inside the command that needs it.

One error path for all commands: a `UserError` is printed on stderr as it is and ends with its exit code, never with a
traceback.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from runners.schema import Exit, UserError
from sweeps import bench, care, follow, operate
from sweeps.operate import JobsOption, JsonOption, OnlyOption, ProfileOption, SetOption, SpecArgument, StoreOption

app = typer.Typer(
    name="sweep",
    help="Declarative experiment sweeps over memory mechanisms of linear-time sequence models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
specs_app = typer.Typer(help="The specs that come with memsweep.", no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        try:
            print(f"memsweep {metadata.version('memsweep')}")
        except metadata.PackageNotFoundError:
            print("memsweep, from its source, not installed")
        raise typer.Exit


@app.callback()
def sweep(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Declarative experiment sweeps over memory mechanisms of linear-time sequence models."""


@app.command()
def validate(spec: SpecArgument, profile: ProfileOption = None, sets: SetOption = None) -> None:
    """Check a spec and say everything that is wrong with it, file:line:column."""
    from sweeps import plan as planning
    from sweeps import show

    found = planning.load(spec, profile=profile, sets=sets or [])
    print(f"{spec}: {show.headline(found)}")
    for note in found.notes:
        print(f"note: {note}")
    for line in planning.not_there_yet(found):
        print(f"not there yet: {line}")


@app.command()
def plan(
    spec: SpecArgument,
    profile: ProfileOption = None,
    sets: SetOption = None,
    only: OnlyOption = None,
    as_json: JsonOption = False,
    everything: Annotated[bool, typer.Option("--all", help="Every cell and pair count, however many.")] = False,
    store: StoreOption = None,
    jobs: JobsOption = None,
) -> None:
    """Show what a spec expands to and what it costs; with a store, what is done and what it measured. Runs nothing."""
    from sweeps import bill as bills
    from sweeps import plan as planning
    from sweeps import show, stores

    gc.disable()  # a plan of ten thousand trials is many objects that all live to the end
    found = planning.load(spec, profile=profile, sets=sets or [], only=only)
    selected = planning.select(found, only) if only else None
    if as_json:
        for line in found.to_lines():
            print(line)
    bill = bills.make(found, store=stores.here(store), only=selected, jobs=jobs)
    if as_json:
        print(json.dumps(bill.as_json(), ensure_ascii=False))
    else:
        show.plan(found, selected, planning.not_there_yet(found), bill, everything=everything)


@app.command()
def ls(
    kind: Annotated[str | None, typer.Argument(help="mechanisms, tasks, specs, model or train.")] = None,
    name: Annotated[str | None, typer.Argument(help="One of them: its parameters and rules.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List what there is to sweep over; with a name, its parameters, their types, defaults and meaning."""
    from sweeps import show

    show.listing(kind, name, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors (yaml-language-server: $schema=...)."""
    from sweeps import json_schema
    from sweeps.catalog import Catalog

    print(json.dumps(json_schema.build(Catalog()), indent=1))


@specs_app.command("copy")
def specs_copy(
    name: Annotated[
        str | None, typer.Argument(help="Name of a shipped spec (sweep ls specs).", show_default=False)
    ] = None,
    to: Annotated[Path, typer.Argument(help="File or folder to write.")] = Path("specs"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
) -> None:
    """Copy a shipped spec into a folder (specs/ without one), to be changed there."""
    from sweeps import library

    if name is None:
        raise UserError(f"which spec? There are: {', '.join(library.names())}")
    print(library.copy(name, to, force=force))


@specs_app.command("ls")
def specs_ls(as_json: JsonOption = False) -> None:
    """List the shipped specs: the same as `sweep ls specs`."""
    from sweeps import show

    show.listing("specs", None, as_json=as_json)


operate.add_commands(app)
follow.add_commands(app)
care.add_commands(app)
app.add_typer(specs_app, name="specs")
app.add_typer(bench.app, name="bench")


def main() -> int:
    """Run the command line and return its exit code. Installed as `sweep`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal in plain ASCII is no reason to fail
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        if code == Exit.INTERRUPTED:  # typer turns Ctrl-C into this code, in silence
            _tell("interrupted")
        return code if isinstance(code, int) else Exit.OK
    except UserError as error:
        _tell(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _tell("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone: nothing is left to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        # The parser's own errors; typer has no public base class for them in all the versions we run with.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            error.show() if hasattr(error, "show") else _tell(error.format_message())
            return Exit.USAGE
        raise


def _tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (BrokenPipeError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
