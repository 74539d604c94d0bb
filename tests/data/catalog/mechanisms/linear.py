"""One matrix."""

REVISION = 1
STATE = "n_heads * head_dim * head_dim * expand"


class Mixer:
    """One matrix.

    Args:
        expand: width of the values (times head_dim)
        unit_keys: keys have length one
    """

    def __init__(self, shape: object, *, expand: int = 1, unit_keys: bool = False) -> None: ...
