"""The deliveries of a callback: the first, started by the end of a task or batch, and those asked for afterwards.

Each is a CallbackWorkflow; its memo tells everything, so reading needs no worker.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final
from uuid import uuid4

from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities.egress_policy import EgressPolicy, UrlRefusedError
from api.auth import Caller
from api.jobs import Job, Jobs
from api.problems import (
    CallbackNotFoundError,
    ControlUnavailableError,
    TaskNotTerminalError,
    ValidationFailedError,
)
from api.readings import Readings
from api.temporal_calls import bounded
from api.terminal_events import TerminalEvent, event_of_task
from workflows import naming
from workflows.callback import CallbackWorkflow
from workflows.outbox import callback_attributes
from workflows.states import TaskStatus
from workflows.tasks import CallbackEvent, CallbackInput, CallbackRecord, CallbackStatus, User

MAX_DELIVERIES: Final = 1_000
"""Of one event; a stop for loops, not a promise."""
TEST_EVENT: Final = "callback.test"
TEST_PATIENCE: Final = timedelta(seconds=20)
"""One attempt takes at most 10 s; the rest is for waiting its turn."""


@dataclass(frozen=True, kw_only=True)
class DeliveryState:
    """One delivery as it stands."""

    number: int
    """0: the one that the end started; n: the n-th redelivery."""
    run_id: str
    record: CallbackRecord
    started_at: datetime
    is_open: bool


class Deliveries:
    """Reads deliveries and starts more of them.

    Args:
        client: of Temporal.
        jobs, readings: of this API.
        egress: where callbacks may go.
        call_limit: for one call to Temporal.
    """

    def __init__(
        self, client: Client, *, jobs: Jobs, readings: Readings, egress: EgressPolicy, call_limit: timedelta
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._readings = readings
        self._egress = egress
        self._limit = call_limit

    async def read(self, caller: Caller, task_id: str) -> list[DeliveryState]:
        """Every delivery of the caller's task, oldest first; at least one.

        Raises:
            TaskNotFoundError: there is no such task, or it is another user's.
            CallbackNotFoundError: it has no callback (yet).
            TemporalUnavailableError: no answer in time.
        """
        job = await self._readings.fresh(caller, task_id)
        found = await self.of(task_id)
        if not found:
            raise CallbackNotFoundError(_why_none(job))
        return found

    async def redeliver(self, caller: Caller, task_id: str) -> list[DeliveryState]:
        """Send the caller's terminal event again, or at once when its delivery still waits.

        Raises:
            TaskNotFoundError: there is no such task, or it is another user's.
            TaskNotTerminalError: it has not ended, so there is no event yet.
            CallbackNotFoundError: it asked for no callback of this end.
            TemporalUnavailableError: no answer in time.
        """
        job = await self._readings.fresh(caller, task_id)
        event = event_of_task(job)
        if event is None:
            if job.closing is None:
                task = (await self._readings.of(job)).task
                raise TaskNotTerminalError("The task has not ended: there is nothing to deliver yet.", task=task)
            raise CallbackNotFoundError(_why_none(job))
        await self.send_again(event, await self.of(task_id))
        self._readings.forget(task_id)
        return await self.of(task_id)

    async def send_again(self, event: TerminalEvent, deliveries: list[DeliveryState]) -> None:
        """Wake the newest delivery if it is open, else start the next one. Parallel calls meet in one."""
        newest = deliveries[-1] if deliveries else None
        if newest is not None and newest.is_open and await self._wake(naming.callback_id(event.of, newest.number)):
            return
        following = naming.callback_id(event.of, (newest.number if newest else 0) + 1)
        with suppress(WorkflowAlreadyStartedError):
            await self._start_workflow(following, event.given, event.user)

    async def of(self, ended: str) -> list[DeliveryState]:
        """Every delivery of a task or batch, by its id; oldest first.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        found: list[DeliveryState] = []
        for number in range(MAX_DELIVERIES):
            state = await self._describe(naming.callback_id(ended, number), number)
            if state is not None:
                found.append(state)
            elif number > 0:
                # The first one may be gone while a later one is there; those later come without gaps.
                break
        return found

    async def test(self, caller: Caller, url: str) -> CallbackRecord:
        """Send a signed sample to a URL, once.

        Raises:
            ValidationFailedError: callbacks may not go there.
            ControlUnavailableError: no attempt was made in time.
            TemporalUnavailableError: no answer in time.
        """
        try:
            self._egress.check_url(url)
        except UrlRefusedError as error:
            raise ValidationFailedError.of("url", error.rule, str(error)) from None
        user, now = caller.user, datetime.now(UTC)
        name = f"test-{uuid4().hex}"
        event = CallbackEvent(
            type=TEST_EVENT,
            timestamp=now,
            task_id=name,
            status=TaskStatus.SUCCEEDED,
            created_at=now,
            started_at=now,
            finished_at=now,
        )
        given = CallbackInput(
            task_id=name, tenant=user.tenant, url=url, webhook_id=name, event=event, schedule_seconds=(0.0,)
        )
        workflow_id = naming.callback_id(name)
        await self._start_workflow(workflow_id, given, user)
        await self._jobs.wait_closed(workflow_id, TEST_PATIENCE)
        state = await self._describe(workflow_id, 0)
        if state is None or not state.record.attempts:
            with suppress(RPCError):  # NOT_FOUND: closed in the same moment
                await bounded(self._client.get_workflow_handle(workflow_id).cancel, limit=self._limit)
            raise ControlUnavailableError(
                "No attempt was made in time: no callback worker runs, or the endpoint is kept back because it fails."
            )
        return state.record

    async def _wake(self, workflow_id: str) -> bool:
        """Make an open delivery try now; False when it has closed meanwhile."""
        handle = self._client.get_workflow_handle(workflow_id)
        try:
            await bounded(partial(handle.signal, CallbackWorkflow.retry_now), limit=self._limit)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def _start_workflow(self, workflow_id: str, given: CallbackInput, user: User) -> None:
        first = CallbackRecord(task_id=given.task_id, status=CallbackStatus.PENDING, url=given.url)
        start = partial(
            self._client.start_workflow,
            CallbackWorkflow.run,
            given,
            id=workflow_id,
            task_queue=naming.CALLBACK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            search_attributes=callback_attributes(user),
            memo={naming.MEMO_RECORD: first},
        )
        await bounded(start, limit=self._limit)

    async def _describe(self, workflow_id: str, number: int) -> DeliveryState | None:
        try:
            description = await bounded(self._client.get_workflow_handle(workflow_id).describe, limit=self._limit)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        record: CallbackRecord | None = await description.memo_value(naming.MEMO_RECORD, None, type_hint=CallbackRecord)
        if record is None:
            return None
        is_open = description.status is WorkflowExecutionStatus.RUNNING
        if not is_open:
            # Terminated by an operator: nobody will try again.
            delivered = record.status is CallbackStatus.SUCCEEDED
            status = CallbackStatus.SUCCEEDED if delivered else CallbackStatus.FAILED
            record = replace(record, status=status, next_attempt_at=None)
        return DeliveryState(
            number=number, run_id=description.run_id, record=record, started_at=description.start_time, is_open=is_open
        )


def _why_none(job: Job) -> str:
    if job.request.callback is None:
        return "The task was submitted without a callback_url."
    if job.closing is None:
        return "The task has not ended: its callback goes out then."
    if job.record is None or job.record.finished_at is None:
        return "The task was ended from outside, which sends no callback."
    if not job.record.callback_started:
        return f"The task did not subscribe to its end as {job.record.status}."
    return "The delivery of the task is older than the retention."
