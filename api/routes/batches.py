"""`/batches`: many clips in one request, each a task of its own."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Header, Path, Query, Response

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute
from api.batch_schemas import Batch, BatchList, BatchQuery, SubmitBatch
from api.batches import BatchReading
from api.byte_ranges import etag_matches
from api.callback_schemas import TaskCallback
from api.problems import (
    AdmissionUnavailableError,
    BatchNotFoundError,
    BatchNotTerminalError,
    BatchTerminalError,
    BodyTooLargeError,
    CallbackNotFoundError,
    ForbiddenError,
    IdempotencyKeyReusedError,
    InternalError,
    MalformedJsonError,
    QueueFullError,
    QuotaExhaustedError,
    RateLimitedError,
    StorageUnavailableError,
    TemporalUnavailableError,
    TooManyPendingTasksError,
    UnauthenticatedError,
    UnsupportedMediaTypeError,
    ValidationFailedError,
    problem_responses,
)
from api.routes.callbacks import shown
from api.routes.tasks import MAX_KEY_LENGTH, REPLAYED, checked_key
from api.schemas import Cancel
from api.state import AppGateway

_ANY_ROUTE: Final = (
    UnauthenticatedError,
    ForbiddenError,
    ValidationFailedError,
    RateLimitedError,
    TemporalUnavailableError,
    StorageUnavailableError,
    InternalError,
)
_WITH_BODY: Final = (MalformedJsonError, UnsupportedMediaTypeError, BodyTooLargeError)
_REVALIDATED: Final = "private, no-cache"
_HEADERS: Final = {
    "ETag": {"schema": {"type": "string"}},
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until it is worth asking again."},
}
_SUBMIT_HEADERS: Final = {"Location": {"schema": {"type": "string"}}, **_HEADERS}

router = APIRouter(
    prefix="/api/v1/batches", tags=["batches"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)

BatchId = Annotated[str, Path(max_length=128, description="The id that POST /batches answered.")]
UserId = Annotated[
    str | None, Header(alias="X-User-Id", description="The end user for whom a service key acts, 1 to 64 bytes.")
]


@router.post(
    "",
    summary="Submit a batch",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Batch,
    responses={
        HTTPStatus.OK: {
            "model": Batch,
            "description": "A batch that existed already answers; `Idempotency-Replayed: true`.",
            "headers": {**_SUBMIT_HEADERS, REPLAYED: {"schema": {"type": "string", "enum": ["true"]}}},
        },
        HTTPStatus.ACCEPTED: {"description": "The batch is durable.", "headers": _SUBMIT_HEADERS},
        **problem_responses(
            *_ANY_ROUTE,
            *_WITH_BODY,
            IdempotencyKeyReusedError,
            TooManyPendingTasksError,
            QuotaExhaustedError,
            QueueFullError,
            AdmissionUnavailableError,
        ),
    },
)
async def submit_batch(
    body: SubmitBatch,
    caller: AnyCaller,
    gateway: AppGateway,
    _user: UserId = None,
    idempotency_key: Annotated[
        str | None,
        Header(description=f"1 to {MAX_KEY_LENGTH} visible ASCII characters; the same key finds the same batch."),
    ] = None,
) -> Response:
    """Posted again after it has ended, only the items without a clip run again."""
    submitted = await gateway.batch_submissions.submit(caller, body, checked_key(idempotency_key))
    reading = await gateway.batches.of(submitted.job)
    headers = {"Location": reading.batch.links.self}
    if submitted.replayed:
        headers[REPLAYED] = "true"
    return _answer(reading, HTTPStatus.OK if submitted.replayed else HTTPStatus.ACCEPTED, headers)


@router.get(
    "",
    summary="List your batches",
    response_model=BatchList,
    responses=problem_responses(*_ANY_ROUTE),
)
async def list_batches(
    wanted: Annotated[BatchQuery, Query()], caller: AnyCaller, gateway: AppGateway, _user: UserId = None
) -> BatchList:
    """Open batches by newest start, then ended ones by newest end; a new batch appears after a moment."""
    return await gateway.batch_listing.page(caller, wanted)


@router.get(
    "/{batch_id}",
    summary="Read a batch",
    response_model=Batch,
    responses={
        HTTPStatus.OK: {"headers": _HEADERS},
        HTTPStatus.NOT_MODIFIED: {"description": "It has not changed since `If-None-Match`.", "headers": _HEADERS},
        **problem_responses(*_ANY_ROUTE, BatchNotFoundError),
    },
)
async def read_batch(
    batch_id: BatchId,
    caller: AnyCaller,
    gateway: AppGateway,
    _user: UserId = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Counts and the state of every item; needs no worker."""
    reading = await gateway.batches.read(caller, batch_id)
    if etag_matches(if_none_match, reading.etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=_headers(reading))
    return _answer(reading, HTTPStatus.OK, {})


