"""`reelgate list`, `queues`, `stats`, `workers`, `events` and `submit --wait` against a running gateway."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from api.cli import app
from api.cli_client import Access, Gateway
from api.cli_follow import follow
from tests.api.stand import PlayedGeneration, Stand, until
from tests.api.test_reading import submit
from workflows.states import TaskStatus


async def reelgate(stand: Stand, key: str, *arguments: str) -> Result:
    """Run one command as the holder of a key."""
    environment = {"REELGATE_URL": stand.url, "REELGATE_API_KEY": stand.keys[key], "COLUMNS": "200"}
    done = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def as_bolt(stand: Stand) -> httpx.AsyncClient:
    """The user of the key `user`."""
    return httpx.AsyncClient(
        base_url=f"{stand.url}/api/v1", headers={"Authorization": f"Bearer {stand.keys['user']}"}, timeout=30
    )


async def listed(stand: Stand, *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((await reelgate(stand, "user", "list", "--json", *arguments)).stdout)
    return document


async def test_list_filters_and_pages_as_the_api(stand: Stand, played: PlayedGeneration) -> None:
    async with as_bolt(stand) as http:
        tasks = [await submit(http, f"listed [bold] {n}") for n in range(3)]
        for task in tasks:
            await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    async with asyncio.timeout(30):
        while len((page := await listed(stand, "--limit", "2", "--status", "succeeded"))["items"]) < 2:
            await asyncio.sleep(0.2)
    assert page["next_cursor"]
    following = await listed(stand, "--limit", "2", "--status", "SUCCEEDED", "--cursor", page["next_cursor"])
    assert not {item["task_id"] for item in page["items"]} & {item["task_id"] for item in following["items"]}
    ids = {task["task_id"] for task in tasks}
    for option, found in (("--created-before", set()), ("--created-after", ids)):
        listing = await listed(stand, option, tasks[0]["queued_at"], "--model", "moving-shapes")
        assert {item["task_id"] for item in listing["items"]} & ids == found
    shown = (await reelgate(stand, "user", "list")).stdout
    assert tasks[0]["task_id"] in shown
    assert "listed [bold] 0" in shown


async def test_queues_stats_and_workers_are_tables_or_documents(stand: Stand, played: PlayedGeneration) -> None:
    async with asyncio.timeout(20):
        # A worker is in the fleet from its first heartbeat on.
        while "gpu-default" not in (await reelgate(stand, "operator", "workers", "--json")).stdout:
            await asyncio.sleep(0.5)
    for command, key, word in (
        ("queues", "user", "default"),
        ("stats", "user", "SUCCEEDED"),
        ("workers", "operator", "gpu-default"),
    ):
        assert word in (await reelgate(stand, key, command)).stdout
        assert word in (await reelgate(stand, key, command, "--json")).stdout
        json.loads((await reelgate(stand, key, command, "--json")).stdout)


async def test_events_follows_a_task_to_its_end(stand: Stand, played: PlayedGeneration) -> None:
    async with as_bolt(stand) as http:
        task = await submit(http, "hold for events")
        await until(http, task["task_id"], status="PROCESSING")
        watching = asyncio.create_task(reelgate(stand, "user", "events", "--json", task["task_id"]))
        await asyncio.sleep(1.5)
        played.release(task)
        seen = [json.loads(line) for line in (await watching).stdout.splitlines()]
    states = [event["data"]["status"] for event in seen if event["event"] == "state"]
    assert states[:2] == ["QUEUED", "PROCESSING"]
    assert seen[-1]["data"]["status"] == "SUCCEEDED"
    assert seen[-1]["data"]["is_terminal"]
    assert any(event["event"] == "progress" and event["data"]["progress"]["step"] == 3 for event in seen)
    told = (await reelgate(stand, "user", "events", task["task_id"])).stdout
    assert told.rstrip().endswith("(closed)")


async def test_a_stream_that_is_cut_is_taken_up_where_it_was(stand: Stand, played: PlayedGeneration) -> None:
    async with as_bolt(stand) as client:
        task = await submit(client, "hold for a stuttering stream")
        await until(client, task["task_id"], status="PROCESSING")
    with serving_proxy(stand.url, Stuttering) as (url, proxy):
        environment = {"REELGATE_URL": url, "REELGATE_API_KEY": stand.keys["user"]}
        watching = asyncio.create_task(
            asyncio.to_thread(CliRunner().invoke, app, ["events", "--json", task["task_id"]], env=environment)
        )
        async with asyncio.timeout(30):
            while proxy.streams < 2:
                await asyncio.sleep(0.05)
        played.release(task)
        done = await watching
    assert done.exit_code == 0, done.output
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    states = [(event["data"]["status"], event["data"]["is_terminal"]) for event in seen if event["event"] == "state"]
    assert states == [("QUEUED", False), ("PROCESSING", False), ("SUCCEEDED", False), ("SUCCEEDED", True)]
    assert len({event["id"] for event in seen}) == len(seen), "nothing is told twice"


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on, but cuts event streams off."""

    target = ""
    polls = 0
    streams = 0

    def do_GET(self) -> None:
        if self.path.endswith("/events"):
            type(self).streams += 1
            self.close_connection = True
            return
        type(self).polls += 1
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        reply = httpx.get(f"{self.target}{self.path}", headers=headers)
        self.send_response(reply.status_code)
        for name in ("etag", "retry-after", "content-type"):
            if name in reply.headers:
                self.send_header(name, reply.headers[name])
        self.send_header("content-length", str(len(reply.content)))
        self.end_headers()
        self.wfile.write(reply.content)

    def log_message(self, *_: object) -> None:
        pass


