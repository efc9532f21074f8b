"""Reading and stopping batches. GET needs no worker: the batch's memo, and the few tasks that are open."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from api.auth import Caller
from api.batch_jobs import BatchJob, BatchJobs
from api.batch_schemas import Batch, BatchItem, BatchLinks, BatchSummary, ItemLinks
from api.batch_submission import BatchSubmissions
from api.jobs import Jobs
from api.problems import BatchNotFoundError, BatchTerminalError, FieldError
from api.readings import TASK_ID_LENGTH, is_task_id, poll_interval
from api.task_view import TaskViews, outcome_of
from workers.settings import Settings
from workflows import naming
from workflows.batches import ENDED_ITEMS, BatchInput, BatchStatus, ItemState, item_content, item_counts
from workflows.failures import FailureCode
from workflows.states import TaskStatus
from workflows.tasks import CancelMode

_STATUS_OF = {
    ItemState.CREATED: TaskStatus.CREATED,
    ItemState.OPEN: TaskStatus.QUEUED,
    **{state: status for status, state in ENDED_ITEMS.items()},
}


@dataclass(frozen=True, kw_only=True)
class BatchReading:
    """A batch as read, ready to be sent."""

    batch: Batch
    body: bytes
    etag: str
    retry_after_seconds: int | None
    """When to ask again; None for a batch that has ended."""


class Batches:
    """Reads and cancels batches.

    Args:
        batch_jobs: the batches.
        jobs: their tasks and callbacks.
        submissions: has the reports of rejected items.
        views: links to tasks.
        settings: links to batches.
    """

    def __init__(
        self,
        *,
        batch_jobs: BatchJobs,
        jobs: Jobs,
        submissions: BatchSubmissions,
        views: TaskViews,
        settings: Settings,
    ) -> None:
        self._batch_jobs = batch_jobs
        self._jobs = jobs
        self._submissions = submissions
        self._views = views
        self._settings = settings

    async def read(self, caller: Caller, batch_id: str) -> BatchReading:
        """The caller's batch.

        Raises:
            BatchNotFoundError: there is none, or it is another user's.
            GatewayError: Temporal or the store does not answer.
        """
        return await self.of(await self.fresh(caller, batch_id))

    async def cancel(self, caller: Caller, batch_id: str, mode: CancelMode) -> tuple[BatchReading, bool]:
        """Cancel the rest of the caller's batch, once however often it is asked.

        Returns:
            The batch, and whether there was anything to do: False for one that had ended as CANCELED.

        Raises:
            BatchNotFoundError: there is none, or it is another user's.
            BatchTerminalError: it ended in another way.
            TemporalUnavailableError: no answer in time.
        """
        job = await self.fresh(caller, batch_id)
        if job.has_ended:
            reading = await self.of(job)
            if reading.batch.status is not BatchStatus.CANCELED:
                raise BatchTerminalError(f"The batch has ended as {reading.batch.status}.")
            return reading, False
        await self._batch_jobs.cancel(batch_id, mode)
        return await self.read(caller, batch_id), True

    async def of(self, job: BatchJob) -> BatchReading:
        """The reading of a batch that was just described."""
        statuses = dict(enumerate(_STATUS_OF.get(ItemState(letter)) for letter in job.states))
        ids = dict(started_tasks(job))
        open_items = [index for index, letter in enumerate(job.states) if letter == ItemState.OPEN]
        statuses.update(
            zip(open_items, await asyncio.gather(*(self._status(ids[index]) for index in open_items)), strict=True)
        )
        delivery = None
        if job.record is not None and job.record.callback_started:
            delivery = await self._jobs.delivery(job.request.batch_id)
        items = self._items(statuses, ids, await self._submissions.report(job.request))
        counts = {status: sum(item.status is status for item in items) for status in TaskStatus}
        batch = Batch(
            **dict(self._summary(job, counts)),
            items=items,
            callback_status=delivery.status if delivery else None,
            callback_attempts=delivery.attempts if delivery else None,
        )
        body = batch.model_dump_json().encode("utf-8")
        age = (datetime.now(UTC) - job.request.accepted_at).total_seconds()
        return BatchReading(
            batch=batch,
            body=body,
            etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            retry_after_seconds=None if batch.is_terminal else poll_interval(age),
        )

    async def fresh(self, caller: Caller, batch_id: str) -> BatchJob:
        """The caller's batch as it is now, for those who are about to change it.

        Raises:
            BatchNotFoundError: there is none, or it is another user's.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        job = await self._batch_jobs.describe(batch_id) if _is_batch_id(batch_id) else None
        if job is None or job.request.user != user:
            raise BatchNotFoundError
        return job

    async def _status(self, task_id: str) -> TaskStatus:
        """What an open item's task says of itself; the batch hears of its end a moment later."""
        job = await self._jobs.describe(task_id)
        return outcome_of(job).status if job is not None else TaskStatus.CANCELED

    def _items(
        self,
        statuses: Mapping[int, TaskStatus | None],
        ids: Mapping[int, str],
        report: Mapping[int, list[FieldError]],
    ) -> list[BatchItem]:
        return [
            BatchItem(
                index=index,
                status=status,
                task_id=ids.get(index),
                errors=report.get(index, []) if status is None else None,
                links=ItemLinks(self=self._views.self_link(ids[index])) if index in ids else None,
            )
            for index, status in statuses.items()
        ]

    def summary(self, job: BatchJob) -> BatchSummary:
        """A batch without its items, from what itself knows."""
        return self._summary(job, item_counts(job.states))

    def _summary(self, job: BatchJob, counts: dict[TaskStatus, int]) -> BatchSummary:
        request, record = job.request, job.record
        asked = record.cancel_requested if record else None
        if job.cancel_sent and not job.has_ended:
            asked = CancelMode.HARD
        finished_at = (record.finished_at if record else None) or job.closed_at
        error = record.error_code if record else None
        return BatchSummary(
            batch_id=request.batch_id,
            status=_status_of(job),
            is_terminal=job.has_ended,
            cancel_requested=asked,
            counts=counts,
            rejected=job.states.count(ItemState.REJECTED),
            parallelism=request.parallelism,
            retry_of=request.retry_of,
            created_at=request.accepted_at,
            updated_at=max(at for at in (request.accepted_at, record and record.updated_at, finished_at) if at),
            finished_at=finished_at,
            gpu_seconds=round(record.gpu_seconds, 3) if record else 0.0,
            error_code=FailureCode.TERMINATED if _is_cut_short(job) else error,
            links=BatchLinks(
                self=request.url,
                tasks=f"{self._settings.public_url}/api/v1/tasks?batch_id={request.batch_id}",
                web_ui=self._settings.web_ui_link(request.batch_id),
            ),
        )


