"""Branches of a batch whose histories are kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from temporalio.client import Client, WorkflowFailureError

from activities.storage import ObjectStore
from tests.replay.runs import all_runs
from tests.workflows.batch_stage import BatchHandle, BatchStage, batch_stage
from workflows.batch import BatchWorkflow
from workflows.batches import BatchInput
from workflows.tasks import AdmissionPlace

During = Callable[[BatchStage, BatchInput, BatchHandle], Awaitable[None]]


async def nothing(scene: BatchStage, given: BatchInput, handle: BatchHandle) -> None:
    """Only watch."""


async def cancel_hard(scene: BatchStage, given: BatchInput, handle: BatchHandle) -> None:
    """Temporal cancel with an item open and one waiting."""
    await scene.until("SOC", given)
    await handle.cancel()


async def cancel_soft(scene: BatchStage, given: BatchInput, handle: BatchHandle) -> None:
    """Soft cancel of a running item."""
    await scene.until("OC", given)
    await scene.played.started.wait()
    await handle.signal(BatchWorkflow.cancel_soft)
    await scene.until("OX", given)
    scene.played.released.set()


async def terminate_task(scene: BatchStage, given: BatchInput, handle: BatchHandle) -> None:
    """A task that ends without a word is looked at."""
    await scene.until("OC", given)
    async for run in scene.client.list_workflows(
        f"BatchId = '{given.batch_id}' AND WorkflowType = 'GenerationWorkflow'"
    ):
        await scene.client.get_workflow_handle(run.id).terminate()


async def release_found(scene: BatchStage, given: BatchInput, handle: BatchHandle) -> None:
    """A task of another batch ends, which tells only that one."""
    await scene.until("OC", given)
    await asyncio.sleep(1.5)
    scene.played.released.set()


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way that a batch goes."""

    prompts: tuple[str, ...]
    changes: Mapping[str, object] = field(default_factory=dict)
    during: During = nothing
    again: bool = False
    """Terminate the batch while its first task runs, and post it again: its task is found, not started."""


BRANCHES: Mapping[str, Branch] = {
    "completed": Branch(prompts=("ok a", "fail b", "ok c")),
    "canceled-hard": Branch(prompts=("ok a", "hold b", "ok c"), changes={"parallelism": 1}, during=cancel_hard),
    "canceled-soft": Branch(prompts=("hold a", "ok b"), changes={"parallelism": 1}, during=cancel_soft),
    "deadline-exceeded": Branch(prompts=("hold a", "ok b"), changes={"parallelism": 1, "deadline_seconds": 1}),
    "place-given-back": Branch(
        prompts=("ok a",), changes={"places": (AdmissionPlace(admission_id="admission-gone", token="p"),)}
    ),
    "items-gone": Branch(prompts=("ok a", "ok b"), changes={"stored": False}),
    "task-terminated": Branch(
        prompts=("hold a", "ok b"), changes={"parallelism": 1, "look_seconds": 1}, during=terminate_task
    ),
    "task-found": Branch(
        prompts=("hold a", "ok b"), changes={"parallelism": 1, "look_seconds": 1}, during=release_found, again=True
    ),
    "continued-as-new": Branch(prompts=tuple(f"ok {n}" for n in range(6)), changes={"continue_after_events": 20}),
}


async def histories(client: Client, name: str) -> list[str]:
    """Run one branch; the histories of all runs of its batch, oldest first."""
    branch = BRANCHES[name]
    with TemporaryDirectory() as folder:
        async with batch_stage(client, ObjectStore.from_url(Path(folder).as_uri())) as scene:
            given, handle = await scene.post(branch.prompts, **branch.changes)  # type: ignore[arg-type]
            if branch.again:
                await scene.played.started.wait()
                await handle.terminate()
                given, handle = await scene.post(branch.prompts, after=given, **branch.changes)  # type: ignore[arg-type]
            await branch.during(scene, given, handle)
            with contextlib.suppress(WorkflowFailureError):
                await handle.result()
            return await all_runs(client, given.batch_id, handle.first_execution_run_id)
