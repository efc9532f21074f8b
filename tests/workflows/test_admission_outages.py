from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

import api.stale_places
from api.admission_client import admit
from api.problems import AdmissionUnavailableError, ControlUnavailableError, TooManyPendingTasksError
from api.quota import read_usage, reset_quota
from tests.workflows.admissions import (
    accepted,
    ask,
    control_worker,
    held_by,
    history_length,
    new_task,
    new_user,
    start_job,
    until_visible,
)
from workflows.admission import AdmissionWorkflow
from workflows.contracts import LIST_RUNNING_TASKS, LIST_USED
from workflows.naming import CONTROL_QUEUE, admission_id
from workflows.quotas import (
    ListRunningTasksInput,
    ListUsedInput,
    Refusal,
    RefusalReason,
    RunningTasks,
    TierLimits,
    UsedAmount,
)
from workflows.tasks import AdmissionPlace


async def test_limits_are_exact_with_a_worker_that_caches_nothing(client: Client) -> None:
    user, limits = new_user(), TierLimits(max_pending=2)
    async with control_worker(client, cache=0):
        outcomes = await asyncio.gather(*(ask(client, user, new_task(), limits) for _ in range(6)))
        assert accepted(outcomes) == 2
        assert isinstance(await ask(client, user, new_task(), limits), Refusal)
        assert len(await held_by(client, user)) == 2


class FailingListings:
    """Visibility that fails until it is told to work."""

    def __init__(self) -> None:
        self.works = False

    @activity.defn(name=LIST_RUNNING_TASKS)
    async def list_running_tasks(self, request: ListRunningTasksInput) -> RunningTasks:
        if not self.works:
            raise ApplicationError("visibility is down")
        return RunningTasks()

    @activity.defn(name=LIST_USED)
    async def list_used(self, request: ListUsedInput) -> UsedAmount:
        return UsedAmount()


async def test_while_visibility_is_down_admits_are_refused_at_once_and_leave_no_place(client: Client) -> None:
    user, listings = new_user(), FailingListings()
    async with Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[AdmissionWorkflow],
        activities=[listings.list_running_tasks, listings.list_used],
    ):
        outcomes = await asyncio.gather(*(ask(client, user, new_task()) for _ in range(3)))
        assert {outcome.reason for outcome in outcomes if isinstance(outcome, Refusal)} == {RefusalReason.NOT_READY}
        assert accepted(outcomes) == 0
        before = await history_length(client, user)
        assert isinstance(await ask(client, user, new_task()), Refusal)
        assert await history_length(client, user) == before
        assert await held_by(client, user) == set()
        listings.works = True
        async with asyncio.timeout(30):
            while not isinstance(await ask(client, user, "a"), AdmissionPlace):
                await asyncio.sleep(0.1)
        assert await held_by(client, user) == {"a"}


async def test_without_a_worker_it_is_unavailable_in_time_and_the_late_admit_takes_no_place(client: Client) -> None:
    user, task_id, limits = new_user(), new_task(), TierLimits(max_pending=1)
    started = time.monotonic()
    with pytest.raises(AdmissionUnavailableError):
        await admit(client, user, task_id=task_id, limits=limits)
    assert time.monotonic() - started < 3.0
    with pytest.raises(ControlUnavailableError):
        await read_usage(client, user, limit=timedelta(seconds=0.3))
    async with control_worker(client):
        other = await ask(client, user, new_task(), limits)
        assert isinstance(other, AdmissionPlace)
        await asyncio.sleep(0.3)
        assert len(await held_by(client, user)) == 1
        refused = await ask(client, user, task_id, limits)
        assert isinstance(refused, Refusal)
        assert [place.token for place in refused.held] == [other.token]


async def test_the_same_task_can_be_admitted_after_an_outage(client: Client) -> None:
    user, task_id = new_user(), new_task()
    with pytest.raises(AdmissionUnavailableError):
        await admit(client, user, task_id=task_id, limits=TierLimits(burst=1), timeout=timedelta(seconds=0.8))
    async with control_worker(client):
        grant = await admit(client, user, task_id=task_id, limits=TierLimits(burst=1))
        usage = await read_usage(client, user)
        assert [(place.task_id, place.token) for place in usage.held] == [(task_id, grant.places[0].token)]


async def test_a_ghost_place_nobody_withdrew_is_healed_when_it_stands_in_the_way(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, limits = new_user(), TierLimits(max_pending=1)
    with pytest.raises((TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError)):
        async with asyncio.timeout(0.3):
            await ask(client, user, "ghost", limits)
    async with control_worker(client):
        assert await held_by(client, user) == {"ghost"}
        with pytest.raises(TooManyPendingTasksError) as full:
            await admit(client, user, task_id=new_task(), limits=limits)
        assert full.value.task_ids == ("ghost",)
        monkeypatch.setattr(api.stale_places, "UNSTARTED_AFTER", timedelta(0))
        grant = await admit(client, user, task_id="real", limits=limits)
        assert [place.token for place in grant.places] == [grant.claim]
        assert await held_by(client, user) == {"real"}


async def test_a_quota_is_reset_without_a_worker(client: Client) -> None:
    user, limits = new_user(), TierLimits(burst=1, rate_per_minute=0.01)
    async with control_worker(client):
        await admit(client, user, task_id="a", limits=limits)
    await reset_quota(client, user)
    async with control_worker(client):
        await admit(client, user, task_id="b", limits=limits)
        assert await held_by(client, user) == {"a", "b"}


async def test_admits_that_wait_for_the_first_worker_share_what_running_tasks_left(client: Client) -> None:
    user, limits = new_user(), TierLimits(max_pending=3)
    running = {new_task() for _ in range(2)}
    for task_id in running:
        await start_job(client, user, task_id, AdmissionPlace(admission_id=admission_id(user), token="before"))
    await until_visible(client, running, "Running")
    asked = [asyncio.create_task(ask(client, user, new_task(), limits)) for _ in range(3)]
    await asyncio.sleep(0.3)
    async with control_worker(client):
        outcomes = await asyncio.gather(*asked)
        assert accepted(outcomes) == 1
        assert running < await held_by(client, user)
        for task_id in running:
            await client.get_workflow_handle(task_id).terminate()
