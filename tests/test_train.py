"""Training: that it learns, that any interruption leaves no trace, and how it ends."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from runners import diagnose, evaluate, streams, tasks
from runners import model as models
from runners import train as training
from runners.feed import Feed
from runners.optimise import FlatAdam
from runners.schema import Trial, UserError
from runners.train import Fit, Point, Snapshot, Train

CPU = torch.device("cpu")
TASK = {"name": "mqar", "vocab_size": 32, "seq_len": 16, "n_pairs": 2, "valid_examples": 64, "test_examples": 64}
MODEL = {"d_model": 32, "n_layers": 2, "n_heads": 1, "mlp": {"name": "gelu", "width": 32}}
TRAIN = {"steps": 30, "batch_size": 8, "lr": 1e-2, "warmup": 5}
CLEAN = {"power": 1.0, "random_non_queries": False}
SEGMENTS = [{"seq_len": 8, "n_pairs": 2, "examples": 20}, {"seq_len": 16, "n_pairs": 4, "examples": 30}]


def trial(seed: int = 0, mechanism: str = "softmax", task: dict[str, Any] | None = None, **train: Any) -> Trial:
    return Trial("t", seed, {"name": mechanism}, {**TASK, **(task or {})}, MODEL, {**TRAIN, **train})


class Log:
    """What a caller of `fit` keeps."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.points: list[Point] = []

    def __call__(self, snapshot: Snapshot, points: list[Point]) -> None:
        self.snapshots.append(snapshot)
        self.points += points


def fit(
    of: Trial,
    *,
    start: Snapshot | None = None,
    log: Log | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    every_s: float = 1e9,
    device: torch.device = CPU,
    micro_batch: int | None = None,
) -> Fit:
    return training.fit(
        of,
        device=device,
        start=start,
        commit=log or Log(),
        progress=lambda *_: None,
        should_stop=should_stop,
        checkpoint_every_s=every_s,
        micro_batch=micro_batch,
    )


def same(a: Fit, b: Fit) -> None:
    assert a.snapshot.tensors.keys() == b.snapshot.tensors.keys()
    for name, value in a.snapshot.tensors.items():
        assert torch.equal(value, b.snapshot.tensors[name]), name
    assert a.snapshot.meta == b.snapshot.meta
    assert (a.status, a.step, a.metrics, a.tokens, a.stopped_by) == (
        b.status,
        b.step,
        b.metrics,
        b.tokens,
        b.stopped_by,
    )


def stop_after(steps: int) -> Callable[[], bool]:
    """Says stop after that many steps: it is asked before each one."""
    left = [steps]

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return stop


# learning


def test_learns_recall() -> None:
    """Two pairs of 15 keys: from chance (1/16) to almost always right, and the test set says so too.

    The fillers are token 0: with so few tokens a random one often repeats a key, and then nobody can be right.
    """
    of = trial(steps=250, batch_size=16, task=CLEAN)
    log = Log()
    result = fit(of, log=log)
    assert result.status == "complete"
    assert result.stopped_by == "steps"
    assert result.metrics["valid/accuracy"] > 0.95
    test = evaluate.run(training.load_model(of, result.snapshot, CPU), of, of.task, device=CPU)
    assert test["accuracy"] > 0.95
    assert test["n"] == 64
    losses = [point.metrics["train/loss"] for point in log.points if "train/loss" in point.metrics]
    assert losses[0] == pytest.approx(math.log(32), rel=0.1)
    assert losses[-1] < losses[0] / 4


def test_same_trial_same_bits_other_seed_other_bits() -> None:
    one, again, other = fit(trial()), fit(trial()), fit(trial(seed=1))
    same(one, again)
    assert any(not torch.equal(v, other.snapshot.tensors[n]) for n, v in one.snapshot.tensors.items())


# interruption

RESUMED = {
    "plain": {},
    "epochs of a shuffled mixture, best kept": {
        "task": {"segments": SEGMENTS, "order": "mixed"},
        "steps": None,
        "epochs": 5,
        "keep": "best",
        "eval_every": 4,
    },
    "fresh rows, adam, constant rate": {
        "task": {"data": "fresh", "examples": 50},
        "optimizer": "adam",
        "schedule": "constant",
        "clip": None,
    },
}


