"""The training."""

from typing import Literal

REVISION = 1
LIMITS = ["lr > 0"]
OWNERS = [["steps", "epochs", "tokens"], ["batch_size", "batch_tokens"]]


class Train:
    """The training.

    Args:
        steps: updates (count)
        epochs: passes (count)
        tokens: tokens (count)
        batch_size: rows (count)
        batch_tokens: tokens an update (count)
        lr: learning rate
        warmup: updates of warm-up, or their share
        clip: largest norm of a gradient
        dtype: precision
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        tokens: int | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        lr: float = 1e-3,
        warmup: int | float = 0,
        clip: float | None = 1.0,
        dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None: ...
