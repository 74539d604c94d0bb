"""The ledger's projection to MLflow: one experiment a sweep, one flat run a trial. The only file that knows MLflow.

MLflow may be remote, away, wiped or replaced: nothing is read back from it but what was sent. Each run carries the
mark of what it has (`memsweep.sent`), so a projection may stop anywhere and be taken up by another driver. One driver
at a time writes an experiment (a lease in the ledger).

MLflow never removes or replaces a point. So no point of a curve is sent that a run already has: what a run from before
has is asked of the server, and a trial trained again adds nothing to its curves. A score that truly changed (one more
evaluation in a mean) is the exception: it is sent, and MLflow shows the later one.

A run deleted in the UI stays deleted, unless `restore` asks for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runners import checkpoints, usage
from runners.ledger import RENEW_S, Ledger, Row
from runners.names import to_mlflow
from runners.owner import Owner
from runners.run_state import MARK, NOTE, TAG, Run, State, shared_view
from runners.schema import Member, Plan, Status, UserError
from runners.search import Searches
from runners.store import Store, read_points
from runners.tracking import behind, command, explain, key, probe

BATCH = 1000
"""Most metrics in one call: MLflow's own limit."""
MEASURED = {"wall_s", "peak_mem_bytes"}
"""Never twice the same: training again leaves the run with what the training cost that is on its curves."""
VIEW = "memsweep"
"""Key of the view of the runs that each experiment carries."""
TICK_S = 2.0
PATIENCE_S = 15.0
"""How long a driver that ends waits for another one that is writing to the same experiment."""
_RUN_STATUS = {
    Status.RUNNING: "RUNNING",
    Status.COMPLETE: "FINISHED",
    Status.DIVERGED: "FINISHED",  # a result, not a crash; the tag tells them apart
    Status.PRUNED: "FINISHED",
    Status.FAILED: "FAILED",
    Status.INTERRUPTED: "KILLED",
}


def make_client(uri: str) -> Any:
    """A client of MLflow at `uri`, quiet, quick to give up; a new SQLite database is set up under a lock.

    Two processes that set up one database at once break it for good.
    """
    for name, value in {
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }.items():
        os.environ.setdefault(name, value)
    probe(uri)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with set_up_lock(uri):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


