"""The model."""

from typing import Any, Literal

REVISION = 1
LIMITS = ["d_model % n_heads == 0"]
OWNERS = [["n_heads", "head_dim"]]
DERIVED = {"n_heads": "d_model // head_dim if head_dim is not None else 1", "head_dim": "d_model // n_heads"}
BLOCKS = {"mlp": {"gelu": "Gelu", "swiglu": "Swiglu"}, "moe": {"moe": "Moe"}}
NOT_YET = {"moe": ["moe"], "causal": [False]}


class Gelu:
    """Gelu.

    Args:
        width: features (count)
    """

    def __init__(self, d_model: int, *, width: int | None = None) -> None: ...


class Swiglu:
    """Swiglu.

    Args:
        width: features (count)
        gate: what gates
    """

    def __init__(self, d_model: int, *, width: int | None = None, gate: Literal["silu", "relu"] = "silu") -> None: ...


class Moe:
    """Experts.

    Args:
        experts: how many (count)
        bias: where
    """

    def __init__(self, d_model: int, *, experts: int = 4, bias: Literal["none", "outer"] = "none") -> None: ...


class Model:
    """The model.

    Args:
        d_model: width (features)
        n_layers: layers (count)
        n_heads: heads (count)
        head_dim: width of a head (features)
        mlp: block after each mixer
        moe: experts
        layers: kinds of mixer
        position: positions
        short_conv: convolution before q, k, v
        causal: no look at the future
    """

    def __init__(
        self,
        *,
        d_model: int = 64,
        n_layers: int = 2,
        n_heads: int | None = None,
        head_dim: int | None = None,
        mlp: str | dict[str, Any] | None = "gelu",
        moe: str | dict[str, Any] | None = None,
        layers: list[str] | None = None,
        position: Literal["none", "learned", "rope"] = "none",
        short_conv: bool = True,
        causal: bool = True,
    ) -> None: ...
