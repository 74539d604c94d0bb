"""Plans made by hand, for tests that need one without the spec language: real settings, tiny sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runners.schema import EvalSlice, Member, Pair, Plan, Test, Trial, digest

TASK = {"name": "mqar", "vocab_size": 64, "seq_len": 32, "n_pairs": 4, "valid_examples": 16, "test_examples": 16}
MODEL = {"d_model": 16, "n_layers": 1, "n_heads": 1, "mlp": "none"}
TRAIN = {"steps": 6, "batch_size": 4, "lr": 1e-3}


def trial(seed: int = 0, *, lr: float = 1e-3, steps: int = 6, n_pairs: int = 4) -> Trial:
    """A trial of softmax attention on MQAR; its id is a digest of what is given."""
    settings: dict[str, Any] = {
        "seed": seed,
        "mechanism": {"name": "softmax"},
        "task": TASK | {"n_pairs": n_pairs},
        "model": dict(MODEL),
        "train": TRAIN | {"lr": lr, "steps": steps},
    }
    return Trial(digest(settings), **settings)


def member(one: Trial, *, slices: Sequence[int] = (), arm: str = "") -> Member:
    """`one` in a sweep over the learning rate, evaluated on the set `test` at each number of pairs in `slices`."""
    lr = (one.train or {})["lr"]
    parts = [_slice(one, n, {"task.n_pairs": n}) for n in slices] or [_slice(one, one.task["n_pairs"], {})]
    arm = arm or f"lr-{lr:g}"
    return Member(one, arm, f"{arm} softmax", {"mechanism": "softmax", "train.lr": lr}, 4 * 1024, tuple(parts))


def _slice(one: Trial, n_pairs: int, at: dict[str, Any]) -> EvalSlice:
    task = one.task | {"n_pairs": n_pairs}
    return EvalSlice(digest(task), "test", task, at, {"accuracy": 2 / task["vocab_size"], "loss": 4.16})


def plan(
    *,
    sweep: str = "tiny",
    seeds: Sequence[int] = (0, 1),
    lrs: Sequence[float] = (1e-3, 3e-3),
    slices: Sequence[int] = (),
    steps: int = 6,
    **changes: Any,
) -> Plan:
    """A sweep of lrs x seeds with one test between the first and the last lr. `changes` replace fields of the plan."""
    members = [member(trial(seed, lr=lr, steps=steps), slices=slices) for lr in lrs for seed in seeds]
    by_key = {((m.trial.train or {})["lr"], m.trial.seed): m.trial.id for m in members}
    pairs = [Pair("all", seed, (by_key[lrs[0], seed],), (by_key[lrs[-1], seed],)) for seed in seeds]
    parts = tuple(dict.fromkeys(part.id for m in members for part in m.slices))
    names = members[0].arm, members[-1].arm
    test = Test(
        " over ".join(names),
        *names,
        "test",
        "accuracy",
        "max",
        True,
        "difference",
        None,
        None,
        parts,
        tuple(pairs),
        0,
        0,
    )
    fields: dict[str, Any] = {
        "sweep": sweep,
        "question": "Which learning rate is better?",
        "spec": {"sweep": sweep, "seeds": list(seeds), "lr": list(lrs), "slices": list(slices), "steps": steps},
        "source": f"sweep: {sweep}\n",
        "members": tuple(members),
        "tests": (test,),
        "metrics": {"accuracy": "max", "loss": "min"},
        "resources": {},
        "retry": {},
    }
    return Plan(**(fields | changes))
