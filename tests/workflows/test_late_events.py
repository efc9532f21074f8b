"""What comes at the edges of a run's life: before its first workflow task, and between its last attempt and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from tests.workflows.jobs import (
    Act,
    ScriptedGeneration,
    Stage,
    beating,
    die,
    plan,
    record_of,
    stage,
    start_job,
    status_of,
    succeed,
)
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.states import TaskStatus
from workflows.tasks import (
    CancelMode,
    GenerateClipInput,
    GenerateClipResult,
    Limits,
    SoftCancelReply,
    TaskRecord,
)

LOST_SOON = Limits(queue_timeout_seconds=60, heartbeat_timeout_seconds=2)

Handle = WorkflowHandle[GenerationWorkflow, TaskRecord]


def publish_when_told(told: asyncio.Event) -> Act:
    """Start, and publish once it is told to."""

    async def act(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
        await script.signal_start(attempt)
        while not told.is_set():
            await beating(0.05)
        return script.publish(attempt)

    return act


@asynccontextmanager
async def removing_leftovers(
    client: Client, *acts: Act, soft: bool = False, max_attempts: int = 3
) -> AsyncIterator[tuple[Stage, Handle]]:
    """A job whose first attempt is lost and whose generation has ended: it removes what the lost one may have left.

    `soft`: the second attempt was cancelled softly before it published.
    """
    job = plan(limits=replace(LOST_SOON, max_attempts=max_attempts))
    told = asyncio.Event()
    async with stage(client, job, die(), *([publish_when_told(told)] if soft else acts)) as scene:
        scene.artifacts.may_remove.clear()
        try:
            handle = await scene.start(job)
            if soft:
                async with asyncio.timeout(30):
                    while len(scene.generation.calls) < 2 or status_of(await handle.describe()) != "PROCESSING":
                        await asyncio.sleep(0.02)
                assert await handle.execute_update(GenerationWorkflow.cancel_soft) == SoftCancelReply.ACCEPTED
                told.set()
            async with asyncio.timeout(30):
                await scene.artifacts.removing.wait()
            yield scene, handle
        finally:
            scene.artifacts.may_remove.set()


async def ended(scene: Stage, handle: Handle) -> TaskRecord:
    """The record of the run once it has closed, with its state and its callback in agreement."""
    scene.artifacts.may_remove.set()
    async with asyncio.timeout(30):
        await asyncio.gather(handle.result(), return_exceptions=True)
        record = await record_of(await handle.describe())
        while not scene.delivery.events(record.task_id):
            await asyncio.sleep(0.02)
    assert status_of(await handle.describe()) == record.status
    assert scene.delivery.events(record.task_id) == [f"task.{record.status.lower()}"]
    return record


class TestWhileLeftoversAreRemoved:
    async def test_a_soft_cancel_after_the_clip_ends_canceled_and_keeps_it(self, client: Client) -> None:
        async with removing_leftovers(client, succeed()) as (scene, handle):
            assert await handle.execute_update(GenerationWorkflow.cancel_soft) == SoftCancelReply.ACCEPTED
            assert status_of(await handle.describe()) == "CANCELED"
            record = await ended(scene, handle)
        assert (record.status, record.error_code) == (TaskStatus.CANCELED, FailureCode.CANCELED)
        assert record.cancel_requested is CancelMode.SOFT
        assert record.artifact == scene.generation.published[0]
        assert [r.tokens for r in scene.artifacts.removed] == [(scene.generation.calls[0].token,)]

    async def test_a_soft_cancel_after_the_last_failure_ends_canceled_and_cannot_be_revived(
        self, client: Client
    ) -> None:
        async with removing_leftovers(client, max_attempts=1) as (scene, handle):
            assert await handle.execute_update(GenerationWorkflow.cancel_soft) == SoftCancelReply.ACCEPTED
            assert not await handle.execute_update(GenerationWorkflow.revive)
            record = await ended(scene, handle)
        assert (record.status, record.error_code) == (TaskStatus.CANCELED, FailureCode.CANCELED)

    async def test_a_revive_of_a_task_that_has_its_clip_ends_in_success(self, client: Client) -> None:
        async with removing_leftovers(client, soft=True) as (scene, handle):
            assert await handle.execute_update(GenerationWorkflow.revive)
            record = await ended(scene, handle)
        assert (record.status, record.cancel_requested) == (TaskStatus.SUCCEEDED, None)
        assert record.artifact == scene.generation.published[0]

    async def test_a_hard_cancel_after_a_soft_one_removes_the_clip_too(self, client: Client) -> None:
        async with removing_leftovers(client, soft=True) as (scene, handle):
            await handle.cancel()
            record = await ended(scene, handle)
        assert (await handle.describe()).status is WorkflowExecutionStatus.CANCELED
        assert record.artifact is None
        lost, own = (call.token for call in scene.generation.calls)
        assert [r.tokens for r in scene.artifacts.removed] == [(lost,), (own,)]

    async def test_a_hard_cancel_after_the_clip_is_too_late(self, client: Client) -> None:
        async with removing_leftovers(client, succeed()) as (scene, handle):
            await handle.cancel()
            record = await ended(scene, handle)
        assert record.status is TaskStatus.SUCCEEDED

    async def test_a_hard_cancel_after_the_last_failure_ends_canceled(self, client: Client) -> None:
        async with removing_leftovers(client, max_attempts=1) as (scene, handle):
            await handle.cancel()
            record = await ended(scene, handle)
        assert (await handle.describe()).status is WorkflowExecutionStatus.CANCELED
        assert (record.status, record.cancel_requested) == (TaskStatus.CANCELED, CancelMode.HARD)


class TestBeforeTheFirstWorkflowTask:
    async def test_a_cancel_ends_the_task_with_its_record_and_its_callback(self, client: Client) -> None:
        job = plan()
        handle = await start_job(client, job)
        await handle.cancel()
        async with stage(client, job, succeed()) as scene:
            record = await ended(scene, handle)
        assert (await handle.describe()).status is WorkflowExecutionStatus.CANCELED
        assert (record.status, record.cancel_requested) == (TaskStatus.CANCELED, CancelMode.HARD)
        assert scene.generation.calls == []

    async def test_a_soft_cancel_finds_the_task_not_started(self, client: Client) -> None:
        job = plan()
        handle = await start_job(client, job)
        asked = asyncio.create_task(handle.execute_update(GenerationWorkflow.cancel_soft))
        await asyncio.sleep(0.2)
        async with stage(client, job, succeed(), gpu=False):
            assert await asked == SoftCancelReply.NOT_STARTED
            await handle.cancel()
            with pytest.raises(WorkflowFailureError):
                await handle.result()
