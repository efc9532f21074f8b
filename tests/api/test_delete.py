"""DELETE /tasks/{id}: in every state, and nothing is left in Temporal or in the store."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import SecretStr
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.service import RPCError, RPCStatusCode

from api.admission import OpenAdmission
from api.app import create_app
from api.jobs import Delivery, Job
from api.problems import TaskNotFoundError
from api.readings import Readings
from tests.api.stand import VIDEO, PlayedGeneration, Stand, http_client, listening, serving, until
from tests.api.test_images import data_url, picture
from tests.api.test_problems import assert_problem
from workflows import naming
from workflows.admission import AdmissionWorkflow
from workflows.tasks import AdmissionPlace, GenerationInput, User

HOOK = "http://127.0.0.1:9/hook"


async def submit(http: httpx.AsyncClient, prompt: str = "a clip", **fields: object) -> dict[str, Any]:
    reply = await http.post("/tasks", json={"prompt": prompt, **fields})
    assert reply.status_code == 202, reply.text
    task: dict[str, Any] = reply.json()
    return task


async def delete(http: httpx.AsyncClient, task: dict[str, Any]) -> None:
    reply = await http.delete(f"/tasks/{task['task_id']}")
    assert (reply.status_code, reply.content) == (204, b""), reply.text


async def test_a_read_that_is_under_way_does_not_bring_a_deleted_task_back(
    stand: Stand, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await submit(http, "a clip")
    await until(http, task["task_id"], status="SUCCEEDED")
    app = create_app(stand.settings, client=stand.client, admission=OpenAdmission())
    async with app.router.lifespan_context(app) as state:
        assert state is not None
        readings: Readings = state["gateway"].readings
        delivery, described, go_on = readings._delivery, asyncio.Event(), asyncio.Event()

        async def delivery_later(job: Job) -> Delivery | None:
            described.set()
            await go_on.wait()
            return await delivery(job)

        monkeypatch.setattr(readings, "_delivery", delivery_later)
        reading = asyncio.create_task(readings.any_task(task["task_id"]))
        await described.wait()
        await delete(http, task)
        readings.forget(task["task_id"])
        go_on.set()
        assert (await reading).task.status == "SUCCEEDED"
        with pytest.raises(TaskNotFoundError):
            await readings.any_task(task["task_id"])


async def request_of(stand: Stand, task: dict[str, Any]) -> GenerationInput:
    described = await stand.client.get_workflow_handle(task["task_id"]).describe()
    request: GenerationInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=GenerationInput)
    return request


async def exists(stand: Stand, workflow_id: str, run_id: str | None = None) -> bool:
    try:
        await stand.client.get_workflow_handle(workflow_id, run_id=run_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return True


async def objects_under(stand: Stand, request: GenerationInput) -> list[str]:
    keys = [info.key async for info in stand.store.list(naming.artifact_prefix(request.artifact_key))]
    image = request.parameters.image_key
    return keys + ([image] if image and await stand.store.head(image) else [])


async def assert_gone(stand: Stand, http: httpx.AsyncClient, task: dict[str, Any], request: GenerationInput) -> None:
    """Nothing of the task can be read, described or found in the store."""
    task_id = task["task_id"]
    assert_problem(await http.get(f"/tasks/{task_id}"), 404, "TASK_NOT_FOUND")
    assert_problem(await http.delete(f"/tasks/{task_id}"), 404, "TASK_NOT_FOUND")
    assert not await exists(stand, task_id)
    assert not await exists(stand, naming.callback_id(task_id))
    assert await objects_under(stand, request) == []
    folder = stand.folder.parent / "store"
    assert not [path for path in folder.rglob("*") if request.artifact_key in str(path) and path.is_file()]


async def test_an_ended_task_is_gone_with_clip_callback_and_redeliveries(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, callback_url=HOOK)
    ended = await until(http, task["task_id"], status="SUCCEEDED", callback_status="SUCCEEDED")
    request = await request_of(stand, task)
    assert len(await objects_under(stand, request)) == 3
    link = urlsplit(ended["result_url"])
    assert (await http.get(f"{stand.url}{link.path}?{link.query}")).content == VIDEO
    assert (await http.post(f"/tasks/{task['task_id']}/callback/redeliver")).status_code == 202
    assert await exists(stand, naming.callback_id(task["task_id"], 1))
    await delete(http, task)
    await assert_gone(stand, http, task, request)
    assert not await exists(stand, naming.callback_id(task["task_id"], 1))
    assert (await http.get(f"{stand.url}{link.path}?{link.query}")).status_code == 404


async def test_a_running_task_is_stopped_and_its_place_is_free_at_once(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "hold on")
    await until(http, task["task_id"], status="PROCESSING")
    request = await request_of(stand, task)
    [place] = request.places
    assert task["task_id"] in await holders(stand, place)
    began = time.monotonic()
    await delete(http, task)
    assert time.monotonic() - began < stand.settings.delete_stop_seconds, "by a hard cancel, not by force"
    assert task["task_id"] not in await holders(stand, place)
    await assert_gone(stand, http, task, request)


async def test_a_waiting_delivery_ends_with_its_task(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, callback_url=f"{HOOK}/down")
    await until(http, task["task_id"], callback_status="RETRYING")
    request = await request_of(stand, task)
    await delete(http, task)
    await assert_gone(stand, http, task, request)


async def test_a_queued_task_is_gone_with_its_input_image(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    async with quiet.control_worker():
        image = data_url(picture("PNG"))
        task = await submit(waiting, "let it move", model="tiny-wan-i2v", image=image)
        request = await request_of(quiet, task)
        assert await objects_under(quiet, request) == [request.parameters.image_key]
        await delete(waiting, task)
        await assert_gone(quiet, waiting, task, request)


async def test_without_any_worker_the_run_is_terminated_in_bounded_time_and_its_places_are_given_back(
    quiet: Stand, waiting: httpx.AsyncClient
) -> None:
    task = await submit(waiting, "never run")
    request = await request_of(quiet, task)
    began = time.monotonic()
    await delete(waiting, task)
    took = time.monotonic() - began
    assert quiet.settings.delete_stop_seconds <= took < quiet.settings.delete_stop_seconds + 3
    await assert_gone(quiet, waiting, task, request)


async def test_a_terminated_run_gives_its_place_back_when_it_is_deleted(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "hold on")
    request = await request_of(stand, task)
    [place] = request.places
    await stand.client.get_workflow_handle(task["task_id"]).terminate()
    assert task["task_id"] in await holders(stand, place)
    await delete(http, task)
    assert task["task_id"] not in await holders(stand, place)


async def holders(stand: Stand, place: AdmissionPlace) -> set[str]:
    usage = await stand.client.get_workflow_handle(place.admission_id).query(AdmissionWorkflow.usage)
    return {held.task_id for held in usage.held}


async def test_every_run_of_a_task_that_was_reset_is_deleted(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http, "fail please")
    await until(http, task["task_id"], is_terminal=True)
    first = (await stand.client.get_workflow_handle(task["task_id"]).describe()).run_id
    await stand.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=stand.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=task["task_id"], run_id=first),
            reason="test",
            workflow_task_finish_event_id=4,
            request_id=task["task_id"],
        )
    )
    for _ in range(100):
        described = await stand.client.get_workflow_handle(task["task_id"]).describe()
        if described.run_id != first and described.close_time is not None:
            break
        await asyncio.sleep(0.05)
    assert await exists(stand, task["task_id"], first)
    await delete(http, task)
    assert not await exists(stand, task["task_id"])
    assert not await exists(stand, task["task_id"], first)


async def test_the_same_request_starts_afresh_after_a_delete(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    task = await submit(http)
    await until(http, task["task_id"], status="SUCCEEDED")
    await delete(http, task)
    again = await http.post("/tasks", json={"prompt": "a clip"})
    assert (again.status_code, again.json()["task_id"]) == (202, task["task_id"])
    ended = await until(http, task["task_id"], status="SUCCEEDED")
    assert played.runs(task) == 2, "the clip was gone too"
    assert ended["retry_of"] is None


async def test_a_store_that_is_down_leaves_the_task_to_be_deleted_again(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http)
    await until(http, task["task_id"], status="SUCCEEDED")
    nowhere = {"endpoint": "http://127.0.0.1:9", "access_key_id": "key", "secret_access_key": "secret"}
    with listening() as sock:
        cut_off = stand.settings.model_copy(
            update={
                "store_url": "s3://bucket",
                "store_options": {name: SecretStr(value) for name, value in {**nowhere, "allow_http": "true"}.items()},
            }
        )
        with serving(cut_off, sock) as url:
            async with http_client(f"{url}/api/v1", http.headers.raw) as elsewhere:
                problem = assert_problem(
                    await elsewhere.delete(f"/tasks/{task['task_id']}"), 503, "STORAGE_UNAVAILABLE"
                )
    assert "secret" not in str(problem)
    request = await request_of(stand, task)
    await delete(http, task)
    await assert_gone(stand, http, task, request)


async def test_only_the_owner_deletes_once_and_the_task_leaves_the_lists_within_moments(
    http: httpx.AsyncClient, stranger: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    task = await submit(http)
    await until(http, task["task_id"], status="SUCCEEDED")
    await listed(http, [task["task_id"]])
    assert_problem(await stranger.delete(f"/tasks/{task['task_id']}"), 404, "TASK_NOT_FOUND")
    assert (await http.get(f"/tasks/{task['task_id']}/video")).content == VIDEO
    replies = await asyncio.gather(*(http.delete(f"/tasks/{task['task_id']}") for _ in range(4)))
    assert {reply.status_code for reply in replies} <= {204, 404}
    assert 204 in {reply.status_code for reply in replies}
    await listed(http, [])


async def listed(http: httpx.AsyncClient, task_ids: list[str]) -> None:
    """Return when the list has these tasks; the index lags behind."""
    async with asyncio.timeout(5):
        while [item["task_id"] for item in (await http.get("/tasks")).json()["items"]] != task_ids:
            await asyncio.sleep(0.05)


async def test_an_image_that_another_task_names_goes_too(quiet: Stand) -> None:
    content = picture("WEBP")
    async with quiet.user("sculptor") as http, quiet.control_worker():
        fields = {"model": "tiny-wan-i2v", "image": data_url(content)}
        first, second = await submit(http, "one", **fields), await submit(http, "two", **fields)
        await delete(http, first)
        key = naming.input_key(User(tenant="acme", end_user="sculptor"), hashlib.sha256(content).hexdigest())
        assert await quiet.store.head(key) is None
        assert (await http.get(f"/tasks/{second['task_id']}")).json()["status"] == "QUEUED"
        await delete(http, second)
