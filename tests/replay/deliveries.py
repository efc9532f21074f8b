"""Branches of a delivery whose histories are kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from tests.replay.runs import all_runs
from tests.workflows.jobs import callback_worker
from tests.workflows.outboxes import DELIVERED, REFUSED, Answer, Delivery, ScriptedDelivery, answer, start_delivery
from workflows.callback import CallbackWorkflow
from workflows.tasks import DeliverCallbackInput, DeliveryAttempt, DeliveryOutcome

During = Callable[[ScriptedDelivery, Delivery], Awaitable[None]]


async def nothing(script: ScriptedDelivery, delivery: Delivery) -> None:
    """Only watch."""


async def attempted(script: ScriptedDelivery, times: int = 1) -> None:
    """Wait until the receiver was asked so many times."""
    while len(script.calls) < times:
        await asyncio.sleep(0.02)


async def wake(script: ScriptedDelivery, delivery: Delivery) -> None:
    """An operator does not want to wait."""
    await attempted(script)
    await delivery.signal(CallbackWorkflow.retry_now)


async def cancel(script: ScriptedDelivery, delivery: Delivery) -> None:
    """An operator cancels it between, or in, its attempts."""
    await attempted(script)
    await delivery.cancel()


async def cancel_second(script: ScriptedDelivery, delivery: Delivery) -> None:
    """An operator cancels it in an attempt through the queue."""
    await attempted(script, 2)
    await delivery.cancel()


async def crash(delivery: DeliverCallbackInput) -> DeliveryAttempt:
    """A bug in the sender that no retry helps."""
    raise ApplicationError("too large", type="PayloadsTooLarge", non_retryable=True)


async def crash_slowly(delivery: DeliverCallbackInput) -> DeliveryAttempt:
    """Take longer than a workflow task may, and fail."""
    await asyncio.sleep(2)
    return await crash(delivery)


async def slow(delivery: DeliverCallbackInput) -> DeliveryAttempt:
    """Take a while, and be refused."""
    await asyncio.sleep(0.5)
    return await REFUSED(delivery)


DEFERRED = answer(DeliveryOutcome.DEFERRED, error="BUSY", retry_after=1.0)
GONE = answer(DeliveryOutcome.GIVE_UP, status=410, error="GONE")


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way that a delivery goes."""

    answers: tuple[Answer, ...]
    schedule: tuple[float, ...] = (0.0, 0.2, 0.2)
    during: During = nothing
    task_timeout: timedelta | None = None
    """Of workflow tasks: while a local attempt lasts longer than this, the workflow hears of what comes meanwhile."""


BRANCHES: Mapping[str, Branch] = {
    "retried": Branch(answers=(REFUSED, DELIVERED)),
    "used-up": Branch(answers=(REFUSED,)),
    "gone": Branch(answers=(GONE,)),
    "deferred": Branch(answers=(DEFERRED, DELIVERED)),
    "deferred-for-good": Branch(answers=(DEFERRED,), schedule=(0.0, -86_400.0)),
    "sender-fails": Branch(answers=(crash, crash, DELIVERED)),
    "through-the-queue": Branch(answers=(crash, DELIVERED)),
    "retried-now": Branch(answers=(REFUSED, DELIVERED), schedule=(0.0, 60.0), during=wake),
    "canceled-waiting": Branch(answers=(REFUSED,), schedule=(0.0, 60.0), during=cancel),
    "canceled-in-attempt": Branch(answers=(slow,), schedule=(0.0, 60.0), during=cancel),
    "canceled-in-failure": Branch(answers=(crash_slowly,), during=cancel, task_timeout=timedelta(seconds=1)),
    "canceled-in-retry": Branch(answers=(crash, slow), schedule=(0.0, 60.0), during=cancel_second),
}
LONG: Mapping[str, Branch] = {"continued-as-new": Branch(answers=(REFUSED,), schedule=(0.0, *[0.2] * 12))}
"""Needs a server that suggests it early."""


async def histories(client: Client, name: str) -> list[str]:
    """Run one branch; the histories of its runs, oldest first."""
    branch = {**BRANCHES, **LONG}[name]
    script = ScriptedDelivery(*branch.answers)
    async with callback_worker(client, script):
        delivery = await start_delivery(client, schedule=branch.schedule, task_timeout=branch.task_timeout)
        await branch.during(script, delivery)
        with contextlib.suppress(WorkflowFailureError):
            await delivery.result()
        return await all_runs(client, delivery.id, delivery.first_execution_run_id)
