"""Which workers serve which GPU pool, as Temporal knows from their heartbeats; cached, and never failing a page."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.api.enums.v1 import WorkerStatus
from temporalio.api.worker.v1 import WorkerHeartbeat
from temporalio.api.workflowservice.v1 import ListWorkersRequest
from temporalio.client import Client
from temporalio.service import RPCError

from activities.inference.pool import SLOTS_PER_DEVICE
from api.problems import TemporalUnavailableError
from api.schemas import PoolState
from api.temporal_calls import bounded
from workflows import naming

CACHE_SECONDS: Final = 3.0
_CALL_LIMIT: Final = timedelta(seconds=1)
_MISSED_BEATS: Final = 3
"""A worker that is silent for so many heartbeat intervals counts as gone."""
_PAGE: Final = 500


@dataclass(frozen=True, kw_only=True)
class _Seen:
    state: PoolState
    until: float


class Fleet:
    """Live workers by pool.

    Args:
        client: asked at most once per pool and `CACHE_SECONDS`.
        heartbeat: how often workers report.
    """

    def __init__(self, client: Client, *, heartbeat: timedelta) -> None:
        self._client = client
        self._silence = heartbeat * _MISSED_BEATS
        self._seen: dict[str, _Seen] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def pool(self, name: str) -> PoolState:
        """State of a pool; `unknown` when Temporal does not say."""
        # One question at a time: a hundred readers of one pool make one call.
        async with self._locks.setdefault(name, asyncio.Lock()):
            seen = self._seen.get(name)
            if seen is None or seen.until < time.monotonic():
                seen = _Seen(state=await self._ask(name), until=time.monotonic() + CACHE_SECONDS)
                self._seen[name] = seen
            return seen.state

    async def _ask(self, pool: str) -> PoolState:
        request = ListWorkersRequest(
            namespace=self._client.namespace, page_size=_PAGE, query=f"TaskQueue='{naming.gpu_queue(pool)}'"
        )
        try:
            reply = await bounded(lambda: self._client.workflow_service.list_workers(request), limit=_CALL_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return PoolState(pool=pool, state="unknown", workers=None, slots=None)
        live = [info.worker_heartbeat for info in reply.workers_info if self._is_live(info.worker_heartbeat)]
        return PoolState(
            pool=pool,
            state="live" if live else "no_worker",
            workers=len(live),
            slots=sum(map(_slots, live)),
        )

    def _is_live(self, beat: WorkerHeartbeat) -> bool:
        age = datetime.now(UTC) - beat.heartbeat_time.ToDatetime(tzinfo=UTC)
        return beat.status == WorkerStatus.WORKER_STATUS_RUNNING and age < self._silence


def _slots(beat: WorkerHeartbeat) -> int:
    slots = beat.activity_task_slots_info
    if slots.slot_supplier_kind == "Fixed":
        return slots.current_available_slots + slots.current_used_slots
    # Slots that follow the GPUs are not reported; the worker's identity lists its devices.
    devices = beat.worker_identity.partition("/")[2].partition(" ")[0].split(",")
    return math.ceil(len(devices) * SLOTS_PER_DEVICE)
