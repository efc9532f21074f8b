"""The callback activity: one call is one delivery attempt, alone or merged with others for the same endpoint.

A refused, failed or postponed delivery is a result; the schedule belongs to the workflow. Endpoints that are busy or
whose breaker is open are answered `deferred` at once, so no slot ever waits for a receiver that others wait for too.
Only a merge window holds a slot, for twice its length at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.callback_body import (
    MAX_MERGED_BYTES,
    MERGED_FRAME_BYTES,
    ArtifactLinks,
    callback_body,
    merged_body,
    merged_id,
)
from activities.callback_sender import Answer, CallbackSender, RequestOut
from activities.coalescing import Coalescer, Window
from activities.delivery_errors import DeliveryError
from activities.endpoint_gate import BreakerRule, Endpoint, EndpointGate, Permit, Refusal, Shares
from activities.http_guard import GuardedClient, UrlRefusedError
from activities.memory import remember
from workflows.contracts import DELIVER_CALLBACK, CallbackActivities
from workflows.tasks import DeliverCallbackInput, DeliveryAttempt, DeliveryOutcome

__all__ = ["ArtifactLinks", "CallbackDelivery", "CallbackEndpoints", "CallbackSecrets", "EndpointSettings"]

MAX_MERGE_WINDOW_SECONDS: Final = 2.0
BUSY_MAX_SECONDS: Final = 300.0
LOCAL_ATTEMPTS: Final = 80
"""Made at a time inside workflow tasks, per worker. Each holds a slot for workflow tasks until its receiver has
answered, so slow receivers get no more of them than leave room for others; the rest come through the queue."""
NO_PLACE: Final = "NO_PLACE"
"""`type` of the failure with which a local attempt is sent to the queue."""
NOT_MADE: Final = "NOT_MADE"
"""`type` of the failure of a local attempt that was only to be recalled."""
_OUTCOMES: Final = 1_000
_HEARTBEAT_INTERVAL: Final = 2.0
_PATIENCE_STEP: Final = 0.02


class CallbackSecrets(Protocol):
    """Where signing secrets come from; they are never in a workflow."""

    def callback_secrets(self, tenant: str) -> Sequence[str]:
        """Live secrets of a tenant, `whsec_` and base64, newest first. All of them sign."""
        ...


class EndpointSettings(Protocol):
    """Settings of one endpoint (tenant and exact URL)."""

    @property
    def merge_window_ms(self) -> int:
        """Tasks that meet within it leave as one request; 0: every task goes alone. At most 2,000."""
        ...

    @property
    def merge_max_tasks(self) -> int:
        """Tasks in one request."""
        ...

    @property
    def concurrency(self) -> int | None:
        """Requests under way at a time, per callback worker; None: the worker's default."""
        ...


