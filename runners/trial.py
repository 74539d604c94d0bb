"""The life of one trial in its folder: train, evaluate, commit. The only code that runs in a worker.

It writes below the trial's folder and nowhere else: no ledger, no MLflow. A trial is trained once `result.json` is
there, and a slice evaluated once its file below `evals/` is there; everything before that may be lost at any moment
and is picked up from the newest checkpoint.

An attempt is fenced by the folder of a newer one: it then stops and commits nothing more.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import math
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runners import checkpoints, kernel_evidence, split, stale, usage
from runners import meter as meters
from runners.meter import CudaMeter, Meter
from runners.owner import Owner
from runners.rungs import stands
from runners.schema import SCHEMA_VERSION, EvalSlice, Failure, Job, Outcome, Status
from runners.stamp import stamp
from runners.store import ASIDE, last_attempt, read_json, read_sealed, seal, write_json, write_text

if TYPE_CHECKING:
    from runners.team import Team

Progress = Callable[[int, int, Mapping[str, float]], None]
_POLL_S = 0.5
WORKER_FILE = "worker.json"
"""In an attempt's folder: the process that runs it."""
_LOG_TIME = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class Engine:
    """What trains and evaluates: `runners.train` and `runners.evaluate`. Tests put a small one in its place."""

    fit: Callable[..., Any]
    load_model: Callable[..., Any]
    evaluate: Callable[..., dict[str, float]]
    snapshot: Callable[..., Any]
    batch_rows: Callable[..., int]


def load_engine() -> Engine:
    from runners import evaluate, train

    return Engine(train.fit, train.load_model, evaluate.run, train.Snapshot, train.batch_rows)


