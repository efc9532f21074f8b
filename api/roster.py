"""All workers as they report themselves, and what they run; for operators, cached."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, timedelta
from typing import Final, Literal

from temporalio.api.enums.v1 import WorkerStatus
from temporalio.api.worker.v1 import WorkerHeartbeat
from temporalio.client import Client

from api.fleet import Fleet
from api.heartbeats import has_ended, heartbeat_pages
from api.jobs import Jobs
from api.statistics_schemas import WorkerList, WorkerState
from api.temporal_calls import bounded
from workflows import naming
from workflows.states import TaskStatus

CACHE_SECONDS: Final = 3.0
MAX_WORKERS: Final = 1_000
MAX_RUNNING: Final = 200
"""Running tasks that are asked where they run; a fleet that runs more shows the newest."""
_PARALLEL: Final = 20
_GPU_PREFIX: Final = naming.gpu_queue("")


class Roster:
    """The workers of the namespace.

    Args:
        client: asked once per `CACHE_SECONDS`, whatever the number of readers.
        jobs: says where tasks run.
        fleet: knows what a heartbeat means.
        call_limit: time for one call.
    """

    def __init__(self, client: Client, *, jobs: Jobs, fleet: Fleet, call_limit: timedelta) -> None:
        self._client = client
        self._jobs = jobs
        self._fleet = fleet
        self._limit = call_limit
        self._lock = asyncio.Lock()
        self._seen: WorkerList | None = None
        self._until = 0.0

    async def workers(self) -> WorkerList:
        """Every worker.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        async with self._lock:
            if self._seen is None or self._until <= time.monotonic():
                beats, running = await asyncio.gather(self._beats(), self._running())
                self._seen = WorkerList(
                    items=sorted(
                        (self._state(beat, running.get(beat.worker_identity, [])) for beat in beats),
                        key=lambda worker: (worker.task_queue, worker.identity),
                    )
                )
                self._until = time.monotonic() + CACHE_SECONDS
            return self._seen

    async def _beats(self) -> list[WorkerHeartbeat]:
        beats: list[WorkerHeartbeat] = []
        async for page in heartbeat_pages(self._client, call_limit=self._limit):
            beats += [beat for beat in page if not has_ended(beat)]
            if len(beats) >= MAX_WORKERS:
                break
        return beats

    async def _running(self) -> dict[str, list[str]]:
        """Task ids by the identity of the worker that runs their attempt."""
        # A soft-cancelled task still runs.
        states = " OR ".join(f"TaskStatus = '{state}'" for state in (TaskStatus.PROCESSING, TaskStatus.CANCELED))
        found = self._client.list_workflows(
            f"WorkflowType = 'GenerationWorkflow' AND ExecutionStatus = 'Running' AND ({states})",
            page_size=MAX_RUNNING,
        )
        await bounded(found.fetch_next_page, limit=self._limit)
        places = asyncio.Semaphore(_PARALLEL)

        async def where(task_id: str) -> tuple[str, str | None]:
            async with places:
                job = await self._jobs.describe(task_id)
            return task_id, job.attempt.worker_identity if job is not None and job.attempt is not None else None

        running: dict[str, list[str]] = {}
        for task_id, identity in await asyncio.gather(*(where(execution.id) for execution in found.current_page or ())):
            if identity is not None:
                running.setdefault(identity, []).append(task_id)
        return running

    def _state(self, beat: WorkerHeartbeat, tasks: list[str]) -> WorkerState:
        used = beat.activity_task_slots_info.current_used_slots
        kind = _kind(beat.task_queue)
        free = self._fleet.slots(beat) - used
        if kind == "control":
            used += beat.workflow_task_slots_info.current_used_slots
            free += beat.workflow_task_slots_info.current_available_slots
        return WorkerState(
            identity=beat.worker_identity,
            kind=kind,
            task_queue=beat.task_queue,
            status=self._status(beat),
            slots_used=used,
            slots_free=max(0, free),
            tasks=tasks if kind == "gpu" else [],
            version=beat.deployment_version.build_id or None,
            started_at=beat.start_time.ToDatetime(tzinfo=UTC),
            last_heartbeat_at=beat.heartbeat_time.ToDatetime(tzinfo=UTC),
        )

    def _status(self, beat: WorkerHeartbeat) -> Literal["running", "shutting_down", "silent"]:
        if self._fleet.is_silent(beat):
            return "silent"
        return "running" if beat.status == WorkerStatus.WORKER_STATUS_RUNNING else "shutting_down"


def _kind(task_queue: str) -> Literal["gpu", "callback", "control", "other"]:
    if task_queue.startswith(_GPU_PREFIX):
        return "gpu"
    match task_queue:
        case naming.CALLBACK_QUEUE:
            return "callback"
        case naming.CONTROL_QUEUE:
            return "control"
        case _:
            return "other"
