"""A batch as the API posts it, on a site of real processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from uuid import uuid4

import pytest
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.service import RPCError

from activities.batches import ITEMS_TYPE, items_body
from tests.durability.site import Site
from tests.scale import scaled
from tests.workflows.jobs import record_of
from workers.registry import object_store
from workflows import naming
from workflows.batch import BatchWorkflow
from workflows.batches import CONTENT_DIGITS, BatchInput, BatchRecord
from workflows.tasks import CallbackTarget, GenerationInput, TaskRecord

SIZE = max(7, scaled(30))


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
