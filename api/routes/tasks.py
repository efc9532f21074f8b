"""`/tasks`: submit, read, list, cancel."""

from __future__ import annotations

import re
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Header, Path, Query, Response

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute
from api.byte_ranges import etag_matches
from api.problems import (
    AdmissionUnavailableError,
    BodyTooLargeError,
    ControlUnavailableError,
    ForbiddenError,
    IdempotencyKeyReusedError,
    InternalError,
    MalformedJsonError,
    PriorityNotAllowedError,
    QueueFullError,
    QuotaExhaustedError,
    RateLimitedError,
    StorageUnavailableError,
    TaskNotFoundError,
    TaskTerminalError,
    TemporalUnavailableError,
    TooManyPendingTasksError,
    UnauthenticatedError,
    UnknownModelError,
    UnsupportedMediaTypeError,
    ValidationFailedError,
    problem_responses,
)
from api.readings import CACHE_CONTROL, Reading
from api.schemas import Cancel, Submit, Task, TaskList, TaskQuery
from api.state import AppGateway

MAX_KEY_LENGTH: Final = 255

_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_WAIT = re.compile(r"\s*wait\s*=\s*\"?(\d{1,6})\"?\s*", re.IGNORECASE)
REPLAYED: Final = "Idempotency-Replayed"

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
    prefix="/api/v1/tasks", tags=["tasks"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)

TaskId = Annotated[str, Path(max_length=128, description="The id that POST /tasks answered.")]
UserId = Annotated[
    str | None, Header(alias="X-User-Id", description="The end user for whom a service key acts, 1 to 64 bytes.")
]

_TASK_HEADERS: Final = {
    "ETag": {"schema": {"type": "string"}},
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until it is worth asking again."},
}
_SUBMIT_HEADERS: Final = {"Location": {"schema": {"type": "string"}}, **_TASK_HEADERS}


@router.post(
    "",
    summary="Submit a task",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Task,
    responses={
        HTTPStatus.OK: {
            "model": Task,
            "description": "A task that existed already answers; `Idempotency-Replayed: true`.",
            "headers": {**_SUBMIT_HEADERS, REPLAYED: {"schema": {"type": "string", "enum": ["true"]}}},
        },
        HTTPStatus.ACCEPTED: {"description": "The task is durable.", "headers": _SUBMIT_HEADERS},
        **problem_responses(
            *_ANY_ROUTE,
            *_WITH_BODY,
            UnknownModelError,
            IdempotencyKeyReusedError,
            PriorityNotAllowedError,
            TooManyPendingTasksError,
            QuotaExhaustedError,
            QueueFullError,
            AdmissionUnavailableError,
            ControlUnavailableError,
            StorageUnavailableError,
        ),
    },
)
async def submit(
    body: Submit,
    caller: AnyCaller,
    gateway: AppGateway,
    _user: UserId = None,
    idempotency_key: Annotated[
        str | None,
        Header(description=f"1 to {MAX_KEY_LENGTH} visible ASCII characters; the same key finds the same task."),
    ] = None,
    prefer: Annotated[
        str | None, Header(description="`wait=n`: answer when the task ended, or after n seconds.")
    ] = None,
) -> Response:
    """Answer at once with the task, or after it ended when the client prefers to wait."""
    submitted = await gateway.submissions.submit(caller, body, checked_key(idempotency_key))
    reading = await gateway.readings.of(submitted.job)
    headers = {"Location": reading.task.links.self}
    if submitted.replayed:
        headers[REPLAYED] = "true"
    seconds = min(_seconds_to_wait(prefer), gateway.settings.max_wait_seconds)
    if seconds > 0:
        headers["Preference-Applied"] = f"wait={seconds}"
        if not reading.task.is_terminal:
            await gateway.jobs.wait_closed(reading.task.task_id, timedelta(seconds=seconds))
            reading = await gateway.readings.task(caller, reading.task.task_id)
    return answer(reading, HTTPStatus.OK if submitted.replayed else HTTPStatus.ACCEPTED, headers)


@router.get(
    "",
    summary="List your tasks",
    response_model=TaskList,
    responses=problem_responses(*_ANY_ROUTE),
)
async def list_tasks(
    wanted: Annotated[TaskQuery, Query()], caller: AnyCaller, gateway: AppGateway, _user: UserId = None
) -> TaskList:
    """Open tasks by newest start, then ended ones by newest end; a new task appears after a moment."""
    return await gateway.listing.page(caller, wanted)


@router.get(
    "/{task_id}",
    summary="Read a task",
    response_model=Task,
    responses={
        HTTPStatus.OK: {"headers": _TASK_HEADERS},
        HTTPStatus.NOT_MODIFIED: {"description": "It has not changed since `If-None-Match`.", "headers": _TASK_HEADERS},
        **problem_responses(*_ANY_ROUTE, TaskNotFoundError),
    },
)
async def read_task(
    task_id: TaskId,
    caller: AnyCaller,
    gateway: AppGateway,
    _user: UserId = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Needs no worker, and for an ended task not even Temporal."""
    return _read(await gateway.readings.task(caller, task_id), if_none_match)


@router.post(
    "/{task_id}/cancel",
    summary="Cancel a task",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Task,
    responses={
        HTTPStatus.OK: {"model": Task, "description": "It had ended as CANCELED already.", "headers": _TASK_HEADERS},
        HTTPStatus.ACCEPTED: {"description": "The cancel is under way, or done.", "headers": _TASK_HEADERS},
        **problem_responses(*_ANY_ROUTE, *_WITH_BODY, TaskNotFoundError, TaskTerminalError, ControlUnavailableError),
    },
)
async def cancel_task(
    task_id: TaskId,
    caller: AnyCaller,
    gateway: AppGateway,
    body: Cancel | None = None,
    _user: UserId = None,
) -> Response:
    """Soft: the task reads CANCELED and its generation ends in the background. Hard: the GPU stops within a step."""
    reading, done = await gateway.actions.cancel(caller, task_id, (body or Cancel()).mode)
    return answer(reading, HTTPStatus.ACCEPTED if done else HTTPStatus.OK, {})


def _read(reading: Reading, if_none_match: str | None) -> Response:
    if etag_matches(if_none_match, reading.etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=_headers(reading))
    return answer(reading, HTTPStatus.OK, {})


def _headers(reading: Reading) -> dict[str, str]:
    headers = {"ETag": reading.etag, "Cache-Control": CACHE_CONTROL}
    if reading.retry_after_seconds is not None:
        headers["Retry-After"] = str(reading.retry_after_seconds)
    return headers


def answer(reading: Reading, status: HTTPStatus, headers: dict[str, str]) -> Response:
    """A task as a response, with validator and polling advice."""
    return Response(
        reading.body, status_code=status, media_type="application/json", headers={**_headers(reading), **headers}
    )


def checked_key(value: str | None) -> str | None:
    """The client's idempotency key.

    Raises:
        ValidationFailedError: it is not one.
    """
    if value is None:
        return None
    if len(value) > MAX_KEY_LENGTH or not _KEY.fullmatch(value):
        raise ValidationFailedError.of(
            "Idempotency-Key", "idempotency_key", f"must be 1 to {MAX_KEY_LENGTH} visible ASCII characters"
        )
    return value


def _seconds_to_wait(prefer: str | None) -> int:
    """The `wait` preference; other preferences, and what does not parse, are ignored as RFC 7240 asks."""
    for preference in (prefer or "").split(","):
        match = _WAIT.fullmatch(preference.partition(";")[0])
        if match:
            return int(match[1])
    return 0
