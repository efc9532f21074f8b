"""Callbacks through the API: what was delivered, redelivery singly and by time, samples; to a real receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio

from activities.callbacks import CallbackDelivery
from tests.api.conftest import running_stand
from tests.api.stand import PlayedGeneration, Stand, http_client, until
from tests.api.test_problems import assert_problem
from tests.receiver import Behaviour, Receiver, redirect, respond
from workers.links import links_from
from workers.registry import guarded_client, key_ring
from workflows import naming

ROUTES = ("/callback", "/callback/redeliver")


@dataclass(kw_only=True)
class Post:
    """A gateway that really delivers, and a receiver."""

    stand: Stand
    played: PlayedGeneration
    receiver: Receiver
    secret: str

    async def ended(self, http: httpx.AsyncClient, prompt: str = "a clip", **fields: object) -> dict[str, Any]:
        """A task that has ended and whose callback goes to the receiver."""
        fields.setdefault("callback_url", self.receiver.url)
        task = (await http.post("/tasks", json={"prompt": prompt, **fields})).json()
        return await until(http, task["task_id"], is_terminal=True)

    def received(self, task: dict[str, Any]) -> list[dict[str, object]]:
        """Verified bodies about a task, in order."""
        mine = [request for request in self.receiver.requests if request.headers["webhook-id"] == task["task_id"]]
        assert all(request.headers["idempotency-key"] == task["task_id"] for request in mine)
        return [request.verify(self.secret) for request in mine]


@pytest_asyncio.fixture(scope="module")
async def _stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Stand, PlayedGeneration, str]]:
    async with running_stand(tmp_path_factory.mktemp("post")) as stand, guarded_client(stand.settings) as client:
        keys = key_ring(stand.settings)
        delivery = CallbackDelivery(secrets=keys, endpoints=keys, links=links_from(stand.settings), client=client)
        async with stand.workers(delivery=delivery) as played:
            yield stand, played, keys.callback_secrets("acme")[0]
        await delivery.aclose()


@pytest_asyncio.fixture
async def post(_stand: tuple[Stand, PlayedGeneration, str]) -> AsyncIterator[Post]:
    stand, played, secret = _stand
    async with Receiver() as receiver:
        yield Post(stand=stand, played=played, receiver=receiver, secret=secret)


@pytest_asyncio.fixture
async def sender(post: Post) -> AsyncIterator[httpx.AsyncClient]:
    async with post.stand.user() as http:
        yield http


async def callback(http: httpx.AsyncClient, task: dict[str, Any], **expected: object) -> dict[str, Any]:
    """The callback of a task once it is as expected; `redelivered` is the status of the newest redelivery."""
    deadline = time.monotonic() + 10
    while True:
        reply = await http.get(f"/tasks/{task['task_id']}/callback")
        found: dict[str, Any] = reply.json()
        newest = found.get("redeliveries", [])[-1:]
        seen = {**found, "redelivered": newest[0]["status"] if newest else None}
        if reply.status_code == 200 and all(seen[name] == value for name, value in expected.items()):
            return found
        assert time.monotonic() < deadline, f"{expected} not reached: {found}"
        await asyncio.sleep(0.03)


async def redeliver(http: httpx.AsyncClient, task: dict[str, Any]) -> httpx.Response:
    return await http.post(f"/tasks/{task['task_id']}/callback/redeliver")


async def redeliver_range(http: httpx.AsyncClient, **wanted: object) -> list[tuple[str, str, str]]:
    """All pages of a redelivery."""
    since = datetime.now(UTC) - timedelta(hours=1)
    items: list[tuple[str, str, str]] = []
    cursor: dict[str, str] = {}
    while True:
        reply = await http.post("/callbacks/redeliver", json={"since": since.isoformat(), **wanted, **cursor})
        assert reply.status_code == 200, reply.text
        page = reply.json()
        items += [(item["task_id"], item["status"], item["action"]) for item in page["items"]]
        if page["next_cursor"] is None:
            return items
        cursor = {"cursor": page["next_cursor"]}


async def indexed(http: httpx.AsyncClient, count: int) -> list[tuple[str, str, str]]:
    """What a redelivery of everything would do, once the index has so many."""
    for _ in range(200):
        found = await redeliver_range(http, status="all")
        if len(found) >= count:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"{count} callbacks are not listed after 10 s: {found}")


async def test_the_attempts_and_the_body_are_shown_as_they_were_sent(post: Post, sender: httpx.AsyncClient) -> None:
    post.receiver.script(respond(503, "not now"))
    task = await post.ended(sender, "größer 🎬", labels=["ü"])
    found = await callback(sender, task, status="SUCCEEDED")
    assert (found["url"], found["next_attempt_at"], found["redeliveries"]) == (post.receiver.url, None, [])
    first, second = found["attempts"]
    assert (first["number"], first["status_code"], first["reply"]) == (1, 503, "not now")
    assert first["error_code"] == "HTTP_STATUS"
    assert (second["number"], second["status_code"], second["error_code"]) == (2, 200, None)
    assert second["duration_ms"] >= 0
    assert [request.body.decode() for request in post.receiver.requests] == [found["body"]] * 2
    assert [body["labels"] for body in post.received(task)] == [["ü"]] * 2


async def test_a_waiting_delivery_is_shown_and_sent_at_once_when_asked(post: Post, sender: httpx.AsyncClient) -> None:
    post.receiver.script(respond(503, headers={"retry-after": "3600"}))
    task = await post.ended(sender)
    found = await callback(sender, task, status="RETRYING")
    due = datetime.fromisoformat(found["next_attempt_at"]) - datetime.now(UTC)
    assert timedelta(minutes=59) < due < timedelta(minutes=70)
    reply = await redeliver(sender, task)
    assert (reply.status_code, reply.json()["redeliveries"]) == (202, [])
    found = await callback(sender, task, status="SUCCEEDED")
    assert [attempt["status_code"] for attempt in found["attempts"]] == [503, 200]
    assert found["redeliveries"] == []


async def test_a_callback_that_was_given_up_is_sent_again_with_the_same_id_and_body(
    post: Post, sender: httpx.AsyncClient
) -> None:
    post.receiver.script(respond(410), respond(410))
    task = await post.ended(sender)
    await callback(sender, task, status="FAILED")
    assert (await redeliver(sender, task)).status_code == 202
    await callback(sender, task, redelivered="FAILED")
    reply = await redeliver(sender, task)
    assert [r["number"] for r in reply.json()["redeliveries"]] == [1, 2]
    found = await callback(sender, task, redelivered="SUCCEEDED")
    assert found["status"] == "FAILED", "the first delivery stays what it was"
    assert [r["status"] for r in found["redeliveries"]] == ["FAILED", "SUCCEEDED"]
    bodies = post.received(task)
    assert bodies == [bodies[0]] * 3
    assert {found["body"], *(r["body"] for r in found["redeliveries"])} == {post.receiver.requests[0].body.decode()}


async def test_parallel_redeliveries_meet_in_one(post: Post, sender: httpx.AsyncClient) -> None:
    task = await post.ended(sender)
    await callback(sender, task, status="SUCCEEDED")
    post.receiver.default = respond(after=0.5)
    replies = await asyncio.gather(*(redeliver(sender, task) for _ in range(8)))
    assert {reply.status_code for reply in replies} == {202}
    found = await callback(sender, task, redelivered="SUCCEEDED")
    assert [r["number"] for r in found["redeliveries"]] == [1]


async def test_tasks_without_a_callback_say_why(post: Post, sender: httpx.AsyncClient) -> None:
    none = await post.ended(sender, "no callback", callback_url=None)
    unsubscribed = await post.ended(sender, "not this end", callback_events=["failed"])
    terminated = (await sender.post("/tasks", json={"prompt": "hold", "callback_url": post.receiver.url})).json()
    await post.stand.client.get_workflow_handle(terminated["task_id"]).terminate()
    for task, why in ((none, "callback_url"), (unsubscribed, "SUCCEEDED"), (terminated, "from outside")):
        for reply in (await sender.get(f"/tasks/{task['task_id']}/callback"), await redeliver(sender, task)):
            assert why in str(assert_problem(reply, 404, "CALLBACK_NOT_FOUND")["detail"])


async def test_a_running_task_has_nothing_to_deliver_yet(post: Post, sender: httpx.AsyncClient) -> None:
    task = (await sender.post("/tasks", json={"prompt": "hold on", "callback_url": post.receiver.url})).json()
    assert_problem(await sender.get(f"/tasks/{task['task_id']}/callback"), 404, "CALLBACK_NOT_FOUND")
    problem = assert_problem(await redeliver(sender, task), 409, "TASK_NOT_TERMINAL")
    assert isinstance(problem["task"], dict)
    post.played.release(task)
    await until(sender, task["task_id"], is_terminal=True)


async def test_a_redelivery_reads_as_failed_after_an_operator_terminated_it(
    post: Post, sender: httpx.AsyncClient
) -> None:
    post.receiver.default = respond(503)
    task = await post.ended(sender)
    await callback(sender, task, status="RETRYING")
    await post.stand.client.get_workflow_handle(naming.callback_id(task["task_id"])).terminate()
    found = await callback(sender, task, status="FAILED")
    assert found["next_attempt_at"] is None
    post.receiver.default = respond(200)
    await redeliver(sender, task)
    await callback(sender, task, redelivered="SUCCEEDED")


class TestRange:
    """POST /callbacks/redeliver."""

    async def test_a_dry_run_sends_nothing_and_the_run_sends_what_it_said(
        self, post: Post, sender: httpx.AsyncClient
    ) -> None:
        post.receiver.paths = {
            "/gone": respond(410),
            "/busy": respond(503, headers={"retry-after": "3600"}),
        }
        fine = await post.ended(sender, "one")
        gone = await post.ended(sender, "two", callback_url=post.receiver.url_of("/gone"))
        busy = await post.ended(sender, "three", callback_url=post.receiver.url_of("/busy"))
        healed = await post.ended(sender, "four", callback_url=post.receiver.url_of("/gone"))
        await callback(sender, fine, status="SUCCEEDED")
        await callback(sender, busy, status="RETRYING")
        for task in (gone, healed):
            await callback(sender, task, status="FAILED")
        post.receiver.paths = {}
        await redeliver(sender, healed)
        await callback(sender, healed, redelivered="SUCCEEDED")
        every = {
            (fine["task_id"], "SUCCEEDED", "redeliver"),
            (gone["task_id"], "FAILED", "redeliver"),
            (busy["task_id"], "RETRYING", "retry_now"),
            (healed["task_id"], "SUCCEEDED", "redeliver"),
        }
        assert set(await indexed(sender, 4)) == every
        sent = len(post.receiver.requests)
        await eventually_equal(sender, "failed", [(gone["task_id"], "FAILED", "redeliver")])
        planned = await redeliver_range(sender, limit=1)
        assert set(planned) == {item for item in every if item[1] != "SUCCEEDED"}
        assert len(post.receiver.requests) == sent, "they were dry runs"
        done = await redeliver_range(sender, limit=1, dry_run=False)
        assert set(done) == set(planned)
        await callback(sender, gone, redelivered="SUCCEEDED")
        await callback(sender, busy, status="SUCCEEDED", redelivered=None)
        assert len(post.receiver.requests) == sent + 2
        await eventually_equal(sender, "undelivered", [])

    async def test_the_time_is_that_in_which_the_tasks_ended(self, post: Post, sender: httpx.AsyncClient) -> None:
        first = await post.ended(sender, "one")
        between = datetime.now(UTC)
        second = await post.ended(sender, "two")
        await indexed(sender, 2)
        early = await redeliver_range(sender, status="all", until=between.isoformat())
        late = await redeliver_range(sender, status="all", since=between.isoformat())
        assert ([item[0] for item in early], [item[0] for item in late]) == ([first["task_id"]], [second["task_id"]])

    async def test_a_user_reaches_their_own_and_a_service_key_all_of_its_tenant(
        self, post: Post, sender: httpx.AsyncClient
    ) -> None:
        mine = await post.ended(sender)
        bolt = http_client(f"{post.stand.url}/api/v1", {"Authorization": f"Bearer {post.stand.keys['user']}"})
        tenant = http_client(f"{post.stand.url}/api/v1", {"Authorization": f"Bearer {post.stand.service_key}"})
        async with post.stand.user() as other, bolt as bolts, tenant as acme:
            theirs = await post.ended(other)
            foreign = await post.ended(bolts)
            for http in (sender, other, bolts):
                await indexed(http, 1)
            assert [item[0] for item in await redeliver_range(sender, status="all")] == [mine["task_id"]]
            assert [item[0] for item in await redeliver_range(bolts, status="all")] == [foreign["task_id"]]
            everyone = {item[0] for item in await redeliver_range(acme, status="all", limit=2)}
        assert {mine["task_id"], theirs["task_id"]} <= everyone
        assert foreign["task_id"] not in everyone

    @pytest.mark.parametrize(
        ("fields", "broken"),
        [
            ({}, {"since": "missing"}),
            ({"since": 1}, {"since": "rfc3339"}),
            ({"since": "yesterday"}, {"since": "rfc3339"}),
            ({"since": "2026-01-31T12:00:00"}, {"since": "timezone_aware"}),
            ({"since": "2026-01-31T12:00:00Z", "until": "2026-01-31T11:00:00Z"}, {"until": "after_since"}),
            ({"since": "2026-01-31T12:00:00Z", "limit": 101}, {"limit": "less_than_equal"}),
            ({"since": "2026-01-31T12:00:00Z", "dry_run": "no"}, {"dry_run": "bool_type"}),
            ({"since": "2026-01-31T12:00:00Z", "cursor": "bWFkZSB1cA=="}, {"cursor": "cursor"}),
        ],
    )
    async def test_broken_rules_are_named(
        self, post: Post, sender: httpx.AsyncClient, fields: dict[str, object], broken: dict[str, str]
    ) -> None:
        assert_problem(await sender.post("/callbacks/redeliver", json=fields), 422, "VALIDATION_FAILED", **broken)


async def eventually_equal(http: httpx.AsyncClient, status: str, expected: list[tuple[str, str, str]]) -> None:
    """The index comes to it within moments."""
    for _ in range(100):
        found = await redeliver_range(http, status=status)
        if found == expected:
            return
        await asyncio.sleep(0.05)
    assert found == expected


class TestSample:
    """POST /callbacks/test."""

    async def test_a_signed_sample_arrives_once_and_the_attempt_is_the_answer(
        self, post: Post, sender: httpx.AsyncClient
    ) -> None:
        reply = await sender.post("/callbacks/test", json={"url": post.receiver.url})
        result = reply.json()
        assert (reply.status_code, result["status"], result["attempt"]["status_code"]) == (200, "SUCCEEDED", 200)
        [request] = post.receiver.requests
        assert request.verify(post.secret)["type"] == "callback.test"
        assert request.body.decode() == result["body"]

    @pytest.mark.parametrize("behaviour", [respond(500, "broken"), redirect("https://example.com/")])
    async def test_a_failure_is_tried_once_and_told(
        self, post: Post, sender: httpx.AsyncClient, behaviour: Behaviour
    ) -> None:
        post.receiver.default = behaviour
        result = (await sender.post("/callbacks/test", json={"url": post.receiver.url})).json()
        assert result["status"] == "FAILED"
        assert result["attempt"]["error_code"] in ("HTTP_STATUS", "REDIRECT")
        await asyncio.sleep(0.1)
        assert len(post.receiver.requests) == 1

    @pytest.mark.parametrize(
        ("url", "rule"), [("https://10.0.0.1/", "address"), ("ftp://example.com/", "scheme"), ("", "string_too_short")]
    )
    async def test_it_goes_nowhere_a_callback_may_not(
        self, post: Post, sender: httpx.AsyncClient, url: str, rule: str
    ) -> None:
        reply = await sender.post("/callbacks/test", json={"url": url})
        assert_problem(reply, 422, "VALIDATION_FAILED", url=rule)
