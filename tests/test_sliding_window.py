"""Sliding-window attention of long rows, which is cut into bands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mechanisms import sliding_window
from mechanisms._parts import Shape


@pytest.mark.parametrize(("window", "T", "past"), [(5, 23, 0), (5, 11, 5), (8, 40, 3), (1, 7, 1), (7, 64, 7)])
def test_bands_are_the_law(window: int, T: int, past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding_window, "MOST_SCORES", 0)
    mixer = sliding_window.Mixer(Shape(d_model=8, n_heads=2, head_dim=4, seq_len=T), window=window)
    q, k, v = (torch.randn(2, size, 2, 4, dtype=torch.float64, requires_grad=True) for size in (T, T + past, T + past))
    do = torch.randn(2, T, 2, 4, dtype=torch.float64)

    def outputs(o: Tensor) -> tuple[Tensor, ...]:
        return o, *torch.autograd.grad(o, (q, k, v), do)

    law = outputs(sliding_window.reference(q, k, v, window))
    for found, wanted in zip(outputs(mixer._attend(q, k, v)), law, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
