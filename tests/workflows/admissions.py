"""What the admission tests share: a control worker, users, requests, running jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime
from uuid import uuid4

from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDConflictPolicy
from temporalio.converter import value_to_type
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.admission import AdmissionListings
from workflows.admission import AdmissionWorkflow
from workflows.generation import GenerationWorkflow
from workflows.naming import (
    CONTROL_QUEUE,
    MEMO_REQUEST,
    TASK_STATUS,
    USER_ID,
    admission_id,
    user_hash,
)
from workflows.quotas import AdmissionInput, AdmitRequest, Refusal, RefusalReason, StalePlace, TierLimits, Usage
from workflows.states import TaskStatus
from workflows.tasks import AdmissionPlace, GenerationInput, GenerationParameters, TaskRecord, User

AdmissionHandle = WorkflowHandle[AdmissionWorkflow, None]
JobHandle = WorkflowHandle[GenerationWorkflow, TaskRecord]

WIDE = TierLimits(max_pending=1_000, rate_per_minute=600_000.0, burst=10_000)


def control_worker(client: Client, *, cache: int = 1_000) -> AbstractAsyncContextManager[Worker]:
    """A worker for admissions and jobs; no GPU worker exists, so jobs stay QUEUED until they are stopped."""
    listings = AdmissionListings(client)
    return Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[AdmissionWorkflow, GenerationWorkflow],
        activities=[listings.list_running_tasks, listings.list_used],
        max_cached_workflows=cache,
    )


def new_user() -> User:
    """Somebody that no other test knows."""
    return User(tenant=f"tenant-{uuid4().hex[:8]}")


def new_task() -> str:
    return f"t{uuid4().hex[:26]}"


def handle_of(client: Client, user: User) -> AdmissionHandle:
    return client.get_workflow_handle_for(AdmissionWorkflow.run, admission_id(user))


async def usage_of(client: Client, user: User) -> Usage:
    return await handle_of(client, user).query(AdmissionWorkflow.usage, datetime.now(UTC))


async def held_by(client: Client, user: User) -> set[str]:
    return {place.task_id for place in (await usage_of(client, user)).held}


async def history_length(client: Client, user: User) -> int:
    return (await handle_of(client, user).describe()).history_length


async def ask(
    client: Client,
    user: User,
    task_id: str,
    limits: TierLimits = WIDE,
    *,
    claim: str | None = None,
    stale: tuple[StalePlace, ...] = (),
    estimated_gpu_seconds: float = 0.0,
    start: AdmissionInput | None = None,
) -> AdmissionPlace | Refusal:
    """One bare admit, as one attempt of a client makes it."""
    operation = WithStartWorkflowOperation(
        AdmissionWorkflow.run,
        start or AdmissionInput(user_hash=user_hash(user)),
        id=admission_id(user),
        task_queue=CONTROL_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    request = AdmitRequest(
        task_id=task_id,
        claim=claim or uuid4().hex,
        limits=limits,
        stale=stale,
        estimated_gpu_seconds=estimated_gpu_seconds,
    )
    try:
        return await client.execute_update_with_start_workflow(
            AdmissionWorkflow.admit, request, start_workflow_operation=operation
        )
    except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError):
        # The same error again; asyncio logs it if nobody takes it.
        with suppress(RPCError, asyncio.CancelledError):
            await operation.workflow_handle()
        raise
    except WorkflowUpdateFailedError as error:
        cause = error.cause
        if not isinstance(cause, ApplicationError) or cause.type not in RefusalReason.__members__:
            raise
        refusal: Refusal = value_to_type(Refusal, cause.details[0])
        return refusal


def accepted(outcomes: Sequence[AdmissionPlace | Refusal]) -> int:
    return sum(isinstance(outcome, AdmissionPlace) for outcome in outcomes)


async def place_of(client: Client, user: User, task_id: str, limits: TierLimits = WIDE) -> AdmissionPlace:
    place = await ask(client, user, task_id, limits)
    assert isinstance(place, AdmissionPlace), place
    return place


async def start_job(client: Client, user: User, task_id: str, *places: AdmissionPlace) -> JobHandle:
    """A real job, as the API starts it; nobody serves its GPU queue."""
    return await client.start_workflow(
        GenerationWorkflow.run,
        plan := GenerationInput(
            task_id=task_id,
            user=user,
            parameters=GenerationParameters(
                model="moving-shapes",
                prompt="a red square",
                width=64,
                height=64,
                num_frames=9,
                fps=8.0,
                num_inference_steps=2,
                guidance_scale=1.0,
                seed=1,
            ),
            model_revision="1",
            pool=f"nobody-{user_hash(user)[:8]}",
            artifact_key=f"artifact-{task_id}",
            accepted_at=datetime.now(UTC),
            places=places,
        ),
        id=task_id,
        task_queue=CONTROL_QUEUE,
        memo={MEMO_REQUEST: plan},
        search_attributes=TypedSearchAttributes(
            [
                SearchAttributePair(TASK_STATUS, TaskStatus.QUEUED.value),
                SearchAttributePair(USER_ID, user_hash(user)),
            ]
        ),
    )


async def until_visible(client: Client, task_ids: set[str], status: str) -> None:
    """Visibility lags behind."""
    ids = ", ".join(f"'{task_id}'" for task_id in task_ids)
    query = f"WorkflowId IN ({ids}) AND ExecutionStatus = '{status}'"
    async with asyncio.timeout(30):
        while {row.id async for row in client.list_workflows(query)} != task_ids:
            await asyncio.sleep(0.05)
