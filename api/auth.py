"""Who is asking: bearer keys, signed requests, and the end users that service keys name.

Authentication comes before the body is read, so that a stranger cannot make us parse megabytes. A task of another
user does not exist for the caller: the rest of the API compares users and answers 404.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPBase
from starlette.requests import Request
from starlette.responses import Response

from api.problems import ForbiddenError, UnauthenticatedError, ValidationFailedError
from api.request_signing import SCHEME
from api.signature_check import SignatureCheck, with_checked_body
from workers.keys import ApiKey, KeyRing, Scope
from workflows.tasks import User

MAX_USER_ID_BYTES: Final = 64
USER_ID_HEADER: Final = "X-User-Id"

KEY_ID: Final = "reelgate.key_id"
"""Where the request's scope has the id of the key, for the access log."""
_CALLER: Final = "reelgate.caller"

bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer <API key>`")
"""Declares the scheme in OpenAPI; the check is `AuthenticatedRoute`'s."""
signature = HTTPBase(
    scheme=SCHEME,
    scheme_name="RequestSignature",
    auto_error=False,
    description=f"`Authorization: {SCHEME} key=...,timestamp=...,nonce=...,body=...,signature=...`",
)
"""The other way in."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """An authenticated caller."""

    key: ApiKey
    end_user: str | None = None

    @property
    def user(self) -> User:
        """Whose tasks the caller's are: the tenant itself for a user key, the named end user for a service key.

        Raises:
            ValidationFailedError: a service key names no end user.
        """
        if self.key.scope is Scope.SERVICE and self.end_user is None:
            raise ValidationFailedError.of(USER_ID_HEADER, "missing", "a service key names its end user in this header")
        return User(tenant=self.key.tenant, end_user=self.end_user or "")


async def authenticated(request: Request) -> tuple[Caller, Request]:
    """The caller of a request, and the request itself: a signed one with its body read and checked.

    Raises:
        UnauthenticatedError: no key, an unknown or expired one, or a signature that does not hold.
        ForbiddenError: a user key names an end user.
        ValidationFailedError: the end user's id is not 1 to 64 bytes of UTF-8.
    """
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.upper() == SCHEME:
        checks: SignatureCheck = request.state.signatures
        signed = checks.signed(request.scope, credentials)
        caller = caller_of(request, checks.use(signed))
        return caller, await with_checked_body(request, signed.signature)
    if scheme.lower() != "bearer" or not credentials.strip():
        raise UnauthenticatedError("Send `Authorization: Bearer <API key>`, or sign the request.")
    keys: KeyRing = request.state.keys
    key = keys.authenticate(credentials.strip())
    if key is None:
        raise UnauthenticatedError("The API key is unknown, expired or revoked.")
    return caller_of(request, key), request


def caller_of(request: Request, key: ApiKey) -> Caller:
    """The caller behind a live key.

    Raises:
        ForbiddenError: a user key names an end user.
        ValidationFailedError: the end user's id is not 1 to 64 bytes of UTF-8.
    """
    end_user = _end_user(request)
    if end_user is not None and not key.scope.includes(Scope.SERVICE):
        raise ForbiddenError(f"Only service keys act for end users ({USER_ID_HEADER}).")
    return Caller(key=key, end_user=end_user)


def _end_user(request: Request) -> str | None:
    values = request.headers.getlist(USER_ID_HEADER)
    if not values:
        return None
    try:
        # Header values come as Latin-1; the bytes are the id.
        end_user = values[0].encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise ValidationFailedError.of(USER_ID_HEADER, "utf8", "must be UTF-8") from None
    if len(values) > 1 or not end_user or len(values[0]) > MAX_USER_ID_BYTES:
        raise ValidationFailedError.of(USER_ID_HEADER, "length", f"must be one id of 1 to {MAX_USER_ID_BYTES} bytes")
    return end_user


class AuthenticatedRoute(APIRoute):
    """A route that knows its caller before FastAPI reads the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the check."""
        handle = super().get_route_handler()

        async def handle_authenticated(request: Request) -> Response:
            caller, checked = await authenticated(request)
            request.scope[_CALLER], request.scope[KEY_ID] = caller, caller.key.key_id
            return await handle(checked)

        return handle_authenticated


async def current_caller(request: Request) -> Caller:
    """The caller that `AuthenticatedRoute` found."""
    return cast(Caller, request.scope[_CALLER])


async def current_operator(request: Request) -> Caller:
    """The caller, if it is an operator.

    Raises:
        ForbiddenError: it is not.
    """
    caller = await current_caller(request)
    if not caller.key.scope.includes(Scope.OPERATOR):
        raise ForbiddenError("This needs a key of scope operator.")
    return caller


AnyCaller = Annotated[Caller, Depends(current_caller)]
OperatorCaller = Annotated[Caller, Depends(current_operator)]
DECLARED_IN_OPENAPI: Final = [Security(bearer), Security(signature)]
