"""Reads everything."""

REVISION = 1
STATE = "0"
CACHE = "2 * seq_len * n_heads * head_dim"
LIMITS = ["position != 'rope' or head_dim % 2 == 0"]


class Mixer:
    """No parameters."""
