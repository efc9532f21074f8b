"""The outbox of a task: its terminal event, handed to a CallbackWorkflow in the same workflow task as the end."""

from __future__ import annotations

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from workflows import naming
from workflows.callback import CallbackWorkflow
from workflows.policies import CALLBACK_SCHEDULE_SECONDS
from workflows.states import TaskStatus
from workflows.tasks import (
    CallbackEvent,
    CallbackInput,
    CallbackRecord,
    CallbackStatus,
    CallbackTarget,
    GenerationInput,
    TaskEvent,
    TaskRecord,
    User,
)

_EVENTS = {
    TaskStatus.SUCCEEDED: TaskEvent.SUCCEEDED,
    TaskStatus.FAILED: TaskEvent.FAILED,
    TaskStatus.TIMEOUT: TaskEvent.TIMEOUT,
    TaskStatus.CANCELED: TaskEvent.CANCELED,
}


def subscribed(target: CallbackTarget | None, status: TaskStatus) -> bool:
    """Whether the client asked to hear of this end."""
    return target is not None and _EVENTS[status] in target.events


def callback_event(record: TaskRecord, labels: tuple[str, ...]) -> CallbackEvent:
    """The terminal event of a finished task."""
    finished_at = record.finished_at or record.updated_at
    has_clip = record.artifact is not None and record.status is TaskStatus.SUCCEEDED
    return CallbackEvent(
        type=f"task.{_EVENTS[record.status]}",
        timestamp=finished_at,
        task_id=record.task_id,
        status=record.status,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=finished_at,
        artifact_expires_at=record.artifact.expires_at if record.artifact is not None and has_clip else None,
        error_code=record.error_code,
        error_message=record.error_message,
        labels=labels,
    )


def callback_input(plan: GenerationInput, target: CallbackTarget, record: TaskRecord) -> CallbackInput:
    """What a delivery of a finished task's terminal event starts with, the first one and every later one."""
    return CallbackInput(
        task_id=record.task_id,
        tenant=plan.user.tenant,
        url=target.url,
        webhook_id=record.task_id,
        event=callback_event(record, plan.labels),
        schedule_seconds=target.schedule_seconds or CALLBACK_SCHEDULE_SECONDS,
    )


def callback_attributes(user: User) -> TypedSearchAttributes:
    """Search attributes that a delivery starts with."""
    return TypedSearchAttributes(
        [
            SearchAttributePair(naming.CALLBACK_STATUS, CallbackStatus.PENDING),
            SearchAttributePair(naming.USER_ID, naming.user_hash(user)),
        ]
    )


async def start_callback(plan: GenerationInput, target: CallbackTarget, record: TaskRecord) -> None:
    """Start the delivery of a task's terminal event; it outlives the run.

    After a `reset` the delivery exists already and is left alone: a second one is asked for by the API.
    """
    first = CallbackRecord(task_id=record.task_id, status=CallbackStatus.PENDING, url=target.url)
    try:
        await workflow.start_child_workflow(
            CallbackWorkflow.run,
            callback_input(plan, target, record),
            id=naming.callback_id(record.task_id),
            task_queue=naming.CALLBACK_QUEUE,
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            search_attributes=callback_attributes(plan.user),
            memo={naming.MEMO_RECORD: first},
        )
    except WorkflowAlreadyStartedError:
        workflow.logger.info("callback_exists", extra={"task_id": record.task_id})
