"""A callback activity with everything real around it: signing, guard, pool, gate and merge windows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from temporalio.testing import ActivityEnvironment

from activities.callbacks import LOCAL_ATTEMPTS, CallbackDelivery, EndpointSettings
from activities.dns_cache import DnsCache, NameNotFoundError
from activities.egress_policy import Address, EgressPolicy
from activities.endpoint_gate import BreakerRule, Shares
from activities.http_guard import GuardedClient
from workers.keys import EndpointSettings as FileSettings
from workers.links import SignedLinks
from workflows.states import TaskStatus
from workflows.tasks import CallbackEvent, DeliverCallbackInput, DeliveryAttempt

SECRET = "whsec_" + "QUFB" * 8
OLD_SECRET = "whsec_" + "QkJC" * 8
LINKS = SignedLinks("https://api.example", "0123456789abcdef" * 2)
CREATED_AT = datetime(2026, 1, 31, 12, 0, 0, 123_000, tzinfo=UTC)


def event(task_id: str = "task1", **changes: object) -> CallbackEvent:
    """A succeeded task with a clip."""
    base = CallbackEvent(
        type="task.succeeded",
        timestamp=CREATED_AT + timedelta(minutes=2),
        task_id=task_id,
        status=TaskStatus.SUCCEEDED,
        created_at=CREATED_AT,
        started_at=CREATED_AT + timedelta(minutes=1),
        finished_at=CREATED_AT + timedelta(minutes=2),
        artifact_expires_at=CREATED_AT + timedelta(days=7),
        labels=("first",),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Tenants:
    """Signing secrets and endpoint settings, as `KeyRing` answers them."""

    def __init__(self, secrets: Sequence[str] = (SECRET,), endpoints: Mapping[str, FileSettings] | None = None) -> None:
        self.secrets = secrets
        self.endpoints = endpoints or {}

    def callback_secrets(self, tenant: str) -> Sequence[str]:
        return self.secrets

    def endpoint(self, tenant: str, url: str) -> EndpointSettings:
        return self.endpoints.get(url, FileSettings())


@dataclass
class Courier:
    """The activity of one callback worker."""

    delivery: CallbackDelivery

    async def deliver(self, url: str, task_id: str = "task1", **changes: object) -> DeliveryAttempt:
        """Make one attempt as a worker would."""
        attempt = DeliverCallbackInput(tenant="acme", url=url, webhook_id=task_id, event=event(task_id), number=1)
        return await ActivityEnvironment().run(
            self.delivery.deliver_callback,
            replace(attempt, **changes),  # type: ignore[arg-type]
        )

    async def deliver_all(self, url: str, count: int, **changes: object) -> list[DeliveryAttempt]:
        """Make attempts for several tasks at the same time."""
        return await asyncio.gather(*(self.deliver(url, f"task{n}", **changes) for n in range(count)))


@asynccontextmanager
async def courier(
    *,
    tenants: Tenants | None = None,
    policy: EgressPolicy | None = None,
    names: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    total_timeout: float = 5.0,
    breaker: BreakerRule | None = None,
    shares: Shares | None = None,
    local_attempts: int = LOCAL_ATTEMPTS,
) -> AsyncIterator[Courier]:
    """A courier that may go to loopback, and resolves only `names`."""
    known = names or {}

    async def resolve(name: str) -> tuple[Address, ...]:
        if name not in known:
            raise NameNotFoundError(name)
        return (ip_address(known[name]),)

    client = GuardedClient(
        policy or EgressPolicy.allowing("127.0.0.0/8"),
        DnsCache(resolve),
        ssl_context=context or ssl.create_default_context(),
        user_agent="reelgate/1.2.3",
    )
    tenants = tenants or Tenants()
    delivery = CallbackDelivery(
        secrets=tenants,
        links=LINKS,
        client=client,
        endpoints=tenants,
        total_timeout=total_timeout,
        breaker=breaker,
        shares=shares,
        local_attempts=local_attempts,
    )
    try:
        yield Courier(delivery)
    finally:
        await delivery.aclose()
        await client.aclose()
