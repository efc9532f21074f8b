"""The callback sender against a plain httpx client, and one endpoint in the company of a dead one.

Sender: `CallbackSender` (guard, signature, bounded reply) and a plain `httpx.AsyncClient` with the same pool post the
same body to the same receiver, in alternating rounds; the receiver is a process of its own that does next to nothing.
Merging: deliveries that meet in one window, counted in requests.
Company: delivery time of a healthy endpoint alone, and while many tasks wait for an endpoint that never answers, with
the callback worker and the control worker as they ship.

`python -m tests.benchmarks.bench_callbacks` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.queues import Queue

import httpx
from temporalio.client import Client

from activities.callback_body import callback_body
from activities.callback_sender import CallbackSender
from activities.dns_cache import DnsCache, SystemResolver
from activities.egress_policy import EgressPolicy
from activities.http_guard import GuardedClient
from tests.activities.couriers import LINKS, SECRET, Tenants, courier, event
from tests.benchmarks.site import Site, bench_site, call_all, median, report, rounded
from tests.receiver import Receiver, hang
from workers.keys import EndpointSettings
from workflows import naming
from workflows.callback import CallbackWorkflow
from workflows.tasks import CallbackInput

REQUESTS, CONCURRENCY, ROUNDS = 2_000, 50, 5
SENDER_TARGET = 0.8
MERGED, MERGE_SIZE = 1_000, 100
DEAD_TASKS, HEALTHY_TASKS = 1_000, 100
COMPANY_TARGET = 2.0
_REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class _Responder(asyncio.Protocol):
    """Answers each whole request with the same bytes."""

    def __init__(self) -> None:
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, piece: bytes) -> None:
        self._seen += piece
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            names = (line.split(b":", 1) for line in self._seen[:end].lower().split(b"\r\n")[1:])
            length = next((int(value) for name, value in names if name == b"content-length"), 0)
            if len(self._seen) < end + 4 + length:
                return
            self._seen = self._seen[end + 4 + length :]
            self._transport.write(_REPLY)


def _respond(port: Queue[int]) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Responder, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def responder() -> Iterator[str]:
    """A receiver in a process of its own; yields its URL."""
    context = multiprocessing.get_context("spawn")
    port: Queue[int] = context.Queue()
    process = context.Process(target=_respond, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=60)}/callbacks"
    finally:
        process.kill()
        process.join()


async def per_second(send: Callable[[int], Awaitable[None]]) -> float:
    """Requests per second at `CONCURRENCY`."""
    began = time.perf_counter()
    await call_all(send, REQUESTS, at_once=CONCURRENCY)
    return REQUESTS / (time.perf_counter() - began)


async def sender() -> dict[str, float]:
    """The sender and the plain client, in alternating rounds."""
    body = callback_body(event(), LINKS)
    client = GuardedClient(EgressPolicy.allowing("127.0.0.0/8"), DnsCache(SystemResolver()))
    ours = CallbackSender(client)
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=50)
    with responder() as address:
        url = client.policy.check_url(address)
        async with httpx.AsyncClient(limits=limits, timeout=10) as plain:

            async def send(number: int) -> None:
                answer = await ours.send(url, f"t{number}", body, [SECRET])
                assert answer.status_code == 200, answer

            async def post(number: int) -> None:
                headers = {"content-type": "application/json", "webhook-id": f"t{number}"}
                (await plain.post(address, content=body.encode(), headers=headers)).raise_for_status()

            await per_second(send)
            await per_second(post)
            rounds = [(await per_second(send), await per_second(post)) for _ in range(ROUNDS)]
    await client.aclose()
    return {
        "sender_requests_per_second": median(sent for sent, _ in rounds),
        "httpx_requests_per_second": median(posted for _, posted in rounds),
        "sender_ratio": median(sent / posted for sent, posted in rounds),
        "sender_ratio_target": SENDER_TARGET,
    }


async def merging() -> dict[str, float]:
    """Requests that deliveries of one window leave in."""
    async with Receiver() as receiver:
        merged = EndpointSettings(merge_window_ms=2_000, merge_max_tasks=MERGE_SIZE)
        async with courier(tenants=Tenants(endpoints={receiver.url: merged})) as delivery:
            await delivery.deliver_all(receiver.url, MERGED)
        return {
            "merged_deliveries": float(MERGED),
            "merged_requests": float(len(receiver.requests)),
            "merged_requests_target": float(math.ceil(MERGED / MERGE_SIZE) + 1),
        }


async def deliver(client: Client, url: str, number: int) -> float:
    """Seconds from the start of one callback workflow to its delivery."""
    task_id = f"task-{number}"
    given = CallbackInput(
        task_id=task_id, tenant="acme", url=url, webhook_id=task_id, event=event(task_id), schedule_seconds=(0.0, 60.0)
    )
    began = datetime.now(UTC)
    record = await client.execute_workflow(
        CallbackWorkflow.run, given, id=naming.callback_id(task_id), task_queue=naming.CALLBACK_QUEUE
    )
    last = record.attempts[-1]
    return (last.started_at - began).total_seconds() + last.duration_ms / 1_000


async def company(site: Site) -> dict[str, float]:
    """p95 of a healthy endpoint, alone and beside a dead one."""
    client = site.client
    numbers = iter(range(1_000_000))
    async with Receiver() as healthy, Receiver() as dead:
        dead.default = hang()

        async def p95() -> float:
            seconds = []
            for _ in range(HEALTHY_TASKS):
                seconds.append(await deliver(client, healthy.url, next(numbers)))
                await asyncio.sleep(0.05)
            return statistics.quantiles(seconds, n=20)[-1]

        for _ in range(10):
            await deliver(client, healthy.url, next(numbers))
        alone = await p95()
        waiting = [asyncio.create_task(deliver(client, dead.url, next(numbers))) for _ in range(DEAD_TASKS)]
        while dead.in_flight == 0:
            await asyncio.sleep(0.05)
        # Until the first rush is over: each of them has started, and is told when to come again.
        await asyncio.sleep(30)
        beside = await p95()
        for delivery in waiting:
            delivery.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return {
            "healthy_alone_p95_ms": rounded(alone * 1_000),
            "healthy_beside_dead_p95_ms": rounded(beside * 1_000),
            "healthy_beside_dead_ratio": rounded(beside / alone),
            "healthy_beside_dead_ratio_target": COMPANY_TARGET,
            "dead_endpoint_max_requests_at_a_time": float(dead.max_in_flight),
        }


async def main() -> None:
    """Measure and print."""
    figures = {**await sender(), **await merging()}
    async with bench_site() as site:
        for kind in ("control", "callback"):
            site.worker(kind)
        figures |= await company(site)
    report("callbacks", figures)


if __name__ == "__main__":
    asyncio.run(main())
