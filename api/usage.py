"""What callers have used, joined from their admission, the limits of their tier and the tasks that ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from temporalio.client import Client

from activities.admission import AdmissionListings
from activities.memory import remember
from api.admission import acts_for_end_user, tenant_limits, user_limits
from api.auth import Caller
from api.quota import QUOTA_TIMEOUT, read_usage
from api.temporal_calls import bounded
from api.usage_schemas import Allowance, AmountUsed, OwnPlacesUsed, PlacesUsed, Quota, SubmissionsLeft, Usage
from workers.settings import Settings
from workflows import naming, quotas
from workflows.tasks import User

CACHE_SECONDS: Final = 5.0
MAX_COUNTED: Final = 1_000
"""Ended tasks that are looked at for a user without an allowance."""
_MAX_REMEMBERED: Final = 1_000
_DAY_SECONDS: Final = 86_400.0


@dataclass(frozen=True, kw_only=True)
class _Counted:
    used: AmountUsed
    until: float


class UsageReports:
    """Reports for callers and operators.

    Args:
        client: reaches the admissions.
        settings: tiers and limits.
    """

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._listings = AdmissionListings(client, max_rows=MAX_COUNTED)
        self._counted: OrderedDict[str, _Counted] = OrderedDict()

    async def of(self, caller: Caller) -> Usage:
        """What the caller has, may have and has used.

        Raises:
            ControlUnavailableError: the caller's admission is open, but no control worker answered.
            TemporalUnavailableError: no answer in time.
        """
        user, tier = caller.user, self._settings.tier(caller.key.tier)
        limits = user_limits(self._settings, tier)
        account = await read_usage(self._client, user)
        return Usage(
            tier=caller.key.tier,
            pending=OwnPlacesUsed(limit=limits.max_pending, used=len(account.held), task_ids=_ids(account)),
            tenant_pending=await self._tenant_places(caller),
            submissions=SubmissionsLeft(
                per_minute=limits.rate_per_minute,
                burst=limits.burst,
                available=round(min(limits.burst, limits.burst if account.tokens is None else account.tokens), 3),
            ),
            used=await self._used(user, account, limits.allowance),
            allowance=_allowance(account, limits.allowance),
        )

    async def quota(self, user: User, *, shared: bool) -> Quota:
        """An account as its admission keeps it.

        Args:
            user: whose; with `shared`, only the tenant matters.
            shared: the account above all end users of the tenant.

        Raises:
            ControlUnavailableError: the admission is open, but no control worker answered.
        """
        account = await read_usage(self._client, user, tenant=shared)
        return Quota(
            tenant=user.tenant,
            end_user=None if shared else user.end_user or None,
            shared=shared,
            pending=len(account.held),
            task_ids=_ids(account),
            submissions_available=None if account.tokens is None else round(account.tokens, 3),
            used=_counted_by_admission(account),
        )

    async def _tenant_places(self, caller: Caller) -> PlacesUsed | None:
        limits = tenant_limits(self._settings, self._settings.tier(caller.key.tier))
        if limits is None or not acts_for_end_user(caller):
            return None
        account = await read_usage(self._client, caller.user, tenant=True)
        return PlacesUsed(limit=limits.max_pending, used=len(account.held))

    async def _used(self, user: User, account: quotas.Usage, allowance: quotas.Allowance | None) -> AmountUsed:
        """What the admission has counted for the allowance, else what visibility says."""
        if allowance is not None and (counted := _counted_by_admission(account)) is not None:
            return counted
        since = quotas.period_start(allowance.period_seconds if allowance else _DAY_SECONDS, datetime.now(UTC))
        name = naming.user_hash(user)
        known = self._counted.get(name)
        if known is None or known.until <= time.monotonic() or known.used.since != since:
            wanted = quotas.ListUsedInput(admission_id=naming.admission_id(user), user_hash=name, since=since)
            amount = await bounded(lambda: self._listings.list_used(wanted), limit=QUOTA_TIMEOUT)
            used = AmountUsed(since=since, tasks=amount.tasks, gpu_seconds=round(amount.gpu_seconds, 3))
            known = _Counted(used=used, until=time.monotonic() + CACHE_SECONDS)
            remember(self._counted, name, known, at_most=_MAX_REMEMBERED)
        return known.used


def _ids(account: quotas.Usage) -> list[str]:
    return [place.task_id for place in account.held]


def _counted_by_admission(account: quotas.Usage) -> AmountUsed | None:
    if account.period_started_at is None:
        return None
    return AmountUsed(
        since=account.period_started_at, tasks=account.used_tasks, gpu_seconds=round(account.used_gpu_seconds, 3)
    )


def _allowance(account: quotas.Usage, allowance: quotas.Allowance | None) -> Allowance | None:
    if allowance is None:
        return None
    start = quotas.period_start(allowance.period_seconds, account.at)
    period = quotas.UsedPeriod(started_at=start, seconds=allowance.period_seconds)
    return Allowance(
        tasks=allowance.tasks,
        gpu_seconds=allowance.gpu_seconds,
        reserved_gpu_seconds=round(account.reserved_gpu_seconds, 3),
        ends_at=period.ends_at,
    )
