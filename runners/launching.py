"""One launch at work: claim trials one by one, hand them to an executor, write how they ended.

It holds three things besides: a thread that renews its leases, a thread that projects to MLflow, and a line for the
person who waits. Two drivers on one store share the work; each waits for what the other holds, and takes over what it
drops.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from runners import alone, corpus, documents, extras, guards, mps, split, tracking, watch
from runners.budget import Allowance, Budget, Span
from runners.cards import Cards
from runners.durations import words
from runners.ledger import LEASE_S, RENEW_S, Ledger
from runners.members import Members
from runners.owner import Owner
from runners.progress import Display, Pace, Tally
from runners.rerun import Rerun
from runners.resources import Place, Share, make_executor, remember
from runners.retry import Retries, is_disk_full
from runners.schema import Exit, Failure, Job, Member, Outcome, Plan, Status, UserError, canonical_json
from runners.search import Resolve
from runners.store import Store
from runners.summary import Failed, Summary
from runners.survey import Found, Need, counts, look, need, survey
from runners.trial import began
from runners.watch import Watch

Say = Callable[[str], None]
"""Takes one line for the user (no line break). Nothing here prints by itself."""

CHECKPOINT_VARIABLE = "MEMSWEEP_CHECKPOINT_S"
"""Environment variable with the seconds between a trial's checkpoints; 60 without it. It changes no number."""
_LOOK_ELSEWHERE_S = 2.0


def _checkpoint_every_s() -> float:
    given = os.environ.get(CHECKPOINT_VARIABLE, "60")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"{CHECKPOINT_VARIABLE}={given}: seconds between checkpoints, as 60", Exit.ENVIRONMENT)
    return seconds


