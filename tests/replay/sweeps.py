"""Branches of a retention sweep whose histories are kept."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from tests.replay.runs import all_runs
from workflows.contracts import REMOVE_EXPIRED, RetentionActivities
from workflows.naming import CONTROL_QUEUE
from workflows.retention import RetentionSweep, RetentionWorkflow
from workflows.tasks import RemoveExpiredInput, RemoveExpiredResult

BRANCHES: Mapping[str, RetentionSweep] = {
    "swept": RetentionSweep(),
    "continued-as-new": RetentionSweep(batches_per_run=2),
}


class PlayedStore(RetentionActivities):
    """Every area takes two batches."""

    @activity.defn(name=REMOVE_EXPIRED)
    async def remove_expired(self, batch: RemoveExpiredInput) -> RemoveExpiredResult:
        return RemoveExpiredResult(examined=10, removed=1, after=None if batch.after else "middle")


async def histories(client: Client, name: str) -> list[str]:
    """Run one branch; the histories of its runs, oldest first."""
    store = PlayedStore()
    async with Worker(
        client, task_queue=CONTROL_QUEUE, workflows=[RetentionWorkflow], activities=[store.remove_expired]
    ):
        handle = await client.start_workflow(
            RetentionWorkflow.run, BRANCHES[name], id=f"retention-{uuid4().hex}", task_queue=CONTROL_QUEUE
        )
        await handle.result()
        return await all_runs(client, handle.id, handle.first_execution_run_id)