class CallbackEndpoints(Protocol):
    """Where endpoint settings come from."""

    def endpoint(self, tenant: str, url: str) -> EndpointSettings:
        """Settings of an endpoint; defaults for one that has none of its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class _PlainEndpoint:
    merge_window_ms: int = 0
    merge_max_tasks: int = 1
    concurrency: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """One attempt, ready to be sent."""

    endpoint: Endpoint
    url: httpx.URL
    settings: EndpointSettings
    task_id: str
    webhook_id: str
    body: str


@dataclass(frozen=True, kw_only=True)
class _Sent:
    answer: Answer | Refusal
    merged_id: str | None = None


class CallbackDelivery(CallbackActivities):
    """Delivers callbacks: create, register `deliver_callback` with a worker, `aclose()`.

    Args:
        secrets: signing secrets by tenant.
        links: makes `result_url` and `poster_url`.
        client: pool, time-outs and where callbacks may go. Not closed here.
        endpoints: settings by endpoint; without it every endpoint has the defaults.
        concurrency: requests to one endpoint at a time, unless it has its own setting.
        local_attempts: attempts at a time inside workflow tasks.
        total_timeout: seconds for one request with its whole reply.
        breaker, shares: see `endpoint_gate`.
        observe: hears of every attempt, made or deferred, for metrics and logs.
        request_out: entered round every request; yields headers to send with it, for traces.
    """

    def __init__(
        self,
        *,
        secrets: CallbackSecrets,
        links: ArtifactLinks,
        client: GuardedClient,
        endpoints: CallbackEndpoints | None = None,
        concurrency: int = 4,
        local_attempts: int = LOCAL_ATTEMPTS,
        total_timeout: float = 10.0,
        breaker: BreakerRule | None = None,
        shares: Shares | None = None,
        observe: Callable[[DeliverCallbackInput, DeliveryAttempt], None] | None = None,
        request_out: RequestOut | None = None,
    ) -> None:
        self._secrets = secrets
        self._links = links
        self._policy = client.policy
        self._sender = CallbackSender(client, total_timeout=total_timeout, request_out=request_out)
        self._endpoints = endpoints
        self._concurrency = concurrency
        self._gate = EndpointGate(breaker=breaker, shares=shares)
        self._merging: Coalescer[Endpoint, _Delivery, _Sent] = Coalescer(self._send_group)
        self._observe = observe
        self._local_attempts = local_attempts
        self._local = 0
        self._outcomes: OrderedDict[str, DeliveryAttempt] = OrderedDict()
        """Of the newest local attempts, by run."""

    @property
    def gate(self) -> EndpointGate:
        """State of the endpoints, for metrics."""
        return self._gate

    async def aclose(self) -> None:
        """Send what merge windows have collected; call it after the worker has drained."""
        await self._merging.aclose()

    @activity.defn(name=DELIVER_CALLBACK)
    async def deliver_callback(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        """Make one attempt, or say when to come again.

        Raises:
            ApplicationError: only to a local attempt; `NO_PLACE`: it is to come through the queue, or `NOT_MADE`.
        """
        info = activity.info()
        if info.is_local:
            return await self._attempt_locally(delivery, info.workflow_run_id or "")
        async with _heartbeat():
            return await self._attempt(delivery)

    async def _attempt_locally(self, delivery: DeliverCallbackInput, run_id: str) -> DeliveryAttempt:
        """The first attempt of a run, once: its workflow task may fail after it and be done again.

        That happens when a cancel or a signal comes while the attempt lasts and its outcome closes the run.
        """
        if (made := self._outcomes.get(run_id)) is not None:
            return made
        if delivery.recall:
            raise ApplicationError("not made here", type=NOT_MADE, category=ApplicationErrorCategory.BENIGN)
        if self._local >= self._local_attempts:
            raise ApplicationError(
                f"{self._local_attempts} attempts are made inside workflow tasks",
                type=NO_PLACE,
                category=ApplicationErrorCategory.BENIGN,
            )
        self._local += 1
        try:
            attempt = await self._attempt(delivery)
        finally:
            self._local -= 1
        remember(self._outcomes, run_id, attempt, at_most=_OUTCOMES)
        return attempt

    async def _attempt(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        started_at, start = datetime.now(UTC), time.perf_counter()
        body = delivery.body if delivery.body is not None else callback_body(delivery.event, self._links)
        sent = await self._deliver(delivery, body)
        answer = sent.answer
        if isinstance(answer, Refusal):
            answer = Answer(outcome=DeliveryOutcome.DEFERRED, error=answer.error, retry_after_seconds=answer.retry_in)
        retry_after = answer.retry_after_seconds
        if answer.outcome is DeliveryOutcome.DEFERRED and retry_after is None:
            retry_after = min(2.0 ** min(delivery.deferrals, 16), BUSY_MAX_SECONDS)
        attempt = DeliveryAttempt(
            number=delivery.number,
            outcome=answer.outcome,
            started_at=started_at,
            duration_ms=round((time.perf_counter() - start) * 1_000),
            status_code=answer.status_code,
            error_code=answer.error,
            reply=answer.reply,
            retry_after_seconds=retry_after,
            body=body if delivery.body is None else None,
            webhook_id=sent.merged_id,
        )
        if self._observe is not None:
            self._observe(delivery, attempt)
        return attempt

    async def _deliver(self, delivery: DeliverCallbackInput, body: str) -> _Sent:
        try:
            url = self._policy.check_url(delivery.url)
        except UrlRefusedError:
            # A setting may have become stricter since the URL was accepted; waiting will not help.
            return _Sent(answer=Answer(outcome=DeliveryOutcome.GIVE_UP, error=DeliveryError.URL_REFUSED))
        endpoint = Endpoint(tenant=delivery.tenant, url=delivery.url, origin=f"{url.scheme}://{url.netloc.decode()}")
        settings = self._endpoints.endpoint(delivery.tenant, delivery.url) if self._endpoints else _PlainEndpoint()
        ready = _Delivery(
            endpoint=endpoint,
            url=url,
            settings=settings,
            task_id=delivery.event.task_id,
            webhook_id=delivery.webhook_id,
            body=body,
        )
        window = Window(
            seconds=min(settings.merge_window_ms / 1_000, MAX_MERGE_WINDOW_SECONDS),
            max_items=settings.merge_max_tasks,
            max_bytes=MAX_MERGED_BYTES - MERGED_FRAME_BYTES,
        )
        if window.seconds <= 0 or window.max_items <= 1 or not delivery.event.type.startswith("task."):
            return await self._send_alone(ready, self._enter(ready))
        refused = self._gate.refusal(endpoint)
        if refused is not None:
            return _Sent(answer=refused)
        return await self._merging.submit(endpoint, ready, len(body.encode()) + 1, window)

    async def _send_alone(self, delivery: _Delivery, permit: Permit | Refusal) -> _Sent:
        if isinstance(permit, Refusal):
            return _Sent(answer=permit)
        with permit:
            answer = await self._sender.send(
                delivery.url,
                delivery.webhook_id,
                delivery.body,
                self._secrets.callback_secrets(delivery.endpoint.tenant),
            )
            permit.alive = answer.alive
        return _Sent(answer=answer)

    async def _send_group(self, endpoint: Endpoint, group: list[_Delivery]) -> list[_Sent]:
        """Send what one merge window collected: one request, and one outcome for each task."""
        first = group[0]
        permit = await self._enter_patiently(first)
        if len(group) == 1 or isinstance(permit, Refusal):
            return [await self._send_alone(first, permit)] * len(group)
        webhook_id = merged_id([delivery.task_id for delivery in group])
        body = merged_body([delivery.body for delivery in group])
        with permit:
            secrets = self._secrets.callback_secrets(endpoint.tenant)
            answer = await self._sender.send(first.url, webhook_id, body, secrets)
            permit.alive = answer.alive
        return [_Sent(answer=answer, merged_id=webhook_id)] * len(group)

    def _enter(self, delivery: _Delivery) -> Permit | Refusal:
        return self._gate.enter(delivery.endpoint, delivery.settings.concurrency or self._concurrency)

    async def _enter_patiently(self, delivery: _Delivery) -> Permit | Refusal:
        """Wait one more window for a place: tasks that met once would hardly all meet again a second later."""
        patience = time.monotonic() + min(delivery.settings.merge_window_ms / 1_000, MAX_MERGE_WINDOW_SECONDS)
        while True:
            entry = self._enter(delivery)
            if isinstance(entry, Permit) or entry.retry_in is not None or time.monotonic() >= patience:
                return entry
            await asyncio.sleep(_PATIENCE_STEP)


@contextlib.asynccontextmanager
async def _heartbeat() -> AsyncIterator[None]:
    """Beat while an attempt takes longer than most, so that a lost worker is noticed and quick ones send nothing."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_INTERVAL)
            activity.heartbeat()

    beating = asyncio.create_task(beat(), name="callback heartbeat")
    try:
        yield
    finally:
        beating.cancel()
