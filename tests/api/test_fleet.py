"""GET /queues, /stats and /workers, and what a queued task says of its start, with one GPU slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from api.admission import OpenAdmission
from api.statistics import distribution
from tests.api.conftest import running_stand
from tests.api.stand import WORK_SECONDS, Stand, http_client, until
from tests.api.test_problems import assert_problem
from tests.api.test_reading import submit
from workflows.states import TaskStatus


@pytest_asyncio.fixture(scope="module")
async def narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway with a control worker and no GPU."""
    folder = tmp_path_factory.mktemp("narrow")
    async with running_stand(folder, admission=OpenAdmission()) as stand, stand.control_worker():
        yield stand


def operator(stand: Stand) -> httpx.AsyncClient:
    return http_client(f"{stand.url}/api/v1", {"Authorization": f"Bearer {stand.keys['operator']}"})


async def eventually(
    http: httpx.AsyncClient, path: str, holds: Callable[[dict[str, Any]], bool], *, seconds: float = 20
) -> dict[str, Any]:
    """What a path answers once it is as expected: indexes lag and answers are cached."""
    found: dict[str, Any] = {}
    try:
        async with asyncio.timeout(seconds):
            while True:
                reply = await http.get(path)
                assert reply.status_code == 200, reply.text
                found = reply.json()
                if holds(found):
                    return found
                await asyncio.sleep(0.3)
    except TimeoutError:
        raise AssertionError(f"{path}: {found}") from None


async def test_the_way_of_a_task_is_seen_in_queues_stats_and_workers(narrow: Stand) -> None:
    async with (
        narrow.user() as http,
        narrow.user() as other,
        operator(narrow) as ops,
        narrow.gpu_worker(slots=1) as played,
    ):
        done = [await submit(http, f"work {n}") for n in range(2)]
        failed = await submit(http, "fail please")
        for task in done:
            await until(http, task["task_id"], status="SUCCEEDED")
        await until(http, failed["task_id"], status="FAILED")
        held = await submit(http, "hold on")
        await until(http, held["task_id"], status="PROCESSING")
        queued = [await submit(http, f"work later {n}") for n in range(2)]

        await eventually(
            http,
            f"/tasks/{queued[1]['task_id']}",
            lambda task: task["queue"]["position"] == 1 and bool(task["queue"]["estimated_start_seconds"]),
        )
        # Two readings may stand on two lists of the queue; soon both stand on the same.
        give_up_at = time.monotonic() + 20
        while True:
            first, second = [(await http.get(f"/tasks/{task['task_id']}")).json()["queue"] for task in queued]
            starts = [queue["estimated_start_seconds"] or 0.0 for queue in (first, second)]
            if starts[1] == pytest.approx(2 * starts[0], abs=0.2) or time.monotonic() > give_up_at:
                break
            await asyncio.sleep(0.2)
        assert (first["position"], second["position"]) == (0, 1)
        assert (first["live_slots"], second["live_slots"]) == (1, 1)
        assert first["estimated_start_seconds"] >= WORK_SECONDS - 0.1
        assert second["estimated_start_seconds"] == pytest.approx(2 * first["estimated_start_seconds"], abs=0.2)

        queue = (await eventually(http, "/queues", lambda found: found["items"][0]["backlog"] == 2))["items"][0]
        assert queue.keys() == {
            *("pool", "backlog", "backlog_age_seconds", "arrival_rate", "completion_rate", "drain_seconds"),
            "live_slots",
        }
        assert (queue["pool"], queue["live_slots"]) == ("default", 1)
        assert queue["backlog_age_seconds"] > 0
        assert queue["drain_seconds"] > 0

        stats = await eventually(http, "/stats", lambda found: found["counts"]["PROCESSING"] == 1)
        assert stats["scope"] == "own"
        assert stats["counts"] == {
            **dict.fromkeys(("CREATED", "TIMEOUT", "CANCELED"), 0),
            "QUEUED": 2,
            "PROCESSING": 1,
            "SUCCEEDED": 2,
            "FAILED": 1,
        }
        assert stats["measured_tasks"] == 3
        spent = stats["durations"]["PROCESSING"]
        assert spent["tasks"] == 3
        assert WORK_SECONDS <= spent["p50_seconds"] <= spent["p95_seconds"] < 10
        assert (await other.get("/stats")).json()["counts"]["QUEUED"] == 0, "another user's"
        everybody = (await ops.get("/stats")).json()
        assert (everybody["scope"], everybody["counts"]["SUCCEEDED"]) == ("all", 2)

        found = await eventually(ops, "/workers", lambda found: any(worker["tasks"] for worker in found["items"]))
        workers = {worker["kind"]: worker for worker in found["items"]}
        assert workers.keys() == {"gpu", "callback", "control"}
        gpu = workers["gpu"]
        assert (gpu["task_queue"], gpu["status"], gpu["tasks"]) == ("gpu-default", "running", [held["task_id"]])
        await eventually(
            ops,
            "/workers",
            lambda found: any(
                (worker["slots_used"], worker["slots_free"]) == (1, 0)
                for worker in found["items"]
                if worker["kind"] == "gpu"
            ),
        )
        assert workers["control"]["slots_free"] > 1
        played.release_all()
        for task in (held, *queued):
            await until(http, task["task_id"], status="SUCCEEDED")


async def test_stats_count_what_operators_ended_as_canceled(narrow: Stand) -> None:
    async with narrow.user() as http:
        task = await submit(http, "never run")
        await narrow.client.get_workflow_handle(task["task_id"]).terminate()
        stats = await eventually(http, "/stats", lambda found: found["counts"]["CANCELED"] == 1)
        assert stats["counts"]["QUEUED"] == 0


async def test_without_a_worker_the_queue_says_so(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    (queue,) = (await waiting.get("/queues")).json()["items"]
    assert (queue["pool"], queue["live_slots"]) == ("default", 0)
    task = await submit(waiting)
    assert (await waiting.get(f"/tasks/{task['task_id']}")).json()["queue"]["estimated_start_seconds"] is None


async def test_workers_are_for_operators_and_stats_need_an_end_user(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    assert_problem(await waiting.get("/workers"), 403, "FORBIDDEN")
    async with http_client(f"{quiet.url}/api/v1", {"Authorization": f"Bearer {quiet.service_key}"}) as service:
        assert_problem(await service.get("/stats"), 422, "VALIDATION_FAILED")


def test_percentiles_are_by_nearest_rank_over_the_tasks_that_were_in_a_state() -> None:
    spent = distribution([{"QUEUED": float(n)} for n in range(1, 101)] + [{"QUEUED": 0.5, "PROCESSING": 7.0}])
    assert list(spent) == [TaskStatus.QUEUED, TaskStatus.PROCESSING]
    queued, processing = spent[TaskStatus.QUEUED], spent[TaskStatus.PROCESSING]
    assert (queued.tasks, queued.p50_seconds, queued.p95_seconds) == (101, 50.0, 95.0)
    assert (processing.tasks, processing.p50_seconds, processing.p95_seconds) == (1, 7.0, 7.0)
    assert distribution([]) == {}
