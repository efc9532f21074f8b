"""The states of a task as its run's own history has them: nothing is missed, however short, and no worker is needed.

Every state is an upsert of the search attribute `TaskStatus` (the first one is set at start), and the last word is the
event that closes the run. The history is followed by long poll: the server answers when there is something new.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import structlog
from temporalio.api.common.v1 import SearchAttributes, WorkflowExecution
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest
from temporalio.client import Client
from temporalio.converter import decode_typed_search_attributes
from temporalio.service import RPCError, RPCStatusCode

from api.temporal_calls import bounded
from workflows import naming
from workflows.states import TaskStatus

_POLL_LIMIT: Final = timedelta(seconds=40)
"""The server answers an idle long poll after 20 s. One that is silent for twice as long has lost us."""
_PAUSE_SECONDS: Final = 0.5
_MAX_PAUSE_SECONDS: Final = 5.0
"""Between attempts while Temporal does not answer: many watches must not hammer a server that comes back."""

_CLOSE_EVENTS: Final = frozenset(
    f"workflow_execution_{end}_event_attributes"
    for end in ("completed", "failed", "canceled", "terminated", "timed_out", "continued_as_new")
)

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """One event of the history that clients are told about."""

    event_id: int
    at: datetime
    status: TaskStatus | None = None
    """None: the event closes the run; how it then reads, its record tells."""
    worker_id: str | None = None


class TaskHistory:
    """The history of the newest run of a task.

    Args:
        client: asked for it.
        task_id: the task.
        call_limit: time for one call that does not wait for anything.
    """

    def __init__(self, client: Client, task_id: str, *, call_limit: timedelta) -> None:
        self._client = client
        self._task_id = task_id
        self._limit = call_limit

    async def so_far(self) -> list[StateChange]:
        """Every change up to now.

        Raises:
            TemporalUnavailableError: no answer in time.
            RPCError: NOT_FOUND.
        """
        changes: list[StateChange] = []
        token = b""
        while True:
            found, token = await bounded(partial(self._page, token, wait=False), limit=self._limit)
            changes += found
            if not token:
                return changes

    async def follow(self, after: int) -> AsyncIterator[StateChange]:
        """Changes after an event as they happen, until the run is closed or removed. Waits out a lost server."""
        last, token, pause = after, b"", _PAUSE_SECONDS
        while True:
            try:
                found, token = await self._page(token, wait=True)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return
                _log.info("history_unavailable", task_id=self._task_id, rpc_status=error.status.name)
                # From the start again: a token of a server that was restarted may mean nothing to it.
                token = b""
                await asyncio.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE_SECONDS)
                continue
            pause = _PAUSE_SECONDS
            for change in found:
                if change.event_id > last:
                    last = change.event_id
                    yield change
            if not token:
                return

    async def _page(self, token: bytes, *, wait: bool) -> tuple[list[StateChange], bytes]:
        request = GetWorkflowExecutionHistoryRequest(
            namespace=self._client.namespace,
            execution=WorkflowExecution(workflow_id=self._task_id),
            next_page_token=token,
            wait_new_event=wait,
            skip_archival=True,
        )
        reply = await self._client.workflow_service.get_workflow_execution_history(request, timeout=_POLL_LIMIT)
        changes = [change for event in reply.history.events if (change := state_change(event)) is not None]
        return changes, reply.next_page_token


def state_change(event: HistoryEvent) -> StateChange | None:
    """What clients are told about an event; None: nothing."""
    at = event.event_time.ToDatetime(tzinfo=UTC)
    kind = event.WhichOneof("attributes")
    if kind in _CLOSE_EVENTS:
        return StateChange(event_id=event.event_id, at=at)
    if kind == "workflow_execution_started_event_attributes":
        attributes = event.workflow_execution_started_event_attributes.search_attributes
    elif kind == "upsert_workflow_search_attributes_event_attributes":
        attributes = event.upsert_workflow_search_attributes_event_attributes.search_attributes
    else:
        return None
    return _upsert(event.event_id, at, attributes)


def _upsert(event_id: int, at: datetime, attributes: SearchAttributes) -> StateChange | None:
    # Search attributes are what visibility indexes: the codec leaves them in clear, so its keys are not needed here.
    found = decode_typed_search_attributes(attributes)
    status = found.get(naming.TASK_STATUS)
    if status is None:
        return None
    return StateChange(event_id=event_id, at=at, status=TaskStatus(status), worker_id=found.get(naming.WORKER_ID))
