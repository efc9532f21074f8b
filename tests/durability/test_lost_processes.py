"""Processes die, hang and come back at the worst moment: no task is lost, none ends twice, a batch goes on.

The tests are in this order so that each finds the GPU workers that it needs; alone, each starts what is missing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
import pytest_asyncio

from activities.inference.health import DeviceState
from tests.durability.batches import SIZE, Posted
from tests.durability.site import Site, quick
from tests.receiver import Receiver
from tests.scale import SOAKING, scaled
from tests.workflows.jobs import status_of
from workflows.batches import BatchStatus
from workflows.failures import FailureCode
from workflows.states import ENDED, TaskStatus

pytestmark = [pytest.mark.durability, pytest.mark.timeout(240)]
F = FailureCode

LONG = 160
"""Steps of a task that is killed: two seconds, and it has run for less than half of one."""
OUTAGE_SECONDS = 2
KILLED_AT = min(20, SIZE - 5)
"""Items of a batch that are done when the first process dies; the next ones follow an item later each."""


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with Receiver() as receiver:
        opened = await Site.open(tmp_path_factory.mktemp("site"), receiver)
        try:
            yield opened
        finally:
            opened.close()


@pytest_asyncio.fixture(autouse=True)
async def whole(site: Site) -> None:
    """Every process but the GPU workers is up before each test."""
    for name in ("temporal", "control", "callback"):
        if not site.processes[name].alive:
            if name == "temporal":
                await site.start_server()
            else:
                site.start(name)


async def test_a_task_survives_its_control_worker(site: Site) -> None:
    site.gpu_workers(2)
    job = site.job(steps=LONG)
    await site.submit(job)
    await site.until_running(job)
    site.processes["control"].kill()
    site.start("control")
    record = await site.record(job)
    assert (record.status, record.attempt_count) == (TaskStatus.SUCCEEDED, 1)
    await site.check_one_ending(job, record)


async def test_tasks_survive_a_restart_of_the_server_mid_attempt_and_while_they_finish(site: Site) -> None:
    site.gpu_workers(2)
    going_on, finishing = site.job(steps=350), site.job(steps=90)
    for job in (going_on, finishing):
        await site.submit(job)
    await site.until_running(going_on, after=0)
    await site.until_running(finishing)
    assert not ENDED & {status_of(await site.describe(job)) for job in (going_on, finishing)}
    site.processes["temporal"].kill()
    await asyncio.sleep(OUTAGE_SECONDS)
    await site.start_server()
    for job in (going_on, finishing):
        record = await site.record(job)
        assert record.status is TaskStatus.SUCCEEDED
        await site.check_one_ending(job, record)


async def test_a_worker_that_wakes_after_the_retry_has_finished_changes_nothing(site: Site) -> None:
    site.gpu_workers(2)
    job = site.job(steps=LONG)
    await site.submit(job)
    sleeper = site.processes[await site.until_running(job)]
    (child,) = sleeper.children()
    sleeper.signal(signal.SIGSTOP)
    os.kill(child, signal.SIGSTOP)
    try:
        record = await site.record(job)
    finally:
        os.kill(child, signal.SIGCONT)
        sleeper.signal(signal.SIGCONT)
    assert [a.outcome for a in record.attempts] == [F.WORKER_LOST, None]
    async with asyncio.timeout(60):
        # The attempt that it woke in has ended, one way or another.
        while (await asyncio.to_thread(sleeper.device))["state"] == DeviceState.BUSY:
            await asyncio.sleep(0.1)
    await site.check_one_ending(job, record)
    assert (await site.record(job)) == record


async def test_a_hung_inference_process_is_killed_and_the_attempt_runs_again(site: Site) -> None:
    site.gpu_workers(2)
    job = site.job(steps=LONG, limits=quick(step_timeout_seconds=2))
    await site.submit(job)
    worker = site.processes[await site.until_running(job)]
    (child,) = worker.children()
    os.kill(child, signal.SIGSTOP)
    record = await site.record(job)
    assert [a.outcome for a in record.attempts] == [F.PHASE_TIMEOUT, None]
    assert child not in worker.children()
    await site.check_one_ending(job, record)


async def test_a_task_whose_gpu_worker_is_killed_runs_again_elsewhere(site: Site) -> None:
    site.gpu_workers(2)
    job = site.job(steps=LONG)
    await site.submit(job)
    first = await site.until_running(job)
    site.processes[first].kill()
    record = await site.record(job)
    assert record.status is TaskStatus.SUCCEEDED
    assert [a.outcome for a in record.attempts] == [F.WORKER_LOST, None]
    assert record.worker_id is not None
    assert not record.worker_id.startswith(first)
    await site.check_one_ending(job, record)


async def test_two_models_share_one_device_and_both_make_progress(site: Site) -> None:
    (alone,) = site.gpu_workers(1)
    jobs = [site.job(model=model, steps=20) for model in ("tiny-wan", "tiny-ltx") * 2]
    for job in jobs:
        await site.submit(job)
    records = [await site.record(job) for job in jobs]
    assert {r.status for r in records} == {TaskStatus.SUCCEEDED}
    assert {r.worker_id for r in records} == {f"{alone}/0"}


async def test_a_store_that_fails_is_tried_again_until_it_is_back(site: Site) -> None:
    site.gpu_workers(1)
    job = site.job(steps=20)
    store = site.folder / "store"
    store.rename(site.folder / "store.away")
    store.write_text("not a folder")
    try:
        await site.submit(job)
        async with asyncio.timeout(60):
            while F.STORAGE_UNAVAILABLE not in await site.failures(job):
                await asyncio.sleep(0.2)
    finally:
        store.unlink()
        (site.folder / "store.away").rename(store)
    record = await site.record(job)
    assert record.status is TaskStatus.SUCCEEDED
    assert record.attempts[0].outcome is F.STORAGE_UNAVAILABLE
    await site.check_one_ending(job, record)


async def test_a_batch_that_was_lost_for_good_is_resumed_by_posting_it_again(site: Site) -> None:
    site.gpu_workers(1)
    batch = await Posted.start(site)
    await batch.until_done(SIZE * 2 // 3)
    handle = (await site.client()).get_workflow_handle(batch.request.batch_id)
    await handle.terminate()
    before = await batch.record()
    assert before is not None
    done = before.states.count("S")
    resumed_at = datetime.now(UTC)
    again = await Posted.start(site, batch.plans, after=batch)
    assert (await again.end()).states == "S" * SIZE
    records = await batch.task_records()
    assert [task.attempt_count for task in records] == [1] * SIZE
    # What ran after the loss: the rest, and what was open in that moment.
    started = [task.started_at for task in records]
    later = sum(at is not None and at > resumed_at for at in started)
    assert SIZE - done - batch.request.parallelism - 1 <= later <= SIZE - done
    assert max(task.finished_at - resumed_at for task in records if task.finished_at) < timedelta(seconds=120)


async def test_a_batch_survives_every_process_and_posted_again_generates_nothing(site: Site) -> None:
    (gpu,) = site.gpu_workers(1)
    batch = await Posted.start(site)
    await batch.until_done(KILLED_AT)
    site.processes[gpu].kill()
    site.start(gpu)
    await batch.until_done(KILLED_AT + 1)
    site.processes["control"].kill()
    site.start("control")
    await batch.until_done(KILLED_AT + 2)
    site.processes["temporal"].kill()
    await asyncio.sleep(1)
    await site.start_server()

    record = await batch.end()
    assert (record.status, record.states) == (BatchStatus.COMPLETED, "S" * SIZE)
    records = await batch.task_records()
    # An item whose worker or whose server died has lost attempts; none has a second clip.
    assert [sum(a.outcome is None for a in task.attempts) for task in records] == [1] * SIZE
    assert [len(site.manifests(plan)) for plan in batch.plans] == [1] * SIZE
    assert sum(task.attempt_count for task in records) <= SIZE + 6
    async with asyncio.timeout(30):
        while not batch.bodies():
            await asyncio.sleep(0.1)
    assert [(body["type"], body["status"]) for body in batch.bodies()] == [("batch.completed", "COMPLETED")]

    again = await Posted.start(site, batch.plans, after=batch)
    repeated = await again.end()
    assert (repeated.states, repeated.gpu_seconds) == ("S" * SIZE, 0.0)
    assert await batch.task_records() == records
    assert [len(site.manifests(plan)) for plan in batch.plans] == [1] * SIZE


async def test_a_drained_worker_hands_its_task_back_for_free(site: Site) -> None:
    site.gpu_workers(1)
    # Twice as long as the drain's grace.
    job = site.job(steps=250)
    await site.submit(job)
    process = site.processes[await site.until_running(job)]
    process.signal(signal.SIGTERM)
    site.gpu_workers(2)
    assert await asyncio.to_thread(process.popen.wait, 40) == 0
    record = await site.record(job)
    assert [a.outcome for a in record.attempts] == [F.WORKER_SHUTDOWN, None]
    await site.check_one_ending(job, record)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_random_kills_lose_no_task_and_end_none_twice(site: Site) -> None:
    random = Random(7)
    workers = [*site.gpu_workers(2 if SOAKING else 1), "control", "callback"]
    jobs = [site.job(steps=random.choice([20, 60, 120])) for _ in range(max(6, scaled(20)))]
    for job in jobs:
        await site.submit(job)
    # Each dies at least once.
    more = scaled(10) - 1
    for name in random.sample(workers, len(workers)) + random.choices(workers, k=more):
        await asyncio.sleep(random.uniform(0.5, 2))
        site.processes[name].kill()
        site.start(name)
    records = [await site.record(job, timeout=600) for job in jobs]
    for job, record in zip(jobs, records, strict=True):
        assert record.status in ENDED
        await site.check_one_ending(job, record)
    assert {r.status for r in records} == {TaskStatus.SUCCEEDED}
