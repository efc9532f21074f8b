"""Listing a user's tasks from Temporal's visibility store.

It lags behind by moments, so nothing here is used to decide anything. The order is the server's: open runs by newest
start, then closed ones by newest end.
"""

from __future__ import annotations

from typing import Final

from api.auth import Caller
from api.jobs import Jobs
from api.schemas import TaskList, TaskQuery
from api.task_view import TaskViews
from api.visibility import VisibilityPages, query_time
from workflows import naming
from workflows.states import OPEN, TaskStatus

_CLOCK: Final = "milliseconds"
"""What the API shows of a time, so that one it has shown can be asked for."""


class Listing:
    """Lists tasks, page by page."""

    def __init__(self, *, jobs: Jobs, views: TaskViews, pages: VisibilityPages) -> None:
        self._jobs = jobs
        self._views = views
        self._pages = pages

    async def page(self, caller: Caller, wanted: TaskQuery) -> TaskList:
        """One page of the caller's tasks.

        Raises:
            ValidationFailedError: the cursor is not one of ours.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        query = _query(naming.user_hash(user), wanted)
        page = await self._pages.page(query, cursor=wanted.cursor, limit=wanted.limit)
        jobs = [await self._jobs.listed(execution) for execution in page.rows]
        # The index may lag or be wrong; the memo says whose a task is.
        items = [self._views.item(job) for job in jobs if job is not None and job.request.user == user]
        return TaskList(items=items, next_cursor=page.next_cursor)


def _query(user: str, wanted: TaskQuery) -> str:
    parts = ["WorkflowType = 'GenerationWorkflow'", f"UserId = '{user}'"]
    if wanted.status is not None:
        parts.append(status_filter(wanted.status))
    if wanted.created_after is not None:
        parts.append(f"StartTime >= '{query_time(wanted.created_after, timespec=_CLOCK)}'")
    if wanted.created_before is not None:
        parts.append(f"StartTime < '{query_time(wanted.created_before, timespec=_CLOCK)}'")
    if wanted.model is not None:
        parts.append(f"Model = '{wanted.model}'")
    if wanted.batch_id is not None:
        parts.append(f"BatchId = '{wanted.batch_id}'")
    return " AND ".join(parts)


def status_filter(status: TaskStatus) -> str:
    """The part of a query that finds the tasks that read as `status`.

    Runs that were ended from outside keep the attribute of their last moment; they read as CANCELED.
    """
    own = f"TaskStatus = '{status}'"
    if status in OPEN:
        return f"({own} AND ExecutionStatus = 'Running')"
    if status is TaskStatus.CANCELED:
        outside = " OR ".join(f"ExecutionStatus = '{closed}'" for closed in ("Terminated", "TimedOut", "Canceled"))
        unfinished = " OR ".join(f"TaskStatus = '{state}'" for state in sorted(OPEN))
        return f"({own} OR (({outside}) AND ({unfinished})))"
    return own
