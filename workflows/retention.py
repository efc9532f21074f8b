"""The sweep that removes what is older than it may be: clips past their expiry, what failed attempts left, inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from temporalio import workflow
from temporalio.common import RetryPolicy

from workflows.contracts import RetentionActivities
from workflows.tasks import RemoveExpiredInput, RetentionArea

RETENTION_WORKFLOW: Final = "RetentionWorkflow"

_BATCH_TIMEOUT = timedelta(minutes=10)
_HEARTBEAT_TIMEOUT = timedelta(minutes=1)
# A store that is down for longer fails this sweep; the schedule starts the next one.
_BATCH_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=5), maximum_interval=timedelta(minutes=1), maximum_attempts=5
)


@dataclass(frozen=True, kw_only=True)
class RetentionSweep:
    """Input and result of `RetentionWorkflow`: how far a sweep is. A new sweep starts with the defaults."""

    areas: tuple[RetentionArea, ...] = tuple(RetentionArea)
    """Still to sweep, the current one first."""
    after: str | None = None
    """Where the next batch of the current area begins."""
    examined: int = 0
    removed: int = 0
    batches_per_run: int = 500
    """After so many batches the workflow continues as new."""


@workflow.defn(name=RETENTION_WORKFLOW)
class RetentionWorkflow:
    """One sweep over the store, area by area, batch by batch.

    Commands, in order: one activity per batch; at the end of a run's batches continue-as-new.
    """

    @workflow.run
    async def run(self, sweep: RetentionSweep) -> RetentionSweep:
        """Sweep what is left of `sweep.areas` and return the totals."""
        batches = 0
        while sweep.areas:
            if batches >= sweep.batches_per_run or workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(sweep)
            sweep = await self._batch(sweep)
            batches += 1
        return sweep

    async def _batch(self, sweep: RetentionSweep) -> RetentionSweep:
        area = sweep.areas[0]
        result = await workflow.execute_activity_method(
            RetentionActivities.remove_expired,
            RemoveExpiredInput(area=area, after=sweep.after),
            start_to_close_timeout=_BATCH_TIMEOUT,
            heartbeat_timeout=_HEARTBEAT_TIMEOUT,
            retry_policy=_BATCH_RETRY,
            summary=area,
        )
        return replace(
            sweep,
            areas=sweep.areas if result.after else sweep.areas[1:],
            after=result.after,
            examined=sweep.examined + result.examined,
            removed=sweep.removed + result.removed,
        )
