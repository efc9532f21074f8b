"""Who waits in which pool: the position of a queued task, from one list per pool that all readers share.

An estimate: visibility lags behind by moments, and priorities, fairness and the retries of others move tasks.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from temporalio.client import Client
from temporalio.service import RPCError

from activities.inference.catalogue import Catalogue
from api.problems import TemporalUnavailableError
from api.temporal_calls import bounded
from workflows.states import TaskStatus

CACHE_SECONDS: Final = 3.0
STALE_SECONDS: Final = 30.0
"""A list this old is no longer used, not even until the next one is there."""
MAX_LISTED: Final = 1_000
"""As many as may wait in a pool by default, and the most that one call answers. With more, positions are unknown."""
_CALL_LIMIT: Final = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The tasks of a pool that waited at some moment."""

    started: Sequence[datetime] | None
    """When their runs started, oldest first; None: too many, or Temporal did not say."""
    taken_at: float

    def is_younger_than(self, seconds: float) -> bool:
        return time.monotonic() - self.taken_at < seconds

    def position(self, started_at: datetime) -> int | None:
        return None if self.started is None else bisect_left(self.started, started_at)


class Waiting:
    """Positions in the pools' queues.

    Args:
        client: asked at most once per pool and `CACHE_SECONDS`, whatever the number of readers.
        catalogue: knows which models a pool serves.
    """

    def __init__(self, client: Client, *, catalogue: Catalogue) -> None:
        self._client = client
        self._models: Mapping[str, Sequence[str]] = {
            pool: [spec.name for spec in catalogue if spec.pool == pool] for pool in {spec.pool for spec in catalogue}
        }
        self._lines: dict[str, _Line] = {}
        self._asking: dict[str, asyncio.Task[_Line]] = {}

    async def position(self, pool: str, started_at: datetime, *, patient: bool = True) -> int | None:
        """How many tasks that wait for the pool were accepted before one whose run started then; None: unknown.

        Args:
            pool: name of the pool.
            started_at: start of the task's run.
            patient: wait for the list if there is none yet; otherwise it is there for the next reader.
        """
        line = self._lines.get(pool)
        if line is not None and line.is_younger_than(CACHE_SECONDS):
            return line.position(started_at)
        asking = self._asking.get(pool)
        if asking is None:
            asking = self._asking[pool] = asyncio.create_task(self._ask(pool))
        if line is not None and line.is_younger_than(STALE_SECONDS):
            return line.position(started_at)
        if not patient:
            return None
        # Shielded: the reader may go away, the others still want the list.
        return (await asyncio.shield(asking)).position(started_at)

    async def _ask(self, pool: str) -> _Line:
        try:
            line = _Line(started=await self._list(pool), taken_at=time.monotonic())
            self._lines[pool] = line
        finally:
            del self._asking[pool]
        return line

    async def _list(self, pool: str) -> Sequence[datetime] | None:
        models = ", ".join(f"'{name}'" for name in self._models.get(pool, ()))
        if not models:
            return None
        found = self._client.list_workflows(
            f"WorkflowType = 'GenerationWorkflow' AND ExecutionStatus = 'Running'"
            f" AND TaskStatus = '{TaskStatus.QUEUED}' AND Model IN ({models})",
            page_size=MAX_LISTED,
        )
        try:
            await bounded(found.fetch_next_page, limit=_CALL_LIMIT)
        except (TemporalUnavailableError, RPCError):
            return None
        page = found.current_page or ()
        if len(page) >= MAX_LISTED:
            return None
        return sorted(execution.start_time for execution in page)
