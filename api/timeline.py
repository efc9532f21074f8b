"""The way of a task: its states and attempts with their times, from the history of its run and its final record.

Nothing here needs a worker. The history has what happened and when; the record has what the run made of it, and the
description of the run what is going on right now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client
from temporalio.exceptions import ActivityError, FailureError
from temporalio.service import RPCError, RPCStatusCode

from api.auth import Caller
from api.jobs import Job
from api.problems import TaskNotFoundError
from api.readings import Readings
from api.task_history import state_change
from api.task_view import outcome_of
from api.temporal_calls import bounded
from api.timeline_schemas import AttemptState, TaskTimeline, TimelineAttempt, TimelineState
from workflows.contracts import GENERATE_CLIP
from workflows.failures import FailureCode, client_message, code_of_failure
from workflows.states import TaskStatus
from workflows.tasks import AttemptRecord, AttemptStarted, GenerateClipInput, GenerateClipResult, Progress

_ATTEMPT_STARTED: Final = "attempt_started"


@dataclass(kw_only=True)
class _Round:
    """One scheduled `generate_clip` as the history has it."""

    token: str
    number: int
    queued_at: datetime
    start: AttemptStarted | None = None
    taken_at: datetime | None = None
    """By the server's clock; in the history only when the round is over."""
    ended_at: datetime | None = None
    outcome: FailureCode | None = None
    message: str | None = None
    gpu_seconds: float = 0.0
    progress: Progress | None = None


@dataclass(kw_only=True)
class _Story:
    """What was read from the history."""

    states: list[tuple[TaskStatus, datetime]] = field(default_factory=list)
    rounds: list[_Round] = field(default_factory=list)


class Timelines:
    """Tells the way of tasks."""

    def __init__(self, client: Client, *, readings: Readings, call_limit: timedelta) -> None:
        self._client = client
        self._readings = readings
        self._limit = call_limit

    async def of(self, caller: Caller, task_id: str) -> TaskTimeline:
        """The timeline of the caller's task.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            TemporalUnavailableError: no answer in time.
        """
        job = await self._readings.fresh(caller, task_id)
        handle = self._client.get_workflow_handle(task_id)

        async def fetch() -> list[HistoryEvent]:
            return [event async for event in handle.fetch_history_events(skip_archival=True)]

        try:
            events = await bounded(fetch, limit=self._limit)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            raise TaskNotFoundError from None
        return _told(job, await _Reader(self._client).read(events), datetime.now(UTC))


class _Reader:
    """Reads a history event by event."""

    def __init__(self, client: Client) -> None:
        self._converter = client.data_converter
        self._story = _Story()
        self._by_event: dict[int, _Round] = {}
        self._task_at: datetime | None = None
        """Start of the last workflow task: the workflow's own `now` in all that it decided there."""
        self._start: AttemptStarted | None = None
        """The newest start that no state has followed yet."""

    async def read(self, events: Sequence[HistoryEvent]) -> _Story:
        for event in events:
            at = event.event_time.ToDatetime(tzinfo=UTC)
            match event.WhichOneof("attributes"):
                case "workflow_task_started_event_attributes":
                    self._task_at = at
                case "workflow_execution_signaled_event_attributes":
                    await self._signaled(event)
                case "activity_task_scheduled_event_attributes":
                    await self._scheduled(event, at)
                case "activity_task_started_event_attributes":
                    self._taken(event.activity_task_started_event_attributes.scheduled_event_id, at)
                case (
                    "activity_task_completed_event_attributes"
                    | "activity_task_failed_event_attributes"
                    | "activity_task_timed_out_event_attributes"
                    | "activity_task_canceled_event_attributes"
                ) as kind:
                    await self._ended(event, kind, at)
                case _:
                    self._state(event, at)
        return self._story

    def _state(self, event: HistoryEvent, at: datetime) -> None:
        change = state_change(event)
        if change is None or change.status is None:
            return
        entered_at = self._task_at or at
        if change.status is TaskStatus.PROCESSING and self._start is not None:
            # As the workflow counts it: from the start on the worker, not from the signal that told of it.
            entered_at, self._start = self._start.started_at, None
        states = self._story.states
        if states and states[-1][0] is change.status:
            return
        states.append((change.status, max(entered_at, states[-1][1]) if states else entered_at))

    async def _signaled(self, event: HistoryEvent) -> None:
        attributes = event.workflow_execution_signaled_event_attributes
        if attributes.signal_name != _ATTEMPT_STARTED:
            return
        [start] = await self._converter.decode(attributes.input.payloads, [AttemptStarted])
        running = self._story.rounds[-1] if self._story.rounds else None
        if running is not None and running.token == start.token and running.start is None:
            running.start = self._start = start

    async def _scheduled(self, event: HistoryEvent, at: datetime) -> None:
        attributes = event.activity_task_scheduled_event_attributes
        if attributes.activity_type.name != GENERATE_CLIP:
            return
        [given] = await self._converter.decode(attributes.input.payloads, [GenerateClipInput])
        scheduled = _Round(token=given.token, number=given.attempt, queued_at=at)
        self._by_event[event.event_id] = scheduled
        self._story.rounds.append(scheduled)

    def _taken(self, scheduled_event_id: int, at: datetime) -> None:
        if (taken := self._by_event.get(scheduled_event_id)) is not None:
            taken.taken_at = at

    async def _ended(self, event: HistoryEvent, kind: str, at: datetime) -> None:
        attributes = getattr(event, kind)
        ended = self._by_event.get(attributes.scheduled_event_id)
        if ended is None:
            return
        ended.ended_at = at
        if kind == "activity_task_completed_event_attributes":
            [result] = await self._converter.decode(attributes.result.payloads, [GenerateClipResult])
            ended.gpu_seconds = result.gpu_seconds
        elif kind == "activity_task_canceled_event_attributes":
            ended.outcome = FailureCode.CANCELED
        else:
            failure = await self._converter.decode_failure(attributes.failure)
            ended.outcome = _code(failure)
        if ended.outcome is not None:
            ended.message = client_message(ended.outcome)


