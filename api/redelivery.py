"""Sending callbacks again by the time in which tasks and batches ended: after an outage of a receiver, page by page.

The list comes from visibility, which lags behind; whether a callback is sent again, its own deliveries decide.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from temporalio.client import WorkflowExecution

from api.auth import Caller
from api.batch_jobs import BatchJobs
from api.callback_schemas import RedeliverRange, RedeliveryItem, RedeliveryPage
from api.deliveries import Deliveries
from api.jobs import Jobs
from api.readings import Readings
from api.terminal_events import TerminalEvent, event_of_batch, event_of_task
from api.visibility import VisibilityPages, query_time
from workers.keys import Scope
from workflows import naming
from workflows.tasks import CallbackStatus, User

_PARALLEL: Final = 8
_FIRST_DELIVERY = re.compile(naming.callback_id(r"([tb][a-z2-7]{26})"))
"""Ids of the deliveries that the ends of tasks and batches started, so their start is the time asked for; later
deliveries of the same event are looked up by the id in here."""
_CONDITIONS: Final = {
    "undelivered": " AND CallbackStatus != 'SUCCEEDED'",
    # A terminated delivery keeps the attribute of its last moment.
    "failed": " AND CallbackStatus != 'SUCCEEDED' AND ExecutionStatus != 'Running'",
    "all": "",
}


class RangeRedelivery:
    """Sends callbacks of a user, or of all end users of a tenant, again."""

    def __init__(
        self,
        *,
        jobs: Jobs,
        batch_jobs: BatchJobs,
        readings: Readings,
        deliveries: Deliveries,
        pages: VisibilityPages,
    ) -> None:
        self._jobs = jobs
        self._batch_jobs = batch_jobs
        self._readings = readings
        self._deliveries = deliveries
        self._pages = pages

    async def page(self, caller: Caller, wanted: RedeliverRange) -> RedeliveryPage:
        """Look at one page, and send what is to be sent unless it is a dry run.

        A service key that names no end user acts for all of its tenant.

        Raises:
            ValidationFailedError: the cursor is not one of ours.
            TemporalUnavailableError: no answer in time; the same page can be asked for again.
        """
        page = await self._pages.page(_query(caller, wanted), cursor=wanted.cursor, limit=wanted.limit)
        turns = asyncio.Semaphore(_PARALLEL)

        async def one(ended: str) -> RedeliveryItem | None:
            async with turns:
                return await self._send_again(caller, ended, wanted)

        items = await asyncio.gather(*(one(ended) for ended in _ended(page.rows)))
        return RedeliveryPage(
            dry_run=wanted.dry_run,
            items=[item for item in items if item is not None],
            next_cursor=page.next_cursor,
        )

    async def _send_again(self, caller: Caller, ended: str, wanted: RedeliverRange) -> RedeliveryItem | None:
        event = await self._event(ended)
        if event is None or not _acts_for(caller, event.user):
            return None
        deliveries = await self._deliveries.of(ended)
        if not deliveries:
            return None
        newest = deliveries[-1]
        if newest.record.status is CallbackStatus.SUCCEEDED and wanted.status != "all":
            return None
        if newest.is_open and wanted.status == "failed":
            return None
        if not wanted.dry_run:
            await self._deliveries.send_again(event, deliveries)
            self._readings.forget(ended)
        is_batch = _is_batch(ended)
        return RedeliveryItem(
            task_id=None if is_batch else ended,
            batch_id=ended if is_batch else None,
            status=newest.record.status,
            action="retry_now" if newest.is_open else "redeliver",
        )

    async def _event(self, ended: str) -> TerminalEvent | None:
        if _is_batch(ended):
            batch = await self._batch_jobs.describe(ended)
            return event_of_batch(batch) if batch is not None else None
        job = await self._jobs.describe(ended)
        return event_of_task(job) if job is not None else None


def _whole_tenant(caller: Caller) -> bool:
    return caller.end_user is None and caller.key.scope.includes(Scope.SERVICE)


def _acts_for(caller: Caller, user: User) -> bool:
    if _whole_tenant(caller):
        return user.tenant == caller.key.tenant
    return user == caller.user


def _is_batch(ended: str) -> bool:
    return ended.startswith("b")


def _query(caller: Caller, wanted: RedeliverRange) -> str:
    since, until = query_time(wanted.since), query_time(wanted.until or datetime.now(UTC))
    query = f"WorkflowType = 'CallbackWorkflow' AND StartTime >= '{since}' AND StartTime < '{until}'"
    if not _whole_tenant(caller):
        query += f" AND UserId = '{naming.user_hash(caller.user)}'"
    return query + _CONDITIONS[wanted.status]


def _ended(rows: Sequence[WorkflowExecution]) -> list[str]:
    matches = [_FIRST_DELIVERY.fullmatch(row.id) for row in rows]
    return list(dict.fromkeys(match[1] for match in matches if match))
