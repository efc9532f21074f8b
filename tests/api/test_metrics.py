"""`/metrics` of the API: requests, admissions, refusals of the guard, queues, and what answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from temporalio.testing import WorkflowEnvironment

from api.metrics import ApiMetrics
from tests.api.stand import Stand, api_settings, create_keys, http_client, listening, open_stand, serving, until
from tests.api.test_problems import assert_problem
from workers.connection import connect
from workers.devserver import server_args, temporal_binary
from workers.settings import Settings

BURST = 60


@dataclass
class Measured:
    """A gateway and its metrics page."""

    stand: Stand
    env: WorkflowEnvironment

    async def text(self) -> str:
        """The page, from an address of its own: the guard must not count the test's storms for it."""
        async with http_client(self.stand.url, {"X-Forwarded-For": "192.0.2.200"}) as http:
            return (await http.get("/metrics")).raise_for_status().text

    async def value(self, name: str, **labels: str) -> float | None:
        """A sample of the page."""
        for family in text_string_to_metric_families(await self.text()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None

    async def requests(self, route: str, status: str, method: str = "GET") -> float:
        """Requests counted so far."""
        return await self.value("reelgate_http_requests_total", route=route, status=status, method=method) or 0.0

    async def admissions(self, outcome: str) -> float:
        """Admissions counted so far."""
        return await self.value("reelgate_admissions_total", outcome=outcome) or 0.0

    async def until(self, name: str, expected: float | None, **labels: str) -> None:
        """Wait for a sample."""
        async with asyncio.timeout(30):
            while (seen := await self.value(name, **labels)) != expected:
                assert seen is None or seen >= 0
                await asyncio.sleep(0.2)


@pytest_asyncio.fixture(scope="module")
async def measured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Measured]:
    """A gateway with narrow limits and no workers; the last test takes its Temporal away."""
    folder: Path = tmp_path_factory.mktemp("measured")
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=server_args(),
        dev_server_log_level="error",
    )
    async with env:
        with listening() as sock:
            settings = api_settings(
                folder,
                env.client.service_client.config.target_host,
                sock.getsockname()[1],
                max_backlog=1,
                max_pending_tasks=1,
                request_rate_per_second=5,
                request_burst=BURST,
                trusted_proxies=("127.0.0.1",),
            )
            keys = create_keys(settings)
            client = await connect(settings, register_search_attributes=True)
            with serving(settings, sock) as url:
                yield Measured(open_stand(folder, url, settings, client, keys), env)


async def test_requests_are_counted_by_template_whoever_answers_them(measured: Measured) -> None:
    async with measured.stand.user() as http:
        before = await measured.requests("/api/v1/tasks/{task_id}", "4xx")
        assert (await http.get("/tasks/t234567abcdefghijklmnopqrst")).status_code == 404
        assert (await http.get("/tasks/tabcdefghijklmnopqrst234567")).status_code == 404
        assert await measured.requests("/api/v1/tasks/{task_id}", "4xx") == before + 2
        assert (await http.get("/no/such/place")).status_code == 404
        assert await measured.requests("none", "4xx") == 1
        assert (await http.request("PROPFIND", "/models")).status_code == 405
        assert await measured.value("reelgate_http_requests_total", method="OTHER", status="4xx") == 1
        assert "PROPFIND" not in await measured.text()
        assert "such" not in await measured.text()
        assert (await http.get("/models")).status_code == 200
    assert ((await measured.value("reelgate_http_request_seconds_count", route="/api/v1/models")) or 0) >= 1


async def test_without_workers_submissions_are_refused_as_errors_of_ours_and_queues_show_no_worker(
    measured: Measured,
) -> None:
    async with measured.stand.user() as http:
        assert_problem(await http.post("/tasks", json={"prompt": "a clip"}), 503, "ADMISSION_UNAVAILABLE")
    assert await measured.admissions("ADMISSION_UNAVAILABLE") == 1
    assert await measured.requests("/api/v1/tasks", "5xx", method="POST") == 1
    for queue in ("gpu-default", "callback", "control"):
        assert await measured.value("reelgate_queue_workers", queue=queue) == 0, queue


