"""What a look of a rollout counts: real runs on a real server, whose attempts follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker, WorkerDeploymentConfig

from activities.deployments import DeploymentError, WorkerDeployment
from activities.rollout import RolloutSteps, tally_of
from tests.workflows.jobs import Act, ScriptedGeneration, fail, hang, plan, start_job, status_of, succeed
from workflows.canary_rule import CanaryRule, Tally
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.naming import CONTROL_QUEUE, deployment_name, gpu_queue
from workflows.rollouts import BeginRolloutInput, Observation, ObserveInput, RampInput, SettleInput
from workflows.tasks import AttemptRecord, GenerationInput, Limits

T0 = datetime(2026, 1, 1, tzinfo=UTC)
F = FailureCode


def attempt(
    version: str | None, outcome: FailureCode | None, *, seconds: float = 60.0, gpu: float = 50.0
) -> AttemptRecord:
    return AttemptRecord(
        number=1,
        token="t",
        queued_at=T0,
        started_at=T0,
        ended_at=T0 + timedelta(seconds=seconds),
        worker_version=version,
        outcome=outcome,
        gpu_seconds=gpu,
    )


class TestTally:
    @pytest.mark.parametrize(
        ("attempts", "tasks", "failed", "durations"),
        [
            ([], 0, 0, 0),
            ([attempt("new", None)], 1, 0, 1),
            ([attempt("old", None)], 0, 0, 0),
            ([attempt(None, F.QUEUE_TIMEOUT), attempt("new", None)], 1, 0, 1),
            # However often it failed, it is one task; a success afterwards does not take that back.
            ([attempt("new", F.INFERENCE_FAILED)] * 3, 1, 1, 0),
            ([attempt("new", F.INFERENCE_FAILED), attempt("new", None)], 1, 1, 1),
            ([attempt("new", F.INFERENCE_FAILED), attempt("old", None)], 1, 1, 0),
            ([attempt("old", F.INFERENCE_FAILED), attempt("new", None)], 1, 0, 1),
            # Nobody's fault.
            ([attempt("new", F.CANCELED)], 0, 0, 0),
            ([attempt("new", F.WORKER_SHUTDOWN), attempt("new", None)], 1, 0, 1),
            ([attempt("new", F.VALIDATION_FAILED)], 0, 0, 0),
            # The clip of another was found: a success that took no time.
            ([attempt("new", None, gpu=0.0)], 1, 0, 0),
        ],
    )
    def test_a_task_says_of_a_version_what_its_own_attempts_say(
        self, attempts: list[AttemptRecord], tasks: int, failed: int, durations: int
    ) -> None:
        found = tally_of(attempts, "new", "wan")
        assert (found.tasks, found.failed) == (tasks, failed)
        assert sum(sums.tasks for sums in found.delays.values()) == durations


@asynccontextmanager
async def pool_worker(client: Client, pool: str, *acts: Act, build_id: str = "test") -> AsyncIterator[None]:
    """A versioned worker of a pool, current; attempts say that they ran on `test`."""
    script = ScriptedGeneration(client, *acts)
    deployment = WorkerDeployment(client, gpu_queue(pool))
    async with Worker(
        client,
        task_queue=gpu_queue(pool),
        activities=[script.generate_clip],
        max_concurrent_activities=1,
        deployment_config=WorkerDeploymentConfig(
            version=WorkerDeploymentVersion(deployment_name=deployment_name(gpu_queue(pool)), build_id=build_id),
            use_worker_versioning=True,
            default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
        ),
    ):
        async with asyncio.timeout(30):
            while True:
                with suppress(DeploymentError):
                    await deployment.set_current(build_id)
                    break
                await asyncio.sleep(0.05)
        yield


def job(pool: str, **limits: float) -> GenerationInput:
    return plan(pool=pool, callback=None, limits=replace(Limits(max_attempts=1), **limits))  # type: ignore[arg-type]


async def run(client: Client, given: GenerationInput) -> None:
    handle = await start_job(client, given)
    with suppress(WorkflowFailureError):
        await handle.result()


async def stop(client: Client, given: GenerationInput) -> None:
    handle = client.get_workflow_handle(given.task_id)
    await handle.cancel()
    with suppress(WorkflowFailureError):
        await handle.result()
    assert status_of(await handle.describe()) == "CANCELED"


async def observe(client: Client, pool: str, **changes: object) -> Observation:
    request = ObserveInput(
        pool=pool,
        canary="test",
        current="other",
        since=datetime.now(UTC) - timedelta(minutes=5),
        leave_out_seconds=0.0,
        overdue_seconds=3_600.0,
        rule=CanaryRule(),
        canary_before=Tally(),
        current_before=Tally(),
    )
    observation: Observation = await ActivityEnvironment().run(
        RolloutSteps(client).observe_rollout,
        replace(request, **changes),  # type: ignore[arg-type]
    )
    return observation


@pytest.fixture
def pool() -> str:
    return f"rollout-{uuid4().hex[:8]}"


async def test_ended_tasks_of_the_pool_are_counted_once_and_the_last_moments_left_out(
    client: Client, pool: str
) -> None:
    control = Worker(client, task_queue=CONTROL_QUEUE, workflows=[GenerationWorkflow])
    acts = (succeed(), fail(F.INVALID_OUTPUT), fail(F.VALIDATION_FAILED), succeed())
    async with control, pool_worker(client, pool, *acts), pool_worker(client, f"{pool}-b", succeed()):
        for _ in acts:
            await run(client, job(pool))
        await run(client, job(f"{pool}-b"))
        async with asyncio.timeout(20):
            # Visibility lags behind.
            while (seen := await observe(client, pool)).canary.tasks < 3:
                await asyncio.sleep(0.1)
        assert (seen.canary.tasks, seen.canary.failed) == (3, 1)
        assert seen.canary.delays["scripted"].tasks == 2
        assert (seen.current.tasks, seen.comparison.canary_failed, seen.canary_polls) == (0, 1, True)
        # What a look has counted, the next one does not count again.
        again = await observe(client, pool, since=seen.measured_until, canary_before=seen.canary)
        assert again.canary.tasks == 3
        left_out = await observe(client, pool, leave_out_seconds=60.0)
        assert left_out.canary.tasks == 0
        # Nor is anything lost when a look comes before the time that it leaves out.
        late = datetime.now(UTC)
        assert (await observe(client, pool, since=late, leave_out_seconds=60.0)).measured_until == late


async def test_attempts_that_run_too_long_and_tasks_that_fail_too_long_are_overdue(client: Client, pool: str) -> None:
    control = Worker(client, task_queue=CONTROL_QUEUE, workflows=[GenerationWorkflow])
    async with control, pool_worker(client, pool, hang()), pool_worker(client, f"{pool}-b", fail(F.INFERENCE_FAILED)):
        hanging, waiting = job(pool), job(pool)
        for given in (hanging, waiting):
            await start_job(client, given)
        failing = job(f"{pool}-b", max_attempts=50)
        await start_job(client, failing)
        async with asyncio.timeout(20):
            while (await observe(client, pool, overdue_seconds=0.5)).canary.overdue == 0:
                await asyncio.sleep(0.1)
        # The one that waits for a worker is nobody's.
        assert (await observe(client, pool, overdue_seconds=0.5)).canary.overdue == 1
        assert (await observe(client, pool)).canary.overdue == 0
        async with asyncio.timeout(20):
            while (await observe(client, f"{pool}-b", overdue_seconds=1.0)).canary.overdue == 0:
                await asyncio.sleep(0.1)
        await stop(client, hanging)
        # It has waited for long, and its attempt is young.
        async with asyncio.timeout(20):
            while status_of(described := await client.get_workflow_handle(waiting.task_id).describe()) != "PROCESSING":
                await asyncio.sleep(0.05)
        age = (datetime.now(UTC) - described.start_time).total_seconds()
        assert (await observe(client, pool, overdue_seconds=age - 0.1)).canary.overdue == 0
        for given in (waiting, failing):
            await stop(client, given)


async def test_a_share_is_given_and_settled_once_and_somebody_elses_change_is_left_alone(
    client: Client, pool: str
) -> None:
    steps, deployment = RolloutSteps(client), WorkerDeployment(client, gpu_queue(pool))
    begin = BeginRolloutInput(pool=pool, canary="new", percentage=5.0)
    share = RampInput(pool=pool, canary="new", current="test", percentage=0.0)
    settle = SettleInput(pool=pool, canary="new", current="test", promote=True)
    async with pool_worker(client, pool, succeed(), build_id="new"), pool_worker(client, pool, succeed()):
        environment = ActivityEnvironment()
        # Tried again after an answer that was lost, each comes to the same.
        for _ in range(2):
            assert await environment.run(steps.begin_rollout, begin) == "test"
        assert (await deployment.routing()).percentage == 5.0
        for _ in range(2):
            assert await environment.run(steps.set_canary_share, share)
        routing = await deployment.routing()
        assert (routing.ramping, routing.percentage) == ("new", 0.0)
        assert (await observe(client, pool, canary="new", current="test")).ours
        for _ in range(2):
            assert await environment.run(steps.settle_rollout, settle)
        routing = await deployment.routing()
        assert (routing.current, routing.ramping) == ("new", None)
        assert not await environment.run(steps.set_canary_share, share)
        assert not await environment.run(steps.settle_rollout, replace(settle, promote=False))
        assert not (await observe(client, pool, canary="new", current="test")).ours
        assert (await deployment.routing()).current == "new"
