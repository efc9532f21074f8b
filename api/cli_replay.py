"""Replay of a task's histories, as Temporal has them now, against the workflow code that is installed here."""

from __future__ import annotations

from collections.abc import AsyncIterator

from temporalio.client import Client, WorkflowHistory
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Replayer

from api.cli_output import EXIT_REFUSED, CommandError, err, out
from workers.connection import connect
from workers.registry import WORKFLOWS
from workers.settings import Settings
from workflows import naming

EXIT_DIVERGED = 1


async def replay_task(settings: Settings, task_id: str) -> int:
    """Replay the job of a task and its deliveries. Returns the exit code: 0, or 1 when one of them diverged.

    Raises:
        ConfigurationError: Temporal is not there, or a setting is wrong.
        CommandError: it has no such task.
    """
    client = await connect(settings, identity="reelgate replay")
    return await replay_histories(client, task_id)


async def replay_histories(client: Client, task_id: str) -> int:
    """The same over a client that is there already."""
    replayer = Replayer(workflows=WORKFLOWS, data_converter=client.data_converter)
    code = 0
    async for history in _histories(client, task_id):
        result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
        if result.replay_failure is None:
            out.print(f"{history.workflow_id}: {len(history.events)} events replay", markup=False)
        else:
            code = EXIT_DIVERGED
            err.print(f"{history.workflow_id}: diverged", style="bold red", markup=False)
            err.print(str(result.replay_failure), markup=False)
    return code


async def _histories(client: Client, task_id: str) -> AsyncIterator[WorkflowHistory]:
    job = await _history(client, task_id)
    if job is None:
        raise CommandError(f"Temporal has no task {task_id} in namespace {client.namespace}", EXIT_REFUSED)
    yield job
    number = 0
    while (delivery := await _history(client, naming.callback_id(task_id, number))) is not None:
        yield delivery
        number += 1


async def _history(client: Client, workflow_id: str) -> WorkflowHistory | None:
    try:
        return await client.get_workflow_handle(workflow_id).fetch_history()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise
