"""DELETE /batches/{id}: in every state, and nothing of it is left in Temporal or in the store."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import pytest

import api.batch_removals
import api.batch_submission
from tests.api.stand import PlayedGeneration, Stand, http_client
from tests.api.test_batches import items_of, post, until, until_ended
from tests.api.test_delete import exists, holders, objects_under, request_of
from tests.api.test_images import data_url, picture
from tests.api.test_problems import assert_problem
from workflows import naming
from workflows.batches import BatchInput
from workflows.tasks import GenerationInput

HOOK = "http://127.0.0.1:9/hook"

Batch = dict[str, Any]


async def delete(http: httpx.AsyncClient, batch: Batch) -> int:
    """Delete until it is done; how often that was asked for."""
    for asked in range(1, 100):
        reply = await http.delete(f"/batches/{batch['batch_id']}")
        if reply.status_code == 204:
            return asked
        assert (reply.status_code, reply.headers["retry-after"]) == (202, "1"), reply.text
    raise AssertionError("it does not end")


async def posted(stand: Stand, batch: Batch) -> BatchInput:
    described = await stand.client.get_workflow_handle(batch["batch_id"]).describe()
    request: BatchInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=BatchInput)
    return request


async def assert_gone(stand: Stand, http: httpx.AsyncClient, request: BatchInput, tasks: list[GenerationInput]) -> None:
    """Nothing of the batch and of these tasks can be read, described or found in the store."""
    for reply in (await http.get(f"/batches/{request.batch_id}"), await http.delete(f"/batches/{request.batch_id}")):
        assert_problem(reply, 404, "BATCH_NOT_FOUND")
    for name in (request.batch_id, naming.callback_id(request.batch_id), naming.callback_id(request.batch_id, 1)):
        assert not await exists(stand, name)
    for task in tasks:
        assert not await exists(stand, task.task_id)
        assert await objects_under(stand, task) == []
    for key in (request.items_key, request.report_key):
        assert key is None or await stand.store.head(key) is None


async def test_an_ended_batch_is_gone_with_its_tasks_callback_and_report(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    body: list[str | dict[str, Any]] = ["clip one", "fail two", {"prompt": ""}]
    batch = (await post(http, *body, on_invalid="skip", callback_url=HOOK)).json()
    ended = await until_ended(http, batch)
    async with asyncio.timeout(20):
        while (await http.post(f"/batches/{batch['batch_id']}/callback/redeliver")).status_code != 202:
            await asyncio.sleep(0.05)
    request = await posted(stand, batch)
    tasks = [await request_of(stand, item) for item in items_of(ended)[:2]]
    assert request.report_key is not None
    assert len(await objects_under(stand, tasks[0])) == 3
    await delete(http, batch)
    await assert_gone(stand, http, request, tasks)


async def test_a_running_batch_is_stopped_and_its_place_is_free(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    image = picture("PNG")
    never = {"prompt": "clip never run", "model": "tiny-wan-i2v", "image": data_url(image)}
    batch = (await post(http, "clip one", "hold two", "hold three", never)).json()
    read = await until(http, batch, ["SUCCEEDED", "PROCESSING", "PROCESSING", "CREATED"])
    request = await posted(stand, batch)
    [place] = request.places
    assert batch["batch_id"] in await holders(stand, place)
    tasks = [await request_of(stand, item) for item in items_of(read)[:3]]
    images = [info.key async for info in stand.store.list(f"inputs/{naming.user_hash(request.user)}")]
    assert len(images) == 2, "the items, and the image of the one that waits"
    await delete(http, batch)
    await assert_gone(stand, http, request, tasks)
    assert batch["batch_id"] not in await holders(stand, place)
    assert [info.key async for info in stand.store.list(f"inputs/{naming.user_hash(request.user)}")] == []


async def test_without_any_worker_it_is_terminated_in_bounded_time(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    batch = (await post(waiting, "one", "two")).json()
    request = await posted(quiet, batch)
    async with asyncio.timeout(20):
        await delete(waiting, batch)
    await assert_gone(quiet, waiting, request, [])


async def test_a_terminated_batch_gives_its_place_back_and_its_running_tasks_stop(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    batch = (await post(http, "hold one", "hold two")).json()
    read = await until(http, batch, ["PROCESSING", "PROCESSING"])
    request = await posted(stand, batch)
    tasks = [await request_of(stand, item) for item in items_of(read)]
    [place] = request.places
    await stand.client.get_workflow_handle(batch["batch_id"]).terminate()
    assert batch["batch_id"] in await holders(stand, place)
    await delete(http, batch)
    await assert_gone(stand, http, request, tasks)
    assert batch["batch_id"] not in await holders(stand, place)


async def test_a_batch_of_several_runs_is_listed_once_and_every_run_is_deleted(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.batch_submission, "BatchInput", partial(BatchInput, continue_after_events=20))
    batch = await until_ended(http, (await post(http, *(f"clip {n}" for n in range(4)))).json())
    runs = await runs_of(stand, batch, 2)
    page = (await http.get("/batches")).json()
    assert [(item["batch_id"], item["status"]) for item in page["items"]] == [(batch["batch_id"], "COMPLETED")]
    await delete(http, batch)
    assert [await exists(stand, batch["batch_id"], run) for run in runs] == [False] * len(runs)


async def runs_of(stand: Stand, batch: Batch, least: int) -> list[str]:
    """The run ids of a batch, once the index has at least so many, the last of them ended."""
    query = f"WorkflowId = '{batch['batch_id']}'"
    async with asyncio.timeout(20):
        while True:
            runs = [run async for run in stand.client.list_workflows(query)]
            if len(runs) >= least and all(run.close_time for run in runs):
                return [run.run_id for run in runs]
            await asyncio.sleep(0.1)


async def test_clips_of_an_earlier_batch_stay_with_it(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    first = await until_ended(http, (await post(http, "clip one", "fail two")).json())
    second = await until_ended(http, (await post(http, "clip one", "fail two")).json())
    kept, gone = (items_of(second)[index]["task_id"] for index in (0, 1))
    await delete(http, second)
    assert (await http.get(f"/tasks/{kept}")).json()["status"] == "SUCCEEDED"
    assert (await http.get(f"/tasks/{gone}")).status_code == 404
    assert (await http.get(f"/batches/{first['batch_id']}")).json()["counts"]["SUCCEEDED"] == 1
    await delete(http, first)
    assert (await http.get(f"/tasks/{kept}")).status_code == 404
    afresh = await until_ended(http, (await post(http, "clip one", "fail two")).json())
    assert (afresh["batch_id"], afresh["retry_of"]) == (first["batch_id"], None)
    assert played.runs({"task_id": kept}) == 2, "its clip was gone too"


async def test_one_request_takes_bounded_time_and_the_next_one_goes_on(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await until_ended(http, (await post(http, "clip one", "clip two")).json())
    request = await posted(stand, batch)
    tasks = [await request_of(stand, item) for item in items_of(batch)]
    monkeypatch.setattr(api.batch_removals, "PATIENCE", timedelta(0))
    reply = await http.delete(f"/batches/{batch['batch_id']}")
    assert reply.status_code == 202
    assert (await http.get(f"/batches/{batch['batch_id']}")).status_code == 200
    monkeypatch.undo()
    assert await delete(http, batch) == 1
    await assert_gone(stand, http, request, tasks)


async def test_only_the_owner_deletes_with_a_user_key_too(
    stand: Stand, stranger: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    async with http_client(f"{stand.url}/api/v1", {"Authorization": f"Bearer {stand.keys['user']}"}) as http:
        batch = await until_ended(http, (await post(http, "clip of a user key")).json())
        assert_problem(await stranger.delete(f"/batches/{batch['batch_id']}"), 404, "BATCH_NOT_FOUND")
        assert (await http.get(f"/tasks/{items_of(batch)[0]['task_id']}")).json()["status"] == "SUCCEEDED"
        assert await delete(http, batch) == 1
