"""How long to wait for an answer that only a control worker can give.

Without a control worker nobody should wait: 503 now, and the client comes again. A control worker that has much to do
answers everyone in the end, and a 503 would only send the same request once more. A worker at work takes tasks from
its queue and one that is gone does not, and the server notes the time of each poll: two looks tell them apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from api.problems import TemporalUnavailableError
from api.temporal_calls import bounded
from workflows.naming import CONTROL_QUEUE

GRACE_SECONDS: Final = 2.0
"""After the last sign of a worker the wait goes on for so long."""
LOOK_AFTER_SECONDS: Final = 0.4
"""Most answers are there by then, and nobody looks."""
LOOK_EVERY_SECONDS: Final = 0.6
_SHARED_SECONDS: Final = 0.3
"""A look serves everyone who waits in this process for so long."""
_LOOK_LIMIT: Final = timedelta(seconds=1)
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


class ControlPulse:
    """Signs of life of the control workers, shared by all who wait for them in one process.

    Args:
        client: asked only while somebody waits longer than usual.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._heard_at = -GRACE_SECONDS
        self._seen: datetime | None = None
        self._seen_at = -_SHARED_SECONDS
        self._look = asyncio.Lock()

    def heard(self) -> None:
        """A control worker has answered somebody."""
        self._heard_at = time.monotonic()

    @asynccontextmanager
    async def limit(self, *, at_least: timedelta, at_most: timedelta) -> AsyncIterator[None]:
        """Bound the time of what is done inside: `at_least`, and up to `at_most` while control workers take tasks.

        Raises:
            TimeoutError: it took longer.
        """
        async with asyncio.timeout(at_most.total_seconds()) as timeout:
            watching = asyncio.create_task(self._watch(timeout, at_least.total_seconds()), name="control pulse")
            try:
                yield
            finally:
                watching.cancel()

    async def _watch(self, timeout: asyncio.Timeout, at_least: float) -> None:
        """Let `timeout` expire when there is no sign of a worker any more."""
        began = time.monotonic()
        give_up_at, look_at = began + at_least, began + LOOK_AFTER_SECONDS
        before: datetime | None = None
        while True:
            give_up_at = max(give_up_at, self._heard_at + GRACE_SECONDS)
            now = time.monotonic()
            if now >= give_up_at:
                timeout.reschedule(asyncio.get_running_loop().time())
                return
            if now < look_at:
                await asyncio.sleep(min(look_at, give_up_at) - now)
                continue
            look_at = now + LOOK_EVERY_SECONDS
            if now - self._heard_at < LOOK_EVERY_SECONDS:
                # Polls older than that answer must not count as signs after it.
                before = None
                continue
            newest = await self._newest_poll()
            if newest is not None and before is not None and newest > before:
                give_up_at = max(give_up_at, time.monotonic() + GRACE_SECONDS)
            before = newest or before

    async def _newest_poll(self) -> datetime | None:
        """When a control worker last asked for a task, by the server's clock; None when Temporal does not say."""
        async with self._look:
            if time.monotonic() - self._seen_at >= _SHARED_SECONDS:
                self._seen = await self._ask()
                self._seen_at = time.monotonic()
            return self._seen

    async def _ask(self) -> datetime | None:
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=CONTROL_QUEUE),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
            report_pollers=True,
        )
        try:
            reply = await bounded(lambda: self._client.workflow_service.describe_task_queue(request), limit=_LOOK_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return None
        return max((poller.last_access_time.ToDatetime(tzinfo=UTC) for poller in reply.pollers), default=_NEVER)
