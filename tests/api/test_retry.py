"""POST /tasks/{id}/retry: the next link of the chain, once, with the same parameters."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.api.stand import PlayedGeneration, Stand, until
from tests.api.test_problems import assert_problem
from workflows import naming
from workflows.tasks import GenerationInput, TaskPriority, User


async def submit(http: httpx.AsyncClient, prompt: str, **fields: object) -> dict[str, Any]:
    reply = await http.post("/tasks", json={"prompt": prompt, **fields})
    assert reply.status_code == 202, reply.text
    task: dict[str, Any] = reply.json()
    return task


async def retry(http: httpx.AsyncClient, task: dict[str, Any]) -> httpx.Response:
    return await http.post(f"/tasks/{task['task_id']}/retry")


async def failed(http: httpx.AsyncClient, prompt: str = "fail please", **fields: object) -> dict[str, Any]:
    task = await submit(http, prompt, **fields)
    return await until(http, task["task_id"], status="FAILED", is_terminal=True)


async def request_of(stand: Stand, task: dict[str, Any]) -> GenerationInput:
    described = await stand.client.get_workflow_handle(task["task_id"]).describe()
    request: GenerationInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=GenerationInput)
    return request


async def test_a_failed_task_runs_again_with_the_same_parameters_and_limits(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = await failed(http, seed=7, deadline_seconds=600, labels=["a"], priority="low")
    reply = await retry(http, first)
    again = reply.json()
    assert reply.status_code == 202
    assert reply.headers["location"] == again["links"]["self"]
    assert "idempotency-replayed" not in reply.headers
    assert again["retry_of"] == first["task_id"] != again["task_id"]
    assert again["parameters"] == first["parameters"]
    assert (again["labels"], again["priority"]) == (["a"], "low")
    assert again["created_at"] > first["created_at"]
    asked, repeated = await request_of(stand, first), await request_of(stand, again)
    assert repeated.limits == asked.limits
    assert repeated.limits.deadline_seconds == 600
    assert repeated.priority is TaskPriority.LOW
    assert repeated.artifact_key == asked.artifact_key
    [place] = repeated.places
    assert place.token not in {held.token for held in asked.places}, "it is admitted like any other task"
    assert (await until(http, again["task_id"], is_terminal=True))["status"] == "FAILED"


async def test_parallel_retries_meet_in_one_task(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    first = await failed(http)
    replies = await asyncio.gather(*(retry(http, first) for _ in range(10)))
    assert {reply.json()["task_id"] for reply in replies} == {replies[0].json()["task_id"]}
    assert {reply.status_code for reply in replies} <= {200, 202}
    await until(http, replies[0].json()["task_id"], is_terminal=True)
    assert played.runs(replies[0].json()) == 1


async def test_a_retry_meets_the_same_request_that_was_sent_again(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = await failed(http)
    resubmitted = await submit(http, "fail please")
    reply = await retry(http, first)
    assert resubmitted["task_id"] == naming.task_id(*await owner_and_key(first, http), after=first["task_id"])
    # Still open: it answers. Ended already: the retry goes on behind it.
    assert resubmitted["task_id"] in (reply.json()["task_id"], reply.json()["retry_of"])


async def owner_and_key(task: dict[str, Any], http: httpx.AsyncClient) -> tuple[User, str]:
    user = User(tenant="acme", end_user=http.headers["x-user-id"])
    return user, naming.derived_key({"prompt": task["parameters"]["prompt"]})


async def test_a_retry_of_an_old_link_answers_with_the_newest_that_is_open_or_succeeded(
    quiet: Stand, waiting: httpx.AsyncClient
) -> None:
    first = await submit(waiting, "never run")
    await quiet.client.get_workflow_handle(first["task_id"]).terminate()
    second = (await retry(waiting, first)).json()
    assert second["retry_of"] == first["task_id"]
    await quiet.client.get_workflow_handle(second["task_id"]).terminate()
    third = (await retry(waiting, first)).json()
    assert third["retry_of"] == second["task_id"]
    for old in (first, second):
        reply = await retry(waiting, old)
        assert (reply.status_code, reply.json()["task_id"]) == (200, third["task_id"])
        assert reply.headers["idempotency-replayed"] == "true"
        assert reply.headers["location"].endswith(third["task_id"])
    async with quiet.workers():
        await until(waiting, third["task_id"], status="SUCCEEDED", is_terminal=True)
        reply = await retry(waiting, first)
        assert (reply.status_code, reply.json()["task_id"]) == (200, third["task_id"])
        problem = assert_problem(await retry(waiting, third), 409, "TASK_TERMINAL")
        assert isinstance(problem["task"], dict)
        assert problem["task"]["status"] == "SUCCEEDED"


@pytest.mark.parametrize("cancel", [None, "soft"])
async def test_a_task_that_has_not_ended_is_not_retried(
    http: httpx.AsyncClient, played: PlayedGeneration, cancel: str | None
) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    if cancel:
        await http.post(f"/tasks/{task['task_id']}/cancel", json={"mode": cancel})
    problem = assert_problem(await retry(http, task), 409, "TASK_NOT_TERMINAL")
    assert isinstance(problem["task"], dict)
    assert problem["task"]["status"] == ("CANCELED" if cancel else "PROCESSING")
    played.release(task)
    ended = await until(http, task["task_id"], is_terminal=True)
    assert ended["status"] == ("CANCELED" if cancel else "SUCCEEDED")
    if cancel:
        # The clip was kept: the retry finds it and needs no GPU.
        again = (await retry(http, task)).json()
        await until(http, again["task_id"], status="SUCCEEDED")
        assert played.runs(again) == 0