@contextlib.contextmanager
def set_up_lock(uri: str) -> Iterator[None]:
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = Path(uri.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class ExperimentDeletedError(UserError):
    """The user deleted the experiment: nothing is written until they ask for it."""


class Projection:
    """One sweep's runs on one server, made to agree with the ledger and the folders."""

    def __init__(
        self, store: Store, ledger: Ledger, plan: Plan, revision: int, uri: str, *, restore: bool = False
    ) -> None:
        self._store, self._ledger, self._plan, self._revision = store, ledger, plan, revision
        self.uri, self.key, self._restore = uri, key(store, uri), restore
        self._searches = Searches(plan, store)
        self._client: Any = None
        self._runs: dict[str, Run] = {}
        self._seen: dict[str, tuple[Any, ...]] = {}

    def project(self) -> int:
        """Send what is missing: how many runs changed. Raises what MLflow raises."""
        if self._client is None:
            self._open()
        elif self.uri.startswith("sqlite:///") and not Path(self.uri.removeprefix("sqlite:///")).exists():
            # The open file would take everything and keep nothing.
            raise FileNotFoundError("MLflow's database was deleted")
        rows = self._ledger.rows(self._plan.sweep, self._revision)
        shared = self._ledger.sweeps_of(rows)
        known = self._ledger.evaluations(rows)
        changed = 0
        for member in self._searches.view().members:
            trial_id = member.trial.id
            if trial_id not in rows:
                continue  # a suggestion, or a winner, that the driver is about to take up
            facts = self._facts(member, rows[trial_id], known[trial_id], shared[trial_id])
            if self._seen.get(trial_id) != facts:
                changed += self._send(State(self._store, member, rows[trial_id], known[trial_id], shared[trial_id]))
                self._seen[trial_id] = facts
        return changed

    def _facts(self, member: Member, row: Row, slices: set[str], sweeps: list[str]) -> tuple[Any, ...]:
        """All that a run's content depends on, cheap to have: a done trial's files are not read again."""
        step = None if row.status.is_done else checkpoints.steps(self._store.trial_folder(row.id) / "checkpoints")[-1:]
        who = (member.arm, member.cell, member.role, member.searched and member.searched.number)
        return row.status, row.attempt, row.error, frozenset(slices), tuple(sweeps), str(step), *who

    def behind(self, problem: str) -> str:
        """`problem`, with the command that brings this server up to date."""
        return behind(problem, self._store, self.uri)

    def explain(self, error: Exception) -> str:
        """What kept the server from being up to date, and the command that mends that."""
        return self.behind(explain(error, self.uri, self._store))

    # ---- opening -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        client = make_client(self.uri)
        self._experiment = self._find_experiment(client)
        self._adopt(client)
        client.set_experiment_tag(self._experiment, f"mlflow.sharedViewState.{VIEW}", shared_view(self._plan))
        self._client = client
        self._close_orphans()

    def _find_experiment(self, client: Any) -> str:
        name = self._plan.sweep
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return self._create_experiment(client, name)
        if experiment.lifecycle_stage == "deleted":
            if not self._restore:
                raise ExperimentDeletedError(
                    f"the MLflow experiment {name!r} was deleted; "
                    f"{command(self._store, self.uri, 'sync', '--restore')} brings it back"
                )
            client.restore_experiment(experiment.experiment_id)
        theirs = experiment.tags.get(TAG + "marker")
        ours = (self._ledger.projector(self.key, name) or {}).get("marker")
        if theirs is None or theirs != ours:
            # Not what this ledger sent: another database, or a new ledger. The runs there tell what they have.
            self._ledger.forget_projections(self.key, name)
            theirs = theirs or str(uuid.uuid4())
            self._mark(client, experiment.experiment_id, theirs)
        return str(experiment.experiment_id)

    def _create_experiment(self, client: Any, name: str) -> str:
        location = None
        if self.uri == self._store.mlflow_uri:
            location = (self._store.mlflow_artifacts / name).as_uri()
        made = client.create_experiment(name, artifact_location=location)
        self._ledger.forget_projections(self.key, name)
        self._mark(client, made, str(uuid.uuid4()))
        client.set_experiment_tag(made, NOTE, self._plan.question)
        # MLflow's word for an experiment of training runs (others hold traces of chat models).
        client.set_experiment_tag(made, "mlflow.experimentKind", "custom_model_development")
        return str(made)

    def _mark(self, client: Any, experiment_id: str, marker: str) -> None:
        client.set_experiment_tag(experiment_id, TAG + "marker", marker)
        self._ledger.set_projector(self.key, self._plan.sweep, marker=marker)

    def _adopt(self, client: Any) -> None:
        """Ask the server which runs there are and what they have been sent."""
        self._runs = {}
        for run in sorted(all_runs(client, self._experiment), key=lambda run: (run.info.start_time, run.info.run_id)):
            trial_id = run.data.tags.get(TAG + "trial_id")
            if trial_id and run.data.tags.get(TAG + "kind") == "trial":
                self._runs.setdefault(trial_id, Run.read(run))
        for trial_id, row in self._ledger.projections(self.key, self._plan.sweep).items():
            # Known to the ledger, unknown to a server that is still the same: deleted for good.
            if trial_id not in self._runs:
                self._runs[trial_id] = Run(row["run"], deleted=True, gone=True)

    def _close_orphans(self) -> None:
        """End runs of trials that this revision no longer plans and that nobody runs."""
        planned = {member.trial.id for member in self._searches.view().members}
        for trial_id, run in self._runs.items():
            if run.status == "RUNNING" and trial_id not in planned and not run.deleted:
                row = self._ledger.row(trial_id)
                status = row.status if row else Status.INTERRUPTED
                if status != Status.RUNNING:
                    self._client.set_tag(run.id, TAG + "status", status.value)
                    self._client.set_terminated(run.id, _RUN_STATUS.get(status, "KILLED"))
                    run.status = _RUN_STATUS.get(status, "KILLED")

    # ---- one trial ---------------------------------------------------------------------------------------------

    def _send(self, state: State) -> bool:
        trial_id = state.member.trial.id
        run = self._runs.get(trial_id)
        if run is not None and not run.deleted and run.generation != state.generation:
            self._retire(trial_id, run)
            run = None
        if run is None:
            if state.status == Status.PLANNED:
                return False
            run = self._create(state)
        elif run.deleted:
            if not self._restore:
                return False
            if run.gone:
                run = self._create(state)
            else:
                self._client.restore_run(run.id)
                run.deleted = False
        if run.mark == state.mark:
            return False
        self._send_points(run, state)
        self._send_usage(run, state)
        self._send_inputs(run, state)
        self._send_state(run, state)
        return True

    def _retire(self, trial_id: str, run: Run) -> None:
        """The trial began anew, or was forgotten: MLflow takes no point back, so its run goes to the deleted ones."""
        self._client.set_tag(run.id, TAG + "kind", "retired")
        self._client.delete_run(run.id)
        self._ledger.forget_projections(self.key, self._plan.sweep, trial_id)
        del self._runs[trial_id]

    def _create(self, state: State) -> Run:
        made = self._client.create_run(
            self._experiment, start_time=state.started_ms, tags=state.first_tags(), run_name=state.name
        )
        run = Run(made.info.run_id, status="RUNNING")
        run.generation = state.generation
        self._ledger.set_projection(self.key, self._plan.sweep, state.member.trial.id, run=run.id)
        self._runs[state.member.trial.id] = run
        return run

    def _send_points(self, run: Run, state: State) -> None:
        from mlflow.entities import Metric

        batch: list[Any] = []
        for step, metrics, moment in read_points(state.folder, up_to=-1 if state.step is None else state.step):
            if step <= run.sent_step:
                continue
            named = {to_mlflow(name): value for name, value in metrics.items()}
            new = {name: value for name, value in named.items() if step not in self._steps(run, name)}
            batch += [Metric(name, value, int(moment * 1000), step) for name, value in new.items()]
            if len(batch) >= BATCH - 100:
                self._log(run, batch)
                batch = []
        self._log(run, batch)

    def _send_usage(self, run: Run, state: State) -> None:
        from mlflow.entities import Metric

        points = usage.read(state.folder)
        names = {name for _, _, metrics in points for name in metrics}
        last = {name: max(self._steps(run, name), default=-1) for name in names}
        batch = [
            Metric(name, value, int(moment * 1000), second)
            for second, moment, metrics in points
            for name, value in metrics.items()
            if second > last[name]
        ]
        self._log(run, batch)

    def _send_inputs(self, run: Run, state: State) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = [one for one in state.inputs() if (one.name, one.digest) not in run.inputs]
        if new:
            sets = [Dataset(one.name, one.digest, one.source_type, one.source, None, one.profile) for one in new]
            tags = [[InputTag("mlflow.data.context", one.context)] for one in new]
            told = [DatasetInput(dataset, tag) for dataset, tag in zip(sets, tags, strict=True)]
            self._client.log_inputs(run.id, datasets=told)
            run.inputs |= {(one.name, one.digest) for one in new}

    def _steps(self, run: Run, name: str) -> set[int]:
        """The steps at which the run has the metric."""
        if name not in run.steps:
            told = self._client.get_metric_history(run.id, name) if run.has_past else []
            run.steps[name] = {point.step for point in told}
        return run.steps[name]

    def _log(self, run: Run, batch: list[Any]) -> None:
        batch = [point for point in batch if math.isfinite(point.value)]  # others' files may hold NaN
        for first in range(0, len(batch), BATCH):
            part = batch[first : first + BATCH]
            try:
                self._client.log_batch(run.id, metrics=part)
            except BaseException:
                run.forget()  # the server may have taken it, or some of it
                raise
            for point in part:
                run.latest[point.key] = point.value
                if point.key in run.steps or not run.has_past:
                    run.steps.setdefault(point.key, set()).add(point.step)

    def _send_state(self, run: Run, state: State) -> None:
        from mlflow.entities import Metric, Param, RunTag

        params = {name: value for name, value in state.params().items() if name not in run.params}
        for first in range(0, len(params), 100):
            part = list(params.items())[first : first + 100]
            self._client.log_batch(run.id, params=[Param(name, value) for name, value in part])
        run.params.update(params)
        moment, step = state.ended_ms or state.started_ms, state.step or 0
        metrics = {name: value for name, value in state.final_metrics().items() if run.latest.get(name) != value}
        once = {name for name in MEASURED & metrics.keys() if step in self._steps(run, name)}
        self._log(run, [Metric(name, value, moment, step) for name, value in metrics.items() if name not in once])
        status = _RUN_STATUS.get(state.status, "KILLED")
        if status != run.status:
            if status == "RUNNING":
                self._client.update_run(run.id, status="RUNNING")
            else:
                self._client.set_terminated(run.id, status, end_time=state.ended_ms)
            run.status = status
        # The mark comes last: everything before it may be sent again.
        # An empty tag only takes back what the run says: otherwise it is one more word on its page.
        told = {name: text for name, text in state.tags().items() if text or name in run.tags}
        run.tags |= told.keys()
        tags = told | {MARK: state.mark}
        self._client.log_batch(run.id, tags=[RunTag(name, value) for name, value in tags.items()])
        run.mark = state.mark
        self._ledger.set_projection(
            self.key, self._plan.sweep, state.member.trial.id, run=run.id, sent=state.mark, step=state.step
        )
        if state.status.is_done:
            run.forget()  # thousands of trials: ask again if this one ever changes


class Projector(threading.Thread):
    """Keeps MLflow up to date while a driver works. Trouble there is told once and never touches a trial."""

    def __init__(self, projection: Projection, ledger: Ledger, owner: Owner, say: Callable[[str], None]) -> None:
        super().__init__(name="mlflow", daemon=True)
        self._projection, self._ledger, self._owner, self._say = projection, ledger, owner, say
        self._over = threading.Event()
        self._problem: str | None = None
        self._pause = TICK_S

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self.once()
            # At most a twentieth of the time goes into looking whether there is something to send.
            self._over.wait(max(self._pause, min(20 * (time.monotonic() - began), RENEW_S)))

    def once(self) -> bool:
        """Send what is missing. False, with the reason kept for `status`, if that did not work."""
        sweep, key = self._projection._plan.sweep, self._projection.key
        try:
            if not self._ledger.claim_projector(key, sweep, self._owner):
                return self._failed("another driver is writing to MLflow")
            self._projection.project()
            problem, self._pause = None, TICK_S
        except Exception as error:
            problem, self._pause = self._projection.explain(error), min(max(5.0, 2 * self._pause), 60.0)
        with contextlib.suppress(Exception):
            self._ledger.set_projector(key, sweep, problem=problem)
        if problem and problem != self._problem:
            self._say(f"MLflow is not up to date, trials go on: {problem}")
        self._problem = problem
        return problem is None

    def _failed(self, problem: str) -> bool:
        self._problem = problem
        return False

    def finish(self) -> str | None:
        """Stop the thread and send the rest: None, or why MLflow lags behind."""
        self._over.set()
        if self.is_alive():
            self.join(60)
        end = time.monotonic() + PATIENCE_S
        while not self.once() and self._problem == "another driver is writing to MLflow" and time.monotonic() < end:
            time.sleep(0.5)
        with contextlib.suppress(Exception):
            self._ledger.release_projector(self._projection.key, self._projection._plan.sweep, self._owner)
        return self._projection.behind(self._problem) if self._problem else None


def all_runs(client: Any, experiment_id: str, which: str = "") -> list[Any]:
    from mlflow.entities import ViewType

    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], which, run_view_type=ViewType.ALL, max_results=1000, page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs
