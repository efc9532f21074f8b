"""Deleting a task: its generation stops, its places go back, and nothing of it is left in Temporal or in the store.

The job goes last: whatever breaks off in the middle, the task is still there to be deleted again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeVar

import structlog
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.artifacts import ArtifactRepository
from activities.storage import ObjectStore, StoreUnavailableError
from api.auth import Caller
from api.batch_jobs import BatchJob
from api.deliveries import Deliveries
from api.jobs import Closing, Job, Jobs
from api.problems import StorageUnavailableError, TaskNotFoundError, TemporalUnavailableError
from api.readings import Readings
from api.temporal_calls import bounded
from workflows import naming
from workflows.admission import AdmissionWorkflow
from workflows.tasks import AdmissionPlace, GenerationInput

GONE_WITHIN: Final = timedelta(seconds=5)
"""Temporal deletes a run a moment after it was asked to: half a minute after, where the server setting
`history.transferProcessorEnsureCloseBeforeDelete` is not off."""
PARENT_HEARS_WITHIN: Final = timedelta(seconds=1)
"""Deleted in the moment of its close, a run may take the news of it to its parent along."""
_LOOK_AGAIN_SECONDS: Final = 0.05
_TERMINATE_REASON: Final = "deleted by its owner"

_log = structlog.stdlib.get_logger(__name__)

_Closable = TypeVar("_Closable", Job, BatchJob)

_Run = tuple[str, str]
"""Workflow id and run id. Always both: the same request sent again may start a new run under the same id."""


class Removals:
    """Deletes tasks.

    Args:
        client: of Temporal.
        jobs, readings, deliveries: of this API.
        store: where clips and input images are.
        stop_limit: how long a hard cancel may take before the run is terminated.
        call_limit: for one call to Temporal.
    """

    def __init__(
        self,
        client: Client,
        *,
        jobs: Jobs,
        readings: Readings,
        deliveries: Deliveries,
        store: ObjectStore,
        retention: timedelta,
        stop_limit: timedelta,
        call_limit: timedelta,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._readings = readings
        self._deliveries = deliveries
        self._store = store
        self._artifacts = ArtifactRepository(store, retention=retention)
        self._stop_limit = stop_limit
        self._limit = call_limit

    async def remove(self, caller: Caller, task_id: str) -> None:
        """Delete the caller's task, whatever state it is in.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            StorageUnavailableError: the store did not answer; the task has stopped and can be deleted again.
            TemporalUnavailableError: no answer in time; the same holds.
        """
        await self.remove_job(await self._readings.fresh(caller, task_id))

    async def remove_job(self, job: Job) -> None:
        """Delete the task of a job that was just described, whoever owns it.

        Raises:
            TaskNotFoundError, StorageUnavailableError, TemporalUnavailableError: as for `remove`.
        """
        job = await self._stopped(job)
        task_id = job.request.task_id
        await self.give_back(
            task_id, job.request.places if job.closing is Closing.ENDED_FROM_OUTSIDE else (), _gpu_seconds(job)
        )
        try:
            await self._remove_objects(job.request)
        except StoreUnavailableError as error:
            raise StorageUnavailableError from error
        if job.request.batch_id is not None and job.closed_at is not None:
            since_close = datetime.now(UTC) - job.closed_at
            await asyncio.sleep(max(0.0, (PARENT_HEARS_WITHIN - since_close).total_seconds()))
        await self.delete_runs(task_id, job.run_id)
        self._readings.forget(task_id)
        _log.info("task_deleted", task_id=task_id, user_id=naming.user_hash(job.request.user))
        if job.closing is Closing.ENDED_FROM_OUTSIDE:
            await self._remove_late_clip(job.request)

    async def _stopped(self, job: Job) -> Job:
        """The job once it is closed: by a hard cancel, else by force."""
        task_id = job.request.task_id

        async def cancel() -> None:
            if job.closing is None and not job.cancel_sent:
                await self._jobs.cancel(task_id)

        return await self.until_closed(task_id, job, cancel=cancel, described=self._described)

    async def until_closed(
        self,
        workflow_id: str,
        run: _Closable,
        *,
        cancel: Callable[[], Awaitable[None]],
        described: Callable[[str], Awaitable[_Closable]],
    ) -> _Closable:
        """A run once it is closed: by its own answer to `cancel`, or by force after the stop limit.

        Args:
            workflow_id: its id.
            run: as it was described last.
            cancel: asks it to end.
            described: describes it again.
        """
        until = time.monotonic() + self._stop_limit.total_seconds()
        await cancel()
        while run.closed_at is None and (left := until - time.monotonic()) > 0:
            await self._jobs.wait_closed(workflow_id, timedelta(seconds=left))
            run = await described(workflow_id)
            if run.closed_at is None:
                await asyncio.sleep(min(left, _LOOK_AGAIN_SECONDS))
        if run.closed_at is None:
            await self._terminate(workflow_id)
            run = await described(workflow_id)
        return run

    async def _terminate(self, workflow_id: str) -> None:
        handle = self._client.get_workflow_handle(workflow_id)
        with suppress(RPCError):  # NOT_FOUND: closed in the same moment
            await bounded(partial(handle.terminate, reason=_TERMINATE_REASON), limit=self._limit)

    async def _described(self, task_id: str) -> Job:
        job = await self._jobs.describe(task_id)
        if job is None:
            # Deleted by another request meanwhile.
            raise TaskNotFoundError
        return job

    async def give_back(self, holder: str, places: Sequence[AdmissionPlace], gpu_seconds: float) -> None:
        """What a run does at its own end, for one that did not come to it. A second release changes nothing."""
        for place in places:
            release = partial(
                self._client.get_workflow_handle(place.admission_id).signal,
                AdmissionWorkflow.release,
                args=[holder, place.token, gpu_seconds],
            )
            with suppress(RPCError):  # NOT_FOUND: the admission has closed and forgotten its places
                await bounded(release, limit=self._limit)

    async def _remove_objects(self, request: GenerationInput) -> None:
        await self._artifacts.remove_all(request.artifact_key)
        if request.parameters.image_key is not None:
            await self._store.delete([request.parameters.image_key])

    async def _remove_late_clip(self, request: GenerationInput) -> None:
        """An attempt that asked whether it may publish just before its run was terminated can have published since.

        No other can: it finds no run.
        """
        try:
            await self._artifacts.remove_all(request.artifact_key)
        except StoreUnavailableError:
            _log.warning("late_clip_kept", task_id=request.task_id)

    async def delete_runs(self, workflow_id: str, run_id: str) -> None:
        """Delete the deliveries of a job, then itself, earlier runs of a `reset` or a continue-as-new included.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        listed = await bounded(partial(self._listed_runs, workflow_id), limit=self._limit)
        # The list may lag behind; what is newest is found by its id.
        deliveries = {
            (naming.callback_id(workflow_id, delivery.number), delivery.run_id)
            for delivery in await self._deliveries.of(workflow_id)
        }
        await self._delete_all(deliveries | {run for run in listed if run[0] != workflow_id})
        await self._delete_all({(workflow_id, run_id)} | {run for run in listed if run[0] == workflow_id})

    async def _listed_runs(self, workflow_id: str) -> list[_Run]:
        query = f"WorkflowId = '{workflow_id}' OR WorkflowId STARTS_WITH '{naming.callback_id(workflow_id)}'"
        return [(run.id, run.run_id) async for run in self._client.list_workflows(query)]

    async def _delete_all(self, runs: set[_Run]) -> None:
        await asyncio.gather(*(self._delete(*run) for run in runs))
        until = time.monotonic() + GONE_WITHIN.total_seconds()
        while any(await asyncio.gather(*(self._exists(*run) for run in runs))):
            if time.monotonic() > until:
                raise TemporalUnavailableError("Temporal is still deleting; ask again until nothing is found.")
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _delete(self, workflow_id: str, run_id: str) -> None:
        request = DeleteWorkflowExecutionRequest(
            namespace=self._client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id),
        )
        with suppress(RPCError):  # NOT_FOUND: gone already
            await bounded(partial(self._client.workflow_service.delete_workflow_execution, request), limit=self._limit)

    async def _exists(self, workflow_id: str, run_id: str) -> bool:
        handle = self._client.get_workflow_handle(workflow_id, run_id=run_id)
        try:
            await bounded(handle.describe, limit=self._limit)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise
        return True


def _gpu_seconds(job: Job) -> float:
    return job.record.gpu_seconds if job.record else 0.0
