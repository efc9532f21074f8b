"""The API's side of admission: ask for places in bounded time, heal leaked ones, give back what is not used.

A place can leak when an API process dies between admit and start, or when a task ends without telling (terminated,
or its admission was down). Nobody scans for that: it is looked at when a refusal is about to be sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final
from uuid import uuid4

from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import Priority, WorkflowIDConflictPolicy
from temporalio.converter import value_to_type
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from api.control_pulse import ControlPulse
from api.open_admissions import OpenAdmissions
from api.problems import (
    AdmissionUnavailableError,
    GatewayError,
    QuotaExhaustedError,
    RateLimitedError,
    TooManyPendingTasksError,
)
from api.stale_places import stale_places
from workflows.admission import AdmissionWorkflow
from workflows.naming import CONTROL_QUEUE, admission_id, tenant_admission_id, user_hash
from workflows.quotas import (
    AdmissionInput,
    AdmitRequest,
    Refusal,
    RefusalReason,
    TierLimits,
)
from workflows.tasks import AdmissionPlace, User

ADMIT_TIMEOUT: Final = timedelta(seconds=3)
"""Without a control worker."""
ADMIT_AT_MOST: Final = timedelta(seconds=15)
"""While control workers are at work, and have others to answer first."""
READY_WITHIN: Final = timedelta(seconds=5)
"""How long a fresh admission may take to list the running tasks."""
WITHDRAW_TIMEOUT: Final = timedelta(seconds=0.4)
"""Kept back from the admit timeout, so that giving up leaves no place behind."""
_PASSING: Final = frozenset(
    {
        RPCStatusCode.FAILED_PRECONDITION,
        RPCStatusCode.ABORTED,
        RPCStatusCode.UNAVAILABLE,
        # The run closed between start and update.
        RPCStatusCode.NOT_FOUND,
    }
)
"""Seen while a run closes or continues as new, or the server restarts. An admit can be sent again safely."""
_CLOSED_MEANWHILE: Final = "AcceptedUpdateCompletedWorkflow"
_HEALABLE: Final = frozenset({RefusalReason.TOO_MANY_PENDING_TASKS, RefusalReason.QUOTA_EXHAUSTED})


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A submission that may start its task: `places` go into the task's input."""

    task_id: str
    claim: str
    places: tuple[AdmissionPlace, ...]


@dataclass(frozen=True, kw_only=True)
class _Level:
    """One admission that a submission has to pass."""

    admission_id: str
    user_hash: str
    limits: TierLimits

    @property
    def of_tenant(self) -> bool:
        return not self.user_hash


@dataclass(frozen=True)
class _Door:
    """Where admits go through."""

    client: Client
    pulse: ControlPulse
    running: OpenAdmissions

    def heard(self, level: _Level) -> None:
        """A control worker has answered for this admission."""
        self.pulse.heard()
        self.running.note(level.admission_id)


class _RefusedOnceError(Exception):
    """One admit was refused; its places may still turn out to be stale."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


async def admit(
    client: Client,
    user: User,
    *,
    task_id: str,
    limits: TierLimits,
    tenant_limits: TierLimits | None = None,
    estimated_gpu_seconds: float = 0.0,
    timeout: timedelta = ADMIT_TIMEOUT,
    pulse: ControlPulse | None = None,
    running: OpenAdmissions | None = None,
) -> Grant:
    """Get a place for a task from its user and, with `tenant_limits`, from the tenant above.

    The user comes first: a flood of one end user is refused there and never reaches the account that it shares
    with others. A task that already holds its places gets them again and pays nothing.

    Raises:
        TooManyPendingTasksError: all places are held, and their holders are real.
        RateLimitedError: the bucket is empty.
        QuotaExhaustedError: the allowance is used up.
        AdmissionUnavailableError: no answer within `timeout`, or within `ADMIT_AT_MOST` while control workers are at
            work; `pulse` tells.

    `running` remembers which admissions can be asked without starting them.
    """
    levels = [_Level(admission_id=admission_id(user), user_hash=user_hash(user), limits=limits)]
    if tenant_limits is not None:
        levels.append(_Level(admission_id=tenant_admission_id(user.tenant), user_hash="", limits=tenant_limits))
    claim = uuid4().hex
    door = _Door(client, pulse or ControlPulse(client), running or OpenAdmissions())
    places: list[AdmissionPlace] = []
    asked: list[str] = []
    try:
        async with door.pulse.limit(at_least=timeout - WITHDRAW_TIMEOUT, at_most=ADMIT_AT_MOST - WITHDRAW_TIMEOUT):
            for level in levels:
                asked.append(level.admission_id)
                request = AdmitRequest(
                    task_id=task_id, claim=claim, limits=level.limits, estimated_gpu_seconds=estimated_gpu_seconds
                )
                places.append(await _admit(door, level, request))
    except GatewayError:
        # Refused: only the levels before hold something, and a refusal must not leave an event behind.
        await _withdraw(client, asked[: len(places)], task_id, claim)
        raise
    except TimeoutError as error:
        # The admit may still be executed when a worker comes back: the claim is withdrawn ahead of it.
        await _withdraw(client, asked, task_id, claim)
        raise AdmissionUnavailableError from error
    except BaseException:
        await _withdraw(client, asked, task_id, claim)
        raise
    return Grant(task_id=task_id, claim=claim, places=tuple(places))


async def withdraw(client: Client, grant: Grant) -> None:
    """Give the places back when this submission certainly does not start the task; best effort.

    Places that another submission of the same task was given too stay with that one.
    """
    await _withdraw(client, [place.admission_id for place in grant.places], grant.task_id, grant.claim)


async def _admit(door: _Door, level: _Level, request: AdmitRequest) -> AdmissionPlace:
    """Admit; on a refusal look once whether the places are really held."""
    try:
        try:
            return await _ask(door, level, request)
        except _RefusedOnceError as refused:
            if refused.refusal.reason not in _HEALABLE:
                raise
            stale = await stale_places(door.client, refused.refusal, user_hash=level.user_hash)
            if not stale:
                raise
            return await _ask(door, level, replace(request, stale=stale))
    except _RefusedOnceError as refused:
        raise _problem(level, refused.refusal) from None


def _problem(level: _Level, refusal: Refusal) -> GatewayError:
    """What the client is told. A tenant's places belong to other end users, so their ids are left out."""
    whose = "The tenant" if level.of_tenant else "The user"
    wait = refusal.retry_after_seconds
    match refusal.reason:
        case RefusalReason.TOO_MANY_PENDING_TASKS:
            return TooManyPendingTasksError(
                f"{whose} has {len(refusal.held)} unfinished tasks; the limit is {level.limits.max_pending}.",
                retry_after_seconds=wait,
                task_ids=() if level.of_tenant else [place.task_id for place in refusal.held],
            )
        case RefusalReason.RATE_LIMITED:
            return RateLimitedError(
                f"{whose} may submit {level.limits.rate_per_minute:g} tasks per minute, {level.limits.burst} at once.",
                retry_after_seconds=wait,
            )
        case RefusalReason.QUOTA_EXHAUSTED:
            return QuotaExhaustedError(
                f"{whose} has used up the allowance of this period; the next one starts in {wait:.0f} s.",
                retry_after_seconds=wait,
            )
        case RefusalReason.NOT_READY | RefusalReason.WITHDRAWN:
            return AdmissionUnavailableError()


