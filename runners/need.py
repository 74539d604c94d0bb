"""What a member still needs, by its folder alone: no ledger, so that a plan can say it too."""

from __future__ import annotations

from enum import StrEnum

from runners.checkpoints import FINAL
from runners.rungs import stands
from runners.schema import Member, Status
from runners.store import Store


class Need(StrEnum):
    """What a member still needs."""

    NOTHING = "nothing"
    TRAIN = "train"
    EVALUATE = "evaluate"
    RETRAIN = "train again"
    """New evaluations are asked of a trial whose final weights are gone."""
    RERUN = "train afresh"
    """Other code than today's made what is there, and it was asked to be made again."""


def need(store: Store, member: Member) -> Need:
    """What the folder says, read and checked. A pruned trial is done for the suggestion that was cut off, only."""
    result = store.result(member.trial.id)
    if result is None or not stands(result, member.rungs):
        return Need.TRAIN
    if result["status"] != Status.COMPLETE or not store.missing_slices(member.trial.id, member.slices):
        return Need.NOTHING
    final = store.trial_folder(member.trial.id) / "checkpoints" / FINAL / "meta.json"
    return Need.EVALUATE if final.exists() else Need.RETRAIN
