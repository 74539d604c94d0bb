"""What a trial costs, from its settings alone: parameters (exact), updates, tokens, arithmetic, memory, time.

Parameters are exact: formulas beside each mechanism and the model, held against built models by a test. Arithmetic
counts two operations a weight and token forward, twice that backward, and what mixing does with the state. Seconds and
bytes without a measurement are guesses to the right power of two or so, for the first plan on a new machine: whatever
a store has measured replaces them (`sweeps/measured.py`).

Everything is worked out once for each different combination of blocks, not once for each trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runners import corpus, documents
from runners.schema import Trial, UserError
from sweeps import formula, layers
from sweeps.blocks import longest_row
from sweeps.catalog import Block, Catalog, with_derived


@dataclass(frozen=True, slots=True)
class Rate:
    """What a device does with small models: seconds a layer and update whatever the size, operations a second."""

    layer_s: float
    fp32: float
    bf16: float
    base_bytes: int


CPU = Rate(layer_s=6e-3, fp32=8e9, bf16=4e9, base_bytes=450 * 2**20)
GPU = Rate(layer_s=2e-3, fp32=2.5e13, bf16=6e13, base_bytes=2**30)
"""One core of a server; an H200 running operations one by one. To be replaced by what is measured."""
START_S = 1.5
"""A trial's own start and end: building the model, checkpoints, the result."""
LIVE_TENSORS = 24
LIVE_OF_EXPERT = 10
"""About how many tensors as wide as the model a layer keeps of each token for the backward pass, and how many more for
each expert beyond the first."""


@dataclass(frozen=True, slots=True)
class Work:
    """One trial's training and evaluations, as far as they can be told from settings; None = cannot be told."""

    n_params: int | None
    steps: int | None
    tokens: int | None
    flops: float | None
    seconds: float | None
    memory_bytes: int | None


def _looked_at(task: Mapping[str, Any], length: int) -> int:
    """Tokens of an evaluation, of a model trained at `length`; 0 where that takes reading a data set."""
    if documents.reads(task) and "patch" not in task:  # a row of an image has its length
        return documents.size(task) or 0
    return (corpus.rows(task, "test") or 0) * (task.get("seq_len") or length)


