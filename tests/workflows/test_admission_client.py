from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowFailureError
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from api.admission_client import Grant, admit, withdraw
from api.open_admissions import FRESH_SECONDS, OpenAdmissions
from api.problems import GatewayError, ProblemCode, RateLimitedError, TooManyPendingTasksError
from api.quota import read_usage
from api.stale_places import MAX_CHECKED_PLACES
from tests.workflows.admissions import (
    WIDE,
    control_worker,
    handle_of,
    held_by,
    new_task,
    new_user,
    start_job,
    until_visible,
)
from workers.codec import CodecKey, EncryptionCodec, data_converter
from workflows.naming import admission_id, tenant_admission_id
from workflows.quotas import Allowance, TierLimits
from workflows.tasks import User


@pytest_asyncio.fixture(scope="module")
async def encrypted(temporal: WorkflowEnvironment) -> Client:
    """A client as the product connects it: everything it stores is encrypted."""
    codec = EncryptionCodec([CodecKey(key_id="k1", secret=os.urandom(32))])
    return await Client.connect(temporal.client.service_client.config.target_host, data_converter=data_converter(codec))


@pytest_asyncio.fixture(scope="module", autouse=True)
async def worker(encrypted: Client) -> AsyncIterator[Worker]:
    async with control_worker(encrypted) as running:
        yield running


async def submit(client: Client, user: User, limits: TierLimits, tenant_limits: TierLimits | None = None) -> Grant:
    """Admit, then start the job with its places, as the API does."""
    task_id = new_task()
    grant = await admit(client, user, task_id=task_id, limits=limits, tenant_limits=tenant_limits)
    await start_job(client, user, task_id, *grant.places)
    return grant


def end_users(count: int) -> list[User]:
    tenant = f"tenant-{uuid4().hex[:8]}"
    return [User(tenant=tenant, end_user=f"user-{number}") for number in range(count)]


async def tenant_events(client: Client, user: User) -> int:
    return (await client.get_workflow_handle(tenant_admission_id(user.tenant)).describe()).history_length


class TestRefusals:
    async def test_the_problem_names_who_holds_the_places_and_when_to_ask_again(self, encrypted: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=2)
        grants = [await submit(encrypted, user, limits) for _ in range(2)]
        with pytest.raises(TooManyPendingTasksError) as refused:
            await admit(encrypted, user, task_id=new_task(), limits=limits)
        assert refused.value.task_ids == tuple(grant.task_id for grant in grants)
        assert int(refused.value.headers["Retry-After"]) >= 1

    async def test_the_rate_is_a_problem_of_its_own(self, encrypted: Client) -> None:
        user, limits = new_user(), TierLimits(burst=1, rate_per_minute=2.0)
        await admit(encrypted, user, task_id=new_task(), limits=limits)
        with pytest.raises(RateLimitedError) as refused:
            await admit(encrypted, user, task_id=new_task(), limits=limits)
        assert 25 <= int(refused.value.headers["Retry-After"]) <= 30

    async def test_the_allowance_is_a_problem_of_its_own(self, encrypted: Client) -> None:
        user = new_user()
        limits = replace(WIDE, allowance=Allowance(period_seconds=86_400.0, gpu_seconds=50.0))
        await admit(encrypted, user, task_id=new_task(), limits=limits, estimated_gpu_seconds=30.0)
        with pytest.raises(GatewayError) as refused:
            await admit(encrypted, user, task_id=new_task(), limits=limits, estimated_gpu_seconds=30.0)
        assert refused.value.code is ProblemCode.QUOTA_EXHAUSTED
        usage = await read_usage(encrypted, user)
        assert (usage.reserved_gpu_seconds, usage.used_gpu_seconds) == (30.0, 0.0)


