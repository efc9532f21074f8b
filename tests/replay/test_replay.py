"""Stored histories of every branch replay against today's workflow code."""

from __future__ import annotations

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.replay import batches
from tests.replay.record import BRANCHES, HISTORIES
from workers.registry import WORKFLOWS

FILES = sorted(HISTORIES.glob("*.json"))
HISTORY_OF = {file.stem: file.read_text() for file in FILES}


@pytest.mark.parametrize("name", HISTORY_OF)
async def test_a_stored_history_replays(name: str) -> None:
    history = WorkflowHistory.from_json(name, HISTORY_OF[name])
    await Replayer(workflows=WORKFLOWS).replay_workflow(history)


def test_every_branch_has_a_stored_history() -> None:
    assert {f"generation-{name}" for name in BRANCHES} <= set(HISTORY_OF)
    assert {f"batch-{name}" for name in batches.BRANCHES} <= set(HISTORY_OF)
