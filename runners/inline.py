"""The debugging executor: one trial after the other in this process. Same contract and same results as Ray's."""

from __future__ import annotations

from collections.abc import Callable

from runners.schema import Job, Outcome
from runners.trial import run_job


class InlineExecutor:
    """Runs jobs here. `slots` and cards are what one process has: one trial at a time."""

    slots = 1

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(
        self,
        next_job: Callable[[], Job | None],
        done: Callable[[Outcome], None],
        *,
        should_stop: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None:
        """Run jobs until `next_job` has none (None = nothing for now). `tick` is called often, between and within."""

        def stop() -> bool:
            tick()
            return should_stop()

        while not should_stop() and (job := next_job()):
            tick()
            done(run_job(job, progress=lambda *_: tick(), should_stop=stop))
        tick()
