"""What watchers of a task are sent, and the ids of it.

Ids are `<event id>.<n>`: the event of the run's history that made the state, and 0 for the state itself, else the
milliseconds since then. They mean the same in every API process, so a client resumes anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, Field
from sse_starlette.event import ServerSentEvent

from api.schemas import TaskProgress, TaskQueue, UtcTime
from workflows.states import TaskStatus
from workflows.tasks import CancelMode

LINE_END: Final = "\n"
STATE_EVENT: Final = "state"
PROGRESS_EVENT: Final = "progress"
_ID = re.compile(r"(\d{1,9})\.(\d{1,15})")


@dataclass(frozen=True, order=True)
class EventId:
    """Place in the events of a task. Ids of one run only grow."""

    state: int
    """Event id in the history, from 1."""
    tick: int = 0

    @classmethod
    def parse(cls, text: str | None) -> EventId | None:
        """The id in a `Last-Event-ID`; None for what cannot be one of ours."""
        match = _ID.fullmatch(text or "")
        return cls(int(match[1]), int(match[2])) if match else None

    def __str__(self) -> str:
        return f"{self.state}.{self.tick}"


BEGINNING: Final = EventId(0)
"""Before the first event."""


class TaskStateEvent(BaseModel):
    """Data of `event: state`: the task entered a state, or its run was closed."""

    task_id: str
    status: TaskStatus
    is_terminal: bool = Field(description="The run is closed: the last event of the stream.")
    at: UtcTime
    worker_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None


class TaskProgressEvent(BaseModel):
    """Data of `event: progress`: how far the task is within its state. Sent when something changed."""

    task_id: str
    status: TaskStatus
    cancel_requested: CancelMode | None
    attempt: int
    worker_id: str | None
    progress: TaskProgress | None
    queue: TaskQueue | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event, encoded once for all clients."""

    id: EventId
    frame: bytes


def encoded_event(name: str, event_id: EventId, data: BaseModel) -> Event:
    """The event with its frame."""
    encoded = ServerSentEvent(data.model_dump_json(), event=name, id=str(event_id), sep=LINE_END)
    return Event(id=event_id, frame=encoded.encode())
