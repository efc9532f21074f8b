"""What a rollout does to a deployment and what it sees: shares, promotion, rollback, and the counts of each version.

Counted are tasks by the records that they leave in their memos, each once, in the look whose time span holds its
end. Attempts name the version that ran them; a version's build id is the same in a record and in the deployment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio import activity
from temporalio.client import Client, WorkflowExecution
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.deployments import UNVERSIONED, DeploymentNotFoundError, WorkerDeployment
from workflows.canary_rule import NOT_THE_WORKERS_FAULT, Tally, compare, one_delay
from workflows.contracts import (
    BEGIN_ROLLOUT,
    OBSERVE_ROLLOUT,
    SET_CANARY_SHARE,
    SETTLE_ROLLOUT,
    RolloutActivities,
)
from workflows.naming import FINISHED_AT, MEMO_RECORD, MEMO_REQUEST, gpu_queue
from workflows.rollouts import BeginRolloutInput, Observation, ObserveInput, RampInput, SettleInput
from workflows.tasks import AttemptRecord, GenerationParameters

ROLLOUT_REFUSED: Final = "ROLLOUT_REFUSED"
"""Type of the final error of a rollout that cannot begin."""
MAX_ROWS: Final = 20_000
"""Ended tasks read in one look."""
MAX_OPEN: Final = 500
"""Open tasks looked at for overdue ones."""
_PAGE: Final = 500
_PARALLEL: Final = 20
_RPC: Final = timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is read of a task's request."""

    pool: str = ""
    parameters: GenerationParameters | None = None


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What is read of a task's record."""

    attempts: tuple[AttemptRecord, ...] = ()


