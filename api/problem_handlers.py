"""One handler for each source of errors, so that whatever goes wrong is answered as a problem.

What is unexpected, `middleware.RequestContext` answers. FastAPI's own answers show the rejected input; ours never
do, because it may be a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from api.middleware import request_id
from api.problems import (
    BodyTooLargeError,
    FieldError,
    GatewayError,
    InternalError,
    MalformedJsonError,
    MethodNotAllowedError,
    NotFoundError,
    UnsupportedMediaTypeError,
    ValidationFailedError,
)

_MAX_ERRORS: Final = 50
_MAX_NAME_LENGTH: Final = 200
_PLACES: Final = frozenset({"body", "query", "path", "header"})

_log = structlog.stdlib.get_logger(__name__)


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every error of an application as problem+json."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


def validation_problem(errors: Sequence[Mapping[str, Any]]) -> GatewayError:
    """The problem for pydantic's errors: fields, rules and messages, never the values sent."""
    named = [field_error(error) for error in errors[:_MAX_ERRORS]]
    names = ", ".join(dict.fromkeys(error.field for error in named))
    return ValidationFailedError(f"These fields break rules: {names}.", errors=named)


async def _gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)  # noqa: S101 - what the registration says, for the type checker
    return error.response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
    errors = error.errors()
    if any(entry["type"] == "json_invalid" for entry in errors):
        position = next(entry["loc"][-1] for entry in errors if entry["type"] == "json_invalid")
        return MalformedJsonError(f"The body is not valid JSON (at character {position}).").response()
    if any(tuple(entry["loc"]) == ("body",) and entry["type"] != "missing" for entry in errors) and not _is_json(
        request
    ):
        return UnsupportedMediaTypeError("Send the body with `Content-Type: application/json`.").response()
    return validation_problem(errors).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    if isinstance(error.__cause__, BodyTooLargeError):
        return error.__cause__.response()
    match error.status_code:
        case 400:
            return MalformedJsonError("The body is not valid JSON in UTF-8.").response()
        case 404:
            return NotFoundError("There is no such resource.").response()
        case 405:
            allowed = ", ".join(sorted(_methods(request)))
            return MethodNotAllowedError(f"Offered here: {allowed}.", headers={"Allow": allowed}).response()
        case _:
            _log.error("unexpected_http_error", status=error.status_code, request_id=request_id(request.scope))
            return InternalError(request_id(request.scope)).response()


def _methods(request: Request) -> set[str]:
    """The methods of all routes with this path; the framework would name those of the first."""
    routes = iter_route_contexts(request.app.routes)
    matching = [route for route in routes if route.path and compile_path(route.path)[0].match(request.url.path)]
    return {method for route in matching for method in route.methods or ()}


def _is_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type.startswith("application/") and media_type.endswith(("/json", "+json"))


def field_error(error: Mapping[str, Any]) -> FieldError:
    """One of pydantic's errors: field, rule and message, never the value sent."""
    first, *rest = error["loc"] or ("body",)
    place = rest if first in _PLACES else [first, *rest]
    blamed = error.get("ctx", {}).get("field")
    field = str(blamed) if blamed else ".".join(map(str, place)) or "body"
    return FieldError(field=_printable(field), rule=str(error["type"]), message=_printable(str(error["msg"])))


def _printable(text: str) -> str:
    # The name of an unknown field is the client's: it may hold lone surrogates or be very long.
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")[:_MAX_NAME_LENGTH]
