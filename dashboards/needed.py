"""How many pairs a verdict takes: known before anything runs, so `sweep plan` says it too. Standard library only."""

from __future__ import annotations

import math

ALPHA = 0.05


def pairs_needed(n_tests: int, looks: int = 1) -> int:
    """The fewest pairs with which flips can reach p ≤ 0.05 after Holm over `n_tests` tests and `looks` looks.

    The smallest p of N pairs is 2^(1 − N): 6 pairs for one test, 8 for four, 10 for twenty.
    """
    return math.ceil(1 + math.log2(n_tests * looks / ALPHA))
