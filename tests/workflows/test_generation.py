"""GenerationWorkflow on a real server: one test per way that a task can live and end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError

from tests.workflows.jobs import (
    die,
    fail,
    gpu_worker,
    hang,
    plan,
    record_of,
    stage,
    start_job,
    status_of,
    stop_late,
    succeed,
)
from workflows import naming
from workflows.failures import FAILURE_CLASSES, FailureCode, Remedy
from workflows.generation import GenerationWorkflow
from workflows.policies import start_to_close
from workflows.states import TaskStatus
from workflows.tasks import (
    AttemptStarted,
    CallbackTarget,
    CancelMode,
    Limits,
    SoftCancelReply,
    TaskPriority,
    TaskRecord,
    User,
)

F = FailureCode
NEVER_RAISED = {F.CANCELED, F.TERMINATED, F.DEADLINE_EXCEEDED}
"""Ends that the workflow or the API names by itself."""
FINAL = sorted(c for c, row in FAILURE_CLASSES.items() if row.remedy is Remedy.FINAL and c not in NEVER_RAISED)
PATIENT = Limits(queue_timeout_seconds=120, heartbeat_timeout_seconds=60)
"""For tests in which no such limit is to be reached, however busy the machine is."""
LOST_SOON = replace(PATIENT, heartbeat_timeout_seconds=2)
LEFT_WAITING = replace(PATIENT, queue_timeout_seconds=1)


async def eventually(check: Callable[[], Awaitable[bool]], timeout: float = 30) -> None:
    async with asyncio.timeout(timeout):
        while not await check():
            await asyncio.sleep(0.02)


class TestPlainTask:
    async def test_goes_from_queued_over_processing_to_succeeded_and_calls_back_once(self, client: Client) -> None:
        job = plan(labels=("grüße",))
        async with stage(client, job, succeed(after=0.3)) as scene:
            handle = await scene.start(job)
            assert status_of(await handle.describe()) == "QUEUED"
            await scene.generation.started.wait()

            async def processing() -> bool:
                return status_of(await handle.describe()) == "PROCESSING"

            await eventually(processing)
            record = await handle.result()
            await eventually(lambda: _true(scene.delivery.events(job.task_id) == ["task.succeeded"]))
        description = await handle.describe()
        assert description.status is WorkflowExecutionStatus.COMPLETED
        assert status_of(description) == "SUCCEEDED"
        assert await record_of(description) == record
        assert record.artifact == scene.generation.published[0]
        assert record.worker_id == "host/cpu:0"
        assert (record.attempt_count, record.retry_count, record.gpu_seconds) == (1, 0, 1.0)
        assert set(record.durations) == {"QUEUED", "PROCESSING"}
        assert record.started_at is not None
        assert record.finished_at is not None
        assert record.durations["PROCESSING"] >= 0.25
        assert record.durations["PROCESSING"] == (record.finished_at - record.started_at).total_seconds()
        assert record.created_at <= record.started_at <= record.finished_at
        assert scene.delivery.deliveries[0].event.labels == ("grüße",)

    async def test_submitted_while_no_gpu_worker_runs_is_done_once_one_starts(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed(), gpu=False) as scene:
            handle = await scene.start(job)
            await asyncio.sleep(0.3)
            assert status_of(await handle.describe()) == "QUEUED"
            async with gpu_worker(scene, job):
                assert (await handle.result()).status is TaskStatus.SUCCEEDED

    async def test_without_a_callback_target_starts_no_delivery(self, client: Client) -> None:
        job = plan(callback=None)
        async with stage(client, job, succeed()) as scene:
            record = await (await scene.start(job)).result()
        assert not record.callback_started
        assert scene.delivery.events(job.task_id) == []

    async def test_calls_back_only_for_subscribed_events(self, client: Client) -> None:
        job = plan(callback=CallbackTarget(url="http://127.0.0.1:9/"))
        async with stage(client, job, hang()) as scene:
            handle = await scene.start(job)
            await scene.generation.started.wait()
            await handle.cancel()
            with pytest.raises(WorkflowFailureError):
                await handle.result()
            await asyncio.sleep(0.2)
        assert scene.delivery.events(job.task_id) == []

    async def test_a_retry_that_finds_the_clip_never_enters_a_gpu_queue(self, client: Client) -> None:
        first = plan()
        async with stage(client, first, succeed()) as scene:
            artifact = (await (await scene.start(first)).result()).artifact
        job = plan(retry_of=first.task_id)
        async with stage(client, job, succeed()) as scene:
            scene.artifacts.found = artifact
            record = await (await scene.start(job)).result()
        assert record.artifact == artifact
        assert scene.generation.calls == []
        assert set(record.durations) == {"QUEUED"}


async def _true(value: bool) -> bool:
    return value


async def ended(scene_handle: object) -> ApplicationError | CancelledError:
    with pytest.raises(WorkflowFailureError) as caught:
        await scene_handle.result()  # type: ignore[attr-defined]
    cause = caught.value.cause
    assert isinstance(cause, ApplicationError | CancelledError)
    return cause


class TestFailures:
    @pytest.mark.parametrize(
        "code", sorted(c for c, r in FAILURE_CLASSES.items() if r.remedy is Remedy.FINAL and c not in NEVER_RAISED)
    )
    async def test_a_final_failure_ends_the_task_at_once(self, client: Client, code: FailureCode) -> None:
        job = plan()
        async with stage(client, job, fail(code, "Detail.")) as scene:
            handle = await scene.start(job)
            cause = await ended(handle)
            await eventually(lambda: _true(bool(scene.delivery.events(job.task_id))))
        record = await record_of(await handle.describe())
        assert isinstance(cause, ApplicationError)
        assert cause.type == code == record.error_code
        assert record.status is FAILURE_CLASSES[code].status
        assert status_of(await handle.describe()) == record.status
        assert len(scene.generation.calls) == 1
        assert scene.delivery.events(job.task_id) == [f"task.{record.status.lower()}"]

    @pytest.mark.parametrize(
        "code",
        sorted(
            c
            for c, r in FAILURE_CLASSES.items()
            if r.remedy is Remedy.RETRY and r.costs_budget and c not in {F.PROCESSING_TIMEOUT, F.WORKER_LOST}
        ),
    )
    async def test_a_retryable_failure_ends_the_task_after_three_attempts(
        self, skipping_client: Client, code: FailureCode
    ) -> None:
        job = plan()
        async with stage(skipping_client, job, fail(code)) as scene:
            handle = await scene.start(job)
            await ended(handle)
        record = await record_of(await handle.describe())
        assert (record.error_code, record.status) == (code, FAILURE_CLASSES[code].status)
        assert [a.outcome for a in record.attempts] == [code] * 3
        assert [c.attempt for c in scene.generation.calls] == [1, 2, 3]
        assert len({c.token for c in scene.generation.calls}) == 3
        assert (record.attempt_count, record.retry_count) == (3, 2)

    async def test_a_failure_then_success_is_success_with_both_attempts_on_record(
        self, skipping_client: Client
    ) -> None:
        job = plan()
        async with stage(skipping_client, job, fail(F.DRIVER_FAULT), succeed()) as scene:
            record = await (await scene.start(job)).result()
        assert [a.outcome for a in record.attempts] == [F.DRIVER_FAULT, None]
        assert record.retry_count == 1

    async def test_worker_shutdown_and_not_ready_cost_no_budget(self, skipping_client: Client) -> None:
        acts = [fail("WorkerShutdown")] * 4 + [fail(F.WORKER_NOT_READY, signal=False)] * 3 + [succeed()]
        job = plan()
        async with stage(skipping_client, job, *acts) as scene:
            record = await (await scene.start(job)).result()
        assert record.status is TaskStatus.SUCCEEDED
        assert len(scene.generation.calls) == 8

    async def test_a_silent_worker_is_noticed_and_the_attempt_runs_again(self, client: Client) -> None:
        job = plan(limits=LOST_SOON)
        async with stage(client, job, die(), succeed()) as scene:
            record = await (await scene.start(job)).result()
        assert [a.outcome for a in record.attempts] == [F.WORKER_LOST, None]
        lost = scene.generation.calls[0].token
        assert [r.tokens for r in scene.artifacts.removed] == [(lost,)]

    async def test_an_unknown_error_is_internal_and_keeps_its_text_from_the_client(
        self, skipping_client: Client
    ) -> None:
        job = plan()
        async with stage(skipping_client, job, fail("KeyError", "/srv/secret")) as scene:
            handle = await scene.start(job)
            await ended(handle)
        record = await record_of(await handle.describe())
        assert record.error_code is F.INTERNAL
        assert "secret" not in str(record)


class TestQueueTimeout:
    async def test_requeues_twice_one_level_up_then_ends_in_timeout(self, client: Client) -> None:
        job = plan(limits=LEFT_WAITING, priority=TaskPriority.LOW)
        async with stage(client, job, succeed(), gpu=False) as scene:
            handle = await scene.start(job)
            await ended(handle)
            await eventually(lambda: _true(scene.delivery.events(job.task_id) == ["task.timeout"]))
        record = await record_of(await handle.describe())
        assert (record.status, record.error_code) == (TaskStatus.TIMEOUT, F.QUEUE_TIMEOUT)
        assert (record.requeue_count, record.attempt_count) == (2, 0)
        history = await handle.fetch_history()
        keys = [
            e.activity_task_scheduled_event_attributes.priority.priority_key
            for e in history.events
            if e.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        ]
        assert keys == [4, 3, 2]


class TestDeadline:
    async def test_stops_a_running_attempt(self, client: Client) -> None:
        job = plan(limits=replace(PATIENT, deadline_seconds=3))
        async with stage(client, job, hang()) as scene:
            handle = await scene.start(job)
            cause = await ended(handle)
            await eventually(lambda: _true(scene.delivery.events(job.task_id) == ["task.timeout"]))
        record = await record_of(await handle.describe())
        assert isinstance(cause, ApplicationError)
        assert cause.type == F.DEADLINE_EXCEEDED
        assert (record.status, record.error_code) == (TaskStatus.TIMEOUT, F.DEADLINE_EXCEEDED)
        assert scene.generation.ends == ["CancelledError"]
        assert 0 < record.gpu_seconds <= record.durations["PROCESSING"]

    async def test_ends_a_task_that_waits_in_the_queue(self, client: Client) -> None:
        job = plan(limits=Limits(deadline_seconds=1))
        async with stage(client, job, succeed(), gpu=False) as scene:
            handle = await scene.start(job)
            await ended(handle)
        assert (await record_of(await handle.describe())).error_code is F.DEADLINE_EXCEEDED
        assert scene.generation.calls == []

    async def test_ends_a_task_between_attempts(self, skipping_client: Client) -> None:
        job = plan(limits=Limits(deadline_seconds=20))
        async with stage(skipping_client, job, fail(F.WORKER_NOT_READY)) as scene:
            handle = await scene.start(job)
            await ended(handle)
        record = await record_of(await handle.describe())
        assert (record.status, record.error_code) == (TaskStatus.TIMEOUT, F.DEADLINE_EXCEEDED)

    async def test_a_clip_published_before_the_stop_is_success(self, client: Client) -> None:
        job = plan(limits=replace(PATIENT, deadline_seconds=3))
        async with stage(client, job, stop_late(0.2)) as scene:
            record = await (await scene.start(job)).result()
        assert record.status is TaskStatus.SUCCEEDED


class TestHardCancel:
    async def test_of_a_queued_task_never_touches_a_gpu(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed(), gpu=False) as scene:
            handle = await scene.start(job)
            await handle.cancel()
            cause = await ended(handle)
            async with gpu_worker(scene, job):
                await asyncio.sleep(0.3)
                await eventually(lambda: _true(bool(scene.delivery.events(job.task_id))))
        description = await handle.describe()
        record = await record_of(description)
        assert isinstance(cause, CancelledError)
        assert description.status is WorkflowExecutionStatus.CANCELED
        assert (record.status, record.cancel_requested) == (TaskStatus.CANCELED, CancelMode.HARD)
        assert scene.generation.calls == []
        assert scene.delivery.events(job.task_id) == ["task.canceled"]

    async def test_of_a_running_task_stops_the_attempt_and_waits_for_it(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, hang()) as scene:
            handle = await scene.start(job)
            await scene.generation.started.wait()
            await handle.cancel()
            await ended(handle)
            assert scene.generation.ends == ["CancelledError"]
        record = await record_of(await handle.describe())
        assert record.status is TaskStatus.CANCELED
        assert record.artifact is None

    async def test_between_attempts_ends_at_once(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, fail(F.STORAGE_UNAVAILABLE)) as scene:
            handle = await scene.start(job)
            await scene.generation.started.wait()

            async def waiting() -> bool:
                return status_of(await handle.describe()) == "QUEUED"

            await eventually(waiting)
            await handle.cancel()
            await ended(handle)
        assert len(scene.generation.calls) == 1
        assert (await record_of(await handle.describe())).status is TaskStatus.CANCELED

    async def test_a_clip_published_before_the_stop_is_success(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, stop_late(0.2)) as scene:
            handle = await scene.start(job)
            await scene.generation.started.wait()
            await handle.cancel()
            record = await handle.result()
            assert record.status is TaskStatus.SUCCEEDED
            await eventually(lambda: _true(scene.delivery.events(job.task_id) == ["task.succeeded"]))
        assert (await handle.describe()).status is WorkflowExecutionStatus.COMPLETED

    async def test_after_a_lost_attempt_removes_what_it_may_have_published(self, client: Client) -> None:
        job = plan(limits=LOST_SOON)
        async with stage(client, job, die(), hang()) as scene:
            handle = await scene.start(job)
            await eventually(lambda: _true(len(scene.generation.calls) == 2))
            await handle.cancel()
            await ended(handle)
        assert [r.tokens for r in scene.artifacts.removed] == [(scene.generation.calls[0].token,)]


class TestSoftCancel:
    async def test_of_a_task_that_has_not_started_asks_for_a_temporal_cancel(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed(), gpu=False) as scene:
            handle = await scene.start(job)
            assert await handle.execute_update(GenerationWorkflow.cancel_soft) == SoftCancelReply.NOT_STARTED
            assert status_of(await handle.describe()) == "QUEUED"
            await handle.cancel()

    async def test_shows_canceled_at_once_and_keeps_the_clip(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed(after=0.6)) as scene:
            handle = await scene.start(job)
            await processing(handle)
            assert await handle.execute_update(GenerationWorkflow.cancel_soft) == SoftCancelReply.ACCEPTED
            assert await handle.execute_update(GenerationWorkflow.cancel_soft) == SoftCancelReply.ACCEPTED
            description = await handle.describe()
            assert status_of(description) == "CANCELED"
            assert description.status is WorkflowExecutionStatus.RUNNING
            assert scene.delivery.events(job.task_id) == []
            cause = await ended(handle)
            await eventually(lambda: _true(scene.delivery.events(job.task_id) == ["task.canceled"]))
        record = await record_of(await handle.describe())
        assert isinstance(cause, ApplicationError)
        assert cause.type == "CANCELED"
        assert record.artifact == scene.generation.published[0]
        assert record.cancel_requested is CancelMode.SOFT
        assert scene.artifacts.removed == []
        assert scene.delivery.deliveries[0].event.artifact_expires_at is None

    async def test_a_revive_makes_it_an_ordinary_success(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed(after=0.6)) as scene:
            handle = await scene.start(job)
            await processing(handle)
            assert not await handle.execute_update(GenerationWorkflow.revive)
            await handle.execute_update(GenerationWorkflow.cancel_soft)
            assert await handle.execute_update(GenerationWorkflow.revive)
            assert status_of(await handle.describe()) == "PROCESSING"
            record = await handle.result()
            await eventually(lambda: _true(scene.delivery.events(job.task_id) == ["task.succeeded"]))
        assert record.status is TaskStatus.SUCCEEDED
        assert record.cancel_requested is None
        assert len(scene.generation.calls) == 1

    async def test_starts_no_new_round_when_the_attempt_fails(self, client: Client) -> None:
        async def late_failure(script: object, attempt: object) -> object:
            await succeed(after=0.5)(script, attempt)  # type: ignore[arg-type]
            raise ApplicationError("x", type=F.DRIVER_FAULT, non_retryable=True)

        job = plan()
        async with stage(client, job, late_failure) as scene:  # type: ignore[arg-type]
            handle = await scene.start(job)
            await processing(handle)
            await handle.execute_update(GenerationWorkflow.cancel_soft)
            await ended(handle)
        record = await record_of(await handle.describe())
        assert (record.status, record.error_code, record.artifact) == (TaskStatus.CANCELED, F.CANCELED, None)
        assert len(scene.generation.calls) == 1

    async def test_then_a_hard_cancel_leaves_nothing_behind(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, stop_late(0.2)) as scene:
            handle = await scene.start(job)
            await processing(handle)
            await handle.execute_update(GenerationWorkflow.cancel_soft)
            await handle.cancel()
            await ended(handle)
        description = await handle.describe()
        record = await record_of(description)
        assert description.status is WorkflowExecutionStatus.CANCELED
        assert record.artifact is None
        assert [r.tokens for r in scene.artifacts.removed] == [(scene.generation.calls[0].token,)]


async def processing(handle: object) -> None:
    async def check() -> bool:
        return status_of(await handle.describe()) == "PROCESSING"  # type: ignore[attr-defined]

    await eventually(check)


class TestOutsideIntervention:
    async def test_a_late_attempt_with_another_token_changes_nothing(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed(), gpu=False) as scene:
            handle = await scene.start(job)
            now = (await handle.describe()).start_time
            await handle.signal(
                GenerationWorkflow.attempt_started,
                AttemptStarted(token="stale", worker_id="zombie", started_at=now, queued_at=now),
            )
            await asyncio.sleep(0.2)
            assert status_of(await handle.describe()) == "QUEUED"
            async with gpu_worker(scene, job):
                record = await handle.result()
        assert record.worker_id == "host/cpu:0"

    async def test_terminate_ends_the_run_and_its_attempt(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, hang()) as scene:
            handle = await scene.start(job)
            await scene.generation.started.wait()
            await handle.terminate("operator")
            await eventually(lambda: _true(bool(scene.generation.ends)))
            await asyncio.sleep(0.2)
        assert (await handle.describe()).status is WorkflowExecutionStatus.TERMINATED
        assert scene.delivery.events(job.task_id) == []

    async def test_reset_ends_the_task_again_without_a_second_callback(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed()) as scene:
            handle = await scene.start(job)
            await handle.result()
            await eventually(lambda: _true(len(scene.delivery.deliveries) == 1))
            history = await handle.fetch_history()
            completed = [
                e.event_id for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
            ]
            await client.workflow_service.reset_workflow_execution(
                ResetWorkflowExecutionRequest(
                    namespace=client.namespace,
                    workflow_execution=WorkflowExecution(workflow_id=job.task_id),
                    reason="test",
                    workflow_task_finish_event_id=completed[-2],
                    request_id=job.task_id,
                )
            )
            record = await client.get_workflow_handle(job.task_id, result_type=TaskRecord).result()
            await asyncio.sleep(0.3)
        assert record.status is TaskStatus.SUCCEEDED
        assert scene.delivery.events(job.task_id) == ["task.succeeded"]

    async def test_cancel_of_a_closed_run_changes_nothing(self, client: Client) -> None:
        job = plan()
        async with stage(client, job, succeed()) as scene:
            handle = await scene.start(job)
            await handle.result()
            await handle.cancel()
        assert (await handle.describe()).status is WorkflowExecutionStatus.COMPLETED

    async def test_two_users_share_a_pool_with_their_own_fairness_keys(self, client: Client) -> None:
        job = plan(user=User(tenant="acme", end_user="alice"))
        async with stage(client, job, succeed()) as scene:
            handle = await start_job(client, job)
            await handle.result()
            history = await handle.fetch_history()
        assert scene.generation.calls
        keys = [
            e.activity_task_scheduled_event_attributes.priority.fairness_key
            for e in history.events
            if e.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        ]
        assert keys == [naming.user_hash(job.user)]
        assert keys != [naming.user_hash(User(tenant="acme", end_user="bob"))]


def test_the_hard_wall_covers_every_limit_of_an_attempt() -> None:
    assert start_to_close(Limits()) == timedelta(seconds=600 + 300 + 120 + 120)