async def test_admissions_are_counted_by_outcome_and_an_ended_task_by_its_template(measured: Measured) -> None:
    stand = measured.stand
    async with stand.user() as http, stand.user() as other, stand.control_worker():
        task = (await http.post("/tasks", json={"prompt": "a clip"})).json()
        assert_problem(await http.post("/tasks", json={"prompt": "another"}), 429, "TOO_MANY_PENDING_TASKS")
        assert (await measured.admissions("ADMITTED"), await measured.admissions("TOO_MANY_PENDING_TASKS")) == (1, 1)
        await measured.until("reelgate_queue_backlog", 1, queue="gpu-default")
        assert (await measured.value("reelgate_queue_backlog_age_seconds", queue="gpu-default") or 0) > 0
        assert_problem(await other.post("/tasks", json={"prompt": "too many wait"}), 503, "QUEUE_FULL")
        assert (await measured.admissions("QUEUE_FULL"), await measured.admissions("ADMITTED")) == (1, 1)
        async with stand.gpu_worker(slots=4):
            await until(http, task["task_id"], status="SUCCEEDED")
            await measured.until("reelgate_queue_workers", 1, queue="callback")
            await measured.until("reelgate_queue_live_slots", 4, queue="gpu-default")
            await measured.until("reelgate_queue_drain_seconds", 0, queue="gpu-default")
        before = await measured.requests("/api/v1/tasks/{task_id}", "2xx")
        for _ in range(3):
            assert (await http.get(f"/tasks/{task['task_id']}")).status_code == 200
        assert await measured.requests("/api/v1/tasks/{task_id}", "2xx") == before + 3
        assert task["task_id"] not in await measured.text()


async def test_refusals_of_the_guard_are_counted_by_what_they_count(measured: Measured) -> None:
    async def storm(**headers: str) -> int:
        async with http_client(measured.stand.url, {"X-Forwarded-For": "192.0.2.9", **headers}) as http:
            replies = await asyncio.gather(*(http.get("/api/v1/models") for _ in range(BURST + 5)))
        return sum(reply.status_code == 429 for reply in replies)

    by_address = await storm()
    by_key = await storm(Authorization=f"Bearer {measured.stand.keys['user']}")
    assert min(by_address, by_key) > 0
    assert await measured.value("reelgate_request_guard_refusals_total", by="address") == by_address
    assert await measured.value("reelgate_request_guard_refusals_total", by="key") == by_key
    assert await measured.requests("none", "4xx") >= by_address + by_key


def test_series_that_alerts_divide_are_there_before_anything_happens(tmp_path: Path) -> None:
    registry = ApiMetrics(Settings(data_dir=tmp_path)).registry
    for outcome in ("ADMITTED", "QUEUE_FULL", "ADMISSION_UNAVAILABLE", "TEMPORAL_UNAVAILABLE"):
        assert registry.get_sample_value("reelgate_admissions_total", {"outcome": outcome}) == 0


async def test_without_temporal_the_page_says_so_in_bounded_time_and_leaves_the_queues_out(measured: Measured) -> None:
    assert await measured.value("reelgate_dependency_up", dependency="temporal") == 1
    await measured.env.shutdown()
    await measured.until("reelgate_dependency_up", 0, dependency="temporal")
    started_at = time.monotonic()
    text = await measured.text()
    assert time.monotonic() - started_at < 8
    assert 'reelgate_dependency_up{dependency="store"} 1.0' in text
    await measured.until("reelgate_queue_backlog", None, queue="gpu-default")
    assert "reelgate_queue_workers{" not in await measured.text()


async def test_the_page_needs_no_key_and_is_prometheus_text(measured: Measured) -> None:
    async with httpx.AsyncClient() as http:
        reply = await http.get(f"{measured.stand.url}/metrics", headers={"X-Forwarded-For": "192.0.2.201"})
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
