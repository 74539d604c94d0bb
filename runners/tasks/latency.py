"""How long a mechanism takes and how much memory it needs, by length: the untrained model, timed.

Nothing is trained: the trial is its own evaluation. A row of `seq_len` tokens passes through the whole model, embedding
and head included, so compare mechanisms in models of one layer without an mlp.

    phase      one pass is                                              tokens of a row     t t t t t t t t | t
    forward    logits behind every token, nothing kept for gradients                        ^ ^ ^ ^ ^ ^ ^ ^
    train      the loss at every token, and the gradient of every weight                    ^ ^ ^ ^ ^ ^ ^ ^
    prefill    logits behind the last token, and the state to go on from                                  ^
    decode     one token more, from the state behind `seq_len` of them                                        ^

    ms         milliseconds of a pass on the device: on a card of the pass recorded as a CUDA graph, as updates are
               here, or as called where it cannot be recorded
    called_ms  milliseconds from the call in Python to the end of the work
    peak_mb    MiB that a pass holds at most beyond weights, tokens and the state it starts from; on a card only

Each is the median of `repeats`, after two passes that do not count, the second-level cache emptied before each. A
result holds for the device that it was measured on, which its stamp names. Softmax is torch's
scaled_dot_product_attention, which picks its backend: flash attention in bf16 on a card, others in fp32.

Source: the latency benchmark of Variational Linear Attention (T 128 to 2048, Python loops), at lengths where kernels
matter. Choices: CUDA graphs, the four phases.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from runners import kernel_bench, streams
from runners.rows import refuse

REVISION = 1
LIMITS = ["vocab_size >= 1", "seq_len >= 1", "rows >= 1", "repeats >= 1"]
METRICS = {"ms": "min", "called_ms": "min", "peak_mb": "min"}
LABELS = "1"
SELECT = "ms"
TRAINS = False
WARM = 2
"""Passes before the first that counts: kernels compile, libraries take their workspaces."""

Pass = Callable[[], tuple[Tensor, ...]]


class Task:
    """Time and memory of a pass; nothing is trained.

    Args:
        vocab_size: tokens in the vocabulary
        seq_len: length of a row (tokens)
        phase: forward, train = forward and backward, prefill = forward and the state, decode = one token more
        rows: rows that pass at once (count)
        dtype: precision of the activations; bf16 keeps parameters and states in fp32
        repeats: passes that are timed (count)
    """

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        seq_len: int = 1024,
        phase: Literal["forward", "train", "prefill", "decode"] = "forward",
        rows: int = 1,
        dtype: Literal["fp32", "bf16"] = "bf16",
        repeats: int = 20,
    ) -> None:
        given = {"vocab_size": vocab_size, "seq_len": seq_len, "rows": rows, "repeats": repeats}
        refuse("latency", {f"{name} >= 1": value >= 1 for name, value in given.items()}, str(given))
        self.vocab_size, self.seq_len, self.phase = vocab_size, seq_len, phase
        self.rows, self.dtype, self.repeats = rows, dtype, repeats

    def measure(self, model: Any, device: torch.device) -> dict[str, float]:
        """The metrics, and `n`, the number of passes behind them."""
        run = self._pass(model, device)
        for _ in range(WARM):
            run()
        found = {"called_ms": self._median(run, device), "n": float(self.repeats)}
        if device.type != "cuda":
            return found | {"ms": found["called_ms"]}
        found["peak_mb"] = kernel_bench.peak_mb(run)
        graph = kernel_bench.recorded(run)
        timed = run if graph is None else graph.replay
        (ms,) = kernel_bench.alternating([lambda: kernel_bench.on_card(timed)], self.repeats)
        return found | {"ms": ms}

    def _pass(self, model: Any, device: torch.device) -> Pass:
        """What is timed."""
        index = torch.arange(self.rows * (self.seq_len + 1), device=device).view(self.rows, -1)
        tokens_BT = streams.integers(streams.key("latency", self.vocab_size), index, self.vocab_size)
        tokens_BT, next_B = tokens_BT[:, :-1].contiguous(), tokens_BT[:, -1].contiguous()
        if self.phase == "train":
            model.train()
            return lambda: self._train(model, tokens_BT)
        model.eval()
        if self.phase == "forward":
            return self._quietly(device, lambda: (model(tokens_BT),))
        if self.phase == "prefill":
            return self._quietly(device, lambda: model.prefill(tokens_BT)[:1])
        held: list[Any] = []
        self._quietly(device, lambda: held.append(model.prefill(tokens_BT)[1]))()
        return self._quietly(device, lambda: model.step(next_B, held[0])[:1])

    def _quietly(self, device: torch.device, run: Callable[[], Any]) -> Pass:
        """`run` without gradients, in the task's precision."""

        def quiet() -> Any:
            with torch.no_grad(), self._precision(device):
                return run()

        return quiet

    def _train(self, model: Any, tokens_BT: Tensor) -> tuple[Tensor, ...]:
        with self._precision(tokens_BT.device):
            logits_BTV = model(tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT.flatten())
        side_B = model.take_side_loss()
        loss = loss if side_B is None else loss + side_B.mean()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    def _precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == "bf16")

    def _median(self, run: Pass, device: torch.device) -> float:
        """Milliseconds from the call to the end of the work."""
        if device.type == "cuda":
            return kernel_bench.alternating([lambda: kernel_bench.as_called(run)], self.repeats)[0]
        times = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
