"""Batches for workflow tests: real server, workflows, activities and store; only the GPU follows a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.batches import BatchItems, items_body
from activities.storage import ObjectStore
from tests.workflows.jobs import (
    PARAMETERS,
    RecordedArtifacts,
    RecordedDelivery,
    ScriptedGeneration,
    beating,
    callback_worker,
    plan,
)
from workflows import naming
from workflows.batch import BatchWorkflow
from workflows.batches import CONTENT_DIGITS, BatchInput, BatchRecord, item_content
from workflows.contracts import GENERATE_CLIP
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.tasks import CallbackTarget, GenerateClipInput, GenerateClipResult, GenerationInput, User

BatchHandle = WorkflowHandle[BatchWorkflow, BatchRecord]


class PlayedByPrompt(ScriptedGeneration):
    """`ok` publishes at once, `hold` when it is released, `fail` fails as long as `broken`; counts runs by prompt."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.runs: Counter[str] = Counter()
        self.running: set[str] = set()
        self.most_running = 0
        self.broken = True
        self.released = asyncio.Event()

    @activity.defn(name=GENERATE_CLIP)
    async def generate_clip(self, attempt: GenerateClipInput) -> GenerateClipResult:
        prompt = attempt.parameters.prompt
        self.runs[prompt] += 1
        self.running.add(prompt)
        self.most_running = max(self.most_running, len(self.running))
        try:
            await self.signal_start(attempt)
            if prompt.startswith("fail") and self.broken:
                raise ApplicationError("frames are NaN", type=FailureCode.INVALID_OUTPUT, non_retryable=True)
            while prompt.startswith("hold") and not self.released.is_set():
                await beating(0.05)
            return self.publish(attempt)
        finally:
            self.running.discard(prompt)


@dataclass
class BatchStage:
    """Workers and store of one test."""

    client: Client
    store: ObjectStore
    played: PlayedByPrompt
    pool: str = field(default_factory=lambda: f"pool-{uuid4().hex[:8]}")
    delivery: RecordedDelivery = field(default_factory=RecordedDelivery)

    async def post(
        self, prompts: Sequence[str], *, after: BatchInput | None = None, stored: bool = True, **changes: object
    ) -> tuple[BatchInput, BatchHandle]:
        """Store the items and start the batch, as the API does; `after` posts a closed one again."""
        user = after.user if after else User(tenant=f"tenant-{uuid4().hex[:8]}")
        key = after.idempotency_key if after else "explicit:batch"
        batch_id = naming.batch_id(user, key, after=after.batch_id if after else None)
        root_id = after.root_id if after else batch_id
        contents = "".join(sha256(prompt.encode()).hexdigest()[:CONTENT_DIGITS] for prompt in prompts)
        given = BatchInput(
            batch_id=batch_id,
            root_id=root_id,
            user=user,
            items_key=naming.batch_items_key(user, batch_id),
            states="C" * len(prompts),
            contents=contents,
            accepted_at=datetime.now(UTC),
            deadline_seconds=600,
            url=f"http://gateway/api/v1/batches/{batch_id}",
            callback=CallbackTarget(url="http://127.0.0.1:9/"),
            idempotency_key=key,
            retry_of=after.batch_id if after else None,
        )
        given = replace(given, **changes)  # type: ignore[arg-type]
        plans = [self._plan(given, index, prompt) for index, prompt in enumerate(prompts)]
        if stored:
            await self.store.put(given.items_key, items_body(plans), content_type="application/x-ndjson")
        handle = await self.client.start_workflow(
            BatchWorkflow.run,
            given,
            id=batch_id,
            task_queue=naming.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            memo={naming.MEMO_REQUEST: given},
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(naming.USER_ID, naming.user_hash(user)),
                    SearchAttributePair(naming.BATCH_ID, batch_id),
                ]
            ),
        )
        return given, handle

    def _plan(self, given: BatchInput, index: int, prompt: str) -> GenerationInput:
        key = naming.batch_item_key(given.root_id, index, item_content(given.contents, index))
        task_id = naming.task_id(given.user, key)
        return plan(
            task_id=task_id,
            user=given.user,
            parameters=replace(PARAMETERS, prompt=prompt),
            pool=self.pool,
            artifact_key=f"key-{task_id}",
            callback=None,
            idempotency_key=key,
        )

    async def until(self, condition: str, given: BatchInput, *, seconds: float = 20) -> BatchRecord:
        """Wait until the states of the batch's memo are as written."""
        async with asyncio.timeout(seconds):
            while (record := await self.record(given)) is None or record.states != condition:
                await asyncio.sleep(0.02)
        return record

    async def record(self, given: BatchInput) -> BatchRecord | None:
        """The memo `record`, as a reader sees it."""
        description = await self.client.get_workflow_handle(given.batch_id).describe()
        record: BatchRecord | None = await description.memo_value(naming.MEMO_RECORD, None, type_hint=BatchRecord)
        return record

    def callbacks(self, given: BatchInput) -> list[str | None]:
        """Bodies that were sent for the batch."""
        return [d.body for d in self.delivery.deliveries if d.webhook_id == given.batch_id]


@asynccontextmanager
async def batch_stage(client: Client, store: ObjectStore, *, cache: int = 1_000) -> AsyncIterator[BatchStage]:
    """Run control, callback and GPU workers."""
    scene = BatchStage(client=client, store=store, played=PlayedByPrompt(client))
    items, artifacts = BatchItems(client, store), RecordedArtifacts()
    control = Worker(
        client,
        task_queue=naming.CONTROL_QUEUE,
        workflows=[BatchWorkflow, GenerationWorkflow],
        activities=[
            items.run_batch_step,
            items.cancel_batch_items,
            items.remove_batch_items,
            artifacts.find_artifact,
            artifacts.remove_artifacts,
        ],
        max_cached_workflows=cache,
    )
    callback = callback_worker(client, scene.delivery)
    gpu = Worker(
        client,
        task_queue=naming.gpu_queue(scene.pool),
        activities=[scene.played.generate_clip],
        max_concurrent_activities=20,
        max_heartbeat_throttle_interval=timedelta(milliseconds=200),
    )
    async with control, callback, gpu:
        try:
            yield scene
        finally:
            scene.played.released.set()
