"""What a batch does outside of its workflow: start its items, look at them, stop them.

An item's key is the same in every batch of a chain, so its tasks form a chain too, as those of any request do. What
answers an item is found on that chain: a clip of an earlier batch, a task that runs, or what this batch has started
itself, however that ended. Only if none does, the next task of the chain is started, so a step may run twice, or break
off anywhere, and starts nothing twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from pydantic import TypeAdapter
from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowUpdateFailedError,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.artifacts import storage_failures
from activities.job_start import start_job
from activities.memory import remember
from activities.storage import ObjectNotFoundError, ObjectStore
from workflows.batches import (
    BatchStep,
    BatchStepResult,
    CancelItemsInput,
    ItemReading,
    ItemTask,
    RemoveItemsInput,
)
from workflows.contracts import CANCEL_BATCH_ITEMS, REMOVE_BATCH_ITEMS, RUN_BATCH_STEP, BatchActivities
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.naming import MEMO_RECORD, MEMO_REQUEST, TASK_STATUS, task_id
from workflows.states import ENDED, TaskStatus
from workflows.tasks import AdmissionPlace, CancelMode, GenerationInput, SoftCancelReply, TaskRecord

ITEMS_TYPE: Final = "application/x-ndjson"
MAX_REMEMBERED: Final = 4
"""Batches whose items are kept in memory, at most 16 MB each."""
_PARALLEL: Final = 8
_BEAT_SECONDS: Final = 2.0

_PLAN: Final = TypeAdapter(GenerationInput)


def items_body(plans: Sequence[GenerationInput | None]) -> bytes:
    """The object with the items of a batch: a line per item as posted, an empty one for each rejected."""
    return b"\n".join(b"" if plan is None else _PLAN.dump_json(plan) for plan in plans)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The task of an item as Temporal describes it."""

    batch_id: str | None
    record: TaskRecord | None
    status: TaskStatus | None
    """How it ended; None: it has not."""
    is_canceled_softly: bool = False

    @property
    def gpu_seconds(self) -> float:
        return self.record.gpu_seconds if self.record else 0.0

    @property
    def has_clip(self) -> bool:
        artifact = self.record.artifact if self.record else None
        return self.status is TaskStatus.SUCCEEDED and (artifact is None or artifact.expires_at > datetime.now(UTC))


