"""Which of the places that a refusal names are held by nobody: their task is over, or was never started."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from workflows.naming import MEMO_RECORD
from workflows.quotas import HeldPlace, Refusal, StalePlace

UNSTARTED_AFTER: Final = timedelta(seconds=60)
"""A place whose task does not exist is stale after this long: its submission is over."""
MAX_CHECKED_PLACES: Final = 32
"""Oldest first: a leaked place grows old, so it is looked at sooner or later."""


@dataclass(frozen=True, kw_only=True)
class _Charged:
    """What the record of a task and that of a batch have in common."""

    gpu_seconds: float = 0.0


async def stale_places(client: Client, refusal: Refusal) -> tuple[StalePlace, ...]:
    """Those of the oldest held places whose task is over, or was never started."""
    checked = refusal.held[:MAX_CHECKED_PLACES]
    found = await asyncio.gather(*(_stale(client, place, refusal.refused_at) for place in checked))
    return tuple(place for place in found if place is not None)


async def _stale(client: Client, place: HeldPlace, at: datetime) -> StalePlace | None:
    try:
        task = await client.get_workflow_handle(place.task_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND and at - place.admitted_at > UNSTARTED_AFTER:
            return StalePlace(task_id=place.task_id, token=place.token, ran=False)
        # Unsure: the place counts.
        return None
    if task.status is WorkflowExecutionStatus.RUNNING:
        return None
    return StalePlace(task_id=place.task_id, token=place.token, gpu_seconds=await _gpu_seconds(task))


async def _gpu_seconds(task: WorkflowExecutionDescription) -> float:
    return (await task.memo_value(MEMO_RECORD, _Charged(), type_hint=_Charged)).gpu_seconds
