"""What reads cost: calls to Temporal are counted by the SDK itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from starlette.types import Receive, Scope, Send
from temporalio.client import Client
from temporalio.runtime import MetricBuffer, Runtime, TelemetryConfig

from api.admission import OpenAdmission
from api.app import create_app
from tests.api.stand import PlayedGeneration, Stand, until
from tests.api.test_reading import HOOK, submit


class Calls:
    """Calls that one client made."""

    def __init__(self, buffer: MetricBuffer) -> None:
        self._buffer = buffer

    def since(self) -> Counter[str]:
        """Calls since this was asked the last time, by operation."""
        made: Counter[str] = Counter()
        for update in self._buffer.retrieve_updates():
            if update.metric.name.endswith("request"):
                made[str(update.attributes["operation"])] += int(update.value)
        return made


Counted = tuple[httpx.AsyncClient, Calls]


@pytest_asyncio.fixture
async def counted(stand: Stand, http: httpx.AsyncClient) -> AsyncIterator[Counted]:
    """Another API process on the same Temporal server, whose calls are counted; for the user of `http`."""
    buffer = MetricBuffer(10_000)
    runtime = Runtime(telemetry=TelemetryConfig(metrics=buffer))
    client = await Client.connect(
        stand.settings.temporal_address, data_converter=stand.client.data_converter, runtime=runtime
    )
    app = create_app(stand.settings, client=client, admission=OpenAdmission())
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = dict(state or {})
            await app(scope, receive, send)

        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url=http.base_url, headers=http.headers) as reader:
            yield reader, Calls(buffer)


async def test_a_closed_and_delivered_task_is_read_without_a_call(
    http: httpx.AsyncClient, played: PlayedGeneration, counted: Counted
) -> None:
    reader, calls = counted
    task = await submit(http, callback_url=HOOK)
    await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True, callback_status="SUCCEEDED")
    path = f"/tasks/{task['task_id']}"
    calls.since()
    first = await reader.get(path)
    assert calls.since() == {"DescribeWorkflowExecution": 2}, "the run and its callback"
    for _ in range(20):
        again = await reader.get(path)
        assert (again.status_code, again.content) == (200, first.content)
        unchanged = await reader.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        for name in ("etag", "cache-control", "content-security-policy", "x-content-type-options", "ratelimit"):
            assert name in again.headers
            assert name in unchanged.headers
        assert again.headers["content-type"] == "application/json"
    assert calls.since() == {}


async def test_an_answer_from_memory_is_refused_as_any_other(
    http: httpx.AsyncClient, played: PlayedGeneration, counted: Counted
) -> None:
    reader, _ = counted
    task = await submit(http)
    await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    path = f"/tasks/{task['task_id']}"
    assert (await reader.get(path)).status_code == 200
    for headers, status in (
        ({"Authorization": "Bearer nonsense"}, 401),
        ({"X-User-Id": "somebody-else"}, 404),
        ({"X-User-Id": "x" * 65}, 422),
    ):
        assert (await reader.get(path, headers=headers)).status_code == status
    assert (await reader.delete(f"{path}/video")).status_code == 405


async def test_a_storm_of_reads_of_queued_tasks_lists_the_queue_once(quiet: Stand) -> None:
    buffer = MetricBuffer(10_000)
    client = await Client.connect(
        quiet.settings.temporal_address,
        data_converter=quiet.client.data_converter,
        runtime=Runtime(telemetry=TelemetryConfig(metrics=buffer)),
    )
    app = create_app(quiet.settings, client=client, admission=OpenAdmission())
    async with app.router.lifespan_context(app) as state, quiet.user() as http:
        tasks = [await submit(http, f"wait {n}") for n in range(3)]

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = dict(state or {})
            await app(scope, receive, send)

        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(with_state), base_url=http.base_url, headers=http.headers
        ) as reader:
            replies = await asyncio.gather(
                *(reader.get(f"/tasks/{task['task_id']}") for task in tasks for _ in range(10))
            )
    assert {reply.status_code for reply in replies} == {200}
    made = Calls(buffer).since()
    assert made["DescribeWorkflowExecution"] == 30
    # The queue, and the lengths of tasks that ended.
    assert made["ListWorkflowExecutions"] <= 2
    assert made["ListWorkers"] == 1


async def test_queued_tasks_know_how_many_were_accepted_before_them(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    tasks = [await submit(waiting, f"in line {n}") for n in range(3)]
    async with asyncio.timeout(15):
        # The index lags, and between two reads there may be a newer list.
        while True:
            queues = [(await waiting.get(f"/tasks/{task['task_id']}")).json()["queue"] for task in tasks]
            first, second, third = [queue["position"] for queue in queues]
            if None not in (first, second, third) and (second, third) == (first + 1, first + 2):
                break
            await asyncio.sleep(0.2)
