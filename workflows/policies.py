"""Timeouts, backoff and the callback schedule as data and pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Final

from workflows.failures import Backoff
from workflows.tasks import Limits

JITTER: Final = 0.2
"""Delays are spread by +/- 20 %."""

RETRY_INITIAL_SECONDS: Final = 2.0
RETRY_MAX_SECONDS: Final = 60.0
NOT_READY_MAX_SECONDS: Final = 30.0

CALLBACK_SCHEDULE_SECONDS: Final[tuple[float, ...]] = (
    *(0.0, 1.0, 2.0, 4.0, 8.0),
    *(30.0, 120.0, 600.0, 1_800.0, 3_600.0, 7_200.0),
    *([14_400.0] * 3),
    *([28_800.0] * 7),
)
"""Delay before each attempt: at once, 1, 2, 4, 8 s, then a tail; about 72 h in all."""

CALLBACK_MAX_RETRY_AFTER_SECONDS: Final = 86_400.0
"""A receiver's `Retry-After` is honoured up to a day."""


def jittered(seconds: float, random: Random) -> float:
    """Spread a delay by `JITTER`, so that tasks that failed together do not come back together."""
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)


def retry_delay(backoff: Backoff, repeats: int, random: Random) -> float:
    """Seconds to wait before the next attempt.

    Args:
        backoff: what the failure's row says.
        repeats: how often this kind of failure has come in a row, 1 for the first.
        random: the workflow's own generator.
    """
    if backoff is Backoff.NONE:
        return 0.0
    if backoff is Backoff.NOT_READY:
        return 0.0 if repeats <= 1 else min(2.0 ** (repeats - 2), NOT_READY_MAX_SECONDS)
    return jittered(min(RETRY_INITIAL_SECONDS * 2.0 ** (repeats - 1), RETRY_MAX_SECONDS), random)


def start_to_close(limits: Limits) -> timedelta:
    """Hard wall of one attempt: whatever the worker says, the server ends it here."""
    return timedelta(
        seconds=limits.load_timeout_seconds
        + limits.processing_timeout_seconds
        + limits.processing_grace_seconds
        + limits.encode_store_timeout_seconds
    )


def next_delivery_delay(schedule: Sequence[float], failures: int, random: Random) -> float | None:
    """Seconds before the next delivery attempt after `failures` counted ones; None when the schedule is used up."""
    if failures >= len(schedule):
        return None
    return jittered(schedule[failures], random)
