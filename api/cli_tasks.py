"""`reelgate submit`, `status`, `cancel`, `models`: tasks from a terminal."""

from __future__ import annotations

import base64
import mimetypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from api.cli_client import (
    Access,
    Gateway,
    GatewayRefusedError,
    GatewayUnreachableError,
    MissingKeyError,
    Reading,
)
from api.cli_output import EXIT_CONFIGURATION, EXIT_NO_CLIP, EXIT_REFUSED, EXIT_UNREACHABLE, CommandError, err, out
from api.schemas import Task
from workflows.states import TaskStatus
from workflows.tasks import CancelMode

EAGER_SECONDS: Final = 30.0
"""A person who waits sees progress twice a second at first; then the gateway's own `Retry-After` is kept."""
EAGER_INTERVAL: Final = 0.5
PATIENCE_SECONDS: Final = 60.0
"""How long a wait goes on while the gateway does not answer, e.g. restarts."""


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
        fields["image"] = _image_field(image)
    with gateway() as gate:
        task, existed = gate.submit({k: v for k, v in fields.items() if v is not None}, idempotency_key=idempotency_key)
        if not as_json:
            err.print(f"task [bold]{task.task_id}[/bold] {'existed already' if existed else 'accepted'}: {task.status}")
            err.print(f"Web UI {task.links.web_ui}")
        if not wait:
            _show(task, as_json=as_json)
            return 0
        task = follow(gate, task.task_id, quiet=as_json)
        saved = None
        if task.result_url is not None and task.status is TaskStatus.SUCCEEDED:
            saved = file or Path(f"{task.task_id}.mp4")
            gate.download(task.result_url, saved)
    _show(task, as_json=as_json, saved=saved)
    return 0 if task.status is TaskStatus.SUCCEEDED else EXIT_NO_CLIP


def status(task_id: str, *, as_json: bool) -> int:
    """Show a task."""
    with gateway() as gate:
        _show(gate.read(task_id).task, as_json=as_json)
    return 0


def cancel(task_id: str, mode: CancelMode, *, as_json: bool) -> int:
    """Cancel a task."""
    with gateway() as gate:
        _show(gate.cancel(task_id, mode), as_json=as_json)
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


def follow(gate: Gateway, task_id: str, *, quiet: bool, on_change: Callable[[Task], None] | None = None) -> Task:
    """Poll a task until its run is closed, with a progress bar on stderr.

    Args:
        gate: the gateway.
        task_id: the task.
        quiet: no progress bar.
        on_change: called with the task whenever its state has changed.
    """
    began = time.monotonic()
    seen: TaskStatus | None = None
    last: Reading | None = None
    with _progress(quiet=quiet) as progress:
        bar = progress.add_task("", total=100)
        while True:
            last = _patiently(gate, task_id, last)
            task = last.task
            progress.update(bar, completed=_percent(task), description=_description(task))
            if on_change is not None and task.status is not seen:
                on_change(task)
            seen = task.status
            if task.is_terminal:
                return task
            young = time.monotonic() - began < EAGER_SECONDS
            time.sleep(EAGER_INTERVAL if young else last.retry_after or EAGER_INTERVAL)


def _patiently(gate: Gateway, task_id: str, last: Reading | None) -> Reading:
    """Read a task; a gateway that restarts meanwhile is waited for."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return gate.read(task_id, last)
        except (GatewayUnreachableError, GatewayRefusedError) as error:
            refused = isinstance(error, GatewayRefusedError) and error.status not in (429, 500, 502, 503, 504)
            if refused or time.monotonic() > give_up_at:
                raise
        time.sleep(1)


def _progress(*, quiet: bool) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=quiet or not err.is_terminal,
    )


def _percent(task: Task) -> float:
    if task.status is TaskStatus.SUCCEEDED:
        return 100.0
    return task.progress.percent if task.progress else 0.0


def _description(task: Task) -> str:
    if task.progress is not None:
        steps = f" {task.progress.step}/{task.progress.total_steps}" if task.progress.total_steps else ""
        return f"{task.status} {task.progress.phase}{steps}"
    if task.queue is not None and task.queue.position is not None:
        return f"{task.status} position {task.queue.position}"
    return str(task.status)


def _show(task: Task, *, as_json: bool, saved: Path | None = None) -> None:
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


def _image_field(file: Path) -> str:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    try:
        body = file.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", EXIT_CONFIGURATION) from error
    return f"data:{kind};base64,{base64.b64encode(body).decode('ascii')}"
