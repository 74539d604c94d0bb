"""A matrix and a cache."""

from typing import Literal

REVISION = 3
STATE = "n_heads * head_dim * head_dim + cache"
CACHE = "2 * n_heads * head_dim * (cache + block)"
LIMITS = ["block >= 1", "cache >= 0", "admission != 'none' or cache == 0"]
CAPS = {"block": "seq_len", "cache": "(seq_len - 1) // block * block"}
INERT = {"admission": "cache == 0 or cache >= (seq_len - 1) // block * block"}


class Mixer:
    """A matrix and a cache.

    Args:
        cache: tokens kept exactly (count)
        block: length of a block (tokens)
        admission: what is kept
    """

    def __init__(
        self,
        shape: object,
        *,
        cache: int = 16,
        block: int = 16,
        admission: Literal["residual", "recency", "none"] = "residual",
    ) -> None: ...