class Launch:
    """One launch. Its queue and counts are touched by the executor's thread and the main one, under `_lock`."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        ledger: Ledger,
        owner: Owner,
        given: Share,
        only: frozenset[str] | None,
        failed: bool,
        say: Say,
        budget: Budget | None = None,
        resolve: Resolve | None = None,
        rerun_stale: bool = False,
        place: Place | None = None,
    ) -> None:
        self.plan, self.store, self.ledger, self.owner = plan, store, ledger, owner
        spans = functools.partial(ledger.spans, plan.sweep, without=owner.uuid)
        self.allowance = Allowance(budget or Budget(), spans, self._own_spans)
        self.cards = Cards(given, store)
        self.given, self.only, self.failed, self.say = given, only, failed, say
        self.place = place or Place(say=say)
        self._lock = threading.RLock()
        self._members = Members(plan, store, only, resolve)
        self._queue: deque[Member] = deque()
        self._elsewhere: dict[str, Member] = {}
        self._running: dict[str, tuple[Member, Need, int]] = {}
        self._failures: dict[str, Failed] = {}
        self._retries = Retries(plan.retry)
        self._rerun = Rerun(store, rerun_stale, say)
        self._watch = Watch(self._retries.rules["hang"])
        self._ran: set[str] = set()
        self._evaluated: set[str] = set()
        self._done: set[str] = set()
        self._worked = 0
        self._pace = Pace()
        self._stopped_by: str | None = None
        self._why: str | None = None
        self._beyond_budget: dict[str, str] = {}
        self._signal: str | None = None
        self._looked = 0.0
        self._began = time.monotonic()
        self._checkpoint_every_s = _checkpoint_every_s()
        self.revision = 0

    def run(self, executor: str, tracking_uri: str | None, tty: bool) -> Summary:
        from runners import record

        found = self._prepare()
        uri = tracking.resolve_uri(self.store, tracking_uri)
        projection = record.Projection(self.store, self.ledger, self.plan, self.revision, uri)
        projector = record.Projector(projection, self.ledger, self.owner, self.say)
        skipped = sum(item.need == Need.NOTHING for item in found)
        if self._queue or self._elsewhere:
            projector.start()
            # A driver that could not renew its leases for their whole length stops: others may take its trials.
            leases = guards.renewing(lambda: self.ledger.renew(self.owner), self._lost_leases, RENEW_S, LEASE_S)
            with (
                Display(self.say, tty) as self._display,
                guards.signals(self._stop_by_signal),
                leases,
                self._machine(executor),
            ):
                self._work(executor)
        backlog = projector.finish()
        return self._summary(skipped, backlog)

    # ---- before ------------------------------------------------------------------------------------------------

    def _prepare(self) -> list[Found]:
        for owner in self.ledger.release_dead():
            self.say(f"taking over from {owner}, which ended without a word")
        self.revision, is_new = self.store.freeze(self.plan)
        self.ledger.record_plan(self.plan, self.revision)
        remember(self.store.revision_folder(self.plan.sweep, self.revision), self.given)
        if is_new and self.revision > 1:
            self._tell_dropped()
        if self.place.shared is not None:
            self.place.shared.collect(self.store, self._is_held)
        members = self._members.begin()
        self.ledger.add_members(self.plan.sweep, self.revision, self._members.made(), len(self.plan.members))
        planned = replace(self.plan, members=members)
        found = self._rerun.look(survey(self.store, self.ledger, planned, self.revision, None))
        for item in found:
            self._sort(item)
        if self._queue:
            self._look_at_data()
            self.cards.begin(member.trial for member in members)
        self._tell_start(found)
        if self._retries.splits and self._queue:
            trained = (item.member.trial for item in found if item.need in (Need.NOTHING, Need.EVALUATE))
            self._retries.learn(self.store, trained)
        return found

    def _look_at_data(self) -> None:
        """Raise `UserError` where the data of a trial are gone, their hub out of reach, or a module that a task needs
        not installed, before any trial begins."""
        tasks = [task for m in self._queue for task in (m.trial.task, *(part.task for part in m.slices))]
        for name in sorted({task["name"] for task in tasks}):
            extras.need(extras.of_task(name), f"task {name}")
        for task in {canonical_json(task): task for task in tasks if corpus.has_text(task)}.values():
            if documents.reads(task):
                documents.check(task)
            else:
                corpus.check(task)

    def _is_held(self, trial_id: str) -> bool:
        row = self.ledger.row(trial_id)
        return row is not None and row.owner is not None

    def _tell_dropped(self) -> None:
        _, before = self.store.plan(self.plan.sweep, self.revision - 1)
        dropped = {m.trial.id for m in before.members} - {m.trial.id for m in self.plan.members}
        if dropped:
            self.say(f"{len(dropped)} trials of revision {self.revision - 1} are no longer planned; their results stay")

    def _sort(self, item: Found) -> None:
        """Put a member where it belongs: done, held by another driver, failed for good, or to run."""
        member, row = item.member, item.row
        if member.is_open:
            return  # its search says when
        if item.need == Need.NOTHING:
            self._done.add(member.trial.id)
        elif row.owner is not None and row.owner != self.owner.uuid:
            self._elsewhere[member.trial.id] = member
        elif row.status == Status.FAILED and not self.failed:
            self._failures[member.trial.id] = self._failed(member, row.attempt, row.failure, row.error)
        else:
            self._queue.append(member)

    def _tell_start(self, found: list[Found]) -> None:
        needs = Counter(item.need for item in found)
        todo = len(self._queue)
        total = self._members.total
        head = f"{self.plan.sweep} revision {self.revision}: {total} trials, {needs[Need.NOTHING]} already done"
        if not todo and not self._elsewhere:
            self.say(f"{head}: 0 to run" + (f", {len(self._failures)} failed before" if self._failures else ""))
            return
        parts = [f"{todo} to run" + (" now, more as searches go on" if total > len(found) else "")]
        if needs[Need.EVALUATE]:
            parts.append(f"{needs[Need.EVALUATE]} of them only to evaluate")
        if needs[Need.RETRAIN]:
            parts.append(f"{needs[Need.RETRAIN]} of them to train again (their final weights are gone)")
        again = sum(item.row.status == Status.FAILED for item in found if item.need != Need.NOTHING)
        if again and self.failed:
            parts.append(f"{again} of them failed before")
        if needs[Need.RERUN]:
            parts.append(f"{needs[Need.RERUN]} of them afresh, by today's code")
        if self._elsewhere:
            parts.append(f"{len(self._elsewhere)} in another driver's hands")
        self.say(f"{head}, {', '.join(parts)}; {self.given}")

    # ---- at work -----------------------------------------------------------------------------------------------

    def _work(self, executor: str) -> None:
        self._began = time.monotonic()
        with make_executor(executor, self.given, self.place) as runner:
            while not self._stopped_by:
                runner.run(self.next_job, self.done, should_stop=self.should_stop, tick=self.tick)
                self._look_elsewhere()
                if not self._queue and not self._elsewhere:
                    if self._beyond_budget:
                        why = next(iter(self._beyond_budget.values()))
                        self._stop_for_budget(f"{len(self._beyond_budget)} trials are not begun: {why}")
                    return
                if not self._queue:
                    self.tick()
                    time.sleep(0.2)

    @contextlib.contextmanager
    def _machine(self, executor: str) -> Iterator[None]:
        """The machine to ourselves, if the spec says so; and cards on which kernels of several trials overlap."""
        is_alone = bool(self.plan.resources.get("alone"))
        shares = self.given.packed and executor == "ray"
        with (
            alone.machine(is_alone, say=self.say, should_stop=self.should_stop, tick=self.tick),
            mps.service(self.say) if shares else contextlib.nullcontext(False) as overlapping,
        ):
            self.cards.overlap(overlapping)
            yield

    def should_stop(self) -> bool:
        return self._stopped_by is not None

    def tick(self) -> None:
        if not self._stopped_by and (why := self.allowance.reason()):
            self._stop_for_budget(why)
        if self._signal:
            self.say(f"{self._signal}: stopping at a checkpoint; the same command goes on from there (again: at once)")
            self._signal = None
        if self._watch.is_due:
            self._look_for_hung()
        with self._lock:
            self.cards.look({trial_id: attempt for trial_id, (_, _, attempt) in self._running.items()})
        self._display.show(self._tally)

    def _look_for_hung(self) -> None:
        """Kill workers that give no sign of life: their trials go on in another process, from their checkpoints."""
        with self._lock:
            running = [(member, attempt) for member, _, attempt in self._running.values()]
        for member, attempt in running:
            folder = self.store.trial_folder(member.trial.id)
            silent_s = self._watch.silent_s(folder, attempt)
            if silent_s is None:
                continue
            self._watch.forget(folder, attempt)
            why = f"no progress for {words(silent_s)} (retry.hang)"
            told = f"{why}: its worker was killed"
            end = self.place.end
            is_killed = watch.kill(folder, member.trial.id, attempt, told, gpu=self.given.gpu, far=end)
            done = "its worker was killed" if is_killed else "its worker is out of reach from here"
            self.say(f"{member.cell}, seed {member.trial.seed}: {why}; {done}")

    def _stop_for_budget(self, why: str) -> None:
        self._stopped_by, self._why = "budget", why
        self.say(f"{why}: stopping at a checkpoint" if self._running else why)

    def _own_spans(self) -> list[Span]:
        """The trials at work here now; one that waits for its worker costs nothing yet."""
        with self._lock:
            running = [(trial_id, attempt) for trial_id, (_, _, attempt) in self._running.items()]
        starts = [(trial_id, began(self.store.trial_folder(trial_id), attempt)) for trial_id, attempt in running]
        return [
            Span(trial_id, start, None, self.cards.gpu(trial_id)) for trial_id, start in starts if start is not None
        ]

    def next_job(self) -> Job | None:
        """Claim the next trial that is free. None if there is none for now."""
        with self._lock:
            self._look_elsewhere()
            while self._queue and not self._stopped_by:
                member = self.cards.take(self._queue)
                if member is None:
                    return None  # the cards are full
                job = self._claim(member)
                if job is not None:
                    return job
                self.cards.leave(member.trial.id)
            return None

    def _claim(self, member: Member) -> Job | None:
        trial_id = member.trial.id
        is_fresh = member.trial in self._rerun
        if not is_fresh and self._is_done_elsewhere(member):
            self._end(member)
            return None
        if not self._may_begin(member):
            return None
        above, gpu = self.store.last_attempt(trial_id), self.cards.gpu(trial_id)
        attempt = self.ledger.claim(trial_id, self.owner, above=above, gpu=gpu)
        if attempt is None:
            self._elsewhere[trial_id] = member
            return None
        is_fresh = is_fresh and member.trial in self._rerun  # nobody has it now: look again
        missing = Need.RERUN if is_fresh else need(self.store, member)
        if missing == Need.NOTHING:  # another driver was faster, just now
            self._finish(member, Outcome(trial_id, attempt, Status((self.store.result(trial_id) or {})["status"])))
            self._end(member)
            return None
        try:
            self.store.check_settings(member.trial)
        except UserError:
            self._finish(member, Outcome(trial_id, attempt, Status.INTERRUPTED, seconds=0.0))
            self._stopped_by = "collision"
            raise
        self._running[trial_id] = (member, missing, attempt)
        folder = self.store.trial_folder(trial_id)
        rows = self._retries.rows(member.trial, folder) if missing != Need.EVALUATE else None
        if rows and not split.tried(folder):
            self.say(f"{member.cell}, seed {member.trial.seed}: {rows} rows at once, as others of its shape needed")
        return Job(
            trial=member.trial,
            attempt=attempt,
            slices=member.slices,
            folder=str(folder),
            threads=self.given.threads,
            checkpoint_every_s=self._checkpoint_every_s,
            micro_batch=rows,
            rungs=member.rungs,
            fresh=is_fresh,
            **self.cards.job(trial_id),
        )

    def _end(self, member: Member) -> None:
        """A trial has ended well: count it, and see what its search asks for now."""
        self._done.add(member.trial.id)
        found = self._members.after(member)
        if not found:
            return
        self.ledger.add_members(self.plan.sweep, self.revision, found, len(self.plan.members))
        for one in found:
            self._done.discard(one.trial.id)
            self._sort(self._rerun.look([look(self.store, self.ledger, one)])[0])
            if one.trial.id in self._done:  # another driver ended it since the search was asked: ask again
                self._end(one)

    def _may_begin(self, member: Member) -> bool:
        """Whether `budget.max_trials` lets this trial be begun; one that was begun before goes on."""
        if self.allowance.budget.max_trials is None or self.store.last_attempt(member.trial.id):
            return True
        too_many = self.allowance.budget.too_many(self.ledger.begun(self.plan.sweep))
        if too_many:
            self._beyond_budget[member.trial.id] = too_many
        return too_many is None

    def _is_done_elsewhere(self, member: Member) -> bool:
        """Whether another driver has finished the trial since the launch began: then it needs no attempt of ours."""
        row = self.ledger.row(member.trial.id)
        return bool(row and row.owner is None and row.status.is_done) and need(self.store, member) == Need.NOTHING

    def done(self, outcome: Outcome) -> None:
        """Write how a job ended; tell a failure at once; queue it again if the plan allows."""
        with self._lock:
            member, missing, _ = self._running.pop(outcome.trial_id)
            suffered = self.cards.ended(outcome)
            if not self._finish(member, outcome):
                self._elsewhere[outcome.trial_id] = member  # a newer attempt has it
            elif outcome.status.is_done:
                self._worked += 1
                (self._evaluated if missing == Need.EVALUATE else self._ran).add(outcome.trial_id)
                self._end(member)
            elif suffered:
                self._queue.append(member)
                where = f"{member.cell}, seed {member.trial.seed}"
                self.say(f"{where}: {suffered} beside others; trying again with a card to itself")
            elif outcome.status == Status.FAILED:
                self._worked += 1
                if missing != Need.EVALUATE and need(self.store, member) == Need.EVALUATE:
                    self._ran.add(outcome.trial_id)  # trained, and failed in its evaluation
                self._tell_failure(member, outcome)
            elif not self._stopped_by:  # lost its lease, or stopped by hand: see who has it
                self._elsewhere[outcome.trial_id] = member
        is_last = not self._queue and not self._running
        self._display.show(self._tally, now=is_last)

    def _finish(self, member: Member, outcome: Outcome) -> bool:
        missing = {part.id for part in self.store.missing_slices(member.trial.id, member.slices)}
        return self.ledger.finish(outcome, [part.id for part in member.slices if part.id not in missing])

    def _tell_failure(self, member: Member, outcome: Outcome) -> None:
        kind = outcome.failure or Failure.ERROR
        found = self._failed(member, outcome.attempt, kind, outcome.error)
        again = self._retries.again(member.trial, outcome)
        if again:
            self._queue.append(member)
        else:
            self._failures[outcome.trial_id] = found
        then = f"; {again}" if again else ""
        self.say(f"failed ({kind}): {found.cell}, seed {found.seed}: {found.error}{then}\n  log: {found.log}")
        if is_disk_full(outcome) and not self._stopped_by:
            self._stopped_by = "disk"
            self.say("the disk is full: stopping. Checkpoints are whole: make room, and the same command goes on")

    def _failed(self, member: Member, attempt: int, kind: str | None, error: str | None) -> Failed:
        log = self.store.trial_folder(member.trial.id) / "attempts" / str(attempt) / "log.txt"
        return Failed(member.trial.id, member.cell, member.trial.seed, kind or "error", error or "", log)

    def _look_elsewhere(self) -> None:
        """See what became of trials that other drivers hold; take over what they dropped."""
        now = time.monotonic()
        with self._lock:
            if not self._elsewhere or now - self._looked < _LOOK_ELSEWHERE_S:
                return
            self._looked = now
            self.ledger.release_dead()
            for trial_id, member in list(self._elsewhere.items()):
                row = self.ledger.row(trial_id)
                if row is None or row.owner not in (None, self.owner.uuid):
                    continue
                del self._elsewhere[trial_id]
                if row.status == Status.FAILED:
                    self._failures[trial_id] = self._failed(member, row.attempt, row.failure, row.error)
                elif need(self.store, member) == Need.NOTHING:
                    self._end(member)
                else:
                    self._queue.append(member)

    def _tally(self) -> Tally:
        with self._lock:
            running = {}
            for trial_id, (member, _, attempt) in self._running.items():
                folder = self.store.trial_folder(trial_id)
                if (folder / "attempts" / str(attempt) / "log.txt").exists():  # else it waits for its worker
                    live = self.store.progress(trial_id) or {}
                    share = live["step"] / live["steps"] if live.get("attempt") == attempt else 0.0
                    running[f"{member.cell} seed={member.trial.seed}"] = share
            now = time.monotonic()
            pace = self._pace(self._worked, self._worked + sum(running.values()), now)
            return Tally(self._members.total, len(self._done), len(self._failures), running, now - self._began, pace)

    def _lost_leases(self, error: Exception) -> None:
        if not self._stopped_by:
            self._stopped_by = "lease"
            reason = getattr(error, "orig", error)  # without the statement
            self.say(f"the ledger could not be reached for {LEASE_S:.0f} s ({reason}): stopping the trials")

    def _stop_by_signal(self, name: str) -> None:
        self._stopped_by, self._signal = "signal", name  # said by tick(): a handler may interrupt a print

    # ---- after -------------------------------------------------------------------------------------------------

    def _summary(self, skipped: int, backlog: str | None) -> Summary:
        members = tuple(self._members)
        plan = replace(self.plan, members=members)
        found = survey(self.store, self.ledger, plan, self.revision, None, believe=True)
        totals = counts(found)
        is_whole = sum(item.need == Need.NOTHING for item in found) == len(found)
        for line in self._members.stuck(set(self._failures)):
            self.say(line)
        stops = {"signal": Exit.INTERRUPTED, "lease": Exit.ENVIRONMENT, "disk": Exit.ENVIRONMENT}
        stops["budget"] = Exit.OK if is_whole else Exit.STOPPED
        if self._stopped_by == "budget":
            self._why = self.allowance.reached() or self._why  # stopping took time too, which the advice has to cover
        code = stops.get(self._stopped_by or "", Exit.OK if is_whole else Exit.FAILED)
        return Summary(
            self.plan.sweep,
            self.revision,
            totals,
            ran=len(self._ran),
            evaluated=len(self._evaluated),
            skipped=skipped,
            failures=list(self._failures.values()),
            exit_code=code,
            seconds=time.monotonic() - self._began,
            backlog=backlog,
            stopped=None if is_whole else self._why,
        )
