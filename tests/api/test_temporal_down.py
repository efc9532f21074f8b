"""When Temporal is gone: refusals in bounded time, what is remembered stays readable, and nothing pretends to work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio
from temporalio.testing import WorkflowEnvironment

from api.fleet import CACHE_SECONDS
from tests.api.stand import api_settings, create_keys, listening, open_stand, serving, until
from tests.api.test_problems import assert_problem
from workers.connection import connect
from workers.devserver import server_args, temporal_binary

LIMIT_SECONDS = 3.0


@pytest_asyncio.fixture
async def orphaned(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, str, str]]:
    """An API whose Temporal has just died, with a task that ended and one that had not."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=server_args(),
        dev_server_log_level="error",
    )
    with listening() as sock:
        address = env.client.service_client.config.target_host
        settings = api_settings(tmp_path, address, sock.getsockname()[1], temporal_call_timeout_seconds=1.5)
        keys = create_keys(settings)
        client = await connect(settings, register_search_attributes=True)
        with serving(settings, sock) as url:
            stand = open_stand(tmp_path, url, settings, client, keys)
            async with stand.user() as http:
                async with stand.control_worker():
                    async with stand.gpu_worker():
                        ended = (await http.post("/tasks", json={"prompt": "a clip"})).json()["task_id"]
                        await until(http, ended, status="SUCCEEDED", is_terminal=True)
                    waiting = (await http.post("/tasks", json={"prompt": "another"})).json()["task_id"]
                await env.shutdown()
                yield http, ended, waiting


async def test_everything_answers_in_bounded_time_without_temporal(
    orphaned: tuple[httpx.AsyncClient, str, str],
) -> None:
    http, ended, waiting = orphaned
    refused = [
        http.post("/tasks", json={"prompt": "a clip"}),
        http.get(f"/tasks/{waiting}"),
        http.post(f"/tasks/{waiting}/cancel"),
        http.post(f"/tasks/{waiting}/cancel", json={"mode": "hard"}),
        http.get(f"/tasks/{waiting}/video"),
        http.get("/tasks"),
        http.get("/stats"),
    ]

    async def timed(request: object) -> tuple[httpx.Response, float]:
        begun = time.monotonic()
        reply: httpx.Response = await request  # type: ignore[misc]
        return reply, time.monotonic() - begun

    for reply, seconds in await asyncio.gather(*map(timed, refused)):
        assert_problem(reply, 503, "TEMPORAL_UNAVAILABLE")
        assert int(reply.headers["retry-after"]) >= 1
        assert seconds < LIMIT_SECONDS
    assert_problem(await http.post("/tasks", json={"prompt": ""}), 422, "VALIDATION_FAILED")
    remembered = await http.get(f"/tasks/{ended}")
    assert (remembered.status_code, remembered.json()["status"]) == (200, "SUCCEEDED")
    assert (await http.get(f"/tasks/{ended}/video")).status_code == 200
    await asyncio.sleep(CACHE_SECONDS)
    models = (await http.get("/models")).json()
    assert {item["serving"]["state"] for item in models["items"]} == {"unknown"}
    root = str(http.base_url).removesuffix("/api/v1/")
    assert (await http.get(f"{root}/healthz")).json() == {"status": "ok"}
    ready = await http.get(f"{root}/readyz")
    assert (ready.status_code, ready.json()) == (
        503,
        {"status": "not_ready", "temporal": "unreachable", "store": "ok"},
    )
