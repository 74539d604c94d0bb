"""Training of one trial, from any step to the end. Knows no files, no Ray and no MLflow: the caller keeps snapshots.

No step waits for the device: losses are gathered there and fetched in blocks of `log_every` steps. A number that is
not finite ends the run as `diverged`, with the step and the place. Early stopping looks at the validation set, never
at the test set. A run resumed from any snapshot gives the same bits as an undisturbed one (always on the CPU; on a
GPU where the mechanism is deterministic).

Weight decay acts on the matrices of `nn.Linear` and on the embedding alone (`Model.no_decay`).
`dtype: bf16` is autocast: parameters, optimiser, norms, losses and states stay fp32.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from runners import evaluate, micro, probes, streams, tasks
from runners import model as models
from runners.batch import Batch
from runners.feed import Feed
from runners.graphs import Recorded
from runners.kernel_evidence import Witness
from runners.optimise import FlatAdam
from runners.rungs import decide
from runners.schema import Rungs, Trial, UserError
from runners.team import ALONE, Team

_log = logging.getLogger(__name__)
REVISION = 1
LIMITS = [
    "steps is None or steps >= 1",
    "epochs is None or epochs >= 1",
    "tokens is None or tokens >= 1",
    "tokens_per_param is None or tokens_per_param > 0",
    "max_epochs is None or max_epochs > 0",
    "max_epochs is None or tokens is not None or tokens_per_param is not None",
    "batch_size is None or batch_size >= 1",
    "batch_tokens is None or batch_tokens >= seq_len",
    "lr > 0",
    "warmup >= 0",
    "weight_decay >= 0",
    "clip is None or clip > 0",
    "beta1 >= 0 and beta1 < 1",
    "beta2 >= 0 and beta2 < 1",
    "eval_every is None or eval_every >= 1",
]
INERT = {"probe": "True"}
OWNERS = [["steps", "epochs", "tokens", "tokens_per_param"], ["batch_size", "batch_tokens"]]

POINTS = 50
"""About how many points of the training loss a run leaves."""
PROGRESS_EVERY_S = 0.5


class Train:
    """How a model is trained. Exactly one of steps, epochs, tokens, tokens_per_param, and one of the batch sizes.

    Args:
        steps: updates (count)
        epochs: passes over the task's training rows (count)
        tokens: training tokens in all (count)
        tokens_per_param: training tokens for each parameter of the model (count)
        max_epochs: passes over the training rows at most, where tokens or tokens_per_param ask for more; none = any
        batch_size: rows of an update (count)
        batch_tokens: tokens of an update (count); rows = batch_tokens / seq_len
        lr: peak learning rate
        warmup: updates of linear warm-up, or their share of all updates if below 1
        schedule: learning rate after the warm-up; cosine falls to 0
        optimizer: adamw decays weights apart from the gradient, adam adds the decay to the gradient
        beta1: decay of the mean of gradients
        beta2: decay of the mean of squared gradients
        weight_decay: decay of matrices and embeddings (per unit of learning rate)
        clip: largest norm of the gradient of all parameters; none = no clipping
        dtype: precision of the activations; bf16 keeps parameters and states in fp32
        keep: weights to evaluate: the last, or the best on the validation set at any evaluation
        stop_above: stop once the validation score is better than this; none = never
        eval_every: updates between evaluations on the validation set; none = an epoch, or a fifth of the updates
        probe: note numbers about the memory (probe/...) with each validation; it changes nothing else
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        tokens: int | None = None,
        tokens_per_param: float | None = None,
        max_epochs: float | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        lr: float = 1e-3,
        warmup: float = 0.0,
        schedule: Literal["cosine", "constant"] = "cosine",
        optimizer: Literal["adamw", "adam"] = "adamw",
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.01,
        clip: float | None = 1.0,
        dtype: Literal["fp32", "bf16"] = "fp32",
        keep: Literal["last", "best"] = "last",
        stop_above: float | None = None,
        eval_every: int | None = None,
        probe: bool = False,
    ) -> None:
        self.steps, self.epochs, self.tokens, self.tokens_per_param = steps, epochs, tokens, tokens_per_param
        self.max_epochs = max_epochs
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.lr, self.warmup, self.schedule = lr, warmup, schedule
        self.optimizer, self.betas = optimizer, (beta1, beta2)
        self.weight_decay, self.clip, self.dtype = weight_decay, clip, dtype
        self.keep, self.stop_above, self.eval_every, self.probe = keep, stop_above, eval_every, probe

    def rows(self, seq_len: int) -> int:
        """Rows of an update."""
        if self.batch_size is not None:
            return self.batch_size
        if self.batch_tokens is None:
            raise UserError("train needs one of batch_size and batch_tokens")
        return max(1, self.batch_tokens // seq_len)

    def n_steps(self, steps_per_epoch: int, tokens_per_epoch: int, n_params: int) -> int:
        """Updates in all, from whichever unit was given. The first that is given wins: the others are derived."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return self.epochs * steps_per_epoch
        tokens = self.tokens
        if tokens is None:
            if self.tokens_per_param is None:
                raise UserError("train needs one of steps, epochs, tokens and tokens_per_param")
            tokens = round(self.tokens_per_param * n_params)
        steps = -(-tokens * steps_per_epoch // tokens_per_epoch)
        return max(1, steps if self.max_epochs is None else min(steps, int(self.max_epochs * steps_per_epoch)))

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of update `step` (0-based) of `steps`."""
        warm = self.warmup if self.warmup >= 1 else self.warmup * steps
        if step < warm:
            return self.lr * min(1.0, (step + 1) / warm)
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, steps - warm)))


