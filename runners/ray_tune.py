"""The executor on Ray Tune: a Searcher that hands out claimed jobs, and actors that run them and are used again.

Nothing here depends on what Ray saves: the ledger and the folders say what is to be done, so Ray and Tune write to a
scratch folder on this machine that is removed at the end, or by the next launch here if the driver was killed. A job's
outcome is read from its folder; an actor that died without leaving one is a failure of kind `infra`. After a failure
the actor goes too, and the next job gets a fresh process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

_QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    "TUNE_WARN_THRESHOLD_S": "10",
}
for _name, _value in _QUIET.items():
    os.environ.setdefault(_name, _value)  # Ray reads these when it is imported

import ray  # noqa: E402
from ray import tune  # noqa: E402
from ray.tune.search import Searcher  # noqa: E402

from runners import code, ray_cluster  # noqa: E402
from runners.ray_cluster import NODE_FILE  # noqa: E402
from runners.resources import Place, Share  # noqa: E402
from runners.schema import EvalSlice, Failure, Job, Outcome, Rungs, Status, Trial  # noqa: E402
from runners.scratch import make as make_scratch  # noqa: E402
from runners.shared import JOB_FILE, STOP_FILE, Courier, Shared, patiently  # noqa: E402
from runners.store import read_json, write_json, write_text  # noqa: E402
from runners.trial import began, read_outcome, run_job, write_outcome  # noqa: E402

if TYPE_CHECKING:
    from runners.team import Team

SHARED_S = 60.0
"""How long the driver waits for shared storage that is away, a job at a time."""
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Ray takes 127.0.0.1 to mean the address that the network sees; the next one it leaves alone."""
_LEAD_BYTES = 2**20
"""What the actor of a trial with workers of its own asks for: it only waits, and Tune wants it to ask for something."""
_ROOT = str(Path(__file__).resolve().parent.parent)


def write_job(job: Job) -> Path:
    """Put `job` into its attempt's folder, from where the worker reads it; it also fences older attempts."""
    path = Path(job.folder) / "attempts" / str(job.attempt) / JOB_FILE
    write_json(path, dataclasses.asdict(job))
    return path


def read_job(path: Path) -> Job:
    row = read_json(path) or {}
    slices = tuple(EvalSlice(**part) for part in row.pop("slices"))
    allowed = row.pop("rungs")
    rungs = Rungs(**{**allowed, "cuts": tuple(map(tuple, allowed["cuts"]))}) if allowed else None
    return Job(trial=Trial(**row.pop("trial")), slices=slices, rungs=rungs, **row)


class Worker(tune.Trainable):
    """An actor: one step is one whole job, in the store's own folder or in a copy that is mirrored back."""

    def setup(self, config: dict[str, Any]) -> None:
        self.task = config

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.task = new_config
        return True

    def step(self) -> dict[str, Any]:
        if "team" in self.task:
            from runners import ray_train

            with _output_to(Path(os.devnull)):
                ray_train.run(self.task)
            return {"done": True}
        outcome = run_task(self.task)
        if outcome.status == Status.FAILED:
            raise JobFailedError(outcome.error)  # ends the process: what failed may have left it in any state
        return {"done": True}


def run_task(task: dict[str, Any], team: Team | None = None) -> Outcome:
    """Run the job of `task`, in this process or, as rank 0, with the others of `team`."""
    with _job_of(task) as job:
        folder = Path(job.folder) / "attempts" / str(job.attempt)
        node = {"node": ray.get_runtime_context().get_node_id(), "ip": ray.util.get_node_ip_address()}
        write_json(folder / NODE_FILE, node, durable=False)
        with _output_to(folder / "log.txt"):
            return _run(job, folder, team)


@contextlib.contextmanager
def _job_of(task: dict[str, Any]) -> Iterator[Job]:
    path, shared = Path(task["job"]), task.get("shared")
    if shared is None:
        yield read_job(path)
        return
    scratch = make_scratch()
    try:
        with shared.working_copy(task["trial"], int(path.parent.name), scratch) as folder:
            yield dataclasses.replace(read_job(folder / "attempts" / path.parent.name / JOB_FILE), folder=str(folder))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(job: Job, folder: Path, team: Team | None) -> Outcome:
    try:
        code.check()
    except code.OtherCodeError as problem:
        outcome = Outcome(job.trial.id, job.attempt, Status.FAILED, Failure.INFRA, str(problem), seconds=0.0)
        write_outcome(folder, outcome)
        return outcome
    return run_job(job, should_stop=(folder / STOP_FILE).exists, team=team)


