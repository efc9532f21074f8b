from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Replayer, Worker

from tests.workflows.admissions import (
    WIDE,
    accepted,
    ask,
    control_worker,
    handle_of,
    held_by,
    history_length,
    new_task,
    new_user,
    place_of,
    start_job,
    until_visible,
    usage_of,
)
from workflows.admission import AdmissionWorkflow
from workflows.naming import MEMO_RECORD, admission_id, user_hash
from workflows.quotas import (
    AdmissionInput,
    Allowance,
    Refusal,
    RefusalReason,
    StalePlace,
    TierLimits,
    Usage,
)
from workflows.tasks import AdmissionPlace, User

DAY = 86_400.0


@pytest_asyncio.fixture(scope="module", autouse=True)
async def worker(temporal: WorkflowEnvironment) -> AsyncIterator[Worker]:
    async with control_worker(temporal.client) as running:
        yield running


@pytest_asyncio.fixture
async def other_client(temporal: WorkflowEnvironment) -> Client:
    """The connection of a second API process."""
    return await Client.connect(temporal.client.service_client.config.target_host)


async def until_closed(client: Client, user: User, *, within: float = 10.0) -> WorkflowExecutionStatus | None:
    async with asyncio.timeout(within):
        while (status := (await handle_of(client, user).describe()).status) is WorkflowExecutionStatus.RUNNING:
            await asyncio.sleep(0.05)
    return status


