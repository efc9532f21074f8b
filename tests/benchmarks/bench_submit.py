"""Submitting over HTTP against what it costs at least: bare calls of Temporal by the same SDK, in the same run.

One API process and one control worker, limits on but out of the way; no GPU worker, so that nothing competes. The
latency floor is `describe` of an unknown id and `start_workflow`; the throughput floor is `start_workflow` alone, of
the same workflow. Throughput counts until the control worker has caught up, for both: a start leaves it work to do.

`python -m tests.benchmarks.bench_submit` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

import httpx
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from tests.api.stand import http_client
from tests.benchmarks.bench_get import content_length
from tests.benchmarks.site import bench_site, call_all, report
from tests.workflows.jobs import plan
from workflows import naming
from workflows.generation import GenerationWorkflow
from workflows.tasks import Limits

ROUNDS = 40
IDLE_SECONDS = 0.25
"""Between two submissions, so that each finds an idle machine."""
THROUGHPUT_ROUNDS = 3
CONCURRENCY = 16
SUBMISSIONS = 160
WARM_TARGET_MS, FIRST_TARGET_MS, RATIO_TARGET, THROUGHPUT_TARGET = 40.0, 60.0, 3.0, 0.5

_PATIENT = Limits(queue_timeout_seconds=3_600.0)


class Bare:
    """The floor: the same SDK and the same workflow without a gateway."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def describe(self) -> None:
        """Ask for a task that is not there."""
        try:
            await self._client.get_workflow_handle(f"t{uuid4().hex[:26]}").describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise

    async def start(self) -> None:
        """Start a job."""
        request = plan(pool="default", callback=None, limits=_PATIENT)
        await self._client.start_workflow(
            GenerationWorkflow.run, request, id=request.task_id, task_queue=naming.CONTROL_QUEUE
        )

    async def queued(self) -> int:
        """Jobs that have reached the GPU queue."""
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=naming.gpu_queue("default")),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            report_stats=True,
        )
        reply = await self._client.workflow_service.describe_task_queue(request)
        return reply.stats.approximate_backlog_count

    async def describe_and_start(self) -> None:
        """What a submission cannot do without."""
        await self.describe()
        await self.start()


class Connection(asyncio.Protocol):
    """One kept connection of a client that costs next to nothing; one request at a time."""

    _answered: asyncio.Future[bytes]

    def __init__(self) -> None:
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if found and len(body) >= content_length(head):
            self._answered.set_result(self._answer)
            self._answer = b""

    async def post(self, path: str, body: Mapping[str, str], headers: Mapping[str, str]) -> bytes:
        """Send a document; the whole answer, status line and headers included."""
        document = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [*(f"{name}: {value}" for name, value in headers.items()), f"Content-Length: {len(document)}", "", ""]
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write("\r\n".join(lines).encode() + document)
        return await self._answered


class Lean:
    """Submits new tasks one after the other, with a client whose own time does not count."""

    def __init__(self, connection: Connection, key: str) -> None:
        self._connection = connection
        self._key = key

    async def submit(self, user: str) -> None:
        """One new task of a user."""
        headers = {"Authorization": f"Bearer {self._key}", "X-User-Id": user}
        body = {"prompt": f"a red circle moving right {uuid4().hex}"}
        answer = await self._connection.post("/api/v1/tasks", body, headers)
        assert answer.startswith(b"HTTP/1.1 202"), answer


class Submitter:
    """Submits new tasks over HTTP."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def submit(self, user: str) -> None:
        """One new task of a user."""
        body = {"prompt": f"a red circle moving right {uuid4().hex}"}
        reply = await self._http.post("/tasks", json=body, headers={"X-User-Id": user})
        assert reply.status_code == 202, reply.text


async def milliseconds(call: Callable[[], Awaitable[None]]) -> float:
    """How long a call takes on an idle machine."""
    await asyncio.sleep(IDLE_SECONDS)
    began = time.perf_counter()
    await call()
    return (time.perf_counter() - began) * 1_000


async def per_second(call: Callable[[int], Awaitable[None]], bare: Bare) -> float:
    """Calls per second at `CONCURRENCY`, until the last job of them waits for a GPU."""
    queued = await bare.queued()
    began = time.perf_counter()
    await call_all(call, SUBMISSIONS, at_once=CONCURRENCY)
    while await bare.queued() < queued + SUBMISSIONS:
        await asyncio.sleep(0.1)
    return SUBMISSIONS / (time.perf_counter() - began)


async def measure(submitter: Submitter, lean: Lean, bare: Bare) -> dict[str, float]:
    """Rounds that alternate between both."""
    for number in range(5):
        await submitter.submit("warm")
        await submitter.submit(f"stranger-{number}")
        await bare.describe_and_start()
    idle = [
        (
            await milliseconds(lambda: lean.submit("warm")),
            await milliseconds(lambda: lean.submit(f"first-{uuid4().hex}")),
            await milliseconds(bare.describe_and_start),
        )
        for _ in range(ROUNDS)
    ]
    warm, first, floor = map(statistics.median, zip(*idle, strict=True))
    for number in range(CONCURRENCY):
        await submitter.submit(f"busy-{number}")
    await asyncio.sleep(2)
    loaded = [
        (
            await per_second(lambda number: submitter.submit(f"busy-{number % CONCURRENCY}"), bare),
            await per_second(lambda _: bare.start(), bare),
        )
        for _ in range(THROUGHPUT_ROUNDS)
    ]
    submissions, starts = map(statistics.median, zip(*loaded, strict=True))
    return {
        "warm_user_p50_ms": round(warm, 1),
        "warm_user_target_ms": WARM_TARGET_MS,
        "first_task_p50_ms": round(first, 1),
        "first_task_target_ms": FIRST_TARGET_MS,
        "describe_and_start_p50_ms": round(floor, 1),
        "warm_ratio": round(warm / floor, 2),
        "warm_ratio_target": RATIO_TARGET,
        "submissions_per_second": round(submissions, 1),
        "bare_starts_per_second": round(starts, 1),
        "throughput_ratio": round(statistics.median(ours / theirs for ours, theirs in loaded), 2),
        "throughput_ratio_target": THROUGHPUT_TARGET,
    }


async def main() -> None:
    """Measure and print."""
    async with bench_site() as site:
        site.worker("control")
        process = site.api()
        await asyncio.to_thread(process.until_ready)
        async with http_client(f"{process.url}/api/v1", {"Authorization": f"Bearer {site.keys['service']}"}) as http:
            submitter = Submitter(http)
            while not await _served(submitter):
                await asyncio.sleep(0.2)
            host, port = process.url.removeprefix("http://").split(":")
            _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
            figures = await measure(submitter, Lean(connection, site.keys["service"]), Bare(site.client))
    report("submit", figures)


async def _served(submitter: Submitter) -> bool:
    """Whether the control worker is up: until then a submission is 503."""
    try:
        await submitter.submit("warm")
    except AssertionError:
        return False
    return True


if __name__ == "__main__":
    asyncio.run(main())
