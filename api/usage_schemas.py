"""Wire shapes of `/usage` and `/quota`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from api.schemas import UtcTime


class PlacesUsed(BaseModel):
    """Unfinished tasks."""

    limit: int
    used: int


class OwnPlacesUsed(PlacesUsed):
    """Unfinished tasks of one user."""

    task_ids: list[str] = Field(description="The tasks that hold the places, oldest first.")


class SubmissionsLeft(BaseModel):
    """The bucket that a submission takes a token from; a task that exists already costs none."""

    per_minute: float
    burst: int
    available: float = Field(description="Tokens in the bucket now; below 1 a submission is refused.")


class AmountUsed(BaseModel):
    """What ended since a time."""

    since: UtcTime
    tasks: int
    gpu_seconds: float


class Allowance(BaseModel):
    """What may be used per period; null is unlimited."""

    tasks: int | None
    gpu_seconds: float | None
    reserved_gpu_seconds: float = Field(description="Estimate for the tasks that have not ended.")
    ends_at: UtcTime = Field(description="When the period ends and the next one starts.")


class Usage(BaseModel):
    """What the caller has, may have and has used."""

    tier: str
    pending: OwnPlacesUsed
    tenant_pending: PlacesUsed | None = Field(
        description="Unfinished tasks of all end users together, where a limit is set."
    )
    submissions: SubmissionsLeft
    used: AmountUsed = Field(description="In the period of the allowance; without one, since midnight UTC.")
    allowance: Allowance | None = Field(description="Null: nothing is counted.")


class Quota(BaseModel):
    """One account as its admission keeps it."""

    tenant: str
    end_user: str | None
    shared: bool = Field(description="It is the account above all end users of the tenant.")
    pending: int
    task_ids: list[str]
    submissions_available: float | None = Field(description="Tokens in the bucket; null: it is full.")
    used: AmountUsed | None = Field(description="Null: no allowance is counted.")
