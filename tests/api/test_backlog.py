"""The bounded queue: a task that could not be served in time is refused, with an honest `Retry-After`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio

from api import queue_statistics
from api.fleet import Fleet
from api.queue_statistics import Queues, QueueStatistics
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
    """Statistics that remember nothing yet."""
    fleet = Fleet(stand.client, heartbeat=timedelta(seconds=stand.settings.worker_heartbeat_seconds))
    return Queues(stand.client, fleet=fleet, catalogue=catalogue(stand.settings))


class Sender:
    """One user, who takes back what still waits at the end: the queue is the whole gateway's."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self._accepted: list[str] = []

    async def submit(self, prompt: str, **fields: object) -> httpx.Response:
        reply = await self.http.post("/tasks", json={"prompt": prompt, **fields})
        if reply.status_code == 202:
            self._accepted.append(reply.json()["task_id"])
        return reply

    async def accepted(self, prompt: str) -> dict[str, Any]:
        """Submit what is let in; the task."""
        reply = await self.submit(prompt)
        assert reply.status_code == 202, reply.text
        task: dict[str, Any] = reply.json()
        return task

    async def ended(self, task: dict[str, Any]) -> None:
        await until(self.http, task["task_id"], status="SUCCEEDED")

    async def take_back(self) -> None:
        paths = [f"/tasks/{task_id}/cancel" for task_id in self._accepted]
        await asyncio.gather(*(self.http.post(path, json={"mode": "hard"}) for path in paths))


@asynccontextmanager
async def sending(stand: Stand) -> AsyncIterator[Sender]:
    async with stand.user() as http:
        sender = Sender(http)
        yield sender
        await sender.take_back()


@pytest_asyncio.fixture
async def sender(bounded: Stand) -> AsyncIterator[Sender]:
    async with sending(bounded) as sender:
        yield sender


@pytest_asyncio.fixture
async def other(bounded: Stand) -> AsyncIterator[Sender]:
    async with sending(bounded) as sender:
        yield sender


async def known(http: httpx.AsyncClient, *, backlog: int, live_slots: int | None = None) -> dict[str, Any]:
    """The queue as the bound looks at it, once that has come to know how it is."""
    async with asyncio.timeout(30):
        while True:
            [queue] = [item for item in (await http.get("/queues")).json()["items"] if item["pool"] == "default"]
            if queue["backlog"] == backlog and (
                live_slots is None or (queue["live_slots"], queue["drain_seconds"] is None) == (live_slots, False)
            ):
                return dict(queue)
            await asyncio.sleep(0.1)


async def measured(stand: Stand, *, backlog: int, live_slots: int) -> QueueStatistics:
    """Statistics that are asked for afresh, once the worker has reported itself and the index has what has ended."""
    async with asyncio.timeout(30):
        while True:
            seen = await queues_of(stand).pool("default")
            if seen is not None and seen.length and (seen.backlog, seen.live_slots) == (backlog, live_slots):
                return seen
            await asyncio.sleep(0.2)


async def test_a_full_queue_refuses_new_tasks_and_takes_no_place_until_it_moves(
    bounded: Stand, sender: Sender, other: Sender
) -> None:
    tasks = [await sender.accepted(f"work {number}") for number in range(MAX_BACKLOG)]
    unmeasured = await known(sender.http, backlog=MAX_BACKLOG)
    refused = await other.submit("one more")
    assert_problem(refused, 503, "QUEUE_FULL")
    assert int(refused.headers["retry-after"]) == 30, "nothing was measured and nothing moves"
    assert (await other.http.get("/usage")).json()["pending"]["used"] == 0
    assert (await sender.submit("work 0")).status_code == 200, "a task that is there is always answered"
    assert (unmeasured["drain_seconds"], unmeasured["backlog_age_seconds"] > 0) == (None, True)
    async with bounded.gpu_worker():
        await known(sender.http, backlog=0)
        last = await other.accepted("one more")
        for task in tasks:
            await sender.ended(task)
        await other.ended(last)


async def test_a_wait_beyond_the_deadline_is_refused_and_a_longer_deadline_is_not(
    bounded: Stand, sender: Sender
) -> None:
    async with bounded.gpu_worker(slots=1) as played:
        for number in range(2):
            await sender.ended(await sender.accepted(f"work first {number}"))
        blocker = await sender.accepted("hold the slot")
        await until(sender.http, blocker["task_id"], status="PROCESSING")
        for number in range(MAX_BACKLOG - 1):
            await sender.accepted(f"work later {number}")
        seen = await measured(bounded, backlog=MAX_BACKLOG - 1, live_slots=1)
        assert seen.length is not None
        assert seen.drain_seconds == pytest.approx((MAX_BACKLOG - 1) * seen.length.processing_seconds)
        assert seen.length.gpu_seconds == 1.5
        assert WORK_SECONDS * 0.3 < seen.length.processing_seconds < 5
        wait = (await known(sender.http, backlog=MAX_BACKLOG - 1, live_slots=1))["drain_seconds"]
        refused = await sender.submit("in a hurry", deadline_seconds=1)
        assert_problem(refused, 503, "QUEUE_FULL")
        assert "estimated wait" in refused.json()["detail"]
        assert 1 <= int(refused.headers["retry-after"]) <= 1 + wait
        assert (await sender.submit("in no hurry")).status_code == 202
        played.release(blocker)


async def test_who_is_in_a_hurry_takes_recent_statistics_and_leaves_newer_ones_to_the_next(
    bounded: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_statistics, "CACHE_SECONDS", 0.0)
    queues = queues_of(bounded)
    first = await queues.recent("default")
    assert await queues.recent("default") is first
    async with asyncio.timeout(10):
        while await queues.recent("default") is first:
            await asyncio.sleep(0.02)
    monkeypatch.setattr(queue_statistics, "RECENT_SECONDS", 0.0)
    newest = await queues.recent("default")
    assert await queues.recent("default") is not newest
