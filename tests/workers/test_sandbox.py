from __future__ import annotations

import asyncio
import importlib
from collections.abc import MutableMapping, MutableSequence, MutableSet
from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

from tests.workers.workflows import ClockReadingWorkflow, UpcasingWorkflow, upcase
from workers.codec import CodecKey, EncryptionCodec, data_converter
from workers.registry import WORKFLOWS
from workers.sandbox import LeanSandbox


@pytest.fixture
def encrypted(client: Client) -> Client:
    config = client.config()
    config["data_converter"] = data_converter(EncryptionCodec([CodecKey(key_id="k1", secret=bytes(32))]))
    return Client(**config)


async def test_what_is_not_deterministic_is_refused_as_in_the_sdks_own_sandbox(client: Client) -> None:
    queue = f"sandbox-{uuid4().hex}"
    async with Worker(
        client,
        task_queue=queue,
        workflows=[ClockReadingWorkflow],
        workflow_runner=LeanSandbox(),
        workflow_failure_exception_types=[Exception],
    ):
        with pytest.raises(WorkflowFailureError) as failure:
            await client.execute_workflow(ClockReadingWorkflow.run, id=uuid4().hex, task_queue=queue)
    assert "time.time" in str(failure.value.cause)


async def test_runs_that_share_their_modules_are_refused_one_by_one(client: Client) -> None:
    queue = f"sandbox-{uuid4().hex}"
    async with Worker(
        client,
        task_queue=queue,
        workflows=[ClockReadingWorkflow, UpcasingWorkflow],
        activities=[upcase],
        workflow_runner=LeanSandbox(),
        workflow_failure_exception_types=[Exception],
    ):
        good = [client.execute_workflow(UpcasingWorkflow.run, "a", id=uuid4().hex, task_queue=queue) for _ in range(10)]
        bad = [client.execute_workflow(ClockReadingWorkflow.run, id=uuid4().hex, task_queue=queue) for _ in range(10)]
        ends = await asyncio.gather(*good, *bad, return_exceptions=True)
    assert ends[:10] == ["A"] * 10
    assert all(isinstance(end, WorkflowFailureError) for end in ends[10:])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.__name__)
def test_modules_of_workflows_hold_no_state(workflow: type) -> None:
    held = vars(importlib.import_module(workflow.__module__))
    state = {
        name: value
        for name, value in held.items()
        if not name.startswith("__") and isinstance(value, MutableMapping | MutableSequence | MutableSet)
    }
    assert not state


async def test_inputs_and_results_of_activities_pass_the_codec(encrypted: Client) -> None:
    queue = f"sandbox-{uuid4().hex}"
    async with Worker(
        encrypted, task_queue=queue, workflows=[UpcasingWorkflow], activities=[upcase], workflow_runner=LeanSandbox()
    ):
        handle = await encrypted.start_workflow(UpcasingWorkflow.run, "secret", id=uuid4().hex, task_queue=queue)
        assert await handle.result() == "SECRET"
    history = await handle.fetch_history()
    scheduled = next(e for e in history.events if e.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)
    assert b"secret" not in scheduled.SerializeToString()
