"""The life of one task.

`GenerationWorkflow` owns everything that scanners, heartbeat tables and compensation scripts do elsewhere: queue
timeouts, retries, the deadline, both kinds of cancel and the start of the callback.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ApplicationErrorCategory,
    FailureError,
    is_cancelled_exception,
)
from temporalio.exceptions import TimeoutError as ActivityTimeoutError

with workflow.unsafe.imports_passed_through():
    from workflows import naming
    from workflows.attempt_budget import AttemptBudget
    from workflows.contracts import ArtifactActivities, GenerationActivities
    from workflows.failures import FAILURE_CLASSES, FailureCode, client_message, code_of_failure
    from workflows.outbox import start_callback, subscribed
    from workflows.policies import start_to_close
    from workflows.states import TaskStatus
    from workflows.task_ledger import TaskLedger
    from workflows.tasks import (
        AdmissionPlace,
        Artifact,
        AttemptRecord,
        AttemptStarted,
        CancelMode,
        FindArtifactInput,
        GenerateClipInput,
        GenerateClipResult,
        GenerationInput,
        RemoveArtifactsInput,
        SoftCancelReply,
        TaskRecord,
    )

_STORE_TRY = timedelta(seconds=10)
_STORE_PATIENCE = timedelta(seconds=20)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How one round ended."""

    artifact: Artifact | None = None
    failure: FailureCode | None = None
    """None with no artifact: the round was stopped on our own request."""
    detail: str | None = None
    gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How the task ends."""

    status: TaskStatus
    artifact: Artifact | None = None
    code: FailureCode | None = None
    message: str | None = None


@workflow.defn(name="GenerationWorkflow")
class GenerationWorkflow:
    """One task, one run, from QUEUED to a terminal state.

    Command order of a plain task: deadline timer and `generate_clip`; on `attempt_started` the search attributes;
    at the end, in one workflow task, memo `record`, search attributes and the start of the CallbackWorkflow; then
    `release` to each admission workflow; then the run closes: Completed for SUCCEEDED, Canceled after a
    Temporal cancel, Failed with type = error code for everything else.

    Nothing cancels the life of a task: a Temporal cancel, a soft cancel and the deadline only set flags, which
    `_life` acts on itself. Awaited directly, a cancel can land between any two of the closing commands and
    leave a task whose state, callback and artifact disagree.
    """

    @workflow.init
    def __init__(self, plan: GenerationInput) -> None:
        self._plan = plan
        self._ledger = TaskLedger(plan, workflow.info().workflow_start_time)
        self._budget = AttemptBudget(max_attempts=plan.limits.max_attempts, max_requeues=plan.limits.max_requeues)
        self._hard = False
        self._soft = False
        self._deadline_due = False
        self._ended = False
        self._token = ""
        self._start: AttemptStarted | None = None
        self._unclean_tokens: list[str] = []

    @workflow.run
    async def run(self, plan: GenerationInput) -> TaskRecord:
        """Run the task; the result is the same record as the memo, which is what readers use."""
        life = asyncio.create_task(self._life())
        try:
            record = await asyncio.shield(life)
        except asyncio.CancelledError:
            self._hard = True
            record = await life
        if record.status is TaskStatus.SUCCEEDED:
            return record
        # By what the record says: a cancel that came after it was written has lost.
        if record.status is TaskStatus.CANCELED and record.cancel_requested is CancelMode.HARD:
            raise asyncio.CancelledError
        raise ApplicationError(
            record.error_message or record.status,
            type=record.error_code,
            non_retryable=True,
            category=(
                ApplicationErrorCategory.BENIGN
                if record.status is TaskStatus.CANCELED
                else ApplicationErrorCategory.UNSPECIFIED
            ),
        )

    @workflow.signal(name="attempt_started")
    def attempt_started(self, start: AttemptStarted) -> None:
        """An attempt runs on a worker. A token of an earlier round is a late attempt: it changes nothing."""
        if start.token != self._token or self._start is not None or self._ended:
            return
        self._start = start
        self._ledger.note_start(start)
        self._enter(TaskStatus.PROCESSING, start.started_at)

    @workflow.update(name="cancel_soft")
    def cancel_soft(self) -> SoftCancelReply:
        """Show CANCELED now and let the running attempt end; its clip is kept."""
        if self._ended:
            return SoftCancelReply.ENDED
        if self._hard or self._soft:
            return SoftCancelReply.ACCEPTED
        if self._ledger.status is not TaskStatus.PROCESSING:
            return SoftCancelReply.NOT_STARTED
        self._soft = True
        self._enter(TaskStatus.CANCELED, workflow.now())
        return SoftCancelReply.ACCEPTED

    @workflow.update(name="revive")
    def revive(self) -> bool:
        """Take a soft cancel back while the generation still runs. False: too late, a new task is needed."""
        if self._ended or self._hard or not self._soft:
            return False
        self._soft = False
        self._enter(TaskStatus.PROCESSING, workflow.now())
        return True

    async def _life(self) -> TaskRecord:
        deadline = asyncio.create_task(self._watch_deadline())
        ending = await self._generate()
        deadline.cancel()
        if self._hard and ending.status is TaskStatus.CANCELED:
            ending = self._without_own_clip(ending)
        await self._remove_leftovers(ending.artifact)
        return await self._end(ending)

    async def _watch_deadline(self) -> None:
        await workflow.sleep(self._plan.limits.deadline_seconds, summary="deadline")
        self._deadline_due = True

    def _must_stop(self) -> bool:
        return self._hard or self._deadline_due

    async def _generate(self) -> _Ending:
        """The attempt loop: one activity per round, every outcome looked up in the class table."""
        if self._plan.retry_of is not None and (found := await self._find_artifact()) is not None:
            return self._published(found)
        while not self._must_stop():
            outcome = await self._attempt()
            if outcome.artifact is not None:
                return self._published(outcome.artifact)
            if self._must_stop() or self._soft:
                break
            failure = outcome.failure or FailureCode.INTERNAL
            next_round = self._budget.next_round(failure, workflow.random())
            if next_round is None:
                message = client_message(failure, outcome.detail)
                return _Ending(status=FAILURE_CLASSES[failure].status, code=failure, message=message)
            if self._ledger.status is TaskStatus.PROCESSING:
                self._enter(TaskStatus.QUEUED, workflow.now())
            workflow.upsert_memo({naming.MEMO_RECORD: self._record()})
            if next_round.delay_seconds > 0:
                await self._pause(next_round.delay_seconds)
        return self._stopped()

    def _published(self, artifact: Artifact) -> _Ending:
        """Any published artifact is success, except under a soft cancel that was not revived."""
        if self._soft:
            return replace(self._stopped(), artifact=artifact)
        return _Ending(status=TaskStatus.SUCCEEDED, artifact=artifact)

    def _stopped(self) -> _Ending:
        code = FailureCode.CANCELED if self._hard or self._soft else FailureCode.DEADLINE_EXCEEDED
        return _Ending(status=FAILURE_CLASSES[code].status, code=code, message=client_message(code))

    def _without_own_clip(self, ending: _Ending) -> _Ending:
        """A hard cancel after a soft one leaves nothing behind, unless the clip is another task's."""
        if ending.artifact is None or all(a.token != ending.artifact.token for a in self._ledger.attempts):
            return ending
        self._unclean_tokens.append(ending.artifact.token)
        return replace(ending, artifact=None)

    async def _pause(self, seconds: float) -> None:
        try:
            await workflow.wait_condition(self._must_stop, timeout=seconds, timeout_summary="before the next attempt")
        except TimeoutError:
            return

    async def _attempt(self) -> _Outcome:
        """One round: schedule the activity once, wait for its end or for a reason to stop it."""
        plan, limits = self._plan, self._plan.limits
        number = 1 + sum(a.outcome is not FailureCode.QUEUE_TIMEOUT for a in self._ledger.attempts)
        self._token = workflow.uuid4().hex
        self._start = None
        scheduled_at = workflow.now()
        handle = workflow.start_activity_method(
            GenerationActivities.generate_clip,
            GenerateClipInput(
                task_id=plan.task_id,
                token=self._token,
                attempt=number,
                parameters=plan.parameters,
                model_revision=plan.model_revision,
                artifact_key=plan.artifact_key,
                limits=limits,
            ),
            activity_id=self._token,
            task_queue=naming.gpu_queue(plan.pool),
            schedule_to_start_timeout=timedelta(seconds=limits.queue_timeout_seconds),
            start_to_close_timeout=start_to_close(limits),
            heartbeat_timeout=timedelta(seconds=limits.heartbeat_timeout_seconds),
            # The loop counts, not the server: shutdowns and queue timeouts would cost attempts there.
            retry_policy=RetryPolicy(maximum_attempts=1),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            priority=Priority(
                priority_key=naming.requeued_priority(naming.PRIORITY_KEYS[plan.priority], self._budget.requeues),
                fairness_key=naming.user_hash(plan.user),
                fairness_weight=plan.fairness_weight,
            ),
            summary=f"attempt {number}",
        )
        outcome = await self._outcome_of(handle)
        self._note_attempt(number, scheduled_at, outcome)
        return outcome

    async def _outcome_of(self, handle: workflow.ActivityHandle[GenerateClipResult]) -> _Outcome:
        """The end of a round; a result is looked at first, whatever was asked meanwhile."""
        await workflow.wait_condition(lambda: handle.done() or self._must_stop())
        if not handle.done():
            handle.cancel()
        try:
            result = await handle
        except asyncio.CancelledError:
            return _Outcome(gpu_seconds=self._elapsed_seconds())
        except ActivityError as error:
            if is_cancelled_exception(error) and self._must_stop():
                return _Outcome(gpu_seconds=self._elapsed_seconds())
            if isinstance(error.cause, ActivityTimeoutError) and self._start is not None:
                # Nobody heard from this attempt at its end: it may have published.
                self._unclean_tokens.append(self._token)
            detail = error.cause.message if isinstance(error.cause, ApplicationError) else None
            return _Outcome(failure=code_of_failure(error), detail=detail, gpu_seconds=_reported_gpu_seconds(error))
        return _Outcome(artifact=result.artifact, gpu_seconds=result.gpu_seconds)

    def _elapsed_seconds(self) -> float:
        """A stopped attempt reports nothing; the time since its start bounds the GPU seconds it used."""
        return (workflow.now() - self._start.started_at).total_seconds() if self._start is not None else 0.0

    def _note_attempt(self, number: int, scheduled_at: datetime, outcome: _Outcome) -> None:
        start, failure = self._start, outcome.failure
        if outcome.artifact is None and failure is None:
            failure = self._stopped().code
        self._ledger.note_attempt(
            AttemptRecord(
                number=number,
                token=self._token,
                queued_at=start.queued_at if start else scheduled_at,
                started_at=start.started_at if start else None,
                ended_at=workflow.now(),
                worker_id=start.worker_id if start else None,
                worker_version=start.worker_version if start else None,
                outcome=failure,
                message=client_message(failure, outcome.detail) if failure else None,
                gpu_seconds=outcome.gpu_seconds,
            )
        )
        self._token = ""

    async def _find_artifact(self) -> Artifact | None:
        """Look for the clip before entering a GPU queue; on trouble the attempt itself looks again."""
        handle = workflow.start_activity_method(
            ArtifactActivities.find_artifact,
            FindArtifactInput(artifact_key=self._plan.artifact_key),
            task_queue=naming.CONTROL_QUEUE,
            start_to_close_timeout=_STORE_TRY,
            schedule_to_close_timeout=_STORE_PATIENCE,
        )
        await workflow.wait_condition(lambda: handle.done() or self._must_stop())
        if not handle.done():
            handle.cancel()
        try:
            return await handle
        except (ActivityError, asyncio.CancelledError):
            return None

    async def _remove_leftovers(self, winner: Artifact | None) -> None:
        """Remove what lost attempts may have published, so that nobody can reach it; retention gets the rest."""
        tokens = tuple(t for t in self._unclean_tokens if winner is None or t != winner.token)
        if not tokens:
            return
        try:
            await workflow.execute_activity_method(
                ArtifactActivities.remove_artifacts,
                RemoveArtifactsInput(artifact_key=self._plan.artifact_key, tokens=tokens),
                task_queue=naming.CONTROL_QUEUE,
                start_to_close_timeout=_STORE_TRY,
                schedule_to_close_timeout=_STORE_PATIENCE,
            )
        except ActivityError:
            workflow.logger.warning("leftovers_kept", extra={"task_id": self._plan.task_id})

    async def _end(self, ending: _Ending) -> TaskRecord:
        """Record, status and callback in one workflow task; then give the places back."""
        plan, now = self._plan, workflow.now()
        if self._hard and ending.artifact is None:
            # The cancel came while leftovers were removed.
            ending = self._stopped()
        self._ended = True
        calls_back = subscribed(plan.callback, ending.status)
        if self._ledger.status is not ending.status:
            self._move(ending.status, now)
        record = replace(
            self._record(),
            finished_at=now,
            artifact=ending.artifact,
            error_code=ending.code,
            error_message=ending.message,
            callback_started=calls_back,
        )
        workflow.upsert_memo({naming.MEMO_RECORD: record})
        workflow.upsert_search_attributes(
            [
                naming.TASK_STATUS.value_set(record.status),
                naming.FINISHED_AT.value_set(now),
                *([naming.ERROR_CODE.value_set(ending.code)] if ending.code else []),
            ]
        )
        if calls_back and plan.callback is not None:
            await start_callback(plan, plan.callback, record)
        for place in plan.places:
            await self._release(place, record)
        return record

    async def _release(self, place: AdmissionPlace, record: TaskRecord) -> None:
        try:
            await workflow.get_external_workflow_handle(place.admission_id).signal(
                "release", args=[record.task_id, place.token, record.gpu_seconds]
            )
        except FailureError:
            # Already closed: it forgot the place with everything else.
            workflow.logger.debug("admission_gone", extra={"task_id": record.task_id})

    def _enter(self, status: TaskStatus, at: datetime) -> None:
        """Move and show it where a reader needs no worker."""
        self._move(status, at)
        shown = [naming.TASK_STATUS.value_set(status)]
        if status is TaskStatus.PROCESSING and self._ledger.worker_id is not None:
            shown.append(naming.WORKER_ID.value_set(self._ledger.worker_id))
        workflow.upsert_search_attributes(shown)

    def _move(self, status: TaskStatus, at: datetime) -> None:
        source = self._ledger.enter(status, at)
        workflow.logger.info(
            "task_transition",
            extra={
                "task_id": self._plan.task_id,
                "user_id": naming.user_hash(self._plan.user),
                "status": status.value,
                "from_status": source.value,
                "attempt": len(self._ledger.attempts) + (1 if self._token else 0),
                "worker_id": self._ledger.worker_id,
            },
        )

    def _record(self) -> TaskRecord:
        return replace(
            self._ledger.record(at=workflow.now(), retries=self._budget.retries, requeues=self._budget.requeues),
            cancel_requested=CancelMode.HARD if self._hard else CancelMode.SOFT if self._soft else None,
        )


def _reported_gpu_seconds(error: ActivityError) -> float:
    """GPU seconds of a failed attempt: from its failure detail, or from its last heartbeat."""
    cause = error.cause
    details: object = None
    if isinstance(cause, ApplicationError) and cause.details:
        details = cause.details[0]
    elif isinstance(cause, ActivityTimeoutError) and cause.last_heartbeat_details:
        details = cause.last_heartbeat_details[0]
    seconds = details.get("gpu_seconds") if isinstance(details, dict) else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0
