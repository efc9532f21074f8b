"""POST /tasks: what is accepted, what is echoed, and which task answers a repeated request."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import httpx
import pytest
from temporalio.client import WorkflowExecutionStatus

from api.chains import LONG, Chains
from api.jobs import Job, Jobs
from tests.api.stand import PlayedGeneration, Stand, until
from workflows import naming
from workflows.tasks import GenerationInput, TaskPriority, User

REQUEST = {"prompt": "a red circle moving right"}


async def submit(http: httpx.AsyncClient, key: str | None = None, **fields: object) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await http.post("/tasks", json={**REQUEST, **fields}, headers=headers)


async def test_answers_at_once_with_a_durable_queued_task(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    reply = await submit(waiting, labels=["demo"], priority="high")
    task = reply.json()
    assert reply.status_code == 202
    assert reply.headers["location"] == f"{quiet.settings.public_url}/api/v1/tasks/{task['task_id']}"
    assert reply.headers["retry-after"] == "2"
    assert "idempotency-replayed" not in reply.headers
    assert (task["status"], task["is_terminal"], task["priority"], task["labels"]) == (
        "QUEUED",
        False,
        "high",
        ["demo"],
    )
    assert task["links"]["web_ui"].endswith(f"/workflows/{task['task_id']}")
    described = await quiet.client.get_workflow_handle(task["task_id"]).describe()
    assert described.status is WorkflowExecutionStatus.RUNNING
    assert (
        described.raw_description.workflow_execution_info.priority.priority_key
        == naming.PRIORITY_KEYS[TaskPriority.HIGH]
    )
    assert "red circle" in (await described.static_summary() or "")


async def test_echoes_the_effective_parameters(http: httpx.AsyncClient) -> None:
    parameters = (await submit(http, num_inference_steps=7)).json()["parameters"]
    assert parameters["num_inference_steps"] == 7
    assert parameters["width"] >= 16
    assert parameters["negative_prompt"] == ""
    assert 0 <= parameters["seed"] < 2**32


@pytest.mark.parametrize("prompt", ["  padded  ", "一只🦊在跑👩‍👩‍👧", "line\nbreak\ttab", "e\u0301 vs é"])
async def test_keeps_the_prompt_exactly(stand: Stand, http: httpx.AsyncClient, prompt: str) -> None:
    task = (await submit(http, prompt=prompt)).json()
    assert task["parameters"]["prompt"] == prompt
    described = await stand.client.get_workflow_handle(task["task_id"]).describe()
    stored: GenerationInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=GenerationInput)
    assert stored.parameters.prompt == prompt


async def test_prompts_and_users_are_not_readable_in_temporal(stand: Stand) -> None:
    async with stand.user("alice@example.com") as http:
        task_id = (await submit(http, prompt="a very secret prompt")).json()["task_id"]
    raw = (await stand.client.get_workflow_handle(task_id).describe()).raw_description.SerializeToString()
    history = await stand.client.get_workflow_handle(task_id).fetch_history()
    for text in (raw, b"".join(event.SerializeToString() for event in history.events)):
        assert b"secret" not in text
        assert b"alice" not in text


async def test_callback_and_deadline_enter_the_job(stand: Stand, http: httpx.AsyncClient) -> None:
    url = "http://127.0.0.1:9/hook"
    task = (await submit(http, callback_url=url, callback_events=["canceled"], deadline_seconds=90)).json()
    described = await stand.client.get_workflow_handle(task["task_id"]).describe()
    stored: GenerationInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=GenerationInput)
    assert stored.callback is not None
    assert (stored.callback.url, list(stored.callback.events)) == (url, ["canceled"])
    assert stored.limits.deadline_seconds == 90
    assert stored.limits.max_attempts == stand.settings.max_attempts


async def test_fifty_parallel_equal_submissions_make_one_task_and_one_gpu_run(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    replies = await asyncio.gather(*(submit(http) for _ in range(50)))
    assert {reply.json()["task_id"] for reply in replies} == {replies[0].json()["task_id"]}
    assert sorted(reply.status_code for reply in replies) == [200] * 49 + [202]
    assert all(("idempotency-replayed" in r.headers) == (r.status_code == 200) for r in replies)
    await until(http, replies[0].json()["task_id"], status="SUCCEEDED", is_terminal=True)
    assert played.runs(replies[0].json()) == 1


async def test_a_succeeded_task_answers_the_same_request(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    first = (await submit(http)).json()
    await until(http, first["task_id"], status="SUCCEEDED", is_terminal=True)
    again = await submit(http, priority="low", labels=["other"], deadline_seconds=60)
    assert (again.status_code, again.json()["task_id"], again.json()["status"]) == (200, first["task_id"], "SUCCEEDED")
    assert again.headers["idempotency-replayed"] == "true"
    assert played.runs(first) == 1


async def test_null_means_absent(http: httpx.AsyncClient) -> None:
    first = (await submit(http, "k")).json()
    again = await submit(http, "k", seed=None, callback_url=None, labels=None)
    assert (again.status_code, again.json()["task_id"]) == (200, first["task_id"])


async def test_another_prompt_user_or_size_is_another_task(
    http: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    ids = [(await reply).json()["task_id"] for reply in (submit(http), submit(http, prompt="b"), submit(http, seed=5))]
    ids.append((await submit(stranger)).json()["task_id"])
    assert len(set(ids)) == 4


async def test_a_key_of_one_user_is_not_seen_by_another(http: httpx.AsyncClient, stranger: httpx.AsyncClient) -> None:
    mine = await submit(http, "order-1")
    theirs = await submit(stranger, "order-1", prompt="something else")
    assert (mine.status_code, theirs.status_code) == (202, 202)
    assert mine.json()["task_id"] != theirs.json()["task_id"]


async def test_the_same_key_with_another_body_is_refused(http: httpx.AsyncClient) -> None:
    first = (await submit(http, "order-1")).json()
    for change in ({"prompt": "b"}, {"priority": "low"}, {"labels": ["x"]}):
        reply = await submit(http, "order-1", **change)
        assert (reply.status_code, reply.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
        assert first["task_id"] in reply.json()["detail"]


async def test_an_explicit_key_answers_in_whatever_state(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    first = (await submit(http, "order-1", prompt="fail please")).json()
    await until(http, first["task_id"], status="FAILED", is_terminal=True)
    again = await submit(http, "order-1", prompt="fail please")
    assert (again.status_code, again.json()["task_id"], again.json()["status"]) == (200, first["task_id"], "FAILED")


async def test_a_derived_key_starts_the_next_link_after_a_failure_once(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = (await submit(http, prompt="fail please")).json()
    await until(http, first["task_id"], status="FAILED", is_terminal=True)
    replies = await asyncio.gather(*(submit(http, prompt="fail please") for _ in range(10)))
    assert {reply.json()["retry_of"] for reply in replies} == {first["task_id"]}
    assert len({reply.json()["task_id"] for reply in replies}) == 1
    second = replies[0].json()["task_id"]
    await until(http, second, status="FAILED", is_terminal=True)
    third = (await submit(http, prompt="fail please")).json()
    assert third["retry_of"] == second
    assert first["parameters"]["seed"] == third["parameters"]["seed"]


async def test_a_long_chain_is_not_walked_from_its_start_each_time(quiet: Stand) -> None:
    class CountedJobs(Jobs):
        described = 0

        async def describe(self, task_id: str) -> Job | None:
            self.described += 1
            return await super().describe(task_id)

    async with quiet.user("stubborn") as http:
        ids: list[str] = []
        for _ in range(LONG + 2):
            ids.append((await submit(http)).json()["task_id"])
            await quiet.client.get_workflow_handle(ids[-1]).terminate()
    jobs = CountedJobs(quiet.client, call_limit=timedelta(seconds=3))
    chains, user = Chains(jobs), User(tenant="acme", end_user="stubborn")
    key = naming.derived_key(REQUEST)
    assert [job.request.task_id for job in await chains.links(user, key)] == ids
    walked, jobs.described = jobs.described, 0
    assert [job.request.task_id for job in await chains.links(user, key)] == ids[-1:]
    assert (walked, jobs.described) == (len(ids) + 1, 2)


async def test_a_request_after_a_soft_cancel_revives_the_running_task(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = (await submit(http, prompt="hold on")).json()
    await until(http, first["task_id"], status="PROCESSING")
    cancelled = (await http.post(f"/tasks/{first['task_id']}/cancel")).json()
    assert (cancelled["status"], cancelled["is_terminal"]) == ("CANCELED", False)
    again = await submit(http, prompt="hold on")
    assert (again.status_code, again.json()["task_id"], again.json()["status"]) == (200, first["task_id"], "PROCESSING")
    assert again.json()["cancel_requested"] is None
    played.release(first)
    await until(http, first["task_id"], status="SUCCEEDED", is_terminal=True)
    assert played.runs(first) == 1


async def test_an_explicit_key_does_not_undo_a_soft_cancel(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    first = (await submit(http, "k", prompt="hold on")).json()
    await until(http, first["task_id"], status="PROCESSING")
    await http.post(f"/tasks/{first['task_id']}/cancel")
    again = (await submit(http, "k", prompt="hold on")).json()
    assert (again["task_id"], again["status"], again["cancel_requested"]) == (first["task_id"], "CANCELED", "soft")


async def test_after_a_closed_soft_cancel_the_next_link_finds_the_clip_without_gpu(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = (await submit(http, prompt="hold on")).json()
    await until(http, first["task_id"], status="PROCESSING")
    await http.post(f"/tasks/{first['task_id']}/cancel")
    played.release(first)
    await until(http, first["task_id"], status="CANCELED", is_terminal=True)
    again = (await submit(http, prompt="hold on")).json()
    assert again["retry_of"] == first["task_id"]
    done = await until(http, again["task_id"], status="SUCCEEDED", is_terminal=True)
    assert done["gpu_seconds"] == 0
    assert played.runs(first, again) == 1


async def test_regenerate_makes_another_clip_of_the_same_prompt(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = (await submit(http)).json()
    await until(http, first["task_id"], status="SUCCEEDED", is_terminal=True)
    second = (await submit(http, regenerate=True)).json()
    assert second["retry_of"] == first["task_id"]
    assert second["parameters"]["seed"] != first["parameters"]["seed"]
    await until(http, second["task_id"], status="SUCCEEDED", is_terminal=True)
    assert played.runs(first, second) == 2
    plain = await submit(http)
    assert (plain.status_code, plain.json()["task_id"]) == (200, second["task_id"])


async def test_regenerate_while_the_newest_link_is_open_answers_with_it(waiting: httpx.AsyncClient) -> None:
    first = (await submit(waiting)).json()
    again = await submit(waiting, regenerate=True)
    assert (again.status_code, again.json()["task_id"]) == (200, first["task_id"])


async def test_a_failed_regenerate_does_not_hide_the_clip_there_is(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    first = (await submit(http)).json()
    await until(http, first["task_id"], status="SUCCEEDED", is_terminal=True)
    second = (await submit(http, regenerate=True, prompt=REQUEST["prompt"])).json()
    await http.post(f"/tasks/{second['task_id']}/cancel", json={"mode": "hard"})
    await until(http, second["task_id"], is_terminal=True)
    plain = (await submit(http)).json()
    assert plain["status"] == "SUCCEEDED"


async def test_prefer_wait_answers_when_the_task_has_ended(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    reply = await http.post("/tasks", json=REQUEST, headers={"Prefer": "respond-async, wait=20"})
    assert (reply.status_code, reply.json()["status"]) == (202, "SUCCEEDED")
    assert reply.headers["preference-applied"] == "wait=20"
    assert "retry-after" not in reply.headers


async def test_prefer_wait_ends_in_time_without_any_worker(waiting: httpx.AsyncClient) -> None:
    begun = time.monotonic()
    reply = await waiting.post("/tasks", json=REQUEST, headers={"Prefer": "wait=1"})
    assert 0.9 < time.monotonic() - begun < 2.5
    assert (reply.status_code, reply.json()["status"]) == (202, "QUEUED")


async def test_same_user_name_of_another_tenant_is_another_user(stand: Stand) -> None:
    first = naming.task_id(User(tenant="acme", end_user="bob"), naming.explicit_key("k"))
    second = naming.task_id(User(tenant="umbrella", end_user="bob"), naming.explicit_key("k"))
    assert first != second
