"""Series of a control worker: the tasks whose runs closed there, their attempts, times and GPU seconds."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from workflows.failures import FAILURE_CLASSES, FailureCode
from workflows.states import TaskStatus
from workflows.tasks import AttemptRecord, TaskRecord

STATE_BUCKETS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 420, 600, 900, 1800)
"""Seconds; a task may wait 3 x 3 minutes and has 30 minutes in all."""
PUBLISHED: Final = "PUBLISHED"
"""Outcome of an attempt that made a clip."""


class TaskMetrics:
    """Hears of every task that ended: `note` is the hook of `EndedRuns`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tasks = Counter(
            "reelgate_tasks_ended", "Tasks by terminal state.", ["status", "error_code"], registry=registry
        )
        self._states = Histogram(
            "reelgate_task_state_seconds",
            "Time that an ended task spent in a state, over all its attempts.",
            ["state"],
            buckets=STATE_BUCKETS,
            registry=registry,
        )
        self._attempts = Counter("reelgate_attempts_ended", "Attempts of ended tasks.", ["outcome"], registry=registry)
        self._gpu_seconds = Counter(
            "reelgate_gpu_seconds",
            "GPU seconds of ended tasks, by what they were good for.",
            ["outcome"],
            registry=registry,
        )
        self._show_zeros()

    def _show_zeros(self) -> None:
        """The first failure of a kind is an increase only if there was a zero before it."""
        self._tasks.labels(TaskStatus.SUCCEEDED, "")
        for code, row in FAILURE_CLASSES.items():
            self._tasks.labels(row.status, code)
            self._attempts.labels(code)
        self._attempts.labels(PUBLISHED)
        for outcome in ("useful", "failed", "canceled"):
            self._gpu_seconds.labels(outcome)
        for state in (TaskStatus.QUEUED, TaskStatus.PROCESSING):
            self._states.labels(state)

    def note(self, record: TaskRecord) -> None:
        """Count a task that ended."""
        self._tasks.labels(record.status, record.error_code or "").inc()
        for state in (TaskStatus.QUEUED, TaskStatus.PROCESSING):
            if state in record.durations:
                self._states.labels(state).observe(record.durations[state])
        for attempt in record.attempts:
            self._attempts.labels(attempt.outcome or PUBLISHED).inc()
            self._gpu_seconds.labels(gpu_outcome(record, attempt)).inc(attempt.gpu_seconds)
        # The record keeps the latest attempts only; what is left out failed, or a later one would not have begun.
        left_out = record.gpu_seconds - sum(attempt.gpu_seconds for attempt in record.attempts)
        self._gpu_seconds.labels("failed").inc(max(0.0, left_out))


def gpu_outcome(record: TaskRecord, attempt: AttemptRecord) -> str:
    """What the GPU seconds of an attempt were good for: `useful`, `failed` or `canceled`."""
    if attempt.outcome is None:
        return "useful" if record.status is TaskStatus.SUCCEEDED else "canceled"
    return "canceled" if attempt.outcome is FailureCode.CANCELED else "failed"
