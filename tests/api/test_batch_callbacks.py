"""The callback of a batch: shown, sent again singly and by time; to a real receiver."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

from tests.api.test_batches import post as post_batch
from tests.api.test_batches import until_ended
from tests.api.test_callbacks import Post, _stand, post, redeliver_range, sender
from tests.api.test_problems import assert_problem
from tests.receiver import respond

__all__ = ["_stand", "post", "sender"]  # fixtures

Batch = dict[str, Any]


async def callback(http: httpx.AsyncClient, batch: Batch, **expected: object) -> dict[str, Any]:
    """The callback of a batch once it is as expected; `redelivered` are the states of the redeliveries."""
    deadline = time.monotonic() + 20
    while True:
        reply = await http.get(f"/batches/{batch['batch_id']}/callback")
        found: dict[str, Any] = reply.json()
        seen = {**found, "redelivered": [later["status"] for later in found.get("redeliveries", [])]}
        if reply.status_code == 200 and all(seen[name] == value for name, value in expected.items()):
            return found
        assert time.monotonic() < deadline, f"{expected} not reached: {found}"
        await asyncio.sleep(0.05)


async def redeliver(http: httpx.AsyncClient, batch: Batch) -> httpx.Response:
    return await http.post(f"/batches/{batch['batch_id']}/callback/redeliver")


async def test_a_batch_whose_callback_was_given_up_is_told_again_with_the_same_id_and_body(
    post: Post, sender: httpx.AsyncClient
) -> None:
    post.receiver.script(respond(410, "gone fishing"))
    batch = await until_ended(sender, (await post_batch(sender, "clip", callback_url=post.receiver.url)).json())
    given_up = await callback(sender, batch, status="FAILED")
    assert [(a["status_code"], a["error_code"]) for a in given_up["attempts"]] == [(410, "GONE")]
    reply = await redeliver(sender, batch)
    assert (reply.status_code, [later["number"] for later in reply.json()["redeliveries"]]) == (202, [1])
    found = await callback(sender, batch, status="FAILED", redelivered=["SUCCEEDED"])
    first, second = post.receiver.requests
    assert {first.headers["webhook-id"], second.headers["webhook-id"]} == {batch["batch_id"]}
    assert first.verify(post.secret) == second.verify(post.secret) == json.loads(found["body"])
    assert (second.json()["type"], second.json()["status"]) == ("batch.completed", "COMPLETED")


async def test_a_waiting_delivery_of_a_batch_is_sent_at_once_when_asked(post: Post, sender: httpx.AsyncClient) -> None:
    post.receiver.script(respond(503, headers={"retry-after": "3600"}))
    batch = await until_ended(sender, (await post_batch(sender, "clip", callback_url=post.receiver.url)).json())
    await callback(sender, batch, status="RETRYING")
    assert (await redeliver(sender, batch)).status_code == 202
    found = await callback(sender, batch, status="SUCCEEDED", redelivered=[])
    assert [attempt["status_code"] for attempt in found["attempts"]] == [503, 200]


async def test_callbacks_of_batches_are_part_of_a_redelivery_by_time(post: Post, sender: httpx.AsyncClient) -> None:
    post.receiver.script(respond(410))
    batch = await until_ended(sender, (await post_batch(sender, "clip", callback_url=post.receiver.url)).json())
    await callback(sender, batch, status="FAILED")
    deadline = time.monotonic() + 20
    while not (planned := await range_of(sender, dry_run=True)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert planned == [{"task_id": None, "batch_id": batch["batch_id"], "status": "FAILED", "action": "redeliver"}]
    assert len(post.receiver.requests) == 1
    assert await range_of(sender, dry_run=False) == planned
    await callback(sender, batch, redelivered=["SUCCEEDED"])
    assert await redeliver_range(sender) == []


async def range_of(http: httpx.AsyncClient, *, dry_run: bool) -> list[dict[str, Any]]:
    body = {"since": "2026-01-01T00:00:00Z", "status": "failed", "dry_run": dry_run}
    items: list[dict[str, Any]] = (await http.post("/callbacks/redeliver", json=body)).json()["items"]
    return items


async def test_batches_without_a_callback_say_why(post: Post, sender: httpx.AsyncClient) -> None:
    none = await until_ended(sender, (await post_batch(sender, "clip")).json())
    running = (await post_batch(sender, "hold on", callback_url=post.receiver.url)).json()
    for reply in (await sender.get(f"/batches/{none['batch_id']}/callback"), await redeliver(sender, none)):
        assert "callback_url" in str(assert_problem(reply, 404, "CALLBACK_NOT_FOUND")["detail"])
    early = await sender.get(f"/batches/{running['batch_id']}/callback")
    assert "not ended" in str(assert_problem(early, 404, "CALLBACK_NOT_FOUND")["detail"])
    assert_problem(await redeliver(sender, running), 409, "BATCH_NOT_TERMINAL")
    await post.stand.client.get_workflow_handle(running["batch_id"]).terminate()
    for reply in (await sender.get(f"/batches/{running['batch_id']}/callback"), await redeliver(sender, running)):
        assert "from outside" in str(assert_problem(reply, 404, "CALLBACK_NOT_FOUND")["detail"])
    async with post.stand.user() as stranger:
        for reply in (await stranger.get(f"/batches/{none['batch_id']}/callback"), await redeliver(stranger, none)):
            assert_problem(reply, 404, "BATCH_NOT_FOUND")
    assert (await sender.delete(f"/batches/{running['batch_id']}")).status_code == 204
