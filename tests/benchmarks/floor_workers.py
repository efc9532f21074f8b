"""Workers of the floor that the product is measured against, and a GPU worker whose clips cost nothing.

`python -m tests.benchmarks.floor_workers gpu|bare`; settings come from the environment, as for the product's workers.
"""

from __future__ import annotations

import asyncio
import sys

from temporalio import activity
from temporalio.worker import Worker

from tests.benchmarks.floor import BARE_QUEUE, BareWorkflow, first, second
from tests.workflows.jobs import ScriptedGeneration, fail, succeed
from workers.connection import connect
from workers.settings import Settings
from workflows.failures import FailureCode
from workflows.naming import gpu_queue
from workflows.tasks import GenerateClipInput, GenerateClipResult

FAILS_ONCE = "fails once"
"""Prompt of a task that needs two attempts."""
_POOL = "default"
_CONCURRENCY = 50


_failed: set[str] = set()


async def _free_of_cost(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
    """Publish at once; a task whose prompt says so fails in its first attempt."""
    job = activity.info().workflow_id or ""
    if attempt.parameters.prompt == FAILS_ONCE and job not in _failed:
        _failed.add(job)
        return await fail(FailureCode.WORKER_LOST)(script, attempt)
    return await succeed()(script, attempt)


async def main(kind: str) -> None:
    """Work until killed."""
    client = await connect(Settings(), identity=f"floor {kind}")
    if kind == "gpu":
        generation = ScriptedGeneration(client, _free_of_cost)
        worker = Worker(
            client,
            task_queue=gpu_queue(_POOL),
            activities=[generation.generate_clip],
            max_concurrent_activities=_CONCURRENCY,
        )
    else:
        worker = Worker(client, task_queue=BARE_QUEUE, workflows=[BareWorkflow], activities=[first, second])
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
