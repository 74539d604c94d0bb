"""Whole updates as CUDA graphs: one launch in the place of the hundreds that a small model's update is made of.

A small model waits for the CPU to launch its kernels. Here the first updates of a shape run as they are; then one is
recorded, forward, backward, clipping and optimiser, and every later one of that shape is a replay of the same kernels
on the same memory. Nothing is computed otherwise: the bits are those of the update as it is.

What an update depends on must lie in memory that stays: parameters, moments and the learning rate do (`FlatAdam`), and
a batch is copied to where the recording reads it. An update that waits for the device, or copies from the host, cannot
be recorded: it then runs as it is, and the log says why.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from runners.batch import Batch

VARIABLE = "MEMSWEEP_CUDA_GRAPHS"
"""Environment variable: 0 keeps every update as it is."""
WARM = 3
"""Updates of a shape that run as they are: kernels compile, libraries take their workspaces."""
MOST = 8
"""Shapes that are recorded: each keeps the memory of an update."""

Update = Callable[[Batch], tuple[Tensor, Tensor]]
Shape = tuple[torch.Size, torch.Size]


class Recorded:
    """`update`, which returns the loss and the norm of the gradient, from recordings where it can be."""

    def __init__(self, update: Update, device: torch.device, tell: Callable[[str], None]) -> None:
        self._update, self._tell = update, tell
        self.on = device.type == "cuda" and os.environ.get(VARIABLE, "1") != "0"
        self._seen: dict[Shape, int] = {}
        self._recordings: dict[Shape, tuple[torch.cuda.CUDAGraph, Batch, tuple[Tensor, Tensor]]] = {}
        # Autograd accumulates on the stream on which it first met a parameter, so all updates are on the same one.
        self._stream = torch.cuda.Stream(device) if self.on else None
        self._pool = torch.cuda.graph_pool_handle() if self.on else None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The results of a replay are overwritten by the next."""
        if not self.on:
            return self._update(batch)
        shape = (batch.tokens_BT.shape, batch.position_BQ.shape)
        found = self._recordings.get(shape)
        if found is None and self._seen.get(shape, 0) >= WARM and len(self._recordings) < MOST:
            found = self._record(shape, batch)
        if found is None:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            return self._beside(batch)
        graph, held, results = found
        held.tokens_BT.copy_(batch.tokens_BT)
        held.position_BQ.copy_(batch.position_BQ)
        held.target_BQ.copy_(batch.target_BQ)
        graph.replay()
        return results

    def _beside(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The update as it is, on the stream of the recordings."""
        assert self._stream is not None
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = self._update(batch)
        current.wait_stream(self._stream)
        return results

    def _record(self, shape: Shape, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, tuple[Tensor, Tensor]] | None:
        """A recording of an update of this shape, not yet run; None if there can be none."""
        held = replace(
            batch,
            tokens_BT=batch.tokens_BT.clone(),
            position_BQ=batch.position_BQ.clone(),
            target_BQ=batch.target_BQ.clone(),
        )
        graph = torch.cuda.CUDAGraph()
        try:
            with nothing_collected(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = self._update(held)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            self.on = False
            self._recordings.clear()
            self._tell(f"updates run without CUDA graphs: {str(problem).splitlines()[0]}")
            return None
        self._recordings[shape] = (graph, held, results)
        return self._recordings[shape]


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """A graph of an earlier trial that is taken down in the middle of a recording spoils the recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
