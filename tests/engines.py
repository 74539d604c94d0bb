"""A stand-in for training: exact, instant, and made to misbehave on demand. The contract is that of `runners.train`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from runners.rungs import decide
from runners.schema import Rungs, Trial
from runners.train import Fit, Point, Snapshot
from runners.trial import Engine


@dataclass
class Fake:
    """Trains by adding the learning rate to a weight, once a step. `before_step(trial, step)` may raise or wait.

    With `score(trial, step)` it validates where it commits, and may be cut off there.
    """

    before_step: Callable[[Trial, int], None] = lambda _trial, _step: None
    commit_every: int = 2
    step_s: float = 0.0
    diverge: frozenset[int] = frozenset()
    score: Callable[[Trial, int], float] | None = None
    diverges: Callable[[Trial], bool] = lambda _trial: False
    trained: list[str] = field(default_factory=list)
    started_at: list[int] = field(default_factory=list)
    evaluated: list[str] = field(default_factory=list)
    fits: int = 10**9
    """Rows at once that fit into memory."""
    sizes: list[int | None] = field(default_factory=list)

    def engine(self) -> Engine:
        return Engine(self.fit, self.load_model, self.evaluate, Snapshot, lambda trial: trial.train["batch_size"])

    def fit(
        self,
        trial: Trial,
        *,
        device: torch.device,
        start: Snapshot | None,
        commit: Callable[..., None],
        progress: Callable[..., None],
        should_stop: Callable[[], bool],
        checkpoint_every_s: float,
        micro_batch: int | None = None,
        rungs: Rungs | None = None,
    ) -> Fit:
        steps, lr = trial.train["steps"], trial.train["lr"]
        weight = start.tensors["model.w"].clone() if start else torch.full((3,), float(trial.seed))
        step = start.step if start else 0
        self.trained.append(trial.id)
        self.started_at.append(step)
        self.sizes.append(micro_batch)
        size = {"micro_batch": micro_batch} if micro_batch else {}
        points: list[Point] = []
        while step < steps:
            cut = self._cut(trial, rungs, step)
            if cut is not None:
                snapshot = Snapshot(step, {"model.w": weight}, {})
                commit(snapshot, points)
                return Fit("pruned", step, {}, 3, step, "pruned", None, snapshot, pruned=cut)
            if should_stop():
                snapshot = Snapshot(step, {"model.w": weight}, size)
                commit(snapshot, points)
                return Fit("interrupted", step, {}, 3, step, "interrupted", None, snapshot)
            self.before_step(trial, step)
            if (micro_batch or trial.train["batch_size"]) > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            time.sleep(self.step_s)
            weight = weight + lr
            step += 1
            points.append(Point(step, {"train/loss": float(weight[0]), "train/bad": float("nan")}))
            if self.score is not None and step % self.commit_every == 0:
                points[-1].metrics["valid/accuracy"] = self.score(trial, step)
            progress(step, steps, points[-1].metrics)
            if step % self.commit_every == 0 and step < steps:
                commit(Snapshot(step, {"model.w": weight}, size), points)
                points = []
        snapshot = Snapshot(step, {"model.w": weight}, {"inf": float("inf")})
        commit(snapshot, points)
        metrics = {"train/loss": float(weight[0]), "valid/accuracy": 0.5, "bad": float("inf")}
        if self.score is not None:
            metrics["valid/accuracy"] = self.score(trial, step)
        if trial.seed in self.diverge or self.diverges(trial):
            return Fit("diverged", step, metrics, 3, step, "diverged", {"step": step, "loss": float("nan")}, snapshot)
        return Fit("complete", step, metrics, 3, step * 8, "steps", None, snapshot, micro_batch)

    def _cut(self, trial: Trial, rungs: Rungs | None, step: int) -> dict[str, Any] | None:
        if rungs is None or self.score is None or step == 0 or step % self.commit_every:
            return None
        return decide(rungs, step - self.commit_every, step, self.score(trial, step))

    def load_model(self, trial: Trial, snapshot: Snapshot, device: torch.device) -> torch.Tensor:
        return snapshot.tensors["model.w"]

    def evaluate(
        self, model: torch.Tensor, trial: Trial, task: dict[str, Any], *, device: torch.device
    ) -> dict[str, float]:
        self.evaluated.append(trial.id)
        return {"accuracy": float(model.sum()) / task["n_pairs"], "loss": 1.0, "n": 16}
