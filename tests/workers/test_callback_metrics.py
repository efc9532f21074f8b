"""What a callback worker tells of its attempts, of late deliveries and of breakers."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry
from temporalio.testing import ActivityEnvironment

from activities.endpoint_gate import BreakerRule, Endpoint, EndpointGate, Permit
from tests.activities.couriers import event
from workers.callback_metrics import CallbackMetrics, GateCollector
from workflows.naming import callback_id
from workflows.tasks import DeliverCallbackInput, DeliveryAttempt, DeliveryOutcome

ENDED_AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


class Observed:
    """Attempts of the task `task1`, each told inside an activity as the callback worker tells it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics = CallbackMetrics(self.registry)

    def attempt(
        self,
        outcome: DeliveryOutcome,
        *,
        error: str | None = None,
        number: int = 1,
        after: float = 0.5,
        workflow_id: str = callback_id("task1"),
        kind: str = "task.succeeded",
    ) -> None:
        """An attempt that began `after` seconds after the end of the task and took half a second."""
        delivery = DeliverCallbackInput(
            tenant="acme",
            url="https://receiver.example/",
            webhook_id="task1",
            event=event(timestamp=ENDED_AT, type=kind),
            number=number,
        )
        made = DeliveryAttempt(
            number=number,
            outcome=outcome,
            started_at=ENDED_AT + timedelta(seconds=after),
            duration_ms=500,
            error_code=error,
        )
        env = ActivityEnvironment()
        env.info = dataclasses.replace(ActivityEnvironment.default_info(), workflow_id=workflow_id)
        env.run(self._metrics.observe, delivery, made)

    def __call__(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def test_an_attempt_is_counted_by_outcome_and_error() -> None:
    observed = Observed()
    observed.attempt(DeliveryOutcome.RETRY, error="TIMEOUT")
    observed.attempt(DeliveryOutcome.DELIVERED, number=2)
    assert observed("reelgate_callback_attempts_total", outcome="retry", error="TIMEOUT") == 1
    assert observed("reelgate_callback_attempts_total", outcome="delivered", error="") == 1
    assert observed("reelgate_callback_attempt_seconds_sum", outcome="retry") == pytest.approx(0.5)


def test_the_delay_runs_from_the_end_of_the_task_to_the_end_of_the_attempt_that_delivered() -> None:
    observed = Observed()
    observed.attempt(DeliveryOutcome.RETRY, error="TIMEOUT", after=0.1)
    observed.attempt(DeliveryOutcome.DELIVERED, number=2, after=7)
    assert observed("reelgate_callback_delay_seconds_sum", attempts="later") == pytest.approx(7.5)
    assert observed("reelgate_callback_delay_seconds_count", attempts="first") == 0
    observed.attempt(DeliveryOutcome.DELIVERED, after=0.1)
    assert observed("reelgate_callback_delay_seconds_sum", attempts="first") == pytest.approx(0.6)


def test_a_clock_that_is_behind_makes_no_negative_delay() -> None:
    observed = Observed()
    observed.attempt(DeliveryOutcome.DELIVERED, after=-30)
    assert observed("reelgate_callback_delay_seconds_sum", attempts="first") == 0
    assert observed("reelgate_callback_delay_seconds_count", attempts="first") == 1


def test_a_deferred_attempt_has_no_length() -> None:
    observed = Observed()
    observed.attempt(DeliveryOutcome.DEFERRED, error="BREAKER_OPEN")
    assert observed("reelgate_callback_attempts_total", outcome="deferred", error="BREAKER_OPEN") == 1
    assert observed("reelgate_callback_attempt_seconds_count", outcome="deferred") == 0


@pytest.mark.parametrize(
    ("workflow_id", "kind"),
    [(callback_id("task1", 1), "task.succeeded"), (callback_id("task1"), "callback.test")],
    ids=["redelivery", "test"],
)
def test_a_redelivery_and_a_test_do_not_count_as_late(workflow_id: str, kind: str) -> None:
    observed = Observed()
    observed.attempt(DeliveryOutcome.DELIVERED, after=86_400, workflow_id=workflow_id, kind=kind)
    assert observed("reelgate_callback_attempts_total", outcome="delivered", error="") == 1
    assert observed("reelgate_callback_delay_seconds_count", attempts="first") == 0


class Clock:
    """A clock that is set."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_open_breakers_are_counted_and_timed_until_the_endpoint_takes_a_request_again() -> None:
    clock = Clock()
    gate = EndpointGate(clock=clock, breaker=BreakerRule(failures=1, open_seconds=30))
    registry = CollectorRegistry()
    registry.register(GateCollector(gate))
    endpoint = Endpoint(tenant="acme", url="https://receiver.example/a", origin="https://receiver.example")

    def request(*, alive: bool) -> None:
        permit = gate.enter(endpoint, 1)
        assert isinstance(permit, Permit)
        with permit:
            assert registry.get_sample_value("reelgate_callback_requests_in_flight") == 1
            permit.alive = alive

    def shown() -> tuple[float | None, float | None]:
        name = "reelgate_callback_breaker_open_seconds"
        return registry.get_sample_value("reelgate_callback_breakers_open"), registry.get_sample_value(name)

    assert shown() == (0, 0)
    request(alive=False)
    clock.now += 40
    assert shown() == (1, 40)
    request(alive=False)
    clock.now += 400
    assert shown() == (1, 440), "a failed probe does not start the time again"
    request(alive=True)
    assert shown() == (0, 0)
    assert registry.get_sample_value("reelgate_callback_requests_in_flight") == 0
