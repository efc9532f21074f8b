"""One replayer for all stored histories: before its first replay it loads every workflow, which takes longer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.replay.record import HISTORIES
from workers.registry import WORKFLOWS


async def _stored() -> AsyncIterator[WorkflowHistory]:
    for file in sorted(HISTORIES.glob("*.json")):
        yield WorkflowHistory.from_json(file.stem, file.read_text())


async def replay_failures(**options: Any) -> dict[str, Exception | None]:  # noqa: ANN401 - handed on
    """Replay every stored history, each as a run of its own; by name, what kept it from being replayed.

    `options` are those of the replayer.
    """
    async with Replayer(workflows=WORKFLOWS, **options).workflow_replay_iterator(_stored()) as results:
        return {result.history.workflow_id: result.replay_failure async for result in results}
