"""Reading tasks: describe the job and its callback, join them, and remember what can no longer change.

A closed run is asked for again after 60 s at the latest; its callback is remembered with it when final, and for
5 s while it is being delivered. What is remembered is the finished answer, so polling for an ended task costs
neither Temporal nor us more than a look-up.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Final

from activities.memory import remember
from api.auth import Caller
from api.fleet import Fleet
from api.jobs import Delivery, Job, Jobs
from api.problems import TaskNotFoundError
from api.queue_statistics import Queues
from api.schemas import Task, TaskQueue
from api.task_view import TaskViews, outcome_of
from api.waiting import Waiting
from workflows.states import TaskStatus
from workflows.tasks import User

CLOSED_SECONDS: Final = 60.0
DELIVERING_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 10_000
CACHE_CONTROL: Final = "private, no-cache"

_POLL_STEPS: Final = ((30.0, 2), (120.0, 5))
_POLL_SLOWEST: Final = 10

TASK_ID_LENGTH: Final = 27
_ID_ALPHABET: Final = frozenset("abcdefghijklmnopqrstuvwxyz234567")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A task as read, ready to be sent."""

    job: Job
    task: Task
    body: bytes
    etag: str
    retry_after_seconds: int | None
    """When to ask again; None for a task that has ended."""

    @cached_property
    def validator_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What comes with the body, and with the news that it has not changed."""
        headers = [(b"etag", self.etag.encode()), (b"cache-control", CACHE_CONTROL.encode())]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", str(self.retry_after_seconds).encode()))
        return tuple(headers)

    @cached_property
    def full_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What comes with the body."""
        about = (b"content-length", str(len(self.body)).encode()), (b"content-type", b"application/json")
        return (*self.validator_headers, *about)


@dataclass(frozen=True, kw_only=True)
class _Remembered:
    reading: Reading
    until: float
    job_until: float


def is_task_id(text: str) -> bool:
    """Whether a text can be a task id at all; everything else is answered without asking Temporal."""
    return len(text) == TASK_ID_LENGTH and text[0] == "t" and _ID_ALPHABET.issuperset(text[1:])


def poll_interval(age_seconds: float) -> int:
    """Seconds after which to ask again for a task that is `age_seconds` old."""
    return next((pause for limit, pause in _POLL_STEPS if age_seconds < limit), _POLL_SLOWEST)


class Readings:
    """Answers reads of single tasks."""

    def __init__(self, *, jobs: Jobs, views: TaskViews, fleet: Fleet, queues: Queues, waiting: Waiting) -> None:
        self._jobs = jobs
        self._views = views
        self._fleet = fleet
        self._queues = queues
        self._waiting = waiting
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()
        self._forgotten = 0

    async def task(self, caller: Caller, task_id: str) -> Reading:
        """The caller's task.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        if not is_task_id(task_id):
            raise TaskNotFoundError
        reading = await self._reading(task_id)
        if reading is None or not _owns(user, reading.job):
            raise TaskNotFoundError
        return reading

    def remembered(self, caller: Caller, task_id: str) -> Reading | None:
        """The caller's task, if it is in memory and may still be answered from there."""
        known = self._remembered.get(task_id)
        if known is None or known.until <= time.monotonic() or not _owns(caller.user, known.reading.job):
            return None
        return known.reading

    async def any_task(self, task_id: str) -> Reading:
        """A task whoever owns it, for callers that hold a signed link to it.

        Raises:
            TaskNotFoundError: there is none.
            TemporalUnavailableError: no answer in time.
        """
        reading = await self._reading(task_id) if is_task_id(task_id) else None
        if reading is None:
            raise TaskNotFoundError
        return reading

    async def fresh(self, caller: Caller, task_id: str) -> Job:
        """The caller's job as it is now, for those who are about to change it.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        job = await self._jobs.describe(task_id) if is_task_id(task_id) else None
        if job is None or not _owns(user, job):
            raise TaskNotFoundError
        return job

    async def of(self, job: Job) -> Reading:
        """The reading of a job that was just described."""
        return self._render(job, await self._delivery(job), await self._queue(job, patient=False))

    def forget(self, task_id: str) -> None:
        """Drop what is remembered of a task, and what a read that is under way would remember."""
        self._forgotten += 1
        self._remembered.pop(task_id, None)

    async def _reading(self, task_id: str) -> Reading | None:
        now, forgotten = time.monotonic(), self._forgotten
        known = self._remembered.get(task_id)
        if known is not None and now < known.until:
            return known.reading
        if known is not None and now < known.job_until:
            job, job_until = known.reading.job, known.job_until
        else:
            self._remembered.pop(task_id, None)
            described = await self._jobs.describe(task_id)
            if described is None:
                return None
            job, job_until = described, now + CLOSED_SECONDS
        delivery = await self._delivery(job)
        reading = self._render(job, delivery, await self._queue(job))
        if job.closing is not None and forgotten == self._forgotten:
            settled = delivery is None or delivery.is_final
            job_until = min(job_until, now + _seconds_to_expiry(job))
            self._remember(
                task_id, reading, job_until if settled else min(job_until, now + DELIVERING_SECONDS), job_until
            )
        return reading

    def _remember(self, task_id: str, reading: Reading, until: float, job_until: float) -> None:
        known = _Remembered(reading=reading, until=until, job_until=job_until)
        remember(self._remembered, task_id, known, at_most=MAX_REMEMBERED)

    async def _delivery(self, job: Job) -> Delivery | None:
        if job.record is None or not job.record.callback_started:
            return None
        return await self._jobs.delivery(job.request.task_id)

    async def _queue(self, job: Job, *, patient: bool = True) -> TaskQueue | None:
        if job.closing is not None or outcome_of(job).status is not TaskStatus.QUEUED:
            return None
        name = job.request.pool
        pool, position, length = await asyncio.gather(
            self._fleet.pool(name),
            self._waiting.position(name, job.opened_at, patient=patient),
            self._queues.length(name),
        )
        seconds = None
        if position is not None and length is not None and pool.slots:
            # A slot is free every so often: the first in the line waits for one of those moments.
            seconds = round((position + 1) * length.processing_seconds / pool.slots, 1)
        return TaskQueue(position=position, estimated_start_seconds=seconds, live_slots=pool.slots)

    def _render(self, job: Job, delivery: Delivery | None, queue: TaskQueue | None) -> Reading:
        task = self._views.task(job, delivery=delivery, queue=queue)
        body = task.model_dump_json().encode("utf-8")
        age = (datetime.now(UTC) - job.request.accepted_at).total_seconds()
        return Reading(
            job=job,
            task=task,
            body=body,
            etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            retry_after_seconds=None if task.is_terminal else poll_interval(age),
        )


def _seconds_to_expiry(job: Job) -> float:
    """Until the task has to say that its clip is no longer there; without end when it says so, or has none."""
    artifact = job.record.artifact if job.record else None
    seconds = (artifact.expires_at - datetime.now(UTC)).total_seconds() if artifact else math.inf
    return seconds if seconds > 0 else math.inf


def _owns(user: User, job: Job) -> bool:
    return job.request.user == user
