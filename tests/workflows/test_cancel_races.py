"""Cancels at random moments: whatever wins, state, close status, callback and artifact tell one story."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.service import RPCError

from tests.scale import scaled
from tests.workflows.jobs import Stage, plan, record_of, stage, status_of, succeed
from workflows.generation import GenerationWorkflow
from workflows.states import TaskStatus
from workflows.tasks import GenerationInput, TaskRecord

CLOSED_AS = {
    TaskStatus.SUCCEEDED: WorkflowExecutionStatus.COMPLETED,
    TaskStatus.CANCELED: WorkflowExecutionStatus.CANCELED,
}


async def cancel_at_random(scene: Stage, job: GenerationInput, random: Random, *, soft: bool) -> None:
    handle = await scene.start(job)
    await asyncio.sleep(random.uniform(0, 0.5))
    if soft:
        try:
            await handle.execute_update(GenerationWorkflow.cancel_soft)
        except (RPCError, WorkflowUpdateFailedError):
            pass  # the run closed first
        else:
            await asyncio.sleep(random.uniform(0, 0.2))
    if not soft or random.random() < 0.5:
        await handle.cancel()
    try:
        await handle.result()
    except WorkflowFailureError:
        return


async def check_story(client: Client, scene: Stage, job: GenerationInput) -> TaskRecord:
    description = await client.get_workflow_handle(job.task_id).describe()
    record = await record_of(description)
    assert record.status in CLOSED_AS
    assert status_of(description) == record.status
    assert record.callback_started
    if record.status is TaskStatus.SUCCEEDED:
        assert description.status is WorkflowExecutionStatus.COMPLETED
        assert record.artifact in scene.generation.published
    else:
        # A soft cancel alone closes Failed (type CANCELED), a Temporal cancel closes Canceled.
        assert description.status in (WorkflowExecutionStatus.CANCELED, WorkflowExecutionStatus.FAILED)
        if description.status is WorkflowExecutionStatus.CANCELED:
            assert record.artifact is None
    async with asyncio.timeout(30):
        while not scene.delivery.events(job.task_id):
            await asyncio.sleep(0.05)
    assert scene.delivery.events(job.task_id) == [f"task.{record.status.lower()}"]
    return record


@pytest.mark.soak
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.timeout(300)
async def test_cancels_at_random_moments_leave_state_callback_and_artifact_in_agreement(
    client: Client, soft: bool
) -> None:
    random = Random(20)
    pool = plan().pool
    jobs = [plan(pool=pool) for _ in range(scaled(250))]
    async with stage(client, jobs[0], succeed(after=0.2)) as scene:
        running = asyncio.Semaphore(10)

        async def one(job: GenerationInput) -> None:
            async with running:
                await cancel_at_random(scene, job, random, soft=soft)

        await asyncio.gather(*(one(job) for job in jobs))
        records = [await check_story(client, scene, job) for job in jobs]
    # The moments really were spread over both sides of the end.
    assert {r.status for r in records} == {TaskStatus.SUCCEEDED, TaskStatus.CANCELED}
