"""What a fresh admission asks visibility for: who holds its places, and what was used of its allowance.

Places are read from the memo that every task and batch carries since its start, so nothing else has to survive.
Visibility lags a little behind; the ledger knows and keeps what is younger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio import activity
from temporalio.client import Client, WorkflowExecution

from workflows.contracts import LIST_RUNNING_TASKS, LIST_USED, AdmissionActivities
from workflows.naming import MEMO_RECORD, MEMO_REQUEST, USER_ID
from workflows.quotas import HeldPlace, ListRunningTasksInput, ListUsedInput, RunningTasks, UsedAmount
from workflows.tasks import AdmissionPlace

HOLDERS: Final = "WorkflowType IN ('GenerationWorkflow', 'BatchWorkflow')"
"""What can hold a place."""
RECENT: Final = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the memo of a task and that of a batch have in common."""

    places: tuple[AdmissionPlace, ...] = ()
    accepted_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What is charged of a task's record."""

    gpu_seconds: float = 0.0


class AdmissionListings(AdmissionActivities):
    """Listings over a Temporal client.

    Args:
        client: needs the codec, since the memos are encrypted.
        max_rows: at most this many executions are looked at; a count beyond it is too low, never wrong otherwise.
        page_size: rows per call.
    """

    def __init__(self, client: Client, *, max_rows: int = 20_000, page_size: int = 500) -> None:
        self._client = client
        self._max_rows = max_rows
        self._page_size = page_size

    @activity.defn(name=LIST_RUNNING_TASKS)
    async def list_running_tasks(self, request: ListRunningTasksInput) -> RunningTasks:
        """List the running tasks and batches that hold a place of one admission, oldest first."""
        places = []
        async for execution, token, asked in self._holders(request, "ExecutionStatus = 'Running'"):
            places.append(
                HeldPlace(
                    task_id=execution.id,
                    token=token,
                    admitted_at=asked.accepted_at or execution.start_time,
                    claims=(token,),
                )
            )
        return RunningTasks(places=tuple(sorted(places, key=lambda place: (place.admitted_at, place.task_id))))

    @activity.defn(name=LIST_USED)
    async def list_used(self, request: ListUsedInput) -> UsedAmount:
        """Sum up what ended since a time and had held a place of one admission."""
        since = request.since.astimezone(UTC).isoformat().replace("+00:00", "Z")
        tasks, gpu_seconds, recent = 0, 0.0, []
        recently = datetime.now(UTC) - RECENT
        async for execution, _, _ in self._holders(request, f"ExecutionStatus != 'Running' AND CloseTime >= '{since}'"):
            tasks += 1
            # A run that was terminated before its first attempt ended has no record.
            record = await execution.memo_value(MEMO_RECORD, _Record(), type_hint=_Record)
            gpu_seconds += record.gpu_seconds
            if execution.close_time is not None and execution.close_time >= recently:
                recent.append(execution.id)
        return UsedAmount(tasks=tasks, gpu_seconds=gpu_seconds, recent=tuple(recent))

    async def _holders(
        self, request: ListRunningTasksInput | ListUsedInput, condition: str
    ) -> AsyncIterator[tuple[WorkflowExecution, str, _Request]]:
        query = f"{HOLDERS} AND {condition}"
        if request.user_hash:
            query += f" AND {USER_ID.name} = '{request.user_hash}'"
        seen = 0
        async for execution in self._client.list_workflows(query, page_size=self._page_size, limit=self._max_rows):
            seen += 1
            asked = await self._asked(execution)
            for place in asked.places:
                if place.admission_id == request.admission_id:
                    yield execution, place.token, asked
        if seen >= self._max_rows:
            activity.logger.warning("admission_listing_cut", extra={"admission_id": request.admission_id, "rows": seen})

    async def _asked(self, execution: WorkflowExecution) -> _Request:
        """The memo of a holder; empty when it cannot be read, since one such run must not lock everyone out."""
        try:
            return await execution.memo_value(MEMO_REQUEST, _Request(), type_hint=_Request)
        except Exception:  # the codec is not ours to know: whatever it raises, no worker of ours can run that task
            activity.logger.warning("admission_memo_unreadable", extra={"task_id": execution.id}, exc_info=True)
            return _Request()
