"""Wire shapes of `/redrive`: ended tasks that an operator runs again, page by page."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from api.callback_schemas import AskedTime
from workflows.failures import FailureCode
from workflows.states import TaskStatus

MAX_PAGE = 50
"""Tasks of one page: a redrive that goes wrong is seen after so many."""

AskedCode = Annotated[FailureCode, Field(strict=False)]


class Redrive(BaseModel):
    """Which dead letters to run again: tasks that ended without a clip and that nothing was started after."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    query: Annotated[str, Field(max_length=2_000)] = Field(
        default="",
        description="Temporal visibility query that narrows them down, e.g. `ErrorCode = 'STORAGE_UNAVAILABLE'`.",
    )
    since: AskedTime | None = Field(default=None, description="Ended from then on.")
    until: AskedTime | None = Field(default=None, description="And before then.")
    also: Annotated[list[AskedCode], Field(max_length=len(FailureCode))] = Field(
        default_factory=list,
        description="Error codes to run again although the same attempt would fail again, once their cause was "
        "mended: OUT_OF_MEMORY after the move to larger GPUs.",
    )
    again: bool = Field(default=False, description="Also those that a redrive started.")
    dry_run: bool = Field(default=True, description="Only say what would be done.")
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = MAX_PAGE
    cursor: Annotated[str, Field(min_length=1, max_length=2_000)] | None = None

    @field_validator("also")
    @classmethod
    def _not_canceled(cls, value: list[FailureCode]) -> list[FailureCode]:
        if FailureCode.CANCELED in value:
            # Whoever canceled it does not want it.
            raise PydanticCustomError("canceled", "must not name CANCELED: its owner can retry such a task")
        return value

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.since is not None and self.until is not None and self.until <= self.since:
            message = "must be later than `since`"
            raise PydanticCustomError("after_since", "{message}", {"field": "until", "message": message})
        return self


class SkipReason(StrEnum):
    """Why a task is not run again."""

    GONE = "GONE"
    """Deleted, or older than the retention."""
    ALIVE = "ALIVE"
    """It runs: an operator reset it."""
    SUCCEEDED = "SUCCEEDED"
    RETRIED = "RETRIED"
    """A later task of its chain exists; `new_task_id` is the newest."""
    REDRIVEN = "REDRIVEN"
    """A redrive started it, and it failed again; `again` includes it."""
    NOT_RETRYABLE = "NOT_RETRYABLE"
    """The same attempt would end in the same way; `also` includes its error code."""
    MODEL_GONE = "MODEL_GONE"
    """The model is no longer offered."""


class RedriveItem(BaseModel):
    """One task and what is done about it."""

    task_id: str
    status: TaskStatus | None = Field(description="As it reads now; null: gone.")
    error_code: FailureCode | None
    action: Literal["start", "skip"]
    reason: SkipReason | None = Field(description="Why it is skipped.")
    new_task_id: str | None = Field(description="The task that follows it: the one that is started, or that exists.")


class RedriveCounts(BaseModel):
    """Statistics of one page."""

    started: int = Field(description="In a dry run: that would be started.")
    skipped: dict[SkipReason, int]


class RedriveStop(BaseModel):
    """Why a page was not done to its end."""

    code: Literal["QUEUE_FULL", "NO_WORKER"]
    detail: str
    retry_after_seconds: int


class RedrivePage(BaseModel):
    """One bounded part of a redrive; go on with `next_cursor` until it is null."""

    dry_run: bool
    items: list[RedriveItem]
    counts: RedriveCounts
    matching: int = Field(description="Tasks that match in the index, those that will be skipped among them.")
    stopped: RedriveStop | None = Field(
        description="Not null: the rest of this page was left; send the same request again after `retry_after_seconds`."
    )
    next_cursor: str | None = Field(description="Null at the end, and when the page was stopped.")
