"""What one task costs the Temporal server: billable actions, database and visibility writes, history.

Played GPU, real workflows, a callback that is taken at once. The counts are those of the server's own metrics, per
task, and the same on any machine, but for polling. `python -m tests.benchmarks.bench_footprint` prints a table and,
as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter

import httpx
from temporalio.client import Client

from tests.api.stand import NO_TLS, api_settings, create_keys, listening, open_stand, serving, until
from tests.benchmarks.site import Server, bench_server, report
from workers.connection import connect
from workflows import naming

TASKS = 20
_SERIES = re.compile(r"^(action|persistence_requests|visibility_persistence_requests)(?:_total)?\{(.*)\} (\S+)$")
_NAME = re.compile(r'(?:action_type|operation)="([^"]+)"')
_WRITES = frozenset({"CreateWorkflowExecution", "UpdateWorkflowExecution"})


async def main() -> None:
    """Measure and print."""
    async with bench_server(in_memory=True) as server:
        with listening() as sock:
            figures = await _measure(server, sock)
    report("footprint", {name: round(value, 1) for name, value in figures.items()})


async def _measure(server: Server, sock: socket.socket) -> dict[str, float]:
    settings = api_settings(server.folder, server.address, sock.getsockname()[1])
    keys = create_keys(settings)
    client = await connect(settings, register_search_attributes=True)
    with serving(settings, sock) as url:
        stand = open_stand(server.folder, url, settings, client, keys)
        async with stand.workers(), stand.user() as http:
            await _one(http, -1)
            before = await _counts(server.metrics_url)
            tasks = [await _one(http, number) for number in range(TASKS)]
            after = await _counts(server.metrics_url)
            sizes = [await _size(client, name) for name in (tasks[0], naming.callback_id(tasks[0]))]
    each = {key: (after[key] - before[key]) / TASKS for key in after}
    return {
        "billable_actions": sum(value for (series, _), value in each.items() if series == "action"),
        "database_writes_of_executions": sum(
            value for (series, name), value in each.items() if series == "persistence_requests" and name in _WRITES
        ),
        "visibility_writes": sum(
            value
            for (series, name), value in each.items()
            if series == "visibility_persistence_requests" and name.endswith(("Started", "Closed", "Execution"))
        ),
        "events_of_the_job": sizes[0][0],
        "events_of_its_callback": sizes[1][0],
        "history_bytes_of_both": sizes[0][1] + sizes[1][1],
    }


async def _one(http: httpx.AsyncClient, number: int) -> str:
    body = {"prompt": f"a red circle moving right {number}", "callback_url": "http://127.0.0.1:9/taken"}
    task_id = str((await http.post("/tasks", json=body)).json()["task_id"])
    await until(http, task_id, timeout=60, status="SUCCEEDED", callback_status="SUCCEEDED")
    return task_id


async def _size(client: Client, workflow_id: str) -> tuple[int, int]:
    described = await client.get_workflow_handle(workflow_id).describe()
    info = described.raw_description.workflow_execution_info
    return info.history_length, info.history_size_bytes


async def _counts(metrics_url: str) -> Counter[tuple[str, str]]:
    async with httpx.AsyncClient(verify=NO_TLS, timeout=30) as http:
        page = (await http.get(metrics_url)).text
    counts: Counter[tuple[str, str]] = Counter()
    for line in page.splitlines():
        found = _SERIES.match(line)
        name = _NAME.search(found[2]) if found else None
        if found and name:
            counts[found[1], name[1]] += float(found[3])  # type: ignore[assignment]
    return counts


if __name__ == "__main__":
    asyncio.run(main())
