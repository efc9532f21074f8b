"""The words of admission: limits of a tier, places, refusals and what an admission workflow carries along.

An admission workflow exists once per active user, and once per tenant whose service keys act for end users. It
hands out *places* (unfinished tasks), takes a token from a bucket for each, and counts an allowance per period.
"""

# Without `from __future__ import annotations`: the converter resolves the annotations of every value that it decodes,
# and would compile each that is text.

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

PERIOD_ANCHOR: Final = datetime(1970, 1, 5, tzinfo=UTC)
"""A Monday, so that periods of whole days start at midnight UTC and those of a week on Mondays."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Amounts per period. A task counts when it ends; until then its place reserves its estimate."""

    period_seconds: float
    """At most the retention of closed runs (7 days), since a fresh admission counts those."""
    tasks: int | None = None
    """None: tasks are not limited."""
    gpu_seconds: float | None = None
    """None: GPU seconds are not limited."""


@dataclass(frozen=True, kw_only=True)
class TierLimits:
    """Limits of one admission; they come with every request, so a changed tier holds from the next one on."""

    max_pending: int = 3
    rate_per_minute: float = 60.0
    burst: int = 20
    allowance: Allowance | None = None


@dataclass(frozen=True, kw_only=True)
class HeldPlace:
    """A place that an unfinished task holds."""

    task_id: str
    token: str
    """Names this holding: what gives a place back must know it."""
    admitted_at: datetime
    estimated_gpu_seconds: float = 0.0
    claims: tuple[str, ...] = ()
    """Submissions that were given this place and may still start its task."""


@dataclass(frozen=True, kw_only=True)
class StalePlace:
    """A place whose task is known to be over, or to have never started."""

    task_id: str
    token: str
    ran: bool = True
    """False: no such run exists, nothing is charged."""
    gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdmitRequest:
    """Update `admit`: ask for a place for one task."""

    task_id: str
    claim: str
    """Drawn by the client for each submission and kept over its retries. It becomes the token of a new place,
    so that a submission whose reply was lost can still withdraw what it asked for."""
    limits: TierLimits
    estimated_gpu_seconds: float = 0.0
    stale: tuple[StalePlace, ...] = ()
    """Dropped first, each only if its token is the one held."""


class RefusalReason(StrEnum):
    """`type` of the `ApplicationError` that refuses an admit."""

    TOO_MANY_PENDING_TASKS = "TOO_MANY_PENDING_TASKS"
    RATE_LIMITED = "RATE_LIMITED"
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    NOT_READY = "NOT_READY"
    """A fresh admission could not list the running tasks in time; it goes on trying."""
    WITHDRAWN = "WITHDRAWN"
    """The submission gave up before its admit was executed."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """First detail of the `ApplicationError` that refuses an admit."""

    reason: RefusalReason
    retry_after_seconds: float
    refused_at: datetime
    held: tuple[HeldPlace, ...] = ()
    """Who holds places, oldest first; without their claims."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Answer of the query `usage`, and memo `record` of an admission that closes with an allowance."""

    at: datetime
    held: tuple[HeldPlace, ...] = ()
    tokens: float | None = None
    """Submissions left in the bucket; None: nothing was asked for yet, the bucket is full."""
    period_started_at: datetime | None = None
    """None: no allowance is counted."""
    period_ends_at: datetime | None = None
    used_tasks: int = 0
    used_gpu_seconds: float = 0.0
    reserved_gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A token bucket as it was when last touched."""

    tokens: float
    touched_at: datetime
    rate_per_minute: float
    burst: int

    def at(self, now: datetime) -> float:
        """Tokens at a later time."""
        elapsed = max(0.0, (now - self.touched_at).total_seconds())
        return min(float(self.burst), self.tokens + elapsed * self.rate_per_minute / 60.0)

    def full_at(self) -> datetime:
        """When nothing is left to refill; a bucket that never refills is never waited for."""
        missing = self.burst - self.tokens
        if missing <= 0 or self.rate_per_minute <= 0:
            return self.touched_at
        return self.touched_at + timedelta(seconds=missing * 60.0 / self.rate_per_minute)


@dataclass(frozen=True, kw_only=True)
class UsedPeriod:
    """What was used of an allowance in the period that starts at `started_at`."""

    started_at: datetime
    seconds: float
    tasks: int = 0
    gpu_seconds: float = 0.0

    @property
    def ends_at(self) -> datetime:
        """Start of the next period."""
        return self.started_at + timedelta(seconds=self.seconds)

    def at(self, now: datetime) -> "UsedPeriod":
        """This period, or the unused one that has taken its place."""
        if now < self.ends_at:
            return self
        return UsedPeriod(started_at=period_start(self.seconds, now), seconds=self.seconds)


def period_start(seconds: float, now: datetime) -> datetime:
    """Start of the period that `now` lies in."""
    period = timedelta(seconds=seconds)
    return PERIOD_ANCHOR + (now - PERIOD_ANCHOR) // period * period


@dataclass(frozen=True, kw_only=True)
class AdmissionState:
    """What an admission knows, as it carries it over continue-as-new."""

    active_at: datetime
    """Last admit or release."""
    places: tuple[HeldPlace, ...] = ()
    """Oldest first."""
    bucket: Bucket | None = None
    used: UsedPeriod | None = None
    reset_at: datetime | None = None
    """What ended before an operator's reset is not counted."""
    withdrawn: tuple[str, ...] = ()
    """Claims that were withdrawn before their admit came."""


@dataclass(frozen=True, kw_only=True)
class AdmissionInput:
    """Input of `AdmissionWorkflow`."""

    user_hash: str = ""
    """Whose tasks a fresh admission lists; empty: it belongs to a tenant and looks through all running tasks."""
    idle_close_seconds: float = 3600.0
    continue_after_events: int = 0
    """0: when the server suggests it."""
    state: AdmissionState | None = None
    """None: a fresh admission, which lists the running tasks first."""


@dataclass(frozen=True, kw_only=True)
class ListRunningTasksInput:
    """Ask for the running holders of an admission's places."""

    admission_id: str
    user_hash: str


@dataclass(frozen=True, kw_only=True)
class ListUsedInput:
    """Ask for what ended since a time and had held a place of this admission."""

    admission_id: str
    user_hash: str
    since: datetime


@dataclass(frozen=True, kw_only=True)
class UsedAmount:
    """What ended since the time asked for."""

    tasks: int = 0
    gpu_seconds: float = 0.0
    recent: tuple[str, ...] = ()
    """Ids of those that ended in the last minutes: they may also report themselves."""


@dataclass(frozen=True, kw_only=True)
class RunningTasks:
    """Running holders of an admission's places, oldest first."""

    places: tuple[HeldPlace, ...] = field(default=())
