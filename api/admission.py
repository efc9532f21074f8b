"""The seam where admission control comes in: a submission asks for places before its job starts."""

from __future__ import annotations

from datetime import timedelta
from typing import Final, Protocol

from temporalio.client import Client
from temporalio.service import RPCError

from api import admission_client
from api.admission_client import Grant
from api.auth import Caller
from api.control_pulse import ControlPulse
from api.open_admissions import OpenAdmissions
from api.problems import TemporalUnavailableError
from api.queue_statistics import Queues
from workers.keys import Scope
from workers.settings import Settings, Tier
from workflows.quotas import Allowance, TierLimits
from workflows.tasks import GenerationInput

ADMIT_WITHIN: Final = timedelta(seconds=2.2)
"""A submission without a control worker is answered in 3 s; the rest is for its other calls. A control worker that is
at work gets longer, see `control_pulse`."""
UNLIMITED: Final = 1_000_000
"""The tenant's account counts places; the rates are its users' own."""

_DAY_SECONDS: Final = 86_400.0


class Admission(Protocol):
    """Decides whether a user may start one more task."""

    async def admit(self, caller: Caller, request: GenerationInput) -> Grant:
        """Take the places for a task; asked again for the same task, the same places.

        Raises:
            GatewayError: a limit is reached, or nobody answers.
        """
        ...

    async def withdraw(self, grant: Grant) -> None:
        """Give places back, for a submission that certainly does not start its task with them."""
        ...


class OpenAdmission:
    """No limits."""

    async def admit(self, caller: Caller, request: GenerationInput) -> Grant:
        """Admit everyone."""
        return Grant(task_id=request.task_id, claim="", places=())

    async def withdraw(self, grant: Grant) -> None:
        """Nothing was taken."""


class TierAdmission:
    """The limits of the caller's tier: the user's first, then those of the tenant above its end users.

    Args:
        client: reaches the admissions.
        settings: tiers, and the limits that a tier does not set.
        queues: estimate the GPU seconds of a task for tiers that count them.
    """

    def __init__(self, client: Client, *, settings: Settings, queues: Queues) -> None:
        self._client = client
        self._settings = settings
        self._queues = queues
        self._pulse = ControlPulse(client)
        self._running = OpenAdmissions()

    async def admit(self, caller: Caller, request: GenerationInput) -> Grant:
        """Take the places for a task; asked again for the same task, the same places.

        Raises:
            TooManyPendingTasksError, RateLimitedError, QuotaExhaustedError: a limit is reached.
            AdmissionUnavailableError: no control worker answered in time.
            TemporalUnavailableError: Temporal refuses to serve.
        """
        tier = self._settings.tier(caller.key.tier)
        try:
            return await admission_client.admit(
                self._client,
                request.user,
                task_id=request.task_id,
                limits=user_limits(self._settings, tier),
                tenant_limits=tenant_limits(self._settings, tier) if acts_for_end_user(caller) else None,
                estimated_gpu_seconds=await self._estimate(tier, request.pool),
                timeout=ADMIT_WITHIN,
                pulse=self._pulse,
                running=self._running,
            )
        except RPCError as error:
            raise TemporalUnavailableError from error

    async def withdraw(self, grant: Grant) -> None:
        """Give the places back; best effort, what it cannot reach is found stale later."""
        if grant.places:
            await admission_client.withdraw(self._client, grant)

    async def _estimate(self, tier: Tier, pool: str) -> float:
        if tier.allowance_gpu_seconds is None:
            return 0.0
        length = await self._queues.length(pool)
        return length.gpu_seconds if length is not None else 0.0


def acts_for_end_user(caller: Caller) -> bool:
    """Whether the caller's tasks count for the tenant above its end users too."""
    return caller.end_user is not None and caller.key.scope.includes(Scope.SERVICE)


def user_limits(settings: Settings, tier: Tier) -> TierLimits:
    """What one user of a tier may have."""
    return TierLimits(
        max_pending=tier.max_pending_tasks or settings.max_pending_tasks,
        rate_per_minute=tier.submit_rate_per_minute or settings.submit_rate_per_minute,
        burst=tier.submit_burst or settings.submit_burst,
        allowance=_allowance(tier),
    )


def tenant_limits(settings: Settings, tier: Tier) -> TierLimits | None:
    """What all end users of a tenant may have together; None: nothing is counted."""
    max_pending = tier.tenant_max_pending_tasks or settings.tenant_max_pending_tasks
    if max_pending is None:
        return None
    return TierLimits(max_pending=max_pending, rate_per_minute=float(UNLIMITED), burst=UNLIMITED)


def _allowance(tier: Tier) -> Allowance | None:
    if tier.allowance_tasks is None and tier.allowance_gpu_seconds is None:
        return None
    return Allowance(
        period_seconds=tier.allowance_period_days * _DAY_SECONDS,
        tasks=tier.allowance_tasks,
        gpu_seconds=tier.allowance_gpu_seconds,
    )
