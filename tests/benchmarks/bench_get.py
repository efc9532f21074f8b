"""GET of an ended, delivered task against a constant FastAPI route: one server process each, the same client.

Key check, request guard, access log, security headers and validators are on, as in production; only the guard's
rate is raised. `python -m tests.benchmarks.bench_get` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from fastapi import FastAPI

from api.admission import OpenAdmission
from tests.api.stand import api_settings, create_keys, listening, open_stand, serving, until
from tests.benchmarks.site import bench_server, report
from workers.connection import connect
from workers.devserver import free_port
from workers.web_server import embedded_server, listen, serve_until_signal

ROUNDS = 7
SECONDS = 1.5
"""Length of one measurement."""
CONNECTIONS = 8
START_SECONDS = 30.0
TARGET = 0.8
_TICK = os.sysconf("SC_CLK_TCK")


def serve_constant(port: int) -> None:
    """The floor: what FastAPI costs with a route that does nothing."""
    app = FastAPI(openapi_url=None)

    @app.get("/constant")
    async def constant() -> dict[str, str]:
        return {"status": "ok"}

    server = embedded_server(app, graceful_seconds=1)
    sys.exit(uvloop.run(serve_until_signal(server, listen("127.0.0.1", port, setting="port"))))


class Load(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._answer = b""
        self.answers = 0
        self.wrong = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if not found or len(body) < content_length(head):
            return
        self.answers += 1
        self.wrong += not head.startswith(b"HTTP/1.1 200")
        self._answer = b""
        if not self._transport.is_closing():
            self._transport.write(self._request)

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


def content_length(head: bytes) -> int:
    """Bytes of the body that follow the head of an answer."""
    return next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))


def get(path: str, *headers: str) -> bytes:
    """The bytes of a request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


async def rate(port: int, request: bytes, *, pid: int) -> tuple[float, float]:
    """Answers per second, and the server's CPU seconds per answer."""
    loop = asyncio.get_running_loop()
    loads = [(await loop.create_connection(lambda: Load(request), "127.0.0.1", port))[1] for _ in range(CONNECTIONS)]
    await asyncio.sleep(0.1)
    counted, used, began = sum(load.answers for load in loads), _cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(SECONDS)
    answers = sum(load.answers for load in loads) - counted
    elapsed, used = time.perf_counter() - began, _cpu_seconds(pid) - used
    for load in loads:
        load.close()
    assert not any(load.wrong for load in loads), "an answer was not 200"
    return answers / elapsed, used / answers


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


@contextmanager
def process(*command: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    """A server process; its pid."""
    with subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL
    ) as running:
        try:
            yield running.pid
        finally:
            running.terminate()


async def answering(port: int) -> None:
    """Wait until a port is open."""
    give_up_at = time.monotonic() + START_SECONDS
    while True:
        assert time.monotonic() < give_up_at, "a server did not start"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


async def delivered_task(folder: Path, address: str) -> tuple[str, str]:
    """Make a task that has ended and whose callback was delivered; its id and its owner's key."""
    with listening() as sock:
        settings = api_settings(folder, address, sock.getsockname()[1])
        keys = create_keys(settings)
        client = await connect(settings, register_search_attributes=True)
        with serving(settings, sock, admission=OpenAdmission()) as url:
            stand = open_stand(folder, url, settings, client, keys)
            async with stand.workers(), stand.user("bench") as http:
                body = {"prompt": "a red circle", "callback_url": "http://127.0.0.1:9/hook"}
                task_id = (await http.post("/tasks", json=body)).json()["task_id"]
                await until(http, task_id, status="SUCCEEDED", is_terminal=True, callback_status="SUCCEEDED")
    return task_id, keys["service"]


async def measure(folder: Path, address: str) -> dict[str, float]:
    """Rounds that alternate between both servers."""
    task_id, key = await delivered_task(folder, address)
    ours, floor = free_port(), free_port()
    environment = {
        "REELGATE_ENVIRONMENT": "development",
        "REELGATE_DATA_DIR": str(folder),
        "REELGATE_TEMPORAL_ADDRESS": address,
        "REELGATE_PORT": str(ours),
        "REELGATE_REQUEST_RATE_PER_SECOND": "20000",
        "REELGATE_REQUEST_BURST": "20000",
    }
    read = get(f"/api/v1/tasks/{task_id}", f"Authorization: Bearer {key}", "X-User-Id: bench")
    constant = get("/constant")
    with (
        process("-m", "api.cli", "api", environment=environment) as pid,
        process("-m", "tests.benchmarks.bench_get", str(floor)) as floor_pid,
    ):
        await asyncio.gather(answering(ours), answering(floor))
        rounds = [
            (*await rate(ours, read, pid=pid), *await rate(floor, constant, pid=floor_pid)) for _ in range(ROUNDS + 1)
        ][1:]  # the first one warms up
    reads, read_cpu, constants, constant_cpu = map(statistics.median, zip(*rounds, strict=True))
    return {
        "get_per_second": round(reads),
        "constant_per_second": round(constants),
        "get_cpu_us": round(read_cpu * 1e6),
        "constant_cpu_us": round(constant_cpu * 1e6),
        "ratio": round(statistics.median(get / floor for get, _, floor, _ in rounds), 3),
        "target": TARGET,
    }


async def main() -> None:
    """Measure and print."""
    async with bench_server(in_memory=True) as server:
        report("get", await measure(server.folder, server.address))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_constant(int(sys.argv[1]))
    else:
        asyncio.run(main())