class JobFailedError(Exception):
    """A job failed; its folder says how."""


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what this process prints, C code included, to the end of the file at `path`."""
    sys.stdout.flush(), sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.dup2(file, 1), os.dup2(file, 2)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(saved[0], 1), os.dup2(saved[1], 2)
        for descriptor in (file, *saved):
            os.close(descriptor)


class _Jobs(Searcher):
    """Tune asks here for the next trial and says here that one has ended. Called in Tune's thread."""

    def __init__(
        self,
        next_job: Callable[[], Job | None],
        done: Callable[[Outcome], None],
        should_stop: Callable[[], bool],
        shared: Shared | None = None,
    ) -> None:
        super().__init__()
        self._next, self._done, self._should_stop, self._shared = next_job, done, should_stop, shared
        self.running: dict[str, Job] = {}
        self.problem: BaseException | None = None

    def __reduce__(self) -> Any:
        # Tune saves its searcher so as to restore it. Ours is made anew from the ledger, so an empty one will do.
        return Searcher, ()

    def suggest(self, trial_id: str) -> Any:
        job = None
        if self.problem is None and not self._should_stop():
            with self._keeping_problems():
                job = self._next()
        if job is not None:
            self.running[trial_id] = job
            return self._hand_over(job)
        # A trial that is still running may yet come back to be tried again: the end is when none is.
        return None if self.running else Searcher.FINISHED

    def _hand_over(self, job: Job) -> dict[str, Any]:
        path, shared = write_job(job), self._shared
        team: dict[str, Any] = {}
        if job.workers > 1:
            fields = ("workers", "sharded", "threads", "device")
            team["team"] = {name: getattr(job, name) for name in fields}
        if shared is None:
            return {"job": str(path), **team}
        with contextlib.suppress(OSError):  # then its worker finds no job, and the trial is tried again
            patiently(lambda: shared.send(job, path.read_bytes()), SHARED_S)
        return {"job": str(path), "trial": job.trial.id, "shared": shared, **team}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        job = self.running.pop(trial_id, None)
        if job is not None:
            with self._keeping_problems():
                self._done(self._outcome(job))

    def _outcome(self, job: Job) -> Outcome:
        if self._shared is None:
            return outcome_of(job)
        shared, folder = self._shared, Path(job.folder)
        with contextlib.suppress(OSError):  # then what was received before has to do
            patiently(lambda: shared.receive(folder, job.trial.id, job.attempt), SHARED_S)
        is_told = read_outcome(folder, job.trial.id, job.attempt) is not None
        outcome = outcome_of(job)
        if is_told:
            with contextlib.suppress(Exception):  # a later launch clears up
                shared.close(job.trial.id, job.attempt)
        return outcome

    def close(self) -> None:
        """Report what Tune left without a word."""
        for trial_id in list(self.running):
            self.on_trial_complete(trial_id)

    @contextlib.contextmanager
    def _keeping_problems(self) -> Iterator[None]:
        try:
            yield
        except BaseException as problem:
            self.problem = self.problem or problem

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger knows."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger knows."""


def outcome_of(job: Job) -> Outcome:
    """How the job ended, from its folder; a worker that left no word there was killed, or could not write."""
    folder = Path(job.folder)
    outcome = read_outcome(folder, job.trial.id, job.attempt)
    if outcome is None:
        attempt = folder / "attempts" / str(job.attempt)
        error = _last_words(read_json(attempt / NODE_FILE) or {})
        began_at = began(folder, job.attempt)
        seconds = 0.0 if began_at is None else max(0.0, time.time() - began_at)
        outcome = Outcome(job.trial.id, job.attempt, Status.FAILED, Failure.INFRA, error, seconds=seconds)
        with contextlib.suppress(OSError):  # a full disk may be why there is no word
            write_text(attempt / "error.txt", error + "\n")
            write_outcome(attempt, outcome, gpu=job.gpu)
            (folder / "progress.json").unlink(missing_ok=True)
    return outcome


def _last_words(node: dict[str, str]) -> str:
    """Why a worker may have ended without a word; `node` is where it ran, if it began."""
    if node and ray_cluster.is_lost(node["node"]):
        return f"node {node['ip']} left the cluster: it died, hung, or could not be reached"
    where, more = ("", "") if node.get("ip") in (None, _LOOPBACK) else (f" on node {node['ip']}", ", or with its node")
    return f"the worker process died{where} (killed from outside, out of memory{more}), or its folder took no outcome"


