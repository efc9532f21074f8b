"""Running dead letters again for their owners: what ended without a clip, page by page, by an operator.

A redriven task is the next link of its owner's chain, exactly as the owner's own retry would make it, so the two meet
in one and a redrive that is repeated starts nothing twice. It differs in what it costs. It takes no place, no token and
no allowance of its owner, who did not ask for it and must not be refused because of it; instead it may fill a pool's
queue only to half of what users may. Dispatch stays fair between users, because the fairness key stays the owner's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import structlog
from temporalio.client import Client, WorkflowExecution
from temporalio.service import RPCError, RPCStatusCode

from api.auth import Caller
from api.backlog import Backlog
from api.chains import Chains
from api.jobs import Job, Jobs
from api.problems import QueueFullError, UnknownModelError, ValidationFailedError
from api.queue_statistics import Queues
from api.redrive_schemas import Redrive, RedriveCounts, RedriveItem, RedrivePage, RedriveStop, SkipReason
from api.retries import Retries
from api.task_view import outcome_of
from api.temporal_calls import bounded
from api.visibility import VisibilityPages, query_time
from workflows.failures import FAILURE_CLASSES, FailureCode, Remedy
from workflows.states import TaskStatus
from workflows.tasks import GenerationInput

QUEUE_SHARE: Final = 0.5
"""Part of a pool's bounds that redriven tasks may use up; the rest is kept for what users submit."""
NO_WORKER_RETRY_SECONDS: Final = 30

