"""The bounded queue: a task that could not be served in time is refused instead of being taken silently."""

from __future__ import annotations

from typing import Final

from api.problems import QueueFullError
from api.queue_statistics import Queues, QueueStatistics
from workflows.tasks import GenerationInput

UNKNOWN_WAIT_SECONDS: Final = 30.0
"""`Retry-After` when nothing tells how fast the queue moves."""
MAX_WAIT_SECONDS: Final = 3_600.0
"""An estimate further away than this is worth nothing."""


class Backlog:
    """Says whether a pool takes one more task.

    Args:
        queues: statistics of the pools.
        max_backlog: tasks that may wait in a pool.
    """

    def __init__(self, queues: Queues, *, max_backlog: int) -> None:
        self._queues = queues
        self._max = max_backlog

    async def check(self, request: GenerationInput, *, share: float = 1.0, more: int = 0) -> None:
        """Let a new task in.

        Args:
            request: of the task.
            share: part of the limits that this kind of task may use up.
            more: tasks that the statistics may not have yet.

        Raises:
            QueueFullError: too many wait, or the last of them will wait longer than this task's deadline.
        """
        queue = await self._queues.recent(request.pool)
        if queue is None:
            # Who cannot say how long the queue is will not start the task either.
            return
        backlog, limit = queue.backlog + more, max(1, int(self._max * share))
        if backlog >= limit:
            raise QueueFullError(
                f"{backlog} tasks wait in pool {queue.pool}; the limit is {limit}.",
                retry_after_seconds=_until_below(queue, backlog, limit),
            )
        wait, deadline = queue.seconds_for(backlog) if backlog else 0.0, request.limits.deadline_seconds * share
        if wait is not None and wait > deadline:
            raise QueueFullError(
                f"The estimated wait in pool {queue.pool} is {wait:.0f} s, longer than the deadline of {deadline:g} s.",
                retry_after_seconds=min(wait - deadline, MAX_WAIT_SECONDS),
            )


def _until_below(queue: QueueStatistics, backlog: int, limit: int) -> float:
    """Seconds until a place in the queue is free, if nobody else comes."""
    excess = backlog - limit + 1
    seconds = queue.seconds_for(excess)
    if seconds is None and queue.completion_rate > 0:
        seconds = excess / queue.completion_rate
    return min(seconds if seconds is not None else UNKNOWN_WAIT_SECONDS, MAX_WAIT_SECONDS)
