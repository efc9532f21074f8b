"""What an admission knows: places, token bucket and the used part of an allowance. Pure bookkeeping, no commands."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from workflows.quotas import (
    AdmissionState,
    AdmitRequest,
    Allowance,
    Bucket,
    HeldPlace,
    Refusal,
    RefusalReason,
    RunningTasks,
    StalePlace,
    TierLimits,
    Usage,
    UsedAmount,
    UsedPeriod,
    period_start,
)

PENDING_RETRY_AFTER_SECONDS: Final = 5.0
"""Nobody knows when a task will end; clients of a full user are asked to look this often."""
NOT_READY_RETRY_AFTER_SECONDS: Final = 2.0
UNLISTED_AFTER: Final = timedelta(minutes=10)
"""A place younger than this may belong to a task that visibility does not show yet."""
MAX_CLAIMS: Final = 32
MAX_WITHDRAWN: Final = 64

_EPSILON: Final = 1e-9
"""Refills are sums of floats: three thirds of a token are one."""


class AdmissionLedger:
    """The account of one admission.

    A place is *tentative* while the running tasks are not listed yet: it counts, but `confirm` may refuse it.
    """

    def __init__(self, state: AdmissionState) -> None:
        self._places = {place.task_id: place for place in state.places}
        self._bucket = state.bucket
        self._used = state.used
        self._reset_at = state.reset_at
        self._withdrawn = list(state.withdrawn)
        self._active_at = state.active_at
        self._tentative: set[str] = set()
        self._ended_while_listing: dict[str, float] | None = {}
        """None: nothing is being listed."""

    def state(self) -> AdmissionState:
        """All of it, to carry over."""
        return AdmissionState(
            active_at=self._active_at,
            places=tuple(self._places.values()),
            bucket=self._bucket,
            used=self._used,
            reset_at=self._reset_at,
            withdrawn=tuple(self._withdrawn),
        )

    # Admits

    def refusal(self, request: AdmitRequest, now: datetime) -> Refusal | None:
        """Say why a request cannot have a place, changing nothing."""
        if request.claim in self._withdrawn:
            return self._refuse(RefusalReason.WITHDRAWN, 0.0, now)
        if request.stale:
            after = AdmissionLedger(self.state())
            after.drop_stale(request.stale, now)
            return after.refusal(replace(request, stale=()), now)
        if request.task_id in self._places:
            return None
        return self._full(request, tuple(self._places.values()), now) or self._too_fast(request.limits, now)

    def take(self, request: AdmitRequest, now: datetime, *, tentative: bool) -> HeldPlace:
        """Give the place that `refusal` did not refuse; a task that holds one keeps it and pays nothing."""
        self._active_at = now
        self.drop_stale(request.stale, now)
        held = self._places.get(request.task_id)
        if held is not None:
            if request.claim not in held.claims:
                held = replace(held, claims=(*held.claims, request.claim)[-MAX_CLAIMS:])
                self._places[held.task_id] = held
            return held
        self._bucket = replace(self._bucket_at(request.limits, now), tokens=self._tokens(request.limits, now) - 1.0)
        place = HeldPlace(
            task_id=request.task_id,
            token=request.claim,
            admitted_at=now,
            estimated_gpu_seconds=request.estimated_gpu_seconds,
            claims=(request.claim,),
        )
        self._places[place.task_id] = place
        if tentative:
            self._tentative.add(place.task_id)
        return place

    def confirm(self, request: AdmitRequest, now: datetime) -> HeldPlace | Refusal:
        """Look at a tentative place again, now that the running tasks and the used amount are known."""
        if request.task_id in self._places and request.task_id in self._tentative:
            ahead = []
            for task_id, place in self._places.items():
                if task_id == request.task_id:
                    break
                ahead.append(place)
            refused = self._full(request, tuple(ahead), now)
            self._tentative.discard(request.task_id)
            if refused is not None:
                self._drop(request.task_id)
                self._give_token_back(now)
                return refused
        return self.refusal(request, now) or self.take(request, now, tentative=False)

    def _full(self, request: AdmitRequest, held: tuple[HeldPlace, ...], now: datetime) -> Refusal | None:
        limits = request.limits
        if len(held) >= limits.max_pending:
            return self._refuse(RefusalReason.TOO_MANY_PENDING_TASKS, PENDING_RETRY_AFTER_SECONDS, now, held)
        allowance = limits.allowance
        if allowance is None or self._used is None or not self.knows_used(allowance):
            return None
        used = self._used.at(now)
        spent = used.gpu_seconds + sum(place.estimated_gpu_seconds for place in held)
        over = allowance.tasks is not None and used.tasks + len(held) + 1 > allowance.tasks
        over = over or (
            allowance.gpu_seconds is not None
            and (spent >= allowance.gpu_seconds or spent + request.estimated_gpu_seconds > allowance.gpu_seconds)
        )
        if not over:
            return None
        return self._refuse(RefusalReason.QUOTA_EXHAUSTED, (used.ends_at - now).total_seconds(), now, held)

    def _too_fast(self, limits: TierLimits, now: datetime) -> Refusal | None:
        missing = 1.0 - self._tokens(limits, now)
        if missing <= _EPSILON:
            return None
        wait = missing * 60.0 / limits.rate_per_minute if limits.rate_per_minute > 0 else 60.0
        return self._refuse(RefusalReason.RATE_LIMITED, wait, now)

    def not_ready(self, now: datetime) -> Refusal:
        """Refuse because the running tasks cannot be listed."""
        return self._refuse(RefusalReason.NOT_READY, NOT_READY_RETRY_AFTER_SECONDS, now)

    @staticmethod
    def _refuse(reason: RefusalReason, wait: float, now: datetime, held: tuple[HeldPlace, ...] = ()) -> Refusal:
        shown = tuple(replace(place, claims=()) for place in held)
        return Refusal(reason=reason, retry_after_seconds=max(0.0, wait), refused_at=now, held=shown)

    # Returns

    def release(self, task_id: str, token: str, gpu_seconds: float, now: datetime) -> None:
        """The task has ended. Unknown places are fine: this may be the second time, or the admission is fresh."""
        self._active_at = now
        if self._ended_while_listing is not None:
            self._ended_while_listing[task_id] = gpu_seconds
        if self._holds(task_id, token):
            self._drop(task_id)
            self._charge(1, gpu_seconds, now)

    def drop_stale(self, stale: tuple[StalePlace, ...], now: datetime) -> None:
        """Drop places whose task is over or never was."""
        for place in stale:
            if place.ran:
                self.release(place.task_id, place.token, place.gpu_seconds, now)
            elif self._holds(place.task_id, place.token):
                self._drop(place.task_id)

    def withdraw(self, task_id: str, claim: str, now: datetime) -> None:
        """A submission will not start its task: without other claims the place and its token come back.

        A claim that is not known yet is remembered: its admit may still be on the way.
        """
        held = self._places.get(task_id)
        if held is None or claim not in held.claims:
            self._withdrawn = [*self._withdrawn, claim][-MAX_WITHDRAWN:]
            return
        claims = tuple(other for other in held.claims if other != claim)
        if claims:
            self._places[task_id] = replace(held, claims=claims)
            return
        self._drop(task_id)
        self._give_token_back(now)

    def reset(self, now: datetime) -> None:
        """Operator: forget the used amount and fill the bucket. Places stay, they are held by real tasks."""
        self._bucket = None
        self._reset_at = now
        if self._used is not None:
            self._used = replace(self._used.at(now), tasks=0, gpu_seconds=0.0)

    def _holds(self, task_id: str, token: str) -> bool:
        held = self._places.get(task_id)
        return held is not None and held.token == token

    def _drop(self, task_id: str) -> None:
        del self._places[task_id]
        self._tentative.discard(task_id)

    def _charge(self, tasks: int, gpu_seconds: float, now: datetime) -> None:
        if self._used is not None:
            used = self._used.at(now)
            self._used = replace(used, tasks=used.tasks + tasks, gpu_seconds=used.gpu_seconds + gpu_seconds)

    def _bucket_at(self, limits: TierLimits, now: datetime) -> Bucket:
        return Bucket(
            tokens=self._tokens(limits, now),
            touched_at=now if self._bucket is None else max(now, self._bucket.touched_at),
            rate_per_minute=limits.rate_per_minute,
            burst=limits.burst,
        )

    def _tokens(self, limits: TierLimits, now: datetime) -> float:
        if self._bucket is None:
            return float(limits.burst)
        # The time before this request was under the limits of the last one.
        return min(float(limits.burst), self._bucket.at(now))

    def _give_token_back(self, now: datetime) -> None:
        if self._bucket is not None:
            tokens = min(float(self._bucket.burst), self._bucket.at(now) + 1.0)
            self._bucket = replace(self._bucket, tokens=tokens, touched_at=max(now, self._bucket.touched_at))

    # What a fresh admission, or one that counts again, learns

    def knows_used(self, allowance: Allowance | None) -> bool:
        """Whether the used amount of this allowance is counted."""
        return allowance is None or (self._used is not None and self._used.seconds == allowance.period_seconds)

    def counted_since(self, period_seconds: float, now: datetime) -> datetime:
        """From when on ended tasks count in the current period."""
        start = period_start(period_seconds, now)
        return max(start, self._reset_at) if self._reset_at is not None else start

    def begin_listing(self) -> None:
        """From here on, remember what ends: the listing will be older than that. A fresh ledger does so anyway."""
        if self._ended_while_listing is None:
            self._ended_while_listing = {}

    def end_listing(self) -> None:
        """Nothing is being listed any more."""
        self._ended_while_listing = None

    def adopt(self, running: RunningTasks, now: datetime, *, ended: tuple[str, ...] = ()) -> None:
        """Make the places agree with the running tasks. Those younger than visibility's delay stay."""
        over = {*ended, *(self._ended_while_listing or {})}
        listed = {place.task_id: place for place in running.places if place.task_id not in over}
        for task_id in listed:
            if task_id in self._tentative:
                # It was not new after all.
                self._tentative.discard(task_id)
                self._give_token_back(now)
        kept = {
            task_id: place
            for task_id, place in self._places.items()
            if task_id not in listed and now - place.admitted_at < UNLISTED_AFTER
        }
        self._places = {**listed, **kept}
        self.end_listing()

    def learn_used(self, amount: UsedAmount, period_seconds: float, now: datetime) -> None:
        """Take over what visibility says of this period, and add what ended while it was asked."""
        ended = self._ended_while_listing or {}
        missed = {task_id: seconds for task_id, seconds in ended.items() if task_id not in amount.recent}
        self._used = UsedPeriod(
            started_at=period_start(period_seconds, now),
            seconds=period_seconds,
            tasks=amount.tasks + len(missed),
            gpu_seconds=amount.gpu_seconds + sum(missed.values()),
        )

    # Reading and closing

    @property
    def has_places(self) -> bool:
        """Whether any task holds a place."""
        return bool(self._places)

    @property
    def counted_period_seconds(self) -> float | None:
        """Period of the allowance that is counted."""
        return self._used.seconds if self._used is not None else None

    def usage(self, now: datetime) -> Usage:
        """What is held, left and used."""
        return self._usage(now, self._used.at(now) if self._used is not None else None)

    def closing_usage(self, now: datetime) -> Usage:
        """The same, with the amount of the period that was last counted, which is over."""
        return self._usage(now, self._used)

    def _usage(self, now: datetime, used: UsedPeriod | None) -> Usage:
        return Usage(
            at=now,
            held=tuple(replace(place, claims=()) for place in self._places.values()),
            tokens=self._bucket.at(now) if self._bucket is not None else None,
            period_started_at=used.started_at if used else None,
            period_ends_at=used.ends_at if used else None,
            used_tasks=used.tasks if used else 0,
            used_gpu_seconds=used.gpu_seconds if used else 0.0,
            reserved_gpu_seconds=sum(place.estimated_gpu_seconds for place in self._places.values()),
        )

    def closable_at(self, idle: timedelta) -> datetime:
        """When forgetting everything but the places changes nothing: idle, bucket full, period over or unused."""
        times = [self._active_at + idle]
        if self._bucket is not None:
            times.append(self._bucket.full_at())
        if self._used is not None and (self._used.tasks or self._used.gpu_seconds):
            times.append(self._used.ends_at)
        return max(times)
