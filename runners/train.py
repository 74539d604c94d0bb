"""Training of one trial, from any step to the end. Knows no files, no Ray and no MLflow: the caller keeps snapshots.

No step waits for the device: losses are gathered there and fetched in blocks of `log_every` steps. A number that is
not finite ends the run as `diverged`, with the step and the place. Early stopping looks at the validation set, never
at the test set. A run resumed from any snapshot gives the same bits as an undisturbed one (always on the CPU; on a
GPU where the mechanism is deterministic).

Weight decay acts on the matrices of `nn.Linear` and on the embedding alone (`Model.no_decay`).
`dtype: bf16` is autocast: parameters, optimiser, norms, losses and states stay fp32.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runners import evaluate, streams, tasks
from runners import model as models
from runners.feed import Feed
from runners.optimise import FlatAdam
from runners.schema import Trial, UserError

REVISION = 1
LIMITS = [
    "steps is None or steps >= 1",
    "epochs is None or epochs >= 1",
    "tokens is None or tokens >= 1",
    "tokens_per_param is None or tokens_per_param > 0",
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
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        tokens: int | None = None,
        tokens_per_param: float | None = None,
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
    ) -> None:
        self.steps, self.epochs, self.tokens, self.tokens_per_param = steps, epochs, tokens, tokens_per_param
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.lr, self.warmup, self.schedule = lr, warmup, schedule
        self.optimizer, self.betas = optimizer, (beta1, beta2)
        self.weight_decay, self.clip, self.dtype = weight_decay, clip, dtype
        self.keep, self.stop_above, self.eval_every = keep, stop_above, eval_every

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
        return max(1, -(-tokens * steps_per_epoch // tokens_per_epoch))

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
    """How training ended. `snapshot` holds the weights to evaluate; a `diverged` run keeps the last finite ones."""

    status: str  # complete | diverged | interrupted
    step: int
    metrics: dict[str, float]
    n_params: int
    tokens: int
    stopped_by: str  # steps | stop_above | diverged | interrupted
    diverged: dict[str, Any] | None
    snapshot: Snapshot
