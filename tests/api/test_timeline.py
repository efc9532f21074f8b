"""GET /tasks/{id}/timeline: every state and attempt, while it runs and afterwards, with no worker needed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.api.stand import WORKER_ID, PlayedGeneration, Stand, until
from tests.api.test_problems import assert_problem


async def submit(http: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    task: dict[str, Any] = (await http.post("/tasks", json={"prompt": prompt})).json()
    return task


async def timeline(http: httpx.AsyncClient, task: dict[str, Any]) -> dict[str, Any]:
    reply = await http.get(f"/tasks/{task['task_id']}/timeline")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def statuses(found: dict[str, Any]) -> list[str]:
    return [state["status"] for state in found["states"]]


def assert_seamless(found: dict[str, Any]) -> None:
    """Each state begins where the one before ended, and lasts as long as that says."""
    for state, following in zip(found["states"], found["states"][1:], strict=False):
        assert state["left_at"] == following["entered_at"]
        begin, end = (datetime.fromisoformat(state[name]) for name in ("entered_at", "left_at"))
        assert state["duration_seconds"] == pytest.approx((end - begin).total_seconds(), abs=0.002)
    assert found["states"][-1]["left_at"] is None


async def test_a_succeeded_task_has_three_states_and_one_attempt(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "a clip")
    ended = await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    found = await timeline(http, task)
    assert (found["status"], found["is_terminal"], found["gpu_seconds"]) == ("SUCCEEDED", True, 1.5)
    assert statuses(found) == ["QUEUED", "PROCESSING", "SUCCEEDED"]
    assert_seamless(found)
    assert {s["status"]: s["duration_seconds"] for s in found["states"][:2]} == pytest.approx(ended["durations"])
    assert found["states"][1]["entered_at"] == ended["started_at"]
    assert (found["states"][2]["entered_at"], found["states"][2]["duration_seconds"]) == (ended["finished_at"], None)
    [attempt] = found["attempts"]
    assert (attempt["number"], attempt["state"], attempt["reason"]) == (1, "published", None)
    assert (attempt["worker_id"], attempt["worker_version"], attempt["gpu_seconds"]) == (WORKER_ID, "test", 1.5)
    assert attempt["queued_at"] <= attempt["started_at"] <= attempt["ended_at"]


async def test_a_failed_attempt_has_its_reason(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "fail please")
    await until(http, task["task_id"], status="FAILED")
    found = await timeline(http, task)
    assert statuses(found) == ["QUEUED", "PROCESSING", "FAILED"]
    [attempt] = found["attempts"]
    assert (attempt["state"], attempt["reason"]) == ("ended", "INVALID_OUTPUT")
    assert "finite" in attempt["message"]


async def test_each_attempt_is_told(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "drain once")
    ended = await until(http, task["task_id"], status="SUCCEEDED")
    found = await timeline(http, task)
    assert statuses(found) == ["QUEUED", "PROCESSING", "QUEUED", "PROCESSING", "SUCCEEDED"]
    assert_seamless(found)
    assert [(a["number"], a["state"], a["reason"]) for a in found["attempts"]] == [
        (1, "ended", "WORKER_SHUTDOWN"),
        (2, "published", None),
    ]
    spent: dict[str, float] = {}
    for state in found["states"][:-1]:
        spent[state["status"]] = spent.get(state["status"], 0.0) + state["duration_seconds"]
    assert spent == pytest.approx(ended["durations"], abs=0.003)


async def test_it_is_read_while_the_task_runs_and_of_a_soft_cancel_that_is_revived(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING", gpu_seconds=0.5)
    found = await timeline(http, task)
    assert (statuses(found), found["is_terminal"]) == (["QUEUED", "PROCESSING"], False)
    assert found["states"][1]["duration_seconds"] >= 0
    [attempt] = found["attempts"]
    assert (attempt["state"], attempt["worker_id"], attempt["ended_at"]) == ("running", WORKER_ID, None)
    assert (attempt["gpu_seconds"], attempt["duration_seconds"] >= 0) == (0.5, True)
    await http.post(f"/tasks/{task['task_id']}/cancel")
    assert statuses(await timeline(http, task)) == ["QUEUED", "PROCESSING", "CANCELED"]
    assert (await http.post("/tasks", json={"prompt": "hold on"})).json()["task_id"] == task["task_id"]
    played.release(task)
    await until(http, task["task_id"], status="SUCCEEDED")
    found = await timeline(http, task)
    assert statuses(found) == ["QUEUED", "PROCESSING", "CANCELED", "PROCESSING", "SUCCEEDED"]
    assert_seamless(found)
    assert len(found["attempts"]) == 1


async def test_a_hard_cancel_ends_the_attempt(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    await http.post(f"/tasks/{task['task_id']}/cancel", json={"mode": "hard"})
    await until(http, task["task_id"], is_terminal=True)
    found = await timeline(http, task)
    assert statuses(found) == ["QUEUED", "PROCESSING", "CANCELED"]
    assert (found["attempts"][0]["state"], found["attempts"][0]["reason"]) == ("ended", "CANCELED")


async def test_a_queued_task_without_any_worker(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task = await submit(waiting, "never run")
    found = await timeline(waiting, task)
    assert (statuses(found), found["attempts"]) == (["QUEUED"], [])
    async with quiet.control_worker():
        for _ in range(100):
            if (found := await timeline(waiting, task))["attempts"]:
                break
    [attempt] = found["attempts"]
    assert (attempt["state"], attempt["number"], attempt["worker_id"]) == ("queued", 1, None)
    assert (attempt["started_at"], attempt["duration_seconds"]) == (None, None)
    await quiet.client.get_workflow_handle(task["task_id"]).terminate()
    found = await timeline(waiting, task)
    assert (statuses(found), found["is_terminal"]) == (["QUEUED", "CANCELED"], True)
    assert_seamless(found)
    assert (found["attempts"][0]["state"], found["attempts"][0]["reason"]) == ("ended", "TERMINATED")


async def test_an_attempt_whose_signal_nobody_handled_is_running(quiet: Stand) -> None:
    async with quiet.user() as http, quiet.gpu_worker() as played:
        async with quiet.control_worker():
            # The activity is scheduled by the first workflow task; the worker of workflows is gone when it starts.
            task = await submit(http, "hold on")
            handle = quiet.client.get_workflow_handle(task["task_id"])
            await until(http, task["task_id"], status="PROCESSING")
        found = await timeline(http, task)
        assert found["attempts"][0]["state"] == "running"
        assert statuses(found) == ["QUEUED", "PROCESSING"]
        await handle.terminate()
        played.release(task)


async def test_another_users_task_has_no_timeline(
    http: httpx.AsyncClient, stranger: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "a clip")
    assert_problem(await stranger.get(f"/tasks/{task['task_id']}/timeline"), 404, "TASK_NOT_FOUND")
