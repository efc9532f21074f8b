"""The life of one task.

`GenerationWorkflow` owns everything that scanners, heartbeat tables and compensation scripts do elsewhere: queue
timeouts, retries, the deadline, both kinds of cancel and the start of the callback.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

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
    import workflows.naming as naming
    from workflows.attempt_budget import AttemptBudget
    from workflows.contracts import ArtifactActivities, GenerationActivities
    from workflows.failures import FAILURE_CLASSES, FailureCode, client_message, code_of_failure
    from workflows.outbox import start_callback, subscribed
    from workflows.outcomes import Ending, RoundOutcome
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

_Result = TypeVar("_Result")

_STORE_TRY = timedelta(seconds=10)
_STORE_PATIENCE = timedelta(seconds=20)


@workflow.defn(name="GenerationWorkflow")
class GenerationWorkflow:
    """One task, one run, from QUEUED to a terminal state.

    Command order of a plain task: deadline timer and `generate_clip`; on `attempt_started` the search attributes;
    at the end, in one workflow task, memo `record`, search attributes, the start of the CallbackWorkflow and
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
        self._removed_tokens: list[str] = []
        self._outcome: RoundOutcome | None = None
        """How the generation ended; what the task ends as, a cancel or a revive can change until it has ended."""

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
        if self._outcome is not None and self._outcome.artifact is None:
            # The generation has ended without a clip, only leftovers are being removed.
            return False
        self._soft = False
        self._enter(TaskStatus.PROCESSING, workflow.now())
        return True

    async def _life(self) -> TaskRecord:
        deadline = asyncio.create_task(self._watch_deadline())
        outcome = self._outcome = await self._generate()
        deadline.cancel()
        # What comes while leftovers are removed still counts, so the ending is asked for anew.
        while tokens := self._leftovers(outcome, self._ending(outcome)):
            await self._remove(tokens)
        return await self._end(self._ending(outcome))

    async def _watch_deadline(self) -> None:
        await workflow.sleep(self._plan.limits.deadline_seconds, summary="deadline")
        self._deadline_due = True

    def _must_stop(self) -> bool:
        return self._hard or self._deadline_due

    async def _generate(self) -> RoundOutcome:
        """The attempt loop: one activity per round, every outcome looked up in the class table."""
        if self._plan.retry_of is not None and (found := await self._find_artifact()) is not None:
            return RoundOutcome(artifact=found)
        while not self._must_stop():
            outcome = await self._attempt()
            if outcome.artifact is not None:
                return outcome
            if self._must_stop() or self._soft:
                break
            failure = outcome.failure or FailureCode.INTERNAL
            next_round = self._budget.next_round(failure, workflow.random())
            if next_round is None:
                return replace(outcome, failure=failure)
            if self._ledger.status is TaskStatus.PROCESSING:
                self._enter(TaskStatus.QUEUED, workflow.now())
            workflow.upsert_memo({naming.MEMO_RECORD: self._record()})
            if next_round.delay_seconds > 0:
                await self._pause(next_round.delay_seconds)
        return RoundOutcome()

    def _ending(self, outcome: RoundOutcome) -> Ending:
        """What the task ends as if it ends now.

        Any published artifact is success, except under a soft cancel that was not revived: that one keeps it, unless
        a hard cancel came after it. Without an artifact a cancel wins over a failure.
        """
        artifact, failure = outcome.artifact, outcome.failure
        if artifact is not None and not self._soft:
            return Ending(status=TaskStatus.SUCCEEDED, artifact=artifact)
        if failure is not None and not self._soft and not self._hard:
            message = client_message(failure, outcome.detail)
            return Ending(status=FAILURE_CLASSES[failure].status, code=failure, message=message)
        if artifact is not None and self._hard and self._made(artifact):
            artifact = None
        return replace(self._stopped(), artifact=artifact)

    def _stopped(self) -> Ending:
        code = FailureCode.CANCELED if self._hard or self._soft else FailureCode.DEADLINE_EXCEEDED
        return Ending(status=FAILURE_CLASSES[code].status, code=code, message=client_message(code))

    def _made(self, artifact: Artifact) -> bool:
        """Whether the clip is ours. One that was found is another task's, and stays."""
        return any(attempt.token == artifact.token for attempt in self._ledger.attempts)

    async def _pause(self, seconds: float) -> None:
        try:
            await workflow.wait_condition(self._must_stop, timeout=seconds, timeout_summary="before the next attempt")
        except TimeoutError:
            return

    async def _attempt(self) -> RoundOutcome:
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

    async def _outcome_of(self, handle: workflow.ActivityHandle[GenerateClipResult]) -> RoundOutcome:
        """The end of a round; a result is looked at first, whatever was asked meanwhile."""
        try:
            result = await self._done_or_stopped(handle)
        except asyncio.CancelledError:
            return RoundOutcome(gpu_seconds=self._elapsed_seconds())
        except ActivityError as error:
            if is_cancelled_exception(error) and self._must_stop():
                return RoundOutcome(gpu_seconds=self._elapsed_seconds())
            if isinstance(error.cause, ActivityTimeoutError) and self._start is not None:
                # Nobody heard from this attempt at its end: it may have published.
                self._unclean_tokens.append(self._token)
            detail = error.cause.message if isinstance(error.cause, ApplicationError) else None
            return RoundOutcome(failure=code_of_failure(error), detail=detail, gpu_seconds=_reported_gpu_seconds(error))
        return RoundOutcome(artifact=result.artifact, gpu_seconds=result.gpu_seconds)

    async def _done_or_stopped(self, handle: workflow.ActivityHandle[_Result]) -> _Result:
        """The result of an activity, which is told to stop when the task has to."""
        await workflow.wait_condition(lambda: handle.done() or self._must_stop())
        if not handle.done():
            handle.cancel()
        return await handle

    def _elapsed_seconds(self) -> float:
        """A stopped attempt reports nothing; the time since its start bounds the GPU seconds it used."""
        return (workflow.now() - self._start.started_at).total_seconds() if self._start is not None else 0.0

    def _note_attempt(self, number: int, scheduled_at: datetime, outcome: RoundOutcome) -> None:
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
        try:
            return await self._done_or_stopped(handle)
        except (ActivityError, asyncio.CancelledError):
            return None

    def _leftovers(self, outcome: RoundOutcome, ending: Ending) -> tuple[str, ...]:
        """What lost attempts may have published, and a clip of ours that is not kept; less what was removed."""
        kept = {*self._removed_tokens, *([ending.artifact.token] if ending.artifact is not None else [])}
        made = [outcome.artifact.token] if outcome.artifact is not None and self._made(outcome.artifact) else []
        return tuple(token for token in [*self._unclean_tokens, *made] if token not in kept)

    async def _remove(self, tokens: tuple[str, ...]) -> None:
        """Remove what attempts have published, so that nobody can reach it; retention gets the rest."""
        self._removed_tokens.extend(tokens)
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

    async def _end(self, ending: Ending) -> TaskRecord:
        """Record, status, callback and the release of the places in one workflow task."""
        plan, now = self._plan, workflow.now()
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
        # The callback's start is not waited for before the places go: both leave with the record.
        releases = [asyncio.create_task(self._release(place, record)) for place in plan.places]
        if calls_back and plan.callback is not None:
            await start_callback(plan, plan.callback, record)
        await asyncio.gather(*releases)
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
