"""One trial on several processes, through Ray Train: its workers, their process group, and what becomes of failures.

The actor that Tune has for the trial only starts the workers and waits. Rank 0 runs the job as any trial's worker does,
in the trial's folder; the others train along (`runners/team.py`). A worker that fails or is killed takes all with it:
Ray Train ends the group, and the trial is tried again from its last checkpoint like any other. Ray Train itself retries
nothing and keeps nothing: its own folder is scratch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

from runners.scratch import make as make_scratch
from runners.team import Team


class MemberFailedError(Exception):
    """The job failed in this process; its folder says how."""


def run(task: dict[str, Any]) -> None:
    """Run the job of `task` on `task["team"]["workers"]` workers. Raises what Ray Train does if one failed."""
    given, scratch = task["team"], make_scratch()
    on_cards = given["device"] != "cpu"
    trainer = TorchTrainer(
        _work,
        train_loop_config=task,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_cards else "gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=given["workers"],
            use_gpu=on_cards,
            resources_per_worker={"CPU": given["threads"]} | ({"GPU": 1} if on_cards else {}),
        ),
        run_config=train.RunConfig(
            name="team", storage_path=str(scratch), failure_config=train.FailureConfig(max_failures=0)
        ),
    )
    try:
        trainer.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _work(task: dict[str, Any]) -> None:
    """What each worker does."""
    from runners import ray_tune, trial

    context = train.get_context()
    team = Team(context.get_world_rank(), context.get_world_size(), task["team"]["sharded"])
    os.environ["OMP_NUM_THREADS"] = str(task["team"]["threads"])
    if not team.leads:
        trial.follow(team, Path(task["job"]).parent)
        return
    outcome = ray_tune.run_task(task, team)
    if outcome.error is not None:  # failed, or lost its lease: the others may be in the middle of an update
        raise MemberFailedError(outcome.error)
