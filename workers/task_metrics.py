"""Counts tasks and callbacks where their end is known: when the run of their workflow closes.

An interceptor, so that no workflow knows of metrics and no command changes. It reads the final record from the memo
of the run that closes and hands it out of the sandbox. A replay counts nothing; a last workflow task that is done
again by this process (it was refused, or its answer was late) is told by its run id. A terminated run runs no code,
so nobody counts it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from temporalio import workflow
from temporalio.worker import (
    ExecuteWorkflowInput,
    Interceptor,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
)

from workflows.failures import FAILURE_CLASSES, FailureCode
from workflows.naming import MEMO_RECORD
from workflows.states import TaskStatus
from workflows.tasks import AttemptRecord, CallbackRecord, CallbackStatus, TaskRecord

STATE_BUCKETS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 420, 600, 900, 1800)
"""Seconds; a task may wait 3 x 3 minutes and has 30 minutes in all."""
PUBLISHED: Final = "PUBLISHED"
"""Outcome of an attempt that made a clip."""

_EXTERN: Final = "__reelgate_run_ended"
_REMEMBERED_RUNS: Final = 10_000
_CALLBACK_ENDS: Final = frozenset({CallbackStatus.SUCCEEDED, CallbackStatus.FAILED})

Ended = TaskRecord | CallbackRecord


class TaskMetrics:
    """Series of a control worker."""

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
        self._callbacks = Counter(
            "reelgate_callbacks_ended", "Callbacks that were delivered or given up.", ["status"], registry=registry
        )
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
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
        for status in _CALLBACK_ENDS:
            self._callbacks.labels(status)

    def note(self, run_id: str, record: Ended) -> None:
        """Count what ended, once per run."""
        # Called on the threads that run workflow tasks.
        with self._lock:
            if run_id in self._counted:
                return
            self._counted[run_id] = None
            if len(self._counted) > _REMEMBERED_RUNS:
                self._counted.popitem(last=False)
        if isinstance(record, CallbackRecord):
            self._callbacks.labels(record.status).inc()
        else:
            self._note_task(record)

    def _note_task(self, record: TaskRecord) -> None:
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


class EndedRuns(Interceptor):
    """Tells of every run of a task or a callback that closes in this worker."""

    def __init__(self, note: Callable[[str, Ended], None]) -> None:
        self._note = note

    def workflow_interceptor_class(self, input: WorkflowInterceptorClassInput) -> type[WorkflowInboundInterceptor]:  # noqa: A002 - the SDK's name
        """The part inside the sandbox; `note` is called outside of it."""
        input.unsafe_extern_functions[_EXTERN] = self._note
        return _EndedRun


class _EndedRun(WorkflowInboundInterceptor):
    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002, ANN401 - the SDK's signature
        """Run, and tell when the run closes. An eviction and a continue-as-new are other kinds of exceptions."""
        try:
            result = await super().execute_workflow(input)
        except (Exception, asyncio.CancelledError):
            self._tell()
            raise
        self._tell()
        return result

    def _tell(self) -> None:
        kind = _RECORDS.get(workflow.info().workflow_type)
        if kind is None or workflow.unsafe.is_replaying():
            return
        record = workflow.memo_value(MEMO_RECORD, None, type_hint=kind)
        if record is not None and _is_final(record):
            note = cast("Callable[[str, Ended], None]", workflow.extern_functions()[_EXTERN])
            note(workflow.info().run_id, record)


_RECORDS: Final[Mapping[str, type[Ended]]] = {"GenerationWorkflow": TaskRecord, "CallbackWorkflow": CallbackRecord}


def _is_final(record: Ended) -> bool:
    if isinstance(record, CallbackRecord):
        return record.status in _CALLBACK_ENDS
    finished: datetime | None = record.finished_at
    return finished is not None