@pytest.mark.parametrize("mechanism", ["softmax", "gated_deltanet"])
@pytest.mark.parametrize("settings", RESUMED.values(), ids=RESUMED)
def test_interrupted_and_resumed_equals_undisturbed(settings: dict[str, Any], mechanism: str) -> None:
    """Stopped at every third step or so, each time continued by a new process's state: same bits, same points."""
    of = trial(mechanism=mechanism, **settings)
    whole_log, log = Log(), Log()
    whole = fit(of, log=whole_log)
    start, result, rounds = None, None, 0
    while result is None or result.status == "interrupted":
        result = fit(of, start=start, log=log, should_stop=stop_after(3 + rounds % 2))
        written = json.loads(json.dumps(log.snapshots[-1].meta))  # what a file would give back
        start = Snapshot(log.snapshots[-1].step, log.snapshots[-1].tensors, written)
        rounds += 1
    assert rounds > 5
    same(whole, result)
    assert [(p.step, p.metrics) for p in log.points] == [(p.step, p.metrics) for p in whole_log.points]


def test_any_checkpoint_is_a_start() -> None:
    """Points after a lost checkpoint come again from the one before it, with the same values."""
    log = Log()
    whole = fit(trial(), log=log, every_s=0.0)
    assert [s.step for s in log.snapshots] == [*range(30), 30]
    for at in (0, 1, 7, 29):
        later = Log()
        same(whole, fit(trial(), start=log.snapshots[at], log=later))
        assert [(p.step, p.metrics) for p in later.points] == [(p.step, p.metrics) for p in log.points if p.step > at]


def test_when_it_is_checkpointed_does_not_touch_the_numbers() -> None:
    same(fit(trial(), every_s=0.0), fit(trial()))


def test_a_snapshot_is_a_copy() -> None:
    log = Log()
    fit(trial(), log=log, every_s=0.0)
    assert not torch.equal(
        log.snapshots[3].tensors["model.embedding.weight"], log.snapshots[4].tensors["model.embedding.weight"]
    )


def test_an_ended_run_is_not_run_again() -> None:
    log = Log()
    first = fit(trial(), log=log)
    meta = json.loads(json.dumps(log.snapshots[-1].meta))
    again_log = Log()
    again = fit(trial(), start=Snapshot(30, log.snapshots[-1].tensors, meta), log=again_log)
    same(first, again)
    assert not again_log.snapshots
    assert not any(name.startswith("optimiser.") for name in first.snapshot.tensors)


# points and commits


def test_points_are_committed_once_and_in_order() -> None:
    log = Log()
    result = fit(trial(steps=120, eval_every=50), log=log)
    steps = [point.step for point in log.points]
    assert steps == sorted(set(steps))
    assert steps == list(range(2, 121, 2))
    assert [p.step for p in log.points if "valid/loss" in p.metrics] == [50, 100, 120]
    assert all(set(p.metrics) <= {"train/loss", "train/grad_norm", "valid/loss", "valid/accuracy"} for p in log.points)
    last = {name: value for point in log.points for name, value in point.metrics.items()}
    assert result.metrics == last
    assert result.tokens == 120 * 8 * 16
    assert result.n_params == sum(p.numel() for p in models.build(trial()).parameters())


