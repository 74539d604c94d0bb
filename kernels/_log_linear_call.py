"""What the launches of log-linear attention's Triton kernels share: sizes, memory, and what one pass leaves another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels._launch import launch, padded

BITS = 32
"""Room for one number for each set bit of a chunk's index."""

PART = 1024
"""Numbers of a block that one program joins, where Phi is a number."""

DEPTH = 3
"""Levels that one program joins, where Phi is a number."""


class Blocks(NamedTuple):
    """Tile sizes, and warps of each kernel."""

    C: int
    """Tokens in a chunk, a power of two."""
    K: int
    """Key columns, padded to a power of two."""
    V: int
    """Value columns that a program holds at once."""
    V_out: int
    """The same in `output`, which brings its queries through every Phi anew for each tile."""
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
    return Blocks(
        C,
        padded_K,
        min(padded(V), 32 if wide else 64),
        min(padded(V), 32 if wide else 128),
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

    def in_blocks(self, *shape: int, half: bool = False) -> Tensor:
        """For each block of each head, (B, 2 N - 1, H, *shape)."""
        return self.empty(len(self.v), 2 * self.n_chunks - 1, self.v.shape[2], *shape, half=half)

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

    def join(self, kernel: Any, level: int, columns: int, args: tuple[Any, ...]) -> None:
        """`kernel` over the blocks of 2^level chunks, where Phi is a matrix."""
        (B, _, H, _), size = self.v.shape, self.size
        tiles = {name: x for name, x in self.constants.items() if name != "C"}
        programs = B * H * ((self.n_chunks - 1) >> level) * columns
        launch(kernel, programs, (*args, self.n_chunks, H, level), tiles, num_warps=size.warps, num_stages=1)

    def join_numbers(self, kernel: Any, level: int, args: tuple[Any, ...]) -> None:
        """`kernel` over DEPTH levels above that of the blocks of 2^level chunks, where Phi is a number."""
        (B, _, H, _), numbers = self.v.shape, self.q.shape[-1] * self.v.shape[-1]
        depth = min(DEPTH, self.n_bits - 1 - level)
        groups = triton.cdiv((self.n_chunks - 1) >> (level + 1), 1 << (depth - 1))
        constants = {"size": numbers, "BLOCK": PART, "DEPTH": depth}
        programs = B * H * groups * triton.cdiv(numbers, PART)
        launch(kernel, programs, (*args, self.n_chunks, H, level, groups), constants, num_warps=4)


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
