"""The API's own series, and the page that Prometheus reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api.problems import ProblemCode
from api.queue_report import QueueReading, QueueReport
from api.readiness import ReadinessProbe
from workers.metrics import process_registry
from workers.settings import Settings

REQUEST_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds; `Prefer: wait` holds an answer for a minute."""
ADMITTED: Final = "ADMITTED"

_REFUSALS: Final = (
    ProblemCode.TOO_MANY_PENDING_TASKS,
    ProblemCode.RATE_LIMITED,
    ProblemCode.QUOTA_EXHAUSTED,
    ProblemCode.QUEUE_FULL,
    ProblemCode.ADMISSION_UNAVAILABLE,
    ProblemCode.TEMPORAL_UNAVAILABLE,
)


class ApiMetrics:
    """Series of one API process."""

    def __init__(self, settings: Settings) -> None:
        self.registry: CollectorRegistry = process_registry("api", settings)
        self._requests = Counter(
            "reelgate_http_requests",
            "Requests by route template and status class.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "reelgate_http_request_seconds",
            "From a request to the start of its answer.",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._guard = Counter(
            "reelgate_request_guard_refusals", "Requests that the rate guard refused.", ["by"], registry=self.registry
        )
        self._admissions = Counter(
            "reelgate_admissions", "New tasks and batches by what they were told.", ["outcome"], registry=self.registry
        )
        for by in ("key", "address"):
            self._guard.labels(by)
        for outcome in (ADMITTED, *_REFUSALS):
            self._admissions.labels(outcome)
        # Looked up at each request: the library's own look-up takes as long as everything else here.
        self._request_counts: dict[tuple[str, str, int], Counter] = {}
        self._request_times: dict[str, Histogram] = {}

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request.

        Args:
            method: an HTTP method, or `OTHER`.
            route: template of the path.
            status: status code.
            seconds: until the answer began.
        """
        key = (method, route, status // 100)
        count = self._request_counts.get(key)
        if count is None:
            count = self._request_counts[key] = self._requests.labels(method, route, f"{status // 100}xx")
        count.inc()
        times = self._request_times.get(route)
        if times is None:
            times = self._request_times[route] = self._seconds.labels(route)
        times.observe(seconds)

    def count_guard_refusal(self, by: str) -> None:
        """Count a request that the rate guard refused, per `key` or `address`."""
        self._guard.labels(by).inc()

    def count_admission(self, outcome: str) -> None:
        """Count a new task or batch: `ADMITTED` or the code of the refusal."""
        self._admissions.labels(outcome).inc()


class MetricsPage:
    """The page: what was counted here, and what Temporal says at this moment.

    Args:
        registry: of the process; read by this page alone.
        queues: what waits.
        readiness: what answers.
    """

    def __init__(self, registry: CollectorRegistry, *, queues: QueueReport, readiness: ReadinessProbe) -> None:
        self._registry = registry
        self._queues = queues
        self._readiness = readiness
        self._seen = _Seen()
        registry.register(self._seen)
        self._lock = asyncio.Lock()

    async def text(self) -> bytes:
        """The page in the Prometheus text format; never raises for what does not answer."""
        async with self._lock:
            queues, readiness = await asyncio.gather(self._queues.read(), self._readiness.readiness())
            self._seen.queues = queues
            self._seen.up = {"temporal": readiness.temporal == "ok", "store": readiness.store == "ok"}
            return generate_latest(self._registry)


class _Seen(Collector):
    """What was asked for the page that is being written."""

    def __init__(self) -> None:
        self.queues: Sequence[QueueReading] = ()
        self.up: dict[str, bool] = {}

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = GaugeMetricFamily("reelgate_dependency_up", "1 while it answers.", labels=["dependency"])
        for name, answers in self.up.items():
            up.add_metric([name], float(answers))
        yield up
        for field, help_text in _QUEUE_FIELDS.items():
            family = GaugeMetricFamily(f"reelgate_queue_{field}", help_text, labels=["queue"])
            for queue in self.queues:
                value: float | None = getattr(queue, field)
                if value is not None:
                    family.add_metric([queue.queue], value)
            yield family


_QUEUE_FIELDS: Final = {
    "backlog": "Entries of a task queue that no worker has taken.",
    "backlog_age_seconds": "How long the oldest of them has waited.",
    "arrival_rate": "Entries that come, per second.",
    "completion_rate": "Entries that workers take, per second.",
    "drain_seconds": "Until the last one that waits now is taken.",
    "live_slots": "Tasks that the live workers can have in PROCESSING.",
    "workers": "Live workers.",
}
"""Fields of a `QueueReading`, which are the names of the series as well."""