@router.post(
    "/{batch_id}/cancel",
    summary="Cancel the rest of a batch",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Batch,
    responses={
        HTTPStatus.OK: {"model": Batch, "description": "It had ended as CANCELED already.", "headers": _HEADERS},
        HTTPStatus.ACCEPTED: {"description": "The cancel is under way, or done.", "headers": _HEADERS},
        **problem_responses(*_ANY_ROUTE, *_WITH_BODY, BatchNotFoundError, BatchTerminalError),
    },
)
async def cancel_batch(
    batch_id: BatchId,
    caller: AnyCaller,
    gateway: AppGateway,
    body: Cancel | None = None,
    _user: UserId = None,
) -> Response:
    """Items that wait are never started; open ones are canceled softly or hard, as a single task is."""
    reading, done = await gateway.batches.cancel(caller, batch_id, (body or Cancel()).mode)
    return _answer(reading, HTTPStatus.ACCEPTED if done else HTTPStatus.OK, {})


@router.delete(
    "/{batch_id}",
    summary="Delete a batch",
    status_code=HTTPStatus.NO_CONTENT,
    responses={
        HTTPStatus.ACCEPTED: {
            "description": "It has stopped, and some of its tasks are left; ask again.",
            "headers": {"Retry-After": _HEADERS["Retry-After"]},
        },
        HTTPStatus.NO_CONTENT: {"description": "The batch is gone, with every task that it started."},
        **problem_responses(*_ANY_ROUTE, BatchNotFoundError),
    },
)
async def delete_batch(batch_id: BatchId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> Response:
    """Stops it if it runs. Clips of an earlier batch that answered here go with that batch."""
    if await gateway.batch_removals.remove(caller, batch_id):
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return Response(status_code=HTTPStatus.ACCEPTED, headers={"Retry-After": "1"})


@router.get(
    "/{batch_id}/callback",
    summary="Read the callback of a batch",
    response_model=TaskCallback,
    responses=problem_responses(*_ANY_ROUTE, BatchNotFoundError, CallbackNotFoundError),
)
async def read_callback(
    batch_id: BatchId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None
) -> TaskCallback:
    """Every delivery with its attempts and the body as it was sent."""
    return shown(await gateway.batch_callbacks.read(caller, batch_id))


@router.post(
    "/{batch_id}/callback/redeliver",
    summary="Send the callback of a batch again",
    status_code=HTTPStatus.ACCEPTED,
    response_model=TaskCallback,
    responses=problem_responses(*_ANY_ROUTE, BatchNotFoundError, CallbackNotFoundError, BatchNotTerminalError),
)
async def redeliver(batch_id: BatchId, caller: AnyCaller, gateway: AppGateway, _user: UserId = None) -> TaskCallback:
    """Under the same `webhook-id`, so that receivers can tell. An open delivery is not doubled: it tries at once."""
    return shown(await gateway.batch_callbacks.redeliver(caller, batch_id))


def _headers(reading: BatchReading) -> dict[str, str]:
    headers = {"ETag": reading.etag, "Cache-Control": _REVALIDATED}
    if reading.retry_after_seconds is not None:
        headers["Retry-After"] = str(reading.retry_after_seconds)
    return headers


def _answer(reading: BatchReading, status: HTTPStatus, headers: dict[str, str]) -> Response:
    return Response(
        reading.body, status_code=status, media_type="application/json", headers={**_headers(reading), **headers}
    )
