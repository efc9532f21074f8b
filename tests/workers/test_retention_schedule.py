"""The retention schedule as control workers keep it: real processes, one sweep."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client, ScheduleActionExecutionStartWorkflow, WorkflowExecutionStatus
from temporalio.testing import WorkflowEnvironment

from activities.retention import RETENTION_SCHEDULE
from activities.storage import ObjectStore
from tests.workers.test_run import environment, worker

__all__ = ["environment"]


async def swept(client: Client, *, since: int) -> int:
    """Wait for the next sweep of the schedule to end; how many there were since."""
    handle = client.get_schedule_handle(RETENTION_SCHEDULE)
    async with asyncio.timeout(30):
        while (info := (await handle.describe()).info).num_actions == since or info.running_actions:
            await asyncio.sleep(0.2)
    action = info.recent_actions[-1].action
    assert isinstance(action, ScheduleActionExecutionStartWorkflow)
    sweep = client.get_workflow_handle(action.workflow_id, run_id=action.first_execution_run_id)
    # Not its result: that is encrypted.
    assert (await sweep.describe()).status is WorkflowExecutionStatus.COMPLETED
    return info.num_actions - since


async def test_three_control_workers_sweep_once(
    environment: dict[str, str], temporal: WorkflowEnvironment, tmp_path: Path
) -> None:
    store = ObjectStore.from_url((tmp_path / "store").as_uri())
    old, young = f"inputs/{'a' * 32}/{'b' * 64}", f"inputs/{'a' * 32}/{'c' * 64}"
    for key in (old, young):
        await store.put(key, b"image", content_type="image/png")
    aged = time.time() - timedelta(days=8).total_seconds()
    os.utime(tmp_path / "store" / old, (aged, aged))
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(worker("control", environment))
        handle = temporal.client.get_schedule_handle(RETENTION_SCHEDULE)
        before = (await handle.describe()).info.num_actions
        await handle.trigger()
        assert await swept(temporal.client, since=before) == 1
    assert await store.head(old) is None
    assert await store.head(young) is not None
