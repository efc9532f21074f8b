"""Listing a user's batches from Temporal's visibility store; what `api.listing` says of tasks holds here too."""

from __future__ import annotations

from datetime import timedelta

from temporalio.client import Client

from api.auth import Caller
from api.batch_jobs import BatchJobs
from api.batch_schemas import BatchList, BatchQuery
from api.batches import Batches
from api.cursors import Cursors
from api.problems import ValidationFailedError
from api.temporal_calls import bounded
from workflows import naming


class BatchListing:
    """Lists batches, page by page."""

    def __init__(
        self, client: Client, *, batch_jobs: BatchJobs, batches: Batches, cursors: Cursors, call_limit: timedelta
    ) -> None:
        self._client = client
        self._batch_jobs = batch_jobs
        self._batches = batches
        self._cursors = cursors
        self._limit = call_limit

    async def page(self, caller: Caller, wanted: BatchQuery) -> BatchList:
        """One page of the caller's batches.

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
        # A long batch has a run for each continue-as-new; the last one speaks for all.
        query = (
            f"WorkflowType = 'BatchWorkflow' AND UserId = '{naming.user_hash(user)}'"
            " AND ExecutionStatus != 'ContinuedAsNew'"
        )
        found = self._client.list_workflows(query, page_size=wanted.limit, next_page_token=token)
        await bounded(found.fetch_next_page, limit=self._limit)
        jobs = [await self._batch_jobs.listed(execution) for execution in found.current_page or ()]
        # The index may lag or be wrong; the memo says whose a batch is.
        items = [self._batches.summary(job) for job in jobs if job.request.user == user]
        following = found.next_page_token
        return BatchList(items=items, next_cursor=self._cursors.seal(following) if following else None)
