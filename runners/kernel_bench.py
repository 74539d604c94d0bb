"""How fast the ops run on this machine's card, against their torch forms and flash-linear-attention if it is here.

Each row is an op, a shape (batch, tokens, heads, head width; in bf16), forward or with the backward pass, and what
computes it: milliseconds on the card (the call recorded as a CUDA graph and replayed) and as called (from Python, to
the end of the card's work), peak memory, the error against fp64, and the least time over that on the card. Runs of one
shape alternate on the same inputs, with the L2 cache emptied before each; a figure is the median. The short
convolution runs on q, k and v together: 3 * heads * head width channels. Slot attention has 64 slots; cache attention
keeps 64 tokens beside a block of 256, as HOLA does, and has no peer; nor has the ridge solve, in fp32 as VLA calls it.

To choose tiles anew for another card, change the tables in `plan` (kernels/_linear_walks.py), `n_segments`
(kernels/_segments.py), `blocks` (kernels/_ridge_solve.py and kernels/_log_linear_call.py) or `walk_length`
(kernels/_short_conv.py) and run this again.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._launch import choose_assembler, newest_cuda, resolve, triton_unfit
from kernels.cache_attention import cache_attention
from kernels.delta_rule import delta_rule
from kernels.linear_attention import linear_attention
from kernels.log_linear_attention import log_linear_attention, n_levels
from kernels.ridge_solve import ridge_solve
from kernels.short_conv import short_conv
from kernels.slot_attention import slot_attention
from runners.graphs import nothing_collected

SHAPES = [(64, 256, 2, 64), (1, 8192, 16, 64), (8, 2048, 16, 128), (1, 65536, 16, 128), (1, 131072, 16, 64)]
OPS = (
    "linear_attention",
    "delta_rule",
    "log_linear_attention",
    "log_linear_delta",
    "slot_attention",
    "cache_attention",
    "ridge_solve",
    "short_conv",
)
"""By name; `log_linear_delta` is log-linear attention with beta, which flash-linear-attention has not."""
PEER = "flash-linear-attention"
WIDTH = 4
"""Of the short convolution."""
SLOTS = 64
CACHED, BLOCK = 64, 256
"""Of cache attention: tokens kept, and tokens of a block."""
RIDGE = 0.1
LONGEST_CHECKED = 8192
"""Tokens up to which errors are taken: fp64 on a card is slow."""
SECONDS = 2.0
"""What the repeats of one figure may take, about; there are three at least."""

Shape = tuple[int, int, int, int]
Inputs = dict[str, Tensor]
Call = Callable[[], tuple[Tensor, ...]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What this card reaches: bytes a second of a copy (read and written), products and sums a second in bf16."""

    bytes: float
    flops: float


