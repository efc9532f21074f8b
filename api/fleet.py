"""Which workers serve which GPU pool, as Temporal knows from their heartbeats; cached, and never failing a page."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio.api.worker.v1 import WorkerHeartbeat
from temporalio.client import Client
from temporalio.service import RPCError

from api import heartbeats
from api.model_health import ModelHealth
from api.problems import TemporalUnavailableError
from api.schemas import ModelServing, PoolState
from workflows import naming

CACHE_SECONDS: Final = 3.0
_CALL_LIMIT: Final = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    state: PoolState
    models: Mapping[str, ModelServing]
    until: float


class Fleet:
    """Live workers by pool.

    Args:
        client: asked at most once per pool and `CACHE_SECONDS`.
        heartbeat: how often workers report.
        slots_per_device: tasks in PROCESSING per device, as the workers are set.
    """

    def __init__(self, client: Client, *, heartbeat: timedelta, slots_per_device: float = 1.5) -> None:
        self._client = client
        self._heartbeat = heartbeat
        self._slots_per_device = slots_per_device
        self._health = ModelHealth()
        self._seen: dict[str, _Seen] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def aclose(self) -> None:
        """Close what was opened to ask."""
        await self._health.aclose()

    async def pool(self, name: str) -> PoolState:
        """State of a pool; `unknown` when Temporal does not say."""
        return (await self._look(name)).state

    async def live_workers(self, task_queue: str) -> int | None:
        """How many live workers serve a task queue, asked now; None when Temporal does not say."""
        live = await self._live(task_queue)
        return None if live is None else len(live)

    async def model(self, name: str, *, pool: str) -> ModelServing:
        """Whether a model is loaded on a live worker of its pool."""
        seen = await self._look(pool)
        if name in seen.models:
            return seen.models[name]
        return ModelServing(state="NO_WORKER" if seen.state.state == "no_worker" else "UNKNOWN", reason=None)

    async def _look(self, name: str) -> _Seen:
        # One question at a time: a hundred readers of one pool make one call.
        async with self._locks.setdefault(name, asyncio.Lock()):
            seen = self._seen.get(name)
            if seen is None or seen.until < time.monotonic():
                seen = self._seen[name] = await self._ask(name)
            return seen

    async def _ask(self, pool: str) -> _Seen:
        live = await self._live(naming.gpu_queue(pool))
        if live is None:
            unknown = PoolState(pool=pool, state="unknown", workers=None, slots=None)
            return _Seen(state=unknown, models={}, until=time.monotonic() + CACHE_SECONDS)
        state = PoolState(
            pool=pool,
            state="live" if live else "no_worker",
            workers=len(live),
            slots=sum(self.slots(beat) for beat in live),
        )
        models = await self._health.of(beat.worker_identity for beat in live)
        return _Seen(state=state, models=models, until=time.monotonic() + CACHE_SECONDS)

    async def _live(self, task_queue: str) -> list[WorkerHeartbeat] | None:
        """Live workers of a task queue, of the first page; None when Temporal does not say."""
        try:
            beats = await anext(heartbeats.heartbeat_pages(self._client, call_limit=_CALL_LIMIT, task_queue=task_queue))
        except (TemporalUnavailableError, RPCError):
            return None
        return [beat for beat in beats if heartbeats.is_live(beat, self._heartbeat)]

    def is_silent(self, beat: WorkerHeartbeat) -> bool:
        """Whether a worker has not reported for so long that it is gone, or cut off."""
        return heartbeats.is_silent(beat, self._heartbeat)

    def slots(self, beat: WorkerHeartbeat) -> int:
        """Activities that a worker takes at a time."""
        slots = beat.activity_task_slots_info
        if slots.slot_supplier_kind == "Fixed":
            return slots.current_available_slots + slots.current_used_slots
        # Slots that follow the GPUs are not reported; the worker's identity lists its devices.
        devices = beat.worker_identity.partition("/")[2].partition(" ")[0].split(",")
        return math.ceil(len(devices) * self._slots_per_device)
