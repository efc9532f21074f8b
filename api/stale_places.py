"""Which of the places that a refusal names are held by nobody: their task is over, or was never started."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.admission import HOLDERS
from workflows.naming import MEMO_RECORD, USER_ID
from workflows.quotas import HeldPlace, Refusal, StalePlace

UNSTARTED_AFTER: Final = timedelta(seconds=60)
"""A place whose task does not exist is stale after this long: its submission is over."""
MAX_CHECKED_PLACES: Final = 32
MAX_LISTED: Final = 1_000
"""As many as one call answers."""


@dataclass(frozen=True, kw_only=True)
class _Charged:
    """What the record of a task and that of a batch have in common."""

    gpu_seconds: float = 0.0


async def stale_places(client: Client, refusal: Refusal, *, user_hash: str) -> tuple[StalePlace, ...]:
    """Places whose task is over, or was never started.

    Args:
        client: looks at `MAX_CHECKED_PLACES` tasks at most.
        refusal: names the places that are held, oldest first.
        user_hash: of the user who holds them; empty for a tenant's, which its end users hold.
    """
    suspects = await _suspects(client, refusal.held, user_hash)
    found = await asyncio.gather(*(_stale(client, place, refusal.refused_at) for place in suspects))
    return tuple(place for place in found if place is not None)


async def _suspects(client: Client, held: Sequence[HeldPlace], user_hash: str) -> Sequence[HeldPlace]:
    if len(held) <= MAX_CHECKED_PLACES:
        return held
    running = await _running(client, user_hash) if user_hash else None
    if running is not None:
        # Not seen running: over, never started, or started a moment ago, which the look at the task itself tells.
        return [place for place in held if place.task_id not in running][:MAX_CHECKED_PLACES]
    # A leaked place grows old; of the younger ones some are looked at each time.
    half = MAX_CHECKED_PLACES // 2
    return [*held[:half], *random.sample(held[half:], half)]


async def _running(client: Client, user_hash: str) -> frozenset[str] | None:
    """Ids of what the user has running, as far as visibility knows; None: too many, or it does not answer."""
    query = f"{HOLDERS} AND ExecutionStatus = 'Running' AND {USER_ID.name} = '{user_hash}'"
    found = client.list_workflows(query, page_size=MAX_LISTED)
    try:
        await found.fetch_next_page()
    except RPCError:
        return None
    page = found.current_page or ()
    return frozenset(execution.id for execution in page) if len(page) < MAX_LISTED else None


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
