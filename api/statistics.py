"""Counts of tasks by state and how long tasks were in each; cached, so that dashboards cost little.

Counts are Temporal's visibility counts: one call per state, since it groups by nothing else. How the time is
distributed is taken from the records of the newest ended tasks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, TypeVar

from temporalio.client import Client, WorkflowExecution

from activities.memory import remember
from api.listing import status_filter
from api.statistics_schemas import StateDuration, Stats
from api.temporal_calls import bounded
from workflows import naming
from workflows.states import TaskStatus
from workflows.tasks import TaskRecord, User

COUNTS_CACHE_SECONDS: Final = 5.0
DURATIONS_CACHE_SECONDS: Final = 60.0
MAX_MEASURED: Final = 500
"""Newest ended tasks that the durations are taken from."""
READING_SECONDS: Final = 1.0
"""Time for decoding their records; what is not read by then is left out."""
_MAX_REMEMBERED: Final = 1_000
_TURN: Final = 10
"""Records decoded before other requests get their turn."""

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class _Counts:
    by_state: Mapping[TaskStatus, int]
    at: datetime


@dataclass(frozen=True, kw_only=True)
class _Durations:
    by_state: Mapping[TaskStatus, StateDuration]
    tasks: int
    at: datetime


class _Cache(Generic[Made]):
    """Results by name, each made once however many ask at a time."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._made: OrderedDict[str, tuple[float, asyncio.Task[Made]]] = OrderedDict()

    async def get(self, name: str, make: Callable[[], Awaitable[Made]]) -> Made:
        until, making = self._made.get(name, (0.0, None))
        if making is None or until <= time.monotonic() or _failed(making):
            making = asyncio.ensure_future(_awaited(make))
            remember(self._made, name, (time.monotonic() + self._seconds, making), at_most=_MAX_REMEMBERED)
        # Shielded: one reader may go away, the others still want the result.
        return await asyncio.shield(making)


async def _awaited(make: Callable[[], Awaitable[Made]]) -> Made:
    return await make()


def _failed(making: asyncio.Task[Made]) -> bool:
    return making.done() and (making.cancelled() or making.exception() is not None)


class Statistics:
    """Statistics of one user's tasks, or of all.

    Args:
        client: of the namespace.
        call_limit: time for one call.
    """

    def __init__(self, client: Client, *, call_limit: timedelta) -> None:
        self._client = client
        self._limit = call_limit
        self._counts: _Cache[_Counts] = _Cache(seconds=COUNTS_CACHE_SECONDS)
        self._durations: _Cache[_Durations] = _Cache(seconds=DURATIONS_CACHE_SECONDS)

    async def of(self, user: User | None) -> Stats:
        """Statistics of a user's tasks; of everybody's for None.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        name = naming.user_hash(user) if user is not None else ""
        whose = ["WorkflowType = 'GenerationWorkflow'", *([f"UserId = '{name}'"] if name else [])]
        counts, durations = await asyncio.gather(
            self._counts.get(name, lambda: self._count(whose)),
            self._durations.get(name, lambda: self._measure(whose)),
        )
        return Stats(
            scope="all" if user is None else "own",
            counts=dict(counts.by_state),
            counted_at=counts.at,
            durations=dict(durations.by_state),
            measured_tasks=durations.tasks,
            measured_at=durations.at,
        )

    async def _count(self, whose: Sequence[str]) -> _Counts:
        async def count(status: TaskStatus) -> int:
            query = " AND ".join([*whose, status_filter(status)])
            return (await bounded(lambda: self._client.count_workflows(query), limit=self._limit)).count

        found = await asyncio.gather(*map(count, TaskStatus))
        return _Counts(by_state=dict(zip(TaskStatus, found, strict=True)), at=datetime.now(UTC))

    async def _measure(self, whose: Sequence[str]) -> _Durations:
        ended = self._client.list_workflows(
            " AND ".join([*whose, "ExecutionStatus != 'Running'"]), page_size=MAX_MEASURED
        )
        await bounded(ended.fetch_next_page, limit=self._limit)
        records = await _records(ended.current_page or ())
        return _Durations(
            by_state=distribution(record.durations for record in records), tasks=len(records), at=datetime.now(UTC)
        )


async def _records(executions: Sequence[WorkflowExecution]) -> list[TaskRecord]:
    """Final records, newest first, as many as can be decoded in time."""
    give_up_at = time.monotonic() + READING_SECONDS
    records: list[TaskRecord] = []
    for number, execution in enumerate(executions):
        if number % _TURN == 0:
            await asyncio.sleep(0)
            if time.monotonic() > give_up_at:
                break
        record: TaskRecord | None = await execution.memo_value(naming.MEMO_RECORD, None, type_hint=TaskRecord)
        if record is not None and record.finished_at is not None:
            records.append(record)
    return records


def distribution(durations: Iterable[Mapping[str, float]]) -> dict[TaskStatus, StateDuration]:
    """Median and 95th percentile of the seconds in each state, by nearest rank, over tasks that were in it."""
    seconds: dict[TaskStatus, list[float]] = {}
    for spent in durations:
        for state, amount in spent.items():
            seconds.setdefault(TaskStatus(state), []).append(amount)
    return {
        state: StateDuration(
            tasks=len(amounts), p50_seconds=_percentile(amounts, 0.50), p95_seconds=_percentile(amounts, 0.95)
        )
        for state, amounts in sorted(seconds.items(), key=lambda item: list(TaskStatus).index(item[0]))
    }


def _percentile(amounts: Sequence[float], share: float) -> float:
    return round(sorted(amounts)[math.ceil(share * len(amounts)) - 1], 3)
