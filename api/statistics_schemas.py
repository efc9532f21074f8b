"""Wire shapes of `/queues`, `/stats` and `/workers`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from api.schemas import UtcTime
from workflows.states import TaskStatus


class QueueState(BaseModel):
    """What waits for a GPU pool. Counts and rates are Temporal's approximations."""

    pool: str
    backlog: int = Field(description="Tasks that no worker has taken.")
    backlog_age_seconds: float = Field(description="How long the oldest of them has waited.")
    arrival_rate: float = Field(description="Tasks per second, over about half a minute.")
    completion_rate: float = Field(description="Tasks per second that workers took, over about half a minute.")
    drain_seconds: float | None = Field(
        description="Until the last one that waits now is taken; null without a worker or a finished task to go by."
    )
    live_slots: int | None = Field(description="Tasks the live workers take at a time; null: unknown.")


class QueueList(BaseModel):
    """All GPU pools of the catalogue."""

    items: list[QueueState]


class StateDuration(BaseModel):
    """How long tasks were in a state."""

    tasks: int = Field(description="How many were measured: those that were in the state at all.")
    p50_seconds: float
    p95_seconds: float


class Stats(BaseModel):
    """Counts per state, and how the time in each is distributed."""

    scope: Literal["own", "all"] = Field(description="`all` for a key of scope operator that names no end user.")
    counts: dict[TaskStatus, int] = Field(description="Tasks in each state; ended ones as long as they are kept.")
    counted_at: UtcTime
    durations: dict[TaskStatus, StateDuration] = Field(
        description="Over the newest ended tasks; a state that none of them was in is absent."
    )
    measured_tasks: int = Field(description="Ended tasks that the durations were taken from.")
    measured_at: UtcTime


class WorkerState(BaseModel):
    """One worker process, as it reports itself."""

    identity: str
    kind: Literal["gpu", "callback", "control", "other"]
    task_queue: str
    status: Literal["running", "shutting_down", "silent"] = Field(
        description="`silent`: no heartbeat for three intervals; it is gone, or cut off."
    )
    slots_used: int = Field(description="Activities that it runs; on a control worker, also workflow tasks.")
    slots_free: int
    tasks: list[str] = Field(description="Tasks whose attempt runs on it; GPU workers only.")
    version: str | None = Field(description="Build of its Worker Deployment; null when it runs unversioned.")
    started_at: UtcTime
    last_heartbeat_at: UtcTime


class WorkerList(BaseModel):
    """The workers that Temporal knows, those that went silent a moment ago among them."""

    items: list[WorkerState]
