"""Every task queue in numbers, for the metrics: the GPU pools', and those of the callback and the control workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue, TaskQueueStats
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from api.fleet import Fleet
from api.problems import TemporalUnavailableError
from api.queue_statistics import Queues
from api.temporal_calls import bounded
from workflows import naming

CACHE_SECONDS: Final = 1.0
_CALL_LIMIT: Final = timedelta(seconds=1)

_ACTIVITIES: Final = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
_WORKFLOWS: Final = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
_OTHER_QUEUES: Final = {
    naming.CALLBACK_QUEUE: (_WORKFLOWS, _ACTIVITIES),
    naming.CONTROL_QUEUE: (_WORKFLOWS, _ACTIVITIES),
}
"""Queues beside the GPU pools', with the kinds of entries that they hold."""


@dataclass(frozen=True, kw_only=True)
class QueueReading:
    """One task queue; None: unknown, or not a question for this queue."""

    queue: str
    backlog: float | None = None
    backlog_age_seconds: float | None = None
    arrival_rate: float | None = None
    completion_rate: float | None = None
    drain_seconds: float | None = None
    live_slots: float | None = None
    workers: float | None = None


class QueueReport:
    """Reads all queues.

    Args:
        client: asked once per `CACHE_SECONDS`, whatever the number of readers.
        queues: statistics of the GPU pools.
        fleet: knows the live workers.
        pools: names of the GPU pools.
    """

    def __init__(self, client: Client, *, queues: Queues, fleet: Fleet, pools: Iterable[str]) -> None:
        self._client = client
        self._queues = queues
        self._fleet = fleet
        self._pools = sorted(set(pools))
        self._lock = asyncio.Lock()
        self._last: Sequence[QueueReading] = ()
        self._until = 0.0

    async def read(self) -> Sequence[QueueReading]:
        """All queues; what Temporal does not say is left out."""
        async with self._lock:
            if self._until <= time.monotonic():
                self._last = await asyncio.gather(
                    *(self._pool(pool) for pool in self._pools), *(self._other(queue) for queue in _OTHER_QUEUES)
                )
                self._until = time.monotonic() + CACHE_SECONDS
            return self._last

    async def _pool(self, pool: str) -> QueueReading:
        name = naming.gpu_queue(pool)
        statistics, fleet = await asyncio.gather(self._queues.pool(pool), self._fleet.pool(pool))
        if statistics is None:
            return QueueReading(queue=name, workers=fleet.workers)
        return QueueReading(
            queue=name,
            backlog=statistics.backlog,
            backlog_age_seconds=statistics.backlog_age_seconds,
            arrival_rate=statistics.arrival_rate,
            completion_rate=statistics.completion_rate,
            drain_seconds=statistics.drain_seconds,
            live_slots=statistics.live_slots,
            workers=fleet.workers,
        )

    async def _other(self, queue: str) -> QueueReading:
        kinds = _OTHER_QUEUES[queue]
        found, workers = await asyncio.gather(
            asyncio.gather(*(self._stats(queue, kind) for kind in kinds)), self._fleet.live_workers(queue)
        )
        stats = [each for each in found if each is not None]
        if len(stats) < len(kinds):
            return QueueReading(queue=queue, workers=workers)
        return QueueReading(
            queue=queue,
            backlog=sum(each.approximate_backlog_count for each in stats),
            backlog_age_seconds=max(each.approximate_backlog_age.ToTimedelta().total_seconds() for each in stats),
            arrival_rate=sum(each.tasks_add_rate for each in stats),
            completion_rate=sum(each.tasks_dispatch_rate for each in stats),
            workers=workers,
        )

    async def _stats(self, queue: str, kind: TaskQueueType.ValueType) -> TaskQueueStats | None:
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=kind,
            report_stats=True,
        )
        try:
            reply = await bounded(lambda: self._client.workflow_service.describe_task_queue(request), limit=_CALL_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return None
        return reply.stats
