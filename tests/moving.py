"""A store that changes under whoever follows it, as a driver and its workers would change it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fake_store

from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Failure, Member, Outcome, Plan, Status
from runners.store import Store, write_json, write_text

STEPS = 200
CARD = {"card": "NVIDIA H200", "card_bytes": 140 * 2**30, "memory_bytes": 9 * 2**30, "busy": 0.25, "is_whole": False}


class Moving:
    """One sweep under way. Each call does to ledger and folders what happens to one trial."""

    def __init__(self, root: Path, plan: Plan) -> None:
        self.store, self.plan = Store.create(root), plan
        self.revision, _ = self.store.freeze(plan)
        self.ledger, self.owner = Ledger.open(self.store), Owner.me()
        self.ledger.register(self.owner)
        self.ledger.record_plan(plan, self.revision)
        self.attempts: dict[str, int] = {}

    def start(self, member: Member, *, card: dict[str, Any] | None = None, gpu: float = 0.0) -> None:
        """A driver claims the trial and its worker says its first word."""
        number = self.ledger.claim(member.trial.id, self.owner, gpu=gpu)
        assert number is not None
        self.attempts[member.trial.id] = number
        write_text(self.attempt(member) / "log.txt", "2026-12-01 10:00:00 begun on <cpu>\n", durable=False)
        if card:
            write_json(self.attempt(member) / "meter.json", card, durable=False)

    def tell(self, member: Member, step: int, when: float | None = None, **metrics: float) -> None:
        """The worker says where it is."""
        row = {"attempt": self.attempts[member.trial.id], "step": step, "steps": STEPS}
        row |= {"metrics": metrics or {"train/loss": 6.2 - step / 50}, "time": time.time() if when is None else when}
        write_json(self.store.trial_folder(member.trial.id) / "progress.json", row, durable=False)

    def finish(self, member: Member, seconds: float = 10.0) -> None:
        fake_store.finish(self.store, member)
        self._end(member, Outcome(member.trial.id, self._claimed(member), Status.COMPLETE, seconds=seconds))

    def diverge(self, member: Member) -> None:
        fake_store.diverge(self.store, member)
        self._end(member, Outcome(member.trial.id, self._claimed(member), Status.DIVERGED, seconds=5.0))

    def fail(self, member: Member, error: str, kind: Failure = Failure.ERROR) -> None:
        number = self._claimed(member)
        write_text(self.attempt(member) / "log.txt", f"2026-12-01 10:00:00 begun\n{error}\n", durable=False)
        write_text(self.attempt(member) / "error.txt", f"Traceback (most recent call last):\n{error}\n", durable=False)
        self._end(member, Outcome(member.trial.id, number, Status.FAILED, kind, error, seconds=3.0))

    def attempt(self, member: Member) -> Path:
        folder = self.store.trial_folder(member.trial.id)
        return folder / "attempts" / str(self.attempts[member.trial.id])

    def _claimed(self, member: Member) -> int:
        if member.trial.id not in self.attempts:
            self.start(member)
        return self.attempts[member.trial.id]

    def _end(self, member: Member, outcome: Outcome) -> None:
        assert self.ledger.finish(outcome, [piece.id for piece in member.slices])
        del self.attempts[member.trial.id]
        (self.store.trial_folder(member.trial.id) / "progress.json").unlink(missing_ok=True)
