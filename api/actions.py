"""What an owner can do to a running task."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from api.auth import Caller
from api.jobs import Job, Jobs
from api.problems import TaskTerminalError
from api.readings import Reading, Readings
from api.task_view import cancel_requested, outcome_of
from workflows.states import TaskStatus
from workflows.tasks import CancelMode, SoftCancelReply

_SETTLES_WITHIN: Final = timedelta(seconds=1)
"""A task that nobody runs closes at once; its canceller is told so, if a control worker is there."""


class Actions:
    """Cancels tasks."""

    def __init__(self, *, jobs: Jobs, readings: Readings) -> None:
        self._jobs = jobs
        self._readings = readings

    async def cancel(self, caller: Caller, task_id: str, mode: CancelMode) -> tuple[Reading, bool]:
        """Cancel the caller's task, once however often it is asked.

        Returns:
            The task, and whether there was anything to do: False for a task that had been closed as CANCELED.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            TaskTerminalError: it ended in another way; carries the final state.
            ControlUnavailableError: a soft cancel needs a control worker, and none answered.
            TemporalUnavailableError: no answer in time.
        """
        job = await self._readings.fresh(caller, task_id)
        if job.closing is not None:
            return await self._closed(job), False
        if mode is CancelMode.HARD:
            await self._cancel_hard(job)
        else:
            await self._cancel_soft(job)
        job = await self._readings.fresh(caller, task_id)
        return (await self._closed(job) if job.closing is not None else await self._readings.of(job)), True

    async def _closed(self, job: Job) -> Reading:
        """The reading of a closed task, if CANCELED is what it ended as."""
        reading = await self._readings.of(job)
        if reading.task.status is not TaskStatus.CANCELED:
            raise TaskTerminalError(f"The task has ended as {reading.task.status}.", task=reading.task)
        return reading

    async def _cancel_hard(self, job: Job) -> None:
        if not job.cancel_sent:
            await self._jobs.cancel(job.request.task_id)
        if outcome_of(job).status is TaskStatus.QUEUED:
            await self._jobs.wait_closed(job.request.task_id, _SETTLES_WITHIN)

    async def _cancel_soft(self, job: Job) -> None:
        if cancel_requested(job) is not None:
            return
        if await self._jobs.cancel_soft(job.request.task_id) is SoftCancelReply.NOT_STARTED:
            await self._jobs.cancel(job.request.task_id)
            await self._jobs.wait_closed(job.request.task_id, _SETTLES_WITHIN)
