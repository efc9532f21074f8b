"""`reelgate submit`, `status`, `cancel`, `models`: tasks from a terminal."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from rich.table import Table

from api.cli_client import (
    Access,
    Gateway,
    GatewayRefusedError,
    GatewayUnreachableError,
    MissingKeyError,
)
from api.cli_follow import follow
from api.cli_output import EXIT_CONFIGURATION, EXIT_NO_CLIP, EXIT_REFUSED, EXIT_UNREACHABLE, CommandError, err, out
from api.schemas import Task
from workflows.states import TaskStatus
from workflows.tasks import CancelMode


@contextmanager
def explained() -> Iterator[None]:
    """Turn what the gateway's client raises into the error of a command.

    Raises:
        CommandError: instead.
    """
    try:
        yield
    except MissingKeyError as error:
        raise CommandError(str(error), EXIT_CONFIGURATION) from error
    except GatewayUnreachableError as error:
        raise CommandError(str(error), EXIT_UNREACHABLE) from error
    except GatewayRefusedError as error:
        failed = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise CommandError(str(error), EXIT_UNREACHABLE if failed else EXIT_REFUSED) from error


@contextmanager
def gateway() -> Iterator[Gateway]:
    """The gateway of the environment, its errors explained."""
    with explained(), Gateway(Access.find()) as found:
        yield found


def submit(
    fields: dict[str, object],
    *,
    image: Path | None,
    idempotency_key: str | None,
    wait: bool,
    as_json: bool,
    file: Path | None,
) -> int:
    """Submit a request and, with `wait`, follow it to its end and save the clip. Returns the exit code."""
    if image is not None:
        fields["image"] = image_field(image)
    with gateway() as gate:
        task, existed = gate.submit({k: v for k, v in fields.items() if v is not None}, idempotency_key=idempotency_key)
        if not as_json:
            err.print(f"task [bold]{task.task_id}[/bold] {'existed already' if existed else 'accepted'}: {task.status}")
            err.print(f"Web UI {task.links.web_ui}")
            for warning in task.warnings:
                err.print("note:", style="yellow", end=" ")
                err.print(warning.message, markup=False)
        if not wait:
            show_task(task, as_json=as_json)
            return 0
        task = follow(gate, task.task_id, quiet=as_json)
        saved = None
        if task.result_url is not None and task.status is TaskStatus.SUCCEEDED:
            saved = file or Path(f"{task.task_id}.mp4")
            gate.download(task.result_url, saved)
    show_task(task, as_json=as_json, saved=saved)
    return 0 if task.status is TaskStatus.SUCCEEDED else EXIT_NO_CLIP


def status(task_id: str, *, as_json: bool) -> int:
    """Show a task."""
    with gateway() as gate:
        show_task(gate.read(task_id).task, as_json=as_json)
    return 0


def cancel(task_id: str, mode: CancelMode, *, as_json: bool) -> int:
    """Cancel a task."""
    with gateway() as gate:
        show_task(gate.cancel(task_id, mode), as_json=as_json)
    return 0


def models(*, as_json: bool) -> int:
    """Show the catalogue."""
    with gateway() as gate:
        found = gate.models()
    if as_json:
        out.print_json(found.model_dump_json())
        return 0
    table = Table("model", "kind", "pool", "served", "slots", box=None)
    for model in found.items:
        serving = model.serving
        name = f"{model.name} (default)" if model.default else model.name
        slots = "-" if serving.slots is None else str(serving.slots)
        table.add_row(name, model.kind, serving.pool, serving.state, slots)
    out.print(table)
    return 0


def show_task(task: Task, *, as_json: bool, saved: Path | None = None) -> None:
    """Print a task."""
    if as_json:
        shown = task.model_dump(mode="json")
        if saved is not None:
            shown["saved"] = str(saved)
        out.print_json(data=shown)
        return
    rows = [
        ("task", task.task_id),
        ("status", f"{task.status}{'' if task.is_terminal else ' (open)'}"),
        ("error", f"{task.error_code}: {task.error_message}" if task.error_code else None),
        ("worker", task.worker_id),
        ("attempt", str(task.attempt) if task.attempt else None),
        ("seconds", ", ".join(f"{state} {seconds:.1f}" for state, seconds in task.durations.items()) or None),
        ("callback", str(task.callback_status) if task.callback_status else None),
        ("saved", str(saved) if saved else None),
        ("video", task.result_url),
        ("poster", task.poster_url),
        ("Web UI", task.links.web_ui),
    ]
    for name, value in rows:
        if value is not None:
            out.print(f"{name:>8}  ", style="dim", end="")
            out.print(value, markup=False)


def image_field(file: Path) -> str:
    """An image file as a request takes it.

    Raises:
        CommandError: it cannot be read.
    """
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    try:
        body = file.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", EXIT_CONFIGURATION) from error
    return f"data:{kind};base64,{base64.b64encode(body).decode('ascii')}"
