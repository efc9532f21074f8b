"""Processes die while a batch runs: it goes on where it was, and no item is generated twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.service import RPCError

from activities.batches import ITEMS_TYPE, items_body
from tests.durability.site import Site
from tests.receiver import Receiver
from tests.scale import scaled
from tests.workflows.jobs import record_of
from workers.registry import object_store
from workflows import naming
from workflows.batch import BatchWorkflow
from workflows.batches import CONTENT_DIGITS, BatchInput, BatchRecord, BatchStatus
from workflows.tasks import CallbackTarget, GenerationInput, TaskRecord

pytestmark = [pytest.mark.durability, pytest.mark.timeout(300)]

SIZE = max(7, scaled(30))
KILLED_AT = min(20, SIZE - 5)
"""Items that are done when the first process dies; the next ones follow an item later each."""


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with Receiver() as receiver:
        opened = await Site.open(tmp_path_factory.mktemp("batch-site"), receiver)
        try:
            yield opened
        finally:
            opened.close()


@dataclass
class Posted:
    """A batch on a site."""

    site: Site
    request: BatchInput
    plans: list[GenerationInput]

    @classmethod
    async def start(cls, site: Site, plans: list[GenerationInput] | None = None, after: Posted | None = None) -> Posted:
        """Post a batch as the API does, or a closed one again."""
        plans = plans or [site.job(steps=20) for _ in range(SIZE)]
        user, key = plans[0].user, after.request.idempotency_key if after else f"explicit:{uuid4()}"
        batch_id = naming.batch_id(user, key, after=after.request.batch_id if after else None)
        root = after.request.root_id if after else batch_id
        contents = [sha256(plan.parameters.prompt.encode()).hexdigest()[:CONTENT_DIGITS] for plan in plans]
        keys = [naming.batch_item_key(root, index, content) for index, content in enumerate(contents)]
        plans = [
            replace(plan, task_id=naming.task_id(user, item), idempotency_key=item, callback=None)
            for plan, item in zip(plans, keys, strict=True)
        ]
        request = BatchInput(
            batch_id=batch_id,
            root_id=root,
            user=user,
            items_key=naming.batch_items_key(user, batch_id),
            states="C" * len(plans),
            contents="".join(contents),
            accepted_at=datetime.now(UTC),
            deadline_seconds=600,
            url=f"http://gateway/api/v1/batches/{batch_id}",
            callback=CallbackTarget(url=site.receiver.url),
            idempotency_key=key,
        )
        await object_store(site.settings).put(request.items_key, items_body(plans), content_type=ITEMS_TYPE)
        await (await site.client()).start_workflow(
            BatchWorkflow.run,
            request,
            id=batch_id,
            task_queue=naming.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            memo={naming.MEMO_REQUEST: request},
            search_attributes=TypedSearchAttributes([SearchAttributePair(naming.USER_ID, naming.user_hash(user))]),
        )
        return cls(site=site, request=request, plans=plans)

    async def record(self) -> BatchRecord | None:
        """The memo, while there is a server to ask."""
        handle = (await self.site.client()).get_workflow_handle(self.request.batch_id)
        record: BatchRecord | None = await (await handle.describe()).memo_value(
            naming.MEMO_RECORD, None, type_hint=BatchRecord
        )
        return record

    async def until_done(self, count: int) -> None:
        """Wait until so many items have succeeded."""
        async with asyncio.timeout(120):
            while (record := await self.record()) is None or record.states.count("S") < count:
                await asyncio.sleep(0.05)

    async def end(self) -> BatchRecord:
        """Wait until it has ended."""
        async with asyncio.timeout(180):
            while (record := await self.record()) is None or record.finished_at is None:
                await asyncio.sleep(0.1)
        return record

    async def task_records(self) -> list[TaskRecord]:
        """The records of the items' tasks; each chain has one link."""
        client = await self.site.client()
        for plan in self.plans:
            following = naming.task_id(plan.user, plan.idempotency_key, after=plan.task_id)
            with pytest.raises(RPCError, match="not found"):
                await client.get_workflow_handle(following).describe()
        return [await record_of(await self.site.describe(plan)) for plan in self.plans]

    def bodies(self) -> list[dict[str, object]]:
        """What the receiver got for the batch."""
        return [
            body for r in self.site.receiver.requests if (body := r.json()).get("batch_id") == self.request.batch_id
        ]


async def test_a_batch_survives_every_process_and_posted_again_generates_nothing(site: Site) -> None:
    batch = await Posted.start(site)
    await batch.until_done(KILLED_AT)
    site.processes["gpu-a"].kill()
    site.start("gpu-a")
    await batch.until_done(KILLED_AT + 1)
    site.processes["control"].kill()
    site.start("control")
    await batch.until_done(KILLED_AT + 2)
    site.processes["temporal"].kill()
    await asyncio.sleep(1)
    await site.start_server()

    record = await batch.end()
    assert (record.status, record.states) == (BatchStatus.COMPLETED, "S" * SIZE)
    records = await batch.task_records()
    # An item whose worker or whose server died has lost attempts; none has a second clip.
    assert [sum(a.outcome is None for a in task.attempts) for task in records] == [1] * SIZE
    assert [len(site.manifests(plan)) for plan in batch.plans] == [1] * SIZE
    assert sum(task.attempt_count for task in records) <= SIZE + 6
    async with asyncio.timeout(30):
        while not batch.bodies():
            await asyncio.sleep(0.1)
    assert [(body["type"], body["status"]) for body in batch.bodies()] == [("batch.completed", "COMPLETED")]

    again = await Posted.start(site, batch.plans, after=batch)
    repeated = await again.end()
    assert (repeated.states, repeated.gpu_seconds) == ("S" * SIZE, 0.0)
    assert await batch.task_records() == records
    assert [len(site.manifests(plan)) for plan in batch.plans] == [1] * SIZE


async def test_a_batch_that_was_lost_for_good_is_resumed_by_posting_it_again(site: Site) -> None:
    batch = await Posted.start(site)
    await batch.until_done(SIZE * 2 // 3)
    handle = (await site.client()).get_workflow_handle(batch.request.batch_id)
    await handle.terminate()
    before = await batch.record()
    assert before is not None
    done = before.states.count("S")
    resumed_at = datetime.now(UTC)
    again = await Posted.start(site, batch.plans, after=batch)
    assert (await again.end()).states == "S" * SIZE
    records = await batch.task_records()
    assert [task.attempt_count for task in records] == [1] * SIZE
    # What ran after the loss: the rest, and what was open in that moment.
    started = [task.started_at for task in records]
    later = sum(at is not None and at > resumed_at for at in started)
    assert SIZE - done - batch.request.parallelism - 1 <= later <= SIZE - done
    assert max(task.finished_at - resumed_at for task in records if task.finished_at) < timedelta(seconds=120)
