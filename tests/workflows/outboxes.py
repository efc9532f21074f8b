"""Deliveries for workflow tests: started as the job starts them, answered by a script or by a real receiver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowHandle
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy

from workflows import naming
from workflows.callback import CallbackWorkflow
from workflows.contracts import DELIVER_CALLBACK, CallbackActivities
from workflows.states import TaskStatus
from workflows.tasks import (
    CallbackEvent,
    CallbackInput,
    CallbackRecord,
    CallbackStatus,
    DeliverCallbackInput,
    DeliveryAttempt,
    DeliveryOutcome,
)

Delivery = WorkflowHandle[CallbackWorkflow, CallbackRecord]


async def start_delivery(
    client: Client,
    url: str = "https://receiver.example/",
    *,
    schedule: tuple[float, ...] = (0.0, 1.0, 2.0),
    task_timeout: timedelta | None = None,
) -> Delivery:
    """Start the callback of a fresh task."""
    task_id = f"t{uuid4().hex[:26]}"
    now = datetime.now(UTC)
    event = CallbackEvent(
        type="task.succeeded",
        timestamp=now,
        task_id=task_id,
        status=TaskStatus.SUCCEEDED,
        created_at=now,
        started_at=now,
        finished_at=now,
        artifact_expires_at=now,
    )
    return await client.start_workflow(
        CallbackWorkflow.run,
        CallbackInput(
            task_id=task_id, tenant="acme", url=url, webhook_id=task_id, event=event, schedule_seconds=schedule
        ),
        id=naming.callback_id(task_id),
        task_queue=naming.CALLBACK_QUEUE,
        task_timeout=task_timeout,
        id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
        search_attributes=TypedSearchAttributes(
            [SearchAttributePair(naming.CALLBACK_STATUS, CallbackStatus.PENDING.value)]
        ),
        memo={naming.MEMO_RECORD: CallbackRecord(task_id=task_id, status=CallbackStatus.PENDING, url=url)},
    )


async def record_of(delivery: Delivery) -> CallbackRecord:
    """The memo `record`, as a reader decodes it."""
    return await (await delivery.describe()).memo_value(naming.MEMO_RECORD, type_hint=CallbackRecord)


def status_of(description: WorkflowExecutionDescription) -> str | None:
    """The search attribute `CallbackStatus`."""
    return description.typed_search_attributes.get(naming.CALLBACK_STATUS)


Answer = Callable[[DeliverCallbackInput], Awaitable[DeliveryAttempt]]


def answer(
    outcome: DeliveryOutcome,
    *,
    status: int | None = None,
    error: str | None = None,
    retry_after: float | None = None,
    reply: str | None = None,
) -> Answer:
    """Come to this outcome at once."""

    async def act(delivery: DeliverCallbackInput) -> DeliveryAttempt:
        return DeliveryAttempt(
            number=delivery.number,
            outcome=outcome,
            started_at=datetime.now(UTC),
            duration_ms=1,
            status_code=status,
            error_code=error,
            retry_after_seconds=retry_after,
            reply=reply,
            body='{"the":"body"}' if delivery.body is None else None,
        )

    return act


DELIVERED = answer(DeliveryOutcome.DELIVERED, status=200)
REFUSED = answer(DeliveryOutcome.RETRY, status=503, error="HTTP_STATUS")


class ScriptedDelivery(CallbackActivities):
    """Each attempt comes to the next answer; the last one is repeated.

    What was answered stays answered: on a machine so busy that the server starts an activity again, its second run
    gets the same answer and counts as no call, as long as the first did not fail.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.calls: list[DeliverCallbackInput] = []
        self._given: dict[tuple[str | None, str], DeliveryAttempt] = {}

    @activity.defn(name=DELIVER_CALLBACK)
    async def deliver_callback(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        info = activity.info()
        run = info.workflow_run_id, info.activity_id
        if run not in self._given:
            act = self.answers[min(len(self.calls), len(self.answers) - 1)]
            self.calls.append(delivery)
            self._given[run] = await act(delivery)
        return self._given[run]
