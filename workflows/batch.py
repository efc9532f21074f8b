"""The life of a batch: its items as tasks, a few at a time, and one callback when all have ended.

A task of a batch holds its place in the batch instead of in the user's admission, so at its end it tells the batch
in the same way (signal `release`), and nothing about a task depends on whether it belongs to a batch.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio import workflow
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    import workflows.naming as naming
    from workflows.batch_ledger import BatchLedger
    from workflows.batches import (
        BatchInput,
        BatchRecord,
        BatchStatus,
        BatchStep,
        CancelItemsInput,
        RemoveItemsInput,
        item_counts,
    )
    from workflows.callback import CallbackWorkflow
    from workflows.contracts import BatchActivities
    from workflows.failures import FailureCode
    from workflows.outbox import callback_attributes
    from workflows.policies import CALLBACK_SCHEDULE_SECONDS
    from workflows.states import TaskStatus
    from workflows.tasks import CallbackEvent, CallbackInput, CallbackRecord, CallbackStatus, CallbackTarget, CancelMode

MAX_LOOK_SECONDS: Final = 300.0
ADOPTED_LOOK_SECONDS: Final = 5.0
"""A task that another batch started tells us nothing when it ends."""

_STEP_TIMEOUT = timedelta(minutes=2)
_STEP_HEARTBEAT = timedelta(seconds=10)
_STORE_TRY = timedelta(seconds=10)
_STORE_PATIENCE = timedelta(seconds=30)
# Never given up: what a step may have started must become known. A store that is down makes it wait.
_STEP_RETRIES = RetryPolicy(initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=10))


@workflow.defn(name="BatchWorkflow")
class BatchWorkflow:
    """One batch, from PROCESSING until every item has ended.

    Commands: timers for the deadline and for the look after a silence; per step `run_batch_step`, then memo `record`;
    on a cancel `cancel_batch_items`; at the end, in one workflow task, memo `record`, search attributes and the start
    of the CallbackWorkflow, then `release` to each admission, then `remove_batch_items`. Closes Canceled after a
    Temporal cancel that cancelled any item, else Completed; readers use the record.

    As with a task, a cancel only sets a flag on which `_life` acts. Continues as new between two steps.
    """

    @workflow.init
    def __init__(self, given: BatchInput) -> None:
        self._given = given
        self._ledger = BatchLedger(given)
        cancel = given.state.record.cancel_requested if given.state else None
        self._hard = cancel is CancelMode.HARD
        self._soft = cancel is CancelMode.SOFT
        self._error = given.state.record.error_code if given.state else None

    @workflow.run
    async def run(self, given: BatchInput) -> BatchRecord:
        """Run the batch; the result is the same record as the memo. `given` is taken by the constructor."""
        life = asyncio.create_task(self._life())
        try:
            record = await asyncio.shield(life)
        except asyncio.CancelledError:
            self._hard = True
            record = await life
            if record.status is BatchStatus.CANCELED:
                raise
        return record

    @workflow.signal(name="release")
    def release(self, task_id: str, token: str, gpu_seconds: float = 0.0) -> None:
        """A task of this batch has ended; what it says as it would to an admission. Idempotent."""
        self._ledger.hear(task_id)

    @workflow.signal(name="cancel_soft")
    def cancel_soft(self) -> None:
        """Start no more items and cancel the open ones softly; idempotent."""
        self._soft = True

    async def _life(self) -> BatchRecord:
        watches = [
            asyncio.create_task(watch)
            for watch in (self._watch_deadline(), self._watch_silence(), self._watch_adopted())
        ]
        while not self._ledger.is_over:
            await self._stop_items()
            if self._is_long():
                self._continue()
            step = self._ledger.next_step(may_start=not self._is_stopping())
            if step is not None:
                await self._advance(step)
            elif not self._ledger.is_over:
                await workflow.wait_condition(self._has_work)
        for watch in watches:
            watch.cancel()
        return await self._end()

    async def _watch_deadline(self) -> None:
        due = self._given.accepted_at + timedelta(seconds=self._given.deadline_seconds)
        left = due - workflow.now()
        if left > timedelta(0):
            await workflow.sleep(left, summary="deadline")
        self._error = self._error or FailureCode.DEADLINE_EXCEEDED

    async def _watch_silence(self) -> None:
        """A task that was terminated from outside tells nobody."""
        pause = self._given.look_seconds
        while True:
            changes = self._ledger.changes
            await workflow.sleep(pause, summary="look at the open items")
            if self._ledger.changes != changes:
                pause = self._given.look_seconds
                continue
            self._ledger.look_at_all()
            pause = min(pause * 2, MAX_LOOK_SECONDS)

    async def _watch_adopted(self) -> None:
        while True:
            await workflow.wait_condition(lambda: self._ledger.has_adopted)
            await workflow.sleep(min(ADOPTED_LOOK_SECONDS, self._given.look_seconds), summary="look at found tasks")
            self._ledger.look_at_all()

    def _mode(self) -> CancelMode | None:
        """How the open items are to be stopped. Lost items stop nothing that runs."""
        if self._hard or self._error is FailureCode.DEADLINE_EXCEEDED:
            return CancelMode.HARD
        return CancelMode.SOFT if self._soft else None

    def _is_stopping(self) -> bool:
        return self._mode() is not None or self._error is not None

    def _must_tell(self) -> bool:
        mode = self._mode()
        return mode is not None and bool(self._ledger.untold(mode))

    def _has_work(self) -> bool:
        stopping = self._is_stopping()
        return (
            self._must_tell()
            or (stopping and self._ledger.has_created)
            or self._ledger.next_step(may_start=not stopping) is not None
        )

    def _is_long(self) -> bool:
        info, limit = workflow.info(), self._given.continue_after_events
        long = info.is_continue_as_new_suggested() or bool(limit and info.get_current_history_length() >= limit)
        # What is left after a cancel is short, and the next run would not be a cancelled one. A cancel that came in
        # this very moment is not a flag yet.
        return long and not self._is_stopping() and workflow.cancellation_reason() is None

    def _continue(self) -> None:
        record = self._record()
        following = replace(self._given, state=self._ledger.state(record))
        workflow.continue_as_new(
            following,
            memo={naming.MEMO_REQUEST: self._given_at_start(), naming.MEMO_RECORD: record},
            search_attributes=workflow.info().typed_search_attributes,
        )

    def _given_at_start(self) -> BatchInput:
        return replace(self._given, state=None)

    async def _advance(self, step: BatchStep) -> None:
        """One step. It is never cancelled: what it started has to be known."""
        handle = workflow.start_activity_method(
            BatchActivities.run_batch_step,
            step,
            start_to_close_timeout=_STEP_TIMEOUT,
            heartbeat_timeout=_STEP_HEARTBEAT,
            retry_policy=_STEP_RETRIES,
            summary=f"{len(step.look)} to look at, up to {step.free} to start",
        )
        await workflow.wait_condition(lambda: handle.done() or self._must_tell())
        if not handle.done():
            # The running tasks do not wait for a store that is down.
            await self._stop_items()
        try:
            result = await handle
        except ActivityError as error:
            cause = error.cause
            gone = isinstance(cause, ApplicationError) and cause.type == FailureCode.INPUT_GONE
            self._error = self._error or (FailureCode.INPUT_GONE if gone else FailureCode.INTERNAL)
            self._ledger.look_at_all()
            return
        self._ledger.settle(step, result.readings)
        workflow.upsert_memo({naming.MEMO_RECORD: self._record()})

    async def _stop_items(self) -> None:
        """Act on a cancel, if there is one."""
        if not self._is_stopping():
            return
        self._ledger.cancel_rest()
        mode = self._mode()
        while mode is not None and (items := self._ledger.untold(mode)):
            self._ledger.tell(items, mode)
            workflow.upsert_memo({naming.MEMO_RECORD: self._record()})
            await workflow.execute_activity_method(
                BatchActivities.cancel_batch_items,
                CancelItemsInput(task_ids=tuple(item.task.task_id for item in items), mode=mode),
                start_to_close_timeout=_STEP_TIMEOUT,
                heartbeat_timeout=_STEP_HEARTBEAT,
                retry_policy=_STEP_RETRIES,
                summary=f"cancel {len(items)} tasks ({mode})",
            )
            mode = self._mode()

    def _record(self) -> BatchRecord:
        asked = CancelMode.HARD if self._hard else CancelMode.SOFT if self._soft else None
        return self._ledger.record(workflow.now(), cancel=asked, error=self._error)

    async def _end(self) -> BatchRecord:
        """Record, callback, places, and last the prompts."""
        given, now = self._given, workflow.now()
        canceled = self._is_stopping() and self._ledger.has_canceled
        record = replace(
            self._record(),
            status=BatchStatus.CANCELED if canceled else BatchStatus.COMPLETED,
            error_code=self._error if canceled and not (self._hard or self._soft) else None,
            finished_at=now,
            callback_started=given.callback is not None,
        )
        workflow.upsert_memo({naming.MEMO_RECORD: record})
        workflow.upsert_search_attributes(
            [
                naming.FINISHED_AT.value_set(now),
                *([naming.ERROR_CODE.value_set(record.error_code)] if record.error_code else []),
            ]
        )
        if given.callback is not None:
            await self._start_callback(given.callback, record)
        for place in given.places:
            await self._release(place.admission_id, place.token, record)
        await self._remove_items()
        return record

    async def _start_callback(self, target: CallbackTarget, record: BatchRecord) -> None:
        """Start the delivery; after a `reset` there is one already."""
        given = self._given
        try:
            await workflow.start_child_workflow(
                CallbackWorkflow.run,
                batch_callback_input(given, target, record),
                id=naming.callback_id(given.batch_id),
                task_queue=naming.CALLBACK_QUEUE,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                search_attributes=callback_attributes(given.user),
                memo={
                    naming.MEMO_RECORD: CallbackRecord(
                        task_id=given.batch_id, status=CallbackStatus.PENDING, url=target.url
                    )
                },
            )
        except WorkflowAlreadyStartedError:
            workflow.logger.info("callback_exists", extra={"batch_id": given.batch_id})

    async def _release(self, admission: str, token: str, record: BatchRecord) -> None:
        try:
            await workflow.get_external_workflow_handle(admission).signal(
                "release", args=[record.batch_id, token, record.gpu_seconds]
            )
        except FailureError:
            # Already closed: it forgot the place with everything else.
            workflow.logger.debug("admission_gone", extra={"batch_id": record.batch_id})

    async def _remove_items(self) -> None:
        """The prompts are with the tasks now, where their owner can delete them; retention gets what is left here."""
        try:
            await workflow.execute_activity_method(
                BatchActivities.remove_batch_items,
                RemoveItemsInput(items_key=self._given.items_key),
                start_to_close_timeout=_STORE_TRY,
                schedule_to_close_timeout=_STORE_PATIENCE,
            )
        except ActivityError:
            workflow.logger.warning("batch_items_kept", extra={"batch_id": self._given.batch_id})


def batch_callback_input(given: BatchInput, target: CallbackTarget, record: BatchRecord) -> CallbackInput:
    """What a delivery of an ended batch starts with, the first one and every later one."""
    finished_at = record.finished_at or record.updated_at
    return CallbackInput(
        task_id=given.batch_id,
        tenant=given.user.tenant,
        url=target.url,
        webhook_id=given.batch_id,
        # The body is ours; of the event only its kind counts.
        event=CallbackEvent(
            type="batch.completed",
            timestamp=finished_at,
            task_id=given.batch_id,
            status=TaskStatus.SUCCEEDED,
            created_at=given.accepted_at,
            finished_at=finished_at,
        ),
        schedule_seconds=target.schedule_seconds or CALLBACK_SCHEDULE_SECONDS,
        body=callback_body(given, record),
    )


def callback_body(given: BatchInput, record: BatchRecord) -> str:
    """What the receiver gets when a batch has ended."""
    finished_at = record.finished_at or record.updated_at
    return json.dumps(
        {
            "type": "batch.completed",
            "timestamp": _wire_time(finished_at),
            "batch_id": given.batch_id,
            "status": record.status.value,
            "counts": {status.value: count for status, count in item_counts(record.states).items()},
            "created_at": _wire_time(given.accepted_at),
            "finished_at": _wire_time(finished_at),
            "error_code": record.error_code.value if record.error_code else None,
            "links": {"self": given.url},
        },
        separators=(",", ":"),
    )


def _wire_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
