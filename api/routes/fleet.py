"""`/queues`, `/stats`, `/workers`: what waits, how tasks fare and who serves them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute, OperatorCaller
from api.problems import (
    ForbiddenError,
    InternalError,
    RateLimitedError,
    TemporalUnavailableError,
    UnauthenticatedError,
    ValidationFailedError,
    problem_responses,
)
from api.state import AppGateway
from api.statistics_schemas import QueueList, QueueState, Stats, WorkerList
from workers.keys import Scope

router = APIRouter(
    prefix="/api/v1",
    tags=["operation"],
    route_class=AuthenticatedRoute,
    dependencies=DECLARED_IN_OPENAPI,
    responses=problem_responses(
        UnauthenticatedError,
        ForbiddenError,
        ValidationFailedError,
        RateLimitedError,
        TemporalUnavailableError,
        InternalError,
    ),
)

UserId = Annotated[str | None, Header(alias="X-User-Id")]


@router.get("/queues", summary="See what waits for GPUs")
async def queues(gateway: AppGateway, _user: UserId = None) -> QueueList:
    """Every GPU pool of the catalogue: backlog, rates, and how long it takes to drain."""
    pools = sorted({spec.pool for spec in gateway.catalogue})
    found = await asyncio.gather(*map(gateway.queues.pool, pools))
    items = [
        QueueState(
            pool=queue.pool,
            backlog=queue.backlog,
            backlog_age_seconds=round(queue.backlog_age_seconds, 3),
            arrival_rate=round(queue.arrival_rate, 4),
            completion_rate=round(queue.completion_rate, 4),
            drain_seconds=round(queue.drain_seconds, 1) if queue.drain_seconds is not None else None,
            live_slots=queue.live_slots,
        )
        for queue in found
        if queue is not None
    ]
    if len(items) < len(pools):
        raise TemporalUnavailableError("Temporal did not say what waits; try again.")
    return QueueList(items=items)


@router.get("/stats", summary="Count your tasks by state")
async def stats(caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> Stats:
    """Counts are up to 5 s old, durations up to 60 s. An operator who names no end user sees the tasks of all."""
    everybody = caller.key.scope.includes(Scope.OPERATOR) and caller.end_user is None
    return await gateway.statistics.of(None if everybody else caller.user)


@router.get("/workers", summary="List the workers")
async def workers(_operator: OperatorCaller, gateway: AppGateway, _user: UserId = None) -> WorkerList:
    """Needs a key of scope operator. Up to one heartbeat interval and 3 s old."""
    return await gateway.roster.workers()