def _is_batch_id(text: str) -> bool:
    return len(text) == TASK_ID_LENGTH and text[0] == "b" and is_task_id(f"t{text[1:]}")


def _is_cut_short(job: BatchJob) -> bool:
    """Ended from outside before it came to its own end."""
    return job.ended_from_outside and (job.record is None or job.record.finished_at is None)


def _status_of(job: BatchJob) -> BatchStatus:
    if job.record is not None and job.record.finished_at is not None:
        return job.record.status
    return BatchStatus.CANCELED if job.has_ended else BatchStatus.PROCESSING


def started_tasks(job: BatchJob) -> Iterator[tuple[int, str]]:
    """Tasks of the items that have been started, by index: computed, since a record with a thousand ids is large."""
    request, record = job.request, job.record
    started = set(record.started) if record else set()
    links = record.links if record else {}
    for index, letter in enumerate(job.states):
        unstarted = letter == ItemState.CANCELED and index not in started
        if letter in (ItemState.REJECTED, ItemState.CREATED) or unstarted:
            continue
        yield index, _task_id(request, index, links.get(str(index), 0))


def _task_id(request: BatchInput, index: int, link: int) -> str:
    key = naming.batch_item_key(request.root_id, index, item_content(request.contents, index))
    task_id = naming.task_id(request.user, key)
    for _ in range(link):
        task_id = naming.task_id(request.user, key, after=task_id)
    return task_id
