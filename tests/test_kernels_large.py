"""Tensors of more than 2^31 numbers, whose places a 32-bit integer does not hold. Needs a card with room for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounded import FLOOR, RoundedProducts, error
from torch import Tensor

pytest.importorskip("triton")

from kernels.delta_rule import delta_rule
from kernels.linear_attention import linear_attention

LONG, MANY = (1, 1_050_011, 16, 128), (8200, 130, 16, 128)
"""Batch, tokens, heads, width of a head: one long sequence, and many short ones."""
SEEN = 1024
"""Tokens after which nothing is left of what came before, with the decay that is drawn here."""
Inputs = dict[str, Tensor]


def draw(op: str, shape: tuple[int, ...]) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype, generator=generator)

    x = {name: randn(*shape, dtype=torch.bfloat16) for name in ("q", "k", "v", "do")}
    x["k"] /= shape[-1] ** 0.5  # unit length, nearly
    x["g"] = -0.5 * randn(*shape[:3]).abs_()
    if op == "delta_rule":
        x["beta"] = randn(*shape[:3]).sigmoid_()
    return x


def run(op: str, x: Inputs, impl: str) -> list[Tensor]:
    """The output and the gradients."""
    leaves: dict[str, Any] = {name: value.detach().requires_grad_() for name, value in x.items() if name != "do"}
    if op == "delta_rule":
        q, k, v, beta, g = (leaves[name] for name in ("q", "k", "v", "beta", "g"))
        o, _, _ = delta_rule(q, k, None, v, beta, g, scale=1.0, impl=impl)
    else:
        o, _ = linear_attention(leaves["q"], leaves["k"], leaves["v"], leaves["g"], impl=impl)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), x["do"])]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LONG, MANY], ids=["long", "many"])
@pytest.mark.parametrize("op", ["linear_attention", "delta_rule"])
def test_more_numbers_than_an_int_counts(op: str, shape: tuple[int, ...]) -> None:
    """Both ends of the tensors are what the law in fp64 says of them alone."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 120 * 2**30:
        pytest.skip("needs 120 GiB of free memory on the card")
    x = draw(op, shape)
    assert x["q"].numel() > 2**31
    found = run(op, x, "triton")
    T = shape[1]
    ends = {"first": (0, 0, min(T, 2 * SEEN)), "last": (shape[0] - 1, max(0, T - 2 * SEEN), T)}
    for end, (sequence, begin, stop) in ends.items():
        part = {name: value[sequence : sequence + 1, begin:stop] for name, value in x.items()}
        exact = run(op, {name: value.double() for name, value in part.items()}, "chunked")
        with RoundedProducts(torch.bfloat16):
            rounded = run(op, part, "chunked")
        # The part does not know what lies beyond its inner edge.
        kept = slice(SEEN if begin else 0, SEEN if stop < T else None)
        for i, (whole, y, e) in enumerate(zip(found, rounded, exact, strict=True)):
            mine = whole[sequence : sequence + 1, begin:stop][:, kept]
            floor = FLOOR[torch.bfloat16] * (2 if i else 1)
            limit = max(1.5 * error(y[:, kept], e[:, kept]), floor)
            assert error(mine, e[:, kept]) <= limit, f"{end}: output {i} (0: o; then gradients)"
