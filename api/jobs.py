"""The jobs behind the tasks: the only code of the API that touches workflow handles.

Reading needs no worker: `describe` gives attributes, memo and the pending activity with its last heartbeat.
Everything returned is ours by type; what Temporal calls things stays in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from functools import partial
from typing import Final, TypeVar
from uuid import uuid4

import structlog
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowHistoryEventFilterType,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities.job_start import start_job
from api.problems import ControlUnavailableError, TemporalUnavailableError
from api.temporal_calls import bounded
from workflows import naming
from workflows.contracts import GENERATE_CLIP
from workflows.generation import GenerationWorkflow
from workflows.states import TaskStatus
from workflows.tasks import (
    CallbackRecord,
    CallbackStatus,
    GenerationInput,
    Progress,
    SoftCancelReply,
    TaskRecord,
)

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


class Closing(Enum):
    """How a run was closed."""

    COMPLETED = auto()
    FAILED = auto()
    CANCELED = auto()
    ENDED_FROM_OUTSIDE = auto()
    """Terminated or timed out: no code of the workflow ran."""


_CLOSINGS: Final = {
    WorkflowExecutionStatus.COMPLETED: Closing.COMPLETED,
    WorkflowExecutionStatus.FAILED: Closing.FAILED,
    WorkflowExecutionStatus.CANCELED: Closing.CANCELED,
    WorkflowExecutionStatus.TERMINATED: Closing.ENDED_FROM_OUTSIDE,
    WorkflowExecutionStatus.TIMED_OUT: Closing.ENDED_FROM_OUTSIDE,
}


@dataclass(frozen=True, kw_only=True)
class PendingAttempt:
    """The attempt that waits for a worker, or runs on one."""

    started_at: datetime | None
    """None: no worker took it yet."""
    progress: Progress | None
    """The last heartbeat."""
    worker_identity: str | None = None
    """The worker that runs it, by the name in fleet views; None: no worker took it yet."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as Temporal describes it."""

    request: GenerationInput
    status: TaskStatus
    """The search attribute, which the workflow sets; stale in a run that was ended from outside."""
    opened_at: datetime
    run_id: str = ""
    """Empty for a job that was just started."""
    closing: Closing | None = None
    """None: the run is open."""
    closed_at: datetime | None = None
    record: TaskRecord | None = None
    worker_id: str | None = None
    """The search attribute: the worker of the latest attempt."""
    cancel_sent: bool = False
    """A Temporal cancel was requested."""
    attempt: PendingAttempt | None = None


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The callback of a task as its workflow stands."""

    status: CallbackStatus
    attempts: int
    """Attempts that were sent."""
    is_final: bool


class Jobs:
    """Starts, reads and stops jobs, each call within `call_limit`."""

    def __init__(self, client: Client, *, call_limit: timedelta) -> None:
        self._client = client
        self._limit = call_limit

    async def describe(self, task_id: str) -> Job | None:
        """The job of a task, or None when Temporal has no such run (any more).

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        description = await self._describe(task_id)
        if description is None:
            return None
        job = await self.listed(description)
        if job is None:
            return None
        pending = [a for a in description.raw_description.pending_activities if a.activity_type.name == GENERATE_CLIP]
        return replace(
            job,
            cancel_sent=description.raw_description.workflow_extended_info.cancel_requested,
            attempt=await self._attempt(pending[0]) if pending else None,
        )

    async def listed(self, execution: WorkflowExecution) -> Job | None:
        """The job as a list of executions shows it: without its pending attempt. None for other workflows."""
        request: GenerationInput | None = await execution.memo_value(
            naming.MEMO_REQUEST, None, type_hint=GenerationInput
        )
        if request is None:
            return None
        status = execution.typed_search_attributes.get(naming.TASK_STATUS)
        closed = execution.status is not None and execution.status is not WorkflowExecutionStatus.RUNNING
        return Job(
            request=request,
            status=TaskStatus(status) if status else TaskStatus.QUEUED,
            opened_at=execution.start_time,
            run_id=execution.run_id,
            closing=_CLOSINGS[execution.status] if execution.status is not None and closed else None,
            closed_at=execution.close_time,
            record=await execution.memo_value(naming.MEMO_RECORD, None, type_hint=TaskRecord),
            worker_id=execution.typed_search_attributes.get(naming.WORKER_ID),
        )

    async def start(self, request: GenerationInput) -> bool:
        """Start a job; False when there is a run of this id already, open or closed.

        Raises:
            TemporalUnavailableError: no answer in time. The job may have been started nevertheless.
        """
        return await bounded(partial(start_job, self._client, request), limit=self._limit)

    async def cancel(self, task_id: str) -> None:
        """Send a Temporal cancel: hard. Answers the same for a run that has closed.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        # No run id: after an operator's reset the newest run is meant.
        with suppress(RPCError):  # NOT_FOUND: closed and removed meanwhile
            await bounded(self._client.get_workflow_handle(task_id).cancel, limit=self._limit)

    async def cancel_soft(self, task_id: str) -> SoftCancelReply:
        """Ask the job to show CANCELED and let its attempt end.

        Raises:
            ControlUnavailableError: no control worker answered in time; the cancel may be done later.
        """
        handle = self._client.get_workflow_handle(task_id)
        update_id = uuid4().hex

        async def update() -> SoftCancelReply:
            return await handle.execute_update(GenerationWorkflow.cancel_soft, id=update_id)

        return await self._updated(update, if_closed=SoftCancelReply.ENDED)

    async def revive(self, task_id: str) -> bool:
        """Take a soft cancel back; False: too late.

        Raises:
            ControlUnavailableError: no control worker answered in time; it may be revived later.
        """
        handle = self._client.get_workflow_handle(task_id)
        update_id = uuid4().hex

        async def update() -> bool:
            return await handle.execute_update(GenerationWorkflow.revive, id=update_id)

        return await self._updated(update, if_closed=False)

    async def wait_closed(self, task_id: str, timeout: timedelta) -> None:
        """Return when the run closes or after `timeout`, by a long poll that needs no worker."""
        handle: WorkflowHandle[object, object] = self._client.get_workflow_handle(task_id)

        async def close_event() -> None:
            async for _ in handle.fetch_history_events(
                wait_new_event=True,
                event_filter_type=WorkflowHistoryEventFilterType.CLOSE_EVENT,
                skip_archival=True,
            ):
                return

        # Whatever cuts the wait short, the caller reads the state afterwards and sees there whether Temporal answers.
        with suppress(RPCError, TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await close_event()

    async def delivery(self, task_id: str) -> Delivery | None:
        """The callback of a task, or None when there is no such workflow (any more).

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        description = await self._describe(naming.callback_id(task_id))
        if description is None:
            return None
        record: CallbackRecord | None = await description.memo_value(naming.MEMO_RECORD, None, type_hint=CallbackRecord)
        closed = description.status is not WorkflowExecutionStatus.RUNNING
        status = record.status if record else CallbackStatus.PENDING
        if closed and status is not CallbackStatus.SUCCEEDED:
            # Terminated by an operator: nobody will try again.
            status = CallbackStatus.FAILED
        # The log is bounded, the numbers are not.
        attempts = record.attempts[-1].number if record and record.attempts else 0
        return Delivery(status=status, attempts=attempts, is_final=closed)

    async def _describe(self, workflow_id: str) -> WorkflowExecutionDescription | None:
        try:
            return await bounded(self._client.get_workflow_handle(workflow_id).describe, limit=self._limit)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise

    async def _updated(self, update: Callable[[], Awaitable[T]], *, if_closed: T) -> T:
        try:
            return await bounded(update, limit=self._limit)
        except (WorkflowUpdateRPCTimeoutOrCancelledError, TemporalUnavailableError):
            raise ControlUnavailableError(
                "No control worker answered in time; the request may still be done."
            ) from None
        except WorkflowUpdateFailedError:
            # The run closed while the update was on its way.
            return if_closed
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return if_closed

    async def _attempt(self, activity: PendingActivityInfo) -> PendingAttempt:
        started = activity.state != PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
        return PendingAttempt(
            started_at=activity.last_started_time.ToDatetime(tzinfo=UTC) if started else None,
            progress=await self._progress(activity) if activity.heartbeat_details.payloads else None,
            worker_identity=activity.last_worker_identity or None if started else None,
        )

    async def _progress(self, activity: PendingActivityInfo) -> Progress | None:
        try:
            details = await self._client.data_converter.decode(activity.heartbeat_details.payloads, [Progress])
        except (TypeError, ValueError, KeyError):
            # A worker of another version beats in another shape; progress is not worth failing a read for.
            _log.warning("progress_unreadable", activity_id=activity.activity_id)
            return None
        progress = details[0]
        return progress if isinstance(progress, Progress) else None
