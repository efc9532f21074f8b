"""What a retention sweep does to the store, batch by batch, and the schedule that starts one every hour.

Due are: attempt folders whose manifest says that they have expired; attempt folders without a readable manifest, and
input images, that nobody has touched for as long as artifacts are kept; parts of uploads whose process was killed.
Everything is decided again from the store in each batch, so a batch may stop anywhere and run twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby, islice
from typing import Final

from temporalio import activity
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)

from activities.artifacts import MANIFEST_NAME, parse_manifest, storage_failures
from activities.storage import ObjectInfo, ObjectNotFoundError, ObjectStore
from workflows.contracts import REMOVE_EXPIRED, RetentionActivities
from workflows.naming import CONTROL_QUEUE
from workflows.retention import RetentionSweep, RetentionWorkflow
from workflows.tasks import RemoveExpiredInput, RemoveExpiredResult, RetentionArea

RETENTION_SCHEDULE: Final = "retention"
"""Id of the schedule; the workflow ids are this and the time."""
BATCH_OBJECTS: Final = 2_000
"""A batch ends with the first folder that reaches this."""
LEFTOVERS_AFTER: Final = timedelta(days=1)
"""No upload takes longer, so an unfinished part of one that is older has no process any more."""

_PARALLEL_FOLDERS = 8
_CATCHUP_WINDOW = timedelta(minutes=10)


class Retention(RetentionActivities):
    """Removes from one store what is older than it may be."""

    def __init__(self, store: ObjectStore, *, retention: timedelta, batch_objects: int = BATCH_OBJECTS) -> None:
        """Sweep `store`; inputs and unfinished attempts are kept for `retention`, artifacts as their manifests say."""
        self._store = store
        self._retention = retention
        self._batch_objects = batch_objects

    @activity.defn(name=REMOVE_EXPIRED)
    async def remove_expired(self, batch: RemoveExpiredInput) -> RemoveExpiredResult:
        """Remove what is due in the next part of an area; doing it twice is harmless."""
        with storage_failures():
            objects, done = await self._next_objects(batch)
            folders = iter(_by_folder(objects, batch.area))
            removed = 0
            while some := list(islice(folders, _PARALLEL_FOLDERS)):
                removed += sum(await asyncio.gather(*(self._remove_if_due(folder, batch.area) for folder in some)))
                activity.heartbeat()
            if done and batch.area is RetentionArea.ARTIFACTS:
                removed += await self._store.remove_leftovers(datetime.now(UTC) - LEFTOVERS_AFTER)
        return RemoveExpiredResult(examined=len(objects), removed=removed, after=None if done else objects[-1].key)

    async def _next_objects(self, batch: RemoveExpiredInput) -> tuple[list[ObjectInfo], bool]:
        """Return whole folders up to the size of a batch, and whether they are the last ones."""
        found: list[ObjectInfo] = []
        async with aclosing(self._store.list(batch.area, after=batch.after)) as objects:
            async for info in objects:
                if len(found) >= self._batch_objects and _folder(info, batch.area) != _folder(found[-1], batch.area):
                    return found, False
                if len(found) % 500 == 0:
                    activity.heartbeat()
                found.append(info)
        return found, True

    async def _remove_if_due(self, folder: Sequence[ObjectInfo], area: RetentionArea) -> int:
        return await self._store.delete([info.key for info in folder]) if await self._is_due(folder, area) else 0

    async def _is_due(self, folder: Sequence[ObjectInfo], area: RetentionArea) -> bool:
        now = datetime.now(UTC)
        if area is RetentionArea.ARTIFACTS and (expires_at := await self._expires_at(folder)):
            return expires_at <= now
        return max(info.last_modified for info in folder) + self._retention <= now

    async def _expires_at(self, folder: Sequence[ObjectInfo]) -> datetime | None:
        """Return what the manifest of an attempt folder promises, None without a readable one."""
        attempt_folder = _folder(folder[0], RetentionArea.ARTIFACTS)
        manifest_key = f"{attempt_folder}/{MANIFEST_NAME}"
        if not any(info.key == manifest_key for info in folder):
            return None
        try:
            body = await self._store.get(manifest_key)
        except ObjectNotFoundError:
            return None  # Removed since it was listed.
        _, artifact_key, token = attempt_folder.split("/")
        artifact = parse_manifest(body, artifact_key=artifact_key, token=token)
        return artifact.expires_at if artifact else None


def _folder(info: ObjectInfo, area: RetentionArea) -> str:
    """What is kept or removed together: `artifacts/<artifact key>/<token>`, or a single input."""
    return "/".join(info.key.split("/")[:3]) if area is RetentionArea.ARTIFACTS else info.key


def _by_folder(objects: Sequence[ObjectInfo], area: RetentionArea) -> list[list[ObjectInfo]]:
    return [list(group) for _, group in groupby(objects, key=lambda info: _folder(info, area))]


async def ensure_retention_schedule(
    client: Client,
    *,
    task_queue: str = CONTROL_QUEUE,
    every: timedelta = timedelta(hours=1),
    schedule_id: str = RETENTION_SCHEDULE,
) -> None:
    """Create the schedule of the sweep, or bring the existing one up to date. Every control worker may call it.

    A sweep that is still running is not joined by another; sweeps missed in an outage are not made up for. Whether
    the schedule is paused is left as an operator set it.

    Raises:
        RPCError: the server refused, or is not there.
    """
    schedule = Schedule(
        action=ScheduleActionStartWorkflow(
            RetentionWorkflow.run,
            RetentionSweep(),
            id=schedule_id,
            task_queue=task_queue,
            static_summary="Removes expired artifacts and inputs",
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=every)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=_CATCHUP_WINDOW),
    )

    def updated(existing: ScheduleUpdateInput) -> ScheduleUpdate:
        return ScheduleUpdate(schedule=replace(schedule, state=existing.description.schedule.state))

    try:
        await client.create_schedule(schedule_id, schedule)
    except ScheduleAlreadyRunningError:
        await client.get_schedule_handle(schedule_id).update(updated)
