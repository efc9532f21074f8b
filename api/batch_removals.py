"""Deleting a batch with the tasks that it started, in bounded time per request.

The batch goes last: whatever breaks off in the middle, it is still there to be deleted again. Tasks of an earlier batch
whose clips answered here belong to that one and go with it.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Final

import structlog
from pydantic import TypeAdapter
from temporalio.client import Client

from activities.storage import ObjectNotFoundError, ObjectStore, StoreUnavailableError
from api.auth import Caller
from api.batch_jobs import BatchJob, BatchJobs
from api.batches import Batches, started_tasks
from api.jobs import Jobs
from api.problems import BatchNotFoundError, StorageUnavailableError, TaskNotFoundError
from api.removals import Removals
from api.temporal_calls import bounded
from workflows import naming
from workflows.tasks import CancelMode, GenerationInput

PATIENCE: Final = timedelta(seconds=10)
"""No task is begun with after that; the client asks again."""
_PARALLEL: Final = 8
_PLAN: Final = TypeAdapter(GenerationInput)

_log = structlog.stdlib.get_logger(__name__)


class BatchRemovals:
    """Deletes batches.

    Args:
        client: of Temporal.
        batch_jobs, batches, jobs, removals: of this API.
        store: where items, reports and input images are.
        call_limit: for one call to Temporal.
    """

    def __init__(
        self,
        client: Client,
        *,
        batch_jobs: BatchJobs,
        batches: Batches,
        jobs: Jobs,
        removals: Removals,
        store: ObjectStore,
        call_limit: timedelta,
    ) -> None:
        self._client = client
        self._batch_jobs = batch_jobs
        self._batches = batches
        self._jobs = jobs
        self._removals = removals
        self._store = store
        self._limit = call_limit

    async def remove(self, caller: Caller, batch_id: str) -> bool:
        """Delete the caller's batch, whatever state it is in.

        Returns:
            False: there is more to delete than one request should take; ask again.

        Raises:
            BatchNotFoundError: there is none, or it is another user's.
            StorageUnavailableError: the store did not answer; the batch has stopped and can be deleted again.
            TemporalUnavailableError: no answer in time; the same holds.
        """
        until = time.monotonic() + PATIENCE.total_seconds()
        job = await self._batches.fresh(caller, batch_id)
        images = await self._waiting_images(job)
        job = await self._stopped(job)
        if job.ended_from_outside:
            gpu_seconds = job.record.gpu_seconds if job.record else 0.0
            await self._removals.give_back(batch_id, job.request.places, gpu_seconds)
        if not await self._remove_tasks(job, until):
            return False
        request = job.request
        try:
            await self._store.delete(
                [request.items_key, *([request.report_key] if request.report_key else []), *images]
            )
        except StoreUnavailableError as error:
            raise StorageUnavailableError from error
        await self._removals.delete_runs(batch_id, job.run_id)
        _log.info("batch_deleted", batch_id=batch_id, user_id=naming.user_hash(request.user))
        return True

    async def _waiting_images(self, job: BatchJob) -> set[str]:
        """Input images of the items. Those of started items go with their tasks, the others are only known here.

        A batch that has ended removed its items; images of items it never started are left to the retention.
        """
        try:
            body = await self._store.get(job.request.items_key)
        except ObjectNotFoundError:
            return set()
        except StoreUnavailableError as error:
            raise StorageUnavailableError from error
        keys = {_PLAN.validate_json(line).parameters.image_key for line in body.split(b"\n") if line}
        return {key for key in keys if key is not None}

    async def _stopped(self, job: BatchJob) -> BatchJob:
        """The batch once its run is closed: by a hard cancel, else by force."""
        batch_id = job.request.batch_id

        async def cancel() -> None:
            if not job.has_ended:
                await self._batch_jobs.cancel(batch_id, CancelMode.HARD)

        return await self._removals.until_closed(batch_id, job, cancel=cancel, described=self._described)

    async def _described(self, batch_id: str) -> BatchJob:
        job = await self._batch_jobs.describe(batch_id)
        if job is None:
            # Deleted by another request meanwhile.
            raise BatchNotFoundError
        return job

    async def _remove_tasks(self, job: BatchJob, until: float) -> bool:
        """Delete the tasks of the batch; False: not all of them in time."""
        batch_id = job.request.batch_id
        # The record may lack what the last step of a terminated batch started, and the list lags behind.
        listed = await bounded(lambda: self._listed_tasks(batch_id), limit=self._limit)
        turns = asyncio.Semaphore(_PARALLEL)

        async def one(task_id: str) -> bool:
            async with turns:
                task = await self._jobs.describe(task_id)
                if task is None or task.request.batch_id != batch_id:
                    return True
                if time.monotonic() > until:
                    return False
                try:
                    await self._removals.remove_job(task)
                except TaskNotFoundError:
                    # Deleted by another request meanwhile.
                    return True
                return True

        ids = listed | {task_id for _, task_id in started_tasks(job)}
        return all(await asyncio.gather(*(one(task_id) for task_id in ids)))

    async def _listed_tasks(self, batch_id: str) -> set[str]:
        query = f"WorkflowType = 'GenerationWorkflow' AND BatchId = '{batch_id}'"
        return {run.id async for run in self._client.list_workflows(query)}
