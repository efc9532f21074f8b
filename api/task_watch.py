"""One task followed for all who listen to it in this process.

A watch follows the run's history by long poll (states) and describes the job every second (progress). What it knows
is a list of states, which is short, and the newest progress; listeners are cursors over that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from temporalio.service import RPCError, RPCStatusCode

from api.jobs import Job, Jobs
from api.problems import TaskNotFoundError, TemporalUnavailableError
from api.readings import Readings
from api.task_events import (
    PROGRESS_EVENT,
    STATE_EVENT,
    Event,
    EventId,
    TaskProgressEvent,
    TaskStateEvent,
    encoded_event,
)
from api.task_history import StateChange, TaskHistory
from api.task_view import outcome_of
from workflows.tasks import User

_PAUSE_SECONDS: Final = 1.0

_log = structlog.stdlib.get_logger(__name__)


class TaskWatch:
    """Follows one task for all who listen to it."""

    def __init__(
        self, task_id: str, *, history: TaskHistory, jobs: Jobs, readings: Readings, interval: timedelta
    ) -> None:
        self._task_id = task_id
        self._history = history
        self._jobs = jobs
        self._readings = readings
        self._interval = interval
        self._owner: User | None = None
        self._states: list[Event] = []
        self._entered_at = datetime.min.replace(tzinfo=UTC)
        self._progress: Event | None = None
        self._shown: TaskProgressEvent | None = None
        self._failure: BaseException | None = None
        self._opened = asyncio.Event()
        self.listeners = 0
        self.news = asyncio.Event()
        self.has_ended = False
        self.is_terminal = False
        self._task = asyncio.create_task(self._run(), name=f"watch {task_id}")

    @property
    def last_state(self) -> int:
        """Event id of the newest state, 0 before the first."""
        return self._states[-1].id.state if self._states else 0

    @property
    def is_stale(self) -> bool:
        """It ended, and not because the run did: another one is needed."""
        return self.has_ended and not self.is_terminal

    async def opened(self, user: User) -> None:
        """Wait until the states up to now are known.

        Raises:
            TaskNotFoundError: there is no such task, or it is not this user's.
            TemporalUnavailableError: no answer in time.
        """
        await self._opened.wait()
        if self._failure is not None:
            raise self._failure
        if self._owner != user:
            raise TaskNotFoundError

    def has_state(self, event_id: int) -> bool:
        """Whether a state of the run has this event id."""
        return any(event.id.state == event_id for event in self._states)

    def after(self, sent: EventId) -> Iterator[Event]:
        """What a client lacks: every state since, and the newest progress."""
        # A snapshot: new states may come in while a slow client takes these.
        for event in (*self._states, *([self._progress] if self._progress else [])):
            if event.id > sent:
                yield event

    def stop(self) -> None:
        """Nobody listens any more."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._open()
            self._opened.set()
            if not self.has_ended:
                async with asyncio.TaskGroup() as group:
                    looking = group.create_task(self._look())
                    await self._follow()
                    looking.cancel()
        except (TaskNotFoundError, TemporalUnavailableError) as error:
            self._failure = error
        except Exception as error:  # whoever listens must not hang on a bug here
            _log.exception("watch_failed", task_id=self._task_id)
            self._failure = error
        finally:
            self.has_ended = True
            self._opened.set()
            self._announce()

    async def _open(self) -> None:
        job = await self._jobs.describe(self._task_id)
        if job is None:
            raise TaskNotFoundError
        self._owner = job.request.user
        try:
            changes = await self._history.so_far()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise TaskNotFoundError from error
            raise
        for change in changes:
            await self._take(change, job)
        if not self.has_ended and job.closing is None:
            await self._show(job)

    async def _follow(self) -> None:
        async for change in self._history.follow(self.last_state):
            await self._take(change)
            self._announce()

    async def _look(self) -> None:
        """Describe the job from time to time; what cannot be read now is read the next time."""
        while True:
            await asyncio.sleep(self._interval.total_seconds())
            state = self.last_state
            try:
                job = await self._jobs.describe(self._task_id)
                # A state that came meanwhile is newer than what was described.
                if job is not None and job.closing is None and state == self.last_state and await self._show(job):
                    self._announce()
            except TemporalUnavailableError:
                continue

    async def _take(self, change: StateChange, job: Job | None = None) -> None:
        if change.status is None:
            await self._close(change, job)
            return
        self._add(
            change,
            TaskStateEvent(
                task_id=self._task_id,
                status=change.status,
                is_terminal=False,
                at=change.at,
                worker_id=change.worker_id,
            ),
        )

    async def _close(self, change: StateChange, job: Job | None) -> None:
        if job is None or job.closing is None:
            job = await self._described()
        self.has_ended = True
        if job is None or job.closing is None:
            # Deleted, or an operator's reset: another run has the id now, and clients come back for it.
            return
        outcome = outcome_of(job)
        self.is_terminal = True
        self._add(
            change,
            TaskStateEvent(
                task_id=self._task_id,
                status=outcome.status,
                is_terminal=True,
                at=change.at,
                worker_id=job.worker_id,
                error_code=outcome.error_code,
                error_message=outcome.error_message,
            ),
        )

    async def _described(self) -> Job | None:
        while True:
            try:
                return await self._jobs.describe(self._task_id)
            except TemporalUnavailableError:
                await asyncio.sleep(_PAUSE_SECONDS)

    def _add(self, change: StateChange, data: TaskStateEvent) -> None:
        self._states.append(encoded_event(STATE_EVENT, EventId(change.event_id), data))
        self._entered_at = change.at
        # It belongs to the state before.
        self._progress, self._shown = None, None

    async def _show(self, job: Job) -> bool:
        """Take the progress of a job; False when clients know it already."""
        state = self.last_state
        task = (await self._readings.of(job)).task
        shown = TaskProgressEvent(
            task_id=task.task_id,
            status=task.status,
            cancel_requested=task.cancel_requested,
            attempt=task.attempt,
            worker_id=task.worker_id,
            progress=task.progress,
            queue=task.queue,
        )
        if shown == self._shown or state != self.last_state or state == 0:
            return False
        since = int((time.time() - self._entered_at.timestamp()) * 1_000)
        before = self._progress.id.tick if self._progress else 0
        self._progress = encoded_event(PROGRESS_EVENT, EventId(state, max(since, before + 1)), shown)
        self._shown = shown
        return True

    def _announce(self) -> None:
        told, self.news = self.news, asyncio.Event()
        told.set()
