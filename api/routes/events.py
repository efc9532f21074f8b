"""`/tasks/{id}/events`: a task as it moves, as Server-Sent Events."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Header, Path, Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from api.auth import DECLARED_IN_OPENAPI, AnyCaller, AuthenticatedRoute
from api.event_stream import EventStream
from api.problems import (
    ForbiddenError,
    InternalError,
    RateLimitedError,
    TaskNotFoundError,
    TemporalUnavailableError,
    UnauthenticatedError,
    ValidationFailedError,
    problem_responses,
)
from api.state import AppGateway
from api.task_events import LINE_END, EventId

KEEP_ALIVE_SECONDS: Final = 15
"""Proxies cut connections that are silent for 30 to 60 s; a comment line keeps them, and finds dead clients."""
KEEP_ALIVE_COMMENT: Final = "keep-alive"
SEND_TIMEOUT_SECONDS: Final = 10.0
"""A client that does not read fills its socket's buffers. Its place is worth more than its patience."""

_DESCRIPTION: Final = """\
`event: state` for every state the task enters (data: `TaskStateEvent`), `event: progress` about once a second while
something changes (data: `TaskProgressEvent`). A new stream starts with every state so far, one with `Last-Event-ID`
with what came after. The stream ends after the state with `is_terminal`; asked again for what comes after that one,
the answer is 204. Going away cancels nothing."""

router = APIRouter(
    prefix="/api/v1/tasks", tags=["tasks"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)

_log = structlog.stdlib.get_logger(__name__)


@router.get(
    "/{task_id}/events",
    summary="Watch a task",
    description=_DESCRIPTION,
    response_class=Response,
    responses={
        HTTPStatus.OK: {
            "description": "The events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        HTTPStatus.NO_CONTENT: {"description": "The task has ended and the client has its last event."},
        **problem_responses(
            UnauthenticatedError,
            ForbiddenError,
            ValidationFailedError,
            TaskNotFoundError,
            RateLimitedError,
            TemporalUnavailableError,
            InternalError,
        ),
    },
)
async def events(
    task_id: Annotated[str, Path(max_length=128, description="The id that POST /tasks answered.")],
    caller: AnyCaller,
    gateway: AppGateway,
    last_event_id: Annotated[
        str | None, Header(alias="Last-Event-ID", description="The last event that the client has.")
    ] = None,
    _user: Annotated[str | None, Header(alias="X-User-Id")] = None,
) -> Response:
    """One upstream watch serves all clients of a task."""
    stream = await gateway.events.join(caller, task_id, EventId.parse(last_event_id))
    if stream.is_over:
        stream.leave()
        # What tells a browser's EventSource to stop coming back.
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return _EventResponse(stream)


class _EventResponse(EventSourceResponse):
    """Sends a stream until it ends, the client goes away or it stops reading; then leaves it, whatever happened."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(
            stream.frames(),
            ping=KEEP_ALIVE_SECONDS,
            ping_message_factory=lambda: ServerSentEvent(comment=KEEP_ALIVE_COMMENT, sep=LINE_END),
            sep=LINE_END,
            send_timeout=SEND_TIMEOUT_SECONDS,
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream. A generator that was never started has no `finally`, so leaving it is done here."""
        try:
            await super().__call__(scope, receive, send)
            if self.active:
                # The server stops: an end that is no failure, after which clients come back.
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SendTimeoutError:
            # Returning with half an answer closes the connection.
            _log.info("stream_cut", path=scope["path"], reason="the client does not read")
        finally:
            self._stream.leave()
