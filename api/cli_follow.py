"""Following a task from a terminal: over its event stream, and by polling when there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from pydantic import ValidationError
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from api.cli_client import Gateway, GatewayRefusedError, GatewayUnreachableError, Reading
from api.cli_output import err
from api.schemas import Task, TaskProgress, TaskQueue
from api.task_events import PROGRESS_EVENT, TaskProgressEvent, TaskStateEvent
from workflows.states import TaskStatus

Answer = TypeVar("Answer")

EAGER_SECONDS: Final = 30.0
"""A person who waits sees progress twice a second at first; then the gateway's own `Retry-After` is kept."""
EAGER_INTERVAL: Final = 0.5
PATIENCE_SECONDS: Final = 60.0
"""How long a wait goes on while the gateway does not answer, e.g. restarts."""


def follow(gate: Gateway, task_id: str, *, quiet: bool, on_change: Callable[[TaskStatus], None] | None = None) -> Task:
    """Follow a task until its run is closed, with a progress bar on stderr.

    Args:
        gate: the gateway.
        task_id: the task.
        quiet: no progress bar.
        on_change: called with each new state.
    """
    with progress_bar(quiet=quiet) as progress:
        screen = _Screen(progress, on_change)
        # Something on the way may cut streams, or speak another version; asking again and again still works.
        with suppress(GatewayUnreachableError, GatewayRefusedError, ValidationError):
            _listen(gate, task_id, screen)
        return _poll(gate, task_id, screen)


class _Screen:
    """The progress bar, and who wants to know of new states."""

    def __init__(self, progress: Progress, on_change: Callable[[TaskStatus], None] | None) -> None:
        self._progress = progress
        self._bar: TaskID = progress.add_task("", total=100)
        self._on_change = on_change
        self._seen: TaskStatus | None = None

    def show(self, status: TaskStatus, progress: TaskProgress | None, queue: TaskQueue | None) -> None:
        """Show where a task is."""
        self._progress.update(
            self._bar, completed=_percent(status, progress), description=_description(status, progress, queue)
        )
        if self._on_change is not None and status is not self._seen:
            self._on_change(status)
        self._seen = status


def _listen(gate: Gateway, task_id: str, screen: _Screen) -> None:
    for event in gate.events(task_id):
        if event.name == PROGRESS_EVENT:
            moved = TaskProgressEvent.model_validate_json(event.data)
            screen.show(moved.status, moved.progress, moved.queue)
        else:
            screen.show(TaskStateEvent.model_validate_json(event.data).status, None, None)


def _poll(gate: Gateway, task_id: str, screen: _Screen) -> Task:
    began = time.monotonic()
    last: Reading | None = None
    while True:
        last = patiently(partial(gate.read, task_id, last))
        task = last.task
        screen.show(task.status, task.progress, task.queue)
        if task.is_terminal:
            return task
        young = time.monotonic() - began < EAGER_SECONDS
        time.sleep(EAGER_INTERVAL if young else last.retry_after or EAGER_INTERVAL)


def patiently(read: Callable[[], Answer]) -> Answer:
    """Read once; a gateway that restarts meanwhile is waited for.

    Raises:
        GatewayUnreachableError, GatewayRefusedError: it did not come back, or refuses.
    """
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return read()
        except (GatewayUnreachableError, GatewayRefusedError) as error:
            refused = isinstance(error, GatewayRefusedError) and error.status not in (429, 500, 502, 503, 504)
            if refused or time.monotonic() > give_up_at:
                raise
        time.sleep(1)


def progress_bar(*, quiet: bool) -> Progress:
    """A progress bar on stderr, if that is a terminal."""
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


def _percent(status: TaskStatus, progress: TaskProgress | None) -> float:
    if status is TaskStatus.SUCCEEDED:
        return 100.0
    return progress.percent if progress else 0.0


def _description(status: TaskStatus, progress: TaskProgress | None, queue: TaskQueue | None) -> str:
    if progress is not None:
        steps = f" {progress.step}/{progress.total_steps}" if progress.total_steps else ""
        return f"{status} {progress.phase}{steps}"
    if queue is not None and queue.position is not None:
        start = f", about {queue.estimated_start_seconds:.0f} s" if queue.estimated_start_seconds is not None else ""
        return f"{status} position {queue.position}{start}"
    return str(status)
