"""The bounded queue: a task that could not be served in time is refused, with an honest `Retry-After`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest
import pytest_asyncio

from api.fleet import Fleet
from api.queue_statistics import CACHE_SECONDS, Queues
from tests.api.conftest import running_stand
from tests.api.stand import WORK_SECONDS, Stand, until
from tests.api.test_problems import assert_problem
from workers.registry import catalogue

MAX_BACKLOG = 8


@pytest_asyncio.fixture(scope="module")
async def bounded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway with a short queue that nobody serves yet."""
    folder = tmp_path_factory.mktemp("bounded")
    async with running_stand(folder, max_backlog=MAX_BACKLOG) as stand, stand.control_worker():
        yield stand


def queues_of(stand: Stand) -> Queues:
    fleet = Fleet(stand.client, heartbeat=timedelta(seconds=stand.settings.worker_heartbeat_seconds))
    return Queues(stand.client, fleet=fleet, catalogue=catalogue(stand.settings))


async def backlog(queues: Queues, expected: int) -> None:
    async with asyncio.timeout(30):
        while (seen := await queues.pool("default")) is None or seen.backlog != expected:
            await asyncio.sleep(0.2)
    # What the API knows may be as old as this.
    await asyncio.sleep(CACHE_SECONDS)


async def submit(http: httpx.AsyncClient, prompt: str, **fields: object) -> httpx.Response:
    return await http.post("/tasks", json={"prompt": prompt, **fields})


async def test_a_full_queue_refuses_new_tasks_and_takes_no_place_until_it_moves(bounded: Stand) -> None:
    queues = queues_of(bounded)
    async with bounded.user() as http, bounded.user() as other:
        tasks = [await submit(http, f"work {number}") for number in range(MAX_BACKLOG)]
        assert {task.status_code for task in tasks} == {202}
        await backlog(queues, MAX_BACKLOG)
        refused = await submit(other, "one more")
        assert_problem(refused, 503, "QUEUE_FULL")
        assert int(refused.headers["retry-after"]) == 30, "nothing was measured and nothing moves"
        assert (await other.get("/usage")).json()["pending"]["used"] == 0
        assert (await submit(http, "work 0")).status_code == 200, "a task that is there is always answered"
        unmeasured = await queues.pool("default")
        assert unmeasured is not None
        assert (unmeasured.drain_seconds, unmeasured.backlog_age_seconds > 0) == (None, True)
        async with bounded.gpu_worker():
            await backlog(queues, 0)
            last = await submit(other, "one more")
            assert last.status_code == 202
            for task in (*tasks, last):
                await until(http if task is not last else other, task.json()["task_id"], status="SUCCEEDED")


async def test_a_wait_beyond_the_deadline_is_refused_and_a_longer_deadline_is_not(bounded: Stand) -> None:
    async with bounded.user() as http, bounded.gpu_worker(slots=1) as played:
        for number in range(2):
            measured = (await submit(http, f"work first {number}")).json()
            await until(http, measured["task_id"], status="SUCCEEDED")
        blocker = (await submit(http, "hold the slot")).json()
        await until(http, blocker["task_id"], status="PROCESSING")
        for number in range(MAX_BACKLOG - 1):
            assert (await submit(http, f"work later {number}")).status_code == 202
        queues = queues_of(bounded)
        await backlog(queues, MAX_BACKLOG - 1)
        seen = await queues.pool("default")
        assert seen is not None
        assert seen.length is not None
        assert seen.live_slots == 1
        wait = seen.drain_seconds
        assert wait is not None
        assert wait == pytest.approx((MAX_BACKLOG - 1) * seen.length.processing_seconds)
        assert seen.length.gpu_seconds == 1.5
        assert WORK_SECONDS * 0.3 < seen.length.processing_seconds < 5
        refused = await submit(http, "in a hurry", deadline_seconds=1)
        assert_problem(refused, 503, "QUEUE_FULL")
        assert "estimated wait" in refused.json()["detail"]
        assert 1 <= int(refused.headers["retry-after"]) <= 1 + wait
        assert (await submit(http, "in no hurry")).status_code == 202
        played.release(blocker)