def missing() -> str | None:
    """What this machine lacks to time kernels, to be read after "needs"; None: nothing."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"a CUDA card and a torch built for it: torch {torch.__version__} is not"
    return f"a CUDA card: torch {torch.__version__} (CUDA {torch.version.cuda}) sees none here"


def machine() -> dict[str, str | None]:
    """What a figure holds for: the card, and versions of what made the code that ran on it."""
    versions = {name: _version(name) for name in ("torch", "triton", PEER)}
    assembler = choose_assembler(newest_cuda()) if versions["triton"] else None
    return {"card": torch.cuda.get_device_name(), **versions, "assembler": assembler}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def limits() -> Limits:
    """Measured: a copy of up to 1 GiB, and a product of 8192 x 8192 matrices."""
    n = min(2**29, torch.cuda.mem_get_info()[0] // 16)
    x, y = torch.empty(2, n, dtype=torch.bfloat16, device="cuda")
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    out = torch.empty_like(a)
    copy, product = alternating([lambda: on_card(lambda: y.copy_(x)), lambda: on_card(lambda: torch.mm(a, a, out=out))])
    return Limits(4 * n / copy * 1e3, 2 * 8192**3 / product * 1e3)


def draw(op: str, shape: Shape, device: str = "cuda") -> Inputs:
    """Unit keys, as the mechanisms have them; weights of the convolution in fp32, as training has them."""
    B, T, H, D = shape
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    if op == "short_conv":
        return {"x": randn(B, T, 3 * H * D).bfloat16(), "w": 0.5 * randn(3 * H * D, WIDTH)}
    if op == "ridge_solve":
        u, x = (F.normalize(randn(B, T, H, D), dim=-1) for _ in range(2))
        return {"u": u * D**-0.5, "x": x}
    q, k, v = (randn(B, T, H, D) for _ in range(3))
    inputs = {"q": F.normalize(q, dim=-1).bfloat16(), "k": F.normalize(k, dim=-1).bfloat16(), "v": v.bfloat16()}
    if op == "slot_attention":
        f = F.logsigmoid(randn(B, T, H, SLOTS)) / 8  # as GSA's gates
        return inputs | {"f": f, "s": (-torch.expm1(f)).bfloat16()}
    if op == "cache_attention":
        gain = torch.full((D,), D**0.5, device=device)
        return inputs | {"m": randn(B, T, H).abs(), "gain": gain, "sink": torch.zeros(H, device=device)}
    if op.startswith("log_linear"):
        inputs |= {"g": F.logsigmoid(randn(B, T, H) + 4), "lam": F.softplus(randn(B, T, H, n_levels(T)))}
    return inputs | {"beta": randn(B, T, H).sigmoid()} if op in ("delta_rule", "log_linear_delta") else inputs


def ours(op: str, x: Inputs, impl: str) -> Tensor:
    """The output of our `op`."""
    if op == "short_conv":
        return short_conv(x["x"], x["w"], "silu", impl=impl)[0]
    if op == "ridge_solve":
        return ridge_solve(x["u"], x["x"], RIDGE, unit=True, impl=impl)[0]
    scale = x["q"].shape[-1] ** -0.5
    if op == "linear_attention":
        return linear_attention(x["q"], x["k"], x["v"], scale=scale, impl=impl)[0]
    if op == "slot_attention":
        return slot_attention(x["q"], x["k"], x["v"], x["f"], x["s"], scale=scale, impl=impl)[0]
    if op.startswith("log_linear"):
        q, k, v, g, lam = (x[name] for name in ("q", "k", "v", "g", "lam"))
        return log_linear_attention(q, k, v, g, lam, x.get("beta"), scale=scale, impl=impl)[0]
    if op == "cache_attention":
        q, k, v, m, gain, sink = (x[name] for name in ("q", "k", "v", "m", "gain", "sink"))
        return cache_attention(q, k, v, m, width=CACHED, block=BLOCK, gain=gain, sink=sink, impl=impl)[0]
    return delta_rule(x["q"], x["k"], None, x["v"], x["beta"], scale=scale, impl=impl)[0]


def peer(op: str) -> Callable[[Inputs], Tensor] | None:
    """The same op of flash-linear-attention, as its documentation calls it; None if it has none, or is not here."""
    if op in ("cache_attention", "log_linear_delta", "ridge_solve"):
        return None
    module, name = {
        "linear_attention": ("fla.ops.linear_attn", "chunk_linear_attn"),
        "delta_rule": ("fla.ops.delta_rule", "chunk_delta_rule"),
        "log_linear_attention": ("fla.ops.log_linear_attn", "chunk_log_linear_attn"),
        "slot_attention": ("fla.ops.gsa", "chunk_gsa"),
        "short_conv": ("fla.modules.convolution", "causal_conv1d"),
    }[op]
    try:
        theirs = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    if op == "short_conv":
        return lambda x: theirs(x["x"], weight=x["w"], activation="silu", output_final_state=True)[0]
    if op == "linear_attention":
        return lambda x: theirs(x["q"], x["k"], x["v"], normalize=False, output_final_state=True)[0]
    if op == "log_linear_attention":
        scale = {"scale": None, "output_final_state": True}  # None: that of the width of a head
        return lambda x: theirs(x["q"], x["k"], x["v"], x["g"], x["lam"], **scale)[0]
    if op == "slot_attention":
        return lambda x: theirs(x["q"], x["k"], x["v"], x["s"], x["f"], output_final_state=True)[0]
    return lambda x: theirs(x["q"], x["k"], x["v"], x["beta"].to(x["q"].dtype), output_final_state=True)[0]


def call(op: Callable[[Inputs], Tensor], inputs: Inputs, backward: bool) -> Call:
    """Runs `op`: the output, and with `backward` the gradient to each input; scores `m` have none."""
    if not backward:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (op(inputs),)

        return forward
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = next(leaves[name] for name in ("v", "x") if name in leaves)
    generator = torch.Generator(out.device).manual_seed(1)
    do = torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)

    def both() -> tuple[Tensor, ...]:
        o = op(leaves)
        return (o.detach(), *torch.autograd.grad(o, [x for name, x in leaves.items() if name != "m"], do))

    return both


def recorded(run: Call) -> torch.cuda.CUDAGraph | None:
    """`run` as a CUDA graph; None if it cannot be one: it waits for the card, or memory does not hold a second."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with nothing_collected(), torch.cuda.graph(graph, stream=side):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def on_card(run: Callable[[], Any]) -> float:
    """Milliseconds between two events of the card, before and after what `run` gives it to do."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def as_called(run: Callable[[], Any]) -> float:
    """Milliseconds from the call to the end of the card's work."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def alternating(timed: list[Callable[[], float]], repeats: int = 9, device: str = "cuda") -> list[float]:
    """The median of each, run by turns; fewer than `repeats` if one of them is slow."""
    cache = torch.empty(2**28 if device == "cuda" else 1, dtype=torch.int8, device=device)
    slowest = max((measure() for measure in timed), default=0.0)
    times: list[list[float]] = [[] for _ in timed]
    for _ in range(max(3, min(repeats, int(1e3 * SECONDS / max(slowest, 1e-3))))):
        for seen, measure in zip(times, timed, strict=True):
            cache.zero_()
            seen.append(measure())
    return [statistics.median(seen) for seen in times]


