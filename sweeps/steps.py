"""At which updates a training metric is measured, where that follows from the spec: `at: {step: N}` asks for one."""

from __future__ import annotations

from collections.abc import Mapping

from runners import corpus
from sweeps.blocks import Resolved, longest_row


def why_not(step: int, set_: str, blocks: Mapping[str, Resolved]) -> str | None:
    """Why a trial has no `set_` metric (train or valid) at `step`, and where it has; None if it has, or may have.

    The rules are the trainer's: validation falls every `eval_every` updates, every epoch or fifth of the updates
    without one, and at the last; the loss of training is read POINTS times, at validations and at the last.
    """
    train = blocks.get("train")
    last = n_steps(blocks)
    if train is None or last is None:
        return None
    if step > last:
        return f"ends at {last:,}"
    every = train.env.get("eval_every") or (last // train.env["epochs"] if train.env.get("epochs") else -(-last // 5))
    gaps = [every]
    if set_ == "train":
        gaps.append(max(1, last // train.block.literals.get("POINTS", 1)))
    if step == last or any(step % gap == 0 for gap in gaps):
        return None
    near = {min(last, at) for gap in gaps for at in (step // gap * gap, (step // gap + 1) * gap) if at}
    nearest = min(near, key=lambda at: (abs(at - step), at))
    how = " or ".join(f"{gap:,}" for gap in gaps)
    return f"measures {set_} metrics every {how} updates and at the last, {last:,}; nearest: {nearest:,}"


def n_steps(blocks: Mapping[str, Resolved]) -> int | None:
    """Updates of a trial that says `steps` or `epochs`; None where they follow from tokens."""
    train, task = blocks["train"].env if "train" in blocks else {}, blocks["task"].env
    if train.get("steps") is not None:
        return train["steps"]
    rows = train.get("batch_size") or max(1, (train.get("batch_tokens") or 0) // (longest_row(task) or 1))
    own = corpus.rows(blocks["task"].settings, "train")
    sizes = [part.get("examples", own) for part in task.get("segments") or [{}]]
    if train.get("epochs") is None or None in sizes:
        return None
    return train["epochs"] * sum(-(-size // rows) for size in sizes)
