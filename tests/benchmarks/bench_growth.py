"""What a submission costs as the service fills up: tasks in the backlog, and users who have submitted.

One API process and one control worker, no GPU worker, so that the backlog stays. At each size the time of a new task
of a warm user and that of reading a queued task are measured on an otherwise idle machine; ratios are to the smallest
size. `python -m tests.benchmarks.bench_growth` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import httpx

from tests.api.stand import http_client
from tests.benchmarks.bench_submit import Bare
from tests.benchmarks.site import bench_site, call_all, median, report, rounded

BACKLOGS = (10, 100, 1_000, 5_000)
USERS = (1, 10, 1_000)
ROUNDS = 25
CONCURRENCY = 16
IDLE_SECONDS = 0.05


class Crowd:
    """Users who submit and read.

    Args:
        http: of a service key.
        bare: counts the tasks that have reached the GPU queue.
    """

    def __init__(self, http: httpx.AsyncClient, bare: Bare) -> None:
        self._http = http
        self._bare = bare
        self.submitted = 0

    async def submit(self, user: str) -> str:
        """Submit a new task; a full moment is waited out, as a client does."""
        body = {"prompt": f"a red circle moving right {uuid4().hex}"}
        while True:
            reply = await self._http.post("/tasks", json=body, headers={"X-User-Id": user})
            if reply.status_code == httpx.codes.ACCEPTED:
                self.submitted += 1
                return str(reply.json()["task_id"])
            assert reply.status_code == httpx.codes.SERVICE_UNAVAILABLE, reply.text
            await asyncio.sleep(0.2)

    async def fill(self, count: int, users: int) -> None:
        """Submit `count` tasks, spread over `users`, and wait until all of them wait for a GPU: a start leaves work."""
        await call_all(lambda number: self.submit(f"user-{number % users}"), count, at_once=CONCURRENCY)
        while await self._bare.queued() < self.submitted:
            await asyncio.sleep(0.2)

    async def probe(self) -> tuple[float, float]:
        """Median milliseconds of a submission and of reading the task, one at a time."""
        submitted, read = [], []
        for _ in range(ROUNDS):
            await asyncio.sleep(IDLE_SECONDS)
            began = time.perf_counter()
            task_id = await self.submit("prober")
            submitted.append(time.perf_counter() - began)
            await asyncio.sleep(IDLE_SECONDS)
            began = time.perf_counter()
            (await self._http.get(f"/tasks/{task_id}", headers={"X-User-Id": "prober"})).raise_for_status()
            read.append(time.perf_counter() - began)
        return median(submitted) * 1_000, median(read) * 1_000


@asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    """One API process and one control worker."""
    async with bench_site() as site:
        site.worker("control")
        process = site.api()
        await asyncio.to_thread(process.until_ready)
        async with http_client(f"{process.url}/api/v1", {"Authorization": f"Bearer {site.keys['service']}"}) as http:
            opened = Crowd(http, Bare(site.client))
            await opened.probe()
            yield opened


async def main() -> None:
    """Measure and print."""
    figures: dict[str, float] = {}
    async with crowd() as people:
        first = (0.0, 0.0)
        for size in BACKLOGS:
            await people.fill(max(size - people.submitted, 0), 10)
            now = await people.probe()
            first = first if any(first) else now
            figures[f"submit_ms_backlog_{size}"] = rounded(now[0])
            figures[f"read_ms_backlog_{size}"] = rounded(now[1])
        figures["submit_growth_backlog"] = rounded(now[0] / first[0])
        figures["read_growth_backlog"] = rounded(now[1] / first[1])
    async with crowd() as people:
        alone = 0.0
        for users in USERS:
            await people.fill(users, users)
            submitted, _ = await people.probe()
            alone = alone or submitted
            figures[f"submit_ms_users_{users}"] = rounded(submitted)
        figures["submit_growth_users"] = rounded(submitted / alone)
    report("growth", figures)


if __name__ == "__main__":
    asyncio.run(main())
