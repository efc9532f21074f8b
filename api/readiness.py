"""Whether the things this process depends on answer, asked at most every two seconds however many probes come."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Final

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from activities.storage import ObjectStore, StoreUnavailableError
from api.problems import TemporalUnavailableError
from api.schemas import Readiness
from api.temporal_calls import bounded

CACHE_SECONDS: Final = 2.0
_LIMIT: Final = timedelta(seconds=2)
_PROBED_KEY: Final = "readiness"
"""No such object exists; a store that says so is there."""


class ReadinessProbe:
    """Asks Temporal and the store."""

    def __init__(self, client: Client, store: ObjectStore) -> None:
        self._client = client
        self._store = store
        self._lock = asyncio.Lock()
        self._last: Readiness | None = None
        self._until = 0.0

    async def readiness(self) -> Readiness:
        """What answers; never raises."""
        async with self._lock:
            if self._last is None or time.monotonic() >= self._until:
                temporal, store = await asyncio.gather(self._temporal_answers(), self._store_answers())
                self._last = Readiness(
                    status="ready" if temporal and store else "not_ready",
                    temporal="ok" if temporal else "unreachable",
                    store="ok" if store else "unreachable",
                )
                self._until = time.monotonic() + CACHE_SECONDS
            return self._last

    async def _temporal_answers(self) -> bool:
        request = DescribeNamespaceRequest(namespace=self._client.namespace)
        try:
            await bounded(lambda: self._client.workflow_service.describe_namespace(request), limit=_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return False
        return True

    async def _store_answers(self) -> bool:
        try:
            async with asyncio.timeout(_LIMIT.total_seconds()):
                await self._store.head(_PROBED_KEY)
        except (StoreUnavailableError, TimeoutError):
            return False
        return True
