"""The short form of the drill: what the runbook names reveals the symptom, and what it names mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drill.incidents import INCIDENTS, Incident, drill
from tests.drill.stack import Stack
from tests.receiver import Receiver
from tests.scale import soak_only

pytestmark = [pytest.mark.durability, pytest.mark.timeout(300)]


@soak_only
@pytest.mark.soak
async def test_symptoms_are_revealed_and_mended_as_the_runbook_says(tmp_path: Path) -> None:
    wrong: dict[str, str] = {}

    def report(incident: Incident, _seconds: float, trouble: str) -> None:
        wrong[incident.symptom] = trouble

    async with Receiver() as receiver:
        stack = await Stack.open(tmp_path, receiver)
        try:
            await drill(stack, quick=True, report=report)
        finally:
            stack.close()
    assert wrong == {incident.symptom: "" for incident in INCIDENTS if incident.quick}


def test_every_symptom_of_the_drill_is_in_the_runbook() -> None:
    runbook = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [incident.symptom for incident in INCIDENTS if incident.symptom not in runbook] == []
