"""One terminal event on its way to one receiver: the outbox is this workflow's own history.

Each activity call is one HTTP attempt and the schedule between attempts is durable timers, so nothing is lost
with a worker, and a dead receiver costs timers and no slots.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ApplicationErrorCategory,
    FailureError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from workflows.contracts import CallbackActivities
    from workflows.naming import CALLBACK_QUEUE, CALLBACK_STATUS, MEMO_RECORD, endpoint_hash
    from workflows.policies import (
        CALLBACK_MAX_RETRY_AFTER_SECONDS,
        CALLBACK_SCHEDULE_SECONDS,
        JITTER,
        next_delivery_delay,
    )
    from workflows.tasks import (
        CallbackInput,
        CallbackRecord,
        CallbackStatus,
        DeliverCallbackInput,
        DeliveryAttempt,
        DeliveryOutcome,
    )

CALLBACK_FAILED: Final = "CALLBACK_FAILED"
"""`type` of the failure that a given up delivery closes with."""

START_TO_CLOSE: Final = timedelta(seconds=30)
"""Hard wall of one attempt: 10 s of HTTP, a merge window of 2 s twice, and room."""
HEARTBEAT_TIMEOUT: Final = timedelta(seconds=5)
"""How soon a worker is noticed that is lost in an attempt after the first. An attempt heartbeats from its second second
on, so a quick one sends none."""

MAX_LOGGED_ATTEMPTS: Final = 30
"""The first and the newest attempts stay in the record; the replies kept are at most 2 KB each."""

# Attempts are unlimited because they only count workers that died and bugs that a deploy repairs: what the
# receiver answers is a result. An oversized payload alone would never get better.
_ATTEMPT_RETRIES: Final = RetryPolicy(
    initial_interval=timedelta(milliseconds=100),
    maximum_interval=timedelta(minutes=1),
    non_retryable_error_types=["PayloadsTooLarge", "PayloadSizeError"],
)
_UNDELIVERED: Final = frozenset({CallbackStatus.PENDING, CallbackStatus.RETRYING})


@workflow.defn(name="CallbackWorkflow")
class CallbackWorkflow:
    """Deliver one event, or give it up.

    Started with search attribute `CallbackStatus` = PENDING. Commands per round: timer (not before the first
    attempt), `deliver_callback` (the first one inside the workflow task), then memo `record` and, only when it
    changes, `CallbackStatus`. Closes

    - Completed: delivered.
    - Failed with type `CALLBACK_FAILED` (benign): schedule used up, or the receiver said never again.
    - Canceled: by an operator. An attempt under way is stopped first, and the first one is waited for; if it was
      delivered all the same, Completed.

    Memo `record` (a `CallbackRecord`) holds the body and the attempts in all three cases. A terminated run keeps
    the record of its last attempt.
    """

    @workflow.init
    def __init__(self, given: CallbackInput) -> None:
        self._given = given
        self._schedule = given.schedule_seconds or CALLBACK_SCHEDULE_SECONDS
        self._status = CallbackStatus.RETRYING if given.attempts else CallbackStatus.PENDING
        self._body = given.body
        self._attempts = given.attempts
        self._failures = given.failures
        self._deferrals = given.deferrals
        self._due: datetime | None = given.next_attempt_at
        self._gives_up_at = given.gives_up_at
        self._wake = False
        self._requested = False

    @workflow.run
    async def run(self, given: CallbackInput) -> CallbackRecord:
        """Attempt, wait, attempt, until delivered or given up.

        Raises:
            ApplicationError: given up, type `CALLBACK_FAILED`.
        """
        if self._due is None:
            self._due = self._after(next_delivery_delay(self._schedule, self._failures, workflow.random()) or 0.0)
        try:
            while self._status in _UNDELIVERED:
                await self._wait_until_due()
                self._settle(await self._attempt())
                # A cancel that met a finished attempt raises nowhere, so it is asked for.
                if self._status in _UNDELIVERED and workflow.cancellation_reason() is not None:
                    raise asyncio.CancelledError  # noqa: TRY301 - ends like the cancels that do raise
        except (asyncio.CancelledError, ActivityError) as error:
            if is_cancelled_exception(error):
                self._close(CallbackStatus.FAILED)
            raise
        if self._status is CallbackStatus.FAILED:
            raise ApplicationError(
                f"callback of {given.task_id} given up: {self._attempts[-1].error_code if self._attempts else None}",
                type=CALLBACK_FAILED,
                non_retryable=True,
                category=ApplicationErrorCategory.BENIGN,
            )
        return self._record()

    @workflow.signal(name="retry_now")
    def retry_now(self) -> None:
        """Attempt at once instead of waiting. Such an attempt uses up nothing of the schedule."""
        self._wake = self._requested = True

    async def _wait_until_due(self) -> None:
        if workflow.info().is_continue_as_new_suggested() and not self._wake:
            workflow.continue_as_new(self._carried())
        remaining = (self._due or workflow.now()) - workflow.now()
        if remaining > timedelta(0) and not self._wake:
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self._wake, timeout=remaining, timeout_summary="until the next delivery attempt"
                )
        self._wake = False

    async def _attempt(self) -> DeliveryAttempt:
        given = self._given
        number = self._attempts[-1].number + 1 if self._attempts else 1
        started_at = workflow.now()
        delivery = DeliverCallbackInput(
            tenant=given.tenant,
            url=given.url,
            webhook_id=given.webhook_id,
            event=given.event,
            number=number,
            body=self._body,
            deferrals=self._deferrals,
        )
        if number == 1 and not self._deferrals and (attempt := await self._attempt_at_once(delivery)) is not None:
            return attempt
        try:
            return await workflow.execute_activity_method(
                CallbackActivities.deliver_callback,
                delivery,
                task_queue=CALLBACK_QUEUE,
                start_to_close_timeout=START_TO_CLOSE,
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                retry_policy=_ATTEMPT_RETRIES,
                # The lock step that a cancel needs: either the attempt was stopped, or its outcome is known.
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                priority=Priority(fairness_key=endpoint_hash(given.tenant, given.url)),
                summary=f"delivery attempt {number}",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return DeliveryAttempt(
                number=number,
                outcome=DeliveryOutcome.RETRY,
                started_at=started_at,
                duration_ms=round((workflow.now() - started_at) / timedelta(milliseconds=1)),
                error_code="INTERNAL",
            )

    async def _attempt_at_once(self, delivery: DeliverCallbackInput) -> DeliveryAttempt | None:
        """The first attempt, inside the workflow task that it comes with: most deliveries need no other.

        None: the worker had no place for it, or it failed with an error. Then the attempt is made through the queue,
        where the server shows it, tries it again and takes turns between endpoints.
        """
        # A cancel that is there already forbids the attempt. It may have been made all the same, in a workflow task
        # that the cancel made fail.
        delivery = replace(delivery, recall=workflow.cancellation_reason() is not None)
        attempt = workflow.start_local_activity_method(
            CallbackActivities.deliver_callback,
            delivery,
            schedule_to_close_timeout=START_TO_CLOSE,
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary="delivery attempt 1",
        )
        # A cancel waits for it, which takes 14 s at most: a stopped local activity tells no outcome.
        while not attempt.done():
            with contextlib.suppress(asyncio.CancelledError):
                await workflow.wait_condition(attempt.done)
        try:
            return attempt.result()
        except FailureError:
            # An error comes bare; a time-out comes as an ActivityError, and bare in a replay.
            if workflow.cancellation_reason() is not None:
                raise asyncio.CancelledError from None
            return None

    def _settle(self, attempt: DeliveryAttempt) -> None:
        """Take the outcome of an attempt into the state and into the memo."""
        if self._gives_up_at is None:
            # Counted from the first answer: a callback worker that was down for a week costs nobody a callback.
            self._gives_up_at = self._after(sum(self._schedule) * (1 + JITTER) + CALLBACK_MAX_RETRY_AFTER_SECONDS)
        if attempt.outcome is DeliveryOutcome.DEFERRED:
            self._defer(attempt)
            return
        self._deferrals = 0
        self._body = self._body or attempt.body
        self._attempts = _bounded((*self._attempts, replace(attempt, body=None)))
        match attempt.outcome:
            case DeliveryOutcome.DELIVERED:
                self._close(CallbackStatus.SUCCEEDED)
            case DeliveryOutcome.GIVE_UP:
                self._close(CallbackStatus.FAILED)
            case DeliveryOutcome.RETRY:
                self._schedule_next(attempt)

    def _defer(self, attempt: DeliveryAttempt) -> None:
        self._deferrals += 1
        if self._gives_up_at is not None and workflow.now() >= self._gives_up_at:
            self._close(CallbackStatus.FAILED)
            return
        # Spread upwards, never earlier: tasks that one open breaker sent away must not come back as one wave.
        wait = max(attempt.retry_after_seconds or 0.0, 1.0)
        self._due = self._after(wait * workflow.random().uniform(1.0, 1.5))
        workflow.upsert_memo({MEMO_RECORD: self._record()})

    def _schedule_next(self, attempt: DeliveryAttempt) -> None:
        if not self._requested:
            self._failures += 1
        self._requested = False
        delay = next_delivery_delay(self._schedule, self._failures, workflow.random())
        if delay is None:
            self._close(CallbackStatus.FAILED)
            return
        # `Retry-After` is a floor, spread upwards for the same reason as in `_defer`.
        floor = min(attempt.retry_after_seconds or 0.0, CALLBACK_MAX_RETRY_AFTER_SECONDS)
        self._due = self._after(max(delay, floor * workflow.random().uniform(1.0, 1.1)))
        self._show(CallbackStatus.RETRYING)

    def _close(self, status: CallbackStatus) -> None:
        self._due = None
        self._show(status)

    def _show(self, status: CallbackStatus) -> None:
        """Make the state readable without a worker. Attribute upserts are billed, so only changes are sent."""
        if status is not self._status:
            self._status = status
            workflow.upsert_search_attributes([CALLBACK_STATUS.value_set(status)])
        workflow.upsert_memo({MEMO_RECORD: self._record()})

    def _record(self) -> CallbackRecord:
        return CallbackRecord(
            task_id=self._given.task_id,
            status=self._status,
            url=self._given.url,
            body=self._body,
            attempts=self._attempts,
            next_attempt_at=self._due,
        )

    def _carried(self) -> CallbackInput:
        return replace(
            self._given,
            body=self._body,
            attempts=self._attempts,
            failures=self._failures,
            deferrals=self._deferrals,
            next_attempt_at=self._due,
            gives_up_at=self._gives_up_at,
        )

    @staticmethod
    def _after(seconds: float) -> datetime:
        return workflow.now() + timedelta(seconds=seconds)


def _bounded(attempts: tuple[DeliveryAttempt, ...]) -> tuple[DeliveryAttempt, ...]:
    if len(attempts) <= MAX_LOGGED_ATTEMPTS:
        return attempts
    return (attempts[0], *attempts[-(MAX_LOGGED_ATTEMPTS - 1) :])
