"""Random interleavings of everything that can happen to a task find no illegal transition and no stuck run."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from tests.scale import scaled
from tests.workflows.jobs import ScriptedGeneration, beating, plan, record_of, stage, status_of
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.states import ENDED, TRANSITIONS, TaskStatus
from workflows.tasks import AttemptStarted, GenerateClipInput, GenerateClipResult, TaskRecord

EVENTS = [
    "publish",
    FailureCode.WORKER_SHUTDOWN,
    FailureCode.WORKER_NOT_READY,
    FailureCode.OUT_OF_MEMORY,
    "soft_cancel",
    "revive",
    "hard_cancel",
    "stale_start",
    "wait",
]


async def play(handle: WorkflowHandle[GenerationWorkflow, TaskRecord], event: str, orders: asyncio.Queue[str]) -> None:
    """Let one thing happen; a run that closed already refuses, which is legal."""
    try:
        match event:
            case "soft_cancel":
                await handle.execute_update(GenerationWorkflow.cancel_soft)
            case "revive":
                await handle.execute_update(GenerationWorkflow.revive)
            case "hard_cancel":
                await handle.cancel()
            case "stale_start":
                now = (await handle.describe()).start_time
                start = AttemptStarted(token="stale", worker_id="zombie", started_at=now, queued_at=now)
                await handle.signal(GenerationWorkflow.attempt_started, start)
            case "wait":
                await asyncio.sleep(0.03)
            case _:
                orders.put_nowait(event)
    except (RPCError, WorkflowUpdateFailedError):
        return


async def shown_states(handle: WorkflowHandle[GenerationWorkflow, TaskRecord]) -> list[TaskStatus]:
    """Every value that the search attribute `TaskStatus` had, in order."""
    shown = [TaskStatus.QUEUED]
    for event in (await handle.fetch_history()).events:
        if event.event_type == EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES:
            fields = event.upsert_workflow_search_attributes_event_attributes.search_attributes.indexed_fields
            if "TaskStatus" in fields:
                shown.append(TaskStatus(fields["TaskStatus"].data.decode().strip('"')))
    return shown


@settings(
    max_examples=scaled(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=8))
async def test_random_interleavings_end_legally(client: Client, events: list[str]) -> None:
    orders: asyncio.Queue[str] = asyncio.Queue()

    async def obey(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
        await script.signal_start(attempt)
        while orders.empty():
            await beating(0.01)
        order = orders.get_nowait()
        if order == "publish":
            return script.publish(attempt)
        raise ApplicationError("ordered", type=order, non_retryable=True)

    job = plan()
    async with stage(client, job, obey) as scene:
        handle = await scene.start(job)
        for event in events:
            await play(handle, event, orders)
        orders.put_nowait("publish")
        try:
            async with asyncio.timeout(20):
                await handle.result()
        except WorkflowFailureError:
            pass
        description = await handle.describe()
    record = await record_of(description)
    shown = await shown_states(handle)
    assert record.status in ENDED
    assert status_of(description) == record.status == shown[-1]
    for source, target in pairwise(shown):
        assert source is target or target in TRANSITIONS[source]
    if record.status is TaskStatus.SUCCEEDED:
        assert record.artifact in scene.generation.published