class TestHealing:
    async def test_a_terminated_job_frees_its_place_at_the_next_refusal(self, encrypted: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=2)
        grants = [await submit(encrypted, user, limits) for _ in range(2)]
        await encrypted.get_workflow_handle(grants[0].task_id).terminate("from the command line")
        assert len(await held_by(encrypted, user)) == 2
        third = await admit(encrypted, user, task_id=new_task(), limits=limits)
        assert await held_by(encrypted, user) == {grants[1].task_id, third.task_id}
        with pytest.raises(TooManyPendingTasksError):
            await admit(encrypted, user, task_id=new_task(), limits=limits)

    async def test_a_leaked_place_is_found_among_more_than_are_looked_at_however_young_it_is(
        self, encrypted: Client
    ) -> None:
        (user,) = end_users(1)
        limits = replace(WIDE, max_pending=MAX_CHECKED_PLACES + 8)
        ids = [(await submit(encrypted, user, limits)).task_id for _ in range(limits.max_pending)]
        youngest = ids[-1]
        await encrypted.get_workflow_handle(youngest).terminate("from the command line")
        await until_visible(encrypted, {youngest}, "Terminated")
        fresh = await admit(encrypted, user, task_id=new_task(), limits=limits)
        assert await held_by(encrypted, user) == {*ids[:-1], fresh.task_id}

    async def test_a_tenants_leaked_place_is_found_among_more_than_are_looked_at_by_and_by(
        self, encrypted: Client
    ) -> None:
        (user,) = end_users(1)
        limits = replace(WIDE, max_pending=MAX_CHECKED_PLACES + 8)
        ids = [(await submit(encrypted, user, WIDE, limits)).task_id for _ in range(limits.max_pending)]
        await encrypted.get_workflow_handle(ids[-1]).terminate("from the command line")
        async with asyncio.timeout(30):
            while True:
                with suppress(TooManyPendingTasksError):
                    await admit(encrypted, user, task_id=new_task(), limits=WIDE, tenant_limits=limits)
                    break

    async def test_a_cancelled_job_gives_its_places_back_by_itself(self, encrypted: Client) -> None:
        (user,) = end_users(1)
        grant = await submit(encrypted, user, TierLimits(max_pending=1), TierLimits(max_pending=1))
        job = encrypted.get_workflow_handle(grant.task_id)
        await job.cancel()
        with pytest.raises(WorkflowFailureError):
            await job.result()
        async with asyncio.timeout(30):
            while (await read_usage(encrypted, user, tenant=True)).held or (await read_usage(encrypted, user)).held:
                await asyncio.sleep(0.05)

    async def test_a_young_place_without_a_task_is_left_to_its_submission(self, encrypted: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=1)
        await admit(encrypted, user, task_id="about-to-start", limits=limits)
        with pytest.raises(TooManyPendingTasksError):
            await admit(encrypted, user, task_id=new_task(), limits=limits)

    async def test_a_withdrawn_submission_frees_its_place_and_its_token(self, encrypted: Client) -> None:
        user, limits = new_user(), TierLimits(max_pending=1, burst=1, rate_per_minute=0.01)
        await withdraw(encrypted, await admit(encrypted, user, task_id=new_task(), limits=limits))
        await admit(encrypted, user, task_id=new_task(), limits=limits)

    async def test_one_of_two_equal_submissions_withdraws_and_the_other_keeps_the_place(
        self, encrypted: Client
    ) -> None:
        user, task_id = new_user(), new_task()
        first, second = await asyncio.gather(
            *(admit(encrypted, user, task_id=task_id, limits=TierLimits(burst=1)) for _ in range(2))
        )
        assert first.places == second.places
        await withdraw(encrypted, first)
        assert await held_by(encrypted, user) == {task_id}
        await withdraw(encrypted, second)
        assert await held_by(encrypted, user) == set()

    async def test_an_admission_that_answered_is_asked_without_starting_it_and_a_closed_one_starts_again(
        self, encrypted: Client
    ) -> None:
        user, running = new_user(), OpenAdmissions()
        await admit(encrypted, user, task_id=new_task(), limits=WIDE, running=running)
        assert admission_id(user) in running
        again = await admit(encrypted, user, task_id=new_task(), limits=WIDE, running=running)
        before = (await handle_of(encrypted, user).describe()).run_id
        await handle_of(encrypted, user).terminate()
        after_close = await admit(encrypted, user, task_id=new_task(), limits=WIDE, running=running)
        assert (await handle_of(encrypted, user).describe()).run_id != before
        assert await held_by(encrypted, user) == {after_close.task_id}
        assert again.places != after_close.places

    async def test_a_refusal_of_an_admission_that_is_asked_directly_is_the_same(self, encrypted: Client) -> None:
        user, running, limits = new_user(), OpenAdmissions(), TierLimits(max_pending=1)
        await admit(encrypted, user, task_id=new_task(), limits=limits, running=running)
        for _ in range(2):
            with pytest.raises(TooManyPendingTasksError):
                await admit(encrypted, user, task_id=new_task(), limits=limits, running=running)

    def test_what_answered_long_ago_is_started_on_the_way(self) -> None:
        now = 0.0
        running = OpenAdmissions(clock=lambda: now)
        running.note("a")
        now = FRESH_SECONDS - 1
        assert "a" in running
        now = FRESH_SECONDS
        assert "a" not in running


