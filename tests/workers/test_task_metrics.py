"""Tasks and callbacks are counted when their run closes, once, whatever the worker has to do again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.worker import Replayer

from tests.workflows.jobs import Act, Stage, die, fail, hang, plan, stage, succeed
from workers.callback_metrics import CallbackMetrics
from workers.ended_runs import EndedRuns
from workers.registry import WORKFLOWS
from workers.task_metrics import TaskMetrics, gpu_outcome
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.states import TaskStatus
from workflows.tasks import AttemptRecord, GenerationInput, Limits, TaskRecord


@dataclass
class Counted:
    """Series of a control and a callback worker."""

    registry: CollectorRegistry

    def __call__(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def tasks(self) -> dict[tuple[str, str], float]:
        """Tasks that ended, by status and code; zeros left out."""
        return {
            (sample.labels["status"], sample.labels["error_code"]): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "reelgate_tasks_ended_total" and sample.value
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is counted after a run was closed."""
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def counted_stage(
    client: Client, job: GenerationInput, *acts: Act, cached: int = 1_000
) -> AsyncIterator[tuple[Stage, Counted]]:
    """Workers of one job whose ends are counted."""
    registry = CollectorRegistry()
    interceptor = EndedRuns(task=TaskMetrics(registry).note, callback=CallbackMetrics(registry).note)
    async with stage(client, job, *acts, interceptors=[interceptor], max_cached_workflows=cached) as scene:
        yield scene, Counted(registry)


async def ended(handle: WorkflowHandle[Any, Any]) -> None:
    with pytest.raises(WorkflowFailureError):
        await handle.result()


async def test_a_task_that_succeeds_is_counted_with_its_times_its_gpu_seconds_and_its_callback(client: Client) -> None:
    job = plan()
    async with counted_stage(client, job, succeed(after=0.3)) as (scene, counted):
        assert counted.tasks() == {}
        await (await scene.start(job)).result()
        await counted.until(lambda: counted("reelgate_callbacks_ended_total", status="SUCCEEDED") == 1)
        assert counted.tasks() == {("SUCCEEDED", ""): 1}
        assert counted("reelgate_attempts_ended_total", outcome="PUBLISHED") == 1
        assert counted("reelgate_gpu_seconds_total", outcome="useful") == pytest.approx(1.0)
        assert counted("reelgate_task_state_seconds_count", state="QUEUED") == 1
        assert counted("reelgate_task_state_seconds_count", state="PROCESSING") == 1
        assert 0.3 <= counted("reelgate_task_state_seconds_sum", state="PROCESSING") < 10


async def test_a_task_that_fails_is_counted_under_its_code_with_every_attempt(client: Client) -> None:
    job = plan(limits=Limits(queue_timeout_seconds=30, heartbeat_timeout_seconds=1), callback=None)
    async with counted_stage(client, job, die(), fail(FailureCode.OUT_OF_MEMORY)) as (scene, counted):
        await ended(await scene.start(job))
        await counted.until(lambda: bool(counted.tasks()))
        assert counted.tasks() == {("FAILED", "OUT_OF_MEMORY"): 1}
        assert counted("reelgate_attempts_ended_total", outcome="WORKER_LOST") == 1
        assert counted("reelgate_attempts_ended_total", outcome="OUT_OF_MEMORY") == 1
        assert counted("reelgate_callbacks_ended_total", status="SUCCEEDED") == 0


async def test_gpu_seconds_of_a_canceled_task_are_counted_as_canceled(client: Client) -> None:
    job = plan(callback=None)
    async with counted_stage(client, job, hang()) as (scene, counted):
        handle = await scene.start(job)
        await scene.generation.started.wait()
        await asyncio.sleep(0.3)
        await handle.cancel()
        await ended(handle)
        await counted.until(lambda: bool(counted.tasks()))
        assert counted.tasks() == {("CANCELED", "CANCELED"): 1}
        assert counted("reelgate_gpu_seconds_total", outcome="canceled") >= 0.3
        assert counted("reelgate_gpu_seconds_total", outcome="useful") == 0