def _code(failure: BaseException) -> FailureCode:
    """The code of a failed round, by the table that the workflow uses."""
    error = ActivityError(
        "",
        scheduled_event_id=0,
        started_event_id=0,
        identity="",
        activity_type=GENERATE_CLIP,
        activity_id="",
        retry_state=None,
    )
    error.__cause__ = failure if isinstance(failure, FailureError) else None
    return code_of_failure(error)


def _told(job: Job, story: _Story, now: datetime) -> TaskTimeline:
    status = outcome_of(job).status
    states = list(story.states)
    running_since = job.attempt.started_at if job.attempt else None
    if job.closing is None and status is TaskStatus.PROCESSING and running_since and states:
        if states[-1][0] is TaskStatus.QUEUED:
            # On a worker already; the signal waits for a control worker.
            states.append((status, max(running_since, states[-1][1])))
    elif job.closing is not None and (not states or states[-1][0] is not status):
        # Ended from outside: no code of the workflow ran to say so.
        states.append((status, job.closed_at or now))
    records = {record.token: record for record in job.record.attempts} if job.record else {}
    for found in story.rounds:
        _settle(found, records.get(found.token), job)
    attempts = [_attempt(found, now) for found in story.rounds]
    return TaskTimeline(
        task_id=job.request.task_id,
        status=status,
        is_terminal=job.closing is not None,
        created_at=job.request.accepted_at,
        gpu_seconds=round(sum(attempt.gpu_seconds for attempt in attempts), 3),
        states=_stretches(states, None if job.closing is not None else now),
        attempts=attempts,
    )


def _stretches(states: Sequence[tuple[TaskStatus, datetime]], now: datetime | None) -> list[TimelineState]:
    ends = [at for _, at in states[1:]]
    return [
        TimelineState(
            status=status,
            entered_at=entered_at,
            left_at=left_at,
            duration_seconds=_seconds(entered_at, end) if (end := left_at or now) else None,
        )
        for (status, entered_at), left_at in zip(states, [*ends, None], strict=True)
    ]


def _settle(found: _Round, record: AttemptRecord | None, job: Job) -> None:
    """Fill in how a round ended; where the run has written its own account of it, that one counts."""
    if record is not None:
        found.ended_at, found.outcome, found.message = record.ended_at, record.outcome, record.message
        found.gpu_seconds = record.gpu_seconds
    elif found.ended_at is None and job.closing is not None:
        found.ended_at, found.outcome = job.closed_at, outcome_of(job).error_code
        found.message = client_message(found.outcome) if found.outcome else None
    elif found.ended_at is None and job.attempt is not None:
        found.taken_at, found.progress = job.attempt.started_at, job.attempt.progress
        found.gpu_seconds = found.progress.gpu_seconds if found.progress else 0.0


def _attempt(found: _Round, now: datetime) -> TimelineAttempt:
    started_at = found.start.started_at if found.start else found.taken_at
    worker_id = found.progress.worker_id if found.progress else None
    return TimelineAttempt(
        number=found.number,
        state=_attempt_state(started_at, found.ended_at, found.outcome),
        worker_id=found.start.worker_id if found.start else worker_id,
        worker_version=found.start.worker_version if found.start else None,
        queued_at=found.queued_at,
        started_at=started_at,
        ended_at=found.ended_at,
        queue_seconds=_seconds(found.queued_at, started_at or found.ended_at or now),
        duration_seconds=_seconds(started_at, found.ended_at or now) if started_at else None,
        gpu_seconds=round(found.gpu_seconds, 3),
        reason=found.outcome,
        message=found.message,
    )


def _attempt_state(started_at: datetime | None, ended_at: datetime | None, outcome: FailureCode | None) -> AttemptState:
    if ended_at is None:
        return "queued" if started_at is None else "running"
    return "published" if outcome is None else "ended"


def _seconds(begin: datetime, end: datetime) -> float:
    """Between two clocks; one that is behind is never counted as negative time."""
    return round(max(0.0, (end - begin).total_seconds()), 3)
