"""How large a memory grows, and how long it keeps what it holds: the states of a model that nobody trained.

The model reads `seq_len` tokens; what is looked at is the memory of its last layer that holds a mechanism: the first
matrix a head of its state (S; of a memory with slots their keys). Nothing is trained: the trial is its own evaluation,
and its seeds are draws of the weights. A curve over time is an axis, `axes: {task.seq_len: [100, 300, 1000]}`.

    state_norm   Frobenius norm of the state after the last token, mean over rows and heads
    growth       exponent p of norm ~ t^p: slope of the logarithms over the last half of the row. A bounded state has 0,
                 a sum of unlike terms 1/2, of terms with something in common 1: so linear attention, as key and value
                 are made of one token
    radius       by what factor a token scales the difference between two states that read the same: its geometric mean
                 over the last half. 1 = nothing is forgotten, below it the past fades. Where a state is linear in the
                 one before, it is the rate of the product of the step maps, and tends to the largest one

One row of `seq_len: 8, every: 2`: the norm is read after the tokens marked ^.

    tokens   5 3 7 7 1 0 2 6
               ^   ^   ^   ^

Source: the stability experiment of Variational Linear Attention's notebook 07 (1000 uniform tokens, the last layer).
Choices: `growth` and `radius`, which it does not measure; weights are drawn as for every model here, there with a
deviation of 0.02, so norms are others and ratios alike.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from runners import streams
from runners.rows import integers, refuse
from runners.schema import UserError

REVISION = 1
LIMITS = ["vocab_size >= 1", "every >= 1", "seq_len >= 4 * every", "seq_len % every == 0", "rows >= 1"]
METRICS = {"state_norm": "min", "growth": "min", "radius": "min"}
LABELS = "1"
SELECT = "state_norm"
TRAINS = False


class Task:
    """Norms of the state; nothing is trained.

    Args:
        vocab_size: tokens in the vocabulary
        seq_len: length of a row (tokens)
        every: tokens between two readings of the norm
        tokens: uniform = each drawn by itself; same = one token a row, over and over
        rows: rows that are read, the same for every seed and arm (count)
    """

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        seq_len: int = 1000,
        every: int = 10,
        tokens: Literal["uniform", "same"] = "uniform",
        rows: int = 4,
    ) -> None:
        rules = {"every >= 1": every >= 1, "rows >= 1": rows >= 1, "vocab_size >= 1": vocab_size >= 1}
        rules |= {"seq_len >= 4 * every": seq_len >= 4 * every, "seq_len % every == 0": seq_len % max(1, every) == 0}
        refuse("state_norm", rules, f"seq_len {seq_len}, every {every}, rows {rows}, vocab_size {vocab_size}")
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.every, self.tokens, self.rows = every, tokens, rows

    def batch(self, device: torch.device | str = "cpu") -> Tensor:
        """The rows, (B, T) int64."""
        row_B1 = torch.arange(self.rows, device=device)[:, None]
        stream = streams.key("state_norm", self.vocab_size, self.tokens)
        if self.tokens == "same":
            return integers(stream, "tokens", row_B1, 1, self.vocab_size).expand(-1, self.seq_len)
        at_BT = row_B1 * (1 << 32) + torch.arange(self.seq_len, device=device)  # a longer row begins with the shorter
        return streams.integers(stream, at_BT, self.vocab_size)

    @torch.inference_mode()
    def measure(self, model: Any, device: torch.device) -> dict[str, float]:
        """The metrics of an untrained model, and `n`, the number of rows. Raises `UserError` if it keeps no matrix."""
        layers = [layer for layer in model.layers if hasattr(layer.mixer, "probe")]
        if not layers:
            raise UserError("state_norm: no layer of the model holds a mechanism")
        watched = Watched(layers[-1].mixer, streams.key("state_norm", "difference"))
        model.eval()
        handle = watched.mixer.register_forward_hook(watched.take)
        state = None
        try:
            for chunk_BT in self.batch(device).split(self.every, 1):
                _, state = model.prefill(chunk_BT, state)
        finally:
            handle.remove()
        norm_C, factor_C = (torch.stack(x).double().cpu() for x in (watched.norms, watched.factors))
        half = len(norm_C) // 2
        time_C = torch.arange(1, len(norm_C) + 1).double() * self.every
        return {
            "state_norm": float(norm_C[-1]),
            "growth": slope(time_C[half:].log(), norm_C[half:].log()),
            "radius": math.exp(float(factor_C[half:].log().mean()) / self.every),
            "n": self.rows,
        }


class Watched:
    """Follows the memory of one mixer from chunk to chunk, and beside it one that once differed."""

    def __init__(self, mixer: Any, stream: int) -> None:
        self.mixer, self._stream = mixer, stream
        self.norms: list[Tensor] = []
        self.factors: list[Tensor] = []
        self._other: Tensor | None = None
        self._busy = False

    def take(self, _module: Any, given: tuple[Any, ...], result: Any) -> None:
        """The hook: the mixer was `given` (x, the state before), and its `result` is (y, the state after)."""
        if self._busy:
            return
        x_BTD, before = given
        after = result[1]
        name = matrix(self.mixer, after)
        self.norms.append(size(after[name]).mean())
        if self._other is not None:
            self._busy = True
            try:
                _, elsewhere = self.mixer(x_BTD, {**before, name: before[name] + self._other})
            finally:
                self._busy = False
            difference = elsewhere[name] - after[name]
            self.factors.append((size(difference).mean() / size(self._other).mean()).clamp(min=1e-30))
        else:
            index = torch.arange(after[name].numel(), device=after[name].device).view_as(after[name])
            difference = streams.uniform(self._stream, index).to(after[name]) - 0.5
            self.factors.append(torch.ones_like(self.norms[-1]))
        # As large as the state itself: what is left after a subtraction then has no fewer digits.
        self._other = difference * (size(after[name]).mean() / size(difference).mean().clamp(min=1e-30))


def matrix(mixer: Any, state: dict[str, Tensor]) -> str:
    """The name of the first matrix a head in a state. Caches of keys and values, kept like activations, are none."""
    start = mixer.initial_state(1, torch.device("cpu"), torch.bfloat16)
    for name, x in state.items():
        if start[name].dtype == torch.float32 and x.dim() >= 4:
            return name
    kind = type(mixer).__module__.rpartition(".")[2]
    raise UserError(f"state_norm: {kind} keeps no matrix whose norm there is")


def size(state: Tensor) -> Tensor:
    """Frobenius norm a row and head, (B, H), of (B, H, ...)."""
    return state.flatten(2).norm(dim=-1)


def slope(x: Tensor, y: Tensor) -> float:
    """Of the least-squares line through the points."""
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())
