"""One trial on N GPUs against one: tokens a second and efficiency at the same global batch, and both loss curves.

    python3 -m tests.benchmarks.ddp [--gpus 2] [--shard] [--size 20m] [--batch-tokens 262144] [--dtype bf16]

Trains the same trial with one process and with N (copies by default, cut by `--shard`), each started by torch itself,
with nothing of Ray or the ledger around it. Updates are timed after the first `--warm`, in which kernels compile and
graphs are recorded, and the validation at the end is left out. Afterwards the N processes' checkpoint of half-way is
continued by one. `--gpus 0` runs two processes on the CPU, to see the script work. No network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from runners import train
from runners.schema import Trial, digest
from runners.team import Team

SEQ_LEN = 512


@dataclass
class Measured:
    tokens_per_s: float
    losses: list[float]
    peak_bytes: int
    snapshot: Any = None


def trial(mechanism: str, size: str, batch_tokens: int, steps: int, dtype: str) -> Trial:
    settings: dict[str, Any] = {
        "seed": 0,
        "mechanism": {"name": mechanism},
        "task": {
            "name": "mqar",
            "vocab_size": 8192,
            "seq_len": SEQ_LEN,
            "n_pairs": 64,
            "valid_examples": 64,
            "test_examples": 64,
        },
        "model": {"size": size, "head_dim": 64, "norm_type": "rms", "mlp": "swiglu"},
        "train": {"steps": steps, "batch_tokens": batch_tokens, "lr": 1e-3, "dtype": dtype, "eval_every": steps},
    }
    return Trial(digest(settings), **settings)


def run(one: Trial, team: Team, warm: int, *, stop_at: int | None = None, start: Any = None) -> Measured:
    """Train in this process, one of `team`, up to update `stop_at`; `start` = a snapshot to go on from."""
    assert one.train is not None
    on_card, steps = torch.cuda.is_available(), one.train["steps"]
    device = torch.device("cuda", team.rank) if on_card else torch.device("cpu")
    at, times, losses = [start.step if start else 0], [], []

    def before_update() -> bool:
        if at[0] in (warm, steps - 1):
            if on_card:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        at[0] += 1
        return stop_at is not None and at[0] > stop_at

    done = train.fit(
        one,
        device=device,
        start=start,
        commit=lambda _, points: losses.extend(p.metrics["train/loss"] for p in points),
        progress=lambda *_: None,
        should_stop=before_update,
        checkpoint_every_s=float("inf"),
        team=team,
    )
    rows = train.batch_rows(one) * SEQ_LEN
    rate = rows * (steps - 1 - warm) / (times[1] - times[0]) if len(times) == 2 else float("nan")
    return Measured(rate, losses, torch.cuda.max_memory_allocated() if on_card else 0, done.snapshot)


def _member(rank: int, size: int, shard: bool, port: int, answers: Any, given: tuple[Any, ...]) -> None:
    one, warm, stop_at = given
    torch.set_num_threads(1)
    on_card = torch.cuda.is_available()
    if on_card:
        torch.cuda.set_device(rank)
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if on_card else "gloo"
        torch.distributed.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = run(one, Team(rank, size, shard), warm, stop_at=stop_at)
    if rank == 0:
        tensors = {name: value.cpu().float().numpy() for name, value in found.snapshot.tensors.items()}
        answers.put((found.tokens_per_s, found.losses, found.peak_bytes, (tensors, found.snapshot.meta)))
    if size > 1:
        torch.distributed.destroy_process_group()


def measure(size: int, shard: bool, *given: Any) -> Measured:
    """`run` by `size` new processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_member, args=(rank, size, shard, port, answers, given)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    while answers.empty():
        failed = [process.exitcode for process in processes if process.exitcode]
        if failed:
            for process in processes:
                process.kill()
            raise SystemExit(f"a process ended with code {failed[0]}")
        time.sleep(0.1)
    rate, losses, peak, (arrays, meta) = answers.get()
    for process in processes:
        process.join()
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return Measured(rate, losses, peak, train.Snapshot(meta["step"], tensors, meta))


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x / y - 1) for x, y in zip(a, b, strict=True))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="GPUs of the one trial")
    parser.add_argument("--shard", action="store_true", help="cut weights, gradients and moments (FSDP)")
    parser.add_argument("--mechanism", default="gated_deltanet")
    parser.add_argument("--size", default="20m")
    parser.add_argument("--batch-tokens", type=int, default=1 << 18)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=10)
    asked = parser.parse_args(words)
    size = asked.gpus or 2
    one = trial(asked.mechanism, asked.size, asked.batch_tokens, asked.steps, asked.dtype)
    alone, team = measure(1, False, one, asked.warm, None), measure(size, asked.shard, one, asked.warm, None)
    half = measure(size, asked.shard, one, asked.warm, asked.steps // 2)
    rest = run(one, Team(), asked.warm, start=half.snapshot)
    row = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "processes": size,
        "how": "FSDP" if asked.shard else "DDP",
        "tokens_per_s_1": round(alone.tokens_per_s),
        f"tokens_per_s_{size}": round(team.tokens_per_s),
        "efficiency": round(team.tokens_per_s / alone.tokens_per_s / size, 3),
        "peak_gib_1": round(alone.peak_bytes / 2**30, 2),
        f"peak_gib_{size}": round(team.peak_bytes / 2**30, 2),
        "loss_differs_by": furthest(team.losses, alone.losses),
        "loss_differs_by_after_resume_on_1": furthest(half.losses + rest.losses, alone.losses),
        "losses_1": [round(loss, 4) for loss in alone.losses],
        f"losses_{size}": [round(loss, 4) for loss in team.losses],
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
