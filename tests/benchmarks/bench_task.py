"""One warm task of the default model, from the request to the delivered callback, over HTTP on an idle machine.

The floor is the busy time of the inference process for the same task: the rest is what the gateway adds.
`python -m tests.benchmarks.bench_task` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

import httpx

from api.cli_client import Access
from tests.cli.stack import Dev
from tests.receiver import Receiver

ROUNDS = 9
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "cyan", "white", "red", "green")


async def one(http: httpx.AsyncClient, receiver: Receiver, number: int) -> tuple[float, float, float]:
    """Seconds from the request to the callback, GPU seconds, and seconds from the terminal state to the callback."""
    seen = len(receiver.requests)
    begun = time.time()
    body = {"prompt": f"a {COLOURS[number]} circle moving right", "seed": number, "callback_url": receiver.url}
    accepted = await http.post("/api/v1/tasks", json=body, headers={"Idempotency-Key": f"bench-{number}"})
    accepted.raise_for_status()
    await receiver.wait_for(seen + 1, timeout=60)
    received = time.time()
    task = (await http.get(f"/api/v1/tasks/{accepted.json()['task_id']}")).json()
    assert task["status"] == "SUCCEEDED", task
    finished = datetime.fromisoformat(task["finished_at"]).timestamp()
    return received - begun, task["gpu_seconds"], received - finished


async def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="reelgate-bench-") as folder:
        dev = Dev(Path(folder))
        await asyncio.to_thread(dev.start)
        try:
            access = Access.find(dev.environment)
            headers = {"Authorization": f"Bearer {access.api_key}"}
            async with Receiver() as receiver, httpx.AsyncClient(base_url=access.url, headers=headers) as http:
                await one(http, receiver, 0)  # loads the model
                await asyncio.sleep(3)
                rounds = [await one(http, receiver, number) for number in range(1, ROUNDS + 1)]
        finally:
            await asyncio.to_thread(dev.stop)
    total, gpu, callback = (statistics.median(values) for values in zip(*rounds, strict=True))
    figures = {
        "request_to_callback_seconds": total,
        "gpu_seconds": gpu,
        "gateway_seconds": statistics.median(t - g for t, g, _ in rounds),
        "terminal_state_to_callback_seconds": callback,
    }
    for name, value in figures.items():
        print(f"{name:<48}{value:8.3f}")  # noqa: T201
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