@dataclass
class Snapshot:
    """Everything a bit-exact resume needs. `meta` is plain JSON."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass
class Point:
    """Metrics after `step` updates."""

    step: int
    metrics: dict[str, float]


@dataclass
class Fit:
    """How training ended. `snapshot` holds the weights to evaluate; a `diverged` run keeps the last finite ones.

    That of an interrupted or pruned run is to be continued from, and `pruned` says at which rung it was cut off.
    """

    status: str  # complete | diverged | pruned | interrupted
    step: int
    metrics: dict[str, float]
    n_params: int
    tokens: int
    stopped_by: str  # steps | stop_above | diverged | pruned | interrupted
    diverged: dict[str, Any] | None
    snapshot: Snapshot
    micro_batch: int | None = None
    """Rows that were trained at once; None = all rows of the batch."""
    pruned: dict[str, Any] | None = None
    evidence: list[dict[str, Any]] | None = None
    """What the ops did in the first update of this process (`runners/kernel_evidence.py`)."""


def fit(
    trial: Trial,
    *,
    device: torch.device,
    start: Snapshot | None,
    commit: Callable[[Snapshot, list[Point]], None],
    progress: Callable[[int, int, dict[str, float]], None],
    should_stop: Callable[[], bool],
    checkpoint_every_s: float,
    micro_batch: int | None = None,
    rungs: Rungs | None = None,
    team: Team = ALONE,
) -> Fit:
    """Trains `trial` from `start` (None = from its initial weights) to its end.

    `commit(snapshot, points)` is called every `checkpoint_every_s`, at the end and when `should_stop` says so; it
    gets the points since the last commit, each exactly once over a run and its resumes. `progress(step, steps,
    latest metrics)` is for people. When it was interrupted, the run is to be continued from its last snapshot.
    A snapshot of an ended run gives that run's `Fit` again. Out-of-memory errors are raised as they are; with
    `micro_batch` an update runs that many rows at a time and needs less memory: the same batch, clip and step.
    With `rungs` the run ends as pruned where it is worse than the cut-off of a rung.
    With a `team` each of its processes calls this with the same arguments but those that call back, of which rank 0's
    alone count; the numbers are those of one process but for the order of sums, and any team goes on from any snapshot.
    """
    if start is not None and "ended" in start.meta:
        return Fit(**start.meta["ended"], snapshot=start)
    if trial.train is None:
        return _untrained(trial, device)
    run = _Run(trial, device, micro_batch, rungs, team)
    if start is not None:
        run.load(start)
        run.look_at_rungs()  # the run may have been killed between a validation and what follows from it
    run.announce = _every(PROGRESS_EVERY_S, progress)
    committed = time.monotonic()
    while not run.over:
        is_due = time.monotonic() - committed >= checkpoint_every_s
        what = team.agree("stop" if should_stop() else "commit" if is_due else "")
        if what:
            snapshot = run.snapshot()
            commit(snapshot, run.take_points())
            committed = time.monotonic()
        if what == "stop":
            return run.ended("interrupted", "interrupted", snapshot)
        run.advance()
        run.announce(run.step, run.steps, run.metrics)
    if run.pruned is not None:
        snapshot = run.snapshot()
        commit(snapshot, run.take_points())
        return run.ended("pruned", "pruned", snapshot)
    result = run.final()
    commit(result.snapshot, run.take_points())
    progress(run.step, run.steps, run.metrics)
    return result


def load_model(trial: Trial, snapshot: Snapshot, device: torch.device) -> models.Model:
    """The trial's model with the weights of `snapshot`, on `device`, in evaluation mode."""
    model = models.build(trial)
    model.load_state_dict(_part(snapshot.tensors, "model."))
    return model.to(device).eval()