class RolloutSteps(RolloutActivities):
    """Runs on the control queue.

    Args:
        client: needs the codec, since the memos are encrypted.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name=BEGIN_ROLLOUT)
    async def begin_rollout(self, request: BeginRolloutInput) -> str:
        """Give the canary its share of new tasks and return the build id of the current version.

        Raises:
            ApplicationError: `ROLLOUT_REFUSED`, final: there is no such version, or none to compare it with.
        """
        deployment = self._deployment(request.pool)
        try:
            routing = await deployment.routing()
        except DeploymentNotFoundError:
            raise _refused(f"no versioned worker of pool {request.pool!r} has ever polled") from None
        if request.canary not in routing.drainage:
            raise _refused(f"{deployment.name} has no version {request.canary!r}; is one of its workers running?")
        if routing.current == UNVERSIONED:
            raise _refused(f"{deployment.name} has no current version to compare with; set one first")
        if routing.current == request.canary:
            raise _refused(f"{request.canary!r} is the current version of {deployment.name} already")
        if routing.ramping not in {None, request.canary}:
            raise _refused(f"{routing.ramping!r} is ramping in {deployment.name}; end that first")
        await deployment.set_ramp(request.canary, request.percentage, token=routing.token)
        return routing.current

    @activity.defn(name=SET_CANARY_SHARE)
    async def set_canary_share(self, request: RampInput) -> bool:
        """Change the share. False: the deployment is not as the rollout left it, and stays as it is."""
        deployment = self._deployment(request.pool)
        routing = await deployment.routing()
        if (routing.current, routing.ramping) != (request.current, request.canary):
            return False
        if routing.percentage != request.percentage:
            await deployment.set_ramp(request.canary, request.percentage, token=routing.token)
        return True

    @activity.defn(name=SETTLE_ROLLOUT)
    async def settle_rollout(self, request: SettleInput) -> bool:
        """Promote or roll back. False: the deployment is not as the rollout left it, and stays as it is."""
        deployment = self._deployment(request.pool)
        routing = await deployment.routing()
        if (routing.current, routing.ramping) == (request.canary if request.promote else request.current, None):
            return True  # Done by a try before this one whose answer was lost.
        if (routing.current, routing.ramping) != (request.current, request.canary):
            return False
        if request.promote:
            await deployment.set_current(request.canary, token=routing.token)
        else:
            await deployment.set_ramp(None, 0.0, token=routing.token)
        return True

    @activity.defn(name=OBSERVE_ROLLOUT)
    async def observe_rollout(self, request: ObserveInput) -> Observation:
        """Count what has ended since the last look, and compare."""
        deployment = self._deployment(request.pool)
        routing, pollers = await asyncio.gather(deployment.routing(), deployment.pollers())
        activity.heartbeat()
        until = datetime.now(UTC) - timedelta(seconds=request.leave_out_seconds)
        canary, current = Tally(), Tally()
        if until > request.since:
            canary, current = await self._ended(request, until)
        overdue = await self._overdue(request)
        canary_now = request.canary_before.plus(replace(canary, overdue=overdue.count(request.canary)))
        current_now = request.current_before.plus(replace(current, overdue=overdue.count(request.current)))
        return Observation(
            canary=canary_now,
            current=current_now,
            measured_until=max(until, request.since),
            comparison=compare(canary_now, current_now, request.rule),
            canary_polls=request.canary in pollers or canary.tasks > 0,
            ours=(routing.current, routing.ramping) == (request.current, request.canary),
        )

    def _deployment(self, pool: str) -> WorkerDeployment:
        return WorkerDeployment(self._client, gpu_queue(pool))

    async def _ended(self, request: ObserveInput, until: datetime) -> tuple[Tally, Tally]:
        """Tallies of the tasks that ended from `request.since` to `until`: canary, current."""
        canary, current = Tally(), Tally()
        query = (
            f"WorkflowType = 'GenerationWorkflow' AND {FINISHED_AT.name} >= '{_text(request.since)}'"
            f" AND {FINISHED_AT.name} < '{_text(until)}'"
        )
        number = 0
        async for execution in self._client.list_workflows(query, page_size=_PAGE, limit=MAX_ROWS):
            number += 1
            if number % 50 == 0:
                activity.heartbeat()
                await asyncio.sleep(0)
            model = await self._model_in(execution, request.pool)
            if model is not None:
                attempts = await _attempts(execution)
                canary = canary.plus(tally_of(attempts, request.canary, model))
                current = current.plus(tally_of(attempts, request.current, model))
        if number >= MAX_ROWS:
            activity.logger.warning("rollout_look_cut", extra={"pool": request.pool, "rows": number})
        return canary, current

    async def _overdue(self, request: ObserveInput) -> list[str]:
        """Versions of the attempts that run for too long, and of the tasks that fail for too long, one per task."""
        before = datetime.now(UTC) - timedelta(seconds=request.overdue_seconds)
        query = f"WorkflowType = 'GenerationWorkflow' AND ExecutionStatus = 'Running' AND StartTime < '{_text(before)}'"
        places = asyncio.Semaphore(_PARALLEL)

        async def version(execution: WorkflowExecution) -> str | None:
            async with places:
                found = await self._overdue_version(execution, before)
                activity.heartbeat()
                return found

        old = [
            execution
            async for execution in self._client.list_workflows(query, page_size=_PAGE, limit=MAX_OPEN)
            if await self._model_in(execution, request.pool) is not None
        ]
        return [found for found in await asyncio.gather(*map(version, old)) if found is not None]

    async def _overdue_version(self, execution: WorkflowExecution, before: datetime) -> str | None:
        try:
            described = await self._client.get_workflow_handle(execution.id, run_id=execution.run_id).describe(
                rpc_timeout=_RPC
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        for pending in described.raw_description.pending_activities:
            started = pending.HasField("last_started_time") and pending.last_started_time.ToDatetime(tzinfo=UTC)
            if started and started < before:
                return pending.last_deployment_version.build_id or None
        failed = [a for a in await _attempts(described) if a.outcome not in NOT_THE_WORKERS_FAULT]
        if failed and (failed[0].started_at or failed[0].queued_at) < before:
            return failed[-1].worker_version
        return None

    async def _model_in(self, execution: WorkflowExecution, pool: str) -> str | None:
        """Model of a task, if it is one of this pool and its memo can be read."""
        try:
            asked = await execution.memo_value(MEMO_REQUEST, _Request(), type_hint=_Request)
        except Exception:  # the codec is not ours to know: one unreadable task must not stop a rollout
            activity.logger.warning("rollout_memo_unreadable", extra={"task_id": execution.id}, exc_info=True)
            return None
        return asked.parameters.model if asked.pool == pool and asked.parameters is not None else None


def tally_of(attempts: Sequence[AttemptRecord], version: str, model: str) -> Tally:
    """What one ended task says about a version: nothing, a success with its duration, or a failure."""
    own = [a for a in attempts if a.worker_version == version and a.outcome not in NOT_THE_WORKERS_FAULT]
    if not own:
        return Tally()
    failed = any(a.outcome is not None for a in own)
    # An attempt that found the clip of another has used no device: how long it took says nothing.
    seconds = [
        (a.ended_at - a.started_at).total_seconds()
        for a in own
        if a.outcome is None and a.started_at is not None and a.gpu_seconds > 0
    ]
    return Tally(tasks=1, failed=int(failed), delays={model: one_delay(seconds[0])} if seconds else {})


async def _attempts(execution: WorkflowExecution) -> tuple[AttemptRecord, ...]:
    record = await execution.memo_value(MEMO_RECORD, _Record(), type_hint=_Record)
    return record.attempts


def _refused(message: str) -> ApplicationError:
    return ApplicationError(message, type=ROLLOUT_REFUSED, non_retryable=True)


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
