"""Copying."""

REVISION = 1
LIMITS = ["2 * n_data <= seq_len"]
METRICS = {"accuracy": "max", "bits": "min"}
BOUNDS = {"accuracy": [0, 1]}
CHANCE = {"accuracy": "1 / vocab_size", "bits": "8"}
SELECT = "accuracy"


class Task:
    """Copying.

    Args:
        vocab_size: tokens (count)
        seq_len: length of a row (tokens)
        n_data: tokens to copy (count)
    """

    def __init__(self, *, vocab_size: int = 8192, seq_len: int = 64, n_data: int = 8) -> None: ...
