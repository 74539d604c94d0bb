"""VLA on a card, its projections excluded, against causal softmax attention and against itself token by token.

    python3 -m tests.benchmarks.vla [--lengths 4096 8192 16384 32768] [--json]

One sequence, 16 heads of 64, bf16 in. Milliseconds on the card (recorded as a CUDA graph and replayed, by turns, the L2
cache emptied before each; the median):

    softmax          torch's scaled_dot_product_attention
    VLA              ridge_solve in fp32, delta_rule in bf16 and the division, with z a running sum in torch
    VLA, z in the op the same, with z_t . q_t from linear attention whose values are 1, as mechanisms/vla.py has it
    VLA bf16         the same again, but with u and keys rounded to bf16 before the ridge solve
    one launch       a Triton kernel below that does all of it token by token, a program a head: what a parallel form
                     has to beat; the best of its numbers of warps
    ridge, delta, z  the parts of VLA, each alone
    torch loop       the law in torch, one token after the other, as called: of 32 tokens, times T / 32

Needs a CUDA card.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.delta_rule import delta_rule, delta_rule_step
from kernels.linear_attention import linear_attention
from kernels.ridge_solve import ridge_solve, ridge_solve_step
from runners.kernel_bench import Call, alternating, machine, missing, on_card, recorded

H, K = 16, 64
LAM, DEN_MIN = 0.1, 1e-4
WARPS = (1, 2, 4, 8)
"""Of the serial kernel."""

Inputs = dict[str, Tensor]


def draw(T: int) -> Inputs:
    """What the projections leave: q and k with their feature map, unit keys, u of length 1 / sqrt(K); v in bf16."""
    generator = torch.Generator("cuda").manual_seed(T)
    q, k, u, v = (torch.randn(1, T, H, K, device="cuda", generator=generator).bfloat16() for _ in range(4))
    q, k = F.elu(q.float()) + 1, F.elu(k.float()) + 1
    u = F.normalize(u.float(), dim=-1) * K**-0.5
    return {"q": q, "k": k, "key": F.normalize(k, dim=-1), "u": u, "v": v}


def vla(x: Inputs, dtype: torch.dtype = torch.float32, sum_in_op: bool = False) -> Tensor:
    """As `mechanisms.vla.Mixer.forward` from there on; `dtype`: of the ridge solve."""
    q, key = x["q"].bfloat16(), x["key"].to(dtype)
    write, _ = ridge_solve(x["u"].to(dtype), key, LAM, unit=True)
    o, _, _ = delta_rule(q, key.bfloat16(), write.bfloat16(), x["v"], scale=1.0)
    return o / (summed(x) if sum_in_op else running(x)).clamp(min=DEN_MIN)


def running(x: Inputs) -> Tensor:
    """z_t . q_t with z the running sum of k."""
    return (x["k"].cumsum(1) * x["q"]).sum(-1, keepdim=True)


def summed(x: Inputs) -> Tensor:
    """The same: what linear attention gives for values of 1."""
    return linear_attention(x["q"], x["k"], x["q"].new_ones(1, 1, 1, 1).expand(*x["q"].shape[:3], 1))[0]


@triton.jit
def one_launch(q, k, key, u, v, o, lam, T, H: tl.constexpr, K: tl.constexpr):
    """One head from its first token to its last: A, S and z in registers, the next token's numbers on their way."""
    i = tl.arange(0, K)
    h = tl.program_id(0).to(tl.int64) * K + i
    A = tl.where(i[:, None] == i[None, :], 1.0 / lam, 0.0)
    S = tl.zeros([K, K], tl.float32)
    z = tl.zeros([K], tl.float32)
    q_next, k_next, key_next = tl.load(q + h), tl.load(k + h), tl.load(key + h)
    u_next, v_next = tl.load(u + h), tl.load(v + h)
    for t in range(T):
        q_t, k_t, key_t, u_t, v_t = q_next, k_next, key_next, u_next, v_next.to(tl.float32)
        at = h + tl.minimum(t + 1, T - 1) * (H * K)
        q_next, k_next, key_next = tl.load(q + at), tl.load(k + at), tl.load(key + at)
        u_next, v_next = tl.load(u + at), tl.load(v + at)
        p = tl.sum(A * u_t[:, None], 0)
        A -= p[:, None] * (p / (1.0 + tl.sum(u_t * p, 0)))[None, :]
        alpha = tl.sum(A * key_t[:, None], 0)
        alpha = alpha / tl.sqrt(tl.sum(alpha * alpha, 0))
        error = v_t - tl.sum(S * key_t[:, None], 0)
        S += alpha[:, None] * error[None, :]
        z += k_t
        den = tl.maximum(tl.sum(z * q_t, 0), 1e-4)
        out = tl.sum(S * q_t[:, None], 0) / den
        tl.store(o + h + t * (H * K), out)


def serial(x: Inputs, warps: int) -> Tensor:
    o = torch.empty_like(x["q"])
    one_launch[(H,)](x["q"], x["k"], x["key"], x["u"], x["v"], o, LAM, x["q"].shape[1], H=H, K=K, num_warps=warps)
    return o


