"""`/tasks/{id}/video` and `/poster`: the published files, with byte ranges.

Who has a signed link needs no key. A store that can sign its own URLs serves the bytes itself (307); otherwise they
pass through here piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from activities.storage import StoreUnavailableError
from api.auth import DECLARED_IN_OPENAPI, KEY_ID, authenticated
from api.byte_ranges import UnsatisfiableRangeError, etag_matches, parse_range
from api.problems import (
    ForbiddenError,
    InternalError,
    RangeNotSatisfiableError,
    RateLimitedError,
    ResultExpiredError,
    ResultNotFoundError,
    StorageUnavailableError,
    TaskNotFoundError,
    TaskNotTerminalError,
    TemporalUnavailableError,
    UnauthenticatedError,
    ValidationFailedError,
    problem_responses,
)
from api.readings import Reading
from api.state import AppGateway, Gateway
from workers.links import ArtifactKind
from workflows.tasks import Artifact

REDIRECT_EXPIRES_IN: Final = timedelta(minutes=15)

_MEDIA_TYPES: Final = {
    ".mp4": "video/mp4",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
}
_CONTENT_POLICY: Final = "default-src 'none'; media-src 'self'; img-src 'self'; style-src 'unsafe-inline'"
_LINK_OR_KEY: Final[dict[str, Any]] = {"security": [{}]}
"""In OpenAPI: the key is one way in, no key at all the other."""
_BEGINNING: Final = datetime.fromtimestamp(0, UTC)

router = APIRouter(prefix="/api/v1/tasks/{task_id}", tags=["results"], dependencies=DECLARED_IN_OPENAPI)

TaskId = Annotated[str, Path(max_length=128)]
Expiry = Annotated[str | None, Query(max_length=32, description="From a signed link.")]
Signature = Annotated[str | None, Query(max_length=128, description="From a signed link.")]
UserId = Annotated[str | None, Header(alias="X-User-Id")]


def _responses(media_type: str) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {
        HTTPStatus.OK: {"description": "The file.", "content": content},
        HTTPStatus.PARTIAL_CONTENT: {"description": "The range asked for.", "content": content},
        HTTPStatus.NOT_MODIFIED: {"description": "It has not changed."},
        HTTPStatus.TEMPORARY_REDIRECT: {"description": "The store serves it under a URL that expires soon."},
        **problem_responses(
            UnauthenticatedError,
            ForbiddenError,
            ValidationFailedError,
            TaskNotFoundError,
            TaskNotTerminalError,
            ResultNotFoundError,
            ResultExpiredError,
            RangeNotSatisfiableError,
            RateLimitedError,
            TemporalUnavailableError,
            StorageUnavailableError,
            InternalError,
        ),
    }


@router.head("/video", include_in_schema=False)
@router.get(
    "/video",
    summary="Get the clip",
    response_class=Response,
    responses=_responses("video/mp4"),
    openapi_extra=_LINK_OR_KEY,
)
async def video(
    request: Request,
    gateway: AppGateway,
    task_id: TaskId,
    exp: Expiry = None,
    sig: Signature = None,
    _user: UserId = None,
) -> Response:
    """MP4 (H.264); byte ranges are served."""
    return await _serve(request, gateway, _Asked(task_id=task_id, kind="video", exp=exp, sig=sig))


@router.head("/poster", include_in_schema=False)
@router.get(
    "/poster",
    summary="Get the poster image",
    response_class=Response,
    responses=_responses("image/webp"),
    openapi_extra=_LINK_OR_KEY,
)
async def poster(
    request: Request,
    gateway: AppGateway,
    task_id: TaskId,
    exp: Expiry = None,
    sig: Signature = None,
    _user: UserId = None,
) -> Response:
    """One frame of the clip."""
    return await _serve(request, gateway, _Asked(task_id=task_id, kind="poster", exp=exp, sig=sig))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is asked for, and the parts of a signed link."""

    task_id: str
    kind: ArtifactKind
    exp: str | None
    sig: str | None


@dataclass(frozen=True, kw_only=True)
class _File:
    """One published file."""

    key: str
    size: int
    etag: str
    modified_at: datetime
    name: str

    @property
    def media_type(self) -> str:
        return _MEDIA_TYPES.get(PurePosixPath(self.key).suffix, "application/octet-stream")

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Accept-Ranges": "bytes",
            "ETag": self.etag,
            "Last-Modified": format_datetime(self.modified_at, usegmt=True),
            "Cache-Control": "private, no-cache",
            "Content-Disposition": f'inline; filename="{self.name}"',
            "Content-Security-Policy": _CONTENT_POLICY,
            # Other sites may show a clip whose signed link they were given.
            "Cross-Origin-Resource-Policy": "cross-origin",
        }


