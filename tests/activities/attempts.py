"""A GPU worker over the session's pool and a workflow for one attempt: what `generate_clip` meets in real life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import FixedSizeSlotSupplier, Worker, WorkerTuner

from activities.artifacts import ArtifactRepository
from activities.attempt import SafetyChecker
from activities.generation import ClipGeneration
from activities.inference.health import DeviceState
from activities.inference.slots import LeaseSlotSupplier
from activities.storage import ObjectStore
from tests.activities.attempt_workflow import OneAttempt, OneAttemptWorkflow
from tests.inference_pools import Studio
from workflows.tasks import AttemptFailure, GenerateClipInput, GenerateClipResult, Limits

Handle = WorkflowHandle[OneAttemptWorkflow, GenerateClipResult]


@dataclass
class Shop:
    """One GPU worker, its store and its scratch folder."""

    client: Client
    studio: Studio
    store: ObjectStore
    store_folder: Path
    scratch: Path
    queue: str = field(default_factory=lambda: f"gpu-test-{uuid4().hex}")
    control_queue: str = field(default_factory=lambda: f"control-test-{uuid4().hex}")
    worker: Worker | None = None

    def attempt(self, model: str = "tiny-ltx", limits: Limits | None = None, **changes: object) -> GenerateClipInput:
        """An attempt at a clip that nobody made yet."""
        return GenerateClipInput(
            task_id=f"t{uuid4().hex[:26]}",
            token=uuid4().hex,
            attempt=1,
            parameters=self.studio.parameters(model, **changes),
            model_revision=self.studio.catalogue.get(model).revision,
            artifact_key=uuid4().hex,
            limits=limits or Limits(heartbeat_timeout_seconds=5),
        )

    def endless(self, limits: Limits | None = None) -> GenerateClipInput:
        """An attempt that takes several seconds, in a thousand steps."""
        return self.attempt("tiny-wan", limits, num_inference_steps=1_000)

    async def start(self, attempt: GenerateClipInput, *, priority: int = 3, activity_id: str | None = None) -> Handle:
        """Start a workflow that makes the attempt."""
        return await self.client.start_workflow(
            OneAttemptWorkflow.run,
            OneAttempt(attempt=attempt, queue=self.queue, activity_id=activity_id or attempt.token, priority=priority),
            id=attempt.task_id,
            task_queue=self.control_queue,
        )

    async def failure(
        self, attempt: GenerateClipInput, *, activity_id: str | None = None
    ) -> tuple[ApplicationError, AttemptFailure]:
        """Make an attempt that must fail; return its error with the detail decoded."""
        error = await end_of(await self.start(attempt, activity_id=activity_id))
        assert isinstance(error, ApplicationError), repr(error)
        [detail] = error.details
        return error, AttemptFailure(**detail)

    def objects(self) -> list[str]:
        """Files in the store."""
        return sorted(
            str(path.relative_to(self.store_folder)) for path in self.store_folder.rglob("*") if path.is_file()
        )

    def leftovers(self) -> list[Path]:
        """What is left in the scratch folder."""
        return list(self.scratch.iterdir()) if self.scratch.exists() else []

    async def until_step(self, handle: Handle, step: int) -> None:
        """Wait until the heartbeat tells of a step."""
        async with asyncio.timeout(60):
            while (await self.beat(handle)).get("step", 0) < step:
                await asyncio.sleep(0.02)

    async def until_on_the_device(self) -> None:
        """Wait until an attempt has the device. Sooner than its heartbeat tells, which comes once a second."""
        async with asyncio.timeout(60):
            while self.studio.health().state is not DeviceState.BUSY:
                await asyncio.sleep(0.01)

    async def until_scheduled(self, handle: Handle) -> None:
        """Wait until the activity waits for a worker."""
        async with asyncio.timeout(60):
            while not (await handle.describe()).raw_description.pending_activities:
                await asyncio.sleep(0.02)

    async def beat(self, handle: Handle) -> dict[str, Any]:
        """Last heartbeat that the server has."""
        description = await handle.describe()
        for pending in description.raw_description.pending_activities:
            if pending.heartbeat_details.payloads:
                [details] = await self.client.data_converter.decode(pending.heartbeat_details.payloads)
                return dict(details)
        return {}


@asynccontextmanager
async def shop(
    client: Client,
    studio: Studio,
    folder: Path,
    *,
    safety: SafetyChecker | None = None,
    artifacts: type[ArtifactRepository] = ArtifactRepository,
    graceful: timedelta = timedelta(seconds=0),
) -> AsyncIterator[Shop]:
    """Run a GPU worker with the lease slot supplier, and a worker for the workflow above."""
    store = ObjectStore.from_url(f"file://{folder / 'store'}")
    place = Shop(client=client, studio=studio, store=store, store_folder=folder / "store", scratch=folder / "scratch")
    generation = ClipGeneration(
        client=client,
        pool=studio.pool,
        artifacts=artifacts(store, retention=timedelta(days=7)),
        store=store,
        catalogue=studio.catalogue,
        scratch=place.scratch,
        worker_version="test",
        safety=safety,
    )
    unused = FixedSizeSlotSupplier(1)
    gpu = Worker(
        client,
        task_queue=place.queue,
        activities=[generation.generate_clip],
        tuner=WorkerTuner.create_composite(
            workflow_supplier=unused,
            activity_supplier=LeaseSlotSupplier(studio.pool.leases),
            local_activity_supplier=unused,
            nexus_supplier=unused,
        ),
        max_heartbeat_throttle_interval=timedelta(milliseconds=200),
        graceful_shutdown_timeout=graceful,
    )
    place.worker = gpu
    control = Worker(client, task_queue=place.control_queue, workflows=[OneAttemptWorkflow])
    async with control, gpu:
        yield place
    async with asyncio.timeout(30):
        # The SDK gives permits back from its own threads.
        while studio.pool.leases.permits or studio.health().leased:
            await asyncio.sleep(0.02)
    assert place.leftovers() == []


def with_token(attempt: GenerateClipInput, **changes: object) -> GenerateClipInput:
    """The attempt, changed."""
    return replace(attempt, **changes)  # type: ignore[arg-type]


async def end_of(handle: Handle) -> BaseException | None:
    """What ended the activity of a failed workflow; None when it succeeded."""
    outcome = (await asyncio.gather(handle.result(), return_exceptions=True))[0]
    if not isinstance(outcome, WorkflowFailureError):
        return None
    cause = outcome.cause
    return cause.cause if isinstance(cause, ActivityError) else cause
