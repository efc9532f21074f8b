"""Event streams: every state exactly once over any number of connections, and one watch for any number of clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import httpx
import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest

import api.event_stream
import api.routes.events
from api.admission import OpenAdmission
from tests.api.event_readers import SeenEvent, states, to_the_end, upto, watching
from tests.api.stand import WORKER_ID, PlayedGeneration, Stand, listening, serving, until
from tests.scale import scaled
from workers.devserver import free_port

SUCCEEDED = [("QUEUED", False), ("PROCESSING", False), ("SUCCEEDED", False), ("SUCCEEDED", True)]


async def submitted(http: httpx.AsyncClient, prompt: str) -> str:
    reply = await http.post("/tasks", json={"prompt": f"{prompt} {uuid4().hex}"})
    assert reply.status_code == 202, reply.text
    task_id: str = reply.json()["task_id"]
    return task_id


@dataclass(frozen=True)
class CountingApi:
    """An API process of its own, with the number of calls its Temporal client has made."""

    url: str
    metrics_url: str

    async def calls(self, operation: str) -> int:
        async with httpx.AsyncClient() as http:
            text = (await http.get(self.metrics_url)).text
        pattern = rf'^temporal_(?:long_)?request{{[^}}]*operation="{operation}"[^}}]*}} (\d+)'
        return sum(int(match[1]) for match in re.finditer(pattern, text, re.MULTILINE))

    @asynccontextmanager
    async def user(self, stand: Stand, name: str) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {stand.service_key}", "X-User-Id": name}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"{self.url}/api/v1", headers=headers, timeout=30, limits=limits) as http:
            yield http


@pytest.fixture
def counting(stand: Stand) -> Iterator[CountingApi]:
    metrics = f"127.0.0.1:{free_port()}"
    with listening() as sock:
        settings = stand.settings.model_copy(update={"metrics_bind": metrics, "port": sock.getsockname()[1]})
        with serving(settings, sock) as url:
            yield CountingApi(url=url, metrics_url=f"http://{metrics}/metrics")


class TestStates:
    async def test_a_task_is_seen_from_its_start_to_its_end(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "hold")
        async with watching(http, task_id) as events:
            seen = await upto(events, "progress", attempt=1)
            while seen[-1].data["progress"] is None:
                seen += await upto(events, "progress", attempt=1)
            progress = seen[-1].data
            played.release({"task_id": task_id})
            seen += [event async for event in events]
        assert states(seen) == SUCCEEDED
        assert [event.order for event in seen] == sorted({event.order for event in seen})
        assert all(event.order[1] == 0 for event in seen if event.name == "state")
        assert progress["progress"] == {
            "phase": "step",
            "step": 3,
            "total_steps": 10,
            "percent": 30.0,
            "eta_seconds": 7.0,
        }
        assert progress["worker_id"] == WORKER_ID
        assert all(event.data["task_id"] == task_id for event in seen)

    async def test_states_that_passed_before_anyone_listened_are_told(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "quick")
        await until(http, task_id, is_terminal=True)
        assert states(await to_the_end(http, task_id)) == SUCCEEDED

    async def test_a_failure_names_its_code(self, http: httpx.AsyncClient, played: PlayedGeneration) -> None:
        last = (await to_the_end(http, await submitted(http, "fail")))[-1].data
        assert (last["status"], last["is_terminal"], last["error_code"]) == ("FAILED", True, "INVALID_OUTPUT")
        assert "NaN" in last["error_message"]

    async def test_a_hard_cancel_is_requested_and_then_done(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "hold")
        async with watching(http, task_id) as events:
            await upto(events, "progress", status="PROCESSING")
            await http.post(f"/tasks/{task_id}/cancel", json={"mode": "hard"})
            seen = [event async for event in events]
        assert states(seen)[-1] == ("CANCELED", True)

    async def test_a_soft_cancel_shows_at_once_and_the_stream_goes_on_to_the_end_of_the_run(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "hold")
        async with watching(http, task_id) as events:
            await upto(events, "state", status="PROCESSING")
            await http.post(f"/tasks/{task_id}/cancel", json={"mode": "soft"})
            assert states(await upto(events, "state", status="CANCELED"))[-1] == ("CANCELED", False)
            assert (await upto(events, "progress"))[-1].data["cancel_requested"] == "soft"
            played.release({"task_id": task_id})
            assert states([event async for event in events])[-1] == ("CANCELED", True)

    async def test_no_worker_is_needed_and_a_terminated_run_reads_as_terminated(
        self, quiet: Stand, waiting: httpx.AsyncClient
    ) -> None:
        task_id = await submitted(waiting, "alone")
        async with watching(waiting, task_id) as events:
            queue = (await upto(events, "progress", status="QUEUED"))[-1].data["queue"]
            assert queue is not None
            assert queue["live_slots"] in (0, None)
            await quiet.client.get_workflow_handle(task_id).terminate()
            seen = [event async for event in events]
        assert states(seen) == [("CANCELED", True)]
        assert seen[-1].data["error_code"] == "TERMINATED"

    async def test_a_deleted_run_ends_the_stream(self, quiet: Stand, waiting: httpx.AsyncClient) -> None:
        task_id = await submitted(waiting, "delete")
        async with watching(waiting, task_id) as events:
            await upto(events, "progress", status="QUEUED")
            await quiet.client.workflow_service.delete_workflow_execution(
                DeleteWorkflowExecutionRequest(
                    namespace=quiet.client.namespace, workflow_execution=WorkflowExecution(workflow_id=task_id)
                )
            )
            async with asyncio.timeout(30):
                assert [event async for event in events if event.name == "progress"] == []


class TestResume:
    async def test_after_a_dropped_connection_nothing_is_missed_or_repeated(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "hold")
        async with watching(http, task_id) as events:
            first = await upto(events, "progress", status="PROCESSING")
        played.release({"task_id": task_id})
        await until(http, task_id, is_terminal=True)
        second = await to_the_end(http, task_id, last=first[-1].id)
        assert states(first + second) == SUCCEEDED
        assert [e.order for e in first + second] == sorted({e.order for e in first + second})

    async def test_every_place_of_a_stream_is_one_to_go_on_from(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "quick")
        await until(http, task_id, is_terminal=True)
        everything = await to_the_end(http, task_id)
        for number, event in enumerate(everything[:-1]):
            assert await to_the_end(http, task_id, last=event.id) == everything[number + 1 :]

    async def test_an_open_stream_repeats_no_progress(self, http: httpx.AsyncClient, played: PlayedGeneration) -> None:
        task_id = await submitted(http, "hold")
        async with AsyncExitStack() as keep:
            # Keeps the watch alive, so that both connections see the same progress.
            await keep.enter_async_context(watching(http, task_id))
            async with watching(http, task_id) as events:
                last = (await upto(events, "progress", status="PROCESSING"))[-1]
            async with watching(http, task_id, last=last.id) as events:
                played.release({"task_id": task_id})
                assert all(event.order > last.order for event in [e async for e in events])

    async def test_the_last_event_of_an_ended_task_is_answered_with_204(
        self, http: httpx.AsyncClient, played: PlayedGeneration
    ) -> None:
        task_id = await submitted(http, "quick")
        last = (await to_the_end(http, task_id))[-1].id
        reply = await http.get(f"/tasks/{task_id}/events", headers={"Last-Event-ID": last})
        assert (reply.status_code, reply.content) == (204, b"")

    @pytest.mark.parametrize("last", ["4000.0", "2.0", "", "x", "1", "-1.0", "1.0.0", "9" * 40])
    async def test_an_id_that_was_never_given_starts_from_the_beginning(
        self, http: httpx.AsyncClient, played: PlayedGeneration, last: str
    ) -> None:
        task_id = await submitted(http, "quick")
        await until(http, task_id, is_terminal=True)
        assert states(await to_the_end(http, task_id, last=last)) == SUCCEEDED


class TestClients:
    @pytest.mark.soak
    async def test_many_clients_of_a_task_make_one_watch(
        self, stand: Stand, played: PlayedGeneration, counting: CountingApi
    ) -> None:
        clients, user = scaled(500), f"user-{uuid4().hex[:12]}"
        async with counting.user(stand, user) as http, AsyncExitStack() as stack:
            task_id = await submitted(http, "hold")
            histories = await counting.calls("GetWorkflowExecutionHistory")
            describes = await counting.calls("DescribeWorkflowExecution")
            began = asyncio.get_running_loop().time()
            streams = await asyncio.gather(
                *(stack.enter_async_context(watching(http, task_id)) for _ in range(clients))
            )
            firsts = await asyncio.gather(*(upto(events, "progress", status="PROCESSING") for events in streams))
            played.release({"task_id": task_id})
            rests = await asyncio.gather(*map(rest_of, streams))
            seconds = asyncio.get_running_loop().time() - began
            for first, rest in zip(firsts, rests, strict=True):
                assert states(first + rest) == SUCCEEDED
            # All of the states, then the long polls that brought a new event each, at most.
            assert 2 <= await counting.calls("GetWorkflowExecutionHistory") - histories <= 16
            assert 1 <= await counting.calls("DescribeWorkflowExecution") - describes <= seconds + 5

    async def test_the_last_client_that_leaves_ends_the_watch_and_nothing_is_canceled(
        self, stand: Stand, played: PlayedGeneration, counting: CountingApi
    ) -> None:
        async with counting.user(stand, f"user-{uuid4().hex[:12]}") as http:
            task_id = await submitted(http, "hold")
            async with watching(http, task_id) as one, watching(http, task_id) as other:
                await upto(one, "progress", status="PROCESSING")
                await upto(other, "progress", status="PROCESSING")
            await asyncio.sleep(0.3)
            describes = await counting.calls("DescribeWorkflowExecution")
            await asyncio.sleep(1.5)
            assert await counting.calls("DescribeWorkflowExecution") == describes
            task = (await http.get(f"/tasks/{task_id}")).json()
            assert (task["status"], task["cancel_requested"]) == ("PROCESSING", None)
            played.release({"task_id": task_id})
            await until(http, task_id, status="SUCCEEDED")

    async def test_a_client_that_does_not_read_is_cut_while_others_go_on(
        self, stand: Stand, played: PlayedGeneration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api.routes.events, "SEND_TIMEOUT_SECONDS", 0.5)
        monkeypatch.setattr(api.routes.events, "KEEP_ALIVE_SECONDS", 0.02)
        monkeypatch.setattr(api.routes.events, "KEEP_ALIVE_COMMENT", "x" * 8_192)
        user = f"user-{uuid4().hex[:12]}"
        with listening() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
            settings = stand.settings.model_copy(update={"port": sock.getsockname()[1]})
            with serving(settings, sock) as url:
                async with CountingApi(url=url, metrics_url="").user(stand, user) as http:
                    task_id = await submitted(http, "hold")
                    async with watching(http, task_id) as reading:
                        await upto(reading, "progress", status="PROCESSING")
                        going_on = asyncio.create_task(rest_of(reading))
                        with lazy_client(sock.getsockname(), stand, user, task_id) as lazy:
                            await asyncio.sleep(1.5)
                            async with asyncio.timeout(10):
                                received = await asyncio.to_thread(drained, lazy)
                        assert b"event: state" in received
                        assert not received.endswith(b"0\r\n\r\n")
                        played.release({"task_id": task_id})
                        assert states(await going_on)[-1] == ("SUCCEEDED", True)

    async def test_silence_is_broken_by_comments(
        self, waiting: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api.routes.events, "KEEP_ALIVE_SECONDS", 0.2)
        task_id = await submitted(waiting, "idle")
        async with waiting.stream("GET", f"/tasks/{task_id}/events") as reply, asyncio.timeout(10):
            lines = reply.aiter_lines()
            assert await anext(lines) == "retry: 2000"
            async for line in lines:
                if line == ": keep-alive":
                    break

    async def test_streams_over_the_limit_are_asked_to_come_later(
        self, quiet: Stand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api.event_stream, "MAX_STREAMS", 1)
        user = f"user-{uuid4().hex[:12]}"
        with listening() as sock, serving(quiet.settings, sock, admission=OpenAdmission()) as url:
            async with CountingApi(url=url, metrics_url="").user(quiet, user) as one:
                task_id = await submitted(one, "crowded")
                async with watching(one, task_id) as events:
                    await upto(events, "state", status="QUEUED")
                    reply = await one.get(f"/tasks/{task_id}/events")
                    assert (reply.status_code, reply.json()["code"]) == (429, "RATE_LIMITED")
                    assert int(reply.headers["retry-after"]) > 0

    async def test_one_user_does_not_take_the_streams_of_all(
        self, quiet: Stand, waiting: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api.event_stream, "MAX_STREAMS_OF_A_USER", 1)
        task_id = await submitted(waiting, "greedy")
        async with watching(waiting, task_id) as events, quiet.user() as other:
            await upto(events, "state", status="QUEUED")
            async with waiting.stream("GET", f"/tasks/{task_id}/events") as reply:
                assert reply.status_code == 429
                assert json.loads(await reply.aread())["code"] == "RATE_LIMITED"
            async with watching(other, await submitted(other, "modest")) as others:
                await upto(others, "state", status="QUEUED")
        # The place of a stream that ended is free again.
        async with asyncio.timeout(20):
            while True:
                async with waiting.stream("GET", f"/tasks/{task_id}/events") as again:
                    if again.status_code == 200:
                        break
                await asyncio.sleep(0.1)


class TestAccess:
    async def test_other_users_tasks_and_unknown_ids_are_404_even_while_the_owner_watches(
        self, http: httpx.AsyncClient, stranger: httpx.AsyncClient
    ) -> None:
        task_id = await submitted(http, "private")
        async with watching(http, task_id) as events:
            await upto(events, "state", status="QUEUED")
            for client, name in (
                (stranger, task_id),
                (http, "t" + "a" * 26),
                (http, "x"),
                (http, f"callback-{task_id}"),
            ):
                reply = await client.get(f"/tasks/{name}/events")
                assert (reply.status_code, reply.json()["code"]) == (404, "TASK_NOT_FOUND")

    async def test_a_key_is_required(self, stand: Stand) -> None:
        async with httpx.AsyncClient() as nobody:
            reply = await nobody.get(f"{stand.url}/api/v1/tasks/t{'a' * 26}/events")
        assert (reply.status_code, reply.json()["code"]) == (401, "UNAUTHENTICATED")


async def rest_of(events: AsyncIterator[SeenEvent]) -> list[SeenEvent]:
    return [event async for event in events]


def lazy_client(address: tuple[str, int], stand: Stand, user: str, task_id: str) -> socket.socket:
    """A client that asks and then reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(address)
    client.sendall(
        f"GET /api/v1/tasks/{task_id}/events HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {stand.service_key}\r\nX-User-Id: {user}\r\n\r\n".encode("ascii")
    )
    return client


def drained(client: socket.socket) -> bytes:
    """What a client gets when it reads at last, until the server has closed."""
    received = b""
    while piece := client.recv(65_536):
        received += piece
    return received
