"""Series of a callback worker: callbacks that ended, attempts, how late deliveries were, and breakers that are open."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from temporalio import activity

from activities.endpoint_gate import EndpointGate
from workflows.naming import callback_id
from workflows.tasks import CallbackRecord, CallbackStatus, DeliverCallbackInput, DeliveryAttempt, DeliveryOutcome

ATTEMPT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
DELAY_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 21_600, 86_400)
"""Seconds; with its retries a callback has 72 hours."""

_TERMINAL_EVENTS: Final = ("task.", "batch.")


class CallbackMetrics:
    """Hears of every attempt and of every end: `observe` is the hook of `CallbackDelivery`, `note` of `EndedRuns`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "reelgate_callback_attempts",
            "Delivery attempts by outcome and error code; a deferred one was not sent.",
            ["outcome", "error"],
            registry=registry,
        )
        self._lengths = Histogram(
            "reelgate_callback_attempt_seconds",
            "Length of a delivery attempt.",
            ["outcome"],
            buckets=ATTEMPT_BUCKETS,
            registry=registry,
        )
        self._delays = Histogram(
            "reelgate_callback_delay_seconds",
            "From the terminal state to the delivery, by whether the first attempt delivered.",
            ["attempts"],
            buckets=DELAY_BUCKETS,
            registry=registry,
        )
        self._ended = Counter(
            "reelgate_callbacks_ended", "Callbacks that were delivered or given up.", ["status"], registry=registry
        )
        # The first failure is an increase only if there was a zero before it.
        for status in (CallbackStatus.SUCCEEDED, CallbackStatus.FAILED):
            self._ended.labels(status)
        self._attempts.labels(DeliveryOutcome.DELIVERED, "")
        for attempts in ("first", "later"):
            self._delays.labels(attempts)

    def note(self, record: CallbackRecord) -> None:
        """Count a callback that ended."""
        self._ended.labels(record.status).inc()

    def observe(self, delivery: DeliverCallbackInput, attempt: DeliveryAttempt) -> None:
        """Count an attempt. Called inside the activity that made it."""
        self._attempts.labels(attempt.outcome, attempt.error_code or "").inc()
        if attempt.outcome is DeliveryOutcome.DEFERRED:
            return
        length = attempt.duration_ms / 1_000
        self._lengths.labels(attempt.outcome).observe(length)
        if attempt.outcome is DeliveryOutcome.DELIVERED and _is_first_delivery(delivery):
            delivered_at = attempt.started_at + timedelta(seconds=length)
            delay = (delivered_at - delivery.event.timestamp).total_seconds()
            # The clocks of two machines may differ.
            self._delays.labels("first" if attempt.number == 1 else "later").observe(max(0.0, delay))


def _is_first_delivery(delivery: DeliverCallbackInput) -> bool:
    """Whether it is a terminal event on its own way: a redelivery or a test says nothing of lateness."""
    return (
        delivery.event.type.startswith(_TERMINAL_EVENTS)
        and activity.in_activity()
        and activity.info().workflow_id == callback_id(delivery.webhook_id)
    )


class GateCollector(Collector):
    """What the gate in front of the endpoints knows when it is asked."""

    def __init__(self, gate: EndpointGate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The families."""
        gate = self._gate
        yield GaugeMetricFamily(
            "reelgate_callback_breakers_open", "Endpoints whose breaker is open.", value=gate.open_breakers
        )
        yield GaugeMetricFamily(
            "reelgate_callback_breaker_open_seconds",
            "How long the longest of the open breakers has been open; 0 without one.",
            value=gate.longest_open_seconds,
        )
        yield GaugeMetricFamily("reelgate_callback_requests_in_flight", "Requests under way.", value=gate.in_flight)
