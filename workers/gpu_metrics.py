"""Series of a GPU worker: its inference processes, its slots, and the pace of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from activities.inference.health import DeviceState
from activities.inference.pool import PoolHealth

STEP_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
"""Seconds; the limit of a step is 60 by default."""

_DEVICE: Final = ["device"]


class StepTimes:
    """Hears of every denoising step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = Histogram(
            "reelgate_step_seconds", "Time of one denoising step.", ["model"], buckets=STEP_BUCKETS, registry=registry
        )

    def observe(self, model: str, seconds: float) -> None:
        """Count a step."""
        self._steps.labels(model).observe(seconds)


class PoolCollector(Collector):
    """What the pool's health says when it is asked."""

    def __init__(self, health: Callable[[], PoolHealth]) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        """The families."""
        health = self._health()
        state = GaugeMetricFamily(
            "reelgate_device_state", "1 for the state of a device's inference process.", labels=["device", "state"]
        )
        restarts = CounterMetricFamily(
            "reelgate_device_restarts", "Restarts of a device's inference process.", labels=_DEVICE
        )
        busy = CounterMetricFamily(
            "reelgate_device_busy_seconds", "Time in which a device worked on attempts that ended.", labels=_DEVICE
        )
        attempts = CounterMetricFamily("reelgate_device_attempts", "Attempts that ended on a device.", labels=_DEVICE)
        for device in health.devices:
            for each in DeviceState:
                state.add_metric([device.device, each], float(device.state is each))
            restarts.add_metric([device.device], device.restarts)
            busy.add_metric([device.device], device.busy_seconds)
            attempts.add_metric([device.device], device.tasks)
        yield from (state, restarts, busy, attempts)
        yield GaugeMetricFamily("reelgate_worker_slots", "Most tasks in PROCESSING on this worker.", value=health.slots)
        yield GaugeMetricFamily("reelgate_worker_slots_used", "Slots reserved or in use.", value=health.permits)
