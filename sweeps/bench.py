"""`sweep bench`: what this machine's card does. Thin, as the commands in sweeps/operate.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from runners.schema import Exit, UserError

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine."""


@app.command()
def kernels(
    ops: Annotated[
        str | None,
        typer.Option("--ops", metavar="OP,...", help="Only these ops, with commas between.", show_default="all"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, and one long shape less.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write a line of JSON a row.", show_default=False)
    ] = None,
) -> None:
    """Time the kernels on this card, beside their torch forms and flash-linear-attention, if that is installed.

    bf16, forward and with the backward pass. `card ms`: recorded as a CUDA graph and replayed. `called ms`: from
    Python, to the end of the card's work. `error`: largest relative RMS error of outputs and gradients against fp64.
    `of limit`: the least that bytes or products need, at the speed of a copy and a matrix product here, over `card ms`.
    """
    from runners import kernel_bench

    chosen = _chosen(ops, kernel_bench.OPS)
    lacks = kernel_bench.missing()
    if lacks is not None:
        raise UserError(f"`sweep bench kernels` needs {lacks}", Exit.ENVIRONMENT)
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise UserError(f"--json {json_file}: there is no folder {json_file.resolve().parent}")
    machine, limits = kernel_bench.machine(), kernel_bench.limits()
    print(", ".join(f"{name} {value or 'none'}" for name, value in machine.items()))
    print(f"limits: a copy {limits.bytes / 1e12:.2f} TB/s, products in bf16 {limits.flops / 1e12:.0f} TFLOP/s")
    print(kernel_bench.HEADER, flush=True)
    lines = []
    for row in kernel_bench.all_rows(chosen, limits, quick):
        print(kernel_bench.line(row), flush=True)
        lines.append(json.dumps({**row, **machine}) + "\n")
        if json_file is not None:
            json_file.write_text("".join(lines), encoding="utf-8")


def _chosen(ops: str | None, known: tuple[str, ...]) -> list[str]:
    """The ops that `--ops` names, each once."""
    if ops is None:
        return list(known)
    import difflib

    wanted = [name.strip() for name in ops.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"--ops: no op {name!r}{hint} There are: {', '.join(known)}")
    if not wanted:
        raise UserError(f"--ops names none. There are: {', '.join(known)}")
    return list(dict.fromkeys(wanted))
