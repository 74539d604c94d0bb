"""How good a trained model is on one task setting: metrics alone, no files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runners import tasks
from runners.batch import Batch
from runners.schema import Trial, UserError

TOKENS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Rows are evaluated in batches of about this many tokens: enough to keep the device busy, little memory."""


def run(
    model: nn.Module, trial: Trial, task_settings: dict[str, Any], *, device: torch.device, split: str = "test"
) -> dict[str, float]:
    """Mean over the rows of `split` of each metric of the task, and `n`, the number of rows.

    The rows are the same for every seed and arm. Autocasts as the trial's training did.
    """
    task = tasks.build(task_settings)
    if task.vocab_size > trial_vocab(trial):
        raise UserError(
            f"task.vocab_size {task.vocab_size} of an evaluation is above the {trial_vocab(trial)} the model was "
            "trained with: it has no embedding for the tokens beyond"
        )
    return score(model, task, split, device, (trial.train or {}).get("dtype", "fp32"))


def trial_vocab(trial: Trial) -> int:
    return tasks.build(trial.task).vocab_size


@torch.inference_mode()
def score(model: nn.Module, task: Any, split: str, device: torch.device, dtype: str) -> dict[str, float]:
    """`run` for a task that is already built."""
    was_training = model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    n = 0
    for rows in task.groups(split):
        at_once = max(1, TOKENS_AT_ONCE[device.type] // task.batch(split, torch.tensor(rows[:1]), 0).tokens_BT.shape[1])
        for first in range(rows.start, rows.stop, at_once):
            index_B = torch.arange(first, min(first + at_once, rows.stop))
            batch = task.batch(split, index_B, 0, device)
            for name, value_B in task.score(forward(model, batch, dtype), batch).items():
                total = value_B.double().sum()
                sums[name] = sums[name] + total if name in sums else total
            n += len(index_B)
    model.train(was_training)
    return {**{name: float(total) / n for name, total in sums.items()}, "n": n}


def forward(model: nn.Module, batch: Batch, dtype: str) -> Tensor:
    """fp32 logits at the labels; `bf16` runs the model under autocast, parameters stay fp32."""
    with torch.autocast(batch.tokens_BT.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        logits_BQV = model(batch.tokens_BT, batch.position_BQ)
    return logits_BQV.float()
