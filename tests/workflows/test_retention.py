"""Retention sweeps over real stores, started by a real schedule."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.client import (
    Client,
    ScheduleActionExecutionStartWorkflow,
    ScheduleOverlapPolicy,
    WorkflowExecutionStatus,
    WorkflowHandle,
)
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.artifacts import ArtifactRepository
from activities.retention import Retention, ensure_retention_schedule
from activities.storage import ObjectStore
from activities.video import EncodedClip
from tests.object_stores import serving_s3
from workflows.failures import FailureCode
from workflows.naming import attempt_prefix
from workflows.retention import RetentionSweep, RetentionWorkflow
from workflows.tasks import GenerateClipInput, GenerationParameters, Limits, RemoveExpiredInput, RetentionArea

RETENTION = timedelta(days=7)
OLD = timedelta(days=8)
YOUNG = timedelta(days=6)


@dataclass
class Planted:
    """A folder with objects of every age, and what must be left of it."""

    folder: Path
    due: list[str]
    kept: list[str]

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def age(self, key: str, age: timedelta) -> None:
        """Make an object, or the objects of a folder, as old as this."""
        path = self.folder / key
        for file in path.iterdir() if path.is_dir() else [path]:
            os.utime(file, (time.time() - age.total_seconds(),) * 2)


def files_of_a_clip(folder: Path) -> EncodedClip:
    folder.mkdir(exist_ok=True)
    video, poster = folder / "video.mp4", folder / "poster.webp"
    video.write_bytes(b"video")
    poster.write_bytes(b"poster")
    return EncodedClip(video=video, poster=poster, width=2, height=2, num_frames=1, fps=8)


async def publish(store: ObjectStore, folder: Path, key: str, *, token: str, expires_in: timedelta) -> list[str]:
    parameters = GenerationParameters(
        model="m", prompt="p", width=2, height=2, num_frames=1, fps=8, num_inference_steps=1, guidance_scale=1, seed=1
    )
    attempt = GenerateClipInput(
        task_id="t",
        token=token,
        attempt=1,
        parameters=parameters,
        model_revision="r",
        artifact_key=key,
        limits=Limits(),
    )

    async def yes() -> bool:
        return True

    await ArtifactRepository(store, retention=expires_in).publish(files_of_a_clip(folder), attempt, may_publish=yes)
    return [f"{attempt_prefix(key, token)}/{name}" for name in ("manifest.json", "poster.webp", "video.mp4")]


async def plant(folder: Path, scratch: Path) -> Planted:
    """Fill a folder as workers and API would have over time."""
    planted = Planted(folder, due=[], kept=[])
    store = ObjectStore.from_url(folder.as_uri())

    async def put(key: str, age: timedelta, *, due: bool) -> None:
        await store.put(key, b"1", content_type="x/y")
        planted.age(key, age)
        (planted.due if due else planted.kept).append(key)

    for number in range(12):
        key = f"{number:064x}"
        planted.due += await publish(store, scratch, key, token="expired", expires_in=timedelta(seconds=-1))
        # A manifest's word counts, not the age of its files: this one was promised for longer.
        planted.kept += await publish(store, scratch, key, token="live", expires_in=timedelta(hours=1))
        planted.age(attempt_prefix(key, "live"), OLD)
        await put(f"{attempt_prefix(key, 'lost')}/video.mp4", OLD, due=True)
        await put(f"{attempt_prefix(key, 'running')}/video.mp4", YOUNG, due=False)
        await put(f"inputs/{number:032x}/{'e' * 64}", OLD, due=True)
        await put(f"inputs/{number:032x}/{'f' * 64}", YOUNG, due=False)
    for age, due in ((OLD, True), (YOUNG, False)):
        await put(f"{attempt_prefix('b' * 64, f'broken-{due}')}/manifest.json", age, due=due)
    # One old and one young file: the attempt is not as old as its first file.
    await put(f"{attempt_prefix('c' * 64, 'slow')}/poster.webp", OLD, due=False)
    await put(f"{attempt_prefix('c' * 64, 'slow')}/video.mp4", YOUNG, due=False)
    await put("elsewhere/old", OLD, due=False)
    assert planted.files() == sorted(planted.due + planted.kept)
    return planted


@pytest.fixture
async def planted(tmp_path: Path) -> Planted:
    return await plant(tmp_path / "store", tmp_path / "scratch")


@pytest.fixture
def store(planted: Planted) -> ObjectStore:
    return ObjectStore.from_url(planted.folder.as_uri())


@asynccontextmanager
async def control_workers(
    client: Client, store: ObjectStore, *, count: int = 1, batch_objects: int = 2_000
) -> AsyncIterator[str]:
    """Run control workers; yields their task queue."""
    task_queue = f"control-{uuid4().hex}"
    async with AsyncExitStack() as stack:
        for number in range(count):
            retention = Retention(store, retention=RETENTION, batch_objects=batch_objects)
            # Two workers of one process on one queue need a connection each, as separate processes have.
            connection = await Client.connect(client.service_client.config.target_host, namespace=client.namespace)
            await stack.enter_async_context(
                Worker(
                    connection,
                    task_queue=task_queue,
                    identity=f"control-{number}",
                    workflows=[RetentionWorkflow],
                    activities=[retention.remove_expired],
                )
            )
        yield task_queue


async def sweep(
    client: Client, task_queue: str, start: RetentionSweep
) -> WorkflowHandle[RetentionWorkflow, RetentionSweep]:
    return await client.start_workflow(
        RetentionWorkflow.run, start, id=f"retention-{uuid4().hex}", task_queue=task_queue
    )


class TestSweep:
    @pytest.mark.parametrize("batch_objects", [3, 11, 2_000])
    async def test_it_removes_exactly_what_is_due_and_a_second_one_nothing(
        self, client: Client, planted: Planted, store: ObjectStore, batch_objects: int
    ) -> None:
        async with control_workers(client, store, batch_objects=batch_objects) as task_queue:
            first = await (await sweep(client, task_queue, RetentionSweep())).result()
            assert planted.files() == sorted(planted.kept)
            second = await (await sweep(client, task_queue, RetentionSweep())).result()
        assert planted.files() == sorted(planted.kept)
        in_areas = len(planted.due) + len(planted.kept) - 1
        assert (first.examined, first.removed) == (in_areas, len(planted.due))
        assert (second.examined, second.removed) == (in_areas - len(planted.due), 0)

    async def test_a_long_one_continues_as_new_and_still_covers_everything(
        self, client: Client, planted: Planted, store: ObjectStore
    ) -> None:
        async with control_workers(client, store, batch_objects=11) as task_queue:
            handle = await sweep(client, task_queue, RetentionSweep(batches_per_run=3))
            result = await handle.result()
        assert planted.files() == sorted(planted.kept)
        assert result.removed == len(planted.due)
        assert handle.first_execution_run_id is not None
        first = client.get_workflow_handle(handle.id, run_id=handle.first_execution_run_id)
        assert (await first.describe()).status is WorkflowExecutionStatus.CONTINUED_AS_NEW

    async def test_it_works_on_s3_as_on_a_folder(self, client: Client, tmp_path: Path) -> None:
        with serving_s3(tmp_path) as endpoint:
            url = endpoint.new_root()
            planted = await plant(endpoint.path_of(url, ""), tmp_path / "scratch")
            store = ObjectStore.from_url(url, options=endpoint.options())
            async with control_workers(client, store, batch_objects=20) as task_queue:
                result = await (await sweep(client, task_queue, RetentionSweep())).result()
        assert planted.files() == sorted(planted.kept)
        assert result.removed == len(planted.due)

    async def test_an_empty_store_is_swept(self, client: Client, tmp_path: Path) -> None:
        store = ObjectStore.from_url((tmp_path / "empty").as_uri())
        async with control_workers(client, store) as task_queue:
            result = await (await sweep(client, task_queue, RetentionSweep())).result()
        assert (result.examined, result.removed) == (0, 0)


class TestBatch:
    async def test_one_killed_half_way_is_made_good_by_the_next(self, planted: Planted, store: ObjectStore) -> None:
        retention = Retention(store, retention=RETENTION)
        environment = ActivityEnvironment()
        removing = asyncio.create_task(
            environment.run(retention.remove_expired, RemoveExpiredInput(area=RetentionArea.ARTIFACTS))
        )
        while len(planted.files()) == len(planted.due) + len(planted.kept):
            await asyncio.sleep(0)
        removing.cancel()
        await asyncio.gather(removing, return_exceptions=True)
        assert removing.cancelled()
        assert set(planted.kept) <= set(planted.files())
        for area in RetentionArea:
            await environment.run(retention.remove_expired, RemoveExpiredInput(area=area))
        assert planted.files() == sorted(planted.kept)

    async def test_it_heartbeats(self, store: ObjectStore) -> None:
        beats = []
        environment = ActivityEnvironment()
        environment.on_heartbeat = lambda *details: beats.append(details)
        retention = Retention(store, retention=RETENTION)
        await environment.run(retention.remove_expired, RemoveExpiredInput(area=RetentionArea.ARTIFACTS))
        assert len(beats) > 4

    async def test_parts_of_killed_uploads_go_after_a_day(self, planted: Planted, store: ObjectStore) -> None:
        old, young = (f"{attempt_prefix('d' * 64, token)}/video.mp4#1" for token in ("old", "young"))
        for key in (old, young):
            path = planted.folder / key
            path.parent.mkdir(parents=True)
            path.write_bytes(b"part")
        planted.age(old, timedelta(days=2))
        retention = Retention(store, retention=RETENTION)
        await ActivityEnvironment().run(retention.remove_expired, RemoveExpiredInput(area=RetentionArea.ARTIFACTS))
        assert old not in planted.files()
        assert young in planted.files()

    async def test_a_store_that_is_away_is_a_retryable_storage_failure(self, tmp_path: Path) -> None:
        with serving_s3(tmp_path) as endpoint:
            store = ObjectStore.from_url(endpoint.new_root(), options=endpoint.options())
            endpoint.kill()
            retention = Retention(store, retention=RETENTION)
            with pytest.raises(ApplicationError) as caught:
                await ActivityEnvironment().run(retention.remove_expired, RemoveExpiredInput(area=RetentionArea.INPUTS))
        assert caught.value.type == FailureCode.STORAGE_UNAVAILABLE
        assert not caught.value.non_retryable


class TestSchedule:
    async def test_three_control_workers_keep_one_schedule_that_sweeps_once(
        self, client: Client, planted: Planted, store: ObjectStore
    ) -> None:
        schedule_id = f"retention-{uuid4().hex}"
        handle = client.get_schedule_handle(schedule_id)
        async with control_workers(client, store, count=3, batch_objects=20) as task_queue:
            await asyncio.gather(
                *(ensure_retention_schedule(client, task_queue=task_queue, schedule_id=schedule_id) for _ in range(3))
            )
            try:
                await handle.trigger()
                workflow_id = await started_by(client, schedule_id)
                result = await client.get_workflow_handle(workflow_id, result_type=RetentionSweep).result()
                description = await handle.describe()
            finally:
                await handle.delete()
        assert planted.files() == sorted(planted.kept)
        assert result.removed == len(planted.due)
        assert description.info.num_actions == 1
        assert description.schedule.policy.overlap is ScheduleOverlapPolicy.SKIP
        assert description.schedule.policy.catchup_window == timedelta(minutes=10)
        assert description.schedule.spec.intervals[0].every == timedelta(hours=1)

    async def test_a_changed_interval_is_taken_over_and_a_pause_is_kept(self, client: Client) -> None:
        schedule_id = f"retention-{uuid4().hex}"
        handle = client.get_schedule_handle(schedule_id)
        await ensure_retention_schedule(client, schedule_id=schedule_id)
        try:
            await handle.pause(note="storage is moved")
            await ensure_retention_schedule(client, schedule_id=schedule_id, every=timedelta(hours=2))
            description = await handle.describe()
        finally:
            await handle.delete()
        assert description.schedule.spec.intervals[0].every == timedelta(hours=2)
        assert description.schedule.state.paused
        assert description.schedule.state.note == "storage is moved"


async def started_by(client: Client, schedule_id: str) -> str:
    """Workflow id of what a schedule started."""
    for _ in range(200):
        description = await client.get_schedule_handle(schedule_id).describe()
        if description.info.recent_actions:
            execution = description.info.recent_actions[0].action
            assert isinstance(execution, ScheduleActionExecutionStartWorkflow)
            return execution.workflow_id
        await asyncio.sleep(0.05)
    raise AssertionError("the schedule started nothing")
