"""Wire shapes of batches."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from api.problems import FieldError
from api.schemas import Submit, Url, UtcTime
from workflows.batches import BatchStatus
from workflows.states import TaskStatus
from workflows.tasks import CallbackStatus, CancelMode

MAX_ITEMS: Final = 1_000


class OnInvalid(StrEnum):
    """What happens to a batch with items that break rules."""

    REJECT_ALL = "reject_all"
    SKIP = "skip"


PostedItem = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "description": "A request as `POST /tasks` takes it; what is not one breaks rules.",
            "anyOf": [{"$ref": f"#/components/schemas/{Submit.__name__}"}, {"type": "object"}],
        }
    ),
]
"""An item as posted. Each is checked by itself, so that one that breaks a rule can be skipped."""


class SubmitBatch(BaseModel):
    """A request for many clips, each of which becomes a task."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    items: Annotated[list[PostedItem], Field(min_length=1, max_length=MAX_ITEMS)]
    callback_url: Url | None = Field(default=None, description="Gets one `batch.completed` when every item has ended.")
    on_invalid: Annotated[OnInvalid, Field(strict=False)] = Field(
        default=OnInvalid.REJECT_ALL, description="`skip` leaves items that break rules out and says which ones."
    )
    deadline_seconds: Annotated[float, Field(ge=1, le=604_800, allow_inf_nan=False)] | None = Field(
        default=None, description="Shortens the deadline of the whole batch; the rest is canceled then."
    )


class ItemLinks(BaseModel):
    """Where more of an item is to be found."""

    self: str


class BatchItem(BaseModel):
    """An item of a batch."""

    index: int = Field(description="Position in the batch as posted.")
    status: TaskStatus | None = Field(description="null: it broke rules and was skipped.")
    task_id: str | None = Field(description="null: it was never started.")
    errors: list[FieldError] | None = Field(description="The rules that a skipped item broke.")
    links: ItemLinks | None


class BatchLinks(BaseModel):
    """Where more is to be found."""

    self: str
    tasks: str = Field(description="The tasks that this batch has started.")
    web_ui: str = Field(description="The batch in the Temporal Web UI.")


class BatchSummary(BaseModel):
    """A batch as lists show it."""

    batch_id: str
    status: BatchStatus
    is_terminal: bool
    cancel_requested: CancelMode | None
    counts: dict[TaskStatus, int] = Field(
        description="Accepted items in each state. In a list, open ones count as QUEUED: only their tasks know better."
    )
    rejected: int = Field(description="Items that broke rules and were skipped.")
    parallelism: int = Field(description="Items that are open at a time.")
    retry_of: str | None
    created_at: UtcTime
    updated_at: UtcTime
    finished_at: UtcTime | None
    gpu_seconds: float
    error_code: str | None = Field(description="Why the rest was canceled, when nobody asked for it.")
    links: BatchLinks


class Batch(BatchSummary):
    """A batch as it stands, item by item, with its callback."""

    items: list[BatchItem]
    callback_status: CallbackStatus | None
    callback_attempts: int | None


class BatchQuery(BaseModel):
    """Which page of batches to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(min_length=1, max_length=2_000)] | None = None


class BatchList(BaseModel):
    """One page of batches: open ones by newest start, then ended ones by newest end."""

    items: list[BatchSummary]
    next_cursor: str | None