class BatchItems(BatchActivities):
    """The items of batches.

    Args:
        client: starts and reads their tasks; needs the codec.
        store: has the items.
    """

    def __init__(self, client: Client, store: ObjectStore) -> None:
        self._client = client
        self._store = store
        self._remembered: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    @activity.defn(name=RUN_BATCH_STEP)
    async def run_batch_step(self, step: BatchStep) -> BatchStepResult:
        """Look at tasks, then go through the candidates until enough of them are open."""
        async with _heartbeat():
            return BatchStepResult(readings=tuple(await self._run(step)))

    async def _run(self, step: BatchStep) -> list[ItemReading]:
        # Read before anything is started: without the items there is nothing to be known about a start.
        items = await self._items(step.items_key) if step.candidates else ()
        turns = asyncio.Semaphore(_PARALLEL)

        async def look(task: ItemTask) -> ItemReading:
            async with turns:
                return await self._look(step.batch_id, task)

        readings = list(await asyncio.gather(*(look(task) for task in step.look)))
        opened = 0
        for index in step.candidates:
            if opened >= step.free:
                break
            reading = await self._answer(step.batch_id, index, _PLAN.validate_json(items[index]))
            opened += reading.status is None
            readings.append(reading)
        return readings

    @activity.defn(name=CANCEL_BATCH_ITEMS)
    async def cancel_batch_items(self, request: CancelItemsInput) -> None:
        """Pass a cancel on; a soft one lets a task that a worker has keep its clip."""
        async with _heartbeat():
            for one in request.task_ids:
                await self._cancel(one, request.mode)

    async def _cancel(self, one: str, mode: CancelMode) -> None:
        try:
            if mode is CancelMode.HARD or await self._cancel_softly(one) is SoftCancelReply.NOT_STARTED:
                await self._client.get_workflow_handle(one).cancel()
        except RPCError as error:
            # Closed and deleted meanwhile.
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise

    @activity.defn(name=REMOVE_BATCH_ITEMS)
    async def remove_batch_items(self, request: RemoveItemsInput) -> None:
        """Remove the stored items of a batch."""
        self._remembered.pop(request.items_key, None)
        with storage_failures():
            await self._store.delete([request.items_key])

    async def _items(self, key: str) -> tuple[bytes, ...]:
        known = self._remembered.get(key)
        if known is None:
            try:
                with storage_failures():
                    known = tuple((await self._store.get(key)).split(b"\n"))
            except ObjectNotFoundError:
                raise ApplicationError(
                    "the items of the batch are not stored any more", type=FailureCode.INPUT_GONE, non_retryable=True
                ) from None
        remember(self._remembered, key, known, at_most=MAX_REMEMBERED)
        return known

    async def _look(self, batch_id: str, task: ItemTask) -> ItemReading:
        job = await self._describe(task.task_id)
        if job is None:
            # Deleted by its owner.
            return ItemReading(task=task, status=TaskStatus.CANCELED)
        return _reading(batch_id, task, job)

    async def _answer(self, batch_id: str, index: int, plan: GenerationInput) -> ItemReading:
        """The task that answers an item; the next one of its chain is started if none does."""
        after: str | None = None
        link = 0
        while True:
            task = ItemTask(index=index, task_id=task_id(plan.user, plan.idempotency_key, after=after), link=link)
            job = await self._describe(task.task_id)
            if job is None:
                await start_job(self._client, _request(plan, batch_id, task, after=after))
                # Ours, or that of an earlier try of this step. How it stands, the next look says.
                return ItemReading(task=task)
            if job.batch_id == batch_id or job.has_clip:
                return _reading(batch_id, task, job)
            if job.status is None and (not job.is_canceled_softly or await self._revive(task.task_id)):
                return _reading(batch_id, task, job)
            if job.status is None:
                # It ended in this moment.
                continue
            after, link = task.task_id, link + 1

    async def _describe(self, one: str) -> _Job | None:
        try:
            description = await self._client.get_workflow_handle(one).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        request: GenerationInput = await description.memo_value(MEMO_REQUEST, type_hint=GenerationInput)
        record: TaskRecord | None = await description.memo_value(MEMO_RECORD, None, type_hint=TaskRecord)
        shown = description.typed_search_attributes.get(TASK_STATUS)
        return _Job(
            batch_id=request.batch_id,
            record=record,
            status=_end(description.status, record),
            is_canceled_softly=shown == TaskStatus.CANCELED,
        )

    async def _cancel_softly(self, one: str) -> SoftCancelReply:
        handle = self._client.get_workflow_handle(one)
        try:
            return await handle.execute_update(GenerationWorkflow.cancel_soft)
        except WorkflowUpdateFailedError:
            return SoftCancelReply.ENDED

    async def _revive(self, one: str) -> bool:
        """Take back the soft cancel of a task whose batch was ended from outside."""
        handle = self._client.get_workflow_handle(one)
        try:
            return await handle.execute_update(GenerationWorkflow.revive)
        except WorkflowUpdateFailedError:
            return False


def _request(plan: GenerationInput, batch_id: str, task: ItemTask, *, after: str | None) -> GenerationInput:
    """The request of an item's next task. Its place is in the batch, which hears of its end as an admission does."""
    return replace(
        plan,
        task_id=task.task_id,
        retry_of=after,
        batch_id=batch_id,
        places=(AdmissionPlace(admission_id=batch_id, token=str(task.index)),),
    )


def _reading(batch_id: str, task: ItemTask, job: _Job) -> ItemReading:
    own = job.batch_id == batch_id
    return ItemReading(task=task, status=job.status, own=own, gpu_seconds=job.gpu_seconds if own else 0.0)


def _end(closing: WorkflowExecutionStatus | None, record: TaskRecord | None) -> TaskStatus | None:
    """How a task ended. A run that has written how is over for us, although it closes a moment later."""
    if record is not None and record.finished_at is not None and record.status in ENDED:
        return record.status
    match closing:
        case None | WorkflowExecutionStatus.RUNNING:
            return None
        case WorkflowExecutionStatus.COMPLETED:
            return TaskStatus.SUCCEEDED
        case WorkflowExecutionStatus.FAILED:
            return TaskStatus.FAILED
        case _:
            return TaskStatus.CANCELED


@asynccontextmanager
async def _heartbeat() -> AsyncIterator[None]:
    """Beat, so that a step of a killed worker is taken up soon."""

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(_BEAT_SECONDS)

    beating = asyncio.create_task(beat(), name="batch heartbeat")
    try:
        yield
    finally:
        beating.cancel()
