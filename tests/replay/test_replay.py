"""Stored histories of every branch replay against today's workflow code."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from tests.replay.deliveries import LONG
from tests.replay.record import BRANCHES, HISTORIES, OTHERS
from tests.replay.replaying import replay_failures
from workers.ended_runs import EndedRuns
from workers.task_metrics import TaskMetrics
from workers.tracing import Tracing

NAMES = [file.stem for file in sorted(HISTORIES.glob("*.json"))]


async def test_every_stored_history_replays() -> None:
    assert await replay_failures() == dict.fromkeys(NAMES)


async def test_every_stored_history_replays_with_metrics_and_traces_on() -> None:
    tracing = Tracing(InMemorySpanExporter(), process="test", version="1")
    metrics = EndedRuns(task=TaskMetrics(CollectorRegistry()).note)
    assert await replay_failures(interceptors=[tracing.interceptor, metrics]) == dict.fromkeys(NAMES)


def test_every_branch_has_a_stored_history() -> None:
    assert {f"generation-{name}" for name in BRANCHES} <= set(NAMES)
    for kind, (branches, _) in OTHERS.items():
        assert {f"{kind}-{name}" for name in branches} <= set(NAMES)
    assert {f"callback-{name}" for name in LONG} <= set(NAMES)