def test_train_loss_points_are_means_of_the_losses() -> None:
    """Replays the run by hand, with torch's own AdamW on the model as it is."""
    of, log = trial(steps=100), Log()
    fit(of, log=log)
    model, task, settings = models.build(of), tasks.build(of.task), Train(**of.train or {})
    named = dict(model.named_parameters())
    plain = model.no_decay()
    groups = [
        {"params": [p for n, p in named.items() if n not in plain], "weight_decay": 0.01},
        {"params": [p for n, p in named.items() if n in plain], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    losses = []
    for step in range(20):
        batch = task.batch("train", torch.arange(8) + 8 * step, training.data_seed(of))
        loss = F.cross_entropy(model(batch.tokens_BT, batch.position_BQ).flatten(0, 1), batch.target_BQ.flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = settings.lr_at(step, 100)
        optimiser.step()
        losses.append(loss.item())
    for number in range(10):
        expected = (losses[2 * number] + losses[2 * number + 1]) / 2
        assert log.points[number].metrics["train/loss"] == pytest.approx(expected, rel=1e-4)


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    training.fit(
        trial(),
        device=CPU,
        start=None,
        commit=Log(),
        progress=lambda step, steps, metrics: told.append((step, steps)),
        should_stop=lambda: False,
        checkpoint_every_s=1e9,
    )
    assert told[-1] == (30, 30)


# how it ends


def test_divergence_is_a_result_with_step_and_place() -> None:
    log = Log()
    result = fit(trial(lr=1e30, warmup=0, clip=None, weight_decay=0.0), log=log)
    assert result.status == result.stopped_by == "diverged"
    assert result.diverged is not None
    assert result.diverged["step"] == 2  # the first update is made from finite gradients, and makes the damage
    assert result.diverged["what"] in ("output", "weight", "loss", "gradient")
    assert result.diverged["where"] in {*dict(models.build(trial()).named_modules()), "loss"}
    assert all(math.isfinite(value) for point in log.points for value in point.metrics.values())
    json.dumps(result.snapshot.meta, allow_nan=False)


def test_what_only_the_last_update_broke_has_diverged_too() -> None:
    log = Log()
    result = fit(trial(steps=1, lr=1e36, warmup=0, clip=None, weight_decay=0.0), log=log)
    assert result.status == "diverged"
    assert result.diverged == {"step": 1, "where": "validation", "what": "its loss is not finite"}
    assert all(math.isfinite(value) for point in log.points for value in point.metrics.values())


def test_the_guard_keeps_the_last_finite_weights() -> None:
    model = models.build(trial())
    optimiser = FlatAdam(model, set(), optimizer="adamw", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, clip=1.0)
    optimiser.set_rate(1e-2)
    for flat in optimiser.flats:
        assert flat.grad is not None
        flat.grad.fill_(1.0)
    optimiser.step(torch.tensor(1.0))
    before = [flat.detach().clone() for flat in optimiser.flats]
    gradient = optimiser.flats[0].grad
    assert gradient is not None
    gradient[5] = math.nan
    optimiser.step(torch.tensor(1.0))
    for _ in range(3):  # finite again, but the run is over
        gradient.fill_(1.0)
        optimiser.step(torch.tensor(1.0))
    assert all(torch.equal(flat, old) for flat, old in zip(optimiser.flats, before, strict=True))
    assert float(optimiser.bad) == 1.0


@pytest.mark.parametrize(("where", "what"), [("layers.1.mlp.up", "output"), ("layers.0.mixer.out.weight", "weight")])
def test_the_place_is_found(where: str, what: str) -> None:
    model = models.build(trial())
    batch = tasks.build(TASK).batch("train", torch.arange(4), 0)
    if what == "weight":
        model.get_parameter(where).data[0, 0] = math.inf
    else:
        module = model.get_submodule(where)
        forward = module.forward
        module.forward = lambda x: forward(x) * math.nan  # type: ignore[method-assign]

    def loss() -> torch.Tensor:
        return F.cross_entropy(evaluate.forward(model, batch, "fp32").flatten(0, 1), batch.target_BQ.flatten())

    assert diagnose.find(model, loss) == {"where": where, "what": what}


def test_a_gradient_that_is_not_finite_is_found() -> None:
    model = models.build(trial())
    batch = tasks.build(TASK).batch("train", torch.arange(4), 0)

    def loss() -> torch.Tensor:
        logits = evaluate.forward(model, batch, "fp32").flatten(0, 1)
        wrong = (model.layers[0].mlp.up.bias.sum() * 0.0).abs().sqrt()  # type: ignore[union-attr]  # sqrt'(0) = inf, times 0
        return F.cross_entropy(logits, batch.target_BQ.flatten()) + wrong

    assert diagnose.find(model, loss) == {"where": "layers.0.mlp.up.bias", "what": "gradient"}


def test_stop_above_looks_at_validation() -> None:
    of = trial(steps=400, batch_size=16, eval_every=20, stop_above=0.5, task=CLEAN)
    log = Log()
    result = fit(of, log=log)
    assert result.status == "complete"
    assert result.stopped_by == "stop_above"
    assert result.step < 400
    scores = [p.metrics["valid/accuracy"] for p in log.points if "valid/accuracy" in p.metrics]
    assert all(score <= 0.5 for score in scores[:-1])
    assert scores[-1] > 0.5


def test_training_never_reads_the_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = tasks.get("mqar").batch

    def spy(self: Any, split: str, *rest: Any) -> Any:
        seen.add(split)
        return real(self, split, *rest)

    monkeypatch.setattr(tasks.get("mqar"), "batch", spy)
    fit(trial(keep="best", stop_above=0.999))
    assert seen == {"train", "valid"}


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 20), ("loss", 10)])
def test_keep_best_gives_the_weights_of_the_best_evaluation(
    monkeypatch: pytest.MonkeyPatch, metric: str, best: int
) -> None:
    """Evaluations at steps 10, 20 and 30 score 0.2, 0.9 and 0.5: highest wins for accuracy, lowest for loss."""
    scores = iter([0.2, 0.9, 0.5])
    monkeypatch.setattr(evaluate, "score", lambda *_: {metric: next(scores), "n": 1})
    monkeypatch.setattr("runners.tasks.mqar.SELECT", metric)
    log = Log()
    result = fit(trial(eval_every=10, keep="best"), log=log, every_s=0.0)
    at_best = next(s for s in log.snapshots if s.step == best)
    for name, value in result.snapshot.tensors.items():
        assert torch.equal(value, at_best.tensors[name]), name
    assert result.metrics[f"valid/{metric}"] == {"accuracy": 0.9, "loss": 0.2}[metric], "the score of other weights"
    assert not torch.equal(
        at_best.tensors["model.embedding.weight"], log.snapshots[29].tensors["model.embedding.weight"]
    )


