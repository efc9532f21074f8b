"""A control worker that has much to do is waited for; one that is gone, or hangs, is not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from uuid import uuid4

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest, PollWorkflowTaskQueueRequest
from temporalio.client import Client
from temporalio.common import Priority
from temporalio.worker import Worker

from activities.admission import AdmissionListings
from api.admission_client import admit
from api.control_pulse import GRACE_SECONDS, ControlPulse
from api.problems import AdmissionUnavailableError
from tests.workflows.admissions import WIDE, handle_of, held_by, new_task, new_user
from workflows.admission import AdmissionWorkflow
from workflows.contracts import LIST_RUNNING_TASKS, LIST_USED
from workflows.naming import CONTROL_QUEUE, admission_id
from workflows.quotas import ListRunningTasksInput, ListUsedInput, RunningTasks, UsedAmount

SHORT = timedelta(seconds=1.5)
"""Time for an answer when nobody is at work."""


@workflow.defn(name="LaboriousWorkflow", sandboxed=False)
class LaboriousWorkflow:
    """Keeps the worker busy for a moment, as many small ones do."""

    @workflow.run
    async def run(self) -> None:
        time.sleep(0.25)  # noqa: ASYNC251 - meant to


async def test_a_worker_that_has_others_to_answer_first_is_waited_for(client: Client) -> None:
    user, task_id = new_user(), new_task()
    for _ in range(10):
        await client.start_workflow(
            LaboriousWorkflow.run,
            id=f"work-{uuid4().hex}",
            task_queue=CONTROL_QUEUE,
            # That of an admit, which comes later.
            priority=Priority(priority_key=1),
        )
    listings = AdmissionListings(client)
    waiting = asyncio.create_task(admit(client, user, task_id=task_id, limits=WIDE, timeout=SHORT))
    began = time.monotonic()
    async with Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[LaboriousWorkflow, AdmissionWorkflow],
        activities=[listings.list_running_tasks, listings.list_used],
        # Nothing is taken ahead of its turn.
        max_cached_workflows=0,
        max_concurrent_workflow_tasks=1,
    ):
        grant = await waiting
        assert time.monotonic() - began > SHORT.total_seconds(), "it was not busy"
        assert grant.places
        assert await held_by(client, user) == {task_id}


async def test_a_worker_that_took_the_question_and_hangs_is_not_waited_for(client: Client) -> None:
    request = PollWorkflowTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=CONTROL_QUEUE), identity="hangs"
    )
    user = new_user()
    hanging = asyncio.create_task(client.workflow_service.poll_workflow_task_queue(request))
    look = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=CONTROL_QUEUE),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        report_pollers=True,
    )
    async with asyncio.timeout(30):
        while "hangs" not in {p.identity for p in (await client.workflow_service.describe_task_queue(look)).pollers}:
            await asyncio.sleep(0.02)
    began = time.monotonic()
    with pytest.raises(AdmissionUnavailableError):
        await admit(client, user, task_id=new_task(), limits=WIDE)
    # A second sign would have brought it to 4.6 s.
    assert time.monotonic() - began < 4.4
    async with asyncio.timeout(30):
        assert (await hanging).task_token
    await handle_of(client, user).terminate()


async def limited(pulse: ControlPulse, heard_at: list[float], *, at_least: float, at_most: float) -> float:
    """Seconds that the pulse leaves for something without end, while answers come at these times."""
    loop, began = asyncio.get_running_loop(), time.monotonic()
    for moment in heard_at:
        loop.call_later(moment, pulse.heard)
    with pytest.raises(TimeoutError):
        async with pulse.limit(at_least=timedelta(seconds=at_least), at_most=timedelta(seconds=at_most)):
            await asyncio.sleep(60)
    return time.monotonic() - began


async def test_an_answer_to_somebody_else_counts_as_a_sign_for_two_seconds_and_no_longer(client: Client) -> None:
    seconds = await limited(ControlPulse(client), [0.8], at_least=1.0, at_most=20.0)
    assert 0.8 + GRACE_SECONDS <= seconds < 8.0


async def test_nobody_waits_longer_than_the_most_however_busy_the_workers_are(client: Client) -> None:
    answers = [moment / 10 for moment in range(30)]
    assert 1.5 <= await limited(ControlPulse(client), answers, at_least=1.0, at_most=1.5) < 4.0


class SlowAtFirst:
    """Visibility whose first answer about an admission takes longer than that waits inside its workflow task."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    @activity.defn(name=LIST_RUNNING_TASKS)
    async def list_running_tasks(self, request: ListRunningTasksInput) -> RunningTasks:
        self.asked[request.admission_id] += 1
        if self.asked[request.admission_id] == 1:
            await asyncio.sleep(5)
        return RunningTasks()

    @activity.defn(name=LIST_USED)
    async def list_used(self, request: ListUsedInput) -> UsedAmount:
        return UsedAmount()


async def test_an_admission_that_still_lists_the_running_tasks_is_asked_again(client: Client) -> None:
    user, task_id, listings = new_user(), new_task(), SlowAtFirst()
    async with Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[AdmissionWorkflow],
        activities=[listings.list_running_tasks, listings.list_used],
    ):
        grant = await admit(client, user, task_id=task_id, limits=WIDE)
        assert listings.asked[admission_id(user)] >= 2
        assert grant.places
        assert await held_by(client, user) == {task_id}
