"""Record the histories that `test_replay.py` replays: `python -m tests.replay.record [BEGINNING OF A NAME ...]`.

Run it only when a workflow's command order changed on purpose, before its first release or behind a
`workflow.patched` gate; in the second case the old files stay, under their old names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.testing import WorkflowEnvironment

from tests.replay import admissions, batches, deliveries, rollouts, sweeps
from tests.workflows.jobs import Act, Stage, artifact_of, die, fail, hang, plan, stage, status_of, stop_late, succeed
from workers.devserver import server_args, temporal_binary
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.naming import callback_id
from workflows.tasks import AdmissionPlace, AttemptStarted, GenerateClipInput, GenerationInput, Limits, TaskRecord

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


async def cancel_hard_after_soft(scene: Stage, handle: Handle) -> None:
    """Soft cancel, then a hard one that meets a clip that is out already."""
    await cancel_soft(scene, handle)
    await handle.cancel()


async def ask_in_vain(scene: Stage, handle: Handle) -> None:
    """What changes nothing: a soft cancel of a task that has not started, a revive of one that is not canceled."""
    await handle.execute_update(GenerationWorkflow.cancel_soft)
    await handle.execute_update(GenerationWorkflow.revive)
    await handle.cancel()


async def ask_twice(scene: Stage, handle: Handle) -> None:
    """A second soft cancel, and the start of an attempt of an earlier round."""
    await cancel_soft(scene, handle)
    await handle.execute_update(GenerationWorkflow.cancel_soft)
    late = datetime(2026, 1, 1, tzinfo=UTC)
    start = AttemptStarted(token="late", worker_id="host/cpu:0", started_at=late, queued_at=late)
    await handle.signal(GenerationWorkflow.attempt_started, start)


async def cancel_finding(scene: Stage, handle: Handle) -> None:
    """Hard cancel while the clip of an earlier task is looked for."""
    await scene.artifacts.asked.wait()
    await handle.cancel()


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
    "found-no-artifact": (plan(retry_of="t0"), [succeed()], True, nothing),
    "canceled-finding": (plan(retry_of="t0"), [succeed()], True, cancel_finding),
    "canceled-hard-after-soft": (plan(), [stop_late(0.2)], True, cancel_hard_after_soft),
    "canceled-soft-in-vain": (plan(), [succeed()], False, ask_in_vain),
    "canceled-soft-twice": (plan(), [succeed(after=0.5)], True, ask_twice),
    "drained": (plan(), [fail(FailureCode.WORKER_SHUTDOWN), succeed()], True, nothing),
    "timed-out-processing": (plan(), [fail(FailureCode.PROCESSING_TIMEOUT)], True, nothing),
    "leftovers-kept": (plan(limits=QUICK), [die(), succeed()], True, nothing),
    "place-given-back": (
        plan(places=(AdmissionPlace(admission_id="admission-gone", token="p"),)),
        [succeed()],
        True,
        nothing,
    ),
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
        scene.artifacts.finds_slowly = name == "canceled-finding"
        scene.artifacts.removes = name != "leftovers-kept"
        if name == "found-artifact":
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


OTHERS: Mapping[str, tuple[Mapping[str, object], Callable[[Client, str], Awaitable[list[str]]]]] = {
    "batch": (batches.BRANCHES, batches.histories),
    "admission": (admissions.BRANCHES, admissions.histories),
    "callback": (deliveries.BRANCHES, deliveries.histories),
    "retention": (sweeps.BRANCHES, sweeps.histories),
    "rollout": (rollouts.BRANCHES, rollouts.histories),
}
"""Branches by kind of workflow, and what runs one of them."""


async def record_runs(client: Client, kind: str, name: str) -> None:
    """Run one branch of another kind and keep the histories of its runs."""
    _, histories = OTHERS[kind]
    for number, history in enumerate(await histories(client, name)):
        keep(kind, f"{name}-{number}" if number else name, history)


async def server(*more: str) -> WorkflowEnvironment:
    """A server to record on."""
    return await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=[*server_args(), *more],
        dev_server_log_level="error",
    )


async def main(*wanted: str) -> None:
    """Record every branch, or those whose file names begin with one of `wanted`."""

    def is_wanted(kind: str, name: str) -> bool:
        return not wanted or any(f"{kind}-{name}".startswith(begin) for begin in wanted)

    for kind in ("generation", *OTHERS):
        branches = BRANCHES if kind == "generation" else OTHERS[kind][0]
        names = [name for name in branches if is_wanted(kind, name)]
        if not names:
            continue
        # One server for each kind: what one leaves behind is not there for the workers of the next.
        async with await server() as env:
            for name in names:
                async with asyncio.timeout(60):
                    await (record(env.client, name) if kind == "generation" else record_runs(env.client, kind, name))
    if names := [name for name in deliveries.LONG if is_wanted("callback", name)]:
        async with await server("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=30") as short:
            for name in names:
                await record_runs(short.client, "callback", name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