class Analyst:
    """Works out trials; equal blocks share their part of the work."""

    def __init__(self, catalog: Catalog, rate: Rate) -> None:
        self.catalog, self.rate = catalog, rate
        self._envs: dict[tuple[int, ...], tuple[dict[str, Any], int | None]] = {}
        self._keep: list[Any] = []  # the ids above are of objects that must not go away

    def work(self, trial: Trial, slices: tuple[Mapping[str, Any], ...] = ()) -> Work:
        """The cost of training `trial` and evaluating it on the task settings `slices`."""
        env, n_params = self._env(trial)
        train = trial.train
        if n_params is None:
            return Work(None, None, None, None, None, None)
        length = env.get("seq_len")
        if train is None:
            return self._untrained(env, n_params, env.get("rows") or 1, length or 1)
        rows = train.get("batch_size") or (length and max(1, (train.get("batch_tokens") or 0) // length))
        steps = self._steps(trial, rows, length, n_params)
        if not (rows and length and steps):
            return Work(n_params, steps, None, None, None, None)
        tokens = steps * rows * length
        forward = self._forward(env, n_params)
        every = train.get("eval_every") or max(1, steps // 5)
        checked = (corpus.rows(trial.task, "valid") or 0) * len(trial.task.get("segments") or [0]) * length
        looked_at = -(-steps // every) * checked
        looked_at += sum(_looked_at(s, length) for s in slices)
        flops = forward * (3 * tokens + looked_at)
        bf16 = train.get("dtype") == "bf16"
        speed = self.rate.bf16 if bf16 else self.rate.fp32
        seconds = START_S + max(steps * self.rate.layer_s * (env.get("n_layers") or 1), 0.0) + flops / speed
        return Work(n_params, steps, tokens, flops, seconds, self._memory(env, n_params, rows, length, bf16))

    def _untrained(self, env: Mapping[str, Any], n_params: int, rows: int, length: int) -> Work:
        """A trial that reads its rows once and trains nothing."""
        flops = self._forward(env, n_params) * rows * length
        memory = self._memory(env, n_params, rows, length, False)
        return Work(n_params, 0, 0, flops, START_S + flops / self.rate.fp32, memory)

    def _env(self, trial: Trial) -> tuple[dict[str, Any], int | None]:
        """The names that formulas read, and the model's parameters."""
        memo = (id(trial.mechanism), id(trial.task), id(trial.model))
        if memo not in self._envs:
            self._keep.append(trial)
            env = self._names(trial)
            self._envs[memo] = (env, self._n_params(trial, env))
        return self._envs[memo]

    def _names(self, trial: Trial) -> dict[str, Any]:
        model = self._model(trial)
        task = with_derived(self.catalog.block("task", trial.task["name"]), trial.task, {})
        mechanism = with_derived(self.catalog.block("mechanism", trial.mechanism["name"]), trial.mechanism, {})
        env = {"conv": 3 if model.get("short_conv") else 0, **model, **task}
        length = longest_row(task)
        around = {} if length is None else {"seq_len": length}
        return {**env, **around, **mechanism, "task": trial.task["name"]}

    def _model(self, trial: Trial) -> dict[str, Any]:
        return with_derived(self.catalog.block("model"), trial.model, {})

    def _n_params(self, trial: Trial, env: Mapping[str, Any]) -> int | None:
        """Parameters of the whole model; None where a file does not say how to count them."""
        parts = self.catalog.block("model").literals.get("PARAMS", {})
        mlp = trial.model.get("mlp")
        mlp = {"name": mlp} if isinstance(mlp, str) else mlp or {"name": "none"}
        n_layers = env.get("n_layers") or 1
        whole = {**env, **self._model(trial)}  # a mechanism may call a parameter of its own as the model does
        try:
            patches = self.catalog.block("task", env["task"]).literals.get("PATCHES")
            sizes = {name: formula.evaluate(text, whole) for name, text in (patches or {}).items()}
            total = formula.evaluate(parts["patches" if patches else "shell"], {**whole, **sizes})
            total += n_layers * formula.evaluate(parts["layer"], whole)
            total += sum(layers.n_params(name, block, values, parts) for name, block, values in self._placed(env))
            if mlp["name"] != "none":
                size = formula.evaluate(parts[mlp["name"]], {**whole, "width": mlp.get("width")})
                moe = trial.model.get("moe")
                if moe is not None:
                    size = moe["experts"] * size + formula.evaluate(parts["router"], {**whole, **moe})
                total += n_layers * (size + formula.evaluate(parts["mlp_norm"], whole))
        except (KeyError, UserError, ValueError):
            return None
        return int(total)

    def _placed(self, env: Mapping[str, Any]) -> Iterator[tuple[str, Block | None, Any]]:
        return layers.placed(self.catalog, self.catalog.block("mechanism", env["name"]), env)

    def _steps(self, trial: Trial, rows: int | None, length: int | None, n_params: int) -> int | None:
        """Updates, from whichever unit is given; those of `epochs` need the number of rows a task has."""
        train = trial.train or {}
        if train.get("steps") is not None:
            return int(train["steps"])
        if not rows or not length:
            return None
        own = corpus.rows(trial.task, "train")
        sizes = [part.get("examples", own) for part in trial.task.get("segments") or [{}]]
        known = [size for size in sizes if isinstance(size, int)]
        epoch = sum(-(-size // rows) for size in known) if len(known) == len(sizes) else None
        if train.get("epochs") is not None:
            return None if epoch is None else int(train["epochs"]) * epoch
        tokens = train.get("tokens")
        if tokens is None and train.get("tokens_per_param") is not None:
            tokens = round(train["tokens_per_param"] * n_params)
        if tokens is None:
            return None
        steps, at_most = math.ceil(tokens / (rows * length)), train.get("max_epochs")
        return max(1, steps if epoch is None or at_most is None else min(steps, int(at_most * epoch)))

    def _forward(self, env: Mapping[str, Any], n_params: int) -> float:
        """Operations of a forward pass for each token: matrices, the head where labels are, mixing with the state."""
        vocab, width, length = (env.get(name) or 0 for name in ("vocab_size", "d_model", "seq_len"))
        labels = self._labels(env, length)
        tables = vocab * width * (1 if env.get("tied") else 2)
        try:
            sizes = [layers.state_elements(block, values) for _, block, values in self._placed(env)]
            sizes += [self.catalog.block("model").state_elements(env)] * (env.get("n_layers") or 1)
        except UserError:
            sizes = []
        mixing = sum(4 * state + cache for state, cache in sizes)
        return 2 * max(0, n_params - tables) + 2 * vocab * width * labels / max(1, length) + mixing

    def _labels(self, env: Mapping[str, Any], length: int) -> int:
        text = self.catalog.block("task", env["task"]).literals.get("LABELS")
        try:
            return length if text is None else int(formula.evaluate(text, env))
        except UserError:
            return length

    def _memory(self, env: Mapping[str, Any], n_params: int, rows: int, length: int, bf16: bool) -> int:
        """Weights, gradients and two moments in fp32, what the backward pass needs, logits, and the process itself."""
        experts = (env.get("moe") or {}).get("experts", 1)
        live = LIVE_TENSORS + LIVE_OF_EXPERT * (experts - 1)
        wide = (env.get("n_layers") or 1) * live * (env.get("d_model") or 0) * (2 if bf16 else 4)
        logits = 3 * 4 * (env.get("vocab_size") or 0) * self._labels(env, length)
        return self.rate.base_bytes + 16 * n_params + rows * (length * wide + logits)
