"""Random numbers as a function of a key and a counter: the same on every device, in any batch, after any resume.

Nothing here has a state. The i-th draw of a stream is `mix(key + (i + 1) * GOLDEN)`: SplitMix64 (Steele, Lea and
Flood 2014; the finaliser is Stafford's variant 13), whose i-th output can be had without the ones before it. All of it
is int64 arithmetic that wraps, which torch does alike on CPU and CUDA. Floats are made by operations that IEEE 754
rounds exactly (no libm), so they have the same bits too; only `normal` uses libm and is meant for the CPU.

Not for cryptography.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from runners.schema import canonical_json


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def key(*parts: Any) -> int:
    """The key of a stream: the first 64 bits of SHA-256 over the parts' canonical JSON, as an int64."""
    return int.from_bytes(hashlib.sha256(canonical_json(parts).encode()).digest()[:8], "big", signed=True)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def bits(stream: int, index: Tensor) -> Tensor:
    """64 random bits for each element of `index` (int64), as int64."""
    x = (index + 1) * GOLDEN + stream
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def integers(stream: int, index: Tensor, n: int) -> Tensor:
    """Uniform on 0 .. n-1. The bias of the remainder is below n / 2^63."""
    return _shift(bits(stream, index), 1) % n


def uniform(stream: int, index: Tensor) -> Tensor:
    """Uniform on the open interval (0, 1), fp64: the middle of one of 2^52 equal cells."""
    return (_shift(bits(stream, index), 12).double() + 0.5) * 2.0**-52


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive fp64 by exactly rounded operations alone, to about 2e-16 relative to 1.

    log(m 2^e) = e log 2 + 2 artanh((m-1)/(m+1)) with m in [1/2, 1), the series cut at s^39 (|s| <= 1/3).
    """
    mantissa, exponent = torch.frexp(x)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, 1 / 39)
    for odd in range(37, 0, -2):
        series = series * square + 1 / odd
    return exponent.double() * math.log(2) + 2 * s * series


def exponential(stream: int, index: Tensor) -> Tensor:
    """Exponential with mean 1, fp64."""
    return -_log(uniform(stream, index))


def normal(stream: int, index: Tensor) -> Tensor:
    """Standard normal, fp64, by Box and Muller. libm may differ in the last bit between machines: draw on the CPU."""
    radius = torch.sqrt(-2 * torch.log(uniform(stream, 2 * index)))
    return radius * torch.cos(2 * math.pi * uniform(stream, 2 * index + 1))


def permutation(stream: int, n: int) -> Tensor:
    """A uniform permutation of 0 .. n-1, on the host."""
    return torch.argsort(bits(stream, torch.arange(n)), stable=True)


def generator(*parts: Any) -> torch.Generator:
    """A torch generator of its own (CPU) for draws that need one, seeded by `key(*parts)`."""
    return torch.Generator().manual_seed(key(*parts) & (2**63 - 1))
