"""Processes die, hang and come back at the worst moment: no task is lost, none ends twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from tests.durability.site import Site, quick
from tests.receiver import Receiver
from tests.scale import scaled
from workflows.failures import FailureCode
from workflows.states import ENDED, TaskStatus

pytestmark = [pytest.mark.durability, pytest.mark.timeout(240)]
F = FailureCode


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
    """Every process is up before each test."""
    for name, process in list(site.processes.items()):
        if process.popen.poll() is not None:
            if name == "temporal":
                await site.start_server()
            else:
                site.start(name)


async def test_a_task_whose_gpu_worker_is_killed_runs_again_elsewhere(site: Site) -> None:
    job = site.job(steps=250)
    await site.submit(job)
    first = await site.until_running(job)
    site.processes[first].kill()
    record = await site.record(job)
    assert record.status is TaskStatus.SUCCEEDED
    assert [a.outcome for a in record.attempts] == [F.WORKER_LOST, None]
    assert record.worker_id is not None
    assert not record.worker_id.startswith(first)
    await site.check_one_ending(job, record)


async def test_a_task_survives_its_control_worker(site: Site) -> None:
    job = site.job(steps=250)
    await site.submit(job)
    await site.until_running(job)
    site.processes["control"].kill()
    site.start("control")
    record = await site.record(job)
    assert (record.status, record.attempt_count) == (TaskStatus.SUCCEEDED, 1)
    await site.check_one_ending(job, record)


@pytest.mark.parametrize(("steps", "after"), [(400, 0.7), (120, 1.2)], ids=["mid-attempt", "while-it-finishes"])
async def test_a_task_survives_a_restart_of_the_server(site: Site, steps: int, after: float) -> None:
    job = site.job(steps=steps)
    await site.submit(job)
    await site.until_running(job, after=after)
    site.processes["temporal"].kill()
    await asyncio.sleep(3)
    await site.start_server()
    record = await site.record(job)
    assert record.status is TaskStatus.SUCCEEDED
    await site.check_one_ending(job, record)


async def test_a_hung_inference_process_is_killed_and_the_attempt_runs_again(site: Site) -> None:
    job = site.job(steps=250, limits=quick(step_timeout_seconds=2))
    await site.submit(job)
    worker = site.processes[await site.until_running(job)]
    (child,) = worker.children()
    os.kill(child, signal.SIGSTOP)
    record = await site.record(job)
    assert [a.outcome for a in record.attempts] == [F.PHASE_TIMEOUT, None]
    assert child not in worker.children()
    await site.check_one_ending(job, record)


async def test_a_worker_that_wakes_after_the_retry_has_finished_changes_nothing(site: Site) -> None:
    job = site.job(steps=250)
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
    # Time enough for the woken attempt to end its clip, were it not stopped.
    await asyncio.sleep(4)
    await site.check_one_ending(job, record)
    assert (await site.record(job)) == record


async def test_a_store_that_fails_is_tried_again_until_it_is_back(site: Site) -> None:
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


async def test_two_models_share_one_device_and_both_make_progress(site: Site) -> None:
    site.processes["gpu-b"].kill()
    jobs = [site.job(model=model, steps=20) for model in ("tiny-wan", "tiny-ltx") * 2]
    for job in jobs:
        await site.submit(job)
    records = [await site.record(job) for job in jobs]
    assert {r.status for r in records} == {TaskStatus.SUCCEEDED}
    assert {r.worker_id for r in records} == {"gpu-a/0"}


async def test_a_drained_worker_hands_its_task_back_for_free(site: Site) -> None:
    job = site.job(steps=800)
    await site.submit(job)
    first = await site.until_running(job)
    process = site.processes[first]
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.popen.wait, 40) == 0
    record = await site.record(job)
    assert [a.outcome for a in record.attempts] == [F.WORKER_SHUTDOWN, None]
    await site.check_one_ending(job, record)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_random_kills_lose_no_task_and_end_none_twice(site: Site) -> None:
    random = Random(7)
    jobs = [site.job(steps=random.choice([20, 60, 120])) for _ in range(max(6, scaled(20)))]
    for job in jobs:
        await site.submit(job)
    for _ in range(max(3, scaled(10))):
        await asyncio.sleep(random.uniform(1, 3))
        name = random.choice(["gpu-a", "gpu-b", "control", "callback"])
        site.processes[name].kill()
        site.start(name)
    records = [await site.record(job, timeout=600) for job in jobs]
    for job, record in zip(jobs, records, strict=True):
        assert record.status in ENDED
        await site.check_one_ending(job, record)
    assert {r.status for r in records} == {TaskStatus.SUCCEEDED}