def peak_mb(run: Call) -> float:
    """MiB that a call holds at most, above what is held before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def largest_error(given: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The largest relative RMS error among the output and the gradients."""
    return max(
        float((x.double() - e).square().mean().sqrt() / e.square().mean().sqrt())
        for x, e in zip(given, exact, strict=True)
    )


def least_ms(op: str, shape: Shape, backward: bool, limits: Limits) -> float:
    """What reading inputs and writing outputs once takes, or the products of chunks of 64 do: the larger."""
    B, T, H, D = shape
    C = 64
    if op == "short_conv":  # x, y; then x, dy, dx as well
        return 1e3 * 2 * B * T * 3 * H * D * (5 if backward else 2) / limits.bytes
    tensors = 11 if backward else 4  # q, k, v, o; then q, k, v, do, dq, dk, dv as well
    size = 2 * B * T * H * D * tensors
    flops = 2 * B * T * H * D * (4 * C + 3 * D if op == "delta_rule" else 2 * C + 2 * D)
    if op.startswith("log_linear"):  # g and lam, and beta; then these again, and their gradients
        size += 4 * B * T * H * (n_levels(T) + 2) * (3 if backward else 1)
        flops = 2 * B * T * H * (C * D * (4 if op == "log_linear_delta" else 2) + D * D * max(n_levels(T) - 7, 0) // 2)
    if op == "slot_attention":  # f and s; then both again, df and ds
        size += (3 if backward else 1) * 6 * B * T * H * SLOTS
        flops = 2 * B * T * H * 2 * (C * (D + SLOTS) + 2 * D * SLOTS)
    if op == "ridge_solve":  # u, x, alpha; then u, alpha, dalpha, du and dx as well, in fp32
        size, flops = 4 * B * T * H * D * (8 if backward else 3), 2 * B * T * H * D * 3 * D
    if op == "cache_attention":  # a token reads half its block, and the cache if its block is not the first
        own = min(BLOCK, T)
        flops = 2 * B * H * D * (T * (own + 1) + 2 * CACHED * (T - own))
    passes = 3.5 if backward else 1.0
    return 1e3 * max(size / limits.bytes, passes * flops / limits.flops)


def auto(op: str, inputs: Inputs) -> str:
    """What "auto" takes for these inputs."""
    heads = (inputs["q"].shape[-1], inputs["v"].shape[-1]) if "q" in inputs else ()
    return resolve("auto", op, triton_unfit(*inputs.values(), heads=heads))


def rows(op: str, shape: Shape, backward: bool, limits: Limits, repeats: int) -> list[Row]:
    """One row for what "auto" takes, one for the chunked torch form, one for the peer. Those that fail say so."""
    inputs = draw(op, shape)
    chosen = auto(op, inputs)
    ops = {impl: functools.partial(ours, op, impl=impl) for impl in dict.fromkeys((chosen, "chunked"))}
    runs = {by: call(run, inputs, backward) for by, run in ops.items()}
    if (theirs := peer(op)) is not None:
        runs[PEER] = call(theirs, inputs, backward)
    shared = {"op": op, "shape": list(shape), "pass": "forward+backward" if backward else "forward"}
    told = {by: {**shared, "by": by, "auto": by == chosen} for by in runs}
    exact = None
    if shape[1] <= LONGEST_CHECKED and shape[0] * shape[1] * shape[2] <= 2**18:
        exact = _exact(op, inputs, backward)
    for by, run in list(runs.items()):
        try:
            told[by]["error"] = largest_error(run(), exact) if exact is not None else None
            told[by]["peak_mb"] = peak_mb(run)
        except Exception as error:
            if by != PEER and not isinstance(error, torch.OutOfMemoryError):
                raise
            told[by]["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            del runs[by]
    del exact
    graphs = {by: graph for by, run in runs.items() if (graph := recorded(run)) is not None}
    card = alternating([functools.partial(on_card, graph.replay) for graph in graphs.values()], repeats)
    for by, ms in zip(graphs, card, strict=True):
        told[by] |= {"card_ms": ms, "of_limit": least_ms(op, shape, backward, limits) / ms}
    called = alternating([functools.partial(as_called, run) for run in runs.values()], repeats)
    for by, ms in zip(runs, called, strict=True):
        told[by]["called_ms"] = ms
    return list(told.values())


def _exact(op: str, inputs: Inputs, backward: bool) -> tuple[Tensor, ...] | None:
    """In fp64; None where memory does not hold it."""
    double = {name: x.double() for name, x in inputs.items()}
    try:
        return call(functools.partial(ours, op, impl="chunked"), double, backward)()
    except torch.OutOfMemoryError:
        return None


def all_rows(ops: Iterable[str], limits: Limits, quick: bool) -> Iterator[Row]:
    """Every row of `ops`, as they are measured. `quick`: fewer repeats, and not (1, 65536, 16, 128)."""
    for op in ops:
        for shape in SHAPES:
            for backward in (False, True) if not quick or shape[1] != 65536 else ():
                yield from rows(op, shape, backward, limits, repeats=9 if quick else 31)
                torch.cuda.empty_cache()


HEADER = (
    f"{'op':<17} {'shape (B, T, H, D)':<20} {'pass':<16} {'by':<22} "
    f"{'card ms':>9} {'called ms':>9} {'peak MB':>8} {'error':>8} {'of limit':>8}"
)


def line(row: Row) -> str:
    """A row as text, under `HEADER`; `-` stands for what was not measured."""
    by = f"{row['by']} (auto)" if row["auto"] else row["by"]
    start = f"{row['op']:<17} {', '.join(map(str, row['shape'])):<20} {row['pass']:<16} {by:<22} "
    if "failed" in row:
        return f"{start}does not run: {row['failed']}"

    def cell(name: str, form: str) -> str:
        return "-" if row.get(name) is None else format(row[name], form)

    return (
        f"{start}{cell('card_ms', '.4f'):>9} {cell('called_ms', '.4f'):>9} {cell('peak_mb', '.0f'):>8} "
        f"{cell('error', '.1e'):>8} {cell('of_limit', '.0%'):>8}"
    )