async def _serve(request: Request, gateway: Gateway, asked: _Asked) -> Response:
    reading = await _readable(request, gateway, asked)
    file = _file(asked, _artifact(reading))
    try:
        if etag_matches(request.headers.get("if-none-match"), file.etag):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=file.headers)
        if request.method == "GET":
            url = await gateway.store.signed_url(file.key, expires_in=REDIRECT_EXPIRES_IN)
            if url is not None:
                return RedirectResponse(url, HTTPStatus.TEMPORARY_REDIRECT, headers={"Cache-Control": "no-store"})
        if await gateway.store.head(file.key) is None:
            raise ResultExpiredError("The result is no longer stored.")
    except StoreUnavailableError as error:
        raise StorageUnavailableError from error
    return _content(request, gateway, file)


def _content(request: Request, gateway: Gateway, file: _File) -> Response:
    wanted = None
    if _range_applies(request.headers.get("if-range"), file):
        try:
            wanted = parse_range(request.headers.get("range"), file.size)
        except UnsatisfiableRangeError:
            raise RangeNotSatisfiableError(
                f"The file has {file.size} bytes.", headers={"Content-Range": f"bytes */{file.size}"}
            ) from None
    headers = {**file.headers, "Content-Length": str(wanted.length if wanted else file.size)}
    status = HTTPStatus.OK
    start, end = 0, file.size
    if wanted is not None:
        status, start, end = HTTPStatus.PARTIAL_CONTENT, wanted.start, wanted.end
        headers["Content-Range"] = wanted.content_range
    if request.method == "HEAD":
        return Response(status_code=status, media_type=file.media_type, headers=headers)
    return StreamingResponse(
        gateway.store.read_range(file.key, start, end), status_code=status, media_type=file.media_type, headers=headers
    )


async def _readable(request: Request, gateway: Gateway, asked: _Asked) -> Reading:
    """The task, for its owner or for who holds a link to it."""
    if asked.exp is not None and asked.sig is not None:
        verify = partial(gateway.links.verify, asked.task_id, asked.kind, asked.exp, asked.sig)
        if verify():
            return await gateway.readings.any_task(asked.task_id)
        if verify(now=_BEGINNING):
            raise ResultExpiredError("The link has expired, and the result with it.")
        if "authorization" not in request.headers:
            raise UnauthenticatedError("The signature of the link is not valid; an owner's API key opens it too.")
    caller, _ = await authenticated(request)
    request.scope[KEY_ID] = caller.key.key_id
    return await gateway.readings.task(caller, asked.task_id)


def _artifact(reading: Reading) -> Artifact:
    record = reading.job.record
    artifact = record.artifact if record else None
    if artifact is None:
        if not reading.task.is_terminal:
            raise TaskNotTerminalError(
                f"The task is {reading.task.status}; its result is not there yet.",
                retry_after_seconds=reading.retry_after_seconds,
            )
        raise ResultNotFoundError(f"The task ended as {reading.task.status} without a result.")
    if artifact.expires_at <= datetime.now(UTC):
        raise ResultExpiredError(f"The result was kept until {artifact.expires_at:%Y-%m-%d %H:%M} UTC.")
    return artifact


def _file(asked: _Asked, artifact: Artifact) -> _File:
    if asked.kind == "video":
        key, size, digest = artifact.video_key, artifact.bytes, artifact.sha256
    else:
        key, size, digest = artifact.poster_key, artifact.poster_bytes, artifact.poster_sha256
    name = f"{asked.task_id}{PurePosixPath(key).suffix}"
    return _File(key=key, size=size, etag=f'"{digest}"', modified_at=artifact.created_at, name=name)


def _range_applies(if_range: str | None, file: _File) -> bool:
    """Whether the file is still the one of which the client has a part (strong comparison)."""
    if if_range is None:
        return True
    if if_range.startswith(('"', "W/")):
        return if_range == file.etag
    try:
        return parsedate_to_datetime(if_range) == file.modified_at.replace(microsecond=0)
    except (TypeError, ValueError):
        return False
