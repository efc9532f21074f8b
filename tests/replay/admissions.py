"""Branches of an admission whose histories are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from tests.replay.runs import all_runs
from tests.workflows.admissions import ask, handle_of, new_task, new_user, place_of
from workflows.admission import AdmissionWorkflow
from workflows.contracts import LIST_RUNNING_TASKS, LIST_USED, AdmissionActivities
from workflows.naming import CONTROL_QUEUE, user_hash
from workflows.quotas import (
    AdmissionInput,
    Allowance,
    ListRunningTasksInput,
    ListUsedInput,
    Refusal,
    RunningTasks,
    TierLimits,
    UsedAmount,
)
from workflows.tasks import User

During = Callable[[Client, User, AdmissionInput], Awaitable[None]]

COUNTED = TierLimits(
    max_pending=10,
    rate_per_minute=600.0,
    burst=10,
    allowance=Allowance(period_seconds=2.0, tasks=100),
)


class PlayedListings(AdmissionActivities):
    """Nobody runs anything; the first listings may fail, as visibility does."""

    def __init__(self, failures: int = 0) -> None:
        self._failures = failures

    @activity.defn(name=LIST_RUNNING_TASKS)
    async def list_running_tasks(self, request: ListRunningTasksInput) -> RunningTasks:
        self._fail()
        return RunningTasks()

    @activity.defn(name=LIST_USED)
    async def list_used(self, request: ListUsedInput) -> UsedAmount:
        self._fail()
        return UsedAmount(tasks=1, gpu_seconds=2.0)

    def _fail(self) -> None:
        if self._failures > 0:
            self._failures -= 1
            raise ApplicationError("no visibility")


async def released(client: Client, user: User, start: AdmissionInput) -> None:
    """A task is admitted and ends."""
    task_id = new_task()
    place = await place_of(client, user, task_id)
    await handle_of(client, user).signal(AdmissionWorkflow.release, args=[task_id, place.token, 1.0])


async def withdrawn(client: Client, user: User, start: AdmissionInput) -> None:
    """A submission that does not start its task, and a reset."""
    task_id = new_task()
    await ask(client, user, task_id, claim="claim", start=start)
    await handle_of(client, user).signal(AdmissionWorkflow.withdraw, args=[task_id, "claim"])
    await handle_of(client, user).signal(AdmissionWorkflow.reset_quota)


async def blind(client: Client, user: User, start: AdmissionInput) -> None:
    """The listing fails in the first workflow task: admits are refused until the patient one is through."""
    while isinstance(await ask(client, user, "t-blind", claim="claim", start=start), Refusal):
        await asyncio.sleep(0.2)
    await handle_of(client, user).signal(AdmissionWorkflow.withdraw, args=["t-blind", "claim"])


async def counted(client: Client, user: User, start: AdmissionInput) -> None:
    """An allowance is counted, as soon as visibility answers."""
    task_id = new_task()
    while isinstance(place := await ask(client, user, task_id, COUNTED, claim="claim"), Refusal):
        await asyncio.sleep(0.2)
    await handle_of(client, user).signal(AdmissionWorkflow.release, args=[task_id, place.token, 1.0])


async def many(client: Client, user: User, start: AdmissionInput) -> None:
    """So many that the run continues as new."""
    for _ in range(4):
        await released(client, user, start)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way that an admission goes."""

    during: During
    start: Mapping[str, object] = field(default_factory=dict)
    failures: int = 0


BRANCHES: Mapping[str, Branch] = {
    "released": Branch(during=released),
    "withdrawn": Branch(during=withdrawn),
    "blind": Branch(during=blind, failures=2),
    "counted": Branch(during=counted),
    "counted-blind": Branch(during=counted, failures=3),
    "continued-as-new": Branch(during=many, start={"continue_after_events": 15}),
}


async def histories(client: Client, name: str) -> list[str]:
    """Run one branch until the admission closes; the histories of its runs, oldest first."""
    branch, user = BRANCHES[name], new_user()
    listings = PlayedListings(branch.failures)
    start = replace(AdmissionInput(user_hash=user_hash(user), idle_close_seconds=1.0), **branch.start)  # type: ignore[arg-type]
    async with Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[AdmissionWorkflow],
        activities=[listings.list_running_tasks, listings.list_used],
    ):
        handle = await client.start_workflow(
            AdmissionWorkflow.run, start, id=handle_of(client, user).id, task_queue=CONTROL_QUEUE
        )
        await branch.during(client, user, start)
        await handle.result()
        return await all_runs(client, handle.id, handle.first_execution_run_id)
