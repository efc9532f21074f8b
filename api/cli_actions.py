"""`reelgate retry`, `delete`, `timeline` and `replay`: what one does with a task that did not go as it should.

Each command imports its own world when it runs; `cli` adds them to the command line.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli_output import leave, out

if TYPE_CHECKING:
    from api.timeline_schemas import TaskTimeline, TimelineAttempt

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def retry(task_id: str, as_json: AsJson = False) -> None:
    """Run an ended task again, with the same parameters."""
    from api.cli_tasks import gateway, show_task

    with gateway() as gate:
        task, existed = gate.retry(task_id)
    if not as_json:
        out.print("started already:" if existed else "started:", style="bold")
    show_task(task, as_json=as_json)


def delete(
    task_id: str, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether that is meant.")] = False
) -> None:
    """Delete a task for good: prompt, input image, clip and record."""
    from api.cli_tasks import gateway

    if not yes:
        typer.confirm(f"Delete {task_id} with its clip, for good?", abort=True)
    with gateway() as gate:
        gate.delete(task_id)
    out.print(f"deleted {task_id}", markup=False)


def timeline(task_id: str, as_json: AsJson = False) -> None:
    """Show the states and attempts of a task with their times."""
    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.timeline(task_id)
    if as_json:
        out.print_json(found.model_dump_json())
    else:
        _show(found)


def replay(task_id: str) -> None:
    """Replay the history of a task and of its callback against today's code. Exit code 1: it diverged.

    Reads Temporal directly: address, namespace and payload keys are the settings of the workers (REELGATE_*).
    """
    from api.cli_replay import replay_task
    from workers.settings import load_settings

    code = asyncio.run(replay_task(load_settings(), task_id))
    leave(code)


def _show(found: TaskTimeline) -> None:
    from rich.table import Table

    end = " (open)" if not found.is_terminal else ""
    out.print(f"{found.task_id}  {found.status}{end}  GPU {found.gpu_seconds:.1f} s", markup=False)
    states = Table("state", "entered", "seconds", box=None)
    for state in found.states:
        states.add_row(state.status, f"{state.entered_at:%F %T}", _number(state.duration_seconds))
    out.print(states)
    if not found.attempts:
        return
    attempts = Table("attempt", "state", "worker", "version", "waited", "ran", "GPU", "reason", box=None)
    for attempt in found.attempts:
        attempts.add_row(*_row(attempt))
    out.print()
    out.print(attempts)


def _row(attempt: TimelineAttempt) -> tuple[str, ...]:
    return (
        str(attempt.number),
        attempt.state,
        attempt.worker_id or "-",
        attempt.worker_version or "-",
        _number(attempt.queue_seconds),
        _number(attempt.duration_seconds),
        _number(attempt.gpu_seconds),
        attempt.reason or "",
    )


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"
