"""`/tasks/{id}`: retry, delete, timeline."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Header, Path, Response

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute
from api.problems import (
    AdmissionUnavailableError,
    ForbiddenError,
    InternalError,
    QueueFullError,
    QuotaExhaustedError,
    RateLimitedError,
    StorageUnavailableError,
    TaskNotFoundError,
    TaskNotTerminalError,
    TaskTerminalError,
    TemporalUnavailableError,
    TooManyPendingTasksError,
    UnauthenticatedError,
    UnknownModelError,
    ValidationFailedError,
    problem_responses,
)
from api.routes.tasks import REPLAYED, answer
from api.schemas import Task
from api.state import AppGateway
from api.timeline_schemas import TaskTimeline

_ANY_ROUTE: Final = (
    UnauthenticatedError,
    ForbiddenError,
    ValidationFailedError,
    TaskNotFoundError,
    RateLimitedError,
    TemporalUnavailableError,
    InternalError,
)
_LOCATION: Final = {"Location": {"schema": {"type": "string"}}}

router = APIRouter(
    prefix="/api/v1/tasks", tags=["tasks"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)

TaskId = Annotated[str, Path(max_length=128, description="The id that POST /tasks answered.")]
UserId = Annotated[
    str | None, Header(alias="X-User-Id", description="The end user for whom a service key acts, 1 to 64 bytes.")
]


@router.post(
    "/{task_id}/retry",
    summary="Run an ended task again",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Task,
    responses={
        HTTPStatus.OK: {
            "model": Task,
            "description": "What was started after it already answers; `Idempotency-Replayed: true`.",
            "headers": {**_LOCATION, REPLAYED: {"schema": {"type": "string", "enum": ["true"]}}},
        },
        HTTPStatus.ACCEPTED: {"description": "The new task is durable.", "headers": _LOCATION},
        **problem_responses(
            *_ANY_ROUTE,
            UnknownModelError,
            TaskTerminalError,
            TaskNotTerminalError,
            TooManyPendingTasksError,
            QuotaExhaustedError,
            QueueFullError,
            AdmissionUnavailableError,
        ),
    },
)
async def retry_task(task_id: TaskId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> Response:
    """A new task with the same parameters, seed and limits, and `retry_of`. Parallel retries start one."""
    submitted = await gateway.retries.retry(caller, task_id)
    reading = await gateway.readings.of(submitted.job)
    headers = {"Location": reading.task.links.self}
    if submitted.replayed:
        headers[REPLAYED] = "true"
    return answer(reading, HTTPStatus.OK if submitted.replayed else HTTPStatus.ACCEPTED, headers)


@router.delete(
    "/{task_id}",
    summary="Delete a task",
    status_code=HTTPStatus.NO_CONTENT,
    responses={
        HTTPStatus.NO_CONTENT: {"description": "Prompt, input image, clip and record are gone."},
        **problem_responses(*_ANY_ROUTE, StorageUnavailableError),
    },
)
async def delete_task(task_id: TaskId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> Response:
    """Stops the task if it runs. Its input image goes even if another task of yours names it."""
    await gateway.removals.remove(caller, task_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.get(
    "/{task_id}/timeline",
    summary="Read the way of a task",
    response_model=TaskTimeline,
    responses=problem_responses(*_ANY_ROUTE),
)
async def timeline(task_id: TaskId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> TaskTimeline:
    """States and attempts with their times. Needs no worker."""
    return await gateway.timelines.of(caller, task_id)
