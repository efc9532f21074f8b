"""`/redrive`: running dead letters again, for operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header

from api.auth import DECLARED_IN_OPENAPI, AuthenticatedRoute, OperatorCaller
from api.problems import (
    BodyTooLargeError,
    ForbiddenError,
    InternalError,
    MalformedJsonError,
    RateLimitedError,
    TemporalUnavailableError,
    UnauthenticatedError,
    UnsupportedMediaTypeError,
    ValidationFailedError,
    problem_responses,
)
from api.redrive_schemas import Redrive, RedrivePage
from api.state import AppGateway

router = APIRouter(
    prefix="/api/v1", tags=["operation"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)

UserId = Annotated[str | None, Header(alias="X-User-Id")]


@router.post(
    "/redrive",
    summary="Run tasks again that ended without a clip",
    response_model=RedrivePage,
    responses=problem_responses(
        UnauthenticatedError,
        ForbiddenError,
        ValidationFailedError,
        MalformedJsonError,
        UnsupportedMediaTypeError,
        BodyTooLargeError,
        RateLimitedError,
        TemporalUnavailableError,
        InternalError,
    ),
)
async def redrive(body: Redrive, operator: OperatorCaller, gateway: AppGateway, _user: UserId = None) -> RedrivePage:
    """One page at a time, a dry run unless told otherwise. Needs a key of scope operator; tasks of all users.

    New tasks carry `retry_of` and take no place of their owners. Repeating a page starts nothing twice.
    """
    return await gateway.redrive.page(operator, body)
