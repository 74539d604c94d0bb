"""Softmax over the last tokens."""

REVISION = 1
CACHE = "2 * min(window, seq_len) * n_heads * head_dim"
LIMITS = ["window >= 1"]
SAME_AS = {"softmax": "window >= seq_len"}


class Mixer:
    """Softmax over the last tokens.

    Args:
        window: how many tokens are read, the newest included (count)
    """

    def __init__(self, shape: object, *, window: int) -> None: ...