class TestTenant:
    async def test_a_place_is_held_on_both_levels(self, encrypted: Client) -> None:
        (user,) = end_users(1)
        grant = await admit(encrypted, user, task_id=new_task(), limits=WIDE, tenant_limits=WIDE)
        assert len({place.admission_id for place in grant.places}) == 2
        for tenant in (False, True):
            usage = await read_usage(encrypted, user, tenant=tenant)
            assert [place.task_id for place in usage.held] == [grant.task_id]

    async def test_end_users_do_not_limit_each_other_below_the_tenants_limit(self, encrypted: Client) -> None:
        greedy, modest = end_users(2)
        limits, tenant_limits = TierLimits(max_pending=2, burst=5), TierLimits(max_pending=3, burst=8)
        outcomes = await asyncio.gather(
            *(
                admit(encrypted, greedy, task_id=new_task(), limits=limits, tenant_limits=tenant_limits)
                for _ in range(8)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, Grant) for outcome in outcomes) == 2
        await admit(encrypted, modest, task_id=new_task(), limits=limits, tenant_limits=tenant_limits)

    async def test_a_flood_refused_at_the_users_limit_never_touches_the_tenants_account(
        self, encrypted: Client
    ) -> None:
        (user,) = end_users(1)
        limits = TierLimits(max_pending=1)
        await admit(encrypted, user, task_id=new_task(), limits=limits, tenant_limits=WIDE)
        before = await tenant_events(encrypted, user)
        for _ in range(5):
            with pytest.raises(TooManyPendingTasksError):
                await admit(encrypted, user, task_id=new_task(), limits=limits, tenant_limits=WIDE)
        assert await tenant_events(encrypted, user) == before

    async def test_refused_by_the_tenant_nothing_is_held_and_no_foreign_task_is_named(self, encrypted: Client) -> None:
        first, second = end_users(2)
        limits = TierLimits(max_pending=3, burst=1, rate_per_minute=0.01)
        tenant_limits = TierLimits(max_pending=1)
        await admit(encrypted, first, task_id=new_task(), limits=limits, tenant_limits=tenant_limits)
        for _ in range(2):
            # The second round is refused for the same reason: the user's only token came back.
            with pytest.raises(TooManyPendingTasksError) as refused:
                await admit(encrypted, second, task_id=new_task(), limits=limits, tenant_limits=tenant_limits)
            assert refused.value.task_ids == ()
            assert await held_by(encrypted, second) == set()

    async def test_a_fresh_tenant_account_counts_the_running_tasks_of_all_end_users(self, encrypted: Client) -> None:
        first, second = end_users(2)
        tenant_limits = TierLimits(max_pending=2)
        grants = [await submit(encrypted, user, WIDE, tenant_limits) for user in (first, second)]
        await until_visible(encrypted, {grant.task_id for grant in grants}, "Running")
        await encrypted.get_workflow_handle(tenant_admission_id(first.tenant)).terminate("an operator")
        with pytest.raises(TooManyPendingTasksError):
            await admit(encrypted, first, task_id=new_task(), limits=WIDE, tenant_limits=tenant_limits)


class TestEdges:
    async def test_admits_that_meet_the_end_of_the_admission_are_sent_again(self, encrypted: Client) -> None:
        user = new_user()

        async def end_it() -> None:
            for _ in range(3):
                await asyncio.sleep(0.05)
                with suppress(RPCError):
                    await handle_of(encrypted, user).terminate("race")

        ending = asyncio.create_task(end_it())
        grants = await asyncio.gather(
            *(admit(encrypted, user, task_id=new_task(), limits=WIDE) for _ in range(5)),
        )
        await ending
        assert all(grant.places for grant in grants)

    async def test_a_running_task_that_cannot_be_read_locks_nobody_out(
        self, encrypted: Client, temporal: WorkflowEnvironment
    ) -> None:
        (user,) = end_users(1)
        other_codec = EncryptionCodec([CodecKey(key_id="lost", secret=os.urandom(32))])
        stranger = await Client.connect(
            temporal.client.service_client.config.target_host, data_converter=data_converter(other_codec)
        )
        task_id = new_task()
        job = await start_job(stranger, user, task_id)
        await until_visible(encrypted, {task_id}, "Running")
        await admit(encrypted, user, task_id=new_task(), limits=WIDE, tenant_limits=WIDE)
        await job.terminate()

    async def test_no_task_id_of_an_admission_is_stored_in_clear(
        self, encrypted: Client, temporal: WorkflowEnvironment
    ) -> None:
        user, limits = new_user(), TierLimits(max_pending=1)
        await admit(encrypted, user, task_id="readable-name", limits=limits)
        history = await handle_of(temporal.client, user).fetch_history()
        assert b"readable-name" not in b"".join(event.SerializeToString() for event in history.events)
