"""Stored histories of every branch replay against today's workflow code."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.replay.deliveries import LONG
from tests.replay.record import BRANCHES, HISTORIES, OTHERS
from workers.ended_runs import EndedRuns
from workers.registry import WORKFLOWS
from workers.task_metrics import TaskMetrics
from workers.tracing import Tracing

FILES = sorted(HISTORIES.glob("*.json"))
HISTORY_OF = {file.stem: file.read_text() for file in FILES}


@pytest.mark.parametrize("name", HISTORY_OF)
async def test_a_stored_history_replays(name: str) -> None:
    history = WorkflowHistory.from_json(name, HISTORY_OF[name])
    await Replayer(workflows=WORKFLOWS).replay_workflow(history)


@pytest.mark.parametrize("name", HISTORY_OF)
async def test_a_stored_history_replays_with_metrics_and_traces_on(name: str) -> None:
    tracing = Tracing(InMemorySpanExporter(), process="test", version="1")
    metrics = EndedRuns(task=TaskMetrics(CollectorRegistry()).note)
    replayer = Replayer(workflows=WORKFLOWS, interceptors=[tracing.interceptor, metrics])
    await replayer.replay_workflow(WorkflowHistory.from_json(name, HISTORY_OF[name]))


def test_every_branch_has_a_stored_history() -> None:
    assert {f"generation-{name}" for name in BRANCHES} <= set(HISTORY_OF)
    for kind, (branches, _) in OTHERS.items():
        assert {f"{kind}-{name}" for name in branches} <= set(HISTORY_OF)
    assert {f"callback-{name}" for name in LONG} <= set(HISTORY_OF)
