"""Workers as they report themselves to Temporal, and when one that is silent counts as gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.api.enums.v1 import WorkerStatus
from temporalio.api.worker.v1 import WorkerHeartbeat
from temporalio.api.workflowservice.v1 import ListWorkersRequest
from temporalio.client import Client

from api.temporal_calls import bounded

PAGE: Final = 500
_MISSED_BEATS: Final = 3


async def heartbeat_pages(
    client: Client, *, call_limit: timedelta, task_queue: str | None = None
) -> AsyncIterator[list[WorkerHeartbeat]]:
    """The newest heartbeat of every worker that Temporal remembers, those that have ended included, page by page.

    Args:
        client: of the namespace.
        call_limit: for one page.
        task_queue: only workers of this one.

    Raises:
        TemporalUnavailableError: no answer in time.
        RPCError: NOT_FOUND or INVALID_ARGUMENT.
    """
    query, token = f"TaskQueue='{task_queue}'" if task_queue is not None else "", b""
    while True:
        request = ListWorkersRequest(namespace=client.namespace, page_size=PAGE, next_page_token=token, query=query)
        reply = await bounded(
            lambda asked=request: client.workflow_service.list_workers(asked),  # type: ignore[misc]
            limit=call_limit,
        )
        yield [info.worker_heartbeat for info in reply.workers_info]
        token = reply.next_page_token
        if not token:
            return


def has_ended(beat: WorkerHeartbeat) -> bool:
    """Whether the worker said that it ends."""
    return beat.status == WorkerStatus.WORKER_STATUS_SHUTDOWN


def silence_of(interval: timedelta) -> timedelta:
    """How long a worker that reports once per `interval` may be silent."""
    return interval * _MISSED_BEATS


def is_silent(beat: WorkerHeartbeat, interval: timedelta) -> bool:
    """Whether a worker has not reported for so long that it is gone, or cut off."""
    return datetime.now(UTC) - beat.heartbeat_time.ToDatetime(tzinfo=UTC) >= silence_of(interval)


def is_live(beat: WorkerHeartbeat, interval: timedelta) -> bool:
    """Whether a worker runs and reports."""
    return beat.status == WorkerStatus.WORKER_STATUS_RUNNING and not is_silent(beat, interval)
