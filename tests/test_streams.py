"""Random streams: SplitMix64 itself, and the laws of what is made from it."""

import math
import random

import pytest
import torch
from scipy import stats

from runners import streams


def test_splitmix64_known_answers() -> None:
    """First outputs of the published generator for seeds 0 and 1234567."""
    known = {
        0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
        1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423],
    }
    for seed, words in known.items():
        ours = streams.bits(seed, torch.arange(3)).tolist()
        assert [word % 2**64 for word in ours] == words


def test_bits_equal_plain_python() -> None:
    """The int64 arithmetic that wraps is arithmetic modulo 2^64, for counters of either sign."""
    rng = random.Random(5)
    for _ in range(50):
        stream, index = rng.getrandbits(63), rng.getrandbits(63) - 2**62
        x = (stream + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        assert streams.bits(stream, torch.tensor([index])).item() % 2**64 == x ^ (x >> 31)


def test_uniform_in_every_bit_and_across_neighbouring_streams() -> None:
    n = 1 << 16
    index = torch.arange(n)
    words = streams.bits(streams.key("bits"), index)
    for bit in range(64):
        ones = int(((words >> bit) & 1).sum())
        assert abs(ones - n / 2) < 4.5 * math.sqrt(n / 4), f"bit {bit} is set in {ones} of {n}"
    pairs = streams.integers(streams.key(0), index, 16) * 16 + streams.integers(streams.key(1), index, 16)
    assert stats.chisquare(torch.bincount(pairs, minlength=256).numpy()).pvalue > 1e-3
    serial = streams.integers(streams.key("serial"), index, 16).view(-1, 2)
    assert stats.chisquare(torch.bincount(serial[:, 0] * 16 + serial[:, 1], minlength=256).numpy()).pvalue > 1e-3


def test_laws() -> None:
    index = torch.arange(50000)
    assert stats.kstest(streams.uniform(streams.key("u"), index).numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(streams.exponential(streams.key("e"), index).numpy(), "expon").pvalue > 1e-3
    assert stats.kstest(streams.normal(streams.key("n"), index).numpy(), "norm").pvalue > 1e-3
    counts = torch.bincount(streams.integers(streams.key("i"), index, 7), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_logarithm_without_libm() -> None:
    x = torch.cat(
        [streams.uniform(streams.key("log"), torch.arange(10000)), torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5])]
    )
    assert torch.allclose(streams._log(x), torch.log(x), rtol=1e-15, atol=2.3e-16)


def test_exponential_is_positive_at_the_ends() -> None:
    ends = torch.tensor([0.5 * 2.0**-52, 1 - 0.5 * 2.0**-52], dtype=torch.float64)
    assert (-streams._log(ends) > 0).all()


def test_keys_tell_everything_apart() -> None:
    parts = [("a",), ("a", None), ("a", 0), ("a", "0"), ("a", 0, 1), ("a", [0, 1]), ({"a": 0},), ("b",)]
    keys = {streams.key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert streams.key({"x": 1, "y": 2}) == streams.key({"y": 2, "x": 1})
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_permutation() -> None:
    order = streams.permutation(streams.key("p"), 1000)
    assert order.sort().values.tolist() == list(range(1000))
    firsts = [int(streams.permutation(streams.key("p", i), 8)[0]) for i in range(4000)]
    assert stats.chisquare(torch.bincount(torch.tensor(firsts), minlength=8).numpy()).pvalue > 1e-3


@pytest.mark.gpu
def test_same_bits_on_the_card() -> None:
    index = torch.arange(1 << 20)
    for draw in (streams.bits, streams.uniform, streams.exponential):
        assert torch.equal(draw(streams.key("gpu"), index), draw(streams.key("gpu"), index.cuda()).cpu())
    assert torch.equal(streams.integers(3, index, 8192), streams.integers(3, index.cuda(), 8192).cpu())
