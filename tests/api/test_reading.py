"""GET /tasks/{id}: the joined state, without any worker, with validators and polling advice."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import httpx
import pytest

from api.readings import is_task_id, poll_interval
from tests.api.stand import VIDEO, WORKER_ID, PlayedGeneration, Stand, until
from workflows import naming

HOOK = "http://127.0.0.1:9/hook"


async def submit(http: httpx.AsyncClient, prompt: str = "a red circle", **fields: object) -> dict[str, Any]:
    reply = await http.post("/tasks", json={"prompt": prompt, **fields})
    assert reply.status_code == 202, reply.text
    task: dict[str, Any] = reply.json()
    return task


def time_of(text: str) -> datetime:
    assert text.endswith("Z")
    assert len(text) == len("2026-01-31T12:00:00.000Z")
    return datetime.fromisoformat(text)


async def test_a_queued_task_is_read_with_every_worker_stopped(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting)
    read = (await waiting.get(f"/tasks/{task['task_id']}")).json()
    assert (read["status"], read["is_terminal"], read["attempt"], read["worker_id"]) == ("QUEUED", False, 0, None)
    assert (read["queue"]["estimated_start_seconds"], read["queue"]["live_slots"]) == (None, 0)
    assert (read["started_at"], read["finished_at"], read["result"], read["progress"]) == (None, None, None, None)
    assert time_of(read["created_at"]) <= time_of(read["queued_at"]) <= time_of(read["updated_at"])


async def test_a_running_task_shows_worker_progress_and_times(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    for _ in range(100):
        read = (await http.get(f"/tasks/{task['task_id']}")).json()
        if read["progress"]:
            break
        await asyncio.sleep(0.05)
    assert read["progress"] == {"phase": "step", "step": 3, "total_steps": 10, "percent": 30.0, "eta_seconds": 7.0}
    assert (read["worker_id"], read["attempt"], read["gpu_seconds"], read["queue"]) == (WORKER_ID, 1, 0.5, None)
    assert time_of(read["queued_at"]) <= time_of(read["started_at"]) <= time_of(read["updated_at"])
    assert read["durations"].keys() == {"QUEUED"}


async def test_a_started_activity_reads_processing_before_its_signal_was_handled(quiet: Stand) -> None:
    async with quiet.user() as http, quiet.gpu_worker() as played:
        async with quiet.control_worker():
            task = await submit(http, "hold on")
            await until(http, task["task_id"], status="PROCESSING")
        # The attempt goes on without any control worker; so does a second one that nobody signals for.
        read = (await http.get(f"/tasks/{task['task_id']}")).json()
        assert read["status"] == "PROCESSING"
        assert played.runs(task) == 1


async def test_a_succeeded_task_shows_its_result_and_how_its_time_was_spent(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, seed=42)
    read = await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    assert read["is_terminal"]
    assert read["result"] is not None
    assert (read["result"]["bytes"], read["result"]["seed"], read["result"]["width"]) == (
        len(VIDEO),
        42,
        read["parameters"]["width"],
    )
    assert read["durations"].keys() == {"QUEUED", "PROCESSING"}
    assert (read["error_code"], read["gpu_seconds"], read["callback_status"]) == (None, 1.5, None)
    assert time_of(read["started_at"]) <= time_of(read["finished_at"])
    assert read["result_url"].startswith(f"{read['links']['self']}/video?exp=")


async def test_a_failed_task_shows_code_and_message(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "fail please")
    read = await until(http, task["task_id"], status="FAILED", is_terminal=True)
    assert (read["error_code"], read["attempt"], read["result_url"]) == ("INVALID_OUTPUT", 1, None)
    assert "finite" in read["error_message"]


async def test_the_callback_is_joined(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    fine = await submit(http, "one", callback_url=HOOK)
    down = await submit(http, "two", callback_url=f"{HOOK}/down")
    unwanted = await submit(http, "three", callback_url=HOOK, callback_events=["failed"])
    await until(http, fine["task_id"], status="SUCCEEDED", callback_status="SUCCEEDED", callback_attempts=1)
    await until(http, down["task_id"], status="SUCCEEDED", callback_status="RETRYING")
    await until(http, unwanted["task_id"], status="SUCCEEDED", callback_status=None, callback_attempts=None)


async def test_a_terminated_task_reads_canceled(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting)
    await quiet.client.get_workflow_handle(task["task_id"]).terminate("by hand")
    read = (await waiting.get(f"/tasks/{task['task_id']}")).json()
    assert (read["status"], read["error_code"], read["is_terminal"]) == ("CANCELED", "TERMINATED", True)
    assert read["finished_at"] is not None
    assert read["cancel_requested"] is None


async def test_etags_change_with_the_task_and_spare_the_body(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    path = f"/tasks/{task['task_id']}"
    open_etag = (await http.get(path)).headers["etag"]
    played.release(task)
    await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    reply = await http.get(path)
    etag = reply.headers["etag"]
    assert etag != open_etag
    assert reply.headers["cache-control"] == "private, no-cache"
    for value in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        unchanged = await http.get(path, headers={"If-None-Match": value})
        assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    assert (await http.get(path, headers={"If-None-Match": open_etag})).status_code == 200


async def test_polling_advice_ends_with_the_task(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "hold on")
    assert (await http.get(f"/tasks/{task['task_id']}")).headers["retry-after"] == "2"
    played.release(task)
    await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    assert "retry-after" not in (await http.get(f"/tasks/{task['task_id']}")).headers


@pytest.mark.parametrize(("age", "seconds"), [(0, 2), (29.9, 2), (30, 5), (119.9, 5), (120, 10), (3_600, 10)])
def test_polling_slows_down_with_age(age: float, seconds: int) -> None:
    assert poll_interval(age) == seconds


async def test_what_is_in_memory_is_still_the_owners_only(
    http: httpx.AsyncClient, stranger: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http)
    await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    assert (await stranger.get(f"/tasks/{task['task_id']}")).status_code == 404


@pytest.mark.parametrize(
    "text", ["", "t", "t" * 27, "t" + "a" * 25 + "1", "x" + "a" * 26, "t" + "A" * 26, "t" + "a" * 27]
)
def test_only_what_can_be_a_task_id_is_asked_for(text: str) -> None:
    assert is_task_id(text) == (text == "t" * 27)


async def test_the_priority_and_user_are_searchable(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting)
    described = await quiet.client.get_workflow_handle(task["task_id"]).describe()
    attributes = described.typed_search_attributes
    assert attributes.get(naming.TASK_STATUS) == "QUEUED"
    assert attributes.get(naming.MODEL) == task["model"]
    assert len(attributes.get(naming.USER_ID) or "") == 32
