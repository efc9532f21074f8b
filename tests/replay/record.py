"""Record the histories that `test_replay.py` replays: `python -m tests.replay.record`.

Run it only when a workflow's command order changed on purpose, before its first release or behind a
`workflow.patched` gate; in the second case the old files stay, under their old names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.testing import WorkflowEnvironment

from tests.replay import batches
from tests.workflows.jobs import Act, Stage, artifact_of, die, fail, hang, plan, stage, status_of, succeed
from workers.devserver import dynamic_config_args, temporal_binary
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.naming import SEARCH_ATTRIBUTES, callback_id
from workflows.tasks import GenerateClipInput, GenerationInput, Limits, TaskRecord

HISTORIES = Path(__file__).parent / "histories"
QUICK = Limits(queue_timeout_seconds=1, heartbeat_timeout_seconds=1)

Handle = WorkflowHandle[GenerationWorkflow, TaskRecord]
During = Callable[[Stage, Handle], Awaitable[None]]


async def nothing(scene: Stage, handle: Handle) -> None:
    """Only watch."""


async def running(scene: Stage, handle: Handle) -> None:
    """Wait until the task is PROCESSING."""
    while status_of(await handle.describe()) != "PROCESSING":
        await asyncio.sleep(0.02)


async def cancel_queued(scene: Stage, handle: Handle) -> None:
    """Hard cancel before any attempt."""
    await handle.cancel()


async def cancel_running(scene: Stage, handle: Handle) -> None:
    """Hard cancel of a running attempt."""
    await running(scene, handle)
    await handle.cancel()


async def cancel_soft(scene: Stage, handle: Handle) -> None:
    """Soft cancel of a running attempt."""
    await running(scene, handle)
    await handle.execute_update(GenerationWorkflow.cancel_soft)


async def revive(scene: Stage, handle: Handle) -> None:
    """Soft cancel, taken back."""
    await cancel_soft(scene, handle)
    await handle.execute_update(GenerationWorkflow.revive)


BRANCHES: dict[str, tuple[GenerationInput, list[Act], bool, During]] = {
    "succeeded": (plan(), [succeed()], True, nothing),
    "failed-out-of-memory": (plan(), [fail(FailureCode.OUT_OF_MEMORY)], True, nothing),
    "retried-then-succeeded": (plan(), [fail(FailureCode.DRIVER_FAULT), succeed()], True, nothing),
    "attempts-used-up": (plan(), [fail(FailureCode.WORKER_LOST)], True, nothing),
    "worker-not-ready": (plan(), [fail(FailureCode.WORKER_NOT_READY)] * 3 + [succeed()], True, nothing),
    "worker-lost": (plan(limits=QUICK), [die(), succeed()], True, nothing),
    "queue-timeout": (plan(limits=QUICK), [succeed()], False, nothing),
    "deadline-exceeded": (plan(limits=replace(QUICK, deadline_seconds=1)), [hang()], True, nothing),
    "canceled-queued": (plan(), [succeed()], False, cancel_queued),
    "canceled-running": (plan(), [hang()], True, cancel_running),
    "canceled-soft": (plan(), [succeed(after=0.5)], True, cancel_soft),
    "revived": (plan(), [succeed(after=0.5)], True, revive),
    "without-callback": (plan(callback=None), [succeed()], True, nothing),
    "found-artifact": (plan(retry_of="t0"), [succeed()], True, nothing),
}


def scrubbed(value: object) -> object:
    """The same JSON without stack traces, host names and process ids, none of which a replay reads."""
    if isinstance(value, dict):
        return {k: scrubbed(v) for k, v in value.items() if k != "stackTrace"}
    if isinstance(value, list):
        return [scrubbed(v) for v in value]
    if isinstance(value, str):
        return value.replace(f"{os.getpid()}@{platform.node()}", "recorder")
    return value


def keep(kind: str, name: str, history: str) -> None:
    """Store a history without what names a machine or a process."""
    HISTORIES.mkdir(exist_ok=True)
    text = json.dumps(scrubbed(json.loads(history)), separators=(",", ":"))
    (HISTORIES / f"{kind}-{name}.json").write_text(text + "\n")


async def record(client: Client, name: str) -> None:
    """Run one branch and keep the histories of its job and its delivery."""
    job, acts, gpu, during = BRANCHES[name]
    async with stage(client, job, *acts, gpu=gpu) as scene:
        if job.retry_of is not None:
            attempt = GenerateClipInput(
                task_id=job.task_id,
                token="0" * 32,
                attempt=1,
                parameters=job.parameters,
                model_revision="1",
                artifact_key=job.artifact_key,
                limits=job.limits,
            )
            scene.artifacts.found = artifact_of(attempt)
        handle = await scene.start(job)
        await during(scene, handle)
        with contextlib.suppress(WorkflowFailureError):
            await handle.result()
        keep("generation", name, (await handle.fetch_history()).to_json())
        if job.callback is not None and name in ("succeeded", "canceled-running"):
            delivery = client.get_workflow_handle(callback_id(job.task_id))
            await delivery.result()
            keep("callback", name, (await delivery.fetch_history()).to_json())


async def record_batch(client: Client, name: str) -> None:
    """Run one branch of a batch and keep the histories of its runs."""
    for number, history in enumerate(await batches.histories(client, name)):
        keep("batch", f"{name}-{number}" if number else name, history)


async def main() -> None:
    """Record every branch."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=dynamic_config_args(),
        dev_server_log_level="error",
        search_attributes=list(SEARCH_ATTRIBUTES),
    )
    async with env:
        for name in BRANCHES:
            await record(env.client, name)
        for name in batches.BRANCHES:
            await record_batch(env.client, name)


if __name__ == "__main__":
    asyncio.run(main())
