"""`sweep bench`: what it says without a card, and what it makes of measurements. The measurements take a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runners import kernel_bench
from runners.kernel_bench import Limits
from runners.schema import Exit
from sweeps import cli

ROOT = Path(__file__).resolve().parent.parent
LIMITS = Limits(bytes=4e12, flops=400e12)
SMALL = (2, 33, 2, 16)


def sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["sweep", *argv])
    code = cli.main()
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("cuda", "told"), [(None, "a torch built for it: torch"), ("13.0", r"(CUDA 13.0) sees none here")]
)
def test_without_a_card_it_says_what_is_missing(
    cuda: str | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    code, out, err = sweep(monkeypatch, capsys, "bench", "kernels", "--quick")
    assert code == Exit.ENVIRONMENT
    assert out == ""
    assert err.startswith("`sweep bench kernels` needs a CUDA card")
    assert told in err


def test_an_op_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = sweep(monkeypatch, capsys, "bench", "kernels", "--ops", "short_conv,delta")
    assert code == Exit.USAGE
    assert "no op 'delta'; did you mean 'delta_rule'?" in err
    assert sweep(monkeypatch, capsys, "bench", "kernels", "--ops", ",")[0] == Exit.USAGE


def test_help_tells_the_columns_and_imports_no_torch() -> None:
    script = "import sys; sys.argv = ['sweep', 'bench', 'kernels', '--help']\nfrom sweeps.cli import main\n"
    script += "assert main() == 0\nassert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    for column in ("card ms", "called ms", "error", "of limit"):
        assert column in kernel_bench.HEADER
        assert f"`{column}`" in " ".join(ran.stdout.split())


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that need a card are stood in for: 2 ms each, and a graph that is not replayed."""
    draw, alternating = kernel_bench.draw, kernel_bench.alternating
    monkeypatch.setattr(kernel_bench, "draw", lambda op, shape: draw(op, shape, "cpu"))
    monkeypatch.setattr(kernel_bench, "alternating", lambda timed, repeats: alternating(timed, repeats, "cpu"))
    monkeypatch.setattr(kernel_bench, "recorded", lambda run: torch.cuda.CUDAGraph)
    for name in ("on_card", "as_called", "peak_mb"):
        monkeypatch.setattr(kernel_bench, name, lambda run: 2.0)


@pytest.mark.parametrize("op", kernel_bench.OPS)
@pytest.mark.parametrize("backward", [False, True])
def test_each_op_has_a_row_for_each_way(op: str, backward: bool, on_cpu: None, monkeypatch: Any) -> None:
    def theirs(x: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError("not on this card\nand more")

    monkeypatch.setattr(kernel_bench, "peer", lambda op: theirs)
    ours, refused = kernel_bench.rows(op, SMALL, backward, LIMITS, repeats=3)
    assert ours["by"] == "chunked"  # what "auto" takes without a card: one row, not two
    assert ours["auto"]
    assert 0 < ours["error"] < 0.02
    assert ours["card_ms"] == ours["called_ms"] == 2.0
    assert ours["of_limit"] == kernel_bench.least_ms(op, SMALL, backward, LIMITS) / 2
    assert json.loads(json.dumps(ours))["shape"] == list(SMALL)
    assert refused["failed"] == "NotImplementedError: not on this card"
    assert kernel_bench.line(refused).endswith("does not run: NotImplementedError: not on this card")


def test_a_fault_of_our_own_is_not_a_row(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(run: Any) -> float:
        raise ValueError("wrong")

    monkeypatch.setattr(kernel_bench, "peak_mb", fault)
    with pytest.raises(ValueError, match="wrong"):
        kernel_bench.rows("short_conv", SMALL, False, LIMITS, repeats=3)


def test_lines_stand_under_their_columns() -> None:
    row = {"op": "delta_rule", "shape": [1, 131072, 16, 64], "pass": "forward+backward", "by": "triton", "auto": True}
    row |= {"card_ms": 12.34567, "called_ms": 13.0, "peak_mb": 4096.2, "error": None, "of_limit": 0.614}
    text = kernel_bench.line(row)
    assert len(text) == len(kernel_bench.HEADER)
    assert text.split()[-5:] == ["12.3457", "13.0000", "4096", "-", "61%"]
    assert "triton (auto)" in text
    ends = [kernel_bench.HEADER.index(name) + len(name) for name in ("card ms", "called ms", "peak MB", "of limit")]
    assert all(text[end - 1] != " " and text[end : end + 1] in (" ", "") for end in ends)


def test_the_least_time_is_of_bytes_or_of_products() -> None:
    def least(op: str, backward: bool, limits: Limits) -> float:
        return kernel_bench.least_ms(op, (1, 1000, 1, 64), backward, limits)

    fast = float("inf")
    assert least("short_conv", False, Limits(1e9, fast)) == pytest.approx(2 * 2 * 3 * 64 * 1e-3)  # us a token
    assert least("linear_attention", False, Limits(1e9, fast)) == pytest.approx(4 * 2 * 64 * 1e-3)
    assert least("linear_attention", True, Limits(fast, 1e12)) == pytest.approx(3.5 * 2 * 64 * 256e-6)
    assert least("delta_rule", False, Limits(fast, 1e12)) == pytest.approx(2 * 64 * (4 + 3) * 64e-6)


def test_runs_alternate_and_a_slow_one_is_repeated_less() -> None:
    seen: list[str] = []

    def measure(name: str, ms: float) -> Any:
        return lambda: (seen.append(name), ms)[1]

    assert kernel_bench.alternating([measure("a", 1.0), measure("b", 3.0)], 5, "cpu") == [1.0, 3.0]
    assert seen == ["a", "b"] * 6  # once to see how long they take
    seen.clear()
    kernel_bench.alternating([measure("a", 1.0), measure("b", 10_000.0)], 31, "cpu")
    assert seen == ["a", "b"] * 4
    assert kernel_bench.alternating([], 31, "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("op", kernel_bench.OPS)
def test_a_small_shape_is_measured_on_the_card(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "peer", lambda _: None)  # compiling and tuning its kernels takes minutes
    limits = kernel_bench.limits()
    assert limits.bytes > 1e10
    first, *_ = kernel_bench.rows(op, SMALL, True, limits, repeats=3)
    assert first["auto"]
    assert first["card_ms"] > 0
    assert first["error"] < 0.02