@functools.cache
def keep_freed_memory() -> None:
    """Have this process keep what it frees instead of handing it back to the kernel.

    A training step on the CPU frees and takes the same few megabytes over and over; by default glibc unmaps them each
    time, and every first touch of a page is a fault. Without this a small step takes 1.3 to 1.5 times as long (softmax
    66 to 44 ms, linear 40 to 27, two layers of width 64, one thread of an AMD EPYC). Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)


class LeaseLostError(Exception):
    """A newer attempt of this trial is running: this one has to stop without another word."""


def run_job(
    job: Job,
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    meter: Meter | None = None,
    team: Team | None = None,
) -> Outcome:
    """Bring the trial's folder up to date and say how it went. Raises nothing but what ends the process.

    A failure leaves its traceback in `attempts/<n>/error.txt`; the outcome carries the last line. Where the folder
    takes not even these words, on a full disk, the outcome alone tells. `meter` stands in for the one on the card.
    Of a `team`, rank 0 calls this, and the others `follow`.
    """
    attempt, outcome = Path(job.folder) / "attempts" / str(job.attempt), None
    first = time.monotonic()
    try:
        attempt.mkdir(parents=True, exist_ok=True)
        with open(attempt / "log.txt", "a", encoding="utf-8") as file:
            log = Log(file.write, file.flush)
            outcome = _attempt(job, attempt, _Work(job, log, progress, should_stop, meter, team))
            if outcome.failure == Failure.INFRA:  # another process of the team may have said why it had to fail
                outcome = read_outcome(Path(job.folder), job.trial.id, job.attempt) or outcome
            why = f" ({outcome.failure}): {outcome.error}" if outcome.failure else f": {outcome.error}"
            log(f"{outcome.status}" + (why if outcome.error else ""))
    except Exception as problem:  # the log cannot be kept; what is committed stays so
        outcome = outcome or Outcome(job.trial.id, job.attempt, Status.FAILED, classify(problem), one_line(problem))
    outcome = dataclasses.replace(outcome, seconds=round(time.monotonic() - first, 3))
    with contextlib.suppress(OSError):
        write_outcome(attempt, outcome, gpu=job.gpu)
    with contextlib.suppress(OSError):
        (Path(job.folder) / "progress.json").unlink(missing_ok=True)
    return outcome


def _attempt(job: Job, attempt: Path, work: _Work) -> Outcome:
    failure = error = rows = None
    try:
        status = work.run()
    except (LeaseLostError, KeyboardInterrupt) as stop:
        status, error = Status.INTERRUPTED, str(stop) or "interrupted"
    except Exception as problem:
        status, failure, error = Status.FAILED, classify(problem), one_line(problem)
        with contextlib.suppress(OSError):
            write_text(attempt / "error.txt", traceback.format_exc())
    if failure == Failure.OOM:
        rows = work.rows_at_once
    if failure == Failure.OOM or job.measure:
        free_memory()  # only now: the error held on to all that was on its way; and others share the card
    return Outcome(job.trial.id, job.attempt, status, failure, error, rows)


def follow(team: Team, folder: Path | None = None) -> None:
    """What a process of a team does that is not its rank 0: train along, as often as rank 0 says. It writes nothing.

    Where it fails, it leaves the reason in `folder`, the attempt's, if that can be seen from here, and raises.
    """
    import torch

    job, start = team.agree(cast("tuple[Job, Any] | tuple[None, None]", (None, None)))
    if job is None:
        return
    torch.set_num_threads(job.threads)
    keep_freed_memory()
    engine, rows = load_engine(), job.micro_batch
    try:
        engine.fit(
            job.trial,
            device=torch.device(job.device),
            start=start and engine.snapshot(*start),
            commit=lambda *_: None,
            progress=lambda *_: None,
            should_stop=lambda: False,
            checkpoint_every_s=math.inf,
            micro_batch=rows,
            rungs=job.rungs,
            team=team,
        )
    except ConnectionError:
        raise  # another process was lost, and tells why, or cannot
    except Exception as problem:
        failure = classify(problem)
        tried = rows or -(-engine.batch_rows(job.trial) // team.size)
        if folder is not None and folder.is_dir():
            told = Outcome(job.trial.id, job.attempt, Status.FAILED, failure, f"rank {team.rank}: {one_line(problem)}")
            told = dataclasses.replace(told, micro_batch=tried if failure == Failure.OOM else None)
            write_outcome(folder, told, gpu=job.gpu)
        raise


def read_outcome(folder: Path, trial_id: str, attempt: int) -> Outcome | None:
    """How an attempt said it ended; None if it is running, or died without a word."""
    row = read_json(folder / "attempts" / str(attempt) / "outcome.json")
    if not isinstance(row, dict):
        return None
    failure = Failure(row["failure"]) if row["failure"] else None
    micro_batch, seconds = row.get("micro_batch"), row.get("seconds")
    return Outcome(trial_id, attempt, Status(row["status"]), failure, row["error"], micro_batch, seconds)


def write_outcome(attempt: Path, outcome: Outcome, *, gpu: float = 0.0) -> None:
    """Keep how an attempt ended, so that a lost message or a lost ledger loses nothing."""
    row = {"status": outcome.status, "failure": outcome.failure, "error": outcome.error, "time": time.time()}
    row |= {"micro_batch": outcome.micro_batch, "seconds": outcome.seconds, "gpu": gpu}
    write_json(attempt / "outcome.json", row)


def free_memory() -> None:
    """Give back what a failed training held. A worker of its own ends anyway; the inline executor goes on here."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def began(folder: Path, attempt: int) -> float | None:
    """When the attempt's worker said its first word, in seconds since 1970; None if none has."""
    try:
        with open(folder / "attempts" / str(attempt) / "log.txt", encoding="utf-8", errors="replace") as log:
            return datetime.strptime(log.readline()[:19], _LOG_TIME).replace(tzinfo=UTC).timestamp()
    except (OSError, ValueError):
        return None


def classify(problem: BaseException) -> Failure:
    """Whether a smaller trial may pass (oom), the same one may (infra), or a person has to look (error)."""
    import torch

    text = str(problem)
    if isinstance(problem, torch.OutOfMemoryError | MemoryError) or re.search(
        "can't allocate memory|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED", text
    ):
        return Failure.OOM
    if isinstance(problem, OSError) and not isinstance(
        problem, FileNotFoundError | PermissionError | IsADirectoryError
    ):
        return Failure.INFRA
    return Failure.ERROR


