"""A new version of a GPU pool's workers in real processes: a good one is promoted, a bad one goes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from api.deployments import VersionState
from api.rollouts import Rollouts
from tests.durability.releases import deploy, releases, start_version, until_known
from tests.durability.site import PATIENT, Site, quick
from tests.receiver import Receiver
from tests.scale import soak_only
from workflows.failures import FailureCode
from workflows.rollouts import RolloutPhase, RolloutRecord
from workflows.states import TaskStatus
from workflows.tasks import GenerationInput, Limits

pytestmark = [pytest.mark.durability, pytest.mark.timeout(240)]

QUICKLY = ("--percent", "50", "--look-seconds", "0.5", "--leave-out-seconds", "0.5", "--overdue-seconds", "60")


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Control and callback workers as always, and a GPU worker of version 1."""
    async with Receiver() as receiver:
        opened = await Site.open(tmp_path_factory.mktemp("site"), receiver, workers=("control", "callback"))
        try:
            start_version(opened, "gpu-one", "1")
            yield opened
        finally:
            opened.close()


@asynccontextmanager
async def traffic(site: Site, limits: Limits) -> AsyncIterator[list[GenerationInput]]:
    """Short tasks, a few at a time, for as long as this is open."""
    jobs: list[GenerationInput] = []
    places = asyncio.Semaphore(4)

    async def one(job: GenerationInput) -> None:
        try:
            await site.record(job)
        finally:
            places.release()

    async def submit() -> None:
        async with asyncio.TaskGroup() as open_jobs:
            while True:
                await places.acquire()
                job = site.job(steps=2, limits=limits)
                await site.submit(job)
                jobs.append(job)
                open_jobs.create_task(one(job))

    submitting = asyncio.create_task(submit())
    try:
        yield jobs
    finally:
        submitting.cancel()
        await asyncio.wait({submitting})


async def offered(site: Site, build_id: str) -> None:
    """Version 1 is current, and workers of another one have polled."""
    await until_known(site, "gpu-default", "1", build_id)
    await (await releases(site)).make_current("gpu-default", "1")


async def until_over(site: Site) -> RolloutRecord:
    """The rollout's record when it is over."""
    reading = await Rollouts(await site.client()).until_ended("default", limit=timedelta(seconds=150))
    assert not reading.open
    assert reading.record is not None
    return reading.record


async def versions(site: Site) -> Sequence[VersionState]:
    """The versions of the pool, as an operator sees them."""
    return (await (await releases(site)).state("gpu-default")).versions


def broken_models(site: Site, folder: Path) -> str:
    """A models file that offers the model under its name and revision, with weights that are cut short."""
    revision = site.job().model_revision
    weights = folder / "tiny-wan"
    weights.mkdir()
    (weights / "model_index.json").write_text("{")
    file = folder / "models.toml"
    file.write_text(
        f'builtin = []\ndefault = "tiny-wan"\n[[models]]\nfamily = "wan"\nname = "tiny-wan"\n'
        f'path = "{weights}"\nrevision = "{revision}"\n'
    )
    return str(file)


async def test_a_version_that_fails_is_rolled_back_and_no_task_in_flight_is_harmed(site: Site, tmp_path: Path) -> None:
    start_version(
        site, "gpu-bad", "2-bad", REELGATE_MODELS_FILE=broken_models(site, tmp_path), REELGATE_EXTRA_MODELS=""
    )
    await offered(site, "2-bad")
    in_flight = [site.job(steps=50, limits=quick(max_attempts=50)) for _ in range(4)]
    for job in in_flight:
        await site.submit(job)
    said = await deploy(site, "rollout", "start", "default", "2-bad", *QUICKLY)
    assert "2-bad against 1 in pool default: OBSERVING" in said
    async with traffic(site, quick(max_attempts=1)):
        record = await until_over(site)
    assert record.phase is RolloutPhase.ROLLED_BACK
    comparison = record.decisions[-1].comparison
    assert comparison is not None
    assert comparison.reason == "significantly worse: error rate"
    assert comparison.canary_failed == comparison.canary_tasks > 0
    assert comparison.current_failed == 0
    assert {v.build_id: v.percentage for v in await versions(site)} == {"1": 100.0, "2-bad": 0.0}
    for job in in_flight:
        ended = await site.record(job)
        assert ended.status is TaskStatus.SUCCEEDED
        assert ended.attempts[-1].worker_version == "1"
        assert {a.outcome for a in ended.attempts} <= {None, FailureCode.MODEL_NOT_LOADABLE}
        await site.check_one_ending(job, ended)
    # What comes now goes to version 1 alone.
    after = [site.job(steps=2) for _ in range(6)]
    for job in after:
        await site.submit(job)
    assert {(await site.record(job)).attempts[0].worker_version for job in after} == {"1"}
    site.processes["gpu-bad"].kill()


@soak_only
@pytest.mark.soak
async def test_a_version_that_is_as_good_is_promoted(site: Site) -> None:
    start_version(site, "gpu-good", "3")
    await offered(site, "3")
    await deploy(
        *(site, "rollout", "start", "default", "3", *QUICKLY, "--observe-hours", "0.0005", "--extensions", "1000"),
        *("--min-tasks", "8", "--max-delay-percent", "10000"),
    )
    async with traffic(site, PATIENT) as jobs:
        record = await until_over(site)
    assert record.phase is RolloutPhase.PROMOTED
    comparison = record.decisions[-1].comparison
    assert comparison is not None
    assert comparison.canary_tasks >= 8
    assert comparison.canary_failed == comparison.current_failed == 0
    assert next(v for v in await versions(site) if v.build_id == "3").role == "current"
    records = [await site.record(job) for job in jobs]
    assert {r.status for r in records} == {TaskStatus.SUCCEEDED}
    assert {r.attempts[-1].worker_version for r in records} == {"1", "3"}