def torch_loop(x: Inputs, tokens: int) -> Tensor:
    """The law: a handful of torch calls a token."""
    A = (torch.eye(K, device="cuda") / LAM).repeat(1, H, 1, 1)
    S, z, out = torch.zeros_like(A), torch.zeros_like(A[..., 0]), []
    for t in range(tokens):
        q, k, key, u, v = (x[name][:, t].float() for name in ("q", "k", "key", "u", "v"))
        alpha, A = ridge_solve_step(A, u, key)
        o, S, _ = delta_rule_step(S, q, key, F.normalize(alpha, dim=-1), v, None, None, 1.0)
        z = z + k
        out.append(o / (z * q).sum(-1, keepdim=True).clamp(min=DEN_MIN))
    return torch.stack(out, 1)


def forward(run: Any, x: Inputs) -> Call:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (run(x),)

    return call


def backward(run: Any, x: Inputs) -> Call:
    """Forward and the gradient to each input."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
    with torch.no_grad():
        do = torch.randn_like(run(x))

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(leaves), list(leaves.values()), do, allow_unused=True)

    return call


def parts(x: Inputs) -> dict[str, tuple[Any, Inputs]]:
    """Each measured thing: a function and the tensors it reads and differentiates."""
    write = ridge_solve(x["u"], x["key"], LAM, unit=True)[0].detach()
    q, k, v = (x[name].bfloat16().transpose(1, 2).contiguous() for name in ("q", "key", "v"))
    reads = {"q": x["q"], "key": x["key"], "write": write, "v": x["v"]}
    found = {
        "softmax": (
            lambda y: F.scaled_dot_product_attention(y["q"], y["key"], y["v"], is_causal=True),
            {"q": q, "key": k, "v": v},
        ),
        "VLA": (vla, x),
        "VLA, z in the op": (functools.partial(vla, sum_in_op=True), x),
        "VLA bf16": (functools.partial(vla, dtype=torch.bfloat16, sum_in_op=True), x),
    }
    for name, dtype in {"": torch.float32, " bf16": torch.bfloat16}.items():
        ux = {n: x[n].to(dtype) for n in ("u", "key")}
        found["ridge" + name] = (lambda y: ridge_solve(y["u"], y["key"], LAM, unit=True)[0], ux)
        cut = {n: tensor.to(dtype) for n, tensor in reads.items()}
        found["delta" + name] = (lambda y: delta_rule(y["q"], y["key"], y["write"], y["v"], scale=1.0)[0], cut)
    qk = {n: x[n] for n in ("q", "k")}
    half = {n: tensor.bfloat16() for n, tensor in qk.items()}
    return {**found, "z by cumsum": (running, qk), "z in the op": (summed, qk), "z in the op, bf16": (summed, half)}


def measured(T: int) -> dict[str, Any]:
    """Milliseconds of everything at length T, and how far the forms are apart."""
    x = draw(T)
    row: dict[str, Any] = {"T": T}
    exact = serial(x, 4)
    for name, settings in {"VLA": {}, "VLA bf16": {"dtype": torch.bfloat16, "sum_in_op": True}}.items():
        with torch.no_grad():
            row[f"{name}: from one launch"] = float((vla(x, **settings) - exact).norm() / exact.norm())
    for way, make in {"forward": forward, "forward+backward": backward}.items():
        calls = {name: make(*given) for name, given in parts(x).items()}
        if way == "forward" and T <= 16384:
            calls |= {f"one launch, {w} warps": forward(functools.partial(serial, warps=w), x) for w in WARPS}
        graphs = {name: graph for name, run in calls.items() if (graph := recorded(run)) is not None}
        times = alternating([functools.partial(on_card, graph.replay) for graph in graphs.values()])
        row[way] = dict(zip(graphs, times, strict=True))
        del calls, graphs
    torch_loop(x, 32)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch_loop(x, 32)
    torch.cuda.synchronize()
    row["torch loop"] = 1e3 * (time.perf_counter() - begin) * T / 32
    return row


def told(rows: list[dict[str, Any]]) -> str:
    """A column for each length."""
    lines = [f"{'':<36}" + "".join(f"{row['T']:>10}" for row in rows)]
    for way in ("forward", "forward+backward"):
        for name in rows[0][way]:
            cells = [f"{row[way][name]:10.3f}" if name in row[way] else f"{'-':>10}" for row in rows]
            lines.append(f"{f'{name}, {way}':<36}" + "".join(cells))
    for name in (n for n in rows[0] if n not in ("T", "forward", "forward+backward")):
        lines.append(f"{name:<36}" + "".join(f"{row[name]:10.2g}" for row in rows))
    for by in ("VLA", "VLA bf16"):
        for other in ("softmax", "torch loop", "one launch"):
            ratios = []
            for row in rows:
                one = [ms for name, ms in row["forward"].items() if name.startswith(other)]
                ratios.append(min(one, default=row.get(other, 0.0)) / row["forward"][by])
            lines.append(f"{f'{other} over {by}, forward':<36}" + "".join(f"{x:10.3g}" for x in ratios))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if (lacks := missing()) is not None:
        raise SystemExit(f"this needs {lacks}")
    rows = []
    for T in given.lengths:
        rows.append(measured(T))
        torch.cuda.empty_cache()
    print(json.dumps({**machine(), "rows": rows}, indent=1) if given.json else told(rows))


if __name__ == "__main__":
    main()
