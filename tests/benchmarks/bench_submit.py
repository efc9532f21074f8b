"""Submitting over HTTP against what it costs at least: bare calls of Temporal by the same SDK, in the same run.

One API process and one control worker, limits on but out of the way; no GPU worker, so that nothing competes. The
latency floor is `describe` of an unknown id and `start_workflow`; the throughput floor is `start_workflow` alone, of
the same workflow. Throughput counts until the control worker has caught up, for both: a start leaves it work to do.

`python -m tests.benchmarks.bench_submit` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import structlog
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment

from tests.api.api_processes import ApiProcess, environment_of
from tests.api.stand import api_settings, create_keys, http_client
from tests.cli.stack import clean_environment
from tests.workflows.jobs import plan
from workers.connection import connect
from workers.devserver import SQLITE_PRAGMAS, dynamic_config_args, temporal_binary
from workers.settings import Settings
from workflows import naming
from workflows.generation import GenerationWorkflow
from workflows.tasks import Limits

ROUNDS = 40
IDLE_SECONDS = 0.05
"""Between two submissions, so that each finds an idle machine."""
THROUGHPUT_ROUNDS = 3
CONCURRENCY = 16
SUBMISSIONS = 160
WARM_TARGET_MS, FIRST_TARGET_MS, RATIO_TARGET, THROUGHPUT_TARGET = 40.0, 60.0, 3.0, 0.5

_PATIENT = Limits(queue_timeout_seconds=3_600.0)


@contextmanager
def control_worker(settings: Settings, log: Path) -> Iterator[None]:
    """A control worker in a process of its own."""
    environment = {**clean_environment(), **environment_of(settings), "REELGATE_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "api.cli", "worker", "control"]
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as running:
        try:
            yield
        finally:
            running.kill()


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
    numbers = iter(range(SUBMISSIONS))
    queued = await bare.queued()

    async def caller() -> None:
        for number in numbers:
            await call(number)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))
    while await bare.queued() < queued + SUBMISSIONS:
        await asyncio.sleep(0.1)
    return SUBMISSIONS / (time.perf_counter() - began)


async def measure(submitter: Submitter, bare: Bare) -> dict[str, float]:
    """Rounds that alternate between both."""
    for number in range(5):
        await submitter.submit("warm")
        await submitter.submit(f"stranger-{number}")
        await bare.describe_and_start()
    idle = [
        (
            await milliseconds(lambda: submitter.submit("warm")),
            await milliseconds(lambda: submitter.submit(f"first-{uuid4().hex}")),
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
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="reelgate-bench-") as name:
        folder = Path(name)
        env = await WorkflowEnvironment.start_local(
            dev_server_existing_path=temporal_binary(),
            dev_server_database_filename=str(folder / "temporal.db"),
            dev_server_extra_args=[
                *dynamic_config_args(),
                *(part for pragma in SQLITE_PRAGMAS for part in ("--sqlite-pragma", pragma)),
            ],
            dev_server_log_level="error",
        )
        async with env:
            settings = api_settings(
                folder,
                env.client.service_client.config.target_host,
                1,
                max_pending_tasks=100_000,
                submit_rate_per_minute=600_000.0,
                submit_burst=100_000,
                max_backlog=100_000,
                # Nobody takes the jobs.
                queue_timeout_seconds=3_600.0,
            )
            keys = create_keys(settings)
            client = await connect(settings, register_search_attributes=True)
            with control_worker(settings, folder / "control"), ApiProcess(settings, folder / "api") as process:
                await asyncio.to_thread(process.until_ready)
                async with http_client(f"{process.url}/api/v1", {"Authorization": f"Bearer {keys['service']}"}) as http:
                    submitter = Submitter(http)
                    while not await _served(submitter):
                        await asyncio.sleep(0.2)
                    figures = await measure(submitter, Bare(client))
    for name, value in figures.items():
        print(f"{name:>28}  {value:g}")  # noqa: T201 - this is what the program is for
    print(json.dumps({"bench": "submit", **figures}))  # noqa: T201


async def _served(submitter: Submitter) -> bool:
    """Whether the control worker is up: until then a submission is 503."""
    try:
        await submitter.submit("warm")
    except AssertionError:
        return False
    return True


if __name__ == "__main__":
    asyncio.run(main())
