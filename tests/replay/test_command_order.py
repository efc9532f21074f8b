"""A change of a workflow's command order does not pass unnoticed, whether the histories were recorded again or not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

import workflows
from tests.replay import command_order
from tests.replay.command_order import CHANGELOG, FILE, commands, digests, written
from tests.replay.record import HISTORIES
from workers.registry import WORKFLOWS

ENTRY = re.compile(r"^- `(?P<kind>\w+)` `(?P<digest>[0-9a-f]+)`: (?P<why>.+)$", re.MULTILINE)
WITHOUT_GATE = ("first release", "more histories")
"""Reasons for another digest that change no command of a run in progress."""
ORDER = "python -m tests.replay.command_order"


def entries() -> Mapping[str, list[tuple[str, str]]]:
    """Digests and reasons of the CHANGELOG by workflow, the newest first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for match in ENTRY.finditer(CHANGELOG.read_text()):
        found.setdefault(match["kind"], []).append((match["digest"], match["why"]))
    return found


def gates() -> set[str]:
    """Ids of the gates in the workflow code."""
    sources = (file.read_text() for file in Path(workflows.__file__).parent.glob("*.py"))
    return {found for text in sources for found in re.findall(r"workflow\.patched\(\s*[\"']([^\"']+)", text)}


def test_the_command_order_is_written_down() -> None:
    assert FILE.read_text() == written(), f"the stored histories have changed: {ORDER}"


def test_the_changelog_has_the_newest_command_order_of_every_workflow_first() -> None:
    newest = {kind: found[0][0] for kind, found in entries().items()}
    assert newest == digests(), f"add a line above the others to the CHANGELOG, with its reason; {ORDER}"


def test_every_command_order_in_the_changelog_has_a_gate_or_needs_none() -> None:
    for kind, found in entries().items():
        for _, why in found:
            gate = re.match(r"gate `([^`]+)`", why)
            assert why.startswith(WITHOUT_GATE) or (gate is not None and gate[1] in gates()), f"{kind}: {why}"


def test_every_workflow_has_a_command_order() -> None:
    names = {getattr(kind, "__temporal_workflow_definition").name for kind in WORKFLOWS}
    assert set(digests()) == names


def test_a_history_recorded_again_after_a_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in HISTORIES.glob("retention-*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(command_order, "HISTORIES", tmp_path)
    before = digests()
    changed = tmp_path / "retention-swept.json"
    changed.write_text(changed.read_text().replace('"remove_expired"', '"remove_old"'))
    assert digests() != before
    assert digests().keys() == before.keys() == {"RetentionWorkflow"}


@pytest.mark.parametrize("dropped", ["TIMER_STARTED", "WORKFLOW_PROPERTIES_MODIFIED", "ACTIVITY_TASK_SCHEDULED"])
async def test_code_that_issues_another_command_than_a_history_has_fails_its_replay(dropped: str) -> None:
    text = (HISTORIES / "generation-succeeded.json").read_text()
    history = json.loads(text)
    event = next(e for e in history["events"] if e["eventType"] == f"EVENT_TYPE_{dropped}")
    # Seen from the history, code that has lost a command is code with one too many.
    signal = {
        "eventType": "EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED",
        "workflowExecutionSignaledEventAttributes": {"signalName": "unknown"},
    }
    kept = {name: event[name] for name in ("eventId", "eventTime", "taskId") if name in event}
    history["events"][history["events"].index(event)] = {**kept, **signal}
    changed = json.dumps(history)
    assert commands(changed) != commands(text)
    with pytest.raises(Exception, match="TMPRL1100"):
        await Replayer(workflows=WORKFLOWS).replay_workflow(WorkflowHistory.from_json("changed", changed))
