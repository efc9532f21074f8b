"""Answers that are in memory already: polling for a task that has ended costs a look-up, not a route.

Sits behind the request guard and in front of FastAPI. What it cannot answer at once, whatever the reason, goes on to
the routes, which say the same, only slower.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth import KEY_ID, caller_of
from api.byte_ranges import etag_matches
from api.middleware import UNLOGGED
from api.problems import GatewayError
from api.readings import TASK_ID_LENGTH, Reading
from api.request_guard import GUARDED_KEY
from api.request_metrics import ROUTE
from api.state import Gateway

_PREFIX: Final = "/api/v1/tasks/"
_ROUTE: Final = "/api/v1/tasks/{task_id}"
_PATH_LENGTH: Final = len(_PREFIX) + TASK_ID_LENGTH


class KnownAnswers:
    """Answers `GET /api/v1/tasks/{id}` of ended tasks from memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reading = _known(scope)
        if reading is None:
            await self._app(scope, receive, send)
            return
        scope[UNLOGGED] = True
        scope[ROUTE] = _ROUTE
        unchanged = etag_matches(_if_none_match(scope), reading.etag)
        status = HTTPStatus.NOT_MODIFIED if unchanged else HTTPStatus.OK
        headers = reading.validator_headers if unchanged else reading.full_headers
        await send({"type": "http.response.start", "status": int(status), "headers": list(headers)})
        await send({"type": "http.response.body", "body": b"" if unchanged else reading.body})


def _known(scope: Scope) -> Reading | None:
    key = scope.get(GUARDED_KEY)
    if key is None or scope["method"] != "GET":
        return None
    path: str = scope["path"]
    if len(path) != _PATH_LENGTH or not path.startswith(_PREFIX):
        return None
    gateway: Gateway = scope["state"]["gateway"]
    try:
        caller = caller_of(Request(scope), key)
        reading = gateway.readings.remembered(caller, path[len(_PREFIX) :])
    except GatewayError:
        return None
    scope[KEY_ID] = key.key_id
    return reading


def _if_none_match(scope: Scope) -> str | None:
    values = [value for name, value in scope["headers"] if name == b"if-none-match"]
    return b", ".join(values).decode("latin-1") if values else None
