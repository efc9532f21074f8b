"""The workflows behind the batches, as `api.jobs` is for tasks: started, read and stopped in bounded time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from api.temporal_calls import bounded
from workflows import naming
from workflows.batch import BatchWorkflow
from workflows.batches import BatchInput, BatchRecord, ItemState
from workflows.tasks import CancelMode, User

_ALIVE: Final = frozenset({None, WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW})
_FROM_OUTSIDE: Final = frozenset({WorkflowExecutionStatus.TERMINATED, WorkflowExecutionStatus.TIMED_OUT})


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch as Temporal describes it."""

    request: BatchInput
    run_id: str = ""
    """Empty for a batch that was just started."""
    record: BatchRecord | None = None
    """None: its first step is not done."""
    closed_at: datetime | None = None
    """None: the run is open."""
    ended_from_outside: bool = False
    """Terminated or timed out: no code of the workflow ran."""
    cancel_sent: bool = False
    """A Temporal cancel was requested."""

    @property
    def has_ended(self) -> bool:
        """Nothing of it changes any more; the run may close a moment later."""
        return self.closed_at is not None or (self.record is not None and self.record.finished_at is not None)

    @property
    def states(self) -> str:
        """An `ItemState` per item as posted."""
        states = self.record.states if self.record else self.request.states
        if self.has_ended:
            states = states.replace(ItemState.CREATED, ItemState.CANCELED)
        return states


class BatchJobs:
    """Starts, reads and stops batches, each call within `call_limit`."""

    def __init__(self, client: Client, *, call_limit: timedelta) -> None:
        self._client = client
        self._limit = call_limit

    async def describe(self, batch_id: str) -> BatchJob | None:
        """A batch, or None when Temporal has no such run (any more). Needs no worker.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        try:
            found = await bounded(self._client.get_workflow_handle(batch_id).describe, limit=self._limit)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        job = await self.listed(found)
        return replace(job, cancel_sent=found.raw_description.workflow_extended_info.cancel_requested)

    async def listed(self, execution: WorkflowExecution) -> BatchJob:
        """The batch as a list of executions shows it: whether a cancel was sent is not known."""
        request: BatchInput = await execution.memo_value(naming.MEMO_REQUEST, type_hint=BatchInput)
        return BatchJob(
            request=request,
            run_id=execution.run_id,
            record=await execution.memo_value(naming.MEMO_RECORD, None, type_hint=BatchRecord),
            closed_at=None if execution.status in _ALIVE else execution.close_time,
            ended_from_outside=execution.status in _FROM_OUTSIDE,
        )

    async def chain(self, user: User, key: str) -> list[BatchJob]:
        """The batches of a key, oldest first. Only the last can be open.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        links: list[BatchJob] = []
        batch_id = naming.batch_id(user, key)
        while (job := await self.describe(batch_id)) is not None:
            links.append(job)
            if not job.has_ended:
                break
            batch_id = naming.batch_id(user, key, after=batch_id)
        return links

    async def start(self, request: BatchInput) -> bool:
        """Start a batch; False when there is a run of this id already, open or closed.

        Raises:
            TemporalUnavailableError: no answer in time. The batch may have been started nevertheless.
        """
        accepted = len(request.states) - request.states.count(ItemState.REJECTED)
        attributes = [
            SearchAttributePair(naming.USER_ID, naming.user_hash(request.user)),
            SearchAttributePair(naming.BATCH_ID, request.batch_id),
        ]

        async def start() -> bool:
            handle = await self._client.start_workflow(
                BatchWorkflow.run,
                request,
                id=request.batch_id,
                task_queue=naming.CONTROL_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                memo={naming.MEMO_REQUEST: request},
                search_attributes=TypedSearchAttributes(attributes),
                static_summary=f"batch of {accepted} items, {request.parallelism} at a time",
            )
            # As in `activities.job_start`: only the raw reply says whether the run is new.
            reply = handle._start_workflow_response  # noqa: SLF001
            return reply is None or reply.started

        try:
            return await bounded(start, limit=self._limit)
        except WorkflowAlreadyStartedError:
            return False

    async def cancel(self, batch_id: str, mode: CancelMode) -> None:
        """Ask for a cancel of the rest; needs no worker, and answers the same for a run that has closed.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        handle = self._client.get_workflow_handle(batch_id)
        ask = handle.cancel if mode is CancelMode.HARD else partial(handle.signal, BatchWorkflow.cancel_soft)
        with suppress(RPCError):  # NOT_FOUND: closed meanwhile
            await bounded(ask, limit=self._limit)
