"""Histories of a workflow over continue-as-new."""

from __future__ import annotations

from temporalio.client import Client


async def all_runs(client: Client, workflow_id: str, run_id: str | None) -> list[str]:
    """The histories of a run and of those that it continued as, oldest first, as JSON."""
    found = []
    while run_id:
        history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
        found.append(history.to_json())
        run_id = history.events[-1].workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    return found
