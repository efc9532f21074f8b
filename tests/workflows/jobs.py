"""Jobs for workflow tests: a real server and the real workflow, attempts that follow a script.

The scripted activity does what a real attempt does at its edges (signal first, heartbeats, results by contract)
and replaces only the GPU in the middle, so that every outcome can be had on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TypedDict, Unpack
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowHandle
from temporalio.common import Priority, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ApplicationError
from temporalio.worker import Interceptor, Worker

from workflows import naming
from workflows.callback import CallbackWorkflow
from workflows.contracts import (
    DELIVER_CALLBACK,
    FIND_ARTIFACT,
    GENERATE_CLIP,
    REMOVE_ARTIFACTS,
    ArtifactActivities,
    CallbackActivities,
    GenerationActivities,
)
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.states import TaskStatus
from workflows.tasks import (
    Artifact,
    AttemptStarted,
    CallbackTarget,
    DeliverCallbackInput,
    DeliveryAttempt,
    DeliveryOutcome,
    FindArtifactInput,
    GenerateClipInput,
    GenerateClipResult,
    GenerationInput,
    GenerationParameters,
    Limits,
    RemoveArtifactsInput,
    TaskEvent,
    TaskRecord,
    User,
)

PARAMETERS = GenerationParameters(
    model="scripted",
    prompt="a red circle moving right",
    width=128,
    height=128,
    num_frames=16,
    fps=8.0,
    num_inference_steps=25,
    guidance_scale=3.0,
    seed=1,
)

ALL_EVENTS = tuple(TaskEvent)

Act = Callable[["ScriptedGeneration", GenerateClipInput], Awaitable[GenerateClipResult]]


def plan(**changes: object) -> GenerationInput:
    """An accepted request with a fresh id and a pool of its own."""
    task_id = f"t{uuid4().hex[:26]}"
    base = GenerationInput(
        task_id=task_id,
        user=User(tenant="acme"),
        parameters=PARAMETERS,
        model_revision="1",
        pool=f"pool-{task_id}",
        artifact_key=f"key-{task_id}",
        accepted_at=datetime.now(UTC),
        limits=Limits(queue_timeout_seconds=120, heartbeat_timeout_seconds=30),
        callback=CallbackTarget(url="http://127.0.0.1:9/", events=ALL_EVENTS),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def artifact_of(attempt: GenerateClipInput) -> Artifact:
    """What this attempt would publish."""
    prefix = naming.attempt_prefix(attempt.artifact_key, attempt.token)
    return Artifact(
        key=attempt.artifact_key,
        token=attempt.token,
        video_key=f"{prefix}/video.mp4",
        poster_key=f"{prefix}/poster.webp",
        sha256="0" * 64,
        bytes=1,
        poster_sha256="0" * 64,
        poster_bytes=1,
        width=128,
        height=128,
        num_frames=16,
        fps=8.0,
        seed=1,
        model="scripted",
        model_revision="1",
        created_at=datetime.now(UTC),
        expires_at=datetime.now(UTC) + timedelta(days=7),
    )


class ScriptedGeneration(GenerationActivities):
    """Each call of `generate_clip` plays the next act; the last act is repeated."""

    def __init__(self, client: Client, *acts: Act) -> None:
        self.client = client
        self.acts = list(acts)
        self.calls: list[GenerateClipInput] = []
        self.ends: list[str] = []
        self.published: list[Artifact] = []
        self.started = asyncio.Event()

    @activity.defn(name=GENERATE_CLIP)
    async def generate_clip(self, attempt: GenerateClipInput) -> GenerateClipResult:
        act = self.acts[min(len(self.calls), len(self.acts) - 1)]
        self.calls.append(attempt)
        try:
            result = await act(self, attempt)
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        self.ends.append("published")
        return result

    async def signal_start(self, attempt: GenerateClipInput, worker_id: str = "host/cpu:0") -> None:
        info = activity.info()
        assert info.workflow_id is not None
        handle = self.client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        await handle.signal(
            GenerationWorkflow.attempt_started,
            AttemptStarted(
                token=attempt.token,
                worker_id=worker_id,
                started_at=info.started_time,
                queued_at=info.scheduled_time,
                worker_version="test",
            ),
        )
        self.started.set()

    def publish(self, attempt: GenerateClipInput, gpu_seconds: float = 1.0) -> GenerateClipResult:
        artifact = artifact_of(attempt)
        self.published.append(artifact)
        return GenerateClipResult(
            artifact=artifact, worker_id="host/cpu:0", worker_version="test", gpu_seconds=gpu_seconds
        )


def succeed(after: float = 0.0) -> Act:
    """Start, work for `after` seconds, publish."""

    async def act(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
        await script.signal_start(attempt)
        await beating(after)
        return script.publish(attempt)

    return act


def fail(code: FailureCode | str, detail: str = "", *, signal: bool = True) -> Act:
    """Start and fail with a code."""

    async def act(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
        if signal:
            await script.signal_start(attempt)
        raise ApplicationError(detail, type=str(code), non_retryable=True)

    return act


def hang() -> Act:
    """Start and never come back, heart beating."""
    return succeed(after=3600)


def stop_late(after: float) -> Act:
    """Ignore the stop until the clip is out: the artifact was published before the stop."""

    async def act(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
        await script.signal_start(attempt)
        try:
            await beating(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(after)
        return script.publish(attempt)

    return act


def die() -> Act:
    """Start, then fall silent, as a killed worker does."""

    async def act(script: ScriptedGeneration, attempt: GenerateClipInput) -> GenerateClipResult:
        await script.signal_start(attempt)
        await asyncio.sleep(3600)
        raise AssertionError

    return act


async def beating(seconds: float) -> None:
    """Sleep with a heartbeat."""
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0:
        activity.heartbeat({"gpu_seconds": 0.5})
        await asyncio.sleep(min(left, 0.05))


class RecordedArtifacts(ArtifactActivities):
    """Artifact store seen from the control queue."""

    def __init__(self, found: Artifact | None = None) -> None:
        self.found = found
        self.removed: list[RemoveArtifactsInput] = []
        self.removing = asyncio.Event()
        self.may_remove = asyncio.Event()
        """Clear it to hold a removal up."""
        self.may_remove.set()
        self.asked = asyncio.Event()
        self.finds_slowly = False
        self.removes = True

    @activity.defn(name=FIND_ARTIFACT)
    async def find_artifact(self, request: FindArtifactInput) -> Artifact | None:
        self.asked.set()
        if self.finds_slowly:
            await asyncio.sleep(3600)
        return self.found

    @activity.defn(name=REMOVE_ARTIFACTS)
    async def remove_artifacts(self, request: RemoveArtifactsInput) -> int:
        if not self.removes:
            raise ApplicationError("the store is down", non_retryable=True)
        self.removed.append(request)
        self.removing.set()
        await self.may_remove.wait()
        return len(request.tokens)


class RecordedDelivery(CallbackActivities):
    """A receiver that takes everything."""

    def __init__(self) -> None:
        self.deliveries: list[DeliverCallbackInput] = []

    @activity.defn(name=DELIVER_CALLBACK)
    async def deliver_callback(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        self.deliveries.append(delivery)
        return DeliveryAttempt(
            number=delivery.number,
            outcome=DeliveryOutcome.DELIVERED,
            started_at=datetime.now(UTC),
            duration_ms=1,
            status_code=200,
            body="{}",
        )

    def events(self, task_id: str) -> list[str]:
        return [d.event.type for d in self.deliveries if d.event.task_id == task_id]


@dataclass
class Stage:
    """Workers of one test, on queues of their own where queues can be chosen."""

    client: Client
    generation: ScriptedGeneration
    artifacts: RecordedArtifacts = field(default_factory=RecordedArtifacts)
    delivery: RecordedDelivery = field(default_factory=RecordedDelivery)

    async def start(self, job: GenerationInput) -> WorkflowHandle[GenerationWorkflow, TaskRecord]:
        return await start_job(self.client, job)


async def start_job(client: Client, job: GenerationInput) -> WorkflowHandle[GenerationWorkflow, TaskRecord]:
    """Start a job as the API does."""
    return await client.start_workflow(
        GenerationWorkflow.run,
        job,
        id=job.task_id,
        task_queue=naming.CONTROL_QUEUE,
        priority=Priority(priority_key=naming.PRIORITY_KEYS[job.priority], fairness_key=naming.user_hash(job.user)),
        memo={naming.MEMO_REQUEST: job},
        search_attributes=TypedSearchAttributes(
            [
                SearchAttributePair(naming.TASK_STATUS, TaskStatus.QUEUED.value),
                SearchAttributePair(naming.USER_ID, naming.user_hash(job.user)),
                SearchAttributePair(naming.MODEL, job.parameters.model),
            ]
        ),
    )


class WorkflowOptions(TypedDict, total=False):
    """Options of the workers with workflows that a test may set."""

    interceptors: Sequence[Interceptor]
    max_cached_workflows: int
    max_concurrent_activities: int
    graceful_shutdown_timeout: timedelta


@asynccontextmanager
async def stage(
    client: Client, job: GenerationInput, *acts: Act, gpu: bool = True, **options: Unpack[WorkflowOptions]
) -> AsyncIterator[Stage]:
    """Run control, callback and (unless told otherwise) GPU workers for one job."""
    scene = Stage(client=client, generation=ScriptedGeneration(client, *acts))
    control = Worker(
        client,
        task_queue=naming.CONTROL_QUEUE,
        workflows=[GenerationWorkflow],
        activities=[scene.artifacts.find_artifact, scene.artifacts.remove_artifacts],
        **options,
    )
    callback = callback_worker(client, scene.delivery, **options)
    async with control, callback:
        if not gpu:
            yield scene
            return
        async with gpu_worker(scene, job):
            yield scene


def callback_worker(client: Client, delivery: CallbackActivities, **options: Unpack[WorkflowOptions]) -> Worker:
    """A worker for callbacks."""
    return Worker(
        client,
        task_queue=naming.CALLBACK_QUEUE,
        workflows=[CallbackWorkflow],
        activities=[delivery.deliver_callback],
        **options,
    )


def gpu_worker(scene: Stage, job: GenerationInput) -> Worker:
    """A worker for the job's pool."""
    return Worker(
        scene.client,
        task_queue=naming.gpu_queue(job.pool),
        activities=[scene.generation.generate_clip],
        max_concurrent_activities=4,
        max_heartbeat_throttle_interval=timedelta(milliseconds=200),
    )


async def record_of(description: WorkflowExecutionDescription) -> TaskRecord:
    """The memo `record` of a run, as a reader decodes it."""
    return await description.memo_value(naming.MEMO_RECORD, type_hint=TaskRecord)


def status_of(description: WorkflowExecutionDescription) -> str | None:
    """The search attribute `TaskStatus`."""
    return description.typed_search_attributes.get(naming.TASK_STATUS)
