"""A workflow that makes one attempt and keeps the signals: only what the sandbox allows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from workflows.contracts import GenerationActivities
    from workflows.tasks import AttemptStarted, GenerateClipInput, GenerateClipResult


@dataclass(frozen=True, kw_only=True)
class OneAttempt:
    """What the workflow is told to do."""

    attempt: GenerateClipInput
    queue: str
    activity_id: str
    priority: int = 3


@workflow.defn(name="OneAttemptWorkflow")
class OneAttemptWorkflow:
    """Schedules `generate_clip` once, as a round of the real workflow does, and keeps the signals."""

    def __init__(self) -> None:
        self._started: list[AttemptStarted] = []

    @workflow.run
    async def run(self, asked: OneAttempt) -> GenerateClipResult:
        return await workflow.execute_activity_method(
            GenerationActivities.generate_clip,
            asked.attempt,
            activity_id=asked.activity_id,
            task_queue=asked.queue,
            start_to_close_timeout=timedelta(seconds=120),
            heartbeat_timeout=timedelta(seconds=asked.attempt.limits.heartbeat_timeout_seconds),
            retry_policy=RetryPolicy(maximum_attempts=1),
            cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            priority=Priority(priority_key=asked.priority),
        )

    @workflow.signal(name="attempt_started")
    def attempt_started(self, started: AttemptStarted) -> None:
        self._started.append(started)

    @workflow.query
    def started(self) -> list[AttemptStarted]:
        return self._started
