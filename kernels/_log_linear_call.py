"""What the launches of log-linear attention's Triton kernels share: sizes, memory, and what one pass leaves another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import launch, padded

BITS = 32
"""Room for one number for each set bit of a chunk's index."""

PART = 1024
"""Numbers of a block that one program joins, where Phi is a number."""

HALF = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Blocks(NamedTuple):
    """Tile sizes, and warps of each kernel."""

    C: int
    """Tokens in a chunk, a power of two."""
    K: int
    """Key columns, padded to a power of two."""
    V: int
    """Value columns that a program holds at once."""
    warps: int
    score_warps: int
    back_warps: int
    """Of `within`, `reads` and `gradients`, which hold most."""
    span: int
    """Log2 of the chunks whose readings of one block a program sums."""
    precision: str


def blocks(T: int, K: int, V: int, dtype: torch.dtype) -> Blocks:
    """The launch table, a plain function of shapes."""
    wide, padded_K = dtype == torch.float32, padded(K)
    C = min(64, padded(T))
    if wide and padded_K > 64:
        C = min(C, 32)
    V_tile = min(padded(V), 32 if wide else 64)
    return Blocks(
        C,
        padded_K,
        V_tile,
        8 if padded_K > 64 else 4,
        1 if padded_K <= 64 and not wide else 2,
        8 if C > 32 or padded_K > 64 else 4,
        4,
        "tf32x3" if wide else "tf32",
    )


def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with nothing in it, on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


class Call(NamedTuple):
    """What the forward and the backward launches of one call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    lam: Tensor
    beta: Tensor | None
    scale: float
    size: Blocks

    @property
    def n_chunks(self) -> int:
        """Of one sequence."""
        return triton.cdiv(self.v.shape[1], self.size.C)

    @property
    def n_bits(self) -> int:
        """Of a chunk's index."""
        return (self.n_chunks - 1).bit_length()

    @property
    def width(self) -> int:
        """Columns of X."""
        return self.v.shape[-1] + (0 if self.beta is None else self.q.shape[-1])

    @property
    def heads(self) -> tuple[int, int, int]:
        """Tokens, heads, and how many of these share a key: as the kernels take them."""
        return self.v.shape[1], self.v.shape[2], self.v.shape[2] // self.q.shape[2]

    def strides(self, *tensors: Tensor) -> tuple[int, ...]:
        return tuple(step for x in tensors for step in x.stride()[:3])

    def empty(self, *shape: int, half: bool = False) -> Tensor:
        """Scratch; `half`: in the dtype of q."""
        return scratch(self.q, *shape, dtype=self.q.dtype if half else torch.float32)

    def in_chunks(self, *shape: int, half: bool = False) -> Tensor:
        """For each chunk of each head, (B, N, H, *shape)."""
        return self.empty(len(self.v), self.n_chunks, self.v.shape[2], *shape, half=half)

    def in_blocks(self, *shape: int) -> Tensor:
        """For each block of each head, (B, 2 N - 1, H, *shape)."""
        return self.empty(len(self.v), 2 * self.n_chunks - 1, self.v.shape[2], *shape)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time values of most kernels."""
        size = self.size
        widths = {"K": self.q.shape[-1], "BK": size.K, "V": self.v.shape[-1], "BV": size.V}
        return {**widths, "C": size.C, "PREC": size.precision}

    @property
    def log_C(self) -> int:
        return self.size.C.bit_length() - 1

    def launch(self, kernel: Any, per_head: int, args: tuple[Any, ...], warps: int | None = None, **more: Any) -> None:
        """`kernel`, with so many programs for each head."""
        options = {"num_warps": warps or self.size.warps, "num_stages": 1}
        launch(kernel, len(self.v) * self.v.shape[2] * per_head, args, {**self.constants, **more}, **options)

    def join(
        self, level: int, matrices: Any, numbers: Any, columns: int, X: tuple[Any, ...], more: tuple[Any, ...]
    ) -> None:
        """Over the blocks of 2^level chunks: the kernel `matrices`, or where Phi is a number `numbers`."""
        (B, _, H, V), K, size = self.v.shape, self.q.shape[-1], self.size
        n_blocks = B * H * ((self.n_chunks - 1) >> level)
        place = (self.n_chunks, H, level)
        if self.beta is None:
            parts = {"size": K * V, "BLOCK": PART}
            launch(numbers, n_blocks * triton.cdiv(K * V, PART), (*X, *more, *place), parts, num_warps=4)
            return
        tiles = {"K": K, "BK": size.K, "V": V, "BV": size.V, "PREC": size.precision, "HALF": HALF[self.q.dtype]}
        launch(matrices, n_blocks * columns, (*X, *place), tiles, num_warps=size.warps, num_stages=1)


class Saved(NamedTuple):
    """What the forward pass leaves to the backward pass; the names are those of `_log_linear_attention_triton.py`."""

    G: Tensor
    X: Tensor
    phi: Tensor | None
    Ti: Tensor | None
    P: Tensor | None
    UW: Tensor | None
    A: Tensor | None
    q_in: Tensor | None
