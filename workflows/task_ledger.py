"""What a run knows about its task: state, time spent in each state, attempts. Pure bookkeeping, no commands."""

from __future__ import annotations

from datetime import datetime

from workflows.states import TaskStatus, move
from workflows.tasks import AttemptRecord, AttemptStarted, GenerationInput, TaskRecord

MAX_RECORDED_ATTEMPTS = 50
"""A task may wait out its deadline on workers that are not ready; the record keeps the latest rounds."""


class TaskLedger:
    """The account of one task.

    Args:
        plan: the accepted request.
        queued_at: when the run started.
    """

    def __init__(self, plan: GenerationInput, queued_at: datetime) -> None:
        self._plan = plan
        self._queued_at = queued_at
        self._entered_at = queued_at
        self._durations: dict[str, float] = {}
        self._started_at: datetime | None = None
        self._gpu_seconds = 0.0
        self.status = TaskStatus.QUEUED
        self.worker_id: str | None = None
        self.attempts: list[AttemptRecord] = []

    def enter(self, status: TaskStatus, at: datetime) -> TaskStatus:
        """Move to `status` and return the state left.

        Args:
            status: the new state.
            at: when it was entered; a worker's clock may be behind ours, never counted as negative time.

        Raises:
            IllegalTransitionError: the transition table does not have this move.
        """
        source, self.status = self.status, move(self.status, status)
        spent = max(0.0, (at - self._entered_at).total_seconds())
        self._durations[source] = self._durations.get(source, 0.0) + spent
        self._entered_at = max(at, self._entered_at)
        return source

    def note_start(self, start: AttemptStarted) -> None:
        """A worker runs an attempt."""
        self.worker_id = start.worker_id
        self._started_at = self._started_at or start.started_at

    def note_attempt(self, attempt: AttemptRecord) -> None:
        """A round ended."""
        self.attempts.append(attempt)
        self._gpu_seconds += attempt.gpu_seconds

    def record(self, *, at: datetime, retries: int, requeues: int) -> TaskRecord:
        """The record as of `at`, without how the task ends."""
        return TaskRecord(
            task_id=self._plan.task_id,
            status=self.status,
            created_at=self._plan.accepted_at,
            queued_at=self._queued_at,
            started_at=self._started_at,
            updated_at=at,
            durations=dict(self._durations),
            attempts=tuple(self.attempts[-MAX_RECORDED_ATTEMPTS:]),
            attempt_count=sum(a.started_at is not None for a in self.attempts),
            retry_count=retries,
            requeue_count=requeues,
            gpu_seconds=self._gpu_seconds,
            worker_id=self.worker_id,
        )
