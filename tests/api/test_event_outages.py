"""Event streams when what they watch is shaken: the Temporal server killed, the run reset by an operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from api.admission import OpenAdmission
from tests.api.event_readers import states, to_the_end, upto, watching
from tests.api.stand import PlayedGeneration, Stand, api_settings, create_keys, listening, open_stand, serving
from workers.connection import connect
from workers.devserver import DevServer, free_port

SUCCEEDED = [("QUEUED", False), ("PROCESSING", False), ("SUCCEEDED", False), ("SUCCEEDED", True)]


@asynccontextmanager
async def killable(folder: Path) -> AsyncIterator[tuple[DevServer, Callable[[], Awaitable[None]]]]:
    """A server with its state in a file, and what kills it and starts it again."""
    server = DevServer(state_file=folder / "temporal.db", port=free_port(), ui_port=free_port())
    processes: list[asyncio.subprocess.Process] = []

    async def restart() -> None:
        if processes and processes[-1].returncode is None:
            processes[-1].kill()
            await processes[-1].wait()
            # Long enough for calls to fail, not only to wait.
            await asyncio.sleep(1.5)
        processes.append(
            await asyncio.create_subprocess_exec(
                *server.command(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
        )
        await server.wait_until_ready(timeout=timedelta(seconds=30))

    await restart()
    try:
        yield server, restart
    finally:
        processes[-1].kill()
        await processes[-1].wait()


@pytest.mark.durability
async def test_a_stream_outlives_a_killed_temporal_server_and_misses_nothing(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server, restart = await stack.enter_async_context(killable(tmp_path))
        sock = stack.enter_context(listening())
        settings = api_settings(tmp_path, server.address, sock.getsockname()[1], temporal_call_timeout_seconds=1.0)
        await server.prepare(retention=settings.retention)
        keys = create_keys(settings)
        client = await connect(settings)
        url = stack.enter_context(serving(settings, sock, admission=OpenAdmission()))
        stand = open_stand(tmp_path, url, settings, client, keys)
        http = await stack.enter_async_context(stand.user())

        task_id = (await http.post("/tasks", json={"prompt": "a clip"})).json()["task_id"]
        events = await stack.enter_async_context(watching(http, task_id))
        seen = await upto(events, "progress", status="QUEUED")
        await restart()
        async with stand.workers(), asyncio.timeout(60):
            seen += [event async for event in events]
        assert states(seen) == SUCCEEDED
        assert [event.order for event in seen] == sorted({event.order for event in seen})


async def test_after_a_reset_the_stream_ends_and_the_next_one_tells_the_new_run(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task_id = (await http.post("/tasks", json={"prompt": f"hold {uuid4().hex}"})).json()["task_id"]
    async with watching(http, task_id) as events:
        seen = await upto(events, "progress", status="PROCESSING")
        await stand.client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=stand.client.namespace,
                workflow_execution=WorkflowExecution(workflow_id=task_id),
                reason="test",
                workflow_task_finish_event_id=4,
                request_id=uuid4().hex,
            )
        )
        seen += [event async for event in events]
    assert all(not is_terminal for _, is_terminal in states(seen))
    played.release({"task_id": task_id})
    after = await to_the_end(http, task_id)
    assert states(after)[0] == ("QUEUED", False)
    assert states(after)[-1] == ("SUCCEEDED", True)
