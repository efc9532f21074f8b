"""GET /tasks: own tasks, filtered, page by page."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.api.stand import PlayedGeneration, Stand, until
from tests.api.test_problems import assert_problem


async def submit(http: httpx.AsyncClient, prompt: str) -> str:
    task_id: str = (await http.post("/tasks", json={"prompt": prompt})).json()["task_id"]
    return task_id


async def listed(http: httpx.AsyncClient, count: int, **query: str) -> list[dict[str, Any]]:
    """The first page, once it has `count` items: the index lags behind."""
    deadline = time.monotonic() + 10
    while True:
        page = (await http.get("/tasks", params=query)).json()
        if len(page["items"]) == count:
            items: list[dict[str, Any]] = page["items"]
            return items
        assert time.monotonic() < deadline, page
        await asyncio.sleep(0.1)


async def test_lists_own_tasks_only_newest_first(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    ids = [await submit(waiting, f"prompt {n}") for n in range(3)]
    async with quiet.user() as stranger:
        await submit(stranger, "theirs")
    items = await listed(waiting, 3)
    assert [item["task_id"] for item in items] == ids[::-1]
    assert items[0]["parameters"]["prompt"] == "prompt 2"
    assert "callback_status" not in items[0]


async def test_pages_by_cursor_visit_every_task_once(waiting: httpx.AsyncClient) -> None:
    ids = [await submit(waiting, f"prompt {n}") for n in range(5)]
    await listed(waiting, 5)
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(4):
        page = (await waiting.get("/tasks", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        seen += [item["task_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == sorted(ids)


async def test_pages_skip_nothing_while_tasks_come_and_end(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    ids = [await submit(waiting, f"prompt {n}") for n in range(6)]
    await listed(waiting, 6)
    seen: list[tuple[str, str]] = []
    cursor: str | None = None
    for page_number in range(8):
        page = (await waiting.get("/tasks", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        seen += [(item["task_id"], item["status"]) for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        await submit(waiting, f"meanwhile {page_number}")
        if page_number == 0:
            # One that was seen ends, and one that was not.
            for index in (5, 0):
                await quiet.client.get_workflow_handle(ids[index]).terminate()
            await listed(waiting, 2, status="CANCELED")
    assert {task_id for task_id, _ in seen} >= set(ids)
    assert len(seen) == len(set(seen)), "a task appears again only with another state"


async def test_filters_by_state_model_and_time(stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    done, failed, running = [await submit(http, prompt) for prompt in ("a clip", "fail please", "hold on")]
    await until(http, done, status="SUCCEEDED")
    await until(http, failed, status="FAILED")
    await until(http, running, status="PROCESSING")
    for status, task_id in (("SUCCEEDED", done), ("FAILED", failed), ("PROCESSING", running)):
        assert [item["task_id"] for item in await listed(http, 1, status=status)] == [task_id]
    await listed(http, 3, model="moving-shapes")
    await listed(http, 0, model="other-model")
    created = (await http.get(f"/tasks/{done}")).json()["queued_at"]
    await listed(http, 3, created_after=created)
    await listed(http, 0, created_before=created)
    await listed(http, 0, status="QUEUED")


async def test_a_terminated_task_is_listed_as_canceled(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task_id = await submit(waiting, "never run")
    await quiet.client.get_workflow_handle(task_id).terminate()
    (item,) = await listed(waiting, 1, status="CANCELED")
    assert (item["task_id"], item["status"], item["error_code"]) == (task_id, "CANCELED", "TERMINATED")
    await listed(waiting, 0, status="QUEUED")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"status": "RUNNING"}, "status"),
        ({"created_after": "yesterday"}, "created_after"),
        ({"created_after": "2026-01-31T12:00:00"}, "created_after"),
        ({"created_before": "0.5"}, "created_before"),
        ({"model": "x' OR UserId != '"}, "model"),
        ({"batch_id": "a\\"}, "batch_id"),
        ({"cursor": "%%%"}, "cursor"),
        ({"cursor": "AAAA"}, "cursor"),
        ({"cursor": "A" * 40}, "cursor"),
        ({"sort": "asc"}, "sort"),
    ],
)
async def test_wrong_queries_are_refused(http: httpx.AsyncClient, query: dict[str, str], field: str) -> None:
    problem = assert_problem(await http.get("/tasks", params=query), 422, "VALIDATION_FAILED")
    assert field in str(problem["errors"])
