"""Every process is replaced while tasks run and wait: a restart in place, and an upgrade to another version."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
import pytest_asyncio

from tests.api.api_processes import ApiProcess
from tests.api.stand import http_client
from tests.durability.releases import deploy, start_version, until_known
from tests.durability.site import TENANT, Process, Site
from tests.receiver import Receiver
from tests.scale import soak_only
from workers.keys_admin import create_key
from workflows import naming
from workflows.failures import FailureCode
from workflows.states import ENDED, TaskStatus
from workflows.tasks import GenerationInput, TaskRecord

pytestmark = [pytest.mark.durability, pytest.mark.timeout(300)]

DRAIN_SECONDS = 60
FREE_ENDS = {None, FailureCode.WORKER_SHUTDOWN}
"""Ends of an attempt that a restart may bring: none that counts."""


@pytest_asyncio.fixture
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with Receiver() as receiver:
        opened = await Site.open(tmp_path_factory.mktemp("site"), receiver, workers=())
        try:
            yield opened
        finally:
            opened.close()


async def drained(process: Process) -> None:
    """SIGTERM, and wait until it has drained."""
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.popen.wait, DRAIN_SECONDS) == 0


@dataclass
class Clients:
    """They submit and poll over HTTP, and come back when the API is away."""

    api: ApiProcess
    key: str
    task_ids: list[str] = field(default_factory=list)

    async def submit(self, count: int, *, callback_url: str) -> None:
        """Submit tasks, each once, whatever the API does meanwhile. Every fifth is longer than a drain."""
        async with self._http() as http:
            for number in range(len(self.task_ids), len(self.task_ids) + count):
                body = {
                    "model": "tiny-wan",
                    "prompt": f"take {number}",
                    "width": 64,
                    "height": 64,
                    "num_frames": 9,
                    "num_inference_steps": 400 if number % 5 == 0 else 80,
                    "callback_url": callback_url,
                }
                reply = await self._until_answered(
                    http, "POST", json=body, headers={"Idempotency-Key": f"take-{number}"}
                )
                assert reply.status_code in {200, 202}, reply.text
                self.task_ids.append(reply.json()["task_id"])

    async def states(self) -> list[TaskStatus]:
        """State of every task, as a client reads it."""
        async with self._http() as http:
            replies = [await self._until_answered(http, "GET", f"/{task_id}") for task_id in self.task_ids]
        return [TaskStatus(reply.json()["status"]) for reply in replies]

    async def until_busy(self, count: int, *, callback_url: str) -> None:
        """Submit tasks until some run and some wait."""
        await self.submit(count, callback_url=callback_url)
        async with asyncio.timeout(90):
            while not {TaskStatus.PROCESSING, TaskStatus.QUEUED} <= set(states := await self.states()):
                if all(state in ENDED for state in states):
                    await self.submit(count, callback_url=callback_url)
                await asyncio.sleep(0.05)

    async def until_ended(self) -> None:
        """Wait until every task has ended."""
        while not all(state in ENDED for state in await self.states()):
            await asyncio.sleep(0.5)

    def _http(self) -> httpx.AsyncClient:
        return http_client(self.api.url, {"Authorization": f"Bearer {self.key}"})

    async def _until_answered(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str = "",
        *,
        json: dict[str, object] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        async with asyncio.timeout(90):
            while True:
                try:
                    reply = await http.request(method, f"/api/v1/tasks{path}", json=json, headers=headers)
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
                    continue
                if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return reply
                await asyncio.sleep(0.2)


async def check(site: Site, task_ids: list[str]) -> list[TaskRecord]:
    """Every task has succeeded, once: one attempt published, one artifact, one callback, nothing was charged."""
    records = []
    for task_id in task_ids:
        job: GenerationInput = await (await (await site.client()).get_workflow_handle(task_id).describe()).memo_value(
            naming.MEMO_REQUEST, type_hint=GenerationInput
        )
        record = await site.record(job)
        assert record.status is TaskStatus.SUCCEEDED, record
        outcomes = [attempt.outcome for attempt in record.attempts]
        assert outcomes.count(None) == 1
        assert set(outcomes) <= FREE_ENDS
        await site.check_one_ending(job, record)
        records.append(record)
    return records


@pytest_asyncio.fixture
async def clients(site: Site) -> AsyncIterator[Clients]:
    """Clients of an API process."""
    created = create_key(site.settings.keys_file, tenant=TENANT)
    settings = site.settings.model_copy(
        update={
            "max_pending_tasks": 1_000,
            "submit_rate_per_minute": 6_000.0,
            "submit_burst": 1_000,
            "request_rate_per_second": 1_000.0,
            "request_burst": 1_000,
            # A hundred tasks on two CPU slots wait longer than three minutes.
            "queue_timeout_seconds": 1_200.0,
        }
    )
    with ApiProcess(settings, site.folder / "api.log") as api:
        await asyncio.to_thread(api.until_ready)
        yield Clients(api=api, key=created.token)


async def until_polling(site: Site, name: str, *, starts: int) -> None:
    """Wait until a worker polls that was started for the n-th time."""
    log = site.folder / f"{name}.log"
    async with asyncio.timeout(90):
        while not log.exists() or log.read_text().count('"worker_started"') < starts:
            await asyncio.sleep(0.1)


@soak_only
@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_rolling_restart_of_every_process_loses_no_task_and_runs_none_twice(
    site: Site, clients: Clients
) -> None:
    names = ("control", "callback", "gpu-a", "gpu-b")
    for name in names:
        site.start(name)
    for name in names:
        await until_polling(site, name, starts=1)
    at_a_time = 20
    await clients.until_busy(at_a_time, callback_url=site.receiver.url)
    assert await asyncio.to_thread(clients.api.stop) == 0
    clients.api.start()
    for name in names:
        await clients.until_busy(at_a_time, callback_url=site.receiver.url)
        await drained(site.processes[name])
        site.start(name)
        await until_polling(site, name, starts=2)
    await clients.until_ended()
    records = await check(site, clients.task_ids)
    assert len(records) >= 5 * at_a_time
    assert {r.worker_id for r in records} == {"gpu-a/0", "gpu-b/0"}


@soak_only
@pytest.mark.soak
async def test_an_upgrade_to_another_version_of_every_pool_loses_no_task_and_runs_none_twice(
    site: Site, clients: Clients
) -> None:
    pools = {"control": "control", "callback": "callback", "gpu": "gpu-default"}
    for kind, queue in pools.items():
        start_version(site, f"{kind}-one", "1")
        await until_known(site, queue, "1")
        await deploy(site, "current", queue, "1")
    await clients.until_busy(3, callback_url=site.receiver.url)
    for kind, queue in pools.items():
        start_version(site, f"{kind}-two", "2")
        await until_known(site, queue, "2")
        await clients.until_busy(2, callback_url=site.receiver.url)
        await deploy(site, "current", queue, "2")
        await drained(site.processes[f"{kind}-one"])
    await clients.submit(2, callback_url=site.receiver.url)
    await clients.until_ended()
    records = await check(site, clients.task_ids)
    versions = [record.attempts[-1].worker_version for record in records]
    assert versions[0] == "1"
    assert versions[-2:] == ["2", "2"]
