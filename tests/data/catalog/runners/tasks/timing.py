"""Timing; nothing is trained."""

REVISION = 1
METRICS = {"ms": "min"}
SELECT = "ms"
TRAINS = False


class Task:
    """Timing.

    Args:
        seq_len: length of a row (tokens)
    """

    def __init__(self, *, vocab_size: int = 64, seq_len: int = 64) -> None: ...
