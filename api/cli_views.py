"""`reelgate list`, `queues`, `stats`, `workers` and `events`: looking at tasks and at who serves them.

Each command imports its own world when it runs; `cli` adds them to the command line.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import time
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from api.cli_output import out

if TYPE_CHECKING:
    from pydantic import BaseModel

    from api.cli_client import StreamedEvent

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
MAX_RECONNECTS: Final = 30
"""Tries in a row, a second apart, after an event stream was cut."""
_TIMES: Final = ["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z"]


class Status(StrEnum):
    """States on the command line."""

    CREATED = "CREATED"
    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELED = "CANCELED"


def list_tasks(
    *,
    status: Annotated[Status | None, typer.Option(case_sensitive=False)] = None,
    created_after: Annotated[
        datetime | None, typer.Option(formats=_TIMES, help="Inclusive, like 2026-01-31T12:00:00Z.")
    ] = None,
    created_before: Annotated[datetime | None, typer.Option(formats=_TIMES, help="Exclusive.")] = None,
    model: Annotated[str | None, typer.Option()] = None,
    batch_id: Annotated[str | None, typer.Option()] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Tasks on a page.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="From the page before.")] = None,
    as_json: AsJson = False,
) -> None:
    """List your tasks: open ones by newest start, then ended ones by newest end."""
    from rich.table import Column, Table

    from api.cli_tasks import gateway

    wanted = {
        "status": str(status) if status else None,
        "created_after": created_after.isoformat() if created_after else None,
        "created_before": created_before.isoformat() if created_before else None,
        "model": model,
        "batch_id": batch_id,
        "limit": str(limit),
        "cursor": cursor,
    }
    with gateway() as gate:
        found = gate.tasks({name: value for name, value in wanted.items() if value is not None})
    if as_json:
        _print_json(found)
        return
    task_id = Column("task", no_wrap=True, min_width=27)
    table = Table(task_id, "status", Column("created", no_wrap=True), "model", Column("prompt", no_wrap=True), box=None)
    for task in found.items:
        prompt = " ".join(task.parameters.prompt.split())
        table.add_row(task.task_id, task.status, f"{task.created_at:%m-%d %T}", task.model, _plain(prompt[:60]))
    out.print(table)
    if found.next_cursor is not None:
        out.print(f"more: --cursor {found.next_cursor}", markup=False)


def queues(as_json: AsJson = False) -> None:
    """Show what waits for GPUs, and how long it takes to drain."""
    from rich.table import Table

    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.queues()
    if as_json:
        _print_json(found)
        return
    table = Table("pool", "waiting", "oldest", "arriving", "taken", "drains in", "slots", box=None)
    for queue in found.items:
        table.add_row(
            queue.pool,
            str(queue.backlog),
            _seconds(queue.backlog_age_seconds),
            f"{queue.arrival_rate * 60:.1f}/min",
            f"{queue.completion_rate * 60:.1f}/min",
            _seconds(queue.drain_seconds),
            "?" if queue.live_slots is None else str(queue.live_slots),
        )
    out.print(table)


def stats(as_json: AsJson = False) -> None:
    """Count your tasks by state; an operator's key counts everybody's."""
    from rich.table import Table

    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.stats()
    if as_json:
        _print_json(found)
        return
    table = Table("state", "tasks", "p50", "p95", box=None)
    for state, count in found.counts.items():
        spent = found.durations.get(state)
        table.add_row(
            state,
            str(count),
            _seconds(spent.p50_seconds if spent else None),
            _seconds(spent.p95_seconds if spent else None),
        )
    out.print(table)
    out.print(f"times over {found.measured_tasks} ended tasks", style="dim")


def workers(as_json: AsJson = False) -> None:
    """List the workers and what they run; needs an operator's key."""
    from rich.table import Column, Table

    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.workers()
    if as_json:
        _print_json(found)
        return
    running = Column("tasks", no_wrap=True, min_width=27)
    # The pool is what one looks for; the name of a worker may break.
    queue = Column("queue", no_wrap=True, min_width=max((len(worker.task_queue) for worker in found.items), default=0))
    table = Table("worker", queue, "status", "used", "free", "heartbeat", running, box=None)
    for worker in found.items:
        table.add_row(
            _plain(worker.identity.partition(" health ")[0]),
            worker.task_queue,
            worker.status,
            str(worker.slots_used),
            str(worker.slots_free),
            f"{worker.last_heartbeat_at:%T}",
            "\n".join(worker.tasks),
        )
    out.print(table)


def events(
    task_id: str,
    last_event_id: Annotated[str | None, typer.Option(help="Go on behind this event.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per event.")] = False,
) -> None:
    """Watch a task until it ends. A stream that is cut is taken up again where it was."""
    import json

    from api.cli_client import GatewayUnreachableError
    from api.cli_tasks import gateway

    tries = 0
    with gateway() as gate:
        while True:
            try:
                for event in gate.events(task_id, last=last_event_id):
                    data = json.loads(event.data)
                    _print_event(event, data, as_json=as_json)
                    if data.get("is_terminal"):
                        return
                    last_event_id, tries = event.id, 0
            except GatewayUnreachableError:
                tries += 1
                if tries > MAX_RECONNECTS:
                    raise
                time.sleep(1)
            else:
                if gate.read(task_id).task.is_terminal:
                    return
                # The gateway was stopped, in order: another one goes on.
                time.sleep(1)


def _print_event(event: StreamedEvent, data: dict[str, Any], *, as_json: bool) -> None:
    import json

    if as_json:
        # One line each, whatever the width of the terminal.
        typer.echo(json.dumps({"id": event.id, "event": event.name, "data": data}))
        return
    progress, queue = data.get("progress"), data.get("queue")
    told = [
        data["status"],
        data.get("worker_id"),
        f"{progress['phase']} {progress['percent']:.0f} %" if progress else None,
        f"position {queue['position']}" if queue and queue["position"] is not None else None,
        data.get("error_code"),
        "(closed)" if data.get("is_terminal") else None,
    ]
    out.print(f"{event.id:>8}  {event.name:<8}  {' '.join(filter(None, told))}", markup=False)


def _print_json(document: BaseModel) -> None:
    out.print_json(document.model_dump_json())


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
