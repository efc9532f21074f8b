"""What waits in a GPU pool's queue and how long that will take, as Temporal knows it; cached, and never failing a page.

The length of a task is measured on the newest tasks that ended with a clip. Nothing here is exact: the counts are
Temporal's approximations and up to `CACHE_SECONDS` old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client, WorkflowExecution
from temporalio.service import RPCError

from activities.inference.catalogue import Catalogue
from api.fleet import Fleet
from api.problems import TemporalUnavailableError
from api.temporal_calls import bounded
from workflows import naming
from workflows.states import TaskStatus
from workflows.tasks import TaskRecord

CACHE_SECONDS: Final = 1.0
RECENT_SECONDS: Final = 3.0
LENGTHS_CACHE_SECONDS: Final = 30.0
MAX_MEASURED: Final = 50
"""Newest ended tasks that a mean is taken over."""
_NO_LENGTH_CACHE_SECONDS: Final = 3.0
"""A pool that has finished nothing yet is asked about sooner."""
_CALL_LIMIT: Final = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class TaskLength:
    """Means over the newest tasks of a pool that were generated."""

    processing_seconds: float
    """In PROCESSING, over all attempts."""
    gpu_seconds: float
    tasks: int
    """How many were looked at."""


@dataclass(frozen=True, kw_only=True)
class QueueStatistics:
    """One pool's queue."""

    pool: str
    backlog: int
    """Tasks that no worker has taken."""
    backlog_age_seconds: float
    """How long the oldest of them has waited."""
    arrival_rate: float
    """Tasks per second, over Temporal's own window of about half a minute."""
    completion_rate: float
    """Tasks per second that workers took."""
    live_slots: int | None
    """Tasks that the live workers can have in PROCESSING; None: unknown."""
    length: TaskLength | None
    """None: nothing was measured yet."""

    @property
    def drain_seconds(self) -> float | None:
        """Until the last one that waits now is taken; None without a sample or a worker."""
        if self.backlog == 0:
            return 0.0
        return self.seconds_for(self.backlog)

    def seconds_for(self, tasks: int) -> float | None:
        """Until so many of the waiting tasks are taken; None without a sample or a worker."""
        if self.length is None or not self.live_slots:
            return None
        return tasks * self.length.processing_seconds / self.live_slots


@dataclass(frozen=True, kw_only=True)
class _Cached:
    statistics: QueueStatistics | None
    until: float


@dataclass(frozen=True, kw_only=True)
class _Measured:
    length: TaskLength | None
    until: float


class Queues:
    """Statistics of the pools' queues.

    Args:
        client: asked at most once per pool and `CACHE_SECONDS`, whatever the number of readers.
        fleet: knows the live workers.
        catalogue: knows which models a pool serves.
    """

    def __init__(self, client: Client, *, fleet: Fleet, catalogue: Catalogue) -> None:
        self._client = client
        self._fleet = fleet
        self._models: Mapping[str, Sequence[str]] = {
            pool: [spec.name for spec in catalogue if spec.pool == pool] for pool in {spec.pool for spec in catalogue}
        }
        self._cached: dict[str, _Cached] = {}
        self._lengths: dict[str, _Measured] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ahead: set[asyncio.Task[QueueStatistics | None]] = set()

    async def pool(self, name: str) -> QueueStatistics | None:
        """Statistics of a pool; None when Temporal does not say."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            cached = self._cached.get(name)
            if cached is None or cached.until <= time.monotonic():
                statistics = await self._ask(name)
                cached = _Cached(statistics=statistics, until=time.monotonic() + CACHE_SECONDS)
                self._cached[name] = cached
            return cached.statistics

    async def recent(self, name: str) -> QueueStatistics | None:
        """Statistics of a pool, at most `RECENT_SECONDS` old; a reader in a hurry leaves newer ones to the next."""
        cached = self._cached.get(name)
        if cached is None or time.monotonic() >= cached.until + RECENT_SECONDS - CACHE_SECONDS:
            return await self.pool(name)
        if time.monotonic() >= cached.until:
            asking = asyncio.create_task(self.pool(name))
            self._ahead.add(asking)
            asking.add_done_callback(self._ahead.discard)
        return cached.statistics

    async def length(self, pool: str) -> TaskLength | None:
        """How long the newest tasks of a pool took; None before one has ended, or when Temporal does not say."""
        measured = self._lengths.get(pool)
        if measured is None or measured.until <= time.monotonic():
            # Marked first, so that the readers that come meanwhile take the last value instead of asking too.
            held = measured.length if measured is not None else None
            self._lengths[pool] = _Measured(length=held, until=time.monotonic() + _NO_LENGTH_CACHE_SECONDS)
            length = await self._measure(pool)
            kept_for = LENGTHS_CACHE_SECONDS if length is not None else _NO_LENGTH_CACHE_SECONDS
            measured = _Measured(length=length, until=time.monotonic() + kept_for)
            self._lengths[pool] = measured
        return measured.length

    async def _ask(self, pool: str) -> QueueStatistics | None:
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=naming.gpu_queue(pool)),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            report_stats=True,
        )
        try:
            reply = await bounded(lambda: self._client.workflow_service.describe_task_queue(request), limit=_CALL_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return None
        stats = reply.stats
        fleet, length = await asyncio.gather(self._fleet.pool(pool), self.length(pool))
        return QueueStatistics(
            pool=pool,
            backlog=stats.approximate_backlog_count,
            backlog_age_seconds=stats.approximate_backlog_age.ToTimedelta().total_seconds(),
            arrival_rate=stats.tasks_add_rate,
            completion_rate=stats.tasks_dispatch_rate,
            live_slots=fleet.slots,
            length=length,
        )

    async def _measure(self, pool: str) -> TaskLength | None:
        models = ", ".join(f"'{name}'" for name in self._models.get(pool, ()))
        if not models:
            return None
        ended = self._client.list_workflows(
            f"WorkflowType = 'GenerationWorkflow' AND ExecutionStatus = 'Completed'"
            f" AND TaskStatus = '{TaskStatus.SUCCEEDED}' AND Model IN ({models})",
            page_size=MAX_MEASURED,
        )
        try:
            await bounded(ended.fetch_next_page, limit=_CALL_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return None
        records = [await _record(execution) for execution in ended.current_page or ()]
        # A task that found its clip was never in PROCESSING and says nothing of the ones that wait.
        lengths = [(r.durations.get(TaskStatus.PROCESSING, 0.0), r.gpu_seconds) for r in records if r is not None]
        lengths = [(processing, gpu) for processing, gpu in lengths if processing > 0]
        if not lengths:
            return None
        return TaskLength(
            processing_seconds=sum(processing for processing, _ in lengths) / len(lengths),
            gpu_seconds=sum(gpu for _, gpu in lengths) / len(lengths),
            tasks=len(lengths),
        )


async def _record(execution: WorkflowExecution) -> TaskRecord | None:
    record: TaskRecord | None = await execution.memo_value(naming.MEMO_RECORD, None, type_hint=TaskRecord)
    return record
