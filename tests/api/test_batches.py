"""`/batches`: what is accepted, what is echoed, what runs again, and how the rest is stopped."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from PIL import Image

from api.batch_schemas import MAX_ITEMS
from tests.api.stand import PlayedGeneration, Stand, http_client
from workflows import naming
from workflows.admission import AdmissionWorkflow
from workflows.batches import BatchInput
from workflows.quotas import AdmissionInput
from workflows.tasks import User

Batch = dict[str, Any]


async def post(
    http: httpx.AsyncClient, *items: str | dict[str, Any], key: str | None = None, **fields: object
) -> httpx.Response:
    posted = [{"prompt": item} if isinstance(item, str) else item for item in items]
    headers = {"Idempotency-Key": key} if key else {}
    # Escaped, so that lone surrogates can be sent.
    body = json.dumps({"items": posted, **fields})
    return await http.post("/batches", content=body, headers={"Content-Type": "application/json", **headers})


async def until(http: httpx.AsyncClient, batch: Batch, statuses: Sequence[str | None], *, timeout: float = 20) -> Batch:
    """Read a batch until its items are as expected."""
    deadline = time.monotonic() + timeout
    while True:
        read: Batch = (await http.get(f"/batches/{batch['batch_id']}")).json()
        if [item["status"] for item in read["items"]] == list(statuses):
            return read
        assert time.monotonic() < deadline, [item["status"] for item in read["items"]]
        await asyncio.sleep(0.05)


async def until_ended(http: httpx.AsyncClient, batch: Batch, *, timeout: float = 20) -> Batch:
    """Read a batch until it has ended."""
    deadline = time.monotonic() + timeout
    while not (read := (await http.get(f"/batches/{batch['batch_id']}")).json())["is_terminal"]:
        assert time.monotonic() < deadline, read
        await asyncio.sleep(0.05)
    ended: Batch = read
    return ended


def items_of(batch: Batch) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = batch["items"]
    return items


async def test_answers_at_once_and_needs_no_worker(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    reply = await post(waiting, "a", "b", "c")
    batch = reply.json()
    assert reply.status_code == 202
    assert reply.headers["location"] == batch["links"]["self"]
    assert reply.headers["retry-after"] == "2"
    assert (batch["status"], batch["is_terminal"], batch["parallelism"]) == ("PROCESSING", False, 2)
    assert batch["counts"] == {
        "CREATED": 3,
        **dict.fromkeys(["QUEUED", "PROCESSING", "SUCCEEDED", "FAILED", "TIMEOUT", "CANCELED"], 0),
    }
    assert items_of(batch)[0] == {"index": 0, "status": "CREATED", "task_id": None, "errors": None, "links": None}
    read = await waiting.get(f"/batches/{batch['batch_id']}")
    assert read.json() == batch
    unchanged = await waiting.get(f"/batches/{batch['batch_id']}", headers={"If-None-Match": read.headers["etag"]})
    assert unchanged.status_code == 304
    canceled = await waiting.post(f"/batches/{batch['batch_id']}/cancel", json={"mode": "hard"})
    assert (canceled.status_code, canceled.json()["cancel_requested"]) == (202, "hard")


async def test_every_item_is_a_task_and_the_batch_counts_them(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    # Two of the same prompt, which are two clips.
    batch = (await post(http, "clip", "fail two", "clip", callback_url="http://127.0.0.1:9/hook")).json()
    ended = await until_ended(http, batch)
    assert [item["status"] for item in items_of(ended)] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert (ended["status"], ended["counts"]["SUCCEEDED"], ended["counts"]["FAILED"]) == ("COMPLETED", 2, 1)
    assert ended["gpu_seconds"] == 3.0
    tasks = [(await http.get(f"/tasks/{item['task_id']}")).json() for item in items_of(ended)]
    for item, task in zip(items_of(ended), tasks, strict=True):
        assert (task["batch_id"], task["status"]) == (batch["batch_id"], item["status"])
        assert item["links"]["self"] == task["links"]["self"]
    assert len({item["task_id"] for item in items_of(ended)}) == 3
    assert tasks[0]["parameters"]["seed"] != tasks[2]["parameters"]["seed"]
    assert [played.runs(task) for task in tasks] == [1, 1, 1]
    async with asyncio.timeout(10):
        while len((await http.get("/tasks", params={"batch_id": batch["batch_id"]})).json()["items"]) != 3:
            await asyncio.sleep(0.1)
        while (await until_ended(http, batch))["callback_status"] != "SUCCEEDED":
            await asyncio.sleep(0.1)
    delivery = await stand.client.get_workflow_handle(naming.callback_id(batch["batch_id"])).result()
    assert batch["batch_id"] in delivery["body"]


async def test_posted_again_only_what_has_no_clip_runs(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    first = await until_ended(http, (await post(http, "clip one", "fail two", "clip three")).json())
    again = await post(http, "clip one", "fail two", "clip three")
    second = await until_ended(http, again.json())
    assert (again.status_code, second["retry_of"]) == (202, first["batch_id"])
    assert second["batch_id"] != first["batch_id"]
    before, after = ([item["task_id"] for item in items_of(batch)] for batch in (first, second))
    assert (before[0], before[2]) == (after[0], after[2])
    assert before[1] != after[1]
    assert (await http.get(f"/tasks/{after[1]}")).json()["retry_of"] == before[1]
    assert [played.runs({"task_id": task_id}) for task_id in (*before, after[1])] == [1, 1, 1, 1]


async def test_a_batch_with_every_clip_answers_for_itself_and_cannot_be_canceled(http: httpx.AsyncClient) -> None:
    first = await until_ended(http, (await post(http, "clip one", "clip two")).json())
    again = await post(http, "clip one", "clip two", deadline_seconds=60)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (200, "true")
    assert again.json()["batch_id"] == first["batch_id"]
    refused = await http.post(f"/batches/{first['batch_id']}/cancel")
    assert (refused.status_code, refused.json()["code"]) == (409, "BATCH_TERMINAL")
    other = (await post(http, "clip two", "clip one")).json()
    assert other["batch_id"] != first["batch_id"]
    await http.post(f"/batches/{other['batch_id']}/cancel", json={"mode": "hard"})


async def test_parallel_equal_batches_are_one(http: httpx.AsyncClient) -> None:
    async def accepted() -> httpx.Response:
        # On a loaded machine an admission may take longer than it is given; the same request finds its batch.
        while (reply := await post(http, "clip one", "clip two")).status_code == 503:
            pass
        return reply

    replies = await asyncio.gather(*(accepted() for _ in range(8)))
    assert {reply.status_code for reply in replies} <= {200, 202}
    assert len({reply.json()["batch_id"] for reply in replies}) == 1


async def test_an_explicit_key_finds_its_batch_whatever_became_of_it(http: httpx.AsyncClient) -> None:
    first = await until_ended(http, (await post(http, "fail one", key="k")).json())
    again = await post(http, "fail one", key="k")
    assert (again.status_code, again.json()["batch_id"]) == (200, first["batch_id"])
    other = await post(http, "fail two", key="k")
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x", "width": 7}, "width"),
    ({"prompt": "x", "model": "nope"}, "model"),
    ({"prompt": "x", "frames": 3}, "frames"),
    ({"prompt": "x", "regenerate": True}, "regenerate"),
    ({"prompt": "x", "callback_url": "ftp://example.org"}, "callback_url"),
    ({"prompt": "\ud800"}, "prompt"),
]


async def test_every_broken_rule_of_every_item_is_named(http: httpx.AsyncClient) -> None:
    reply = await post(http, "clip", *(item for item, _ in BAD))
    assert (reply.status_code, reply.json()["code"]) == (422, "VALIDATION_FAILED")
    assert {error["field"] for error in reply.json()["errors"]} >= {
        f"items.{index}.{field}" for index, (_, field) in enumerate(BAD, start=1)
    }


async def test_skipped_items_are_reported_and_the_others_run(http: httpx.AsyncClient) -> None:
    reply = await post(http, *(item for item, _ in BAD), "clip", on_invalid="skip")
    assert reply.status_code == 202, reply.text
    batch = reply.json()
    assert batch["rejected"] == len(BAD)
    assert [item["errors"][0]["field"] for item in items_of(batch)[:-1]] == [field for _, field in BAD]
    ended = await until_ended(http, batch)
    assert [item["status"] for item in items_of(ended)] == [None] * len(BAD) + ["SUCCEEDED"]
    assert items_of(ended)[0]["errors"] == items_of(batch)[0]["errors"]
    assert (await post(http, {"prompt": ""}, on_invalid="skip")).status_code == 422


async def test_the_tier_caps_the_priority_of_items(stand: Stand) -> None:
    async with http_client(f"{stand.url}/api/v1", {"Authorization": f"Bearer {stand.keys['free']}"}) as free:
        reply = await post(free, {"prompt": "clip", "priority": "high"})
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, "items.0.priority")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"items": []},
        {"items": [{"prompt": "x"}] * (MAX_ITEMS + 1)},
        {"items": ["x"]},
        {"items": [{"prompt": "x"}], "on_invalid": "maybe"},
        {"items": [{"prompt": "x"}], "callback_url": "http://169.254.169.254/"},
        {"items": [{"prompt": "x"}], "deadline_seconds": 600_000},
        {"items": [{"prompt": "x"}], "more": 1},
    ],
    ids=["nothing", "empty", "too many", "no objects", "on_invalid", "callback", "deadline", "unknown field"],
)
async def test_a_wrong_frame_is_refused(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    reply = await http.post("/batches", json=body)
    assert (reply.status_code, reply.json()["code"]) == (422, "VALIDATION_FAILED")


async def test_a_thousand_items_are_accepted_while_others_are_served(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    posting = asyncio.create_task(post(waiting, *(f"clip {n}" for n in range(MAX_ITEMS))))
    slowest = 0.0
    while not posting.done():
        began = time.perf_counter()
        await waiting.get("/models")
        slowest = max(slowest, time.perf_counter() - began)
        await asyncio.sleep(0.02)
    assert posting.result().json()["counts"]["CREATED"] == MAX_ITEMS
    assert slowest < 2


async def test_an_input_image_of_an_item_is_stored(stand: Stand, http: httpx.AsyncClient) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(picture, "PNG")
    data_url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    item = {"prompt": "clip", "model": "tiny-wan-i2v", "image": data_url}
    reply = await post(http, item)
    assert reply.status_code == 202, reply.text
    ended = await until_ended(http, reply.json())
    task = (await http.get(items_of(ended)[0]["links"]["self"])).json()
    described = await stand.client.get_workflow_handle(reply.json()["batch_id"]).describe()
    request: BatchInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=BatchInput)
    stored = await stand.store.get(naming.input_key(request.user, task["parameters"]["image_sha256"]))
    assert stored == picture.getvalue()


async def test_open_items_show_the_state_of_their_tasks_and_a_soft_cancel_keeps_what_runs_and_starts_no_more(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    batch = (await post(http, "hold one", "hold two", "clip three")).json()
    read = await until(http, batch, ["PROCESSING", "PROCESSING", "CREATED"])
    assert (read["counts"]["PROCESSING"], read["counts"]["CREATED"]) == (2, 1)
    assert items_of(read)[2]["task_id"] is None
    reply = await http.post(f"/batches/{batch['batch_id']}/cancel")
    assert reply.status_code == 202
    await until(http, batch, ["CANCELED"] * 3)
    for item in items_of(read)[:2]:
        played.release(item)
    ended = await until_ended(http, batch)
    assert (ended["status"], ended["cancel_requested"], ended["counts"]["CANCELED"]) == ("CANCELED", "soft", 3)
    assert [item["task_id"] is None for item in items_of(ended)] == [False, False, True]
    again = await http.post(f"/batches/{batch['batch_id']}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "CANCELED")


async def test_a_hard_cancel_ends_the_batch_now(http: httpx.AsyncClient, played: PlayedGeneration) -> None:
    batch = (await post(http, "clip one", "hold two", "hold three", "clip four")).json()
    await until(http, batch, ["SUCCEEDED", "PROCESSING", "PROCESSING", "CREATED"])
    await http.post(f"/batches/{batch['batch_id']}/cancel", json={"mode": "hard"})
    ended = await until_ended(http, batch)
    assert [item["status"] for item in items_of(ended)] == ["SUCCEEDED", "CANCELED", "CANCELED", "CANCELED"]
    assert (ended["status"], ended["cancel_requested"]) == ("CANCELED", "hard")


async def test_a_terminated_batch_reads_as_canceled_and_its_tasks_as_they_are(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    batch = (await post(http, "hold one", "clip two", "clip three", "clip four")).json()
    async with asyncio.timeout(20):
        while (await until(http, batch, ["PROCESSING", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"])) is None:
            pass
    await stand.client.get_workflow_handle(batch["batch_id"]).terminate()
    read = (await http.get(f"/batches/{batch['batch_id']}")).json()
    assert (read["status"], read["error_code"], read["is_terminal"]) == ("CANCELED", "TERMINATED", True)
    assert items_of(read)[0]["status"] == "PROCESSING"
    again = (await post(http, "hold one", "clip two", "clip three", "clip four")).json()
    played.release(items_of(read)[0])
    ended = await until_ended(http, again)
    assert ended["counts"]["SUCCEEDED"] == 4
    assert ended["gpu_seconds"] == 0


async def test_a_batch_of_another_user_does_not_exist(http: httpx.AsyncClient, stranger: httpx.AsyncClient) -> None:
    batch = (await post(http, "clip")).json()
    for reply in (
        await stranger.get(f"/batches/{batch['batch_id']}"),
        await stranger.post(f"/batches/{batch['batch_id']}/cancel"),
        await http.get("/batches/nothing"),
        await http.get(f"/batches/{items_of(await until_ended(http, batch))[0]['task_id']}"),
    ):
        assert (reply.status_code, reply.json()["code"]) == (404, "BATCH_NOT_FOUND")
    assert (await http.get(f"/tasks/{batch['batch_id']}")).json()["code"] == "TASK_NOT_FOUND"


async def test_a_batch_holds_one_place_which_a_fresh_admission_finds(stand: Stand, played: PlayedGeneration) -> None:
    async with stand.user(name := "batch-holder") as http:
        user = User(tenant="acme", end_user=name)
        batch = (await post(http, "hold one", "hold two", "hold three")).json()
        read = await until(http, batch, ["PROCESSING", "PROCESSING", "CREATED"])
        admission = stand.client.get_workflow_handle(naming.admission_id(user))
        held = (await admission.query(AdmissionWorkflow.usage)).held
        assert [place.task_id for place in held] == [batch["batch_id"]]
        await admission.terminate()
        async with asyncio.timeout(10):
            while not [row async for row in stand.client.list_workflows(f"WorkflowId = '{batch['batch_id']}'")]:
                await asyncio.sleep(0.1)
        await stand.client.start_workflow(
            AdmissionWorkflow.run,
            AdmissionInput(user_hash=naming.user_hash(user)),
            id=naming.admission_id(user),
            task_queue=naming.CONTROL_QUEUE,
        )
        async with asyncio.timeout(10):
            while not (held := (await admission.query(AdmissionWorkflow.usage)).held):
                await asyncio.sleep(0.1)
        assert [place.task_id for place in held] == [batch["batch_id"]]
        for item in items_of(read)[:2]:
            played.release(item)
        third = await until(http, batch, ["SUCCEEDED", "SUCCEEDED", "PROCESSING"])
        played.release(items_of(third)[2])
        assert (await until_ended(http, batch))["counts"]["SUCCEEDED"] == 3
        async with asyncio.timeout(10):
            while (await admission.query(AdmissionWorkflow.usage)).held:
                await asyncio.sleep(0.1)


async def test_a_tier_limits_batches_and_their_parallelism_and_a_refusal_stores_nothing(
    stand: Stand, played: PlayedGeneration
) -> None:
    async with http_client(f"{stand.url}/api/v1", {"Authorization": f"Bearer {stand.keys['tight']}"}) as http:
        batches = [(await post(http, f"hold {n}", "hold more")).json() for n in range(2)]
        assert {batch["parallelism"] for batch in batches} == {1}
        await until(http, batches[0], ["PROCESSING", "CREATED"])
        reply = await post(http, "hold another")
        assert (reply.status_code, reply.json()["code"]) == (429, "TOO_MANY_PENDING_TASKS")
        assert sorted(reply.json()["task_ids"]) == sorted(batch["batch_id"] for batch in batches)
        stored = [info.key async for info in stand.store.list(f"inputs/{naming.user_hash(User(tenant='small'))}")]
        assert len(stored) == 2
        for batch in batches:
            await http.post(f"/batches/{batch['batch_id']}/cancel", json={"mode": "hard"})
            await until_ended(http, batch)
        # Their places are free again.
        assert (await until_ended(http, (await post(http, "clip")).json()))["status"] == "COMPLETED"


async def test_a_place_whose_batch_was_terminated_is_found_free(stand: Stand, played: PlayedGeneration) -> None:
    headers = {"Authorization": f"Bearer {stand.keys['tight']}"}
    async with http_client(f"{stand.url}/api/v1", headers) as http:
        batches = [(await post(http, f"hold the place {n}")).json() for n in range(2)]
        await until(http, batches[0], ["PROCESSING"])
        await stand.client.get_workflow_handle(batches[0]["batch_id"]).terminate()
        reply = await post(http, "clip of the healed place")
        assert reply.status_code == 202, reply.text
        await http.post(f"/batches/{batches[1]['batch_id']}/cancel", json={"mode": "hard"})
        await until_ended(http, batches[1])


async def test_prompts_of_a_batch_are_not_readable_in_temporal_and_not_stored_after_its_end(
    stand: Stand, http: httpx.AsyncClient
) -> None:
    batch = (await post(http, "a very secret prompt")).json()
    await until_ended(http, batch)
    history = await stand.client.get_workflow_handle(batch["batch_id"]).fetch_history()
    assert b"secret" not in b"".join(event.SerializeToString() for event in history.events)
    described = await stand.client.get_workflow_handle(batch["batch_id"]).describe()
    request: BatchInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=BatchInput)
    async with asyncio.timeout(10):
        while await stand.store.head(request.items_key) is not None:
            await asyncio.sleep(0.05)


async def test_own_batches_are_listed_with_their_counts(
    stand: Stand, http: httpx.AsyncClient, stranger: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    done = await until_ended(http, (await post(http, "clip one", "fail two")).json())
    rest = (await post(http, "hold one", "clip two", {"prompt": ""}, on_invalid="skip")).json()
    await until(http, rest, ["PROCESSING", "SUCCEEDED", None])
    await post(stranger, "clip of a stranger")
    items = await listed(http, 2)
    assert [item["batch_id"] for item in items] == [rest["batch_id"], done["batch_id"]]
    assert (items[1]["status"], items[1]["counts"]["SUCCEEDED"], items[1]["counts"]["FAILED"]) == ("COMPLETED", 1, 1)
    assert (items[0]["status"], items[0]["is_terminal"], items[0]["rejected"]) == ("PROCESSING", False, 1)
    assert sum(items[0]["counts"].values()) == 2
    assert "items" not in items[0]
    first = (await http.get("/batches", params={"limit": 1})).json()
    second = (await http.get("/batches", params={"limit": 1, "cursor": first["next_cursor"]})).json()
    assert [page["items"][0]["batch_id"] for page in (first, second)] == [rest["batch_id"], done["batch_id"]]
    for query, field in (({"limit": 0}, "limit"), ({"cursor": "AAAA"}, "cursor"), ({"sort": "asc"}, "sort")):
        reply = await http.get("/batches", params=query)
        assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, field)
    played.release(items_of(await until(http, rest, ["PROCESSING", "SUCCEEDED", None]))[0])


async def listed(http: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    """The first page, once it has `count` batches, the last of them ended: the index lags behind."""
    deadline = time.monotonic() + 20
    while True:
        items: list[dict[str, Any]] = (await http.get("/batches")).json()["items"]
        if len(items) == count and items[-1]["is_terminal"] and items[0]["counts"]["SUCCEEDED"] == 1:
            return items
        assert time.monotonic() < deadline, items
        await asyncio.sleep(0.1)