async def until_held(client: Client, user: User, expected: set[str], *, within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while await held_by(client, user) != expected:
            await asyncio.sleep(0.05)


async def retried(
    client: Client, user: User, task_id: str, limits: TierLimits, *, claim: str, start: AdmissionInput
) -> AdmissionPlace | Refusal:
    """Admit as a client does that meets a run which continues as new: again, under the same claim."""
    passing = {RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.ABORTED, RPCStatusCode.UNAVAILABLE}
    while True:
        try:
            return await ask(client, user, task_id, limits, claim=claim, start=start)
        except RPCError as error:
            if error.status not in passing:
                raise
            await asyncio.sleep(0.02)


class TestPendingLimit:
    async def test_forty_parallel_admits_from_two_clients_get_exactly_three_places(
        self, client: Client, other_client: Client
    ) -> None:
        user = new_user()
        outcomes = await asyncio.gather(
            *(
                ask(each, user, new_task(), TierLimits(max_pending=3))
                for _ in range(20)
                for each in (client, other_client)
            )
        )
        assert accepted(outcomes) == 3
        assert len(await held_by(client, user)) == 3
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
        assert {refusal.reason for refusal in refusals} == {RefusalReason.TOO_MANY_PENDING_TASKS}

    async def test_refusals_leave_no_history(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=1)
        first = await place_of(client, user, "first", limits)
        before = await history_length(client, user)
        for _ in range(20):
            refusal = await ask(client, user, new_task(), limits)
            assert isinstance(refusal, Refusal)
            assert [(place.task_id, place.token) for place in refusal.held] == [("first", first.token)]
            assert refusal.retry_after_seconds > 0
        assert await history_length(client, user) == before

    async def test_a_released_place_is_free_once_however_often_it_is_released(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=2)
        places = {task_id: await place_of(client, user, task_id, limits) for task_id in ("a", "b")}
        handle = handle_of(client, user)
        for _ in range(3):
            await handle.signal(AdmissionWorkflow.release, args=["a", places["a"].token, 1.0])
        await handle.signal(AdmissionWorkflow.release, args=["b", "another token", 1.0])
        await handle.signal(AdmissionWorkflow.release, args=["nobody knows it", "x", 1.0])
        outcomes = [await ask(client, user, task_id, limits) for task_id in ("c", "d")]
        assert accepted(outcomes) == 1
        assert await held_by(client, user) == {"b", "c"}

    async def test_a_stale_place_makes_room_only_under_its_own_token(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=1)
        place = await place_of(client, user, "gone", limits)
        wrong = StalePlace(task_id="gone", token="older")
        right = StalePlace(task_id="gone", token=place.token)
        assert isinstance(await ask(client, user, "next", limits, stale=(wrong,)), Refusal)
        assert isinstance(await ask(client, user, "next", limits, stale=(right,)), AdmissionPlace)
        assert await held_by(client, user) == {"next"}


class TestIdempotence:
    async def test_a_task_that_holds_a_place_gets_the_same_one_even_when_nothing_is_left(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=1, burst=1, rate_per_minute=0.01)
        first = await place_of(client, user, "a", limits)
        again = await asyncio.gather(*(place_of(client, user, "a", limits) for _ in range(5)))
        assert {place.token for place in again} == {first.token}
        assert isinstance(await ask(client, user, "b", limits), Refusal)

    async def test_parallel_admits_of_one_task_on_a_fresh_admission_meet_in_one_place(self, client: Client) -> None:
        user = new_user()
        places = await asyncio.gather(*(place_of(client, user, "a", TierLimits(burst=1)) for _ in range(10)))
        assert len({place.token for place in places}) == 1
        assert await held_by(client, user) == {"a"}

    async def test_a_retry_after_a_lost_reply_costs_nothing_and_can_still_be_withdrawn(self, client: Client) -> None:
        user = new_user()
        for _ in range(3):
            place = await ask(client, user, "a", TierLimits(burst=1, rate_per_minute=0.01), claim="mine")
            assert place == AdmissionPlace(admission_id=admission_id(user), token="mine")
        await handle_of(client, user).signal(AdmissionWorkflow.withdraw, args=["a", "mine"])
        assert await held_by(client, user) == set()


class TestRate:
    async def test_the_burst_is_exact_under_concurrency_and_refills_at_the_rate(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=100, burst=4, rate_per_minute=40.0)
        started = time.monotonic()
        outcomes = await asyncio.gather(*(ask(client, user, new_task(), limits) for _ in range(12)))
        elapsed = time.monotonic() - started
        assert 4 <= accepted(outcomes) <= 4 + elapsed * 40 / 60
        refusal = await ask(client, user, new_task(), limits)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.RATE_LIMITED
        assert 0 < refusal.retry_after_seconds <= 1.5
        await asyncio.sleep(refusal.retry_after_seconds)
        outcomes = [await ask(client, user, new_task(), limits) for _ in range(2)]
        assert [isinstance(outcome, AdmissionPlace) for outcome in outcomes] == [True, False]


class TestContinueAsNew:
    async def test_under_load_no_place_is_lost_or_doubled(self, client: Client, other_client: Client) -> None:
        user, limits = new_user(), replace(WIDE, max_pending=6)
        start = AdmissionInput(user_hash=user_hash(user), continue_after_events=30)
        holding: set[str] = set()
        most = granted = 0

        async def submit(each: Client) -> None:
            nonlocal most, granted
            for _ in range(8):
                task_id, claim = new_task(), new_task()
                place = await retried(each, user, task_id, limits, claim=claim, start=start)
                if isinstance(place, Refusal):
                    continue
                holding.add(task_id)
                granted += 1
                most = max(most, len(holding))
                await asyncio.sleep(0.005)
                holding.discard(task_id)
                await handle_of(each, user).signal(AdmissionWorkflow.release, args=[task_id, place.token, 1.0])

        kept = await retried(client, user, "kept", limits, claim="kept", start=start)
        assert isinstance(kept, AdmissionPlace)
        await asyncio.gather(*(submit(each) for each in (client, other_client) for _ in range(3)))
        await until_held(client, user, {"kept"})
        runs = [run async for run in client.list_workflows(f"WorkflowId = '{admission_id(user)}'")]
        assert granted >= 30
        assert most <= 5
        assert len(runs) >= 4
        assert await retried(client, user, "kept", limits, claim="late", start=start) == kept
        replayer = Replayer(workflows=[AdmissionWorkflow])
        for run in runs[:4]:
            await replayer.replay_workflow(await client.get_workflow_handle(run.id, run_id=run.run_id).fetch_history())


class TestClosingAndListing:
    async def test_it_closes_when_idle_and_the_next_admit_starts_it_again(self, client: Client) -> None:
        user = new_user()
        start = AdmissionInput(user_hash=user_hash(user), idle_close_seconds=1.0)
        place = await ask(client, user, "a", start=start)
        assert isinstance(place, AdmissionPlace)
        await handle_of(client, user).signal(AdmissionWorkflow.release, args=["a", place.token, 0.0])
        assert await until_closed(client, user) is WorkflowExecutionStatus.COMPLETED
        assert isinstance(await ask(client, user, "b"), AdmissionPlace)
        assert await held_by(client, user) == {"b"}

    async def test_it_does_not_close_while_a_place_is_held(self, client: Client) -> None:
        user = new_user()
        start = AdmissionInput(user_hash=user_hash(user), idle_close_seconds=1.0)
        await ask(client, user, "a", start=start)
        await asyncio.sleep(2.5)
        assert await held_by(client, user) == {"a"}

    async def test_a_fresh_one_counts_the_running_tasks_first_and_their_releases_reach_it(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=3)
        jobs = {}
        for _ in range(2):
            task_id = new_task()
            jobs[task_id] = await start_job(client, user, task_id, await place_of(client, user, task_id, limits))
        await until_visible(client, set(jobs), "Running")
        await handle_of(client, user).terminate("an operator")

        outcomes = await asyncio.gather(*(ask(client, user, new_task(), limits) for _ in range(10)))
        assert accepted(outcomes) == 1
        assert set(jobs) < await held_by(client, user)

        ended, job = jobs.popitem()
        await job.cancel()
        with pytest.raises(WorkflowFailureError):
            await job.result()
        await until_held(client, user, await held_by(client, user) - {ended})
        assert isinstance(await ask(client, user, new_task(), limits), AdmissionPlace)
        for other in jobs.values():
            await other.terminate()

    async def test_tasks_that_hold_no_place_here_are_not_counted(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=1)
        task_id = new_task()
        item = await start_job(client, user, task_id, AdmissionPlace(admission_id="admission-of-a-batch", token="x"))
        await until_visible(client, {task_id}, "Running")
        assert isinstance(await ask(client, user, new_task(), limits), AdmissionPlace)
        await item.terminate()

    async def test_an_operators_reset_drops_no_place_and_fills_the_bucket(self, client: Client) -> None:
        user, limits = new_user(), TierLimits(burst=1, rate_per_minute=0.01)
        await place_of(client, user, "a", limits)
        assert isinstance(await ask(client, user, "b", limits), Refusal)
        await handle_of(client, user).signal(AdmissionWorkflow.reset_quota)
        await place_of(client, user, "b", limits)
        assert await held_by(client, user) == {"a", "b"}


class TestAllowance:
    async def test_it_is_exact_under_concurrency_from_the_first_request_on(self, client: Client) -> None:
        user = new_user()
        limits = replace(WIDE, allowance=Allowance(period_seconds=DAY, tasks=3))
        outcomes = await asyncio.gather(*(ask(client, user, new_task(), limits) for _ in range(10)))
        assert accepted(outcomes) == 3
        refusal = next(outcome for outcome in outcomes if isinstance(outcome, Refusal))
        assert refusal.reason is RefusalReason.QUOTA_EXHAUSTED
        assert 0 < refusal.retry_after_seconds <= DAY

    async def test_a_fresh_one_counts_what_ended_in_the_period(self, client: Client) -> None:
        user = new_user()
        limits = replace(WIDE, allowance=Allowance(period_seconds=DAY, tasks=2))
        task_id = new_task()
        job = await start_job(client, user, task_id, await place_of(client, user, task_id, limits))
        await job.cancel()
        with pytest.raises(WorkflowFailureError):
            await job.result()
        await until_held(client, user, set())
        assert (await usage_of(client, user)).used_tasks == 1
        await until_visible(client, {task_id}, "Canceled")
        await handle_of(client, user).terminate("an operator")

        await place_of(client, user, new_task(), limits)
        usage = await usage_of(client, user)
        assert (usage.used_tasks, len(usage.held)) == (1, 1)
        assert isinstance(await ask(client, user, new_task(), limits), Refusal)

    async def test_an_allowance_that_comes_later_is_counted_before_it_is_judged(self, client: Client) -> None:
        user = new_user()
        await place_of(client, user, "a", WIDE)
        limits = replace(WIDE, allowance=Allowance(period_seconds=DAY, tasks=2))
        outcomes = await asyncio.gather(*(ask(client, user, new_task(), limits) for _ in range(4)))
        assert accepted(outcomes) == 1

    async def test_used_gpu_seconds_end_with_the_period_and_stay_readable(self, client: Client) -> None:
        user = new_user()
        start = AdmissionInput(user_hash=user_hash(user), idle_close_seconds=1.0)
        limits = replace(WIDE, allowance=Allowance(period_seconds=3.0, gpu_seconds=10.0))
        place = await ask(client, user, "a", limits, start=start)
        assert isinstance(place, AdmissionPlace)
        ends_at = (await usage_of(client, user)).period_ends_at
        assert ends_at is not None
        await asyncio.sleep((ends_at - datetime.now(UTC)).total_seconds() + 0.05)
        await handle_of(client, user).signal(AdmissionWorkflow.release, args=["a", place.token, 12.5])
        refusal = await ask(client, user, "b", limits)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.QUOTA_EXHAUSTED

        assert await until_closed(client, user) is WorkflowExecutionStatus.COMPLETED
        left = await (await handle_of(client, user).describe()).memo_value(MEMO_RECORD, type_hint=Usage)
        assert (left.period_started_at, left.used_gpu_seconds, left.used_tasks) == (ends_at, 12.5, 1)
        assert isinstance(await ask(client, user, "b", limits), AdmissionPlace)
