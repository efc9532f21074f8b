"""How fast a GPU is free again, and how little it idles: real processes, tiny random-weight models on the CPU.

`python -m tests.benchmarks.bench_attempts` prints a table and, as its last line, the same as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tests.durability.site import PATIENT, Site, quick
from tests.receiver import Receiver
from workflows.tasks import TaskRecord

ROUNDS = 3
QUEUED = 10


def now() -> datetime:
    """The clock that the workers stamp their attempts with."""
    return datetime.now(UTC)


def started(record: TaskRecord, attempt: int) -> datetime:
    """When an attempt began on its worker."""
    at = record.attempts[attempt].started_at
    assert at is not None
    return at


async def step_seconds(site: Site) -> float:
    """One denoising step, from a run of 200."""
    job = site.job(steps=200)
    await site.submit(job)
    return (await site.record(job)).gpu_seconds / 200


async def hard_cancel(site: Site) -> float:
    """From the cancel to the start of the next task on the same device."""
    running, waiting = site.job(steps=1_000), site.job(steps=5)
    await site.submit(running)
    await site.until_running(running)
    await site.submit(waiting)
    await asyncio.sleep(0.3)
    canceled_at = now()
    await (await site.client()).get_workflow_handle(running.task_id).cancel()
    await site.record(running)
    return (started(await site.record(waiting), 0) - canceled_at).total_seconds()


async def hang(site: Site) -> float:
    """From the hang of the inference process to the end of its attempt."""
    job = site.job(steps=400, limits=quick(step_timeout_seconds=2))
    await site.submit(job)
    worker = site.processes[await site.until_running(job)]
    (child,) = worker.children()
    stopped_at = now()
    os.kill(child, signal.SIGSTOP)
    record = await site.record(job)
    return (record.attempts[0].ended_at - stopped_at).total_seconds()


async def lost_worker(site: Site) -> float:
    """From SIGKILL of the worker to the start of the next attempt on the other one."""
    job = site.job(steps=300)
    await site.submit(job)
    name = await site.until_running(job)
    killed_at = now()
    site.processes[name].kill()
    record = await site.record(job)
    site.start(name)
    await asyncio.sleep(12)
    return (started(record, 1) - killed_at).total_seconds()


async def idle_share(site: Site) -> float:
    """Time in which the device did nothing while tasks waited, as a share of the time between their starts."""
    jobs = [site.job(steps=200) for _ in range(QUEUED)]
    for job in jobs:
        await site.submit(job)
    records = sorted([await site.record(job) for job in jobs], key=lambda r: started(r, 0))
    total = (started(records[-1], 0) - started(records[0], 0)).total_seconds()
    return 1 - sum(r.gpu_seconds for r in records[:-1]) / total


async def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="reelgate-bench-") as folder:
        async with Receiver() as receiver:
            site = await Site.open(Path(folder), receiver)
            try:
                warm = site.job(steps=20)
                await site.submit(warm)
                await site.record(warm)
                await asyncio.sleep(10)
                lost = [await lost_worker(site) for _ in range(ROUNDS)]
                site.processes["gpu-b"].kill()
                step = await step_seconds(site)
                cancels = [await hard_cancel(site) for _ in range(ROUNDS)]
                idle = await idle_share(site)
                hangs = [await hang(site) for _ in range(ROUNDS)]
            finally:
                site.close()
    figures = {
        "step_seconds": (step, None),
        "hard_cancel_to_gpu_free_seconds": (statistics.median(cancels), step + 2),
        "hang_to_killed_seconds": (statistics.median(hangs), 2 + PATIENT.kill_grace_seconds + 2),
        "worker_killed_to_running_elsewhere_seconds": (
            statistics.median(lost),
            PATIENT.heartbeat_timeout_seconds + 2,
        ),
        "gpu_idle_between_queued_tasks_share": (idle, 0.02),
    }
    for name, (value, target) in figures.items():
        print(f"{name:<48}{value:8.3f}" + (f"   target <= {target:.3f}" if target is not None else ""))  # noqa: T201
    print(json.dumps({name: round(value, 4) for name, (value, _) in figures.items()}))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
