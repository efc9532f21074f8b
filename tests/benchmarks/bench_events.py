"""A thousand clients of one task's event stream on one API process: memory, upstream calls, and the way of a state.

The clients, the workers and Temporal run on the same machine. The way of a state is from the time that Temporal
stamped on it to its arrival at a client, by the same clock. `python -m tests.benchmarks.bench_events` prints a table
and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import statistics
import time
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import httpx

from tests.api.stand import api_settings, create_keys, http_client, open_stand, until
from tests.benchmarks.bench_get import answering, get, process
from tests.benchmarks.site import bench_server, report, resident_mb
from workers.connection import connect
from workers.devserver import free_port

CLIENTS = 1_000
TARGET_MB = 200
WATCH_SECONDS = 5.0
"""How long upstream calls are counted."""
_OPENED_AT_ONCE = 50
_FILES = 8_192


class Listener(asyncio.Protocol):
    """One client: takes the stream as bytes and notes when each state came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self.states: dict[str, tuple[float, float]] = {}
        """By state: when it was entered and when it came here, seconds since the epoch."""
        self.is_cut = False
        self.refusal: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if data.startswith(b"HTTP/1.1 ") and data[9:12] != b"200":
            self.refusal = data.decode()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and b'"is_terminal"' in line:
                state = json.loads(line[6:])
                name = "closed" if state["is_terminal"] else state["status"]
                self.states[name] = (datetime.fromisoformat(state["at"]).timestamp(), now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_cut = True

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


async def calls(metrics_url: str) -> dict[str, int]:
    """Calls that the API has made to Temporal, by operation."""
    async with http_client() as http:
        text = (await http.get(metrics_url)).text
    found: dict[str, int] = {}
    for name, count in re.findall(
        r'^temporal_(?:long_)?request{[^}]*operation="(\w+)"[^}]*} (\d+)', text, re.MULTILINE
    ):
        found[name] = found.get(name, 0) + int(count)
    return found


async def opened(port: int, request: bytes, count: int) -> list[Listener]:
    """So many clients, a few at a time as a listen queue takes them."""
    loop = asyncio.get_running_loop()
    listeners: list[Listener] = []
    while len(listeners) < count:
        some = min(_OPENED_AT_ONCE, count - len(listeners))
        made = await asyncio.gather(
            *(loop.create_connection(lambda: Listener(request), "127.0.0.1", port) for _ in range(some))
        )
        listeners += [listener for _, listener in made]
        await all_have(listeners, "PROCESSING")
    return listeners


async def all_have(listeners: list[Listener], state: str, *, seconds: float = 120) -> None:
    """Wait until every client has a state."""
    async with asyncio.timeout(seconds):
        while not all(state in listener.states for listener in listeners):
            refusals = [listener.refusal for listener in listeners if listener.refusal is not None]
            assert not refusals, refusals[0]
            await asyncio.sleep(0.02)


async def measure(folder: Path, address: str) -> dict[str, float]:
    """Open the streams, watch for a while, end the task."""
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    settings = api_settings(folder, address, port)
    keys = create_keys(settings)
    client = await connect(settings, register_search_attributes=True)
    stand = open_stand(folder, f"http://127.0.0.1:{port}", settings, client, keys)
    environment = {
        "REELGATE_ENVIRONMENT": "development",
        "REELGATE_DATA_DIR": str(folder),
        "REELGATE_TEMPORAL_ADDRESS": address,
        "REELGATE_PORT": str(port),
        "REELGATE_METRICS_BIND": metrics,
        "REELGATE_REQUEST_RATE_PER_SECOND": "20000",
        "REELGATE_REQUEST_BURST": "20000",
    }
    user = f"user-{uuid4().hex[:12]}"
    async with AsyncExitStack() as stack:
        pid = stack.enter_context(process("-m", "api.cli", "api", environment=environment))
        await answering(port)
        played = await stack.enter_async_context(stand.workers())
        http: httpx.AsyncClient = await stack.enter_async_context(stand.user(user))
        reply = await http.post("/tasks", json={"prompt": "hold the stream"})
        task_id: str = reply.json()["task_id"]
        await until(http, task_id, timeout=60, status="PROCESSING")
        request = get(
            f"/api/v1/tasks/{task_id}/events", f"Authorization: Bearer {keys['service']}", f"X-User-Id: {user}"
        )
        first = await opened(port, request, 1)  # it starts the watch, which serves all the others
        await asyncio.sleep(1)
        before = resident_mb(pid)
        began = time.perf_counter()
        listeners = first + await opened(port, request, CLIENTS - 1)
        opening = time.perf_counter() - began
        counted = await calls(f"http://{metrics}/metrics")
        await asyncio.sleep(WATCH_SECONDS)
        after = await calls(f"http://{metrics}/metrics")
        grown = resident_mb(pid) - before
        assert not any(listener.is_cut for listener in listeners), "a stream was cut"
        played.release({"task_id": task_id})
        await all_have(listeners, "closed")
        ways = sorted(came - at for at, came in (listener.states["SUCCEEDED"] for listener in listeners))
        spread = max(listener.states["SUCCEEDED"][1] for listener in listeners) - min(
            listener.states["SUCCEEDED"][1] for listener in listeners
        )
        for listener in listeners:
            listener.close()
    return {
        "clients": CLIENTS,
        "open_seconds": round(opening, 2),
        "rss_growth_mb": round(grown, 1),
        "rss_target_mb": TARGET_MB,
        "kb_per_client": round(grown * 1e3 / CLIENTS, 1),
        "describe_per_second": _rate(counted, after, "DescribeWorkflowExecution"),
        "history_polls_per_second": _rate(counted, after, "GetWorkflowExecutionHistory"),
        "state_to_first_client_seconds": round(ways[0], 3),
        "state_to_median_client_seconds": round(statistics.median(ways), 3),
        "state_to_last_client_seconds": round(ways[-1], 3),
        "first_to_last_client_seconds": round(spread, 3),
    }


def _rate(before: dict[str, int], after: dict[str, int], operation: str) -> float:
    return round((after.get(operation, 0) - before.get(operation, 0)) / WATCH_SECONDS, 2)


async def main() -> None:
    """Measure and print."""
    # A socket for each end of each stream; the API process inherits the limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, most), most))
    async with bench_server(in_memory=True) as server:
        report("events", await measure(server.folder, server.address))


if __name__ == "__main__":
    asyncio.run(main())
