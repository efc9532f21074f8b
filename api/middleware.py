"""What every request passes: an id, a log line, security headers, and a bound on its body. Plain ASGI, no copies."""

from __future__ import annotations

import logging
import re
import time
from secrets import token_hex
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import BodyTooLargeError, InternalError
from workers.telemetry import REDACTED

REQUEST_ID_HEADER: Final = "X-Request-Id"
SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""Set where a response does not say otherwise."""

_REQUEST_ID_HEADER: Final = REQUEST_ID_HEADER.lower().encode()
_REQUEST_ID: Final = "reelgate.request_id"
UNLOGGED: Final = "reelgate.unlogged"
"""Set in the scope of a request that is worth a line in the debug log only."""
_USABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CODEC_TOKEN = re.compile(r"/api/v1/codec/(?!decode\Z).*", re.DOTALL)
_DOCS: Final = "/docs"
_DOCS_POLICY: Final = (
    b"default-src 'none'; script-src https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/ 'unsafe-inline'; "
    b"style-src https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/ 'unsafe-inline'; "
    b"img-src 'self' data: https://fastapi.tiangolo.com/img/; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page has a script of its own and takes the rest from there. Keys are entered in it: it may talk to us only."""
_QUIET: Final = ("/healthz", "/readyz", "/metrics")
_SERVER_ERROR: Final = 500

_ACCESS_LOG: Final = logging.getLogger("api.access")
_log = structlog.stdlib.get_logger(_ACCESS_LOG.name)


def logged_path(path: str) -> str:
    """A path as it may be written down."""
    return _CODEC_TOKEN.sub(f"/api/v1/codec/{REDACTED}/decode", path)


def header(scope: Scope, name: bytes) -> str:
    """A header of a request, without the objects that frameworks make of all of them; "" when it is not there."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return ""


def request_id(scope: Scope) -> str | None:
    """The id that `RequestContext` gave a request."""
    value = scope.get(_REQUEST_ID)
    return value if isinstance(value, str) else None


class RequestContext:
    """Names each request, logs it in one line, adds security headers and answers what nobody else caught.

    The line has the path without its query, where signatures of links are, and without the codec's token.
    """

    def __init__(self, app: ASGIApp, *, https: bool) -> None:
        self._app = app
        headers = dict(SECURITY_HEADERS)
        if https:
            headers["Strict-Transport-Security"] = "max-age=31536000"
        # As they go over the wire: this is done for every response.
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, _REQUEST_ID_HEADER)
        name = given if _USABLE_ID.fullmatch(given) else token_hex(16)
        scope[_REQUEST_ID] = name
        started_at, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(message, scope["path"], name)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=name):
            try:
                await self._app(scope, receive, send_with_headers)
            except Exception:
                _log.exception("request_failed", method=scope["method"], path=logged_path(scope["path"]))
                if status:
                    # Half an answer is out: only a broken connection tells the client.
                    raise
                await InternalError(name).response()(scope, receive, send_with_headers)
            finally:
                self._log_request(scope, int(status), time.perf_counter() - started_at)

    def _log_request(self, scope: Scope, status: int, seconds: float) -> None:
        quiet = (UNLOGGED in scope or scope["path"] in _QUIET) and status < _SERVER_ERROR
        if quiet and not _ACCESS_LOG.isEnabledFor(logging.DEBUG):
            return
        log = _log.debug if quiet else _log.info
        log(
            "request",
            method=scope["method"],
            path=logged_path(scope["path"]),
            status=status,
            duration_ms=round(seconds * 1_000, 1),
            key_id=scope.get("reelgate.key_id"),
        )

    def _add_headers(self, message: Message, path: str, name: str) -> None:
        headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
        present = {header for header, _ in headers}
        if path.startswith(_DOCS):
            headers.append((b"content-security-policy", _DOCS_POLICY))
            present.add(b"content-security-policy")
        headers += [pair for pair in self._headers if pair[0] not in present]
        headers.append((_REQUEST_ID_HEADER, name.encode()))
        message["headers"] = headers


class BodyLimit:
    """Refuses bodies over a limit before anything parses them, by their announced length or as they come in."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = header(scope, b"content-length")
        if announced.isascii() and announced.isdigit() and int(announced) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than {self._max_bytes} bytes.")
