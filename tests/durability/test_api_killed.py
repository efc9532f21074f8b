"""API processes killed at random moments while submissions pour in: nothing accepted is lost, and no place leaks."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from temporalio.client import WorkflowExecutionStatus
from temporalio.testing import WorkflowEnvironment

import api.stale_places
from api.admission_client import admit
from api.problems import TooManyPendingTasksError
from api.quota import read_usage
from tests.api.api_processes import ApiProcess
from tests.api.stand import Stand, api_settings, create_keys, http_client, open_stand
from tests.scale import scaled
from workers.connection import connect
from workers.devserver import server_args, temporal_binary
from workflows import naming
from workflows.quotas import TierLimits
from workflows.tasks import User

USERS = max(6, scaled(20))
AT_ONCE = 16
GIVES_UP = 0.2
"""Of the clients: those whose connection broke do not come back, and what they had asked for is nobody's."""
PAUSE_SECONDS = (0.1, 0.6)
"""Between the return of one process and the next kill."""


@dataclass(kw_only=True)
class Storm:
    """What the clients saw."""

    accepted: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Task ids by end user."""
    broken: int = 0
    """Requests that got no answer."""
    abandoned: int = 0
    kills: int = 0


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Stand, list[ApiProcess]]]:
    """Two API processes and a control worker; no GPU, so that every place stays taken."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=server_args(),
        dev_server_log_level="error",
    )
    async with env:
        settings = api_settings(tmp_path, env.client.service_client.config.target_host, 1, max_backlog=100_000)
        keys = create_keys(settings)
        client = await connect(settings, register_search_attributes=True)
        with ApiProcess(settings, tmp_path / "api-1") as first, ApiProcess(settings, tmp_path / "api-2") as second:
            stand = open_stand(tmp_path, first.url, settings, client, keys)
            async with stand.control_worker():
                yield stand, [first, second]


async def kill_at_random(processes: list[ApiProcess], storm: Storm, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
        process = chance.choice(processes)
        process.kill()
        storm.kills += 1
        process.start()
        await asyncio.to_thread(process.until_ready)


@dataclass(frozen=True, kw_only=True)
class Clients:
    """They submit, each under a key of its own, until they are answered by whichever process is there."""

    http: httpx.AsyncClient
    key: str
    urls: list[str]
    storm: Storm
    chance: random.Random

    async def submit(self, number: int) -> None:
        user, storm = f"user-{number % USERS}", self.storm
        while True:
            try:
                reply = await self._post(user, number)
            except httpx.TransportError as error:
                refused = isinstance(error, httpx.ConnectError)
                storm.broken += not refused
                if not refused and self.chance.random() < GIVES_UP:
                    storm.abandoned += 1
                    return
                await asyncio.sleep(0.05)
                continue
            if reply.status_code in {200, 202}:
                storm.accepted[user].add(reply.json()["task_id"])
                return
            assert reply.status_code == 503, reply.text
            await asyncio.sleep(0.1)

    async def _post(self, user: str, number: int) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}", "X-User-Id": user, "Idempotency-Key": f"order-{number}"}
        url = f"{self.chance.choice(self.urls)}/api/v1/tasks"
        return await self.http.post(url, json={"prompt": f"clip {number}"}, headers=headers)


async def running(stand: Stand, user: User) -> set[str]:
    """The open tasks of a user, as Temporal has them."""
    query = (
        f"WorkflowType = 'GenerationWorkflow' AND ExecutionStatus = 'Running' AND UserId = '{naming.user_hash(user)}'"
    )
    return {row.id async for row in stand.client.list_workflows(query)}


@pytest.mark.durability
@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_nothing_accepted_is_lost_and_the_quotas_count_right(
    pair: tuple[Stand, list[ApiProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand, processes = pair
    storm, chance = Storm(), random.Random(4)
    gate = asyncio.Semaphore(AT_ONCE)
    for process in processes:
        await asyncio.to_thread(process.until_ready)
    async with http_client() as http:
        urls = [process.url for process in processes]
        clients = Clients(http=http, key=stand.service_key, urls=urls, storm=storm, chance=chance)

        async def one(number: int) -> None:
            async with gate:
                await clients.submit(number)

        killing = asyncio.create_task(kill_at_random(processes, storm, chance))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(scaled(1_000)):
                    group.create_task(one(number))
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
    assert storm.kills >= 1, "the storm was over before anything was killed"

    for user_id, task_ids in storm.accepted.items():
        for task_id in task_ids:
            described = await stand.client.get_workflow_handle(task_id).describe()
            assert described.status is WorkflowExecutionStatus.RUNNING, f"{task_id} of {user_id} was accepted"

    # A submission that died between its place and its task holds it until somebody needs it; then it is found stale
    # by its age. Here that age is nothing, so that the test need not wait a minute.
    monkeypatch.setattr(api.stale_places, "UNSTARTED_AFTER", type(api.stale_places.UNSTARTED_AFTER)(0))
    leaked = 0
    for number in range(USERS):
        user = User(tenant="acme", end_user=f"user-{number}")
        tasks = await running(stand, user)
        assert storm.accepted[user.end_user] <= tasks
        held = {place.task_id for place in (await read_usage(stand.client, user)).held}
        assert tasks <= held, "a task runs without a place"
        leaked += len(held - tasks)
        with pytest.raises(TooManyPendingTasksError):
            await admit(stand.client, user, task_id="one-too-many", limits=_limits(len(tasks)))
        await admit(stand.client, user, task_id="just-right", limits=_limits(len(tasks) + 1))
        held = {place.task_id for place in (await read_usage(stand.client, user)).held}
        assert held == {*tasks, "just-right"}
    print(  # noqa: T201 - read with -s, and in the report of a failure
        f"{storm.kills} kills, {storm.broken} broken requests, {storm.abandoned} abandoned, {leaked} places leaked"
    )


def _limits(max_pending: int) -> TierLimits:
    return TierLimits(max_pending=max_pending, rate_per_minute=60_000.0, burst=10_000)
