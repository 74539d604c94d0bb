"""The cost of a plan in words: what `sweep plan` prints of a `Bill`. A `~` marks what was not measured."""

from __future__ import annotations

from collections.abc import Iterator

from dashboards.needed import pairs_needed
from runners.durations import words
from runners.need import Need
from runners.schema import Plan, Test
from sweeps.bill import Bill, CellCost


def about(text: str, measured: bool) -> str:
    return text if measured else f"~{text}"


def time_of(cell: CellCost) -> str:
    if cell.seconds is None:
        return "?"
    told = about(words(cell.seconds), cell.is_measured)
    least, most = map(words, cell.ranges.get("seconds", (cell.seconds, cell.seconds)))
    return told if least == most else f"{told} ({least} to {most})"


def memory_of(cell: CellCost) -> str:
    return "?" if cell.memory_bytes is None else about(size(cell.memory_bytes), cell.is_measured)


def hours(number: float) -> str:
    return f"{number:,.0f}" if number >= 99.5 else f"{number:.2g}"


def size(n_bytes: float) -> str:
    """`450 MiB`, `1.2 GiB`."""
    return f"{n_bytes / 2**20:.0f} MiB" if n_bytes < 2**30 else f"{n_bytes / 2**30:.3g} GiB"


def totals(bill: Bill) -> Iterator[str]:
    """What is done and what is left, hours, time here, and memory."""
    if bill.store is not None:
        done = bill.needs.get(Need.NOTHING, 0)
        parts = [f"{done:,} of {sum(bill.needs.values()):,} trials done", f"{bill.to_run:,} to run"]
        if bill.needs.get(Need.EVALUATE):
            parts.append(f"{bill.needs[Need.EVALUATE]:,} of them only to evaluate")
        if bill.needs.get(Need.RETRAIN):
            parts.append(f"{bill.needs[Need.RETRAIN]:,} of them to retrain (their final weights are gone)")
        yield f"store {bill.store}: {', '.join(parts)}"
    measured, unit = bill.is_measured, bill.unit
    if bill.hours is None or bill.hours_to_run is None:
        untold = next(cell.cell for cell in bill.cells if cell.seconds is None)
        yield f"cost: cannot be told, as of {untold}: its settings do not say how many updates or parameters it has"
    else:
        line = f"cost: {about(f'{hours(bill.hours)} {unit}', measured)} in all on {bill.device}"
        if bill.store is not None and bill.to_run < sum(bill.needs.values()):
            line += f", {about(hours(bill.hours_to_run), measured)} to run"
        if bill.wall_s:
            line += f": {about(words(bill.wall_s), measured)} here with {bill.at_once:.3g} at once"
        yield line
    if bill.memory_bytes is not None:
        kind = "of the card" if bill.on_gpu else "of a process"
        yield f"memory: {about(size(bill.memory_bytes), measured)} {kind} a trial at most"
    if not measured:
        yield "~ is an estimate: a store that has run trials like these makes it a measurement"
    if any(cell.ranges for cell in bill.cells):
        yield "searched values set the cost: times are means over what may be suggested, memory is the most"
    yield from (f"note: {note}" for note in bill.notes)


def verdict_of(plan: Plan, test: Test) -> str:
    """Whether a comparison has pairs enough for a verdict."""
    needed = pairs_needed(len(plan.tests))
    if test.bounded and test.scale == "difference" and len(test.pairs) < needed:
        return f"out of reach: {needed} pairs needed"
    blocks: dict[str, int] = {}
    for pair in test.pairs:
        blocks[pair.block] = blocks.get(pair.block, 0) + 1
    enough = blocks and min(blocks.values()) >= 2  # fewer have no interval
    return "can be reached" if enough else "out of reach: 2 pairs a block needed"
