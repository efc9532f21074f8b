"""POST /tasks/{id}/cancel: both modes, at every point, as often as one likes."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.api.stand import PlayedGeneration, Stand, until
from tests.api.test_problems import assert_problem


async def submit(http: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    task: dict[str, Any] = (await http.post("/tasks", json={"prompt": prompt})).json()
    return task


async def cancel(http: httpx.AsyncClient, task: dict[str, Any], mode: str | None = None) -> httpx.Response:
    body = {} if mode is None else {"json": {"mode": mode}}
    return await http.post(f"/tasks/{task['task_id']}/cancel", **body)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["soft", "hard"])
async def test_a_queued_task_is_canceled_at_once_without_gpu(
    quiet: Stand, waiting: httpx.AsyncClient, mode: str
) -> None:
    async with quiet.control_worker():
        task = await submit(waiting, "never run")
        reply = await cancel(waiting, task, mode)
        assert reply.status_code == 202
        ended = reply.json()
        assert (ended["status"], ended["is_terminal"], ended["error_code"]) == ("CANCELED", True, "CANCELED")
        assert ended["cancel_requested"] == "hard"
        assert ended["attempt"] == 0


async def test_cancel_without_a_body_is_soft_and_lets_the_generation_end(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    reply = await cancel(http, task)
    shown = reply.json()
    assert (reply.status_code, shown["status"], shown["is_terminal"]) == (202, "CANCELED", False)
    assert shown["cancel_requested"] == "soft"
    assert reply.headers["retry-after"] == "2"
    again = await cancel(http, task, "soft")
    assert (again.status_code, again.json()["status"]) == (202, "CANCELED")
    played.release(task)
    ended = await until(http, task["task_id"], is_terminal=True)
    assert (ended["status"], ended["error_code"]) == ("CANCELED", "CANCELED")
    assert ended["result"] is not None
    assert (await http.get(f"/tasks/{task['task_id']}/video")).status_code == 200


async def test_hard_cancel_stops_the_attempt(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    reply = await cancel(http, task, "hard")
    assert (reply.status_code, reply.json()["cancel_requested"]) == (202, "hard")
    ended = await until(http, task["task_id"], is_terminal=True)
    assert (ended["status"], ended["result"]) == ("CANCELED", None)


async def test_hard_after_soft_stops_the_attempt(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    await cancel(http, task, "soft")
    assert (await cancel(http, task, "hard")).status_code == 202
    assert (await until(http, task["task_id"], is_terminal=True))["status"] == "CANCELED"


async def test_the_same_request_after_a_hard_cancel_is_a_new_task_and_never_the_dying_one(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "hold on once more")
    await until(http, task["task_id"], status="PROCESSING")
    await cancel(http, task, "soft")
    await cancel(http, task, "hard")
    again = await http.post("/tasks", json={"prompt": "hold on once more"})
    assert (again.status_code, again.json()["retry_of"]) == (202, task["task_id"])
    played.release(again.json())
    await until(http, again.json()["task_id"], status="SUCCEEDED")


async def test_cancel_of_a_closed_canceled_task_is_200_with_the_record(
    quiet: Stand, waiting: httpx.AsyncClient
) -> None:
    async with quiet.control_worker():
        task = await submit(waiting, "never run")
        await cancel(waiting, task, "hard")
        for mode in ("soft", "hard"):
            reply = await cancel(waiting, task, mode)
            assert (reply.status_code, reply.json()["status"], reply.json()["is_terminal"]) == (200, "CANCELED", True)


@pytest.mark.parametrize(("prompt", "status"), [("a clip", "SUCCEEDED"), ("fail please", "FAILED")])
async def test_cancel_of_another_ended_task_is_409_with_its_state(
    http: httpx.AsyncClient, played: PlayedGeneration, prompt: str, status: str
) -> None:
    task = await submit(http, prompt)
    await until(http, task["task_id"], status=status)
    for mode in ("soft", "hard"):
        problem = assert_problem(await cancel(http, task, mode), 409, "TASK_TERMINAL")
        shown = problem["task"]
        assert isinstance(shown, dict)
        assert (shown["task_id"], shown["status"]) == (task["task_id"], status)


async def test_a_terminated_task_counts_as_canceled(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting, "never run")
    await quiet.client.get_workflow_handle(task["task_id"]).terminate()
    reply = await cancel(waiting, task)
    assert (reply.status_code, reply.json()["error_code"]) == (200, "TERMINATED")


async def test_without_a_control_worker_hard_is_accepted_and_soft_refused_in_time(waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting, "never run")
    begun = time.monotonic()
    assert_problem(await cancel(waiting, task, "soft"), 503, "CONTROL_UNAVAILABLE")
    assert time.monotonic() - begun < 4
    begun = time.monotonic()
    reply = await cancel(waiting, task, "hard")
    assert (reply.status_code, reply.json()["cancel_requested"]) == (202, "hard")
    assert time.monotonic() - begun < 2


async def test_unknown_modes_and_fields_are_refused(waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting, "never run")
    assert_problem(await cancel(waiting, task, "gentle"), 422, "VALIDATION_FAILED", mode="enum")
    reply = await waiting.post(f"/tasks/{task['task_id']}/cancel", json={"mode": "soft", "why": "x"})
    assert_problem(reply, 422, "VALIDATION_FAILED", why="extra_forbidden")
