"""Who may submit: places, rate and allowance of one user, or of one tenant above its end users.

There is no counter in any database. This workflow is the only writer of its account, so its limits are exact over
any number of API processes, and a refusal comes from an update validator, which leaves nothing in the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeAlias, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, FailureError

with workflow.unsafe.imports_passed_through():
    import workflows.naming as naming
    from workflows.admission_ledger import AdmissionLedger
    from workflows.contracts import AdmissionActivities
    from workflows.quotas import (
        AdmissionInput,
        AdmissionState,
        AdmitRequest,
        ListRunningTasksInput,
        ListUsedInput,
        Refusal,
        Usage,
        UsedAmount,
    )
    from workflows.tasks import AdmissionPlace

_QUICK_LISTING = timedelta(seconds=1)
"""Inside the first workflow task; waiting admits are refused after it."""
_PATIENT_LISTING = timedelta(seconds=60)

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Listing: TypeAlias = Callable[[AdmissionActivities, _Request], Awaitable[_Answer]]


def _error(refusal: Refusal) -> ApplicationError:
    return ApplicationError(
        f"no place: {refusal.reason}",
        refusal,
        type=refusal.reason,
        non_retryable=True,
        category=ApplicationErrorCategory.BENIGN,
    )


@workflow.defn(name="AdmissionWorkflow")
class AdmissionWorkflow:
    """One run per active user; started by the first `admit`.

    Command order: the listing of running tasks as a local activity (and, with an allowance, of what was used), so
    that the first admit is answered in the first workflow task; then one timer at a time, which runs out at the
    earliest moment at which the run could close. Admits, releases and withdrawals issue no commands of their own.
    """

    @workflow.init
    def __init__(self, start: AdmissionInput) -> None:
        self._start = start
        self._ledger = AdmissionLedger(start.state or AdmissionState(active_at=workflow.now()))
        self._listed = start.state is not None
        self._wanted_period: float | None = None
        """Period of an allowance whose used amount is not known."""
        self._recount = False
        self._listings = 0
        self._blocked = False
        """The quick listing failed: admits are refused until the patient one is through."""

    @workflow.run
    async def run(self, start: AdmissionInput) -> None:
        """Keep the account until it can be forgotten, continuing as new when the history is long.

        `start` is taken by the constructor, before any handler runs.
        """
        idle = timedelta(seconds=start.idle_close_seconds)
        while True:
            await self._learn()
            if self._is_long():
                await self._continue()
                continue
            with suppress(asyncio.TimeoutError):
                await workflow.wait_condition(self._has_work, timeout=self._until_look(idle), timeout_summary="idle")
            if self._has_work() or self._ledger.closable_at(idle) > workflow.now():
                continue
            if self._ledger.has_places:
                # Nothing came or went for so long: one of them may have leaked.
                self._recount = True
            elif workflow.all_handlers_finished():
                if self._ledger.counted_period_seconds is not None:
                    workflow.upsert_memo({naming.MEMO_RECORD: self._ledger.closing_usage(workflow.now())})
                return

    @workflow.update
    async def admit(self, request: AdmitRequest) -> AdmissionPlace:
        """Give a task a place, or the one that it already holds.

        Raises:
            ApplicationError: `type` is a `RefusalReason`, first detail a `Refusal`.
        """
        known = self._knows(request)
        place = self._ledger.take(request, workflow.now(), tentative=not known)
        if not known:
            await self._until_known(request)
            confirmed = self._ledger.confirm(request, workflow.now())
            if isinstance(confirmed, Refusal):
                raise _error(confirmed)
            place = confirmed
        return AdmissionPlace(admission_id=workflow.info().workflow_id, token=place.token)

    @admit.validator
    def refuse(self, request: AdmitRequest) -> None:
        """Refuse without history."""
        now = workflow.now()
        if self._blocked and not self._knows(request):
            raise _error(self._ledger.not_ready(now))
        refusal = self._ledger.refusal(request, now)
        if refusal is not None:
            raise _error(refusal)

    @workflow.signal(name="release")
    def release(self, task_id: str, token: str, gpu_seconds: float = 0.0) -> None:
        """The task has ended; idempotent."""
        self._ledger.release(task_id, token, gpu_seconds, workflow.now())

    @workflow.signal(name="withdraw")
    def withdraw(self, task_id: str, claim: str) -> None:
        """A submission will not start its task, or gave up waiting for its `admit`; idempotent."""
        self._ledger.withdraw(task_id, claim, workflow.now())

    @workflow.signal(name="reset_quota")
    def reset_quota(self) -> None:
        """Operator: fill the bucket, forget the used amount, and make the places agree with the running tasks."""
        self._ledger.reset(workflow.now())
        self._recount = True

    @workflow.query(name="usage")
    def usage(self, at: datetime | None = None) -> Usage:
        """What is held, left and used at a time; by default that of the last event."""
        return self._ledger.usage(at or workflow.now())

    def _knows(self, request: AdmitRequest) -> bool:
        return self._listed and self._ledger.knows_used(request.limits.allowance)

    async def _until_known(self, request: AdmitRequest) -> None:
        """Wait for the listings that this request needs; they are bounded, so no timer is."""
        while not self._knows(request):
            if self._blocked:
                self._ledger.withdraw(request.task_id, request.claim, workflow.now())
                raise _error(self._ledger.not_ready(workflow.now()))
            if request.limits.allowance is not None:
                self._wanted_period = request.limits.allowance.period_seconds
            await workflow.wait_condition(partial(self._heard_since, self._listings))

    def _heard_since(self, listings: int) -> bool:
        return self._blocked or self._listings > listings

    def _must_learn(self) -> bool:
        return not self._listed or self._recount or self._wanted_period is not None

    def _is_long(self) -> bool:
        info = workflow.info()
        limit = self._start.continue_after_events
        return info.is_continue_as_new_suggested() or bool(limit and info.get_current_history_length() >= limit)

    def _has_work(self) -> bool:
        return self._must_learn() or self._is_long()

    def _until_look(self, idle: timedelta) -> timedelta:
        """With places held a look per idle time; without, when the run may close."""
        until = idle if self._ledger.has_places else self._ledger.closable_at(idle) - workflow.now()
        return max(until, timedelta(seconds=1))

    async def _continue(self) -> None:
        await workflow.wait_condition(lambda: self._must_learn() or workflow.all_handlers_finished())
        if not self._must_learn():
            workflow.continue_as_new(replace(self._start, state=self._ledger.state()))

    async def _learn(self) -> None:
        """Learn from visibility which tasks run and, if an allowance asks for it, what was used."""
        while self._must_learn():
            period, self._wanted_period, self._recount = self._wanted_period, None, False
            self._ledger.begin_listing()
            holders = ListRunningTasksInput(admission_id=workflow.info().workflow_id, user_hash=self._start.user_hash)
            running = await self._quickly(AdmissionActivities.list_running_tasks, holders)
            if running is None and self._listed and period is None:
                # Nobody waits for this count; the next one will do.
                self._ledger.end_listing()
                continue
            if running is None:
                running = await self._patiently(AdmissionActivities.list_running_tasks, holders)
            ended: tuple[str, ...] = ()
            if period is not None:
                used = await self._used_amount(period)
                self._ledger.learn_used(used, period, workflow.now())
                ended = used.recent
            self._ledger.adopt(running, workflow.now(), ended=ended)
            self._listed, self._blocked = True, False
            self._listings += 1

    async def _used_amount(self, period_seconds: float) -> UsedAmount:
        request = ListUsedInput(
            admission_id=workflow.info().workflow_id,
            user_hash=self._start.user_hash,
            since=self._ledger.counted_since(period_seconds, workflow.now()),
        )
        used = await self._quickly(AdmissionActivities.list_used, request)
        return used if used is not None else await self._patiently(AdmissionActivities.list_used, request)

    async def _quickly(self, listing: _Listing[_Request, _Answer], request: _Request) -> _Answer | None:
        """Ask inside the workflow task, while admits wait; None when that does not work out."""
        try:
            return await workflow.execute_local_activity_method(
                listing,
                request,
                schedule_to_close_timeout=_QUICK_LISTING,
                retry_policy=RetryPolicy(maximum_attempts=1),
            )
        except FailureError:
            # An error comes bare; a time-out comes as an ActivityError, and bare in a replay.
            return None

    async def _patiently(self, listing: _Listing[_Request, _Answer], request: _Request) -> _Answer:
        """Ask for as long as it takes; admits that need the answer are refused meanwhile."""
        self._blocked = True
        return await workflow.execute_activity_method(
            listing,
            request,
            start_to_close_timeout=_PATIENT_LISTING,
            retry_policy=RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30)),
        )