def test_out_of_memory_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(models.Model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        fit(trial())


def test_bf16_keeps_parameters_and_optimiser_in_fp32() -> None:
    log = Log()
    result = fit(trial(steps=5, dtype="bf16"), log=log, every_s=0.0)
    assert result.status == "complete"
    assert all(value.dtype == torch.float32 for value in log.snapshots[2].tensors.values())
    assert result.metrics["train/loss"] != fit(trial(steps=5)).metrics["train/loss"]


# settings


def test_units() -> None:
    of = {"batch_size": 10}
    assert Train(**of, steps=7).n_steps(5, 1000, 99) == 7
    assert Train(**of, epochs=3).n_steps(5, 1000, 99) == 15
    assert Train(**of, tokens=1001).n_steps(5, 1000, 99) == 6  # 200 tokens a step, rounded up
    assert Train(**of, tokens_per_param=10).n_steps(5, 1000, 99) == 5
    assert Train(**of, tokens_per_param=99, max_epochs=3).n_steps(5, 1000, 99) == 15
    assert Train(**of, tokens_per_param=10, max_epochs=3).n_steps(5, 1000, 99) == 5
    assert Train(**of, tokens=1001, max_epochs=0.1).n_steps(5, 1000, 99) == 1
    assert Train(steps=1, batch_tokens=130).rows(32) == 4
    with pytest.raises(UserError, match="train needs one of steps, epochs, tokens and tokens_per_param"):
        Train(batch_size=8).n_steps(1, 1, 1)
    with pytest.raises(UserError, match="train needs one of batch_size and batch_tokens"):
        Train(steps=8).rows(16)


def test_learning_rate() -> None:
    cosine = Train(steps=100, batch_size=1, lr=2.0, warmup=10)
    assert [cosine.lr_at(step, 100) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert cosine.lr_at(10, 100) == pytest.approx(2.0)
    assert cosine.lr_at(55, 100) == pytest.approx(1.0)
    assert 0 < cosine.lr_at(99, 100) < 0.001
    share = Train(steps=100, batch_size=1, lr=2.0, warmup=0.1)
    assert [share.lr_at(s, 100) for s in range(100)] == [cosine.lr_at(s, 100) for s in range(100)]
    constant = Train(steps=100, batch_size=1, lr=2.0, schedule="constant")
    assert {constant.lr_at(s, 100) for s in range(100)} == {2.0}


def test_flat_adam_is_torch_adam() -> None:
    """L2 (`adam`) and decoupled (`adamw`) decay, without clipping, against torch on the parameters one by one."""
    for name, kind in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        flat_model, model = models.build(trial()), models.build(trial())
        flat = FlatAdam(flat_model, set(), optimizer=name, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, clip=None)
        flat.set_rate(1e-2)
        plain = kind(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        for step in range(5):
            draws = torch.Generator().manual_seed(step)
            for a, b in zip(flat_model.parameters(), model.parameters(), strict=True):
                assert a.grad is not None
                b.grad = torch.randn(b.shape, generator=draws)
                a.grad.copy_(b.grad)
            flat.step(torch.tensor(0.0))
            plain.step()
        for (n, a), b in zip(flat_model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=n)


# rows


def feed(**settings: Any) -> Feed:
    return Feed(tasks.build({**TASK, **settings}), 8, 3, CPU)


def test_blocks_go_in_order_and_batches_stay_in_their_segment() -> None:
    rows = feed(segments=SEGMENTS)
    assert rows.steps_per_epoch == 3 + 4
    assert rows.tokens_per_epoch == 20 * 8 + 30 * 16
    epoch = [rows.rows(step)[1].tolist() for step in range(7)]
    assert [index for batch in epoch for index in batch] == list(range(50))
    assert [len(batch) for batch in epoch] == [8, 8, 4, 8, 8, 8, 6]
    assert [rows.rows(step)[1].tolist() for step in range(7, 14)] == epoch


def test_mixed_visits_every_row_once_an_epoch_in_a_new_order() -> None:
    rows = feed(segments=SEGMENTS, order="mixed")
    epochs = [[rows.rows(7 * e + step)[1].tolist() for step in range(7)] for e in range(2)]
    for batches in epochs:
        assert sorted(index for batch in batches for index in batch) == list(range(50))
        assert all(len({index < 20 for index in batch}) == 1 for batch in batches)
    assert epochs[0] != epochs[1]


def test_fresh_rows_never_come_again() -> None:
    rows = feed(data="fresh", examples=20)
    seen = [index for step in range(12) for index in rows.rows(step)[1].tolist()]
    assert seen == list(range(80))


def test_batches_made_ahead_are_those_made_alone() -> None:
    rows = feed(segments=SEGMENTS, order="mixed")
    for step in (0, 1, 2, 3, 9, 4):
        batch = rows.batch(step)
        alone = rows.task.batch("train", rows.rows(step)[1], 3)
        assert torch.equal(batch.tokens_BT, alone.tokens_BT)
        assert torch.equal(batch.target_BQ, alone.target_BQ)


def test_streams_of_rows_are_shared_by_compared_arms() -> None:
    base = training.data_seed(trial())
    assert training.data_seed(trial(mechanism="linear", lr=0.5, steps=9)) == base
    assert training.data_seed(trial(seed=1)) != base
    assert training.data_seed(trial(task={"n_pairs": 4})) != base
    assert streams.key("data", 0) != base


# evaluation


def test_evaluation_does_not_depend_on_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    of = trial()
    model = models.build(of)
    whole = evaluate.run(model, of, of.task, device=CPU)
    monkeypatch.setitem(evaluate.TOKENS_AT_ONCE, "cpu", 7 * 16)
    parts = evaluate.run(model, of, of.task, device=CPU)
    assert parts["accuracy"] == pytest.approx(whole["accuracy"])
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert parts["n"] == whole["n"] == 64
    assert model.training


def test_evaluation_at_another_length_and_load() -> None:
    of = trial()
    result = evaluate.run(models.build(of), of, {**TASK, "seq_len": 30, "n_pairs": 7}, device=CPU)
    assert 0 <= result["accuracy"] <= 1
    with pytest.raises(UserError, match="vocab_size 64"):
        evaluate.run(models.build(of), of, {**TASK, "vocab_size": 64}, device=CPU)
