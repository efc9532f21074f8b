"""Submitting while a part is down: 503 in bounded time, and the same key works afterwards, with no ghost place left."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import running_stand
from tests.api.stand import Stand, api_settings, create_keys, listening, open_stand, serving
from tests.api.test_event_outages import killable
from tests.api.test_problems import assert_problem
from workers.connection import connect

LIMIT_SECONDS = 3.0


async def submit(http: httpx.AsyncClient, key: str) -> httpx.Response:
    return await http.post("/tasks", json={"prompt": f"a clip {key}"}, headers={"Idempotency-Key": key})


async def pending(http: httpx.AsyncClient) -> list[str]:
    reply = await http.get("/usage")
    assert reply.status_code == 200, reply.text
    task_ids: list[str] = reply.json()["pending"]["task_ids"]
    return task_ids


async def test_without_a_control_worker_nothing_is_taken_and_the_same_key_works_later(tmp_path: Path) -> None:
    async with (
        running_stand(tmp_path, max_pending_tasks=2, tenant_max_pending_tasks=2) as stand,
        stand.user() as http,
    ):

        async def timed(key: str) -> float:
            begun = time.monotonic()
            reply = await submit(http, key)
            assert_problem(reply, 503, "ADMISSION_UNAVAILABLE")
            assert int(reply.headers["retry-after"]) >= 1
            return time.monotonic() - begun

        assert max(await asyncio.gather(*(timed(f"order-{number}") for number in range(5)))) < LIMIT_SECONDS
        async with stand.control_worker():
            begun = time.monotonic()
            task = await submit(http, "order-3")
            assert task.status_code == 202
            # The admits that were given up on have run by now, if they run at all.
            await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
            assert await pending(http) == [task.json()["task_id"]]
            assert (await http.get("/usage")).json()["tenant_pending"] == {"limit": 2, "used": 1}
            assert (await submit(http, "order-3")).status_code == 200
            assert (await submit(http, "order-4")).status_code == 202
            assert (await submit(http, "order-0")).status_code == 429


@pytest.mark.durability
async def test_while_temporal_is_killed_it_is_503_and_the_same_key_works_when_it_is_back(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server, restart = await stack.enter_async_context(killable(tmp_path))
        sock = stack.enter_context(listening())
        settings = api_settings(
            tmp_path, server.address, sock.getsockname()[1], temporal_call_timeout_seconds=0.8, max_pending_tasks=3
        )
        await server.prepare(retention=settings.retention)
        keys = create_keys(settings)
        client = await connect(settings)
        url = stack.enter_context(serving(settings, sock))
        stand: Stand = open_stand(tmp_path, url, settings, client, keys)
        http = await stack.enter_async_context(stand.user())
        await stack.enter_async_context(stand.control_worker())
        assert (await submit(http, "before")).status_code == 202

        down = asyncio.ensure_future(restart())
        refused, seconds = 0, 0.0
        while not down.done():
            begun = time.monotonic()
            reply = await submit(http, "meanwhile")
            seconds = max(seconds, time.monotonic() - begun)
            if reply.status_code == 503:
                assert reply.json()["code"] in {"TEMPORAL_UNAVAILABLE", "ADMISSION_UNAVAILABLE"}
                refused += 1
        await down
        assert refused, "nothing was sent while the server was down"
        # Three calls, each with its own limit.
        assert seconds < LIMIT_SECONDS + 2 * 0.8
        async with asyncio.timeout(30):
            while (reply := await submit(http, "meanwhile")).status_code == 503:
                await asyncio.sleep(0.3)
        assert reply.status_code in {200, 202}
        task_ids = await pending(http)
        assert len(task_ids) == 2
        assert reply.json()["task_id"] in task_ids
        assert (await submit(http, "third")).status_code == 202
        assert (await submit(http, "fourth")).status_code == 429