def batch_rows(trial: Trial) -> int:
    """Rows of an update of `trial`; of a trial without updates 1."""
    return 1 if trial.train is None else Train(**trial.train).rows(tasks.build(trial.task).seq_len)


def _untrained(trial: Trial, device: torch.device) -> Fit:
    """What a trial of a task with nothing to train is evaluated with: its initial weights."""
    model = models.build(trial, device)
    tensors = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    n_params = sum(p.numel() for p in model.parameters())
    return Fit("complete", 0, {}, n_params, 0, "steps", None, Snapshot(0, tensors, {}))


def data_seed(trial: Trial) -> int:
    """The key of a trial's training rows: seed, task and model, never mechanism or train."""
    return streams.key("data", trial.seed, *models.stream_settings(trial))


def _every(seconds: float, call: Callable[..., None]) -> Callable[..., None]:
    """`call`, at most once in `seconds`."""
    last = -math.inf

    def limited(*args: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            call(*args)

    return limited


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class _Run:
    """One training in memory: model, optimiser, rows, and the losses not yet fetched."""

    def __init__(
        self,
        trial: Trial,
        device: torch.device,
        micro_batch: int | None = None,
        rungs: Rungs | None = None,
        team: Team = ALONE,
    ) -> None:
        assert trial.train is not None
        self.team = team
        self.device, self.train, self.micro_batch = device, Train(**trial.train), micro_batch
        self.task = tasks.build(trial.task)
        self.model = models.build(trial, "cpu" if team.sharded else device).train()
        if team.sharded:
            from runners import sharded  # a second of imports that few need

            if self.train.probe:
                raise UserError("train.probe reads weights outside of the model's own pass: not with resources.shard")
            sharded.cut(self.model, device, team)
        self.n_params = sum(p.numel() for p in self.model.parameters())
        facts = sys.modules[type(self.task).__module__]
        self.select, self.sign = facts.SELECT, 1 if facts.METRICS[facts.SELECT] == "max" else -1
        t = self.train
        self.feed = Feed(self.task, t.rows(self.task.seq_len), data_seed(trial), device)
        self.steps = t.n_steps(self.feed.steps_per_epoch, self.feed.tokens_per_epoch, self.n_params)
        share = self.feed.steps_per_epoch if t.epochs is not None else -(-self.steps // 5)
        self.eval_every = t.eval_every or share
        self.log_every = max(1, self.steps // POINTS)
        kind = sharded.ShardedAdam if team.sharded else FlatAdam
        self.optimiser = kind(
            self.model,
            self.model.no_decay(),
            optimizer=t.optimizer,
            betas=t.betas,
            eps=1e-8,
            weight_decay=t.weight_decay,
            clip=t.clip,
            team=team,
        )
        self.update = Recorded(self._update, device, _log.warning)
        self.update.on &= not team.sharded  # weights come and go, in memory that does not stay
        self.witness = Witness()
        self.step = self.tokens = self.unread = 0
        self.losses = torch.zeros(self.log_every, device=device)
        self.norms = torch.zeros(self.log_every, device=device)
        self.metrics: dict[str, float] = {}
        self.points: list[Point] = []
        self.best: dict[str, Tensor] = {}
        self.best_scores: dict[str, float] = {}
        self.stopped_by: str | None = None
        self.diverged: dict[str, Any] | None = None
        self.rungs = rungs
        self.pruned: dict[str, Any] | None = None
        self.announce: Callable[..., None] = lambda *_: None

    @property
    def over(self) -> bool:
        return self.stopped_by is not None

    def advance(self) -> None:
        """One update, and whatever falls due after it."""
        batch = self.feed.batch(self.step)
        self.optimiser.set_rate(self.train.lr_at(self.step, self.steps))
        with self.witness.listening():
            self.losses[self.unread], self.norms[self.unread] = self.update(batch)
        self.tokens += batch.tokens_BT.shape[0] * batch.tokens_BT.shape[1]
        self.step += 1
        self.unread += 1
        last = self.step == self.steps
        if self.step % self.log_every == 0 or last:
            self._read()
        if (self.step % self.eval_every == 0 or last) and not self.over:
            self._validate()
        if last and not self.over:
            self.stopped_by = "steps"

    def _update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the norm of its gradient before clipping."""
        loss = micro.backward(self.model, batch, self.train.dtype, self.micro_batch, self.team)
        return loss, self.optimiser.step(loss)

    def _point(self, metrics: dict[str, float]) -> None:
        self.metrics.update(metrics)
        if self.points and self.points[-1].step == self.step:
            self.points[-1].metrics.update(metrics)
        else:
            self.points.append(Point(self.step, metrics))

    def _read(self) -> None:
        """Fetches the losses since the last point: the only place where training waits for the device."""
        losses, norms = (values[: self.unread].tolist() for values in (self.losses, self.norms))
        first = self.step - self.unread
        self.unread = 0
        for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            if not math.isfinite(loss) or not math.isfinite(norm):
                self._diverge(first + offset)
                return
        self._point({"train/loss": sum(losses) / len(losses), "train/grad_norm": sum(norms) / len(norms)})

    def _diverge(self, step: int) -> None:
        """The guard has kept the weights from before update `step`, so the update can be looked at again."""
        self.stopped_by = "diverged"
        if self.team.sharded:
            self.diverged = {"step": step + 1, "where": "?", "what": "not looked for: weights are cut among workers"}
            return
        batch = self.feed.batch(step)  # the whole of it: each process of a team sees, and says, the same
        rows = (
            self.micro_batch if self.team.size == 1 else self.micro_batch or -(-len(batch.target_BQ) // self.team.size)
        )
        place = micro.diagnose_parts(self.model, batch, self.train.dtype, rows)
        self.diverged = {"step": step + 1, **place}

    def _validate(self) -> None:
        if self.unread:
            self._read()
        if self.over:
            return
        scores = evaluate.score(self.model, self.task, "valid", self.device, self.train.dtype, self.team)
        del scores["n"]
        if not math.isfinite(scores.get("loss", 0.0)):
            # The last update's own loss was of the weights before it, and NaN has a most likely label too.
            self.stopped_by = "diverged"
            self.diverged = {"step": self.step, "where": "validation", "what": "its loss is not finite"}
            return
        valid = {f"valid/{name}": value for name, value in scores.items()}
        if self.train.probe:
            valid |= probes.read(self.model, self.task, self.device, self.train.dtype)
        self._point(valid)
        score = self.sign * scores[self.select]
        best = self.best_scores.get(f"valid/{self.select}", -self.sign * math.inf)
        if self.train.keep == "best" and score > self.sign * best:
            self.best_scores = valid
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.train.stop_above is not None and score > self.sign * self.train.stop_above:
            self.stopped_by = "stop_above"
        elif self.step < self.steps:
            self.look_at_rungs()

    def look_at_rungs(self) -> None:
        """Ends the run if the validation of this very step, if there was one, falls short of a rung's cut-off."""
        if self.rungs is None or self.step % self.eval_every or self.step >= self.steps:
            return
        score = self.metrics.get(self.rungs.metric, math.nan)
        self.pruned = decide(self.rungs, self.step - self.eval_every, self.step, score)
        if self.pruned is not None:
            self.stopped_by = "pruned"

    def take_points(self) -> list[Point]:
        """The points since they were last taken."""
        taken, self.points = self.points, []
        return taken

    def snapshot(self) -> Snapshot:
        """A copy of everything the next update depends on."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"optimiser.{name}": value for name, value in self.optimiser.tensors().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        tensors |= {"unread.losses": self.losses, "unread.norms": self.norms, "unread.bad": self.optimiser.bad}
        meta = {"step": self.step, "tokens": self.tokens, "unread": self.unread, "metrics": dict(self.metrics)}
        if self.micro_batch is not None:
            meta["micro_batch"] = self.micro_batch
        if self.best:
            meta["best_scores"] = self.best_scores
        return Snapshot(self.step, self._copies(tensors), meta)

    def _copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.team.sharded:
            from runners import sharded

            return {name: sharded.whole(value, self.team).clone() for name, value in tensors.items()}
        return {name: value.detach().clone() for name, value in tensors.items()}

    def load(self, start: Snapshot) -> None:
        """Continues from `start` as if nothing had happened."""
        with torch.no_grad():
            for name, parameter in self.model.state_dict(keep_vars=True).items():
                parameter.copy_(self._share(start.tensors[f"model.{name}"], parameter))
        self.optimiser.load(_part(start.tensors, "optimiser."))
        self.optimiser.bad.copy_(start.tensors["unread.bad"])
        self.losses.copy_(start.tensors["unread.losses"])
        self.norms.copy_(start.tensors["unread.norms"])
        self.best = {name: value.to(self.device) for name, value in _part(start.tensors, "best.").items()}
        self.best_scores = dict(start.meta.get("best_scores", {}))
        self.step, self.tokens, self.unread = (start.meta[name] for name in ("step", "tokens", "unread"))
        self.metrics = dict(start.meta["metrics"])

    def _share(self, full: Tensor, parameter: Tensor) -> Tensor:
        if self.team.sharded:
            from runners import sharded

            return sharded.share(full, parameter)
        return full

    def final(self) -> Fit:
        """The end of a run: its snapshot holds the weights to evaluate and how it ended, no optimiser.

        Its validation scores are those of the weights that were kept.
        """
        assert self.stopped_by is not None
        status = "diverged" if self.diverged else "complete"
        weights = self.best or self.model.state_dict()
        tensors = self._copies({f"model.{name}": value for name, value in weights.items()})
        result = self.ended(status, self.stopped_by, Snapshot(self.step, tensors, {}))
        fields = {
            name: getattr(result, name) for name in Fit.__dataclass_fields__ if name not in ("snapshot", "evidence")
        }
        result.snapshot.meta.update(step=self.step, ended=fields)
        result.evidence = self.witness.tell()
        return result

    def ended(self, status: str, stopped_by: str, snapshot: Snapshot) -> Fit:
        return Fit(
            status,
            self.step,
            self.metrics | self.best_scores,
            self.n_params,
            self.tokens,
            stopped_by,
            self.diverged,
            snapshot,
            self.micro_batch,
            self.pruned,
        )
