"""Wire shape of a task's timeline."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from api.schemas import UtcTime
from workflows.states import TaskStatus

AttemptState = Literal["queued", "running", "published", "ended"]


class TimelineState(BaseModel):
    """A stretch of time in one state."""

    status: TaskStatus
    entered_at: UtcTime
    left_at: UtcTime | None = Field(description="null: the task is in this state.")
    duration_seconds: float | None = Field(description="So far, in the present state; null for the final one.")


class TimelineAttempt(BaseModel):
    """One attempt, from entering the queue of its pool."""

    number: int = Field(description="A round that no worker took keeps its number for the next one.")
    state: AttemptState = Field(description="`ended`: without a clip of its own, for `reason`.")
    worker_id: str | None
    worker_version: str | None
    queued_at: UtcTime
    started_at: UtcTime | None
    ended_at: UtcTime | None
    queue_seconds: float = Field(description="Waiting for a worker.")
    duration_seconds: float | None = Field(description="On a worker, so far while it runs; null: none took it.")
    gpu_seconds: float
    reason: str | None = Field(description="Failure code that the attempt ended with.")
    message: str | None


class TaskTimeline(BaseModel):
    """What a task went through."""

    task_id: str
    status: TaskStatus
    is_terminal: bool
    created_at: UtcTime
    gpu_seconds: float
    states: list[TimelineState]
    attempts: list[TimelineAttempt]
