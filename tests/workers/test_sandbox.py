from __future__ import annotations

from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

from tests.workers.workflows import ClockReadingWorkflow, UpcasingWorkflow, upcase
from workers.codec import CodecKey, EncryptionCodec, data_converter
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
