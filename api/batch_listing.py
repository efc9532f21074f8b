"""Listing a user's batches from Temporal's visibility store; what `api.listing` says of tasks holds here too."""

from __future__ import annotations

from api.auth import Caller
from api.batch_jobs import BatchJobs
from api.batch_schemas import BatchList, BatchQuery
from api.batches import Batches
from api.visibility import VisibilityPages
from workflows import naming


class BatchListing:
    """Lists batches, page by page."""

    def __init__(self, *, batch_jobs: BatchJobs, batches: Batches, pages: VisibilityPages) -> None:
        self._batch_jobs = batch_jobs
        self._batches = batches
        self._pages = pages

    async def page(self, caller: Caller, wanted: BatchQuery) -> BatchList:
        """One page of the caller's batches.

        Raises:
            ValidationFailedError: the cursor is not one of ours.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        # A long batch has a run for each continue-as-new; the last one speaks for all.
        query = (
            f"WorkflowType = 'BatchWorkflow' AND UserId = '{naming.user_hash(user)}'"
            " AND ExecutionStatus != 'ContinuedAsNew'"
        )
        page = await self._pages.page(query, cursor=wanted.cursor, limit=wanted.limit)
        jobs = [await self._batch_jobs.listed(execution) for execution in page.rows]
        # The index may lag or be wrong; the memo says whose a batch is.
        items = [self._batches.summary(job) for job in jobs if job.request.user == user]
        return BatchList(items=items, next_cursor=page.next_cursor)
