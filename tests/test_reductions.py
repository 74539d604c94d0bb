"""Settings under which one of the newer baselines is an older mechanism, or an op that was proved apart."""

from __future__ import annotations

import torch
from test_mechanisms import build, close, same, tokens


def test_preconditioned_gated_deltanet_without_scaling_is_gated_deltanet() -> None:
    plain = build("gated_deltanet", {"expand_v": 2})
    assert same(build("preconditioned_gated_deltanet", {"expand_v": 2, "squash": 1.0}), plain)
    assert not same(build("preconditioned_gated_deltanet", {"expand_v": 2}), plain)


def test_a_channel_is_scaled_within_its_bounds_and_the_less_the_more_it_was_used() -> None:
    mixer, x = build("preconditioned_gated_deltanet", {"squash": 2.0}), tokens(40)
    k = torch.nn.functional.normalize(mixer.project(x, None)[1], dim=-1)
    written, A = mixer._precondition(k, x, None)
    scale = written / k
    assert scale.min() > 0.5
    assert scale.max() < 2
    used = torch.stack([mixer._precondition(k[:, :t], x[:, :t], None)[1][:, :, 0] for t in range(1, 41)], 1)
    assert close(A[:, :, 0], used[:, -1])
    by_use = scale.flatten()[used.flatten().argsort()]
    assert by_use.diff().max() < 1e-12  # one center for all heads at first, so one falling curve
