"""Listing a user's tasks from Temporal's visibility store.

It lags behind by moments, so nothing here is used to decide anything. The order is the server's: open runs by newest
start, then closed ones by newest end.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from temporalio.client import Client

from api.auth import Caller
from api.cursors import Cursors
from api.jobs import Jobs
from api.problems import ValidationFailedError
from api.schemas import TaskList, TaskQuery
from api.task_view import TaskViews
from api.temporal_calls import bounded
from workflows import naming
from workflows.states import OPEN, TaskStatus


class Listing:
    """Lists tasks, page by page."""

    def __init__(
        self, client: Client, *, jobs: Jobs, views: TaskViews, cursors: Cursors, call_limit: timedelta
    ) -> None:
        self._client = client
        self._cursors = cursors
        self._jobs = jobs
        self._views = views
        self._limit = call_limit

    async def page(self, caller: Caller, wanted: TaskQuery) -> TaskList:
        """One page of the caller's tasks.

        Raises:
            ValidationFailedError: the cursor is not one of ours.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        token = None
        if wanted.cursor is not None:
            token = self._cursors.open(wanted.cursor)
            if token is None:
                raise ValidationFailedError.of("cursor", "cursor", "is not the next_cursor of a page")
        found = self._client.list_workflows(
            _query(naming.user_hash(user), wanted), page_size=wanted.limit, next_page_token=token
        )
        await bounded(found.fetch_next_page, limit=self._limit)
        jobs = [await self._jobs.listed(execution) for execution in found.current_page or ()]
        # The index may lag or be wrong; the memo says whose a task is.
        items = [self._views.item(job) for job in jobs if job is not None and job.request.user == user]
        following = found.next_page_token
        return TaskList(items=items, next_cursor=self._cursors.seal(following) if following else None)


def _query(user: str, wanted: TaskQuery) -> str:
    parts = ["WorkflowType = 'GenerationWorkflow'", f"UserId = '{user}'"]
    if wanted.status is not None:
        parts.append(status_filter(wanted.status))
    if wanted.created_after is not None:
        parts.append(f"StartTime >= '{_time(wanted.created_after)}'")
    if wanted.created_before is not None:
        parts.append(f"StartTime < '{_time(wanted.created_before)}'")
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


def _time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
