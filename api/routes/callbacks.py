"""`/tasks/{id}/callback` and `/callbacks`: what was delivered, and sending it again."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Header, Path

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute
from api.callback_schemas import (
    CallbackAttempt,
    CallbackRedelivery,
    CallbackTest,
    CallbackTestResult,
    RedeliverRange,
    RedeliveryPage,
    TaskCallback,
    delivery_fields,
)
from api.deliveries import DeliveryState
from api.problems import (
    BodyTooLargeError,
    CallbackNotFoundError,
    ControlUnavailableError,
    ForbiddenError,
    InternalError,
    MalformedJsonError,
    RateLimitedError,
    TaskNotFoundError,
    TaskNotTerminalError,
    TemporalUnavailableError,
    UnauthenticatedError,
    UnsupportedMediaTypeError,
    ValidationFailedError,
    problem_responses,
)
from api.state import AppGateway
from workflows.tasks import CallbackStatus

_ANY_ROUTE: Final = (
    UnauthenticatedError,
    ForbiddenError,
    ValidationFailedError,
    RateLimitedError,
    TemporalUnavailableError,
    InternalError,
)
_WITH_BODY: Final = (MalformedJsonError, UnsupportedMediaTypeError, BodyTooLargeError)

router = APIRouter(
    prefix="/api/v1", tags=["callbacks"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)

TaskId = Annotated[str, Path(max_length=128, description="The id that POST /tasks answered.")]
UserId = Annotated[
    str | None, Header(alias="X-User-Id", description="The end user for whom a service key acts, 1 to 64 bytes.")
]


@router.get(
    "/tasks/{task_id}/callback",
    summary="Read the callback of a task",
    response_model=TaskCallback,
    responses=problem_responses(*_ANY_ROUTE, TaskNotFoundError, CallbackNotFoundError),
)
async def read_callback(task_id: TaskId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> TaskCallback:
    """Every delivery with its attempts and the body as it was sent."""
    return shown(await gateway.deliveries.read(caller, task_id))


@router.post(
    "/tasks/{task_id}/callback/redeliver",
    summary="Send the callback of a task again",
    status_code=HTTPStatus.ACCEPTED,
    response_model=TaskCallback,
    responses=problem_responses(*_ANY_ROUTE, TaskNotFoundError, CallbackNotFoundError, TaskNotTerminalError),
)
async def redeliver(task_id: TaskId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> TaskCallback:
    """Under the same `webhook-id`, so that receivers can tell. An open delivery is not doubled: it tries at once."""
    return shown(await gateway.deliveries.redeliver(caller, task_id))


@router.post(
    "/callbacks/redeliver",
    summary="Send the callbacks of a time range again",
    response_model=RedeliveryPage,
    responses=problem_responses(*_ANY_ROUTE, *_WITH_BODY),
)
async def redeliver_range(
    body: RedeliverRange, caller: AnyCaller, gateway: AppGateway, _user: UserId = None
) -> RedeliveryPage:
    """One page at a time, a dry run unless told otherwise. A service key without `X-User-Id` acts for its tenant."""
    return await gateway.range_redelivery.page(caller, body)


@router.post(
    "/callbacks/test",
    summary="Send a signed sample",
    response_model=CallbackTestResult,
    responses=problem_responses(*_ANY_ROUTE, *_WITH_BODY, ControlUnavailableError),
)
async def send_sample(
    body: CallbackTest, caller: AnyCaller, gateway: AppGateway, _user: UserId = None
) -> CallbackTestResult:
    """One attempt, made by a callback worker exactly as those of tasks are. `type` of the body is `callback.test`."""
    record = await gateway.deliveries.test(caller, body.url)
    delivered = record.status is CallbackStatus.SUCCEEDED
    return CallbackTestResult(
        status=CallbackStatus.SUCCEEDED if delivered else CallbackStatus.FAILED,
        body=record.body,
        attempt=CallbackAttempt.of(record.attempts[-1]),
    )


def shown(deliveries: list[DeliveryState]) -> TaskCallback:
    """The deliveries of a task or batch as clients see them."""
    first, *later = deliveries
    redeliveries = [
        CallbackRedelivery.model_validate(
            {**delivery_fields(state.record), "number": state.number, "started_at": state.started_at}
        )
        for state in later
    ]
    return TaskCallback.model_validate({**delivery_fields(first.record), "redeliveries": redeliveries})
