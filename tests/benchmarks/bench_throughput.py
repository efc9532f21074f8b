"""A task that costs no GPU time, through to its delivered callback, against a bare workflow of two activities.

Both run with the same SDK on the same server, in alternating rounds, so many at a time that the machine is the limit.
Product: control worker and callback worker as they ship, a GPU worker whose clips cost nothing, a real receiver.
Floor: one worker for the workflow and its two empty activities. Tasks are started by the code behind the API.

Besides: what one task costs the server, in billable actions (its own counter), events and bytes of history.
`python -m tests.benchmarks.bench_throughput` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

import httpx
from temporalio.client import Client

from tests.api.stand import http_client
from tests.benchmarks.floor import BARE_QUEUE, BareWorkflow
from tests.benchmarks.floor_workers import FAILS_ONCE
from tests.benchmarks.site import Site, bench_site, call_all, median, report, rounded
from tests.receiver import Receiver
from tests.workflows.jobs import plan, start_job
from workflows import naming
from workflows.tasks import CallbackTarget, GenerationInput, Limits, User

TASKS = 150
CONCURRENCY = 30
ROUNDS = 5
THROUGHPUT_TARGET = 0.5
CALLBACK_TARGET_MS = 60.0
ACTIONS_TARGET = 14.0
IDLE_ROUNDS = 30
SAMPLE = 10
WARM_USER = "warm"
IDLE_SECONDS = 0.3


def job(receiver: Receiver) -> GenerationInput:
    """A task whose callback goes to the receiver."""
    limits = Limits(queue_timeout_seconds=600, deadline_seconds=1_200)
    return plan(pool="default", limits=limits, callback=CallbackTarget(url=receiver.url))


async def task(client: Client, receiver: Receiver) -> GenerationInput:
    """One task, until it has ended; its callback is on its way."""
    request = job(receiver)
    await (await start_job(client, request)).result()
    return request


async def bare(client: Client) -> None:
    """One workflow of the floor."""
    await client.execute_workflow(BareWorkflow.run, "x" * 100, id=f"bare-{uuid4().hex}", task_queue=BARE_QUEUE)


async def per_second(call: Callable[[], Awaitable[object]], finished: Callable[[], Awaitable[object]]) -> float:
    """Calls per second at `CONCURRENCY`, until `finished`."""
    began = time.perf_counter()
    await call_all(lambda _: call(), TASKS, at_once=CONCURRENCY)
    await finished()
    return TASKS / (time.perf_counter() - began)


async def terminal_to_callback(client: Client, receiver: Receiver) -> float:
    """Milliseconds from the terminal state of a task to its callback, on an idle machine."""
    await asyncio.sleep(IDLE_SECONDS)
    seen = len(receiver.requests)
    request = job(receiver)
    handle = await start_job(client, request)
    await receiver.wait_for(seen + 1, timeout=60)
    received = time.time()
    record = await handle.result()
    assert record.finished_at is not None
    return (received - record.finished_at.timestamp()) * 1_000


async def bare_milliseconds(client: Client) -> float:
    """One workflow of the floor, on an idle machine."""
    await asyncio.sleep(IDLE_SECONDS)
    began = time.perf_counter()
    await bare(client)
    return (time.perf_counter() - began) * 1_000


async def cost(site: Site, http: httpx.AsyncClient, body: Mapping[str, str]) -> dict[str, float]:
    """What a task of a warm user costs the server from the request on, its admission and callback included."""
    client = site.client
    admission = client.get_workflow_handle(naming.admission_id(User(tenant="acme", end_user=WARM_USER)))
    admitted = (await admission.describe()).history_length
    before = await site.server_counter("action")
    runs = []
    for _ in range(SAMPLE):
        headers = {"X-User-Id": WARM_USER, "Idempotency-Key": uuid4().hex}
        reply = await http.post("/tasks", json=body, headers=headers)
        reply.raise_for_status()
        task_id = reply.json()["task_id"]
        names = [task_id, naming.callback_id(task_id)] if "callback_url" in body else [task_id]
        for handle in map(client.get_workflow_handle, names):
            await handle.result()
            runs.append(await handle.describe())
    await asyncio.sleep(1)
    actions = await site.server_counter("action") - before
    events = sum(run.history_length for run in runs)
    size = sum(run.raw_description.workflow_execution_info.history_size_bytes for run in runs)
    return {
        "billable_actions": rounded(actions / SAMPLE),
        "events": rounded(events / SAMPLE),
        "history_bytes": rounded(size / SAMPLE),
        "admission_events": rounded(((await admission.describe()).history_length - admitted) / SAMPLE),
    }


async def costs(site: Site, http: httpx.AsyncClient, receiver: Receiver) -> dict[str, float]:
    """By kind of task."""
    plain = {"prompt": "a red circle moving right", "callback_url": receiver.url}
    bodies = {
        "plain": plain,
        "without_callback": {"prompt": plain["prompt"]},
        "second_attempt": {**plain, "prompt": FAILS_ONCE},
    }
    await cost(site, http, plain)
    found = {kind: await cost(site, http, body) for kind, body in bodies.items()}
    return {f"{kind}_{name}": value for kind, values in found.items() for name, value in values.items()}


async def main() -> None:
    """Measure and print."""
    async with Receiver() as receiver, bench_site() as site:
        for kind in ("control", "callback"):
            site.worker(kind)
        for kind in ("gpu", "bare"):
            site.worker(kind, floor=True)
        process, client = site.api(), site.client
        await asyncio.to_thread(process.until_ready)

        async def settled() -> None:
            await receiver.wait_for(seen + TASKS, timeout=120)

        async def at_once() -> None: ...

        await asyncio.gather(*(task(client, receiver) for _ in range(20)), *(bare(client) for _ in range(20)))
        await asyncio.sleep(3)
        idle = [
            (await terminal_to_callback(client, receiver), await bare_milliseconds(client)) for _ in range(IDLE_ROUNDS)
        ]
        async with http_client(f"{process.url}/api/v1", {"Authorization": f"Bearer {site.keys['service']}"}) as http:
            (await http.post("/tasks", json={"prompt": "x"}, headers={"X-User-Id": WARM_USER})).raise_for_status()
            spent = await costs(site, http, receiver)
        rounds = []
        for _ in range(ROUNDS):
            seen = len(receiver.requests)
            ours = await per_second(lambda: task(client, receiver), settled)
            theirs = await per_second(lambda: bare(client), at_once)
            rounds.append((ours, theirs))
    report(
        "throughput",
        {
            "tasks_per_second": median(ours for ours, _ in rounds),
            "bare_workflows_per_second": median(theirs for _, theirs in rounds),
            "throughput_ratio": median(ours / theirs for ours, theirs in rounds),
            "throughput_ratio_target": THROUGHPUT_TARGET,
            "terminal_to_callback_p50_ms": median(callback for callback, _ in idle),
            "terminal_to_callback_target_ms": CALLBACK_TARGET_MS,
            "bare_workflow_idle_p50_ms": median(floor for _, floor in idle),
            **spent,
            "plain_billable_actions_target": ACTIONS_TARGET,
        },
    )


if __name__ == "__main__":
    asyncio.run(main())
