"""How good a trained model is on one task setting: metrics alone, no files."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn

from runners import tasks
from runners.batch import Batch
from runners.schema import Trial, UserError
from runners.team import ALONE, Team

_log = logging.getLogger(__name__)
TOKENS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Rows are evaluated in batches of about this many tokens: enough to keep the device busy, little memory."""


def run(
    model: nn.Module, trial: Trial, task_settings: dict[str, Any], *, device: torch.device, split: str = "test"
) -> dict[str, float]:
    """Each metric of the task over the rows of `split`, and `n`, the number of rows.

    The rows are the same for every seed and arm. Autocasts as the trial's training did. A task that trains nothing
    measures the model itself, and so does one that evaluates trained models alone.
    """
    task = tasks.build(task_settings)
    if task.vocab_size > trial_vocab(trial):
        raise UserError(
            f"task.vocab_size {task.vocab_size} of an evaluation is above the {trial_vocab(trial)} the model was "
            "trained with: it has no embedding for the tokens beyond"
        )
    dtype = (trial.train or {}).get("dtype", "fp32")
    if hasattr(task, "measure"):
        with autocast(device, dtype):
            return task.measure(model, device)
    return score(model, task, split, device, dtype)


def trial_vocab(trial: Trial) -> int:
    return tasks.build(trial.task).vocab_size


@torch.inference_mode()
def score(
    model: nn.Module, task: Any, split: str, device: torch.device, dtype: str, team: Team = ALONE
) -> dict[str, float]:
    """`run` for a task that is already built. Where memory runs out, fewer rows are scored at once, down to one.

    A team shares the rows out and gets the same numbers in each process. One whose weights are cut among its processes
    has to meet in every forward pass: there, what does not fit fails.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    gathered, whole_team = task.gather(split) if hasattr(task, "gather") else None, team
    if gathered is not None:  # wants every row: each process scores all of them
        team = dataclasses.replace(team, rank=0, size=1)
    n, at_most = 0, 1 << 62
    for rows in task.groups(split):
        width = task.batch(split, torch.tensor(rows[:1]), 0).tokens_BT.shape[1]
        first, at_once = rows.start, min(at_most, len(rows), max(1, TOKENS_AT_ONCE[device.type] // width))
        while first < rows.stop:
            index_B = torch.arange(first, min(first + at_once * team.size, rows.stop))
            mine_B = team.share(index_B)
            try:
                batch = task.batch(split, mine_B if len(mine_B) else index_B[:1], 0, device)
                logits_BQV = forward(model, batch, dtype)
                scores = task.score(logits_BQV, batch)
                totals = {name: v_B.double()[: len(mine_B)].sum() for name, v_B in scores.items()}
            except torch.OutOfMemoryError:
                if at_once == 1 or team.sharded:
                    raise
                totals = None
            if totals is None:  # here, and not where the error still holds on to what did not fit
                at_once = at_most = -(-at_once // 2)
                _log.warning("out of memory: %d rows are evaluated at once from here on", at_once)
                torch.cuda.empty_cache()
                continue
            for name, total in totals.items():
                sums[name] = sums[name] + total if name in sums else total
            if gathered is not None:
                gathered.add(index_B, logits_BQV)
            first += len(index_B)
            n += len(index_B)
    model.train(was_training)
    means = {name: float(team.add(total)) / n for name, total in sums.items()}
    others = task.of_means(means) if hasattr(task, "of_means") else {}
    return whole_team.agree({**means, **others, **(gathered.metrics() if gathered is not None else {}), "n": n})


def forward(model: nn.Module, batch: Batch, dtype: str) -> Tensor:
    """fp32 logits at the labels; `bf16` runs the model under autocast, parameters stay fp32."""
    with autocast(batch.tokens_BT.device, dtype):
        logits_BQV = model(batch.tokens_BT, batch.position_BQ)
    return logits_BQV.float()


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")