async def test_a_soft_canceled_task_is_counted_when_its_generation_has_ended(client: Client) -> None:
    job = plan(callback=None)
    async with counted_stage(client, job, succeed(after=0.6)) as (scene, counted):
        handle = await scene.start(job)
        await scene.generation.started.wait()
        await handle.execute_update(GenerationWorkflow.cancel_soft)
        assert counted.tasks() == {}
        await ended(handle)
        await counted.until(lambda: bool(counted.tasks()))
        assert counted.tasks() == {("CANCELED", "CANCELED"): 1}
        assert counted("reelgate_gpu_seconds_total", outcome="canceled") == pytest.approx(1.0)


async def test_a_terminated_run_is_counted_by_nobody(client: Client) -> None:
    job = plan(callback=None)
    async with counted_stage(client, job, hang()) as (scene, counted):
        handle = await scene.start(job)
        await scene.generation.started.wait()
        await handle.terminate()
        await counted.until(lambda: bool(scene.generation.ends))
        assert counted.tasks() == {}


async def test_a_worker_that_keeps_nothing_and_replays_each_time_counts_once(client: Client) -> None:
    job = plan()
    async with counted_stage(client, job, fail(FailureCode.WORKER_SHUTDOWN), succeed(), cached=0) as (scene, counted):
        handle = await scene.start(job)
        await handle.result()
        await counted.until(lambda: counted("reelgate_callbacks_ended_total", status="SUCCEEDED") == 1)
        assert counted.tasks() == {("SUCCEEDED", ""): 1}
        assert counted("reelgate_attempts_ended_total", outcome="WORKER_SHUTDOWN") == 1
        history = await handle.fetch_history()
    registry = CollectorRegistry()
    replayer = Replayer(workflows=WORKFLOWS, interceptors=[EndedRuns(task=TaskMetrics(registry).note)])
    await replayer.replay_workflow(history)
    assert Counted(registry).tasks() == {}


def a_record(status: TaskStatus = TaskStatus.SUCCEEDED, **changes: object) -> TaskRecord:
    now = datetime.now(UTC)
    base = TaskRecord(task_id="t1", status=status, created_at=now, queued_at=now, updated_at=now, finished_at=now)
    return replace(base, **changes)  # type: ignore[arg-type]


def an_attempt(outcome: FailureCode | None, gpu_seconds: float) -> AttemptRecord:
    now = datetime.now(UTC)
    return AttemptRecord(
        number=1, token="", queued_at=now, ended_at=now + timedelta(seconds=1), outcome=outcome, gpu_seconds=gpu_seconds
    )


def test_a_run_that_is_closed_again_after_a_refused_completion_is_not_counted_again() -> None:
    registry = CollectorRegistry()
    runs = EndedRuns(task=TaskMetrics(registry).note)
    for run_id in ("run1", "run1", "run2"):
        runs.tell(run_id, a_record())
    assert Counted(registry).tasks() == {("SUCCEEDED", ""): 2}


def test_gpu_seconds_of_attempts_that_the_record_left_out_count_as_failed() -> None:
    registry = CollectorRegistry()
    TaskMetrics(registry).note(a_record(attempts=(an_attempt(None, 2.0),), gpu_seconds=5.0))
    counted = Counted(registry)
    assert counted("reelgate_gpu_seconds_total", outcome="useful") == 2.0
    assert counted("reelgate_gpu_seconds_total", outcome="failed") == 3.0


@pytest.mark.parametrize(
    ("status", "outcome", "expected"),
    [
        (TaskStatus.SUCCEEDED, None, "useful"),
        (TaskStatus.SUCCEEDED, FailureCode.WORKER_LOST, "failed"),
        (TaskStatus.CANCELED, None, "canceled"),
        (TaskStatus.CANCELED, FailureCode.CANCELED, "canceled"),
        (TaskStatus.TIMEOUT, FailureCode.DEADLINE_EXCEEDED, "failed"),
    ],
)
def test_what_gpu_seconds_were_good_for(status: TaskStatus, outcome: FailureCode | None, expected: str) -> None:
    assert gpu_outcome(a_record(status), an_attempt(outcome, 1.0)) == expected
