"""Learning curves of a running sweep: a few of them, thinned, drawn as plain SVG.

One curve an arm, of its best trial so far at the last setting with scores, then trials that run. Committed points come
from the trials' folders; what a running worker says meanwhile is added, and is as lost as the worker if it dies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dashboards.live import Follower
from dashboards.live_snapshot import Snapshot, leaders
from dashboards.live_words import number
from runners.store import read_points

CURVES = 12
"""How many are drawn at most."""
STRETCHES = 100
"""Each curve keeps its lowest and its highest point of so many equal stretches of steps, its first and its last."""
SIZE = 1000
"""Width and height of a drawing's own coordinates; the page stretches it."""

Points = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Curve:
    """One trial's curve. `colour` counts arms in plan order, so that an arm keeps its own while others come."""

    trial: str
    arm: str
    label: str
    colour: int
    is_running: bool
    points: list[tuple[int, float]]

    @property
    def last(self) -> str:
        """`0.953 at step 200`."""
        step, value = self.points[-1]
        return f"{number(value)} at step {step:,}"


@dataclass(frozen=True)
class Axis:
    """Even ticks; the first and the last are the ends of the axis."""

    ticks: tuple[float, ...]

    @property
    def labels(self) -> list[str]:
        return [f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:.4g}" for tick in self.ticks]

    def at(self, value: float) -> float:
        """0 at the first tick, 1 at the last."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


@dataclass(frozen=True)
class Chart:
    """Curves of one metric by step, with what a reader who cannot see them is told."""

    metric: str
    metrics: list[str]
    curves: list[Curve]
    x: Axis
    y: Axis

    @property
    def summary(self) -> str:
        n = len(self.curves)
        reached = "; ".join(f"{one.label} {one.last}" for one in self.curves[:3])
        more = f"; and {n - 3} more in the table" if n > 3 else ""
        return f"{self.metric} by step, {n} curve{'' if n == 1 else 's'}: {reached}{more}."

    def path(self, curve: Curve) -> str:
        """The curve in the drawing's coordinates."""
        places = ((SIZE * self.x.at(step), SIZE * (1 - self.y.at(value))) for step, value in curve.points)
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)

    def data(self, curve: Curve) -> str:
        """The curve's points for the page's script: steps and values with their places, 0 to 1."""
        rows = [
            [step, number(value), round(self.x.at(step), 4), round(1 - self.y.at(value), 4)]
            for step, value in curve.points
        ]
        return json.dumps(rows, separators=(",", ":"))


class Curves:
    """Draws the curves of one follower; remembers the points of what it drew last."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._read: dict[str, tuple[tuple[str, ...], Points]] = {}

    def draw(self, found: Snapshot, metric: str | None = None) -> Chart | None:
        """The chart of `metric` (of the sweep's own on validation data, if there is none such); None without points."""
        chosen = self._chosen(found)
        points = {trial_id: self._points(trial_id) for trial_id, *_ in chosen}
        self._read = {trial_id: read for trial_id, read in self._read.items() if trial_id in points}
        names = sorted({name for rows in points.values() for values in rows.values() for name in values})
        # A metric of one point a curve is no curve; one nobody asked for is then left out.
        own = [name for name in names if any(sum(name in row for row in rows.values()) > 1 for rows in points.values())]
        if not own:
            return None
        if metric not in own:
            wanted = f"valid/{found.measure.metric}"
            metric = wanted if wanted in own else "train/loss" if "train/loss" in own else own[0]
        arms = list(dict.fromkeys(cell.arm for cell in found.cells))
        curves = []
        for trial_id, arm, label, is_running in chosen:
            line = sorted((step, row[metric]) for step, row in points[trial_id].items() if metric in row)
            if line:
                colour = arms.index(arm) if arm in arms else len(arms)
                curves.append(Curve(trial_id, arm, label, colour, is_running, thin(line)))
        steps = [step for curve in curves for step, _ in curve.points]
        values = [value for curve in curves for _, value in curve.points]
        return Chart(metric, own, curves, axis([0, *steps], 4), axis(values, 5))

    def _chosen(self, found: Snapshot) -> list[tuple[str, str, str, bool]]:
        """(trial, arm, label, whether it runs) of the curves to draw."""
        led = leaders(found)
        best: dict[str, tuple[str, str, str, bool]] = {}
        for cell in list(led.values())[-1] if led else ():
            if cell.best_trial is not None and cell.arm not in best:
                best[cell.arm] = (cell.best_trial, cell.arm, f"{cell.cell}, best so far", False)
        running = [(one.trial, one.arm, f"{one.cell}, seed {one.seed}, running", True) for one in found.running]
        room = max(CURVES - len(running), CURVES // 2)
        return [*list(best.values())[:room], *running][:CURVES]

    def _points(self, trial_id: str) -> Points:
        folder = self._follower.store.trial_folder(trial_id)
        files = _names(folder / "metrics")
        if self._read.get(trial_id, ((), {}))[0] != files or not files:
            self._read[trial_id] = files, _merged((step, row) for step, row, _ in read_points(folder))
        live = [said for (one, _), said in self._follower.points.items() if one == trial_id]
        return _merged([*self._read[trial_id][1].items(), *(item for said in live for item in said.items())])


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ()


def _merged(rows: Iterable[tuple[int, Mapping[str, float]]]) -> Points:
    points: Points = {}
    for step, metrics in rows:
        points.setdefault(step, {}).update({name: v for name, v in metrics.items() if math.isfinite(v)})
    return points


def thin(line: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most two points a stretch, its extremes, so that no spike is lost; the first and the last always."""
    if len(line) <= 2 * STRETCHES:
        return list(line)
    first, last = line[0][0], line[-1][0]
    groups: dict[int, list[tuple[int, float]]] = {}
    for point in line:
        groups.setdefault(int(STRETCHES * (point[0] - first) / (last - first + 1)), []).append(point)
    kept = {line[0], line[-1]}
    for group in groups.values():
        kept |= {min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}
    return sorted(kept)


def axis(values: Sequence[float], intervals: int) -> Axis:
    """About `intervals` even stretches of 1, 2 or 5 times a power of ten that hold all values."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / intervals
    power = 10 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(tuple(step * tick for tick in range(first, last + 1)))
