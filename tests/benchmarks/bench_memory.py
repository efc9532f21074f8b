"""Memory of every process under steady load, and whether it grows: tasks that cost no GPU time, for ten minutes.

API, control and callback worker as they ship; tasks are submitted over HTTP by 5 users, read while they run and
delivered to a receiver, half as many as two cores can do, so that none pile up. Resident memory after the first minute
is compared with that after half of the time and at the end: a control worker keeps the history of an admission until
that continues as new, which it does once in each half. `REELGATE_BENCH_SECONDS` changes the length.
`python -m tests.benchmarks.bench_memory` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from uuid import uuid4

import httpx

from tests.api.stand import http_client
from tests.benchmarks.site import bench_site, report, resident_mb, rounded
from tests.receiver import Receiver

SECONDS = float(os.environ.get("REELGATE_BENCH_SECONDS", "600"))
WARM_SECONDS = min(60.0, SECONDS / 5)
USERS = 5
PAUSE_SECONDS = 0.7


async def use(http: httpx.AsyncClient, user: str, receiver: Receiver, until: float) -> int:
    """One user who submits, reads and waits a moment; returns the tasks submitted."""
    done = 0
    headers = {"X-User-Id": user}
    while time.monotonic() < until:
        body = {"prompt": f"a red circle moving right {uuid4().hex}", "callback_url": receiver.url}
        reply = await http.post("/tasks", json=body, headers=headers)
        if reply.status_code == httpx.codes.ACCEPTED:
            done += 1
            await http.get(f"/tasks/{reply.json()['task_id']}", headers=headers)
        await asyncio.sleep(PAUSE_SECONDS)
    return done


async def main() -> None:
    """Measure and print."""
    async with Receiver() as receiver, bench_site() as site:
        processes = {kind: site.worker(kind) for kind in ("control", "callback")}
        site.worker("gpu", floor=True)
        api = site.api()
        await asyncio.to_thread(api.until_ready)
        processes["api"] = api.pid
        key = {"Authorization": f"Bearer {site.keys['service']}"}
        async with http_client(f"{api.url}/api/v1", key) as http:
            until = time.monotonic() + SECONDS
            users = asyncio.gather(*(use(http, f"user-{n}", receiver, until) for n in range(USERS)))
            await asyncio.sleep(WARM_SECONDS)
            warm = memory(processes)
            await asyncio.sleep(SECONDS / 2 - WARM_SECONDS)
            half = memory(processes)
            tasks = sum(await users)
            await receiver.wait_for(tasks, timeout=120)
            end = memory(processes)
    figures = {"seconds": SECONDS, "tasks": float(tasks), "callbacks": float(len(receiver.requests))}
    for name in processes:
        figures[f"{name}_mb_warm"] = warm[name]
        figures[f"{name}_mb_half"] = half[name]
        figures[f"{name}_mb_end"] = end[name]
    report("memory", figures)


def memory(processes: Mapping[str, int]) -> dict[str, float]:
    """Resident memory by process."""
    return {name: rounded(resident_mb(process_id)) for name, process_id in processes.items()}


if __name__ == "__main__":
    asyncio.run(main())
