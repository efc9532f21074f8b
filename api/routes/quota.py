"""`/usage` for everyone, `/quota` for operators: what is held, left and used."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute, OperatorCaller
from api.problems import (
    ControlUnavailableError,
    ForbiddenError,
    InternalError,
    RateLimitedError,
    TemporalUnavailableError,
    UnauthenticatedError,
    ValidationFailedError,
    problem_responses,
)
from api.quota import reset_quota
from api.state import AppGateway
from api.usage_schemas import Quota, Usage
from workflows.tasks import User

router = APIRouter(prefix="/api/v1", tags=["usage"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI)

_PROBLEMS = problem_responses(
    UnauthenticatedError,
    ForbiddenError,
    ValidationFailedError,
    RateLimitedError,
    TemporalUnavailableError,
    ControlUnavailableError,
    InternalError,
)


class AccountQuery(BaseModel):
    """Whose account."""

    model_config = ConfigDict(extra="forbid")

    tenant: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    end_user: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    shared: bool = Field(default=False, description="The account above all end users of the tenant instead.")

    @property
    def user(self) -> User:
        """The user of the account."""
        return User(tenant=self.tenant, end_user=self.end_user or "")


@router.get("/usage", summary="What you hold, have left and have used", responses=_PROBLEMS)
async def usage(
    caller: AnyCaller, gateway: AppGateway, _user: Annotated[str | None, Header(alias="X-User-Id")] = None
) -> Usage:
    """Unfinished tasks, submissions left, allowance and GPU seconds."""
    return await gateway.usage.of(caller)


@router.get("/quota", summary="Show a user's account (operators)", responses=_PROBLEMS)
async def show_quota(
    wanted: Annotated[AccountQuery, Query()],
    _operator: OperatorCaller,
    gateway: AppGateway,
    _user: Annotated[str | None, Header(alias="X-User-Id")] = None,
) -> Quota:
    """As the admission keeps it; its limits are those of the key that is used."""
    return await gateway.usage.quota(wanted.user, shared=wanted.shared)


@router.post(
    "/quota/reset",
    summary="Reset a user's account (operators)",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=_PROBLEMS,
)
async def reset(
    wanted: Annotated[AccountQuery, Query()],
    _operator: OperatorCaller,
    gateway: AppGateway,
    _user: Annotated[str | None, Header(alias="X-User-Id")] = None,
) -> None:
    """Fill the bucket, forget the used amount and count the running tasks again, once a control worker runs."""
    await reset_quota(gateway.client, wanted.user, tenant=wanted.shared)