_WORKFLOW_TYPE: Final = "GenerationWorkflow"
_PARALLEL: Final = 8
_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What is to be done about one task."""

    item: RedriveItem
    following: GenerationInput | None = None
    """The request to start, if it is to be."""


class RedriveRuns:
    """Runs dead letters again.

    Args:
        client: counts them.
        jobs, chains: what there is.
        retries: makes the next link.
        queues, backlog: what a pool takes.
        pages: lists them.
        call_limit: for one call to Temporal.
    """

    def __init__(
        self,
        client: Client,
        *,
        jobs: Jobs,
        chains: Chains,
        retries: Retries,
        queues: Queues,
        backlog: Backlog,
        pages: VisibilityPages,
        call_limit: timedelta,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._chains = chains
        self._retries = retries
        self._queues = queues
        self._backlog = backlog
        self._pages = pages
        self._limit = call_limit

    async def page(self, operator: Caller, wanted: Redrive) -> RedrivePage:
        """Look at one page, and start what is to be started unless it is a dry run.

        Raises:
            ValidationFailedError: the query or the cursor is wrong.
            TemporalUnavailableError: no answer in time; the same page can be asked for again.
        """
        query = _query(wanted)
        try:
            page = await self._pages.page(query, cursor=wanted.cursor, limit=wanted.limit)
            counted = await bounded(lambda: self._client.count_workflows(query), limit=self._limit)
        except RPCError as error:
            if error.status is not RPCStatusCode.INVALID_ARGUMENT:
                raise
            raise ValidationFailedError.of("query", "visibility_query", error.message) from None
        verdicts = await self._verdicts(_task_ids(page.rows), wanted)
        items, stopped = await self._carry_out(operator, verdicts, dry_run=wanted.dry_run)
        skipped = Counter(item.reason for item in items if item.reason is not None)
        return RedrivePage(
            dry_run=wanted.dry_run,
            items=items,
            counts=RedriveCounts(started=sum(item.action == "start" for item in items), skipped=dict(skipped)),
            matching=counted.count,
            stopped=stopped,
            next_cursor=page.next_cursor if stopped is None else None,
        )

    async def _verdicts(self, task_ids: Sequence[str], wanted: Redrive) -> list[_Verdict]:
        turns = asyncio.Semaphore(_PARALLEL)

        async def one(task_id: str) -> _Verdict:
            async with turns:
                return await self._verdict(task_id, wanted)

        return list(await asyncio.gather(*(one(task_id) for task_id in task_ids)))

    async def _verdict(self, task_id: str, wanted: Redrive) -> _Verdict:
        """Decide by the job itself: the index may lag behind or be wrong."""
        job = await self._jobs.describe(task_id)
        if job is None:
            return _skipped(task_id, None, SkipReason.GONE)
        newest = (await self._chains.links_from(job))[-1] if job.closing is not None else job
        reason = _why_not(job, newest, wanted)
        if reason is not None:
            return _skipped(task_id, job, reason, newest.request.task_id if newest is not job else None)
        try:
            following = replace(self._retries.next_request(job), redriven=True)
        except UnknownModelError:
            return _skipped(task_id, job, SkipReason.MODEL_GONE)
        outcome = outcome_of(job)
        item = RedriveItem(
            task_id=task_id,
            status=outcome.status,
            error_code=outcome.error_code,
            action="start",
            reason=None,
            new_task_id=following.task_id,
        )
        return _Verdict(item=item, following=following)

    async def _carry_out(
        self, operator: Caller, verdicts: Sequence[_Verdict], *, dry_run: bool
    ) -> tuple[list[RedriveItem], RedriveStop | None]:
        """Start tasks one after the other, until a pool takes no more; what was looked at, and why it stopped."""
        items: list[RedriveItem] = []
        started: Counter[str] = Counter()
        for verdict in verdicts:
            item, request = verdict.item, verdict.following
            if request is not None and not dry_run:
                stop = await self._no_room(request, more=started[request.pool])
                if stop is not None:
                    return items, stop
                if await self._jobs.start(request):
                    started[request.pool] += 1
                    _log.info(
                        "task_redriven", task_id=request.task_id, retry_of=request.retry_of, key_id=operator.key.key_id
                    )
                else:
                    # Its owner, or another operator, was faster by a moment.
                    item = item.model_copy(update={"action": "skip", "reason": SkipReason.RETRIED})
            items.append(item)
        return items, None

    async def _no_room(self, request: GenerationInput, *, more: int) -> RedriveStop | None:
        queue = await self._queues.pool(request.pool)
        if queue is not None and queue.live_slots == 0:
            return RedriveStop(
                code="NO_WORKER",
                detail=f"No live worker serves pool {request.pool}: the tasks would only wait there until they time "
                "out again.",
                retry_after_seconds=NO_WORKER_RETRY_SECONDS,
            )
        try:
            await self._backlog.check(request, share=QUEUE_SHARE, more=more)
        except QueueFullError as full:
            return RedriveStop(
                code="QUEUE_FULL", detail=full.detail, retry_after_seconds=int(full.headers["Retry-After"])
            )
        return None


def is_redrivable(code: FailureCode | None) -> bool:
    """Whether the same request may well succeed another time, nothing but time having passed."""
    if code is None:
        return False
    return FAILURE_CLASSES[code].remedy is not Remedy.FINAL or code is FailureCode.DEADLINE_EXCEEDED


def _why_not(job: Job, newest: Job, wanted: Redrive) -> SkipReason | None:
    """Why a task is not run again; None: it is."""
    outcome = outcome_of(job)
    if job.closing is None:
        return SkipReason.ALIVE
    if outcome.status is TaskStatus.SUCCEEDED:
        return SkipReason.SUCCEEDED
    if newest is not job:
        return SkipReason.RETRIED
    if job.request.redriven and not wanted.again:
        return SkipReason.REDRIVEN
    if not is_redrivable(outcome.error_code) and outcome.error_code not in wanted.also:
        return SkipReason.NOT_RETRYABLE
    return None


def _skipped(task_id: str, job: Job | None, reason: SkipReason, newest: str | None = None) -> _Verdict:
    outcome = outcome_of(job) if job is not None else None
    item = RedriveItem(
        task_id=task_id,
        status=outcome.status if outcome else None,
        error_code=outcome.error_code if outcome else None,
        action="skip",
        reason=reason,
        new_task_id=newest,
    )
    return _Verdict(item=item)


def _query(wanted: Redrive) -> str:
    parts = [f"WorkflowType = '{_WORKFLOW_TYPE}'", "ExecutionStatus != 'Running'", "ExecutionStatus != 'Completed'"]
    if wanted.since is not None:
        parts.append(f"CloseTime >= '{query_time(wanted.since)}'")
    if wanted.until is not None:
        parts.append(f"CloseTime < '{query_time(wanted.until)}'")
    if wanted.query.strip():
        parts.append(f"({wanted.query})")
    return " AND ".join(parts)


def _task_ids(rows: Sequence[WorkflowExecution]) -> list[str]:
    """Each task once; a query that breaks out of its brackets finds nothing but tasks either."""
    return list(dict.fromkeys(row.id for row in rows if row.workflow_type == _WORKFLOW_TYPE))