class Stuttering(Proxy):
    """Cuts event streams off in the middle, two events at a time."""

    def do_GET(self) -> None:
        if not self.path.endswith("/events"):
            super().do_GET()
            return
        type(self).streams += 1
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        events = 0
        with httpx.stream("GET", f"{self.target}{self.path}", headers=headers, timeout=60) as reply:
            for line in reply.iter_lines():
                piece = f"{line}\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                events += line.startswith("data: ")
                if events == 2 and not line:
                    return
        # The last chunk never comes: to the client this is a cut, too.


@contextmanager
def serving_proxy(target: str, kind: type[Proxy]) -> Iterator[tuple[str, type[Proxy]]]:
    """A proxy in front of the gateway, and what counts what came through it."""

    class Counting(kind):  # type: ignore[misc, valid-type]  # a class of its own has counts of its own
        pass

    Counting.target = target
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", Counting
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def cutting_proxy(target: str) -> Iterator[str]:
    """A proxy in front of the gateway through which no event stream comes."""
    with serving_proxy(target, Proxy) as (url, counted):
        yield url
    assert counted.streams == 1
    assert counted.polls >= 2


@pytest.mark.parametrize("streams", [True, False])
async def test_following_a_task_sees_its_states_with_and_without_streams(
    stand: Stand, played: PlayedGeneration, streams: bool
) -> None:
    async with as_bolt(stand) as http:
        task = await submit(http, f"hold to be followed {streams}")
        await until(http, task["task_id"], status="PROCESSING")
    states: list[TaskStatus] = []

    def watch(url: str) -> tuple[TaskStatus, float]:
        with Gateway(Access(url=url, api_key=stand.keys["user"])) as gate:
            ended = follow(gate, task["task_id"], quiet=True, on_change=states.append)
            return ended.status, time.monotonic()

    async def release() -> float:
        await asyncio.sleep(0.7)
        played.release(task)
        return time.monotonic()

    with cutting_proxy(stand.url) if not streams else _direct(stand.url) as url:
        (status, seen_at), released_at = await asyncio.gather(asyncio.to_thread(watch, url), release())
    assert status is TaskStatus.SUCCEEDED
    assert states[-2:] == ["PROCESSING", "SUCCEEDED"]
    assert states[0] == ("QUEUED" if streams else "PROCESSING"), "a stream tells what was before"
    assert seen_at - released_at < 5


@contextmanager
def _direct(url: str) -> Iterator[str]:
    yield url


async def test_submit_and_wait_saves_the_clip(
    stand: Stand, played: PlayedGeneration, tmp_path: os.PathLike[str]
) -> None:
    file = os.path.join(tmp_path, "clip.mp4")  # noqa: PTH118 - a command line takes text
    done = await reelgate(stand, "user", "submit", "waited for", "--wait", "--json", "--output", file)
    assert json.loads(done.stdout)["saved"] == file