async def _ask(door: _Door, level: _Level, request: AdmitRequest) -> AdmissionPlace:
    """Send one admit until it is answered; the caller's time limit is the only end."""
    update_id = f"{request.claim}-{'heal' if request.stale else 'admit'}"
    delay, not_ready, ready_until = 0.02, 0, time.monotonic() + READY_WITHIN.total_seconds()
    while True:
        try:
            place = await _send(door, level, request, f"{update_id}-{not_ready}" if not_ready else update_id)
        except WorkflowUpdateFailedError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type in RefusalReason.__members__:
                door.heard(level)
                if cause.type == RefusalReason.NOT_READY and time.monotonic() < ready_until:
                    # Asked again under another id: the answer to this one stays what it was.
                    not_ready += 1
                    delay = max(delay, 0.2)
                else:
                    raise _RefusedOnceError(value_to_type(Refusal, cause.details[0])) from error
            elif not (isinstance(cause, ApplicationError) and cause.type == _CLOSED_MEANWHILE):
                raise
        except RPCError as error:
            if error.status not in _PASSING:
                raise
        else:
            door.heard(level)
            return place
        await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries, guards nothing
        delay = min(delay * 2, 0.5)


async def _send(door: _Door, level: _Level, request: AdmitRequest, update_id: str) -> AdmissionPlace:
    with _cancellation_kept():
        if level.admission_id in door.running:
            handle = door.client.get_workflow_handle(level.admission_id)
            try:
                return await handle.execute_update(AdmissionWorkflow.admit, request, id=update_id)
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise
                door.running.forget(level.admission_id)
        return await _send_with_start(door.client, level, request, update_id)


async def _send_with_start(client: Client, level: _Level, request: AdmitRequest, update_id: str) -> AdmissionPlace:
    start = WithStartWorkflowOperation(
        AdmissionWorkflow.run,
        AdmissionInput(user_hash=level.user_hash),
        id=level.admission_id,
        task_queue=CONTROL_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        # A person waits for the answer: not behind a burst of jobs that start on the same queue.
        priority=Priority(priority_key=1),
        static_summary="Places, rate and allowance of a tenant" if level.of_tenant else "Places, rate and allowance",
    )
    try:
        return await client.execute_update_with_start_workflow(
            AdmissionWorkflow.admit, request, start_workflow_operation=start, id=update_id
        )
    except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError):
        # The SDK keeps the same error for whoever asks for the handle and logs it if nobody does.
        with suppress(Exception, asyncio.CancelledError):
            await start.workflow_handle()
        raise


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """The SDK hides the cancellation that our time limit and our caller rely on in an error of its own."""
    try:
        yield
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise RPCError(str(error), RPCStatusCode.UNAVAILABLE, b"") from error


async def _withdraw(client: Client, admissions: Sequence[str], task_id: str, claim: str) -> None:
    """Best effort in bounded time: what it cannot reach is found stale later."""

    async def send(admission: str) -> None:
        with suppress(RPCError):
            await client.get_workflow_handle(admission).signal(AdmissionWorkflow.withdraw, args=[task_id, claim])

    with suppress(TimeoutError):
        async with asyncio.timeout(WITHDRAW_TIMEOUT.total_seconds()):
            await asyncio.gather(*(send(admission) for admission in admissions))
