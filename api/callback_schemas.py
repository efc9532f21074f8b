"""Wire shapes of callbacks: what was delivered, what is sent again, and the sample of a test."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from api.schemas import Url, UtcTime, rfc3339
from workflows.tasks import CallbackRecord, CallbackStatus, DeliveryAttempt

MAX_PAGE = 100


class CallbackAttempt(BaseModel):
    """One HTTP attempt."""

    number: int
    started_at: UtcTime
    duration_ms: int
    status_code: int | None
    error_code: str | None
    reply: str | None = Field(description="First 2 KB of the reply.")
    webhook_id: str | None = Field(description="Id of the merged request it travelled in; null: its own.")

    @classmethod
    def of(cls, attempt: DeliveryAttempt) -> Self:
        """The attempt as clients see it."""
        return cls(
            number=attempt.number,
            started_at=attempt.started_at,
            duration_ms=attempt.duration_ms,
            status_code=attempt.status_code,
            error_code=attempt.error_code,
            reply=attempt.reply,
            webhook_id=attempt.webhook_id,
        )


class CallbackDelivery(BaseModel):
    """One delivery of the terminal event, with the attempts made for it."""

    status: CallbackStatus
    url: str
    next_attempt_at: UtcTime | None
    body: str | None = Field(description="What was sent, as sent; null: nothing has been yet.")
    attempts: list[CallbackAttempt]


class CallbackRedelivery(CallbackDelivery):
    """A delivery that was asked for."""

    number: int = Field(description="From 1.")
    started_at: UtcTime


class TaskCallback(CallbackDelivery):
    """The delivery that the end of the task or batch started, and every later one."""

    redeliveries: list[CallbackRedelivery]


class CallbackTest(BaseModel):
    """Where to send a sample."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    url: Url


class CallbackTestResult(BaseModel):
    """What became of the sample."""

    status: Literal[CallbackStatus.SUCCEEDED, CallbackStatus.FAILED]
    body: str | None
    attempt: CallbackAttempt


AskedTime = Annotated[AwareDatetime, BeforeValidator(rfc3339), Field(strict=False)]


class RedeliverRange(BaseModel):
    """Which callbacks to send again: those of tasks and batches that ended in a time."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    since: AskedTime = Field(description="Inclusive.")
    until: AskedTime | None = Field(default=None, description="Exclusive; the default is now.")
    status: Literal["undelivered", "failed", "all"] = Field(
        default="undelivered",
        description="`failed`: given up; `undelivered`: those, and the ones that wait for their next attempt; "
        "`all`: delivered ones too.",
    )
    dry_run: bool = Field(default=True, description="Only say what would be done.")
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = MAX_PAGE
    cursor: Annotated[str, Field(min_length=1, max_length=2_000)] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.until is not None and self.until <= self.since:
            message = "must be later than `since`"
            raise PydanticCustomError("after_since", "{message}", {"field": "until", "message": message})
        return self


class RedeliveryItem(BaseModel):
    """One callback and what is done about it."""

    task_id: str | None = Field(description="null: it is a batch's.")
    batch_id: str | None = Field(description="null: it is a task's.")
    status: CallbackStatus = Field(description="Of its newest delivery, before anything was done.")
    action: Literal["redeliver", "retry_now"] = Field(
        description="`redeliver`: a new delivery; `retry_now`: the open one does not wait any longer."
    )


class RedeliveryPage(BaseModel):
    """One bounded part of a redelivery; go on with `next_cursor` until it is null."""

    dry_run: bool
    items: list[RedeliveryItem]
    next_cursor: str | None


def delivery_fields(record: CallbackRecord) -> dict[str, object]:
    """Fields of `CallbackDelivery`."""
    return {
        "status": record.status,
        "url": record.url,
        "next_attempt_at": record.next_attempt_at,
        "body": record.body,
        "attempts": [CallbackAttempt.of(attempt) for attempt in record.attempts],
    }