def one_line(problem: BaseException) -> str:
    text = str(problem).strip()
    name = type(problem).__name__
    return f"{name}: {text.splitlines()[0]}"[:500] if text else name


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are numbers: NaN and infinity are not JSON, and a diverged trial says so itself.

    Where the loss is none, nothing else is a score: outputs that are NaN have a most likely label too.
    """
    if not math.isfinite(metrics.get("loss", 0.0)):
        metrics = {"n": metrics["n"]} if "n" in metrics else {}
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


class Log:
    """Dated lines of one attempt, on disk at once: what is left when the process is killed."""

    def __init__(self, write: Callable[[str], Any], flush: Callable[[], Any]) -> None:
        self._write, self._flush = write, flush

    def __call__(self, line: str) -> None:
        self._write(f"{datetime.now(UTC):{_LOG_TIME}} {line}\n")
        self._flush()


class _Work:
    """One attempt at one job."""

    def __init__(
        self,
        job: Job,
        log: Log,
        progress: Progress | None,
        should_stop: Callable[[], bool] | None,
        meter: Meter | None,
        team: Team | None = None,
    ) -> None:
        self.team = team
        self.job, self.log, self.meter = job, log, meter
        self.folder = Path(job.folder)
        self.checkpoints = self.folder / "checkpoints"
        self._tell, self._asked = progress, should_stop
        self._begun = time.monotonic()
        self._wall_before = 0.0
        self._committed = 0
        self._looked = self._told = 0.0
        self._stop = False
        self._code: tuple[str, ...] = ()
        self.rows_at_once: int | None = None
        """Rows that are trained at once; None before the training and after it."""

    def run(self) -> Status:
        import torch

        job = self.job
        self.engine = load_engine()
        self.device = torch.device(job.device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        if job.measure and self.meter is None:
            self.meter = CudaMeter(self.device, times=job.measure == "steps")
        torch.set_num_threads(job.threads)
        keep_freed_memory()
        me = dataclasses.asdict(Owner.me())
        write_json(self.folder / "attempts" / str(job.attempt) / WORKER_FILE, me, durable=False)
        self.log(
            f"attempt {job.attempt} of trial {job.trial.id}, process {os.getpid()}, {job.device}, seed {job.trial.seed}"
        )
        with usage.sampling(self.folder / "attempts" / str(job.attempt), self.device):
            status = self._bring_up_to_date()
        if self.meter is not None and status.is_done:
            meters.write(self.folder / "attempts" / str(job.attempt), self.meter.whole())
        return status

    def _bring_up_to_date(self) -> Status:
        if self._should_stop():
            self._dismiss_team()
            return Status.INTERRUPTED
        job = self.job
        if job.fresh:
            self._set_all_aside()
        made = stale.record(job.trial)
        self._code = (made["fingerprint"],)
        write_json(self.folder / "attempts" / str(job.attempt) / stale.CODE_FILE, made)
        result, snapshot = read_sealed(self.folder / "result.json"), None
        if result is not None and not stands(result, job.rungs):
            self.log(f"was pruned at step {result['step']}, which no longer holds: training goes on from there")
            self._set_aside("result.json")
            result = None
        missing = [s for s in job.slices if read_sealed(self.folder / "evals" / f"{s.id}.json") is None]
        if result is not None and missing and result["status"] == Status.COMPLETE:
            snapshot = self._final()
            if snapshot is None:
                self.log("trained, but the final weights are not kept: training again for the new evaluations")
                self._set_aside("result.json")
                result = None
        if result is None:
            result, snapshot = self._train()
        else:
            self._dismiss_team()
        if result is None:
            return Status.INTERRUPTED
        if result["status"] == Status.COMPLETE and missing:
            return self._evaluate(snapshot or self._final(), missing)
        return Status(result["status"])

    def _final(self) -> Any | None:
        found = checkpoints.load(self.checkpoints, checkpoints.FINAL)
        return self.engine.snapshot(found.step, found.tensors, found.meta) if found else None

    def _train(self) -> tuple[dict[str, Any] | None, Any]:
        """The committed result (None if interrupted) and the final snapshot."""
        import torch

        if (self.folder / "result.json").exists():
            self.log("result.json cannot be read: training goes on from the newest checkpoint")
            self._set_aside("result.json")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = self._resume()
        micro_batch = split.smaller(self.job.micro_batch, start.meta.get("micro_batch") if start else None)
        size = 1 if self.team is None else self.team.size
        self.rows_at_once = micro_batch or -(-self.engine.batch_rows(self.job.trial) // size)
        if micro_batch:
            self.log(f"training {micro_batch} rows at once, the same batch in all")
        fit = self._fit_of_team(start, micro_batch)(
            self.job.trial,
            device=self.device,
            start=start,
            commit=self._commit,
            progress=self._progress,
            should_stop=self._before_update,
            checkpoint_every_s=self.job.checkpoint_every_s,
            micro_batch=micro_batch,
            rungs=self.job.rungs,
        )
        self.rows_at_once = None
        if fit.status == "interrupted":
            self.log(f"stopped at step {fit.step}")
            return None, None
        self._refuse_if_lost()
        if fit.evidence:
            write_json(self.folder / "attempts" / str(self.job.attempt) / kernel_evidence.EVIDENCE_FILE, fit.evidence)
            for row in fit.evidence:
                self.log(kernel_evidence.words(row))
        if fit.status == Status.PRUNED:
            # Its checkpoint stays: the training may be wanted after all, and goes on from there.
            write_json(self.folder / "result.json", self._result(fit), keep_existing=True)
            self.log(f"pruned: {fit.pruned}")
            return read_sealed(self.folder / "result.json"), None
        if fit.step:  # else nothing was trained, and the seed gives the same weights again
            checkpoints.save(self.checkpoints, checkpoints.FINAL, self._checkpoint(fit.snapshot))
        # The first commit wins: an attempt that lost its lease unseen cannot replace what a newer one wrote.
        write_json(self.folder / "result.json", self._result(fit), keep_existing=True)
        checkpoints.prune(self.checkpoints, keep=0)
        self.log(f"trained: {fit.status} at step {fit.step}, {fit.stopped_by}")
        return read_sealed(self.folder / "result.json"), fit.snapshot

    def _fit_of_team(self, start: Any | None, micro_batch: int | None) -> Callable[..., Any]:
        """The engine's `fit`, with the others of the team called to it."""
        if self.team is None:
            return self.engine.fit
        self.log(f"training by {self.team.size} processes" + (", weights cut among them" if self.team.sharded else ""))
        job = dataclasses.replace(self.job, micro_batch=micro_batch)
        self.team.agree((job, start and (start.step, start.tensors, start.meta)))
        return functools.partial(self.engine.fit, team=self.team)

    def _dismiss_team(self) -> None:
        """There is nothing to train."""
        if self.team is not None:
            self.team.agree((None, None))

    def _resume(self) -> Any | None:
        """The snapshot to start from; points after it are dropped from the metrics and kept in the log."""
        start = checkpoints.newest(self.checkpoints)
        self._committed = start.step if start else 0
        self._drop_points_after(self._committed if start else -1)
        if start is None:
            return None
        self._wall_before = start.wall_s
        if set(start.code) - set(self._code):
            self.log("other code made the checkpoint than runs now")
        self._code = tuple(dict.fromkeys((*start.code, *self._code)))
        self.log(f"resuming from the checkpoint at step {start.step}")
        return self.engine.snapshot(start.step, start.tensors, start.meta)

    def _drop_points_after(self, step: int) -> None:
        for path in sorted((self.folder / "metrics").glob("[0-9]*-*.jsonl")):
            first, end = (int(number) for number in path.stem.split("-"))
            if end <= step:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            for line in lines[len(kept) :]:
                self.log(f"dropped, after the checkpoint: {line}")
            if kept and first < step:
                write_text(path.with_name(f"{first}-{step}.jsonl"), "\n".join(kept) + "\n")
            path.unlink()

    def _commit(self, snapshot: Any, points: Sequence[Any]) -> None:
        self._refuse_if_lost()
        # Points first: without their checkpoint they are dropped on resume, a checkpoint without them would lose them.
        rows = [json.dumps({"step": p.step, "metrics": finite(p.metrics)}) for p in points]
        if rows:
            path = self.folder / "metrics" / f"{self._committed}-{snapshot.step}.jsonl"
            there = path.read_text(encoding="utf-8") if path.exists() else ""
            write_text(path, there + "\n".join(rows) + "\n")
        checkpoints.save(self.checkpoints, str(snapshot.step), self._checkpoint(snapshot))
        checkpoints.prune(self.checkpoints)
        self._committed = snapshot.step
        latest = finite(points[-1].metrics) if points else {}
        self.log(f"step {snapshot.step} " + " ".join(f"{name} {value:.4g}" for name, value in latest.items()))

    def _checkpoint(self, snapshot: Any) -> checkpoints.Checkpoint:
        return checkpoints.Checkpoint(snapshot.step, snapshot.tensors, snapshot.meta, self._wall_s(), self._code)

    def _evaluate(self, snapshot: Any, slices: Sequence[EvalSlice]) -> Status:
        model = self.engine.load_model(self.job.trial, snapshot, self.device)
        for part in slices:
            if self._should_stop():
                return Status.INTERRUPTED
            metrics = self.engine.evaluate(model, self.job.trial, part.task, device=self.device)
            self._refuse_if_lost()
            row = self._head() | {"slice": part.id, "task": part.task, "metrics": finite(metrics)}
            write_json(self.folder / "evals" / f"{part.id}.json", seal(row | {"stamp": self._stamp(part.task)}))
            scores = " ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.log(f"evaluated {part.set} {part.label} {scores}")
        return Status.COMPLETE

    def _head(self) -> dict[str, Any]:
        return {"schema": SCHEMA_VERSION, "trial": self.job.trial.id, "attempt": self.job.attempt}

    def _stamp(self, task: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return stamp(self.job.trial, self.job.device, task)

    def _result(self, fit: Any) -> dict[str, Any]:
        diverged = {k: v for k, v in fit.diverged.items() if _is_json(v)} if fit.diverged else None
        return seal(
            self._head()
            | {
                "status": fit.status,
                "step": fit.step,
                "metrics": finite(fit.metrics),
                "n_params": fit.n_params,
                "tokens": fit.tokens,
                "wall_s": round(self._wall_s(), 3),
                "stopped_by": fit.stopped_by,
                "diverged": diverged,
                **({"pruned": fit.pruned} if fit.status == Status.PRUNED else {}),
                "peak_mem_bytes": peak_mem_bytes(self.job.device),
                "micro_batch": fit.micro_batch,
                "oom_at": split.tried(self.folder),
                "kernels": [kernel_evidence.brief(row) for row in fit.evidence or []],
                "stamp": self._stamp(),
                "made_by": list(self._code),
            }
        )

    def _wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._begun

    def _set_all_aside(self) -> None:
        """Move what an earlier training left into this attempt. Cut short anywhere, no old part joins a new one."""
        aside = self.folder / "attempts" / str(self.job.attempt) / ASIDE
        aside.mkdir(exist_ok=True)
        for name in ("evals", "result.json", "metrics"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.folder / name, aside / name)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.log("what was there is set aside: training from the start")

    def _set_aside(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.folder / name, self.folder / "attempts" / str(self.job.attempt) / f"old-{name}")

    def _progress(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._told >= _POLL_S or step == steps:
            self._told = now
            row = {"attempt": self.job.attempt, "step": step, "steps": steps, "metrics": finite(metrics)}
            write_json(self.folder / "progress.json", row | {"time": time.time()}, durable=False)
            if self._tell:
                self._tell(step, steps, metrics)

    def _before_update(self) -> bool:
        """Training asks before each update whether to stop, which makes it the place to measure updates from."""
        if self.meter is not None and (reading := self.meter.step()):
            meters.write(self.folder / "attempts" / str(self.job.attempt), reading)
            self.log(f"a card's share: {reading.memory_bytes / 2**30:.2f} GiB, busy {reading.busy or 1:.2f}")
        return self._should_stop()

    def _should_stop(self) -> bool:
        now = time.monotonic()
        if not self._stop and now - self._looked >= _POLL_S:
            self._looked = now
            self._refuse_if_lost()
            self._stop = bool(self._asked and self._asked())
        return self._stop

    def _refuse_if_lost(self) -> None:
        newest = last_attempt(self.folder)
        if newest > self.job.attempt:
            raise LeaseLostError(f"attempt {newest} has taken over")


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def peak_mem_bytes(device: str) -> int:
    """Peak memory: of the card's allocator on CUDA; of the process, other trials before included, on CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