class RayExecutor:
    """A local Ray, started on first use and shut down at the end, or the cluster that `place` names, left as it is.

    A local one's processes meet on the loopback address. Not covered: Ray's own servers still listen on every
    interface; what they ask of a caller is Ray's token.

    `given.slots` trials run at once, each with `given.threads` CPU threads and `gpu` of a card (of `gpus` in all).
    """

    def __init__(self, given: Share, place: Place, *, gpus: int, gpu: float) -> None:
        self.slots, self._threads, self._gpus, self._gpu = given.slots, given.threads, gpus, gpu
        self._workers = given.workers
        self._place = place
        self._scratch: Path | None = None
        self._let_go: Callable[[], None] = lambda: None
        self._rounds = 0

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch is not None:
            if self._place.cluster is None:
                ray.shutdown()
                self._let_go()
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def run(
        self,
        next_job: Callable[[], Job | None],
        done: Callable[[Outcome], None],
        *,
        should_stop: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None:
        """Run jobs until `next_job` has none and none is running. Raises what `next_job` or `done` raised."""
        first = next_job()
        if first is None:
            return
        queue = [first]
        shared = self._place.shared
        jobs = _Jobs(lambda: queue.pop() if queue else next_job(), done, should_stop, shared)
        self._start()
        if should_stop():
            tick()
            done(Outcome(first.trial.id, first.attempt, Status.INTERRUPTED, seconds=0.0))
            return
        tune_thread = threading.Thread(target=self._fit, args=(jobs,), name="tune", daemon=True)
        # Tune in a thread of its own: signals, lines and leases stay ours, and Tune leaves SIGINT alone.
        tune_thread.start()
        with Courier(shared, lambda: list(jobs.running.values()), self._place.say) as courier:
            waiting = ray_cluster.Waiting(self._threads, self._gpu, self._place.say)
            while tune_thread.is_alive():
                tune_thread.join(0.1)
                if should_stop() or jobs.problem is not None:
                    for job in list(jobs.running.values()):
                        (Path(job.folder) / "attempts" / str(job.attempt) / STOP_FILE).touch()
                        courier.ask_to_stop(job)
                if self._place.cluster is not None and self._place.cluster.head is not None:
                    self._place.cluster.head.look()
                    waiting.look(list(jobs.running.values()))
                tick()
        jobs.close()
        if jobs.problem is not None:
            raise jobs.problem

    def _start(self) -> None:
        if self._scratch is not None:
            return
        self._scratch = make_scratch()
        # A failed trial is told by us, once, with its log; Ray would add its own traceback.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        if self._place.cluster is not None:
            return
        # Workers inherit these. Small operations run ten times slower when threads share a core.
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": path}
        with environment(variables), _another_group():
            self._let_go = start_ray(
                address="local",
                num_cpus=self.slots * self._threads * self._workers,
                num_gpus=self._gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=100 * 2**20,
                _node_ip_address=_LOOPBACK,
                _temp_dir=str(self._scratch),
            )

    @property
    def _waiting(self) -> int:
        """Trials more than can run: an actor is kept for the next one only if that waits. On a cluster with room for
        more than the slots it would not wait but run, so there each trial starts a process of its own."""
        machine = self._place.machine
        if self._workers > 1:
            return 0  # its actor takes nothing itself, so Tune would begin it at once, and its workers would wait
        return 1 if machine is None or machine.fit(self._threads, self._gpu) <= self.slots else 0

    def _fit(self, jobs: _Jobs) -> None:
        self._rounds += 1
        own: dict[str, float] = (
            {"cpu": self._threads, "gpu": self._gpu} if self._workers == 1 else {"memory": _LEAD_BYTES}
        )
        with jobs._keeping_problems():
            tune.Tuner(
                tune.with_resources(Worker, own),
                tune_config=tune.TuneConfig(
                    search_alg=jobs,
                    num_samples=-1,
                    max_concurrent_trials=self.slots + self._waiting,
                    reuse_actors=True,
                    trial_name_creator=lambda trial: trial.trial_id,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name=f"round-{self._rounds}",
                    storage_path=f"{self._scratch}/tune",
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=0),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                ),
            ).fit()


def start_ray(**options: Any) -> Callable[[], None]:
    """`ray.init`, in a thread of its own; returns what ends the thread, to be called after `ray.shutdown`.

    In the main thread it would put a handler for SIGTERM in the place of ours that exits, from whatever code the signal
    finds: an exit inside a callback of the interpreter is ignored, and the signal is lost. The thread stays, because
    Linux kills the processes that Ray has started when the thread that started them ends. Raises what `ray.init` does.
    """
    problems: list[BaseException] = []
    is_up, is_over = threading.Event(), threading.Event()

    def start() -> None:
        try:
            ray.init(**options)
        except BaseException as problem:
            problems.append(problem)
        is_up.set()
        if not problems:
            is_over.wait()

    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it would warn of the handler it cannot set
    threading.Thread(target=start, name="ray-init", daemon=True).start()
    try:
        while not is_up.wait(0.02):  # a wait that signals get through to
            _take_signals_back()
        _take_signals_back()
    except BaseException:
        is_up.wait(30)  # half a Ray cannot be shut down
        raise
    if problems:
        raise problems[0]
    return is_over.set


def _take_signals_back() -> None:
    """Ray's C++ core takes SIGTERM for itself while it starts, unseen by Python."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, handler)


@contextlib.contextmanager
def _another_group() -> Iterator[None]:
    """Have Ray's processes start in a process group of their own.

    `timeout`, a batch system or `kill` often signals the whole group. Ray's servers would die of that SIGTERM at once,
    under the trials that we have just asked to stop at a checkpoint. A group is inherited, so this process joins
    another one while Ray starts. Not where a person may press Ctrl-C meanwhile: the terminal signals its own group.
    """
    home = os.getpgrp()
    holder = subprocess.Popen(["sleep", "60"], process_group=0) if not sys.stdin.isatty() else None
    try:
        if holder is not None:
            with contextlib.suppress(OSError):  # a session's leader may not leave its group
                os.setpgid(0, holder.pid)
        yield
    finally:
        if holder is not None:
            try:
                os.setpgid(0, home)
            except OSError:
                with contextlib.suppress(OSError):  # the group ended when we left it; we were its last process
                    os.setpgid(0, 0)
            holder.kill()
            holder.wait()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """These variables, for what is started or read meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
