"""Times the Triton kernels on this machine's card, against flash-linear-attention where it is installed.

    python tests/benchmarks/kernel_times.py [--ops linear_attention,delta_rule] [--json FILE] [--quick]

Each line is a shape (batch, tokens, heads, head width), in bf16, forward or with the backward pass: milliseconds on the
card (the call recorded as a CUDA graph and replayed) and as called (from Python, to the end of the card's work), ours
over the peer's, peak memory, the error of each against fp64, and how near the time on the card is to the least that
bytes or products need. Ours and the peer's runs alternate on the same inputs, with the L2 cache emptied before each;
a figure is the median. Columns of the two kinds are never mixed. To choose tiles anew for another card, change the
tables in `plan` (kernels/_linear_attention.py) and `n_segments` (kernels/_segments.py) and run this again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._launch import choose_assembler, newest_cuda, triton_unfit
from kernels.delta_rule import delta_rule
from kernels.linear_attention import linear_attention

SHAPES = [(64, 256, 2, 64), (1, 8192, 16, 64), (8, 2048, 16, 128), (1, 65536, 16, 128), (1, 131072, 16, 64)]
BYTES_A_SECOND = 4.3e12  # an H200's copy, read and written counted
FLOPS_A_SECOND = 470e12  # what bf16 products of these sizes reach there
LONGEST_CHECKED = 8192
"""Tokens up to which errors are taken: fp64 on a card is slow."""

Inputs = dict[str, Tensor]
Op = Callable[[Inputs], Tensor]


def draw(shape: tuple[int, int, int, int]) -> Inputs:
    """Unit keys, as the mechanisms have them; beta and g as in the delta rule, ignored by linear attention."""
    B, T, H, D = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    q, k, v = (randn(B, T, H, D) for _ in range(3))
    named = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    return {name: x.bfloat16() for name, x in named.items()} | {"beta": randn(B, T, H).sigmoid()}


def ours(op: str, impl: str) -> Op:
    if op == "linear_attention":
        return lambda x: linear_attention(x["q"], x["k"], x["v"], scale=x["q"].shape[-1] ** -0.5, impl=impl)[0]
    return lambda x: delta_rule(x["q"], x["k"], None, x["v"], x["beta"], scale=x["q"].shape[-1] ** -0.5, impl=impl)[0]


def peer(op: str) -> Op | None:
    """The same op of flash-linear-attention, as its documentation calls it; None if it is not installed."""
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return None
    if op == "linear_attention":
        return lambda x: chunk_linear_attn(x["q"], x["k"], x["v"], normalize=False, output_final_state=True)[0]
    return lambda x: chunk_delta_rule(
        x["q"], x["k"], x["v"], x["beta"].to(x["q"].dtype), output_final_state=True
    )[0]  # fmt: skip


def call(op: Op, inputs: Inputs, backward: bool) -> Callable[[], Any]:
    if not backward:
        return torch.no_grad()(lambda: op(inputs))
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    do = torch.randn(leaves["v"].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    do = do.to(leaves["v"].dtype)

    def run() -> tuple[Tensor, ...]:
        o = op(leaves)
        return (o, *torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True))

    return run


def recorded(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def on_card(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def as_called(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def alternating(timed: list[Callable[[], float]], repeats: int) -> list[float]:
    """The median of each, run by turns."""
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: list[list[float]] = [[] for _ in timed]
    for _ in range(repeats):
        for seen, measure in zip(times, timed, strict=True):
            cache.zero_()
            seen.append(measure())
    return [statistics.median(seen) for seen in times]


def peak_mb(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def errors(run: Callable[[], Any], exact: list[Tensor | None]) -> float:
    """The largest relative RMS error among the output and the gradients."""
    given = run()
    pairs = zip(given if isinstance(given, tuple) else (given,), exact, strict=True)
    return max(
        float((x.double() - e).square().mean().sqrt() / e.square().mean().sqrt())
        for x, e in pairs
        if x is not None and e is not None
    )


def least_ms(op: str, shape: tuple[int, int, int, int], backward: bool) -> float:
    """What reading inputs and writing outputs once takes, or the products of chunks of 64 do: the larger."""
    B, T, H, D = shape
    C = 64
    tensors = 11 if backward else 4  # q, k, v, o; then q, k, v, do, dq, dk, dv as well
    flops = 2 * B * T * H * D * (2 * C + 2 * D)
    if op == "delta_rule":
        flops = 2 * B * T * H * D * (4 * C + 3 * D)
    return 1e3 * max(2 * B * T * H * D * tensors / BYTES_A_SECOND, flops * (3.5 if backward else 1) / FLOPS_A_SECOND)


def row(op: str, shape: tuple[int, int, int, int], backward: bool, repeats: int) -> dict[str, Any]:
    inputs = draw(shape)
    runs = {"ours": call(ours(op, "triton"), inputs, backward)}
    if (other := peer(op)) is not None:
        runs["peer"] = call(other, inputs, backward)
        try:
            runs["peer"]()
        except Exception as error:  # it refuses some passes on some cards
            print(f"the peer does not run {op} {shape}: {type(error).__name__}: {error}"[:200])
            del runs["peer"]
    told: dict[str, Any] = {"op": op, "shape": shape, "pass": "forward+backward" if backward else "forward"}
    exact = None
    if shape[1] <= LONGEST_CHECKED and shape[0] * shape[1] * shape[2] <= 2**18:
        made = call(ours(op, "chunked"), {name: x.double() for name, x in inputs.items()}, backward)()
        exact = list(made) if isinstance(made, tuple) else [made]
    for name, run in runs.items():
        told[f"{name}_mb"] = peak_mb(run)
        told[f"{name}_error"] = errors(run, exact) if exact is not None else None
    graphs = [recorded(run) for run in runs.values()]
    for kind, timed in (
        ("card", [lambda g=g: on_card(g) for g in graphs]),
        ("called", [lambda r=r: as_called(r) for r in runs.values()]),
    ):
        for name, ms in zip(runs, alternating(timed, repeats), strict=True):
            told[f"{name}_{kind}_ms"] = ms
    told["of_least"] = least_ms(op, shape, backward) / told["ours_card_ms"]
    return told


def shown(told: dict[str, Any]) -> str:
    parts = [f"{told['op']:<17}{told['shape']!s:<21}{told['pass']:<17}"]
    for kind in ("card", "called"):
        mine, theirs = told[f"ours_{kind}_ms"], told.get(f"peer_{kind}_ms")
        parts.append(f"{kind} {mine:.4f}" + (f" / {theirs:.4f} = {theirs / mine:.2f}x" if theirs else ""))
    parts.append(f"MB {told['ours_mb']:.0f}" + (f" / {told['peer_mb']:.0f}" if "peer_mb" in told else ""))
    if told["ours_error"] is not None:
        parts.append(f"error {told['ours_error']:.1e}" + (f" / {told['peer_error']:.1e}" if "peer_mb" in told else ""))
    return "  ".join([*parts, f"of least {told['of_least']:.0%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", default="linear_attention,delta_rule", help="which ops, with commas between")
    parser.add_argument("--json", type=Path, help="a file for the figures, one line of JSON a row")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and not (1, 65536, 16, 128)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(3, "needs a CUDA card; none here\n")
    unfit = triton_unfit(torch.empty(1, device="cuda"), heads=(64,))
    if unfit is not None:
        parser.exit(3, f"this machine {unfit}\n")
    assembler = choose_assembler(newest_cuda())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ptxas {assembler}", flush=True)
    rows = []
    for op in options.ops.split(","):
        for shape in SHAPES:
            if options.quick and shape[1] == 65536:
                continue
            for backward in (False, True):
                told = row(op, shape, backward, repeats=9 if options.quick else 31)
                rows.append(told)
                print(shown(told), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(x) + "\n" for x in rows))


if __name__ == "__main__":
    main()
